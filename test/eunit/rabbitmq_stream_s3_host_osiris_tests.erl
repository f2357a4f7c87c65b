-module(rabbitmq_stream_s3_host_osiris_tests).
-include_lib("eunit/include/eunit.hrl").

-define(FORMS, rabbitmq_stream_s3_host_forms).

forms() ->
    {osiris_log, Binary, _} = code:get_object_code(osiris_log),
    {ok, {_, [{abstract_code, {_, Forms}}]}} = beam_lib:chunks(Binary, [abstract_code]),
    Forms.

problems(Forms) ->
    {error, Problems} = ?FORMS:instrument(mark, Forms),
    lists:sort([lists:flatten(P) || P <- Problems]).

the_shape_of_this_osiris_is_known_test() ->
    ?assertMatch({ok, _}, ?FORMS:instrument(mark, forms())).

a_missing_function_is_refused_test() ->
    Forms = [F || F <- forms(), not is_function_form(F, send_file, 3)],
    ?assertEqual(["no exported function send_file/3"], problems(Forms)).

a_function_that_is_not_exported_is_refused_test() ->
    Forms = [unexport({close, 1}, F) || F <- forms()],
    ?assertEqual(["no exported function close/1"], problems(Forms)).

a_function_that_may_be_missing_is_not_refused_test() ->
    Forms = [F || F <- forms(), not is_function_form(F, resolve_offset_spec, 2)],
    ?assertMatch({ok, _}, ?FORMS:instrument(mark, Forms)).

every_problem_is_named_test() ->
    Forms = [
        F
     || F <- forms(),
        not is_function_form(F, init, 2),
        not is_function_form(F, chunk_iterator, 3),
        not is_function_form(F, chunk_iterator, 2)
    ],
    ?assertEqual(
        ["no exported function chunk_iterator/3", "no exported function init/2"], problems(Forms)
    ).

a_log_that_opens_without_init_2_is_refused_test() ->
    Forms = [rename_call(F, init_acceptor, init, other_init) || F <- forms()],
    ?assertEqual(["init_acceptor/3 does not go through init/2"], problems(Forms)).

an_unknown_record_is_refused_test() ->
    Forms = [F || F <- forms(), not is_record_form(F, read)],
    ?assertMatch(["record read has no field chunk_selector" | _], problems(Forms)).

%% What does not compile must not get as far as the loader.
a_module_that_does_not_compile_is_refused_test() ->
    Broken = [
        {function, 1, broken, 0, [{clause, 1, [], [], [{var, 1, 'Unbound'}]}]},
        {eof, 2}
    ],
    Forms = [F || F <- forms(), element(1, F) =/= eof] ++ Broken,
    ?assertMatch({error, {compile_failed, _}}, rabbitmq_stream_s3_host_osiris:instrumented(Forms)).

attach_test_() ->
    {setup, fun stream_s3_test_log:setup/0, fun stream_s3_test_log:cleanup/1, [
        fun the_module_is_marked/0,
        fun a_second_attach_does_not_load_again/0,
        fun detached_wrappers_are_stock/0,
        {timeout, 120, fun wrappers_of_another_version_are_good_enough_to_protect/0},
        {timeout, 120, fun wrappers_that_call_what_is_not_here_are_left_alone/0},
        fun stored_offsets_are_kept_while_the_plugin_is_off/0,
        fun nobody_is_inside_when_the_modules_go/0,
        fun attached_logs_open_and_write/0
    ]}.

the_module_is_marked() ->
    Attributes = osiris_log:module_info(attributes),
    ?assertEqual([?FORMS:version()], proplists:get_value(rabbitmq_stream_s3, Attributes)),
    ?assertMatch(
        #{mode := instrumented, attached := true}, rabbitmq_stream_s3_host_osiris:status()
    ).

a_second_attach_does_not_load_again() ->
    Md5 = osiris_log:module_info(md5),
    %% A load would leave the code of now behind as old code.
    true = code:soft_purge(osiris_log),
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()),
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()),
    ?assertEqual(Md5, osiris_log:module_info(md5)),
    ?assertNot(erlang:check_old_code(osiris_log)).

detached_wrappers_are_stock() ->
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    Log = stream_s3_test_log:append(4, stream_s3_test_log:new("detached")),
    StreamId = stream_s3_test_log:stream_id(Log),
    ?assertEqual(none, stream_s3_nif_double:manifest_range(double, StreamId)),
    Context = stream_s3_test_log:context(#{}, Log),
    {ok, Reader} = osiris_log:init_offset_reader(first, Context),
    ?assertEqual(osiris_log, element(1, Reader)),
    {ok, #{chunk_id := 0}, Iterator, Reader1} = osiris_log:chunk_iterator(Reader, 1),
    ?assertMatch({{0, <<"record 0">>}, _}, osiris_log:iterator_next(Iterator)),
    ?assertEqual(2, osiris_log:next_offset(Reader1)),
    %% A timer of osiris may still carry our spec.
    Dir = stream_s3_test_log:dir(Log),
    ?assertMatch({{0, 7}, _, 2}, osiris_log:evaluate_retention(Dir, [{'fun', any}])),
    ?assertEqual([0, 6], stream_s3_test_log:segments(Log)),
    ok = osiris_log:close(Reader1),
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()).

%% As if this node's osiris_log had been instrumented by a plugin of that version.
installed(Version, Calls) ->
    {ok, Hooked} = ?FORMS:instrument(rabbitmq_stream_s3, forms()),
    Changed = lists:flatmap(
        fun
            ({attribute, A, rabbitmq_stream_s3, _}) -> [{attribute, A, rabbitmq_stream_s3, Version}];
            ({attribute, _, rabbitmq_stream_s3_calls, _}) when Calls =:= none -> [];
            ({attribute, A, rabbitmq_stream_s3_calls, Own}) ->
                [{attribute, A, rabbitmq_stream_s3_calls, Own ++ Calls}];
            (Form) -> [Form]
        end,
        Hooked
    ),
    {ok, osiris_log, Binary} = compile:forms(Changed),
    true = code:soft_purge(osiris_log),
    {module, osiris_log} = code:load_binary(osiris_log, code:which(osiris_log), Binary),
    ok = rabbitmq_stream_s3_host_osiris:detach().

as_it_was() ->
    ok = installed(?FORMS:version(), []),
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()).

wrappers_of_another_version_are_good_enough_to_protect() ->
    try
        %% Version 1 did not say what it calls.
        [
            begin
                ok = installed(Version, Calls),
                {error, {restart_needed, _}} = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()),
                ?assertMatch(
                    #{mode := instrumented, attached := true}, rabbitmq_stream_s3_host_osiris:status()
                )
            end
         || {Version, Calls} <- [{1, none}, {99, []}]
        ]
    after
        as_it_was()
    end.

wrappers_that_call_what_is_not_here_are_left_alone() ->
    try
        [
            begin
                ok = installed(99, Calls),
                {error, {restart_needed, _}} = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()),
                ?assertMatch(#{attached := false}, rabbitmq_stream_s3_host_osiris:status())
            end
         || Calls <- [none, [{rabbitmq_stream_s3_hooks, on_something_new, 4}]]
        ]
    after
        as_it_was()
    end.

stored_offsets_are_kept_while_the_plugin_is_off() ->
    Dir = filename:join(["/tmp", "stream_s3_eunit_" ++ os:getpid(), "kept"]),
    ok = filelib:ensure_path(Dir),
    Firsts = fun(Name) ->
        State = osiris_log:init(#{name => Name, dir => Dir, epoch => 1}),
        counters:put(osiris_log:counters_ref(State), 2, 50),
        counters:put(osiris_log:counters_ref(State), 3, 5000),
        {osiris_log:first_offset(State), osiris_log:first_timestamp(State)}
    end,
    ok = rabbitmq_stream_s3_host_osiris:detach(#{<<"kept">> => {10, 1000}, <<"late">> => {70, 7000}}),
    ?assertEqual({10, 1000}, Firsts(<<"kept">>)),
    ?assertEqual({10, 1000}, Firsts("kept")),
    ?assertEqual({50, 5000}, Firsts(<<"late">>)),
    ?assertEqual({50, 5000}, Firsts(<<"another">>)),
    ok = rabbitmq_stream_s3_host_osiris:detach(all),
    ?assertEqual({0, 0}, Firsts(<<"another">>)),
    %% On again: the hooks say it from here on, and nothing is left behind.
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()),
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    ?assertEqual({50, 5000}, Firsts(<<"kept">>)),
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()).

%% A hook that is under way ends before its modules are unloaded.
nobody_is_inside_when_the_modules_go() ->
    Test = self(),
    Log = stream_s3_test_log:append(4, stream_s3_test_log:new("inside")),
    Context = stream_s3_test_log:context(#{}, Log),
    {ok, Listen} = gen_tcp:listen(0, [binary, {active, false}]),
    {ok, Port} = inet:port(Listen),
    Inside = spawn_link(fun() ->
        Callback = fun(_, _) ->
            Test ! inside,
            receive
                go_on -> Test ! {left, erlang:monotonic_time()}
            end,
            <<>>
        end,
        %% File and socket belong to who opened them.
        {ok, Socket} = gen_tcp:connect({127, 0, 0, 1}, Port, [binary]),
        {ok, Reader} = osiris_log:init_offset_reader(first, Context),
        {ok, _} = osiris_log:send_file(Socket, Reader, Callback)
    end),
    receive
        inside -> ok
    end,
    _ = erlang:send_after(100, Inside, go_on),
    ok = rabbitmq_stream_s3_host_osiris:detach(none),
    Detached = erlang:monotonic_time(),
    receive
        {left, Left} -> ?assert(Left < Detached)
    after 0 -> error(still_inside)
    end,
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()).

attached_logs_open_and_write() ->
    Log = stream_s3_test_log:append(4, stream_s3_test_log:new("attached")),
    Open = fun() -> osiris_log:init_offset_reader(last, stream_s3_test_log:context(#{}, Log)) end,
    {ok, Ours} = Open(),
    ?assertEqual(rabbitmq_stream_s3_log_reader, element(1, Ours)),
    ?assertEqual(6, osiris_log:next_offset(Ours)),
    ok = osiris_log:close(Ours),
    _ = stream_s3_nif_double:forget(stream_s3_test_log:stream_id(Log)),
    {ok, Stock} = Open(),
    ?assertEqual(osiris_log, element(1, Stock)),
    ok = osiris_log:close(Stock).

is_function_form({function, _, Name, Arity, _}, Name, Arity) -> true;
is_function_form(_, _, _) -> false.

is_record_form({attribute, _, record, {Name, _}}, Name) -> true;
is_record_form(_, _) -> false.

unexport(F, {attribute, A, export, Fs}) -> {attribute, A, export, Fs -- [F]};
unexport(_, Form) -> Form.

rename_call({function, A, Name, Arity, Clauses}, Name, From, To) ->
    {function, A, Name, Arity, rename(Clauses, From, To)};
rename_call(Form, _, _, _) ->
    Form.

rename({call, A, {atom, A1, From}, Args}, From, To) -> {call, A, {atom, A1, To}, Args};
rename(T, From, To) when is_tuple(T) -> list_to_tuple(rename(tuple_to_list(T), From, To));
rename([H | T], From, To) -> [rename(H, From, To) | rename(T, From, To)];
rename(T, _, _) -> T.
