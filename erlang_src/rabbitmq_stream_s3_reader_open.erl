-module(rabbitmq_stream_s3_reader_open).
-moduledoc """
Owns opening a reader on the tier that has its place, without ever waiting: while the place is
unknown the reader is in a tier of its own, which has no chunk yet. And opening either tier later.

Does not own which offset a place is, and whether a gap before it is certain
(rabbitmq_stream_s3_reader_start); which tier a reader continues in (rabbitmq_stream_s3_reader_tier); the
command that only asks for a place (rabbitmq_stream_s3_reader_lookup).
""".

-export([open/2, place/2, adopt/2, closing/1, tiered/1, stock/1]).
-export([local/2, remote/3, settled/4, local_first/1, oldest_chunk/1, delete_counter/1]).

-include("rabbitmq_stream_s3_reader.hrl").

-define(OPEN_ATTEMPTS, 3).
-define(UNPLACED(Reference), {?MODULE, unplaced, Reference}).

-doc """
Opens a reader on the tier that has the offset. A stream that is not tiered stays stock. Never waits
and never fails for something that may pass: whoever attaches has no way to handle either. An error
is final: the offset is out of range.
""".
-spec open(osiris:offset_spec(), map()) ->
    {ok, #reader{}} | {stock, {ok, osiris_log:state()} | {error, term()}} | {error, term()}.
open(Asked, Context) ->
    case rabbitmq_stream_s3_reader_start:supported(Asked) andalso tiered(Context) of
        false ->
            {stock, osiris_log:init_offset_reader(Asked, stock(Context))};
        {true, StreamId} ->
            Spec = reopened(Asked, Context),
            Reader = new(StreamId, Context),
            try place(Spec, Reader) of
                {ok, Placed} ->
                    counted(Placed);
                {unknown, _Why} ->
                    ok = rabbitmq_stream_s3_manifest_cache:wanted(StreamId),
                    Pinned = rabbitmq_stream_s3_reader_start:pinned(Spec, Reader#reader.shared),
                    counted(Reader#reader{tier = {unknown, Pinned}});
                {error, _} = Error ->
                    ok = delete_counter(Reader),
                    Error
            catch
                Class:Reason:Stack ->
                    ok = delete_counter(Reader),
                    erlang:raise(Class, Reason, Stack)
            end
    end.

%% When the local member changes, AMQP consumers are opened again at the offset where their reader
%% stood, by a counter that has no consumer's tag. A reader that had not found its place yet stood at a
%% provisional one: its successor looks for the same place.
reopened(Offset, #{reference := Reference, counter_spec := {Id, _}}) ->
    case {erase(?UNPLACED(Reference)), Id} of
        {{Offset, Spec}, {rabbit_stream_queue, _, Pid}} when is_pid(Pid) -> Spec;
        _ -> Offset
    end;
reopened(Offset, _) ->
    Offset.

-doc "The calling process closes the reader, and may be about to open its successor.".
-spec closing(#reader{}) -> ok.
closing(#reader{reference = Reference} = Reader) ->
    _ =
        case unplaced(Reader) of
            {true, Next, Spec} -> put(?UNPLACED(Reference), {Next, Spec});
            false -> erase(?UNPLACED(Reference))
        end,
    ok.

unplaced(#reader{tier = {unknown, Spec}, shared = Shared}) ->
    {true, rabbitmq_stream_s3_reader_start:provisional(Spec, Shared), Spec};
unplaced(#reader{tier = {remote, Remote}}) ->
    case rabbitmq_stream_s3_reader_remote:start(Remote) of
        {timestamp, _} = Spec -> {true, rabbitmq_stream_s3_reader_remote:next_offset(Remote), Spec};
        {offset, _} -> false
    end;
unplaced(_) ->
    false.

counted(#reader{count = Count} = Reader) ->
    _ = Count(1),
    {ok, Reader}.

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

-doc """
Whether the stream may have a remote tier, by a hook that is attached. Without an engine nothing is
known, and neither is it of a member that has not been announced; both are for a moment, and neither
means that the local log is all that there is.
""".
-spec tiered(map()) -> {true, rabbitmq_stream_s3:stream_id()} | false.
tiered(#{name := Name, shared := Shared}) ->
    StreamId = rabbitmq_stream_s3:stream_id(Name),
    case rabbitmq_stream_s3:engine_or_undefined() of
        undefined ->
            case rabbitmq_stream_s3_manifest_protection:is_protected(StreamId) of
                true -> {true, StreamId};
                false -> false
            end;
        Engine ->
            Known = rabbitmq_stream_s3_nif:manifest_range(Engine, StreamId) =/= none,
            case Known orelse rabbitmq_stream_s3_host_osiris:has_member(Shared) of
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

-doc "The wrapper hands a context with this mark to stock.".
-spec stock(map()) -> map().
stock(Context) ->
    Context#{rabbitmq_stream_s3 => stock}.

-doc """
The reader at the place of a spec, opened in the tier that has it. `unknown`: not yet, because of the
manifest (or the engine), or because a tier could not be opened now.
""".
-spec place(osiris:offset_spec(), #reader{}) ->
    {ok, #reader{}}
    | {unknown, manifest | {local | remote, term()}}
    | {error, {offset_out_of_range, term()}}.
place(Spec, Reader) ->
    case is_tiered(Reader) of
        true ->
            First = local_first(Reader),
            case opened_locally(Spec, First, Reader) of
                {ok, _} = Opened -> Opened;
                false -> place(Spec, Reader, First, ?OPEN_ATTEMPTS)
            end;
        false ->
            %% It waited while that was unknown. The local log is all that there is.
            case local(Spec, Reader) of
                {ok, Log} -> {ok, Reader#reader{tier = {local, Log}, chained = false}};
                {error, {offset_out_of_range, _}} = OutOfRange -> OutOfRange;
                {error, Why} -> {unknown, {local, Why}}
            end
    end.

%% Without an engine only what is protected can have a remote tier.
is_tiered(#reader{stream_id = StreamId}) ->
    rabbitmq_stream_s3:engine_or_undefined() =/= undefined orelse
        rabbitmq_stream_s3_manifest_protection:is_protected(StreamId).

place(_, _, _, 0) ->
    {unknown, {local, moving}};
place(Spec, #reader{stream_id = StreamId, shared = Shared} = Reader, First, Left) ->
    case rabbitmq_stream_s3_reader_start:route(StreamId, Spec, Shared, First) of
        {remote, Start} ->
            case remote(rabbitmq_stream_s3_reader_start:start(Spec, Start), Start, Reader) of
                {ok, _} = Opened -> Opened;
                {error, Why} -> {unknown, {remote, Why}}
            end;
        {local, LocalSpec} ->
            case local(rabbitmq_stream_s3_reader_start:stock(LocalSpec), Reader) of
                {ok, Log} ->
                    %% Segments may have gone since the route was made: ask again, for a local
                    %% tier that begins where stock found its place.
                    Landed = osiris_log:next_offset(Log),
                    case route_from(Landed, StreamId, Spec, Reader) of
                        {local, _} ->
                            {ok, Reader#reader{tier = {local, Log}, chained = false}};
                        _ ->
                            ok = osiris_log:close(Log),
                            place(Spec, Reader, Landed, Left - 1)
                    end;
                {error, Why} when Left =:= 1 ->
                    {unknown, {local, Why}};
                {error, _Moving} ->
                    place(Spec, Reader, local_first(Reader), Left - 1)
            end;
        unknown ->
            {unknown, manifest};
        {error, _} = OutOfRange ->
            OutOfRange
    end.

%% What the local log has of a time needs no request, and no manifest.
opened_locally({timestamp, _} = Spec, First, #reader{context = Context} = Reader) when First > 0 ->
    #{dir := Dir} = Context,
    case local(Spec, Reader) of
        {ok, Log} ->
            case rabbitmq_stream_s3_reader_start:behind_a_local_chunk(osiris_log:next_offset(Log), Dir) of
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

%% A time's place behind a local chunk is not where the log begins, and no gap is before it.
route_from(Landed, StreamId, Spec, #reader{shared = Shared, context = #{dir := Dir}}) ->
    case Spec of
        {timestamp, _} ->
            case rabbitmq_stream_s3_reader_start:behind_a_local_chunk(Landed, Dir) of
                true -> {local, Spec};
                false -> rabbitmq_stream_s3_reader_start:route(StreamId, Spec, Shared, Landed)
            end;
        _ ->
            rabbitmq_stream_s3_reader_start:route(StreamId, Spec, Shared, Landed)
    end.

-doc """
A stock reader of the local log at this place. An error means that the files are changing under it:
try again later.
""".
-spec local(osiris:offset_spec(), #reader{}) -> {ok, osiris_log:state()} | {error, term()}.
local(Spec, #reader{context = Context, shared = Shared}) ->
    Look = fun() -> osiris_log:init_offset_reader(Spec, Context) end,
    settled(Look, fun osiris_log:next_offset/1, fun osiris_log:close/1, Shared).

-doc """
What stock finds in the local log, unless that changes meanwhile. Between making a segment and
writing its first chunk the log looks to stock as if it ended at 0, where it would then fail: what it
finds is never before the place where the log began. And a segment that is deleted while stock looks
into it makes stock fail in ways that it does not retry.
""".
-spec settled(
    fun(() -> {ok, Found} | {error, term()}),
    fun((Found) -> osiris:offset()),
    fun((Found) -> ok),
    atomics:atomics_ref()
) -> {ok, Found} | {error, term()}.
settled(Look, Place, Drop, Shared) ->
    First = osiris_log_shared:first_chunk_id(Shared),
    try Look() of
        {ok, Found} = Answer ->
            case Place(Found) < First of
                true ->
                    ok = Drop(Found),
                    {error, rolling};
                false ->
                    Answer
            end;
        {error, _} = Error ->
            Error
    catch
        Class:Reason -> {error, {Class, Reason}}
    end.

-doc "The same reader in the remote tier, from Start; Next is the earliest offset that it can give.".
-spec remote(rabbitmq_stream_s3_reader_remote:start(), osiris:offset(), #reader{}) ->
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
    case rabbitmq_stream_s3:engine_or_undefined() of
        undefined ->
            {error, closed};
        Engine ->
            case rabbitmq_stream_s3_reader_remote:open(Engine, StreamId, Start, RemoteOptions) of
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
    case {local_first(Reader), rabbitmq_stream_s3_host_retention:oldest(Dir)} of
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
