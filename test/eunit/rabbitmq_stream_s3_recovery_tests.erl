%% The process that keeps the job of a recovery.
-module(rabbitmq_stream_s3_recovery_tests).

-include_lib("eunit/include/eunit.hrl").

-export([streams/2, inspect/3]).

-define(M, rabbitmq_stream_s3_recovery).
-define(NATIVE, rabbitmq_stream_s3_recovery_native).

recovery_test_() ->
    {foreach, fun start/0, fun stop/1, [
        {"one job at a time, and its end is kept", fun one_at_a_time/0},
        {"a job that crashes is a failed one", fun crashing/0},
        {"the job and its workers end with the process", fun ends_with_its_process/0},
        {"without the plugin there is none", fun inactive/0}
    ]}.

start() ->
    ?MODULE = ets:new(?MODULE, [named_table, public]),
    ok = stream_s3_double:load(?NATIVE, [{streams, 2}, {inspect, 3}], ?MODULE),
    ok = rabbitmq_stream_s3:set_engine(double),
    {ok, Server} = ?M:start_link(),
    true = unlink(Server),
    ok.

stop(ok) ->
    _ = whereis(?M) =/= undefined andalso gen_server:stop(?M, shutdown, 5_000),
    ok = rabbitmq_stream_s3:erase_engine(),
    ok = stream_s3_double:unload(?NATIVE),
    true = ets:delete(?MODULE).

%% The native side, as the test has put it: it is asked by the job.
streams(double, start) -> answer(streams).
inspect(double, _Id, root) -> answer(inspect).

answer(What) ->
    [{_, Test}] = ets:lookup(?MODULE, test),
    Test ! {asked, What, self()},
    receive
        {answer, Answer} -> Answer;
        crash -> error(crashed)
    end.

job(Kind) ->
    true = ets:insert(?MODULE, {test, self()}),
    ok = ?M:start(Kind, #{}),
    asked(streams).

asked(What) ->
    receive
        {asked, What, Pid} -> Pid
    after 5_000 -> error({nobody_asks, What})
    end.

until(State) ->
    case ?M:status() of
        #{state := State} = Status -> Status;
        _ -> until(State)
    end.

one_at_a_time() ->
    ?assertEqual(#{state => none}, ?M:status()),
    Job = job(list),
    ?assertMatch(#{state := running, kind := list, step := listing}, ?M:status()),
    ?assertEqual({error, busy}, ?M:start(run, #{})),
    Job ! {answer, {error, ~"access_denied: no"}},
    ?assertMatch(#{text := ~"access_denied: no"}, until(failed)),
    %% The next one may begin.
    Next = job(list),
    Next ! {answer, {error, ~"again"}},
    ?assertMatch(#{text := ~"again"}, until(failed)).

crashing() ->
    Job = job(list),
    Job ! crash,
    ?assertMatch(#{text := ~"the job crashed: see the log of the node"}, until(failed)),
    ?assert(is_process_alive(whereis(?M))).

ends_with_its_process() ->
    Job = job(list),
    Job ! {answer, {page, [~"a", ~"b"], done}},
    Workers = [asked(inspect), asked(inspect)],
    Monitors = [monitor(process, Pid) || Pid <- [Job | Workers]],
    ok = gen_server:stop(?M, shutdown, 5_000),
    [
        receive
            {'DOWN', Monitor, process, _, shutdown} -> ok
        after 5_000 -> error(goes_on)
        end
     || Monitor <- Monitors
    ].

inactive() ->
    ok = gen_server:stop(?M, shutdown, 5_000),
    ?assertEqual({error, inactive}, ?M:start(list, #{})),
    ?assertEqual({error, inactive}, ?M:status()).
