%% Names of readers: they work as OTP's `via` asks, and nothing that is missing is an error.
-module(rabbitmq_stream_s3_registry_tests).

-include_lib("eunit/include/eunit.hrl").

-define(REGISTRY, rabbitmq_stream_s3_registry).
-define(NAME, {<<"stream">>, node()}).

registry_test_() ->
    {foreach, fun table/0, fun gone/1, [
        {"a process is found under its name, here and by another node", fun found/0},
        {"a second one is refused while the first lives", fun taken/0},
        {"what a killed one has left is nobody's, and replaced", fun left_behind/0},
        {"without the plugin every question has an answer", fun off/0},
        {"a node that is not there has no reader", fun nowhere/0}
    ]}.

table() ->
    ok = ?REGISTRY:create_table().

gone(ok) ->
    ets:whereis(?REGISTRY) =/= undefined andalso ets:delete(?REGISTRY).

found() ->
    {ok, Pid} = gen_event:start({via, ?REGISTRY, ?NAME}),
    ?assertEqual(Pid, ?REGISTRY:whereis_name(?NAME)),
    ?assertEqual(Pid, ?REGISTRY:whereis(<<"stream">>, node())),
    ?assertEqual(undefined, ?REGISTRY:whereis(<<"stream">>, other@node)),
    ok = ?REGISTRY:set_value(?NAME, a_value),
    ?assertEqual([{<<"stream">>, Pid, a_value}], ?REGISTRY:values()),
    ok = gen_event:stop({via, ?REGISTRY, ?NAME}),
    ?assertEqual(undefined, ?REGISTRY:whereis_name(?NAME)).

taken() ->
    Pid = idle(),
    ?assertEqual(yes, ?REGISTRY:register_name(?NAME, Pid)),
    ?assertEqual(yes, ?REGISTRY:register_name(?NAME, Pid)),
    ?assertEqual(no, ?REGISTRY:register_name(?NAME, self())),
    killed(Pid).

left_behind() ->
    Pid = idle(),
    yes = ?REGISTRY:register_name(?NAME, Pid),
    killed(Pid),
    ?assertEqual(undefined, ?REGISTRY:whereis_name(?NAME)),
    ?assertExit({badarg, _}, ?REGISTRY:send(?NAME, hello)),
    ?assertEqual(yes, ?REGISTRY:register_name(?NAME, self())),
    ?assertEqual(self(), ?REGISTRY:send(?NAME, hello)),
    receive
        hello -> ok
    end.

off() ->
    true = ets:delete(?REGISTRY),
    ?assertEqual(undefined, ?REGISTRY:whereis_name(?NAME)),
    ?assertEqual(undefined, ?REGISTRY:whereis(<<"stream">>, node())),
    ?assertEqual(no, ?REGISTRY:register_name(?NAME, self())),
    ?assertEqual(ok, ?REGISTRY:unregister_name(?NAME)),
    ?assertEqual(ok, ?REGISTRY:set_value(?NAME, a_value)),
    ?assertEqual(undefined, ?REGISTRY:value(?NAME)),
    ?assertEqual([], ?REGISTRY:values()).

nowhere() ->
    ?assertEqual(undefined, ?REGISTRY:whereis(<<"stream">>, nobody@nowhere)).

idle() ->
    spawn(fun() ->
        receive
            stop -> ok
        end
    end).

killed(Pid) ->
    Monitor = monitor(process, Pid),
    exit(Pid, kill),
    receive
        {'DOWN', Monitor, _, _, _} -> ok
    end.
