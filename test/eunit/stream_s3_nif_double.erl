%% A stand-in for the native core in tests of the Erlang side: loads, under the name of the NIF
%% module, functions that read "remote" chunks from memory.
%%
%% A stream is {Range, Chunks}: Range = pending | {First, Next}, Chunks = all chunks that were ever
%% uploaded, as made by stream_s3_test_log:chunks/1. `stalled` makes reads wait until wake/0.
%%
%% Also for the metadata store: what the pointer names is what was put, or persist/3 has something
%% newer, which manifest_resolve/5 makes known here.
-module(stream_s3_nif_double).

-export([load/0, unload/0, put/3, restart/0, forget/1, stall/1, wake/0, after_read/1]).
-export([opened/0, opens/0]).
-export([persist/3, quorum/1, quorum_reads/1, written_here/1, unreadable/3]).
-export([durable/2, durable_end/2]).
-export([get_consistent/1, manifest_resolve/5, manifest_forget/2]).
-export([manifest_mark_pending/2, manifest_reset/2, manifest_range/2, route/5, continue_at/5]).
-export([reader_open/5, reader_read/2, reader_close/1, chunk_entries/5]).

-define(TABLE, ?MODULE).

load() ->
    _ = [ets:delete(?TABLE) || ets:whereis(?TABLE) =/= undefined],
    ?TABLE = ets:new(?TABLE, [named_table, public]),
    true = ets:insert(?TABLE, {opens, 0}),
    persistent_term:put({rabbitmq_stream_s3, engine}, double),
    Store = [{get_consistent, 1}, {durable_end, 2}],
    ok = stream_s3_double:load(rabbitmq_stream_s3_db, Store, ?MODULE),
    Functions = [
        {manifest_mark_pending, 2},
        {manifest_reset, 2},
        {manifest_forget, 2},
        {manifest_range, 2},
        {manifest_resolve, 5},
        {route, 5},
        {continue_at, 5},
        {reader_open, 5},
        {reader_read, 2},
        {reader_close, 1},
        {chunk_entries, 5}
    ],
    stream_s3_double:load(rabbitmq_stream_s3_nif, Functions, ?MODULE).

unload() ->
    _ = persistent_term:erase({rabbitmq_stream_s3, engine}),
    lists:foreach(fun stream_s3_double:unload/1, [rabbitmq_stream_s3_nif, rabbitmq_stream_s3_db]),
    true = ets:delete(?TABLE),
    ok.

%% A new engine, as after a restart of the plugin: handles of before are refused.
restart() ->
    true = ets:match_delete(?TABLE, {{reader, '_'}, '_', '_', '_', '_'}),
    persistent_term:put({rabbitmq_stream_s3, engine}, {double, make_ref()}).

put(StreamId, Range, Chunks) ->
    true = ets:insert(?TABLE, {{stream, StreamId}, Range, Chunks}),
    ok.

forget(StreamId) ->
    [{_, _, Chunks}] = ets:take(?TABLE, {stream, StreamId}),
    Chunks.

%% How many reads to answer with wait.
stall(Reads) ->
    true = ets:insert(?TABLE, {stall, Reads}),
    ok.

wake() ->
    Waiting = [{Pid, Wake} || {{waiting, _}, Pid, Wake} <- ets:tab2list(?TABLE)],
    true = ets:match_delete(?TABLE, {{waiting, '_'}, '_', '_'}),
    _ = [Pid ! Wake || {Pid, Wake} <- Waiting],
    length(Waiting).

%% Runs Fun in the process that reads, after the next read has been answered.
after_read(Fun) ->
    undefined = erlang:put({?MODULE, after_read}, Fun),
    ok.

%% Readers that were ever opened.
opens() ->
    ets:lookup_element(?TABLE, opens, 2).

%% Those that are open.
opened() ->
    length([R || {{reader, R}, _, _, _, _} <- ets:tab2list(?TABLE)]).

%% The writer, on another node, has persisted this: not known here yet.
persist(StreamId, Range, Chunks) ->
    true = ets:insert(?TABLE, {{persisted, StreamId}, Range, Chunks}),
    ok.

%% The stream is written on this node: only put/3 makes anything known.
written_here(StreamId) ->
    true = ets:insert(?TABLE, {{written_here, StreamId}}),
    ok.

%% Readers end with this kind of failure at places in [From, To); `none`: no more.
unreadable(StreamId, {From, To}, Kind) ->
    true = ets:insert(?TABLE, {{unreadable, StreamId}, From, To, Kind}),
    ok.

%% `down`: the metadata store does not answer. {hold, Pid}: whoever asks tells Pid and waits for
%% `go`.
quorum(UpOrDown) ->
    true = ets:insert(?TABLE, {quorum, UpOrDown}),
    ok.

%% How often the word of a quorum was asked for.
quorum_reads(StreamId) ->
    ets:lookup_element(?TABLE, {quorum_reads, StreamId}, 2, 0).

%% What is kept beside the pointer: where what is durable ends, or `unknown`.
durable(StreamId, Next) ->
    true = ets:insert(?TABLE, {{durable, StreamId}, Next}),
    ok.

durable_end(StreamId, _Timeout) ->
    case {get_consistent(StreamId), ets:lookup(?TABLE, {durable, StreamId})} of
        {{error, _} = Error, _} -> Error;
        {{ok, Pointer}, [{_, Next}]} -> {ok, Pointer, Next};
        {not_found, [{_, Next}]} -> {ok, {1, 1, 1}, Next};
        {not_found, []} -> not_found
    end.

get_consistent(StreamId) ->
    Key = {quorum_reads, StreamId},
    _ = ets:update_counter(?TABLE, Key, 1, {Key, 0}),
    case ets:lookup(?TABLE, quorum) of
        [{quorum, down}] ->
            {error, timeout};
        Quorum ->
            ok = hold(Quorum),
            case [Known || Known <- [persisted, stream], ets:member(?TABLE, {Known, StreamId})] of
                [persisted | _] -> {ok, {1, 2, 2}};
                [stream] -> {ok, {1, 1, 1}};
                [] -> not_found
            end
    end.

hold([{quorum, {hold, Pid}}]) ->
    Pid ! {asked, self()},
    receive
        go -> ok
    end;
hold(_) ->
    ok.

manifest_resolve(_, Pid, Ref, StreamId, _Pointer) ->
    Newer = ets:lookup(?TABLE, {persisted, StreamId}),
    Answer =
        case {manifest_range(double, StreamId), ets:member(?TABLE, {written_here, StreamId})} of
            {none, _} ->
                {error, unknown, <<"forgotten">>};
            {_, true} ->
                {error, written_here, <<"its machine publishes">>};
            {_, false} when Newer =:= [] ->
                {error, stale, <<"known">>};
            {_, false} ->
                [{_, {_, Next} = Range, Chunks}] = Newer,
                ok = put(StreamId, Range, Chunks),
                {resolved, #{revision => 2, next_offset => Next}}
        end,
    Pid ! {rabbitmq_stream_s3, Ref, Answer},
    ok.

manifest_mark_pending(_, StreamId) ->
    _ = ets:insert_new(?TABLE, {{stream, StreamId}, pending, []}),
    ok.

manifest_reset(_, StreamId) ->
    true = ets:insert(?TABLE, {{stream, StreamId}, pending, []}),
    ok.

manifest_forget(_, StreamId) ->
    true = ets:delete(?TABLE, {stream, StreamId}),
    ok.

manifest_range(_, StreamId) ->
    case ets:lookup(?TABLE, {stream, StreamId}) of
        [] -> none;
        [{_, pending, _}] -> pending;
        [{_, {First, Next}, _}] -> {ok, First, Next}
    end.

%% As tiering_core::route, which has the properties proven.
route(_, StreamId, Spec, {LocalFirst, LocalNext}, Gap) ->
    case manifest_range(double, StreamId) of
        {ok, _, RemoteNext} ->
            Route = by_manifest(StreamId, Spec, LocalFirst, LocalNext),
            IsOpen =
                Gap =:= unproven andalso element(1, Route) =/= remote andalso
                    leads_below(Spec, LocalFirst) andalso RemoteNext < LocalFirst,
            case IsOpen of
                true -> unproven_gap;
                false -> Route
            end;
        _ ->
            without_manifest(Spec, LocalFirst, LocalNext)
    end.

leads_below(last, _) -> false;
leads_below(next, _) -> false;
leads_below({offset, N}, First) -> N < First;
leads_below({abs, N}, First) -> N < First;
leads_below(first, _) -> true;
leads_below({timestamp, _}, _) -> true.

without_manifest(last, _, _) -> {local, last};
without_manifest(next, _, _) -> {local, next};
without_manifest({offset, N}, First, _) when First >= 0, N >= First -> {local, {offset, N}};
without_manifest({abs, N}, First, Next) when First >= 0, N >= First, N < Next -> {local, {offset, N}};
without_manifest(first, 0, _) -> {local, first};
without_manifest({timestamp, _} = Spec, 0, _) -> {local, Spec};
without_manifest(_, _, _) -> unknown.

%% As tiering_core::route::continue_at.
continue_at(_, _, Next, LocalFirst, _) when LocalFirst >= 0, LocalFirst =< Next ->
    local;
continue_at(_, StreamId, Next, LocalFirst, Gap) ->
    case manifest_range(double, StreamId) of
        {ok, First, RemoteNext} when LocalFirst < 0, First =< Next, Next < RemoteNext ->
            {remote, Next};
        {ok, _, _} when LocalFirst < 0 ->
            unknown;
        {ok, First, RemoteNext} when max(First, Next) < RemoteNext, max(First, Next) < LocalFirst ->
            {remote, max(First, Next)};
        {ok, First, _} when First >= LocalFirst; Gap =:= certain ->
            local;
        {ok, _, _} ->
            unproven_gap;
        _ ->
            unknown
    end.

by_manifest(StreamId, Spec, LocalFirst, LocalNext) ->
    case {manifest_range(double, StreamId), Spec} of
        {_, last} -> {local, last};
        {_, next} -> {local, next};
        {_, {offset, N}} when LocalFirst >= 0, N >= LocalFirst -> {local, Spec};
        {{ok, Same, Same}, {offset, _}} -> {local, first};
        {{ok, Same, Same}, _} -> {local, local(Spec)};
        {{ok, First, Next}, _} -> route(Spec, First, Next, LocalFirst, LocalNext, StreamId)
    end.

route(first, First, _, LocalFirst, _, _) when LocalFirst < 0; First < LocalFirst ->
    {remote, First};
route(first, _, _, _, _, _) ->
    {local, first};
route({offset, N}, First, Next, _, _, _) when N < Next ->
    {remote, max(N, First)};
route({offset, _}, _, _, _, _, _) ->
    {local, first};
route({abs, N}, First, Next, LocalFirst, LocalNext, StreamId) ->
    case N >= First andalso N < max(Next, LocalNext) of
        true -> by_manifest(StreamId, {offset, N}, LocalFirst, LocalNext);
        false -> {error, {offset_out_of_range, {First, max(Next, LocalNext) - 1}}}
    end;
route({timestamp, Ts}, First, Next, _, _, StreamId) ->
    [{_, _, Chunks}] = ets:lookup(?TABLE, {stream, StreamId}),
    Remote = [Id || {#{chunk_id := Id, timestamp := T}, _, _, _} <- Chunks, T >= Ts],
    case Remote of
        %% As the native one: where its fragment begins, not where the chunk is.
        [Id | _] when Id < Next -> {remote, First};
        _ -> {local, {timestamp, Ts}}
    end.

local({abs, N}) -> {offset, N};
local(Spec) -> Spec.

reader_open(_, Owner, Wake, StreamId, Start) ->
    Reader = make_ref(),
    _ = ets:update_counter(?TABLE, opens, 1),
    [{_, _, Chunks}] = ets:lookup(?TABLE, {stream, StreamId}),
    Position =
        case Start of
            {offset, N} ->
                lists:max([0 | [Id || {#{chunk_id := Id}, _, _, _} <- Chunks, Id =< N]]);
            {timestamp, Ts} ->
                hd([Id || {#{chunk_id := Id, timestamp := T}, _, _, _} <- Chunks, T >= Ts])
        end,
    true = ets:insert(?TABLE, {{reader, Reader}, StreamId, Position, Owner, Wake}),
    {ok, Reader}.

reader_read(Reader, Max) ->
    Answer = answer(Reader, Max),
    case erlang:erase({?MODULE, after_read}) of
        undefined -> ok;
        Fun -> Fun()
    end,
    Answer.

answer(Reader, Max) ->
    {Key, StreamId, Position, Owner, Wake} = reader(Reader),
    [{_, Range, Chunks}] = ets:lookup(?TABLE, {stream, StreamId}),
    Unreadable =
        case ets:lookup(?TABLE, {unreadable, StreamId}) of
            [{_, From, To, Kind}] when From =< Position, Position < To -> Kind;
            _ -> none
        end,
    case {ets:lookup(?TABLE, stall), Range} of
        {[{stall, N}], _} when N > 0 ->
            true = ets:insert(?TABLE, {stall, N - 1}),
            true = ets:insert(?TABLE, {{waiting, Reader}, Owner, Wake}),
            wait;
        {_, {error, _, _} = Error} ->
            Error;
        {_, _} when is_tuple(Position) ->
            %% Final.
            Position;
        {_, _} when is_integer(Position), Unreadable =/= none ->
            Final = {error, Unreadable, <<"the object is as it is">>},
            true = ets:insert(?TABLE, {Key, StreamId, Final, Owner, Wake}),
            Final;
        {_, {_, Next}} when Position >= Next ->
            true = ets:insert(?TABLE, {Key, StreamId, {local, Next}, Owner, Wake}),
            {local, Next};
        _ ->
            case [C || {#{chunk_id := Id}, _, _, _} = C <- Chunks, Id >= Position, Id =< Max] of
                [{#{chunk_id := Id, num_records := Records} = H, Filter, Data, Trailer} | _] ->
                    true = ets:insert(?TABLE, {Key, StreamId, Id + Records, Owner, Wake}),
                    {chunk, H, Filter, fetched(Id, Data), Trailer};
                [] ->
                    wait
            end
    end.

%% Some chunks reach over more than one block.
fetched(Id, Data) when Id rem 4 =:= 0 ->
    {One, Other} = split_binary(Data, byte_size(Data) div 2),
    [One, Other];
fetched(_, Data) ->
    Data.

reader_close(Reader) ->
    _ = reader(Reader),
    true = ets:delete(?TABLE, {reader, Reader}),
    ok.

reader(Reader) ->
    case ets:lookup(?TABLE, {reader, Reader}) of
        [Found] -> Found;
        [] -> error(badarg)
    end.

chunk_entries(_, Position, Offset, 0, _) ->
    {[], Position, Offset, 0};
chunk_entries(_, Position, Offset, Left, 0) ->
    {[], Position, Offset, Left};
chunk_entries(Parts, Position, Offset, Left, Max) when is_list(Parts) ->
    chunk_entries(iolist_to_binary(Parts), Position, Offset, Left, Max);
chunk_entries(Data, Position, Offset, Left, Max) ->
    {Entry, NextPosition, NextOffset} =
        case Data of
            <<_:Position/binary, 0:1, Len:31, Record:Len/binary, _/binary>> ->
                {{Offset, Record}, Position + 4 + Len, Offset + 1};
            <<_:Position/binary, 1:1, Comp:3, _:4, Num:16, Un:32, Len:32, Batch:Len/binary,
                _/binary>> ->
                {{Offset, {batch, Num, Comp, Un, Batch}}, Position + 11 + Len, Offset + Num}
        end,
    {More, P, O, L} = chunk_entries(Data, NextPosition, NextOffset, Left - 1, Max - 1),
    {[Entry | More], P, O, L}.
