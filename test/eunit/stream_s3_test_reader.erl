%% Readers under test, of either kind of consumer: {How, Socket pair or previous iterator, Log state};
%% and what tests of them share.
-module(stream_s3_test_reader).

-export([setup/0, cleanup/1, both/1, named/1]).
-export([
    intercept_floor/0, after_floor/1, open/3, open/4, under_test/2, next/1, all/1, take/2, ids/1,
    close/1, tier/1, stock/4, uploaded/2, range/2, woken/0, not_woken/0, until_chunk/1, asks/1,
    waiting/1, eventually/1, resolved/2, asked_as_its_owner_does/1, readers/0, with_quiet_log/1, cached/1, remote_chunks/1
]).

-define(LOG, stream_s3_test_log).
-define(NIF, stream_s3_nif_double).
-define(TAG, rabbitmq_stream_s3_log_reader).

setup() ->
    ok = ?LOG:setup(),
    intercept_floor().

cleanup(_) ->
    code:purge(osiris_log_shared),
    {module, _} = code:load_file(osiris_log_shared),
    ?LOG:cleanup(ok).

%% Each of these with both kinds of consumer.
both(Tests) ->
    [
        {atom_to_list(name(T)) ++ " " ++ atom_to_list(How), fun() -> T(How) end}
     || T <- Tests, How <- [send_file, chunk_iterator]
    ].

named(Tests) ->
    [{atom_to_list(name(T)), T} || T <- Tests].

name(Test) ->
    {name, Name} = erlang:fun_info(Test, name),
    Name.

%% Lets a test run something right after somebody has looked at the floor of a log.
intercept_floor() ->
    {_, Binary, File} = code:get_object_code(osiris_log_shared),
    {ok, {_, [{abstract_code, {_, Forms}}]}} = beam_lib:chunks(Binary, [abstract_code]),
    Text =
        "first_chunk_id(Ref) -> Floor = '$first_chunk_id'(Ref), case erase(after_floor) of "
        "undefined -> Floor; Fun -> Fun(), Floor end.",
    {ok, Tokens, _} = erl_scan:string(Text),
    {ok, Wrapper} = erl_parse:parse_form(Tokens),
    New = lists:flatmap(
        fun
            ({function, A, first_chunk_id, 1, Cs}) ->
                [{function, A, '$first_chunk_id', 1, Cs}, Wrapper];
            (Form) ->
                [Form]
        end,
        Forms
    ),
    {ok, Module, Code} = compile:forms(New),
    code:purge(Module),
    {module, Module} = code:load_binary(Module, File, Code),
    ok.

after_floor(Fun) ->
    undefined = put(after_floor, Fun),
    ok.

open(How, Spec, Log) ->
    open(How, Spec, #{}, Log).

open(How, Spec, Options, Log) ->
    {ok, State} = osiris_log:init_offset_reader(Spec, ?LOG:context(Options, Log)),
    under_test(How, State).

under_test(send_file, State) -> {send_file, sockets(), State};
under_test(chunk_iterator, State) -> {chunk_iterator, undefined, State}.

sockets() ->
    {ok, Listen} = gen_tcp:listen(0, [binary, {active, false}, {ip, {127, 0, 0, 1}}]),
    {ok, Port} = inet:port(Listen),
    {ok, Out} = gen_tcp:connect({127, 0, 0, 1}, Port, [binary, {active, false}]),
    {ok, In} = gen_tcp:accept(Listen),
    ok = gen_tcp:close(Listen),
    {Out, In}.

%% One chunk: {{ChunkId, What}, Reader} or {end_of_stream, Reader} or {error, _}.
next({send_file, {Out, In} = Sockets, State0}) ->
    Callback = fun(#{chunk_id := Id, num_entries := _}, Size) ->
        %% osiris 1.8 leaves the sending of the frame's start to the callback.
        case erlang:function_exported(osiris_log, chunk_iterator, 3) of
            true -> <<Id:64, Size:32>>;
            false -> gen_tcp:send(Out, <<Id:64, Size:32>>)
        end
    end,
    case osiris_log:send_file(Out, State0, Callback) of
        {ok, State} ->
            {ok, <<Id:64, Size:32>>} = gen_tcp:recv(In, 12, 1000),
            {ok, Bytes} = gen_tcp:recv(In, Size, 1000),
            {{Id, Bytes}, {send_file, Sockets, State}};
        {end_of_stream, State} ->
            {end_of_stream, {send_file, Sockets, State}};
        {error, _} = Error ->
            Error
    end;
next({chunk_iterator, Previous, State0}) ->
    Result =
        case erlang:function_exported(osiris_log, chunk_iterator, 3) of
            true -> osiris_log:chunk_iterator(State0, 10, Previous);
            false -> osiris_log:chunk_iterator(State0, 10)
        end,
    case Result of
        {ok, #{chunk_id := Id}, Iterator0, State} ->
            {Entries, Iterator} = entries(Iterator0, []),
            {{Id, Entries}, {chunk_iterator, Iterator, State}};
        {end_of_stream, State} ->
            {end_of_stream, {chunk_iterator, Previous, State}};
        {error, _} = Error ->
            Error
    end.

entries(Iterator0, Acc) ->
    case osiris_log:iterator_next(Iterator0) of
        end_of_chunk -> {lists:reverse(Acc), Iterator0};
        {Entry, Iterator} -> entries(Iterator, [Entry | Acc])
    end.

all(Reader) -> all(Reader, []).

all(Reader0, Acc) ->
    case next(Reader0) of
        {end_of_stream, Reader} -> {lists:reverse(Acc), Reader};
        {Chunk, Reader} -> all(Reader, [Chunk | Acc])
    end.

take(0, Reader) ->
    {[], Reader};
take(N, Reader0) ->
    {{_, _} = Chunk, Reader1} = next(Reader0),
    {Chunks, Reader} = take(N - 1, Reader1),
    {[Chunk | Chunks], Reader}.

ids(Chunks) -> [Id || {Id, _} <- Chunks].

close({send_file, {Out, In}, State}) ->
    ok = gen_tcp:close(Out),
    ok = gen_tcp:close(In),
    osiris_log:close(State);
close({chunk_iterator, _, State}) ->
    osiris_log:close(State).

tier({_, _, {?TAG, Reader}}) -> element(1, element(3, Reader));
tier({_, _, State}) -> element(1, State).

%% It has no place yet: its owner is given no chunk, and is woken later.
waiting(Reader0) ->
    Reader = asked_as_its_owner_does(Reader0),
    unknown = tier(Reader),
    true = woken(),
    Reader.

%% As a client does that asks again while the place is not known.
resolved(Spec, Log) ->
    case osiris_log:resolve_offset_spec(Spec, ?LOG:context(#{}, Log)) of
        {error, unavailable} -> resolved(Spec, Log);
        Answer -> Answer
    end.

%% What another process does in its own time.
eventually(Condition) ->
    case Condition() of
        true ->
            ok;
        false ->
            true = erlang:yield(),
            eventually(Condition)
    end.

%% What stock reads of this log.
stock(How, Spec, Options, Log) ->
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    Reader0 = open(How, Spec, Options, Log),
    {Chunks, Reader} = all(Reader0),
    ok = close(Reader),
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()),
    Chunks.

%% Uploaded up to Next, all still local.
uploaded(Next, Log) ->
    ?NIF:put(?LOG:stream_id(Log), {0, Next}, ?LOG:chunks(Log)).

range(Range, Log) ->
    StreamId = ?LOG:stream_id(Log),
    [{_, _, Chunks}] = ets:lookup(?NIF, {stream, StreamId}),
    ?NIF:put(StreamId, Range, Chunks).

woken() ->
    receive
        {'$gen_cast', {queue_event, QName, {osiris_offset, QName, Offset}}} when Offset >= 0 ->
            {resource, _, queue, _} = QName,
            true
    after 1000 -> false
    end.

not_woken() ->
    receive
        {'$gen_cast', _} -> false
    after 0 -> true
    end.

remote_chunks(Log) ->
    [{_, _, Chunks}] = ets:lookup(?NIF, {stream, ?LOG:stream_id(Log)}),
    Chunks.

until_chunk(Reader0) ->
    case next(Reader0) of
        {end_of_stream, Reader} -> until_chunk(Reader);
        Chunk -> Chunk
    end.

%% The stream protocol asks twice before it believes the end of a stream.
asks(send_file) -> 2;
asks(chunk_iterator) -> 1.

asked_as_its_owner_does({How, _, _} = Reader) ->
    lists:foldl(
        fun(_, R0) ->
            {end_of_stream, R} = next(R0),
            R
        end,
        Reader,
        lists:seq(1, asks(How))
    ).

readers() ->
    receive
        {readers, N} -> [N | readers()]
    after 0 -> []
    end.

with_quiet_log(Fun) ->
    #{level := Level} = logger:get_primary_config(),
    ok = logger:set_primary_config(level, none),
    try
        Fun()
    after
        logger:set_primary_config(level, Level)
    end.

cached(Log) ->
    #{dir := Dir, name := Name, shared := Shared, reference := Ref} = ?LOG:context(#{}, Log),
    Cache = osiris_reader_context_cache,
    _ = [ets:new(Cache, [named_table, public]) || ets:whereis(Cache) =:= undefined],
    true = ets:insert(Cache, {self(), Dir, Name, Shared, Ref, fun(_) -> ok end}),
    ok.
