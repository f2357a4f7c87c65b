%% Turns at asking a quorum: how many at once, in which order, and what becomes of those who end.
-module(rabbitmq_stream_s3_db_quorum_tests).

-include_lib("eunit/include/eunit.hrl").

-define(QUORUM, rabbitmq_stream_s3_db_quorum).
-define(AT_ONCE, 32).

quorum_test_() ->
    {foreach, fun start/0, fun stop/1, [
        {"no more than so many at once, the others in their order", fun bounded/0},
        {"who ends gives its turn, or its place, away", fun ended/0},
        {"a question that fails gives its turn away", fun failed/0},
        {"who has waited too long is told so", fun waited/0},
        {"without the server nothing is held up", fun not_running/0}
    ]}.

start() ->
    {ok, Pid} = ?QUORUM:start_link(),
    true = unlink(Pid),
    Pid.

stop(Pid) ->
    Monitor = monitor(process, Pid),
    exit(Pid, kill),
    receive
        {'DOWN', Monitor, _, _, _} -> ok
    end.

bounded() ->
    Pids = [ask(N) || N <- lists:seq(1, 100)],
    [?assertEqual(N, begun()) || N <- lists:seq(1, ?AT_ONCE)],
    ?assertEqual(#{running => ?AT_ONCE, waiting => 100 - ?AT_ONCE}, ?QUORUM:overview()),
    %% Each that ends lets the next one in, and no other.
    [
        begin
            lists:nth(N, Pids) ! go,
            ?assertEqual(N + ?AT_ONCE, begun())
        end
     || N <- lists:seq(1, 100 - ?AT_ONCE)
    ],
    [Pid ! go || Pid <- Pids],
    idle().

ended() ->
    Pids = [ask(N) || N <- lists:seq(1, ?AT_ONCE + 2)],
    [begun() || _ <- lists:seq(1, ?AT_ONCE)],
    %% One that waits, and one whose turn it is.
    true = exit(lists:nth(?AT_ONCE + 1, Pids), kill),
    true = exit(hd(Pids), kill),
    ?assertEqual(?AT_ONCE + 2, begun()),
    [Pid ! go || Pid <- Pids],
    idle().

failed() ->
    ?assertError(oops, ?QUORUM:run(fun() -> error(oops) end)),
    idle().

waited() ->
    Pids = [ask(N) || N <- lists:seq(1, ?AT_ONCE)],
    [begun() || _ <- Pids],
    Test = self(),
    Late = spawn_link(fun() -> Test ! {answer, ?QUORUM:run(fun() -> too_late end)} end),
    %% The time itself is not waited for.
    {state, _, _, Waiting} = waiting_of(Late),
    [Monitor] = maps:keys(Waiting),
    ?QUORUM ! {waited, Monitor},
    receive
        {answer, Answer} -> ?assertEqual({error, timeout}, Answer)
    end,
    ?assertEqual(#{running => ?AT_ONCE, waiting => 0}, ?QUORUM:overview()),
    [Pid ! go || Pid <- Pids],
    idle().

waiting_of(_Late) ->
    case sys:get_state(?QUORUM) of
        {state, _, _, Waiting} = State when map_size(Waiting) =:= 1 -> State;
        _NotYet -> waiting_of(_Late)
    end.

not_running() ->
    ok = stop(whereis(?QUORUM)),
    ?assertEqual(answer, ?QUORUM:run(fun() -> answer end)).

%% One after the other into the queue: `begun` is told when it is its turn.
ask(N) ->
    Test = self(),
    Before = total(),
    Pid = spawn(fun() ->
        ?QUORUM:run(fun() ->
            Test ! {begun, N},
            receive
                go -> ok
            end
        end)
    end),
    queued(Before + 1),
    Pid.

queued(Total) ->
    case total() of
        Total -> ok;
        _NotYet -> queued(Total)
    end.

total() ->
    #{running := Running, waiting := Waiting} = ?QUORUM:overview(),
    Running + Waiting.

begun() ->
    receive
        {begun, N} -> N
    after 10_000 -> error(nobody_begins)
    end.

idle() ->
    case ?QUORUM:overview() of
        #{running := 0, waiting := 0} -> ok;
        _NotYet -> idle()
    end.
