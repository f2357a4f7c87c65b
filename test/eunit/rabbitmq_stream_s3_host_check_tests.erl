%% Before an upgrade: the osiris of this host, and others that are made of it.
-module(rabbitmq_stream_s3_host_check_tests).
-include_lib("eunit/include/eunit.hrl").

-define(CHECK, rabbitmq_stream_s3_host_check).
-define(COMMAND, 'Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3CheckHostCommand').

ebin() ->
    filename:dirname(filename:absname(code:which(osiris))).

host_check_test_() ->
    {foreach, fun setup/0, fun file:del_dir_r/1, [
        fun(Dir) -> {timeout, 300, {atom_to_list(name(T)), fun() -> T(Dir) end}} end
     || T <- [
            fun the_osiris_of_this_host_can_be_hooked/1,
            fun every_way_to_name_it/1,
            fun a_missing_function_is_named/1,
            fun a_missing_neighbour_is_named/1,
            fun no_debug_info/1,
            fun no_osiris/1,
            fun native_hooks/1,
            fun the_command_says_it_with_its_exit_status/1
        ]
    ]}.

name(Test) ->
    {name, Name} = erlang:fun_info(Test, name),
    Name.

setup() ->
    Unique = integer_to_list(erlang:unique_integer([positive])),
    Dir = filename:join("/tmp", lists:append(["stream_s3_host_", os:getpid(), "_", Unique])),
    ok = filelib:ensure_path(Dir),
    Dir.

%% A copy of this host's osiris in Dir/Below.
copy(Dir, Below) ->
    To = filename:join(Dir, Below),
    ok = filelib:ensure_path(To),
    lists:foreach(
        fun(File) -> {ok, _} = file:copy(File, filename:join(To, filename:basename(File))) end,
        filelib:wildcard(filename:join(ebin(), "osiris*.{beam,app}"))
    ),
    To.

the_osiris_of_this_host_can_be_hooked(_) ->
    {ok, #{how := instrumented, version := Version}} = ?CHECK:check(ebin()),
    ok = ensure_loaded(),
    {ok, Expected} = application:get_key(osiris, vsn),
    ?assertEqual(list_to_binary(Expected), Version).

ensure_loaded() ->
    case application:load(osiris) of
        ok -> ok;
        {error, {already_loaded, osiris}} -> ok
    end.

every_way_to_name_it(Dir) ->
    Below = "usr/lib/rabbitmq/lib/rabbitmq_server-9.9.9/plugins/osiris-9.9.9/ebin",
    Ebin = copy(Dir, Below),
    Plugins = filename:dirname(filename:dirname(Ebin)),
    Folders = [Dir, Ebin],
    Beam = filename:join(Ebin, "osiris_log.beam"),
    lists:foreach(
        fun(Path) ->
            ?assertMatch({_, {ok, #{how := instrumented}}}, {Path, ?CHECK:check(list_to_binary(Path))})
        end,
        [Beam | Folders]
    ),
    Archive = filename:join(Plugins, "osiris-9.9.9.ez"),
    {ok, _} = zip:create(Archive, ["osiris-9.9.9"], [{cwd, Plugins}]),
    ?assertMatch({error, several, _}, ?CHECK:check(Plugins)),
    ok = file:del_dir_r(filename:dirname(Ebin)),
    [?assertMatch({ok, #{how := instrumented}}, ?CHECK:check(P)) || P <- [Archive, Plugins]].

a_missing_function_is_named(Dir) ->
    Ebin = copy(Dir, "ebin"),
    rewrite(Ebin, osiris_log, fun(Form) -> not is_function_form(Form, send_file, 3) end),
    {error, unknown_shape, Text} = ?CHECK:check(Dir),
    ?assertMatch({_, _}, binary:match(Text, <<"no exported function send_file/3">>)).

a_missing_neighbour_is_named(Dir) ->
    Ebin = copy(Dir, "ebin"),
    rewrite(Ebin, osiris_retention, fun(Form) -> not is_function_form(Form, eval, 4) end),
    {error, unknown_shape, Text} = ?CHECK:check(Dir),
    ?assertMatch({_, _}, binary:match(Text, <<"osiris_retention,eval,4">>)),
    ok = file:delete(filename:join(Ebin, "osiris_retention.beam")),
    ?assertMatch({error, unknown_shape, _}, ?CHECK:check(Dir)).

no_debug_info(Dir) ->
    Beam = filename:join(copy(Dir, "ebin"), "osiris_log.beam"),
    {ok, Binary} = file:read_file(Beam),
    {ok, {_, Stripped}} = beam_lib:strip(Binary),
    ok = file:write_file(Beam, Stripped),
    ?assertMatch({error, debug_info_unreadable, _}, ?CHECK:check(Dir)),
    ok = file:write_file(Beam, <<"no beam">>),
    ?assertMatch({error, debug_info_unreadable, _}, ?CHECK:check(Dir)).

no_osiris(Dir) ->
    ?assertMatch({error, osiris_missing, _}, ?CHECK:check(Dir)),
    ?assertMatch({error, osiris_missing, _}, ?CHECK:check(filename:join(Dir, "nothing"))),
    File = filename:join(Dir, "osiris-1.ez"),
    ok = file:write_file(File, <<"no archive">>),
    ?assertMatch({error, osiris_missing, _}, ?CHECK:check(File)),
    ok = file:delete(File),
    Other = filename:join(copy(Dir, "ebin"), "osiris.beam"),
    ?assertMatch({error, osiris_missing, _}, ?CHECK:check(Other)).

native_hooks(Dir) ->
    Ebin = copy(Dir, "ebin"),
    behaviour(Ebin, "osiris_log_hooks", "on_init(a, b, c) -> ok"),
    behaviour(Ebin, "osiris_log_reader", "close(a) -> ok"),
    ?assertMatch({ok, #{how := native}}, ?CHECK:check(Dir)),
    behaviour(Ebin, "osiris_log_reader", "fly(a) -> ok"),
    {error, unknown_shape, Text} = ?CHECK:check(Dir),
    ?assertMatch({_, _}, binary:match(Text, <<"fly,1">>)).

behaviour(Ebin, Name, Callback) ->
    Source = filename:join(Ebin, Name ++ ".erl"),
    ok = file:write_file(Source, ["-module(", Name, ").\n-callback ", Callback, ".\n"]),
    {ok, _} = compile:file(Source, [debug_info, {outdir, Ebin}]),
    ok.

the_command_says_it_with_its_exit_status(Dir) ->
    ?assertMatch({ok, _}, ?COMMAND:run([list_to_binary(ebin())], #{})),
    {error, 69, Text} = ?COMMAND:run([list_to_binary(Dir)], #{}),
    ?assertMatch({_, _}, binary:match(Text, <<"no osiris below">>)).

rewrite(Ebin, Module, Keep) ->
    Beam = filename:join(Ebin, atom_to_list(Module) ++ ".beam"),
    {ok, {_, [{abstract_code, {_, Forms0}}]}} = beam_lib:chunks(Beam, [abstract_code]),
    Forms1 = [F || F <- Forms0, Keep(F)],
    Defined = [{N, A} || {function, _, N, A, _} <- Forms1],
    Forms = [exported(Defined, F) || F <- Forms1],
    %% Stock's own calls of what is gone do not matter here.
    {ok, Module, Binary} = compile:forms([called(F) || F <- Forms], [debug_info, nowarn_unused_function]),
    ok = file:write_file(Beam, Binary).

exported(Defined, {attribute, A, export, Fs}) -> {attribute, A, export, [F || F <- Fs, lists:member(F, Defined)]};
exported(_, Form) -> Form.

called({attribute, A, spec, _}) -> {attribute, A, file, {"x", 1}};
called({call, A, {atom, A1, send_file}, [_, _, _] = Args}) -> {call, A, {remote, A1, {atom, A1, other}, {atom, A1, send_file}}, Args};
called({call, A, {atom, A1, eval}, [_, _, _, _] = Args}) -> {call, A, {remote, A1, {atom, A1, other}, {atom, A1, eval}}, Args};
called(T) when is_tuple(T) -> list_to_tuple([called(E) || E <- tuple_to_list(T)]);
called([H | T]) -> [called(H) | called(T)];
called(T) -> T.

is_function_form({function, _, Name, Arity, _}, Name, Arity) -> true;
is_function_form(_, _, _) -> false.
