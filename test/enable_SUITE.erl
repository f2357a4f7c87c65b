%% The plugin as a user installs it, enabled and disabled while streams are used: what each finds, keeps and gives up.
-module(enable_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([
    all/0, suite/0, init_per_suite/1, end_per_suite/1, init_per_testcase/2, end_per_testcase/2
]).
-export([
    it_is_the_archive_that_runs/1,
    streams_that_were_there_before_are_uploaded_when_it_is_enabled/1,
    an_upload_resumes_where_it_was_and_nothing_is_uploaded_twice/1,
    a_restart_serves_history_and_resumes_the_upload/1,
    consumers_of_both_tiers_are_open_while_it_is_disabled/1,
    readers_are_open_while_it_is_disabled_and_enabled_five_times/1,
    nothing_went_wrong_meanwhile/1
]).

-import(stream_s3_ct_node, [rpc/4, plugins/2, enable/2, disable/2]).
-import(stream_s3_ct_tier, [counter/2, flush/3, tier/3, fragments/3, floor/2]).
-import(stream_s3_ct_client, [subscribe/4]).
-import(stream_s3_ct_records, [fill/3, read/4]).
-import(stream_s3_ct_wait, [until/2]).

-define(PLUGIN, rabbitmq_stream_s3).
%% A reader of a plugin that is off has nothing to answer. This is how long a case listens to be sure.
-define(SILENCE_MS, 1_000).

suite() ->
    [{timetrap, {minutes, 3}}].

all() ->
    [
        it_is_the_archive_that_runs,
        streams_that_were_there_before_are_uploaded_when_it_is_enabled,
        an_upload_resumes_where_it_was_and_nothing_is_uploaded_twice,
        a_restart_serves_history_and_resumes_the_upload,
        consumers_of_both_tiers_are_open_while_it_is_disabled,
        readers_are_open_while_it_is_disabled_and_enabled_five_times,
        nothing_went_wrong_meanwhile
    ].

%% The archive alone, in a plugins folder of its own: the broker unpacks it when it starts.
init_per_suite(Config) ->
    [Archive] = filelib:wildcard(
        filename:join([os:getenv("STREAM_S3_TOP"), "dist", "rabbitmq_stream_s3-*.ez"])
    ),
    Folder = filename:join(os:getenv("STREAM_S3_RUN"), "archive"),
    Copy = filename:join(Folder, filename:basename(Archive)),
    ok = filelib:ensure_dir(Copy),
    {ok, _} = file:copy(Archive, Copy),
    S3 = stream_s3_ct_s3:start("enable-suite"),
    {Name, Options} = stream_s3_ct_tier:node("enable1", S3, [{"fragment_size", "500000"}]),
    Node = stream_s3_ct_node:start(Name, Options#{env => [{"STREAM_S3_PLUGIN_DIR", Folder}]}),
    [{s3, S3}, {broker, Node} | Config].

end_per_suite(Config) ->
    ok = stream_s3_ct_node:wipe(proplists:get_value(broker, Config)),
    ok = stream_s3_ct_s3:stop(proplists:get_value(s3, Config)).

init_per_testcase(Case, Config) ->
    Node = proplists:get_value(broker, Config),
    Client = stream_s3_ct_client:open(Node),
    Stream = atom_to_binary(Case),
    ok = stream_s3_ct_client:create(
        Client, Stream, #{~"stream-max-segment-size-bytes" => ~"1000000"}
    ),
    ok = stream_s3_ct_client:close(Client),
    [{stream, Stream} | Config].

end_per_testcase(_Case, _Config) ->
    ok.

%% Cases -------------------------------------------------------------------------------------------

it_is_the_archive_that_runs(Config) ->
    {Node, _, _} = setup(Config),
    ?assertMatch(
        {match, _}, re:run(rpc(Node, code, priv_dir, [rabbitmq_stream_s3]), "plugins-expand")
    ).

streams_that_were_there_before_are_uploaded_when_it_is_enabled(Config) ->
    {Node, S3, _} = setup(Config),
    Stream = ~"there-before",
    plugins(Node, ["disable", "rabbitmq_stream_s3"]),
    stream_s3_ct_amqp:declare(Node, Stream),
    stream_s3_ct_amqp:publish(Node, Stream, {0, 1_000}, 1_000),
    ?assertEqual([], fragments(S3, Node, Stream)),
    plugins(Node, ["enable", "rabbitmq_stream_s3"]),
    ok = flush(Node, Stream, 1_000),
    ?assertEqual(0, hd(fragments(S3, Node, Stream))),
    stream_s3_ct_amqp:consume(Node, Stream, {0, 1_000}, 1_000).

an_upload_resumes_where_it_was_and_nothing_is_uploaded_twice(Config) ->
    {Node, S3, Stream} = setup(Config),
    Client = stream_s3_ct_client:open(Node),
    ok = fill(Client, Stream, {0, 200}),
    ok = flush(Node, Stream, 200),
    Before = fragments(S3, Node, Stream),
    ok = disable(Node, ?PLUGIN),
    %% What is local works as without the plugin.
    ok = fill(Client, Stream, {200, 200}),
    ok = enable(Node, ?PLUGIN),
    Floor = tier(Node, Stream, 400),
    ?assert(Floor > 0),
    After = fragments(S3, Node, Stream),
    ?assertEqual(Before, lists:sublist(After, length(Before))),
    ?assertEqual(After, lists:usort(After)),
    ok = read(Client, subscribe(Client, Stream, first, 10), 0, 400),
    stream_s3_ct_client:close(Client).

a_restart_serves_history_and_resumes_the_upload(Config) ->
    {Node, _, Stream} = setup(Config),
    Client = stream_s3_ct_client:open(Node),
    ok = fill(Client, Stream, {0, 400}),
    Floor = tier(Node, Stream, 400),
    stream_s3_ct_client:close(Client),
    Node = stream_s3_ct_node:restart(Node),
    ok = stream_s3_ct_tier:wait_member(Node, Stream),
    Again = stream_s3_ct_client:open(Node),
    ok = fill(Again, Stream, {400, 200}),
    ok = flush(Node, Stream, 600),
    ?assert(floor(Node, Stream) >= Floor),
    ok = read(Again, subscribe(Again, Stream, first, 10), 0, 600),
    ?assert(counter(Node, ~"chunks_delivered_total") > 0),
    stream_s3_ct_client:close(Again).

consumers_of_both_tiers_are_open_while_it_is_disabled(Config) ->
    {Node, _, Stream} = setup(Config),
    Pid = stream_s3_ct_node:pid(Node),
    [Publisher, Remote, Local] = [stream_s3_ct_client:open(Node) || _ <- lists:seq(1, 3)],
    ok = fill(Publisher, Stream, {0, 400}),
    Floor = tier(Node, Stream, 400),
    InHistory = subscribe(Remote, Stream, first, 3),
    ok = read(Remote, InHistory, 0, 50),
    ?assert(50 < Floor),
    ?assert(counter(Node, ~"chunks_delivered_total") > 0),
    %% Has no credit left when the plugin goes, and gives some when it is back.
    Patient = subscribe(Local, Stream, first, 1),
    ?assertMatch(#{id := 0}, stream_s3_ct_client:chunk(Local, Patient)),
    AtTheEnd = subscribe(Local, Stream, next, 3),
    ok = disable(Node, ?PLUGIN),
    ok = fill(Publisher, Stream, {400, 400}),
    ?assertEqual(Pid, stream_s3_ct_node:pid(Node)),
    %% What was read ahead may come. Nothing may come that does not follow.
    Reached = read_what_comes(Remote, InHistory, 50),
    ?assert(Reached < Floor),
    ok = read(Local, AtTheEnd, 400, 800),
    %% A consumer that attaches now is given the local log, as on a stock broker.
    First = subscribe(Publisher, Stream, first, 1),
    ?assertMatch(#{id := Floor}, stream_s3_ct_client:chunk(Publisher, First)),
    ok = enable(Node, ?PLUGIN),
    ok = flush(Node, Stream, 800),
    ok = stream_s3_ct_tier:wait_persisted(Node, Stream, 800),
    ok = fill(Publisher, Stream, {800, 10}),
    ok = read(Local, AtTheEnd, 800, 810),
    ok = stream_s3_ct_client:credit(Local, Patient, 10),
    ok = read(Local, Patient, 10, 810),
    %% The consumer that waited in history with credit is given what follows by itself.
    ok = read(Remote, InHistory, Reached, 810),
    ok = read(Publisher, subscribe(Publisher, Stream, first, 10), 0, 810),
    ?assert(counter(Node, ~"chunks_delivered_total") > 0),
    [stream_s3_ct_client:close(Client) || Client <- [Publisher, Remote, Local]],
    ok = until(
        "no reader is left over", fun() -> counter(Node, ~"remote_readers") == 0 andalso ok end
    ).

readers_are_open_while_it_is_disabled_and_enabled_five_times(Config) ->
    {Node, _, Stream} = setup(Config),
    Client = stream_s3_ct_client:open(Node),
    ok = fill(Client, Stream, {0, 300}),
    _ = tier(Node, Stream, 300),
    Served = [
        begin
            Open = subscribe(Client, Stream, first, 3),
            ok = read(Client, Open, 0, 30),
            ok = disable(Node, ?PLUGIN),
            ok = enable(Node, ?PLUGIN),
            ok = stream_s3_ct_tier:wait_persisted(Node, Stream, 300),
            ok = read(Client, subscribe(Client, Stream, first, 10), 0, 300),
            counter(Node, ~"chunks_delivered_total")
        end
     || _ <- lists:seq(1, 5)
    ],
    ?assert(lists:all(fun(Chunks) -> Chunks > 0 end, Served)),
    stream_s3_ct_client:close(Client).

nothing_went_wrong_meanwhile(Config) ->
    {Node, _, _} = setup(Config),
    ?assertEqual(0, counter(Node, ~"native_panics_total")),
    ?assertEqual([], lists:sublist(stream_s3_ct_node:errors(Node), 10)).

%% Helpers -----------------------------------------------------------------------------------------

setup(Config) ->
    {
        proplists:get_value(broker, Config),
        proplists:get_value(s3, Config),
        proplists:get_value(stream, Config)
    }.

%% Reads until nothing comes any more. Answers the offset that follows.
read_what_comes(Client, Id, Next) ->
    case stream_s3_ct_client:chunk(Client, Id, ?SILENCE_MS) of
        #{id := Next, next := Following} = Chunk ->
            ok = stream_s3_ct_records:check(Chunk),
            ok = stream_s3_ct_client:credit(Client, Id, 1),
            read_what_comes(Client, Id, Following);
        none ->
            Next
    end.
