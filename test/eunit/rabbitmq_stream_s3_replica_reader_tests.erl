%% The shell around the native stream: a writer that is a plain process, a native side that tells
%% the test what it is told, and no metadata store (so every question to it fails, as in an outage).
-module(rabbitmq_stream_s3_replica_reader_tests).

-include_lib("eunit/include/eunit.hrl").

-export([upload_open/4, upload_event/2, upload_status/1, upload_close/1, manifest_forget/2]).
-export([manifest_mark_pending/2]).

-define(READER, rabbitmq_stream_s3_replica_reader).
-define(ID, <<"stream">>).

reader_test_() ->
    {foreach, fun start/0, fun stop/1, patient([
        {"it opens the stream and says what there is", fun opens/0},
        {"a commit reaches the native side, and the next one too", fun commits/0},
        {"what was committed before it listened is not lost", fun no_lost_wakeup/0},
        {"without a metadata store the answer is error, not silence", fun store_down/0},
        {"a busy native side gets its event later", fun busy/0},
        {"a persisted range becomes the cache row", fun range/0},
        {"problems are kept until they are over", fun problems/0},
        {"it ends normally with its writer", fun writer_ends/0},
        {"it ends normally when the stream was deleted, and forgets it", fun deleted/0},
        {"it opens the stream with the next engine when one is lost", fun engine_lost/0},
        {"it has one name, and closes what it opened", fun name/0},
        {"a changed policy is passed on", fun policy/0},
        {"a changed policy outlives the reader", fun policy_outlives_reader/0}
    ])}.

%% A machine that builds something else at the same time is not a failure.
patient(Tests) ->
    [{timeout, 60, Test} || Test <- Tests].

start() ->
    ?MODULE = ets:new(?MODULE, [named_table, public]),
    ok = stream_s3_double:load(rabbitmq_stream_s3_nif, [
        {upload_open, 4},
        {upload_event, 2},
        {upload_status, 1},
        {upload_close, 1},
        {manifest_forget, 2},
        {manifest_mark_pending, 2}
    ], ?MODULE),
    ok = rabbitmq_stream_s3:set_engine(double),
    ok = rabbitmq_stream_s3_registry:create_table(),
    {ok, Cache} = rabbitmq_stream_s3_manifest_replica:start_link(),
    true = unlink(Cache),
    Owner = spawn(fun() -> idle() end),
    true = register(rabbitmq_stream_s3_api_aws, Owner),
    [Cache, Owner].

stop(Pids) ->
    lists:foreach(
        fun(Pid) ->
            Monitor = monitor(process, Pid),
            exit(Pid, kill),
            receive
                {'DOWN', Monitor, _, _, _} -> ok
            end
        end,
        Pids
    ),
    ok = rabbitmq_stream_s3:erase_engine(),
    ok = stream_s3_double:unload(rabbitmq_stream_s3_nif),
    true = ets:delete(rabbitmq_stream_s3_registry),
    true = ets:delete(?MODULE).

idle() ->
    receive
        stop -> ok
    end.

upload_open(double, Owner, Ref, Config) ->
    tell({opened, Owner, Ref, Config}),
    {ok, native}.

upload_event(native, Event) ->
    case ets:take(?MODULE, busy) of
        [_] ->
            tell({refused, Event}),
            {error, busy};
        [] ->
            tell({event, Event}),
            ok
    end.

upload_status(native) -> #{phase => draining}.

upload_close(native) ->
    tell(closed),
    ok.

manifest_forget(double, StreamId) ->
    tell({forgotten, StreamId}),
    ok.

manifest_mark_pending(double, _StreamId) -> ok.

tell(What) ->
    [{test, Pid}] = ets:lookup(?MODULE, test),
    Pid ! What.

%% A reader with a writer that passes its registrations on to the test.
open() -> open([]).

open(Retention) ->
    Test = self(),
    true = ets:insert(?MODULE, {test, Test}),
    Writer = spawn(fun() -> writer(Test) end),
    Shared = osiris_log_shared:new(),
    Info = info(Shared, Retention),
    process_flag(trap_exit, true),
    start_reader(Writer, Info).

info(Shared, Retention) ->
    #{
        stream_id => ?ID,
        name => ?ID,
        dir => "/nowhere",
        shared => Shared,
        counter => counters:new(10, []),
        reference => {resource, <<"/">>, queue, <<"q">>},
        epoch => 3,
        retention => Retention
    }.

start_reader(Writer, #{shared := Shared} = Info) ->
    {ok, Reader} = ?READER:start_link(Writer, Info),
    Ref =
        receive
            {opened, Reader, R, Config} ->
                ?assertEqual(
                    #{
                        stream_id => ?ID,
                        directory => <<"/nowhere">>,
                        arguments => <<>>,
                        epoch => 3,
                        queue => <<"q">>,
                        vhost => <<"/">>
                    },
                    Config
                ),
                R
        after 5_000 -> error(not_opened)
        end,
    #{reader => Reader, writer => Writer, shared => Shared, ref => Ref}.

writer(Test) ->
    receive
        {'$gen_cast', {register_offset_listener, Pid, Formatter, Offset}} ->
            Test ! {listens, Pid, Formatter, Offset},
            writer(Test);
        stop ->
            ok
    end.

close(#{reader := Reader, writer := Writer}) ->
    Writer ! stop,
    ended(Reader).

ended(Reader) ->
    receive
        {'EXIT', Reader, Reason} -> Reason
    after 5_000 -> error(still_there)
    end.

event() ->
    receive
        {event, Event} -> Event
    after 5_000 -> error(no_event)
    end.

listens() ->
    receive
        {listens, _Pid, Formatter, Offset} ->
            ?assertEqual({osiris_util, id, []}, Formatter),
            Offset
    after 5_000 -> error(does_not_listen)
    end.

push(#{reader := Reader, ref := Ref}, Push) ->
    Reader ! {rabbitmq_stream_s3, Ref, Push},
    ok.

commit(#{reader := Reader, shared := Shared}, ChunkId) ->
    ok = osiris_log_shared:set_committed_chunk_id(Shared, ChunkId),
    Reader ! {osiris_offset, ref, ChunkId},
    ok.

opens() ->
    Open = open([{max_bytes, 10}, {max_age, 20}]),
    ?assertEqual({retention, #{max_bytes => 10, max_age_ms => 20}}, event()),
    ?assertEqual({committed, -1, -1}, event()),
    ?assertEqual(0, listens()),
    normal = close(Open).

commits() ->
    #{shared := Shared} = Open = open(),
    {retention, _} = event(),
    {committed, -1, -1} = event(),
    0 = listens(),
    ok = osiris_log_shared:set_first_chunk_id(Shared, 0),
    ok = commit(Open, 7),
    ?assertEqual({committed, 7, 0}, event()),
    ?assertEqual(8, listens()),
    ok = commit(Open, 9),
    ?assertEqual({committed, 9, 0}, event()),
    ?assertEqual(10, listens()),
    normal = close(Open).

%% The notification is older than the atomics: the reader goes by these, and listens from there.
no_lost_wakeup() ->
    #{reader := Reader, shared := Shared} = Open = open(),
    {retention, _} = event(),
    {committed, -1, -1} = event(),
    0 = listens(),
    ok = osiris_log_shared:set_committed_chunk_id(Shared, 50),
    Reader ! {osiris_offset, ref, 10},
    ?assertEqual({committed, 50, -1}, event()),
    ?assertEqual(51, listens()),
    normal = close(Open).

store_down() ->
    Open = open(),
    {retention, _} = event(),
    {committed, _, _} = event(),
    ok = push(Open, read_pointer),
    ?assertEqual({pointer, error}, event()),
    ok = push(Open, write_anchor),
    ?assertEqual({anchor, error}, event()),
    ok = push(Open, {commit_pointer, 3, 1, 40, 0}),
    ?assertEqual({pointer_committed, error}, event()),
    normal = close(Open).

busy() ->
    Open = open(),
    {retention, _} = event(),
    {committed, _, _} = event(),
    true = ets:insert(?MODULE, {busy, true}),
    ok = push(Open, read_pointer),
    receive
        {refused, {pointer, error}} -> ok
    after 5_000 -> error(not_refused)
    end,
    ?assertEqual({pointer, error}, event()),
    normal = close(Open).

range() ->
    %% The evaluation that follows is one that the hooks have added to osiris.
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()),
    #{reader := Reader} = Open = open(),
    Range = #{
        first_offset => 0,
        next_offset => 5,
        first_timestamp => 1,
        total_size => 9,
        revision => 1,
        epoch => 3,
        fragments => 1,
        pointer => {3, 8, 1}
    },
    ok = push(Open, {range, Range, {{3, 7, 0}, <<"edit">>}}),
    #{range := Range} = ?READER:status(Reader),
    ?assertEqual({ok, Range}, rabbitmq_stream_s3_manifest_cache:range(?ID)),
    ok = rabbitmq_stream_s3_manifest_cache:forget(?ID),
    ok = ?READER:republish(Reader),
    #{range := Range} = ?READER:status(Reader),
    ?assertEqual({ok, Range}, rabbitmq_stream_s3_manifest_cache:range(?ID)),
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    normal = close(Open).

problems() ->
    #{reader := Reader} = Open = open(),
    ok = push(Open, {problem, access_denied, <<"403">>}),
    ?assertMatch(#{problems := #{access_denied := <<"403">>}}, ?READER:status(Reader)),
    ok = push(Open, {recovered, access_denied}),
    #{problems := Problems} = ?READER:status(Reader),
    ?assertEqual(#{}, Problems),
    normal = close(Open).

writer_ends() ->
    Open = open(),
    ?assertEqual(normal, close(Open)),
    receive
        closed -> ok
    after 5_000 -> error(not_closed)
    end.

deleted() ->
    #{reader := Reader} = Open = open(),
    ok = rabbitmq_stream_s3_manifest_cache:put(?ID, #{first_offset => 0}),
    ok = push(Open, {stopped, deleted}),
    ?assertEqual(normal, ended(Reader)),
    ?assertEqual(none, rabbitmq_stream_s3_manifest_cache:range(?ID)),
    receive
        {forgotten, StreamId} -> ?assertEqual(?ID, StreamId)
    after 5_000 -> error(not_forgotten)
    end.

engine_lost() ->
    #{reader := Reader} = Open = open(),
    {retention, _} = event(),
    {committed, -1, -1} = event(),
    0 = listens(),
    Lost = whereis(rabbitmq_stream_s3_api_aws),
    ok = rabbitmq_stream_s3:erase_engine(),
    exit(Lost, kill),
    receive
        closed -> ok
    after 5_000 -> error(not_closed)
    end,
    Next = spawn(fun() -> idle() end),
    true = register(rabbitmq_stream_s3_api_aws, Next),
    ok = rabbitmq_stream_s3:set_engine(double),
    receive
        {opened, Reader, _Ref, _Config} -> ok
    after 5_000 -> error(not_opened)
    end,
    {retention, _} = event(),
    {committed, -1, -1} = event(),
    normal = close(Open),
    Next ! stop,
    %% The writer's one registration is still good; a second one would double every notification
    %% from here on.
    receive
        {listens, _, _, _} = Again -> error(Again)
    after 0 -> ok
    end.

name() ->
    #{reader := Reader, writer := Writer} = Open = open(),
    Name = {?ID, node()},
    ?assertEqual(Reader, rabbitmq_stream_s3_registry:whereis_name(Name)),
    ?assertEqual(Writer, ?READER:serves(?ID)),
    ?assertMatch([{?ID, _, #{phase := draining}}], ?READER:statuses()),
    normal = close(Open),
    ?assertEqual(undefined, rabbitmq_stream_s3_registry:whereis_name(Name)),
    ?assertEqual([], ?READER:statuses()).

policy() ->
    #{reader := Reader} = Open = open(),
    {retention, Before} = event(),
    ?assertEqual(#{}, Before),
    {committed, _, _} = event(),
    ok = ?READER:update_retention(Reader, [{max_bytes, 99}]),
    ?assertEqual({retention, #{max_bytes => 99}}, event()),
    normal = close(Open).

policy_outlives_reader() ->
    #{reader := Reader, writer := Writer, shared := Shared} = open([{max_bytes, 10}]),
    {retention, #{max_bytes := 10}} = event(),
    {committed, _, _} = event(),
    Info = info(Shared, [{max_bytes, 10}]),
    ok = rabbitmq_stream_s3_manifest_replica:register_member(writer, Writer, Info),
    ok = rabbitmq_stream_s3_manifest_replica:update_retention(?ID, Writer, [{max_bytes, 99}]),
    exit(Reader, kill),
    killed = ended(Reader),
    %% As its supervisor does it, with what it knows.
    Open = start_reader(Writer, Info),
    ?assertEqual({retention, #{max_bytes => 99}}, event()),
    normal = close(Open).

recovery_text_test_() ->
    Says = fun(Kind, From, To, Parts) ->
        Text = lists:flatten(?READER:recovery_text(Kind, From, To)),
        [?_assertNotEqual({nomatch, Part}, {string:find(Text, Part), Part}) || Part <- Parts]
    end,
    [
        Says(local_log_ahead, 10, 50, ["offsets 10 to 49", "anew at 50"]),
        Says(remote_tier_ahead, 50, 10, ["below offset 10 stays", "10 to 49 of it are given up"])
    ].
