%% Owns: opening a reader on the tier that has its place, and opening either tier for it later.
%% Does not own: which offset a place is, and whether a gap in front of it is certain
%% (rabbitmq_stream_s3_offset_spec); which tier a reader goes on in (rabbitmq_stream_s3_tiers).
-module(rabbitmq_stream_s3_reader_open).

-export([open/2, resolve_offset_spec/2, adopt/2]).
-export([local/2, remote/3, local_first/1, oldest_chunk/1, delete_counter/1]).

-include("rabbitmq_stream_s3.hrl").
-include("rabbitmq_stream_s3_reader.hrl").

-define(OPEN_ATTEMPTS, 3).
%% How long it takes to write one chunk, and with a slow disk.
-define(ROLL_ATTEMPTS, 20).
-define(ROLL_PAUSE_MS, 5).

-doc "Opens a reader on the tier that has the offset. A stream that is not tiered stays stock.".
-spec open(osiris:offset_spec(), map()) ->
    {ok, #reader{}} | {stock, {ok, osiris_log:state()} | {error, term()}} | {error, term()}.
open(Spec, Context) ->
    case tiered(Context) of
        false ->
            {stock, osiris_log:init_offset_reader(Spec, stock(Context))};
        {true, StreamId} ->
            #reader{count = Count} = Reader0 = new(StreamId, Context),
            case place(Spec, Reader0) of
                {ok, Reader} ->
                    _ = Count(1),
                    {ok, Reader};
                {error, _} = Error ->
                    ok = delete_counter(Reader0),
                    Error
            end
    end.

-doc "The chunk id at which a reader with this spec would start.".
-spec resolve_offset_spec(osiris:offset_spec(), map()) -> {ok, osiris:offset()} | {error, term()}.
resolve_offset_spec(Spec, Context) ->
    case tiered(Context) of
        false ->
            osiris_log:resolve_offset_spec(Spec, stock(Context));
        {true, StreamId} ->
            Deadline = ?SPEC:deadline(),
            #{shared := Shared} = Context,
            First = osiris_log_shared:first_chunk_id(Shared),
            case resolved_locally(Spec, First, Context) of
                {ok, _} = Found -> Found;
                false -> resolve(StreamId, Spec, First, Deadline, Context)
            end
    end.

resolve(StreamId, Spec, First, Deadline, #{shared := Shared} = Context) ->
    case ?SPEC:route(StreamId, Spec, Shared, First, Deadline) of
        {local, LocalSpec} ->
            Look = fun() ->
                osiris_log:resolve_offset_spec(?SPEC:stock(LocalSpec), stock(Context))
            end,
            Id = fun(ChunkId) -> ChunkId end,
            settled(Look, Id, fun(_) -> ok end, Shared, ?ROLL_ATTEMPTS);
        {remote, Start} ->
            Committed = osiris_log_shared:committed_chunk_id(Shared),
            ?SPEC:chunk_id(StreamId, ?SPEC:start(Spec, Start), Committed, Deadline);
        {error, _} = Error ->
            Error
    end.

resolved_locally({timestamp, _} = Spec, First, #{dir := Dir} = Context) when First > 0 ->
    case osiris_log:resolve_offset_spec(Spec, stock(Context)) of
        {ok, ChunkId} = Found -> ?SPEC:behind_a_local_chunk(ChunkId, Dir) andalso Found;
        {error, _} -> false
    end;
resolved_locally(_, _, _) ->
    false.

-doc """
Takes over a stock reader that was opened before the hooks were there. Inner is that reader with
its counting switched off.
""".
-spec adopt(osiris_log:state(), map()) -> {ok, #reader{}} | false.
adopt(Inner, #{name := Name, shared := Shared} = Parts) ->
    %% The stock state does not know whom to wake; osiris' table of its members does.
    case ets:match(osiris_reader_context_cache, {'_', '_', Name, Shared, '$1', '_'}) of
        [[Reference] | _] ->
            #{
                transport := Transport,
                chunk_selector := Selector,
                filter := Filter,
                counter := Counter,
                counter_id := CounterId
            } = Parts,
            Context = Parts#{
                reference => Reference,
                options => #{transport => Transport, chunk_selector => Selector}
            },
            case tiered(Context) of
                {true, StreamId} ->
                    Reader = new(StreamId, Context, Counter, CounterId, Filter),
                    {ok, Reader#reader{tier = {local, Inner}}};
                false ->
                    false
            end;
        [] ->
            false
    end.

%% Whoever gets here came through a hook that is attached. Nothing is known without an engine, or of a
%% member that has not been announced; neither means that the local log is all that there is.
tiered(#{name := Name, shared := Shared}) ->
    StreamId = rabbitmq_stream_s3_hooks:stream_id(Name),
    case persistent_term:get(?ENGINE, undefined) of
        undefined ->
            case rabbitmq_stream_s3_protection:is_protected(StreamId) of
                true -> {true, StreamId};
                false -> false
            end;
        Engine ->
            Known = rabbitmq_stream_s3_nif:manifest_range(Engine, StreamId) =/= none,
            case Known orelse rabbitmq_stream_s3_osiris:has_member(Shared) of
                true -> {true, StreamId};
                false -> false
            end
    end.

new(StreamId, Context) ->
    Filter =
        case Context of
            #{options := #{filter_spec := FilterSpec}} -> osiris_bloom:init_matcher(FilterSpec);
            _ -> undefined
        end,
    CounterId =
        case Context of
            #{counter_spec := {Id, _}} -> Id;
            _ -> undefined
        end,
    new(StreamId, Context, osiris_log:make_counter(Context), CounterId, Filter).

new(StreamId, Context, Counter, CounterId, Filter) ->
    #{shared := Shared, readers_counter_fun := Count, options := Options} = Context,
    Reference = maps:get(reference, Context, undefined),
    Inner = maps:with([dir, name, shared, options], Context),
    %% Does nothing; and a fun of this module would outlive it when the plugin is disabled.
    Uncounted = fun erlang:is_integer/1,
    #reader{
        stream_id = StreamId,
        context = stock(Inner#{counter => Counter, readers_counter_fun => Uncounted}),
        shared = Shared,
        counter = Counter,
        counter_id = CounterId,
        count = Count,
        transport = maps:get(transport, Options, tcp),
        chunk_selector = maps:get(chunk_selector, Options, user_data),
        filter = Filter,
        reference = Reference,
        wake = {'$gen_cast', {queue_event, Reference, {osiris_offset, Reference, 0}}}
    }.

%% The wrapper hands a context with this mark to stock.
stock(Context) ->
    Context#{rabbitmq_stream_s3 => stock}.

place(Spec, Reader) ->
    First = local_first(Reader),
    case opened_locally(Spec, First, Reader) of
        {ok, _} = Opened -> Opened;
        false -> place(Spec, Reader, First, ?SPEC:deadline(), ?OPEN_ATTEMPTS)
    end.

place(_, _, _, _, 0) ->
    {error, retries_exhausted};
place(Spec, #reader{stream_id = StreamId, shared = Shared} = Reader, First, Deadline, Left) ->
    case ?SPEC:route(StreamId, Spec, Shared, First, Deadline) of
        {remote, Start} ->
            case remote(?SPEC:start(Spec, Start), Start, Reader) of
                {error, closed} -> {error, unavailable};
                Opened -> Opened
            end;
        {local, LocalSpec} ->
            case local(?SPEC:stock(LocalSpec), Reader) of
                {ok, Log} ->
                    %% Segments may have gone since the route was made: ask again, for a local
                    %% tier that begins where stock found its place.
                    Landed = osiris_log:next_offset(Log),
                    case route_from(Landed, StreamId, Spec, Reader, Deadline) of
                        {local, _} ->
                            {ok, Reader#reader{tier = {local, Log}}};
                        _ ->
                            ok = osiris_log:close(Log),
                            place(Spec, Reader, Landed, Deadline, Left - 1)
                    end;
                {error, _} = Error ->
                    Error
            end;
        {error, _} = Error ->
            Error
    end.

%% What the local log has of a time needs no request, and no manifest.
opened_locally({timestamp, _} = Spec, First, #reader{context = Context} = Reader) when First > 0 ->
    #{dir := Dir} = Context,
    case local(Spec, Reader) of
        {ok, Log} ->
            case ?SPEC:behind_a_local_chunk(osiris_log:next_offset(Log), Dir) of
                true ->
                    {ok, Reader#reader{tier = {local, Log}}};
                false ->
                    ok = osiris_log:close(Log),
                    false
            end;
        {error, _} ->
            false
    end;
opened_locally(_, _, _) ->
    false.

%% A time's place behind a local chunk is not where the log begins, and no gap is in front of it.
route_from(Landed, StreamId, Spec, #reader{shared = Shared, context = #{dir := Dir}}, Deadline) ->
    case Spec of
        {timestamp, _} ->
            case ?SPEC:behind_a_local_chunk(Landed, Dir) of
                true -> {local, Spec};
                false -> ?SPEC:route(StreamId, Spec, Shared, Landed, Deadline)
            end;
        _ ->
            ?SPEC:route(StreamId, Spec, Shared, Landed, Deadline)
    end.

-doc """
A stock reader of the local log at this place. Between making a segment and writing its first chunk
the log looks as if it ended at 0 to stock, which would fail at that chunk: it is looked again.
""".
-spec local(osiris:offset_spec(), #reader{}) -> {ok, osiris_log:state()} | {error, term()}.
local(Spec, #reader{context = Context, shared = Shared}) ->
    Look = fun() -> osiris_log:init_offset_reader(Spec, Context) end,
    settled(Look, fun osiris_log:next_offset/1, fun osiris_log:close/1, Shared, ?ROLL_ATTEMPTS).

%% What stock finds is not in front of where the log began before it looked.
settled(_, _, _, _, 0) ->
    {error, retries_exhausted};
settled(Look, Place, Drop, Shared, Left) ->
    First = osiris_log_shared:first_chunk_id(Shared),
    case Look() of
        {ok, Found} = Answer ->
            case Place(Found) < First of
                true ->
                    ok = Drop(Found),
                    ok = timer:sleep(?ROLL_PAUSE_MS),
                    settled(Look, Place, Drop, Shared, Left - 1);
                false ->
                    Answer
            end;
        {error, _} = Error ->
            Error
    end.

-doc "The same reader in the remote tier, from Start; Next is the earliest offset that it can give.".
-spec remote(rabbitmq_stream_s3_remote_log:start(), osiris:offset(), #reader{}) ->
    {ok, #reader{}} | {error, term()}.
remote(Start, Next, #reader{stream_id = StreamId} = Reader) ->
    RemoteOptions = #{
        next_offset => Next,
        limit => limit(oldest_chunk(Reader), Next),
        chunk_selector => Reader#reader.chunk_selector,
        filter => Reader#reader.filter,
        counter => Reader#reader.counter,
        wake => Reader#reader.wake
    },
    case persistent_term:get(?ENGINE, undefined) of
        undefined ->
            {error, closed};
        Engine ->
            case rabbitmq_stream_s3_remote_log:open(Engine, StreamId, Start, RemoteOptions) of
                {ok, Remote} ->
                    {ok, Reader#reader{
                        tier = {remote, Remote}, chained = false, forgotten_until = undefined
                    }};
                {error, _} = Error -> Error
            end
    end.

-doc "First chunk id of the local log, -1 if it is empty.".
-spec local_first(#reader{}) -> osiris:offset() | -1.
local_first(#reader{shared = Shared}) ->
    osiris_log_shared:first_chunk_id(Shared).

-doc "The floor, also if it has yet to follow the files.".
-spec oldest_chunk(#reader{}) -> osiris:offset() | -1.
oldest_chunk(#reader{context = #{dir := Dir}} = Reader) ->
    case {local_first(Reader), rabbitmq_stream_s3_local_retention:oldest(Dir)} of
        {First, {ok, Oldest}} when First >= 0 -> max(First, Oldest);
        {First, _} -> First
    end.

%% Below its floor the remote tier has what the local log had, whatever became of the log's end.
%% A floor that should be above Next is about to move: what was there is trimmed already, and is
%% trimmed only by a manifest that this reader will be given.
limit(-1, _) -> 0;
limit(First, Next) when First > Next -> First;
limit(_, _) -> infinity.

-doc "The statistics of a reader end with it.".
-spec delete_counter(#reader{}) -> ok.
delete_counter(#reader{counter_id = undefined}) -> ok;
delete_counter(#reader{counter_id = CounterId}) -> osiris_counters:delete(CounterId).
