-module(rabbitmq_stream_s3_host_forms).
-moduledoc """
Owns the shape that osiris_log must have, and the change of its abstract code that adds the
hooks. Pure: forms in, forms out.

Does not own reading, compiling or loading the module (rabbitmq_stream_s3_host_osiris), nor what
a hook does (rabbitmq_stream_s3_hooks, rabbitmq_stream_s3_log_reader), nor what takes its place
while the plugin is off (rabbitmq_stream_s3_host_detached_forms).

A hooked function keeps its body under the name '$stock_<name>'; the old name becomes a
wrapper. Calls inside the module go to the wrapper too: init/1 and init_acceptor/3 reach the
hook of init/2 that way, and chunk_iterator/1,2 hand our reader on to chunk_iterator/3.
""".

-export([instrument/2, wrap_answers/3, wrap_drain/2, version/0]).
-export([calls/0, calls_of/2]).

-type forms() :: [erl_parse:abstract_form() | erl_parse:form_info()].
-export_type([forms/0]).

%% Bump when a wrapper changes: code of another version needs a restart of the node. Until then it
%% protects, if everything that it calls is there (see calls_of/2).
-define(VERSION, 3).

-doc "The version of the wrappers that instrument/2 adds.".
-spec version() -> pos_integer().
version() ->
    ?VERSION.

-doc "What the wrappers call in the plugin; kept with them, for a plugin of another version.".
-spec calls() -> [mfa()].
calls() ->
    Hooks = [
        {empty_log, 1},
        {on_init, 3},
        {on_update_retention, 2},
        {evaluate_retention, 2},
        {first_offset, 2},
        {first_timestamp, 2}
    ],
    Reader = [
        {init_offset_reader, 2},
        {resolve_offset_spec, 2},
        {adopt, 2},
        {send_file, 3},
        {chunk_iterator, 2},
        {chunk_iterator, 3},
        {iterator_next, 1},
        {next_offset, 1},
        {committed_offset, 1},
        {committed_chunk_id, 1},
        {close, 1}
    ],
    [{rabbitmq_stream_s3_hooks, F, A} || {F, A} <- Hooks] ++
        [{rabbitmq_stream_s3_log_reader, F, A} || {F, A} <- Reader].

-doc "What the wrappers in a module with these attributes call. Those of version 1 did not say.".
-spec calls_of(pos_integer(), [{atom(), term()}]) -> {ok, [mfa()]} | unknown.
calls_of(1, _) ->
    {ok, calls()};
calls_of(_, Attributes) ->
    case proplists:get_value(rabbitmq_stream_s3_calls, Attributes, unknown) of
        unknown -> unknown;
        Calls -> {ok, Calls}
    end.

-doc """
Adds the hooks, and the attribute Mark with the version, to the forms of osiris_log. Refuses with
the list of everything that is not as expected.
""".
-spec instrument(atom(), forms()) -> {ok, forms()} | {error, [unicode:chardata()]}.
instrument(Mark, Forms) ->
    case plan(Forms) of
        {Hooks, []} ->
            {ok, rewrite(Mark, Hooks, Forms)};
        {_, Problems} ->
            {error, Problems}
    end.

-doc """
Has rabbitmq_stream_s3_reader_stats look over what functions of a module answer, while the hooks are there:
with the same arguments, and the answer behind them. Those that there are: an older osiris has fewer.
""".
-spec wrap_answers(atom(), [{atom(), arity()}], forms()) ->
    {ok, forms()} | {error, {unknown_shape, unicode:chardata()}}.
wrap_answers(Mark, Functions, Forms) ->
    case lists:filter(present(Forms), Functions) of
        [] ->
            {error, {unknown_shape, lists:join(", ", [missing(F) || F <- Functions])}};
        There ->
            Attributes = [{attribute, erl_anno:new(0), Mark, ?VERSION}],
            {ok, replace(There, Attributes, [parse(looked_over(F)) || F <- There], Forms)}
    end.

-doc """
Has rabbitmq_stream_s3_reader_drain decide when a drain of one of our readers is complete. The forms are those
of rabbit_stream_queue, where a drain completes at any end of stream, and is answered right after.
""".
-spec wrap_drain(atom(), forms()) -> {ok, forms()} | {error, {unknown_shape, unicode:chardata()}}.
wrap_drain(Mark, Forms) ->
    Functions = [{maybe_drain, 1}, {credit_reply, 2}],
    Defined = [{N, A} || {function, _, N, A, _} <- Forms],
    Wanted = [credit, drain, credit_reply_outstanding, log],
    Problems =
        [missing(F) || F <- Functions -- Defined] ++
            [
                io_lib:format("record stream has no field ~s", [Field])
             || Field <- Wanted -- fields(stream, Forms)
            ],
    case Problems of
        [] ->
            Attributes = [{attribute, erl_anno:new(0), Mark, ?VERSION}],
            Wrappers = [parse(Text) || Text <- [maybe_drain(), credit_reply()]],
            {ok, replace(Functions, Attributes, Wrappers, Forms)};
        _ ->
            {error, {unknown_shape, lists:join(", ", Problems)}}
    end.

%% Every group lists arities that may carry the hook, best first; the first one present gets it.
known() ->
    [
        {must, init, [2]},
        {must, init_offset_reader, [2]},
        {must, evaluate_retention, [2]},
        {must, update_retention, [2]},
        {must, first_offset, [1]},
        {must, first_timestamp, [1]},
        {must, next_offset, [1]},
        {must, committed_offset, [1]},
        {must, committed_chunk_id, [1]},
        {must, close, [1]},
        {must, send_file, [3]},
        {must, chunk_iterator, [3, 2]},
        {must, iterator_next, [1]},
        {may, resolve_offset_spec, [2]}
    ].

%% Functions that the plugin calls and does not hook.
called() ->
    [
        {get_shared, 1},
        {get_name, 1},
        {counters_ref, 1},
        {make_counter, 1},
        {init_acceptor, 3},
        {init, 1},
        {tail_info, 1},
        {write, 5}
    ].

plan(Forms) ->
    Present = present(Forms),
    Plan = fun({Need, Name, Arities}, {Hooks, Problems}) ->
        case {[{Name, A} || A <- Arities, Present({Name, A})], Need} of
            {[Hook | _], _} -> {[Hook | Hooks], Problems};
            {[], may} -> {Hooks, Problems};
            {[], must} -> {Hooks, [missing({Name, hd(Arities)}) | Problems]}
        end
    end,
    {Hooks, Missing} = lists:foldl(Plan, {[], []}, known()),
    Problems =
        lists:reverse(Missing) ++
            [missing(F) || F <- called(), not Present(F)] ++
            [bypass(F) || F <- [{init, 1}, {init_acceptor, 3}], not calls_init(F, Forms)] ++
            [missing(F) || F <- [{open_new_segment, 1}], not is_defined(F, Forms)] ++
            records(Forms),
    {Hooks, Problems}.

present(Forms) ->
    Exported = lists:append([Fs || {attribute, _, export, Fs} <- Forms]),
    Defined = [{N, A} || {function, _, N, A, _} <- Forms],
    fun(F) -> lists:member(F, Exported) andalso lists:member(F, Defined) end.

is_defined(Wanted, Forms) ->
    lists:member(Wanted, [{Name, Arity} || {function, _, Name, Arity, _} <- Forms]).

missing({open_new_segment = Name, Arity}) ->
    io_lib:format("no function ~s/~b", [Name, Arity]);
missing({Name, Arity}) ->
    io_lib:format("no exported function ~s/~b", [Name, Arity]).

bypass({Name, Arity}) ->
    io_lib:format("~s/~b does not go through init/2", [Name, Arity]).

calls_init({Name, Arity}, Forms) ->
    lists:any(
        fun(Clauses) -> calls(init, 2, Clauses) end,
        [Cs || {function, _, N, A, Cs} <- Forms, N =:= Name, A =:= Arity]
    ).

calls(Name, Arity, {call, _, {atom, _, Name}, Args}) when length(Args) =:= Arity -> true;
calls(Name, Arity, T) when is_tuple(T) -> calls(Name, Arity, tuple_to_list(T));
calls(Name, Arity, [H | T]) -> calls(Name, Arity, H) orelse calls(Name, Arity, T);
calls(_, _, _) -> false.

%% The fields by which a stock reader is recognised and taken over (see the wrapper of send_file), and
%% an empty log (see begin_log).
records(Forms) ->
    Wanted = [
        {osiris_log, [cfg, mode, current_file, fd, index_fd]},
        {write, [tail_info]},
        {cfg, [directory, name, counter, counter_id, readers_counter_fun, shared]},
        {read, [type, transport, chunk_selector, filter]}
    ],
    [
        io_lib:format("record ~s has no field ~s", [Record, Field])
     || {Record, Fields} <- Wanted,
        Field <- Fields,
        not lists:member(Field, fields(Record, Forms))
    ].

fields(Record, Forms) ->
    lists:append([
        [field_name(F) || F <- Fs]
     || {attribute, _, record, {R, Fs}} <- Forms, R =:= Record
    ]).

field_name({typed_record_field, Field, _}) -> field_name(Field);
field_name({record_field, _, {atom, _, Name}}) -> Name;
field_name({record_field, _, {atom, _, Name}, _}) -> Name.

rewrite(Mark, Hooks, Forms) ->
    Anno = erl_anno:new(0),
    Attributes = [
        {attribute, Anno, Mark, ?VERSION},
        {attribute, Anno, rabbitmq_stream_s3_calls, calls()},
        {attribute, Anno, export, [{'$retention_evaluated', 2}]}
    ],
    Detached = rabbitmq_stream_s3_host_detached_forms:functions(fields(iterator, Forms)),
    Added = [adopt(), evaluated(), begin_log() | Detached] ++ [wrapper(H) || H <- Hooks],
    Wrappers = [parse(Text) || Text <- Added],
    replace(Hooks, Attributes, Wrappers, Forms).

replace(Functions, Attributes, Wrappers, Forms) ->
    lists:flatmap(
        fun
            ({attribute, _, module, _} = Form) -> [Form | Attributes];
            ({eof, _} = Form) -> Wrappers ++ [Form];
            ({function, A, Name, Arity, Clauses} = Form) ->
                case lists:member({Name, Arity}, Functions) of
                    true -> [{function, A, stock(Name), Arity, Clauses}];
                    false -> [Form]
                end;
            (Form) -> [Form]
        end,
        Forms
    ).

stock(Name) ->
    list_to_atom("$stock_" ++ atom_to_list(Name)).

parse(Text) ->
    {ok, Tokens, _} = erl_scan:string(lists:flatten(Text)),
    {ok, Form} = erl_parse:parse_form(Tokens),
    Form.

%% Whatever goes wrong in ours, stock has an answer.
looked_over({Name, Arity}) ->
    Args = ["A" ++ integer_to_list(N) || N <- lists:seq(1, Arity)],
    io_lib:format(
        "~s(~s) ->"
        "    Answer = '$stock_~s'(~s),"
        "    case application:get_env(osiris, log_hooks) of"
        "        {ok, _} ->"
        "            try rabbitmq_stream_s3_reader_stats:~s(~s) catch _:_ -> Answer end;"
        "        undefined -> Answer"
        "    end.",
        [
            Name,
            lists:join(", ", Args),
            Name,
            lists:join(", ", Args),
            Name,
            lists:join(", ", Args ++ ["Answer"])
        ]
    ).

%% Without our modules, as after disabling, stock decides.
maybe_drain() ->
    "maybe_drain(#stream{drain = true, credit = Credit,"
    "                    log = {rabbitmq_stream_s3_log_reader, _} = Log} = Stream) when Credit > 0 ->"
    "    case try rabbitmq_stream_s3_reader_drain:is_complete(Log) catch error:undef -> true end of"
    "        true -> '$stock_maybe_drain'(Stream);"
    "        false -> Stream"
    "    end;"
    "maybe_drain(Stream) -> '$stock_maybe_drain'(Stream).".

%% Credit is left, so the drain is not complete. The session expects none in the answer to a drain.
credit_reply() ->
    "credit_reply(_, #stream{drain = true, credit = Credit,"
    "                        log = {rabbitmq_stream_s3_log_reader, _}} = Stream) when Credit > 0 ->"
    "    {Stream, []};"
    "credit_reply(Tag, Stream) -> '$stock_credit_reply'(Tag, Stream).".

%% Cold functions ask the application environment, so that unset variables mean stock.
wrapper({init, 2}) ->
    "init(Config, Type) ->"
    "    State0 = '$stock_init'(Config, Type),"
    "    case application:get_env(osiris, log_hooks) of"
    "        {ok, Hooks} ->"
    "            State = '$begin_log'(Hooks, Config, Type, State0),"
    "            _ = try Hooks:on_init(Type, Config, State) catch error:undef -> ok end,"
    "            State;"
    "        undefined -> State0"
    "    end.";
wrapper({update_retention, 2}) ->
    "update_retention(Specs, State0) ->"
    "    State = '$stock_update_retention'(Specs, State0),"
    "    case application:get_env(osiris, log_hooks) of"
    "        {ok, Hooks} ->"
    "            _ = try Hooks:on_update_retention(Specs, State) catch error:undef -> ok end,"
    "            State;"
    "        undefined -> State"
    "    end.";
wrapper({evaluate_retention, 2}) ->
    %% Our own spec may still sit in a timer of osiris_retention after the plugin was disabled.
    "evaluate_retention(Dir, Specs) ->"
    "    _ = case application:get_env(osiris, log_hooks) of"
    "        {ok, Hooks} ->"
    "            try Hooks:evaluate_retention(Dir, Specs) catch error:undef -> ok end;"
    "        undefined -> ok"
    "    end,"
    "    '$stock_evaluate_retention'(Dir, [S || S <- Specs, element(1, S) =/= 'fun']).";
wrapper({Name, 1}) when Name =:= first_offset; Name =:= first_timestamp ->
    io_lib:format(
        "~s(State) ->"
        "    Local = '$stock_~s'(State),"
        "    case application:get_env(osiris, log_hooks) of"
        "        {ok, Hooks} -> try Hooks:~s(State, Local) catch error:undef -> Local end;"
        "        undefined -> '$kept'(~s, State, Local)"
        "    end.",
        [Name, Name, Name, Name]
    );
wrapper({Name, 2}) when Name =:= init_offset_reader; Name =:= resolve_offset_spec ->
    io_lib:format(
        "~s(Spec, #{rabbitmq_stream_s3 := stock} = Context) ->"
        "    '$stock_~s'(Spec, Context);"
        "~s(Spec, Context) ->"
        "    case application:get_env(osiris, log_reader) of"
        "        {ok, Reader} -> Reader:~s(Spec, Context);"
        "        undefined -> '$stock_~s'(Spec, Context)"
        "    end.",
        [Name, Name, Name, Name, Name]
    );
%% Hot functions match our own tuple, and only then ask whether the plugin is on: a reader of ours
%% lives in a connection, which does not end when it is disabled.
wrapper({send_file, 3}) ->
    "send_file(Socket, {rabbitmq_stream_s3_log_reader, Ours} = State, Callback) ->"
    "    case application:get_env(osiris, log_reader) of"
    "        {ok, Reader} -> Reader:send_file(Socket, State, Callback);"
    "        undefined ->"
    "            Read = fun(Log) -> '$stock_send_file'(Socket, Log, Callback) end,"
    "            '$detached_read'(Ours, Read)"
    "    end;"
    "send_file(Socket, #osiris_log{cfg = #cfg{counter_id = Id}, mode = #read{type = offset}}"
    "          = State, Callback) when Id =/= undefined ->"
    "    case '$adopt'(State) of"
    "        {ok, Ours} -> rabbitmq_stream_s3_log_reader:send_file(Socket, Ours, Callback);"
    "        false -> '$stock_send_file'(Socket, State, Callback)"
    "    end;"
    "send_file(Socket, State, Callback) -> '$stock_send_file'(Socket, State, Callback).";
wrapper({chunk_iterator, Arity}) ->
    Rest = lists:append([", A" ++ integer_to_list(N) || N <- lists:seq(2, Arity)]),
    %% Not the iterator before: it may be of another reader.
    Fresh = lists:append([", A2" | [", undefined" || _ <- lists:seq(3, Arity)]]),
    io_lib:format(
        "chunk_iterator({rabbitmq_stream_s3_log_reader, Ours} = State~s) ->"
        "    case application:get_env(osiris, log_reader) of"
        "        {ok, Reader} -> Reader:chunk_iterator(State~s);"
        "        undefined ->"
        "            Read = fun(Log) -> '$stock_chunk_iterator'(Log~s) end,"
        "            '$detached_read'(Ours, Read)"
        "    end;"
        "chunk_iterator(#osiris_log{cfg = #cfg{counter_id = Id}, mode = #read{type = offset}}"
        "               = State~s) when Id =/= undefined ->"
        "    case '$adopt'(State) of"
        "        {ok, Ours} -> rabbitmq_stream_s3_log_reader:chunk_iterator(Ours~s);"
        "        false -> '$stock_chunk_iterator'(State~s)"
        "    end;"
        "chunk_iterator(State~s) -> '$stock_chunk_iterator'(State~s).",
        [Rest, Rest, Fresh, Rest, Rest, Rest, Rest, Rest]
    );
wrapper({iterator_next, 1}) ->
    "iterator_next({rabbitmq_stream_s3_iterator, [Entry | Entries], Rest}) ->"
    "    {Entry, {rabbitmq_stream_s3_iterator, Entries, Rest}};"
    "iterator_next({rabbitmq_stream_s3_iterator, _, Rest} = Iterator) ->"
    "    case application:get_env(osiris, log_reader) of"
    "        {ok, Reader} -> Reader:iterator_next(Iterator);"
    "        undefined -> '$detached_iterator_next'(Rest)"
    "    end;"
    "iterator_next(Iterator) -> '$stock_iterator_next'(Iterator).";
wrapper({Name, 1}) ->
    io_lib:format(
        "~s({rabbitmq_stream_s3_log_reader, Ours} = State) ->"
        "    case application:get_env(osiris, log_reader) of"
        "        {ok, Reader} -> Reader:~s(State);"
        "        undefined -> '$detached_~s'(Ours)"
        "    end;"
        "~s(State) -> '$stock_~s'(State).",
        [Name, Name, Name, Name, Name]
    ).

%% Readers opened before the hooks were there would skip what tiering trims: they are taken over
%% on their next read. Readers of ours hold a stock reader without a counter id, so they never
%% match, and neither does a replication reader (type = data).
adopt() ->
    "'$adopt'(#osiris_log{cfg = #cfg{directory = Dir, name = Name, counter = Counter,"
    "                                counter_id = Id, readers_counter_fun = Count,"
    "                                shared = Shared} = Cfg,"
    "                     mode = #read{transport = Transport, chunk_selector = Selector,"
    "                                  filter = Filter}} = State) ->"
    "    case application:get_env(osiris, log_reader) of"
    "        {ok, Reader} ->"
    "            Inner = State#osiris_log{cfg = Cfg#cfg{counter_id = undefined,"
    "                                         readers_counter_fun = fun erlang:is_integer/1}},"
    "            Reader:adopt(Inner, #{dir => Dir, name => Name, counter => Counter,"
    "                                  counter_id => Id, readers_counter_fun => Count,"
    "                                  shared => Shared, transport => Transport,"
    "                                  chunk_selector => Selector, filter => Filter});"
    "        undefined -> false"
    "    end.".

%% A writer whose log is empty begins where Hooks:empty_log/1 says: with an empty chunk of tracking,
%% which takes one offset. Without a chunk a log is at 0 to osiris, whatever the name of its segment
%% (docs/decisions/0021). The old segment goes first: osiris cannot open an empty one in front of another.
begin_log() ->
    "'$begin_log'(Hooks, Config, writer,"
    "             #osiris_log{cfg = #cfg{directory = Dir}, current_file = File,"
    "                         mode = #write{tail_info = {0, empty}} = Write} = State) ->"
    "    case try Hooks:empty_log(Config) catch error:undef -> 0 end of"
    "        0 -> State;"
    "        Offset ->"
    "            Segment = unicode:characters_to_list(filename:join(Dir, File)),"
    "            ok = file:delete(filename:rootname(Segment) ++ \".index\"),"
    "            ok = file:delete(Segment),"
    "            Begun = open_new_segment("
    "                      State#osiris_log{mode = Write#write{tail_info = {Offset, empty}}}),"
    "            Now = erlang:system_time(millisecond),"
    "            #osiris_log{fd = Fd, index_fd = IndexFd} = write([<<>>], 2, Now, <<>>, Begun),"
    "            ok = file:close(IndexFd),"
    "            ok = file:close(Fd),"
    "            '$stock_init'(Config, writer)"
    "    end;"
    "'$begin_log'(_, _, _, State) -> State.".

%% What osiris does after its own evaluations: without it the floor that readers see would stay
%% below the first segment. Here and not in the plugin, because osiris keeps the fun in timers and
%% the plugin's modules are unloaded when it is disabled. Positions: osiris_log:counter_fields/0.
evaluated() ->
    "'$retention_evaluated'(Shared, Counter) ->"
    "    fun({{First, _}, FirstTimestamp, Segments})"
    "              when is_integer(First), is_integer(FirstTimestamp) ->"
    "            osiris_log_shared:set_first_chunk_id(Shared, First),"
    "            counters:put(Counter, 2, First),"
    "            counters:put(Counter, 3, FirstTimestamp),"
    "            counters:put(Counter, 5, Segments);"
    "       (_) -> ok"
    "    end.".
