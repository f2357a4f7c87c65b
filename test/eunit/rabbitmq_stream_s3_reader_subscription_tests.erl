-module(rabbitmq_stream_s3_reader_subscription_tests).
-include_lib("eunit/include/eunit.hrl").

-define(SUBSCRIPTION, rabbitmq_stream_s3_reader_subscription).
-define(QUEUE, {resource, <<"/">>, queue, <<"orders">>}).

%% A connection: answers for its state, and sends what it is told.
connection(State) ->
    Test = self(),
    spawn_link(fun() ->
        receive
            {system, From, get_state} -> gen:reply(From, {ok, State})
        end,
        receive
            Told -> Test ! {told, Told}
        end
    end).

told() ->
    receive
        {told, Told} -> Told
    after 5000 -> nothing
    end.

the_monitor_of_this_stream_and_member_is_found_test() ->
    [Ours, Others, Elsewhere] = [make_ref() || _ <- [1, 2, 3]],
    Monitors = #{
        Others => {self(), <<"invoices">>},
        Ours => {self(), <<"orders">>},
        Elsewhere => {whereis(init), <<"orders">>}
    },
    State = {open, {statem_data, ssl, {connection, <<"name">>, #{}, [], Monitors}, {state, #{}}}},
    ?assertEqual({ok, Ours}, ?SUBSCRIPTION:monitor_of(self(), <<"orders">>, State)),
    ok = ?SUBSCRIPTION:tell(connection(State), self(), ?QUEUE, lost),
    Self = self(),
    ?assertEqual({'DOWN', Ours, process, Self, {stream_s3, lost}}, told()).

a_connection_of_another_shape_is_closed_test() ->
    State = {open, {statem_data, #{{self(), <<"orders">>} => make_ref()}}},
    ?assertEqual(none, ?SUBSCRIPTION:monitor_of(self(), <<"orders">>, State)),
    ok = logger:set_handler_config(default, level, none),
    ok = ?SUBSCRIPTION:tell(connection(State), self(), ?QUEUE, corrupt),
    ok = logger:set_handler_config(default, level, all),
    ?assertMatch({shutdown, _}, told()).

a_connection_that_is_gone_is_not_told_test() ->
    {Gone, Monitor} = spawn_monitor(fun() -> ok end),
    receive
        {'DOWN', Monitor, process, Gone, _} -> ok
    end,
    ?assertEqual(ok, ?SUBSCRIPTION:tell(Gone, self(), ?QUEUE, corrupt)).

nobody_is_told_of_a_log_without_a_member_test() ->
    ok = ?SUBSCRIPTION:end_stream(reader, ?QUEUE, atomics:new(4, []), corrupt),
    ok = ?SUBSCRIPTION:closed(reader),
    ?assertEqual(undefined, get({?SUBSCRIPTION, reader})).

%% Of a reader that nobody understands only the queue is known: its member is found by that, and the
%% connection is told once.
the_connection_of_a_reader_of_another_version_is_told_test() ->
    Cache = osiris_reader_context_cache,
    _ = [ets:new(Cache, [named_table, public]) || ets:whereis(Cache) =:= undefined],
    Member = spawn_link(fun() -> receive stop -> ok end end),
    true = ets:insert(Cache, {Member, "dir", "name", atomics:new(4, []), ?QUEUE, fun(_) -> ok end}),
    Monitor = make_ref(),
    ok = ?SUBSCRIPTION:end_stream(?QUEUE, unknown_reader),
    ok = ?SUBSCRIPTION:end_stream(?QUEUE, unknown_reader),
    receive
        {system, From, get_state} ->
            gen:reply(From, {ok, {open, #{Monitor => {Member, <<"orders">>}}}})
    end,
    receive
        {'DOWN', Monitor, process, Member, Reason} ->
            ?assertEqual({stream_s3, unknown_reader}, Reason)
    end,
    receive
        {system, _, _} -> error(told_twice)
    after 0 -> ok
    end,
    true = ets:delete(Cache).
