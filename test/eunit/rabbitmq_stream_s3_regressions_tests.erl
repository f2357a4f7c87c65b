%% Faults of the field in what a node knows of its streams: `bug N` is row N of docs/INVARIANTS.md.
-module(rabbitmq_stream_s3_regressions_tests).

-include_lib("eunit/include/eunit.hrl").

-define(REPLICA, rabbitmq_stream_s3_manifest_replica).
-define(CACHE, rabbitmq_stream_s3_manifest_cache).
-define(ID, <<"stream">>).
-define(RANGE, #{first => 0, next => 10, revision => 1}).

known_test_() ->
    {foreach, fun start/0, fun stop/1, [
        {"bug 43, 44, 66: a member that is gone leaves no row, no folder and no monitor",
            fun gone_with_its_member/0},
        {"bug 44: what is said of a stream without a member goes with the next member's end",
            fun said_too_late/0},
        {"bug 87: unknown, pending and empty are three things", fun pending/0}
    ]}.

start() ->
    {ok, Replica} = ?REPLICA:start_link(),
    Replica.

stop(Replica) ->
    ok = gen_server:stop(Replica).

member() ->
    Pid = spawn(fun() ->
        receive
            stop -> ok
        end
    end),
    Info = #{stream_id => ?ID, dir => "/dir"},
    ok = ?CACHE:set_dir("/dir", ?ID),
    ok = ?REPLICA:register_member(writer, Pid, Info),
    {ok, #{?ID := {writer, Pid, _}}} = ?REPLICA:members(),
    Pid.

%% Ends a member; returns when the replica has heard of it.
ends(Pid) ->
    Monitor = monitor(process, Pid),
    Pid ! stop,
    receive
        {'DOWN', Monitor, process, Pid, _} -> ok
    end,
    until_forgotten(1_000).

until_forgotten(0) ->
    error(still_a_member);
until_forgotten(Left) ->
    case ?REPLICA:members() of
        {ok, Members} when map_size(Members) =:= 0 -> ok;
        _ -> until_forgotten(Left - 1)
    end.

gone_with_its_member() ->
    Pid = member(),
    ok = ?CACHE:put(?ID, ?RANGE),
    ?assertMatch({ok, _}, ?CACHE:range(?ID)),
    ok = ends(Pid),
    ?assertEqual(none, ?CACHE:range(?ID)),
    ?assertEqual([], ?CACHE:streams()),
    {monitors, Monitors} = process_info(whereis(?REPLICA), monitors),
    ?assertEqual([], Monitors).

said_too_late() ->
    ok = ends(member()),
    ok = ?CACHE:put(?ID, ?RANGE),
    ok = ends(member()),
    ?assertEqual([], ?CACHE:streams()).

pending() ->
    ?assertEqual(none, ?CACHE:range(?ID)),
    ok = ?CACHE:mark_pending(?ID),
    ?assertEqual(pending, ?CACHE:range(?ID)),
    Empty = #{first => 0, next => 0, revision => 0},
    ok = ?CACHE:put(?ID, Empty),
    ?assertEqual({ok, Empty}, ?CACHE:range(?ID)),
    %% Another attempt to attach does not take back what is known.
    ok = ?CACHE:mark_pending(?ID),
    ?assertEqual({ok, Empty}, ?CACHE:range(?ID)),
    ok = ?CACHE:forget(?ID),
    ?assertEqual(none, ?CACHE:range(?ID)).
