%% The plugin in a real broker: switched on and off while streams run, and what an operator sees.
-module(broker_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1, init_per_testcase/2, end_per_testcase/2]).
-export([
    status_without_bucket/1,
    uploads_and_trims/1,
    status_of_a_stream/1,
    disable_leaves_a_stock_broker/1,
    enable_finds_existing_streams/1,
    restart_resumes/1,
    installs_from_the_archive/1,
    no_errors_in_the_log/1
]).

-import(stream_s3_ct_helpers, [
    declare/2, publish/4, consume/4, rpc/4, streams/2, plugins/2, segments/2, objects/1, wait_until/2
]).

-define(H, stream_s3_ct_helpers).
-define(PLUGIN, "rabbitmq_stream_s3").

suite() ->
    [{timetrap, {minutes, 3}}].

all() ->
    [
        status_without_bucket,
        uploads_and_trims,
        status_of_a_stream,
        disable_leaves_a_stock_broker,
        enable_finds_existing_streams,
        restart_resumes,
        installs_from_the_archive,
        no_errors_in_the_log
    ].

init_per_suite(Config) ->
    S3 = ?H:start_s3("broker-suite"),
    Conf = ?H:s3_conf(S3, [{"fragment_size", "200000"}, {"fragment_max_age", "1s"}]),
    Node = ?H:start_node("broker1", #{conf => Conf, plugins => [?PLUGIN]}),
    [{s3, S3}, {broker, Node} | Config].

end_per_suite(Config) ->
    ?H:kill_node(proplists:get_value(broker, Config)),
    ?H:stop_s3(proplists:get_value(s3, Config)).

init_per_testcase(Case, Config) ->
    [{stream, atom_to_binary(Case)} | Config].

end_per_testcase(_Case, _Config) ->
    ok.

%% Cases -------------------------------------------------------------------------------------------

status_without_bucket(_Config) ->
    Node = ?H:start_node("broker2", #{plugins => [?PLUGIN]}),
    ?assertMatch({match, _}, re:run(streams(Node, ["stream_s3_status"]), "inert")),
    declare(Node, ~"local"),
    publish(Node, ~"local", {0, 10}, 100),
    consume(Node, ~"local", {0, 10}, 100),
    ?H:wipe_node(Node).

%% Small segments, so that there is something to trim.
uploads_and_trims(Config) ->
    {Node, S3, Stream} = setup(Config),
    ?H:declare(Node, Stream, [{~"x-stream-max-segment-size-bytes", long, 500_000}]),
    publish(Node, Stream, {0, 5_000}, 1_000),
    wait_until("a fragment in S3", fun() -> fragments(S3, Stream) =/= [] end),
    wait_until("the first local segment is gone", fun() -> hd(segments(Node, Stream)) > 0 end),
    consume(Node, Stream, {0, 5_000}, 1_000).

status_of_a_stream(Config) ->
    {Node, S3, Stream} = setup(Config),
    declare(Node, Stream),
    publish(Node, Stream, {0, 1_000}, 1_000),
    wait_until("a fragment in S3", fun() -> fragments(S3, Stream) =/= [] end),
    wait_until("the status knows what is durable", fun() ->
        maps:get(~"persisted_next_offset", status(Node, [binary_to_list(Stream)])) >= 1_000
    end),
    ?assertMatch(
        #{~"mode" := ~"active", ~"osiris_attached" := true, ~"bucket_accessible" := ~"yes"}, status(Node, [])
    ).

status(Node, Stream) ->
    Output = streams(Node, ["stream_s3_status" | Stream] ++ ["--formatter", "json"]),
    json:decode(unicode:characters_to_binary(Output)).

disable_leaves_a_stock_broker(Config) ->
    {Node, S3, Stream} = setup(Config),
    declare(Node, Stream),
    publish(Node, Stream, {0, 500}, 1_000),
    wait_until("a fragment in S3", fun() -> fragments(S3, Stream) =/= [] end),
    plugins(Node, ["disable", ?PLUGIN]),
    ?assertEqual(undefined, rpc(Node, application, get_env, [osiris, log_hooks])),
    ?assertEqual(undefined, rpc(Node, application, get_env, [osiris, log_reader])),
    ?assertEqual(undefined, rpc(Node, erlang, whereis, [rabbitmq_stream_s3_sup])),
    %% What is local goes on.
    publish(Node, Stream, {500, 500}, 1_000),
    consume(Node, Stream, {0, 1_000}, 1_000),
    ?assertEqual([], [App || {App, _, _} <- rpc(Node, application, which_applications, []), App =:= rabbitmq_stream_s3]).

enable_finds_existing_streams(Config) ->
    {Node, S3, Stream} = setup(Config),
    ?assertEqual(undefined, rpc(Node, erlang, whereis, [rabbitmq_stream_s3_sup])),
    declare(Node, Stream),
    publish(Node, Stream, {0, 1_000}, 1_000),
    ?assertEqual([], fragments(S3, Stream)),
    plugins(Node, ["enable", ?PLUGIN]),
    wait_until("a fragment of a stream that was there before", fun() -> fragments(S3, Stream) =/= [] end),
    consume(Node, Stream, {0, 1_000}, 1_000),
    %% On, off and on again: the library and the hooks bear it.
    plugins(Node, ["disable", ?PLUGIN]),
    plugins(Node, ["enable", ?PLUGIN]),
    publish(Node, Stream, {1_000, 1_000}, 1_000),
    Before = length(fragments(S3, Stream)),
    wait_until("the upload goes on", fun() -> length(fragments(S3, Stream)) > Before end),
    consume(Node, Stream, {0, 2_000}, 1_000).

restart_resumes(Config) ->
    {Node, S3, Stream} = setup(Config),
    ?H:declare(Node, Stream, [{~"x-stream-max-segment-size-bytes", long, 500_000}]),
    publish(Node, Stream, {0, 3_000}, 1_000),
    wait_until("the first local segment is gone", fun() -> hd(segments(Node, Stream)) > 0 end),
    Restarted = ?H:restart_node(Node),
    ?assertEqual(maps:get(amqp_port, Node), maps:get(amqp_port, Restarted)),
    wait_until("the stream is back", fun() -> is_writable(Restarted, Stream) end),
    publish(Restarted, Stream, {3_000, 1_000}, 1_000),
    Fragments = length(fragments(S3, Stream)),
    wait_until("the upload goes on", fun() -> length(fragments(S3, Stream)) > Fragments end),
    consume(Restarted, Stream, {0, 4_000}, 1_000).

%% The .ez that a user installs, in a plugins folder of its own; the broker expands it at start.
installs_from_the_archive(Config) ->
    {_, S3, Stream} = setup(Config),
    case filelib:wildcard(filename:join([os:getenv("STREAM_S3_TOP"), "dist", ?PLUGIN ++ "-*.ez"])) of
        [] ->
            {skip, "make dist has not been run"};
        [Archive] ->
            Env = [{"STREAM_S3_PLUGIN_DIR", filename:dirname(Archive)}],
            Conf = ?H:s3_conf(S3, [{"fragment_max_age", "1s"}, {"prefix", "from-archive"}]),
            Node = ?H:start_node("broker3", #{conf => Conf, plugins => [?PLUGIN], env => Env}),
            ?assertMatch({match, _}, re:run(rpc(Node, code, priv_dir, [rabbitmq_stream_s3]), "plugins-expand")),
            declare(Node, Stream),
            publish(Node, Stream, {0, 1_000}, 1_000),
            wait_until("a fragment in S3", fun() -> fragments(S3, Stream) =/= [] end),
            ?H:wipe_node(Node)
    end.

no_errors_in_the_log(Config) ->
    ?assertEqual([], lists:sublist(?H:errors(proplists:get_value(broker, Config)), 10)).

%% Helpers -----------------------------------------------------------------------------------------

setup(Config) ->
    {proplists:get_value(broker, Config), proplists:get_value(s3, Config), proplists:get_value(stream, Config)}.

fragments(S3, Stream) ->
    Marks = [<<"__", Stream/binary, "_">>, ~".fragment"],
    [Key || Key <- objects(S3), lists:all(fun(Mark) -> binary:match(Key, Mark) =/= nomatch end, Marks)].

is_writable(Node, Stream) ->
    Name = rpc(Node, rabbit_misc, r, [~"/", queue, Stream]),
    case rpc(Node, rabbit_amqqueue, lookup, [Name]) of
        {ok, Queue} ->
            #{name := StreamId} = rpc(Node, amqqueue, get_type_state, [Queue]),
            ok =:= element(1, rpc(Node, rabbit_stream_coordinator, local_pid, [StreamId]));
        _ ->
            false
    end.
