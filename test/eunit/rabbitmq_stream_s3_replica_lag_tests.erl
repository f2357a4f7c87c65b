%% Local segments that a replica has not copied: real counters of osiris, segments that are numbers.
-module(rabbitmq_stream_s3_replica_lag_tests).

-include_lib("eunit/include/eunit.hrl").

-define(M, rabbitmq_stream_s3_replica_lag).
-define(ID, <<"lagging">>).
-define(SEGMENTS, [{0, 100}, {100, 200}, {200, 300}]).

decide_test_() ->
    Segments = [{0, 100, 10, 5}, {100, 200, 20, 5}, {200, 300, 30, 5}],
    [
        {"all within the bounds", ?_assertEqual({[], Segments}, ?M:decide(Segments, 15, 10))},
        {"one byte too many costs the oldest",
            ?_assertMatch({[{0, _, _, _}], [_, _]}, ?M:decide(Segments, 14, 10))},
        {"one that is too old goes, those behind it stay",
            ?_assertMatch({[{0, _, _, _}], [_, _]}, ?M:decide(Segments, 15, 11))},
        {"nothing fits", ?_assertMatch({[_, _, _], []}, ?M:decide(Segments, 4, 0))},
        {"nothing is needed", ?_assertEqual({[], []}, ?M:decide([], 0, 0))}
    ].

trimmable_test_() ->
    {foreach, fun start/0, fun stop/1, [
        {"without a replica nothing is kept", fun no_replica/0},
        {"what the slowest replica has not read stays", fun slowest/0},
        {"a replica that has read nothing yet needs what it starts at", fun starts/0},
        {"a replica of another stream keeps nothing", fun other_stream/0},
        {"a replica that comes is seen before anything is trimmed", fun comes/0},
        {"one that has been overtaken is not waited for", fun overtaken/0},
        {"one that ends is not waited for", fun ends/0},
        {"no more than so many bytes of the node", fun bytes/0},
        {"no longer than so long", fun age/0},
        {"0 keeps nothing", fun off/0},
        {"what is not known yet trims nothing", fun no_table/0}
    ]}.

start() ->
    {ok, _} = application:ensure_all_started(seshat),
    ok = osiris_counters:init(),
    ok = settings(1_048_576, 3_600_000),
    ok = rabbitmq_stream_s3_manifest_cache:create(),
    ok = rabbitmq_stream_s3_manifest_cache:set_queue(a_queue, ?ID),
    {ok, Pid} = ?M:start_link(),
    true = unlink(Pid),
    Pid.

stop(Pid) ->
    Monitor = monitor(process, Pid),
    exit(Pid, kill),
    receive
        {'DOWN', Monitor, _, _, _} -> ok
    end,
    [osiris_counters:delete(Id) || Id <- maps:keys(osiris_counters:overview())],
    ok = rabbitmq_stream_s3_manifest_cache:delete(),
    ok = rabbitmq_stream_s3_config:erase().

settings(MaxBytes, MaxAge) ->
    Env = [{bucket, "b"}, {region, "r"}, {replica_lag_max_bytes, MaxBytes}, {replica_lag_max_age_ms, MaxAge}],
    ok = application:set_env([{rabbitmq_stream_s3, Env}]),
    {ok, _} = rabbitmq_stream_s3_config:load(),
    _ = [application:unset_env(rabbitmq_stream_s3, Key) || {Key, _} <- Env],
    ok.

%% As osiris_replica_reader names its counters.
replica(Port, Offset) ->
    replica(a_queue, Port, Offset).

replica(Reference, Port, Offset) ->
    Id = {osiris_replica_reader, Reference, "host", Port},
    Counter = osiris_counters:new(Id, [{offset, 1, counter, ""}]),
    ok = counters:put(Counter, 1, Offset),
    {Id, Counter}.

trimmable() ->
    trimmable(?SEGMENTS).

trimmable(Segments) ->
    ?M:trimmable(?ID, Segments, fun(_Offset) -> 300_000 end).

no_replica() ->
    ?assertEqual([0, 100, 200], trimmable()),
    ?assertEqual(
        #{replica_lag_streams => 0, replica_lag_segments => 0, replica_lag_bytes => 0}, ?M:overview()
    ).

slowest() ->
    {_, Fast} = replica(1, 300),
    {_, Slow} = replica(2, 150),
    ?assertEqual([0], trimmable()),
    ?assertMatch(#{replica_lag_segments := 2, replica_lag_bytes := 600_000}, ?M:overview()),
    ?assertMatch(
        #{replica_lag_segments := 2, replica_lag_of := <<"host:2, at offset 150">>},
        ?M:of_stream(?ID)
    ),
    %% It has read all of a segment: the next one begins where it goes on.
    ok = counters:put(Slow, 1, 200),
    ?assertEqual([100], trimmable(tl(?SEGMENTS))),
    ok = counters:put(Slow, 1, 300),
    ok = counters:put(Fast, 1, 400),
    ?assertEqual([200], trimmable([{200, 300}])),
    ?assertMatch(#{replica_lag_streams := 0}, ?M:overview()).

starts() ->
    {_, Counter} = replica(1, -1),
    ?assertEqual([], trimmable()),
    ok = counters:put(Counter, 1, 99),
    ?assertEqual([], trimmable()).

other_stream() ->
    _ = replica(another_queue, 1, 0),
    %% A reader that is no replica's.
    _ = osiris_counters:new({osiris_writer, a_queue}, [{offset, 1, counter, ""}]),
    ?assertEqual([0, 100, 200], trimmable()).

comes() ->
    ?assertEqual([0], trimmable([{0, 100}])),
    _ = replica(1, 100),
    ?assertEqual([], trimmable([{100, 200}])).

overtaken() ->
    _ = replica(1, 50),
    ?assertEqual([100, 200], trimmable(tl(?SEGMENTS))).

ends() ->
    {Id, _} = replica(1, 0),
    ?assertEqual([], trimmable()),
    ok = osiris_counters:delete(Id),
    %% What was found a moment ago would still be kept for it; the next look ends that.
    true = ets:delete(?M, looked),
    ?assertEqual([0, 100, 200], trimmable()).

bytes() ->
    ok = rabbitmq_stream_s3_counters:init(),
    _ = replica(1, 0),
    Large = fun(_) -> 400_000 end,
    ?assertEqual([0], ?M:trimmable(?ID, ?SEGMENTS, Large)),
    ?assertMatch(#{replica_lag_bytes := 800_000}, ?M:overview()),
    ?assertMatch(#{replica_lag_given_up := 1}, rabbitmq_stream_s3_counters:overview()),
    %% Another stream finds no room.
    ok = rabbitmq_stream_s3_manifest_cache:set_queue(other_queue, <<"other">>),
    _ = replica(other_queue, 1, 0),
    ?assertEqual([0], ?M:trimmable(<<"other">>, [{0, 100}], Large)),
    ok = rabbitmq_stream_s3_counters:delete().

age() ->
    _ = replica(1, 0),
    ?assertEqual([], trimmable([{0, 100}])),
    {ok, Kept} = kept(),
    %% As if that had been long ago; the segment behind it has just come.
    {kept, [{0, 100, Since, Size}], Bytes, Said} = Kept,
    Old = {kept, [{0, 100, Since - 3_600_001, Size}], Bytes, Said},
    true = ets:insert(?M, {{kept, ?ID}, Old}),
    ?assertEqual([0], trimmable([{0, 100}, {100, 200}])),
    {ok, {kept, [{100, 200, _, _}], 300_000, _}} = kept().

kept() ->
    [{_, Kept}] = ets:lookup(?M, {kept, ?ID}),
    {ok, Kept}.

off() ->
    _ = replica(1, 0),
    ok = settings(0, 3_600_000),
    ?assertEqual([0, 100, 200], trimmable()),
    ok = settings(1_048_576, 0),
    ?assertEqual([0, 100, 200], trimmable()).

no_table() ->
    true = ets:rename(?M, aside) =:= aside,
    ?assertEqual([], trimmable()),
    true = ets:rename(aside, ?M) =:= ?M.
