%% Owns: the log state that a consumer of a tiered stream holds, and which tier it reads from.
%% Every such reader is ours, also one that only reads local segments: a stock reader silently
%% steps over segments that tiering has deleted (it opens the segment named by the floor of the
%% log). So each local read checks the floor before, and again at the chunk that stock is about to
%% deliver; what the floor has passed is read from the remote tier, from where it was left.
%% Does not own: reading itself. Local: a stock reader inside; remote:
%% rabbitmq_stream_s3_remote_log. Nor where a consumer starts: rabbitmq_stream_s3_offset_spec.
-module(rabbitmq_stream_s3_log_reader).

%% called by the wrappers in osiris_log
-export([init_offset_reader/2, resolve_offset_spec/2, adopt/2]).
-export([send_file/3, chunk_iterator/2, chunk_iterator/3, iterator_next/1]).
-export([next_offset/1, committed_offset/1, committed_chunk_id/1, close/1]).

-include_lib("kernel/include/logger.hrl").
-include("rabbitmq_stream_s3.hrl").

-record(reader, {
    stream_id :: binary(),
    tier :: undefined | {local, osiris_log:state()} | {remote, rabbitmq_stream_s3_remote_log:t()},
    %% What opens a stock reader inside: counts nothing, since this reader does.
    context :: map(),
    shared :: atomics:atomics_ref(),
    counter :: counters:counters_ref(),
    counter_id :: term(),
    count :: fun((integer()) -> term()),
    transport :: tcp | ssl,
    chunk_selector :: all | user_data,
    filter :: undefined | osiris_bloom:mstate(),
    %% The queue, if the context names one.
    reference :: term(),
    %% Makes the owner try again; both kinds of consumer understand it.
    wake :: term(),
    timer :: undefined | reference(),
    %% The owner will ask once more before it believes the end of the stream.
    asks_again = true :: boolean(),
    forgotten_until :: undefined | integer(),
    %% The last stock iterator came from this very stock reader: only then may it be handed back,
    %% because it carries bytes of the file that it was made from.
    chained = false :: boolean()
}).

-opaque state() :: {?MODULE, #reader{}}.
-export_type([state/0]).

-define(SPEC, rabbitmq_stream_s3_offset_spec).

%% Changes of tier and reopenings within one read, before the owner gets its turn again.
-define(SWITCHES_MAX, 4).
-define(OPEN_ATTEMPTS, 3).
%% Nothing to do but try again: soon when chunks were skipped, less so when another must move.
-define(MORE_MS, 5).
-define(RETRY_MS, 100).
-define(OFF_MS, 1000).
%% In case an owner that usually asks twice does not.
-define(UNASKED_MS, 5000).

%%--------------------------------------------------------------------------------------------
%% Opening

-doc "Opens a reader on the tier that has the offset. A stream that is not tiered stays stock.".
-spec init_offset_reader(osiris:offset_spec(), map()) ->
    {ok, state() | osiris_log:state()} | {error, term()}.
init_offset_reader(Spec, Context) ->
    case tiered(Context) of
        false ->
            osiris_log:init_offset_reader(Spec, stock(Context));
        {true, StreamId} ->
            #reader{count = Count} = Reader0 = new(StreamId, Context),
            case open(Spec, Reader0) of
                {ok, Reader} ->
                    _ = Count(1),
                    {ok, {?MODULE, Reader}};
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
            osiris_log:resolve_offset_spec(?SPEC:stock(LocalSpec), stock(Context));
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
-spec adopt(osiris_log:state(), map()) -> {ok, state()} | false.
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
                    {ok, {?MODULE, Reader#reader{tier = {local, Inner}}}};
                false ->
                    false
            end;
        [] ->
            false
    end.

%% Whoever gets here came through a hook that is attached. Without an engine nothing is known, and
%% neither is it of a member that has not been announced; both are for a moment, and neither means
%% that the local log is all that there is.
tiered(#{name := Name, shared := Shared}) ->
    StreamId = rabbitmq_stream_s3_hooks:stream_id(Name),
    case persistent_term:get(?ENGINE, undefined) of
        undefined ->
            {true, StreamId};
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

open(Spec, Reader) ->
    First = local_first(Reader),
    case opened_locally(Spec, First, Reader) of
        {ok, _} = Opened -> Opened;
        false -> open(Spec, Reader, First, ?SPEC:deadline(), ?OPEN_ATTEMPTS)
    end.

%% What the local log has of a time needs no request, and no manifest.
opened_locally({timestamp, _} = Spec, First, #reader{context = Context} = Reader) when First > 0 ->
    #{dir := Dir} = Context,
    case open_local(Spec, Reader) of
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

open(_, _, _, _, 0) ->
    {error, retries_exhausted};
open(Spec, #reader{stream_id = StreamId, shared = Shared} = Reader, First, Deadline, Left) ->
    case ?SPEC:route(StreamId, Spec, Shared, First, Deadline) of
        {remote, Start} ->
            case open_remote(?SPEC:start(Spec, Start), Start, Reader) of
                {error, closed} -> {error, unavailable};
                Opened -> Opened
            end;
        {local, LocalSpec} ->
            case open_local(?SPEC:stock(LocalSpec), Reader) of
                {ok, Log} ->
                    %% Segments may have gone since the route was made: ask again, for a local
                    %% tier that begins where stock found its place.
                    Landed = osiris_log:next_offset(Log),
                    case route_from(Landed, StreamId, Spec, Reader, Deadline) of
                        {local, _} ->
                            {ok, Reader#reader{tier = {local, Log}}};
                        _ ->
                            ok = osiris_log:close(Log),
                            open(Spec, Reader, Landed, Deadline, Left - 1)
                    end;
                {error, _} = Error ->
                    Error
            end;
        {error, _} = Error ->
            Error
    end.

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

open_local(Spec, #reader{context = Context}) ->
    osiris_log:init_offset_reader(Spec, Context).

open_remote(Start, Next, #reader{stream_id = StreamId} = Reader) ->
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

%% The floor, also if it has yet to follow the files.
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

%%--------------------------------------------------------------------------------------------
%% Reading

-doc "As osiris_log:send_file/3. Never waits for the remote tier: no bytes yet is end_of_stream.".
-type callback() :: fun((map(), pos_integer()) -> iodata() | term()).
-spec send_file(gen_tcp:socket() | ssl:sslsocket(), state(), callback()) ->
    {ok, state()} | {end_of_stream, state()} | {error, term()}.
send_file(Socket, {?MODULE, #reader{} = Reader}, Callback) ->
    #reader{transport = Transport, chunk_selector = Selector} = Reader,
    Local = fun(Log, _Chained, Guard) ->
        osiris_log:send_file(Socket, Log, fun(#{chunk_id := Id} = Header, Size) ->
            ok = Guard(Id),
            Callback(Header, Size)
        end)
    end,
    Deliver = fun(Header, Data, Trailer, Next) ->
        {Size, Body} = body(Header, Data, Trailer, Selector),
        #{header_data := HeaderData} = Header,
        Frame = frame(Callback(Header, Size + byte_size(HeaderData))),
        case send(Transport, Socket, [Frame, HeaderData | Body]) of
            ok -> {ok, {?MODULE, Next}};
            {error, _} = Error -> Error
        end
    end,
    case read(Reader, Local, Deliver, ?SWITCHES_MAX) of
        {end_of_stream, {?MODULE, #reader{asks_again = AsksAgain} = Next}} ->
            {end_of_stream, {?MODULE, Next#reader{asks_again = not AsksAgain}}};
        {ok, {?MODULE, #reader{asks_again = false} = Next}} ->
            {ok, {?MODULE, Next#reader{asks_again = true}}};
        {error, {stream_s3, Kind}} = Error ->
            %% The connection would only log it: a consumer that nobody tells waits for ever.
            ok = rabbitmq_stream_s3_subscription:ended(
                Reader#reader.counter_id, Reader#reader.reference, Reader#reader.shared, Kind
            ),
            Error;
        Result ->
            Result
    end.

%% Before RabbitMQ 4.1 the callback sends the start of the frame itself and returns no bytes.
frame(Frame) when is_binary(Frame); is_list(Frame) -> Frame;
frame(_) -> <<>>.

%% Stock leaves the trailer (tracking data) of a user chunk out, unless all chunks are wanted.
body(#{type := 0}, Data, _, user_data) ->
    {byte_size(Data), [Data]};
body(_, Data, Trailer, _) ->
    {byte_size(Data) + byte_size(Trailer), [Data, Trailer]}.

send(tcp, Socket, Data) -> gen_tcp:send(Socket, Data);
send(ssl, Socket, Data) -> ssl:send(Socket, Data).

-doc false.
-spec chunk_iterator(state(), pos_integer() | all) ->
    {ok, map(), term(), state()} | {end_of_stream, state()} | {error, term()}.
chunk_iterator(State, Credit) ->
    chunk_iterator(State, Credit, undefined).

-doc "As osiris_log:chunk_iterator/3. Never waits for the remote tier.".
-spec chunk_iterator(state(), pos_integer() | all, term()) ->
    {ok, map(), term(), state()} | {end_of_stream, state()} | {error, term()}.
chunk_iterator({?MODULE, #reader{asks_again = true} = Reader}, Credit, Previous) ->
    chunk_iterator({?MODULE, Reader#reader{asks_again = false}}, Credit, Previous);
chunk_iterator({?MODULE, Reader}, Credit, Previous) ->
    Local = fun(Log, Chained, Guard) ->
        case stock_iterator(Log, Credit, Previous, Chained) of
            {ok, #{chunk_id := Id}, _, Next} = Chunk ->
                try Guard(Id) of
                    ok -> Chunk
                catch
                    throw:?MODULE ->
                        ok = osiris_log:close(Next),
                        throw(?MODULE)
                end;
            Other ->
                Other
        end
    end,
    Deliver = fun(Header, Data, _Trailer, Next) ->
        Iterator = rabbitmq_stream_s3_remote_log:iterator(Header, Data),
        {ok, Header, Iterator, {?MODULE, Next}}
    end,
    read(Reader, Local, Deliver, ?SWITCHES_MAX).

stock_iterator(Log, Credit, Previous, Chained) ->
    %% osiris 1.8 has no third argument.
    case erlang:function_exported(osiris_log, chunk_iterator, 3) of
        true when Chained -> osiris_log:chunk_iterator(Log, Credit, Previous);
        true -> osiris_log:chunk_iterator(Log, Credit, undefined);
        false -> osiris_log:chunk_iterator(Log, Credit)
    end.

-doc "As osiris_log:iterator_next/1, for iterators of chunks of the remote tier.".
-spec iterator_next(rabbitmq_stream_s3_remote_log:iterator()) ->
    end_of_chunk
    | {{osiris:offset(), osiris:entry()}, rabbitmq_stream_s3_remote_log:iterator()}.
iterator_next(Iterator) ->
    rabbitmq_stream_s3_remote_log:iterator_next(Iterator).

%% Local reads with stock and Deliver a chunk of the remote tier; the rest is the same for both
%% kinds of consumer.
read(Reader, _, _, 0) ->
    retry_later(Reader);
read(#reader{tier = {local, Log}} = Reader, Local, Deliver, Left) ->
    Next = osiris_log:next_offset(Log),
    case local_first(Reader) =< Next of
        true -> read_local(Log, Next, Reader, Local, Deliver, Left);
        false -> below_floor(Next, Reader, Local, Deliver, Left)
    end;
read(#reader{tier = {remote, Remote0}} = Reader0, Local, Deliver, Left) ->
    Committed = osiris_log_shared:committed_chunk_id(Reader0#reader.shared),
    case rabbitmq_stream_s3_remote_log:read(Remote0, Committed) of
        {chunk, Header, Data, Trailer, Remote} ->
            ok = goes_on(Reader0),
            Deliver(Header, Data, Trailer, Reader0#reader{tier = {remote, Remote}});
        {wait, Remote} ->
            {end_of_stream, {?MODULE, Reader0#reader{tier = {remote, Remote}}}};
        {more, Remote} ->
            try_again(?MORE_MS, Reader0#reader{tier = {remote, Remote}});
        {local, Next, Remote} ->
            Reader = Reader0#reader{tier = {remote, Remote}},
            become_local(Next, Reader, Local, Deliver, Left);
        {limit, ChunkId, Remote} ->
            at_limit(ChunkId, Reader0#reader{tier = {remote, Remote}}, Local, Deliver, Left);
        {error, Kind, Text} ->
            remote_failed(Kind, Text, Reader0, Local, Deliver, Left)
    end.

read_local(Log0, Next, #reader{chained = Chained} = Reader, Local, Deliver, Left) ->
    Guard = fun(ChunkId) ->
        %% The chunk that is next cannot be a jump. Another one may follow skipped chunks, or be
        %% the first one above a floor that passed us: then the floor is above Next now.
        case ChunkId =:= Next orelse local_first(Reader) =< Next of
            true -> ok;
            false -> throw(?MODULE)
        end
    end,
    try Local(Log0, Chained, Guard) of
        {ok, Log} ->
            ok = goes_on(Reader),
            {ok, {?MODULE, Reader#reader{tier = {local, Log}}}};
        {ok, Header, Iterator, Log} ->
            ok = goes_on(Reader),
            {ok, Header, Iterator, {?MODULE, Reader#reader{tier = {local, Log}, chained = true}}};
        {end_of_stream, Log} ->
            end_of_local(Next, Log, Reader, Local, Deliver, Left);
        Other ->
            Other
    catch
        throw:?MODULE -> below_floor(Next, Reader, Local, Deliver, Left)
    end.

%% Nothing more here: the end of the log, or a segment that has just been deleted, before (the
%% file is not there) or after (stock stepped over it and wanted no chunk up to the end) the floor
%% moved.
end_of_local(Next0, Log, Reader0, Local, Deliver, Left) ->
    Next = osiris_log:next_offset(Log),
    Reader = Reader0#reader{tier = {local, Log}},
    case {local_first(Reader) =< Next0, readable(Next, Reader)} of
        {false, _} ->
            %% Reader0 keeps the place; its file may be closed, but below the floor only that counts.
            ok = osiris_log:close(Log),
            below_floor(Next0, Reader0, Local, Deliver, Left);
        {true, false} ->
            {end_of_stream, {?MODULE, Reader}};
        {true, true} ->
            case remote_range(Reader) of
                {ok, First, RemoteNext} when First =< Next, Next < RemoteNext ->
                    become_remote(Next, Reader, Local, Deliver, Left);
                pending ->
                    retry_later(Reader);
                _ ->
                    {end_of_stream, {?MODULE, Reader}}
            end
    end.

readable(Next, #reader{shared = Shared}) ->
    osiris_log_shared:committed_chunk_id(Shared) >= Next andalso
        osiris_log_shared:last_chunk_id(Shared) >= Next.

%% The local log begins above Next. Trimmed by tiering: the remote tier has it. Trimmed by the
%% user's retention: it is gone from both, and the reader goes on at the floor, as in stock; if that
%% is certain, because the manifest that is known here may be old.
below_floor(Next, Reader, Local, Deliver, Left) ->
    below_floor(Next, local_first(Reader), false, Reader, Local, Deliver, Left).

below_floor(Next, Floor, IsCertain, Reader, Local, Deliver, Left) ->
    case remote_range(Reader) of
        {ok, First, RemoteNext} when First < RemoteNext, Next < RemoteNext, First < Floor ->
            become_remote(max(First, Next), Reader, Local, Deliver, Left);
        {error, closed} ->
            plugin_is_off(Reader);
        {error, Kind} ->
            failed(Kind, <<"who has the next chunk cannot be found out">>, Reader);
        Range ->
            case gap(Range, Floor, IsCertain, Reader) of
                true ->
                    at_floor(Next, Floor, Reader, Local, Deliver, Left);
                look_again ->
                    below_floor(Next, Floor, true, Reader, Local, Deliver, Left);
                {later, Waiting} ->
                    retry_later(Waiting)
            end
    end.

%% Whether a reader may go on at the floor, where the remote tier is not known to have what is
%% missing. Only a manifest that was looked at after the gap became certain shows it.
gap({ok, First, _}, Floor, _, _) when First >= Floor ->
    %% No manifest begins further down than an older one.
    true;
gap({ok, _, _}, Floor, IsCertain, Reader) ->
    gap(Floor, IsCertain, Reader);
gap({error, _}, _, _, Reader) ->
    {later, Reader};
gap(Unknown, Floor, IsCertain, Reader) ->
    case still_unknown(Unknown, Reader) of
        {true, Waiting} -> {later, Waiting};
        false -> gap(Floor, IsCertain, Reader)
    end.

gap(_, true, _) ->
    true;
gap(Floor, false, #reader{stream_id = StreamId} = Reader) ->
    case rabbitmq_stream_s3_gap:is_certain(StreamId, Floor) of
        true -> look_again;
        false -> {later, Reader}
    end.

at_floor(Next, Floor, #reader{tier = {local, Log}} = Reader, Local, Deliver, Left) ->
    case open_local(Next, Reader) of
        {ok, Reopened} ->
            case osiris_log:next_offset(Reopened) =< Floor of
                true ->
                    ok = osiris_log:close(Log),
                    Local1 = Reader#reader{tier = {local, Reopened}, chained = false},
                    read(Local1, Local, Deliver, Left - 1);
                false ->
                    %% The floor has moved, or is about to: of what is below that nothing is known.
                    ok = osiris_log:close(Reopened),
                    read(Reader, Local, Deliver, Left - 1)
            end;
        {error, _} = Error ->
            Error
    end.

%% A stream that nothing is known of any more has a member that is just being replaced, or it was
%% never tiered: the first for a moment, the second for good.
still_unknown(pending, Reader) ->
    {true, Reader};
still_unknown(none, #reader{forgotten_until = undefined} = Reader) ->
    {true, Reader#reader{forgotten_until = ?SPEC:deadline()}};
still_unknown(none, #reader{forgotten_until = Until} = Reader) ->
    erlang:monotonic_time(millisecond) < Until andalso {true, Reader}.

become_remote(Next, #reader{tier = {local, Log}} = Reader, Local, Deliver, Left) ->
    Close = fun() -> osiris_log:close(Log) end,
    reopen_remote({offset, Next}, Next, Close, Reader, Local, Deliver, Left).

reopen_remote(Start, Next, Close, Reader0, Local, Deliver, Left) ->
    case open_remote(Start, Next, Reader0) of
        {ok, Reader} ->
            ok = Close(),
            read(Reader, Local, Deliver, Left - 1);
        {error, closed} ->
            plugin_is_off(Reader0);
        {error, Kind} ->
            failed(Kind, <<"cannot read from the remote tier">>, Reader0)
    end.

%% Final for this handle. A store that has not answered for a minute may answer in the next one: the
%% consumer waits, as it would have to wait if it came again. And the handle may have ended only
%% because its engine did, and the plugin has a new one by now.
remote_failed(unavailable, Text, Reader, Local, Deliver, Left) ->
    ok = say_once(unavailable, Text, Reader),
    again_remote(Reader, Local, Deliver, Left);
remote_failed(Kind, Text, #reader{tier = {remote, Remote}} = Reader, Local, Deliver, Left) ->
    case persistent_term:get(?ENGINE, undefined) =:= rabbitmq_stream_s3_remote_log:engine(Remote) of
        true -> failed(Kind, Text, Reader);
        false -> again_remote(Reader, Local, Deliver, Left)
    end.

again_remote(#reader{tier = {remote, Remote}} = Reader, Local, Deliver, Left) ->
    Close = fun() -> rabbitmq_stream_s3_remote_log:close(Remote) end,
    Start = rabbitmq_stream_s3_remote_log:start(Remote),
    Next = rabbitmq_stream_s3_remote_log:next_offset(Remote),
    reopen_remote(Start, Next, Close, Reader, Local, Deliver, Left).

%% What is asked for is not here and cannot be fetched until the plugin is on again.
plugin_is_off(Reader) ->
    ok = say_once(closed, <<"waits until the plugin is on again">>, Reader),
    try_again(?OFF_MS, Reader).

%% The chunk with this id was in the local log, too, when this reader was opened. If the log had lost
%% its end, the manifest of then may have had another one there. So the local log is asked; what it
%% has trimmed meanwhile is in the manifest of now.
at_limit(ChunkId, #reader{tier = {remote, Remote}} = Reader, Local, Deliver, Left) ->
    First = local_first(Reader),
    Next = rabbitmq_stream_s3_remote_log:next_offset(Remote),
    case rabbitmq_stream_s3_remote_log:start(Remote) of
        {timestamp, _} = Spec when First >= 0, First =< ChunkId ->
            start_local(Spec, ChunkId, Reader, Local, Deliver, Left);
        {offset, _} when First >= 0, First =< Next ->
            become_local(Next, Reader, Local, Deliver, Left);
        {offset, _} when First >= 0 ->
            case remote_range(Reader) of
                {ok, RemoteFirst, RemoteNext} when RemoteFirst >= First; RemoteNext =< Next ->
                    become_local(Next, Reader, Local, Deliver, Left);
                _ ->
                    again_remote(Reader, Local, Deliver, Left)
            end;
        _ ->
            again_remote(Reader, Local, Deliver, Left)
    end.

%% Nothing older than the chunk with this id is new enough.
start_local(Spec, ChunkId, #reader{tier = {remote, Remote}} = Reader, Local, Deliver, Left) ->
    case open_local(?SPEC:stock(Spec), Reader) of
        {ok, Log} ->
            case oldest_chunk(Reader) =< ChunkId of
                true ->
                    ok = rabbitmq_stream_s3_remote_log:close(Remote),
                    Opened = Reader#reader{tier = {local, Log}, chained = false},
                    read(Opened, Local, Deliver, Left - 1);
                false ->
                    ok = osiris_log:close(Log),
                    again_remote(Reader, Local, Deliver, Left)
            end;
        {error, _} ->
            retry_later(Reader)
    end.

%% The remote tier ends at Next. The local reader must begin exactly there.
become_local(Next, #reader{tier = {remote, Remote}} = Reader, Local, Deliver, Left) ->
    case open_local(Next, Reader) of
        {ok, Log} ->
            case fits(osiris_log:next_offset(Log), Next, Reader) of
                true ->
                    ok = rabbitmq_stream_s3_remote_log:close(Remote),
                    Opened = Reader#reader{tier = {local, Log}, chained = false},
                    read(Opened, Local, Deliver, Left - 1);
                again ->
                    ok = osiris_log:close(Log),
                    again_remote(Reader, Local, Deliver, Left);
                {later, Waiting} ->
                    ok = osiris_log:close(Log),
                    retry_later(Waiting)
            end;
        {error, _} ->
            retry_later(Reader)
    end.

fits(Next, Next, _) ->
    true;
fits(Landed, Next, Reader) when Landed < Next ->
    %% A replica that is behind.
    {later, Reader};
fits(Landed, Next, Reader) ->
    fits(Landed, Next, false, Reader).

%% The floor is above Next. Tiering moves the manifest before it trims, so a manifest that still does
%% not reach beyond Next, and is not an old one, means that the user's retention dropped it.
fits(Landed, Next, IsCertain, Reader) ->
    case remote_range(Reader) of
        {ok, First, RemoteNext} when Next < RemoteNext, First < Landed ->
            again;
        Range ->
            case gap(Range, Landed, IsCertain, Reader) of
                look_again -> fits(Landed, Next, true, Reader);
                Answer -> Answer
            end
    end.

remote_range(#reader{stream_id = StreamId, shared = Shared}) ->
    case persistent_term:get(?ENGINE, undefined) of
        undefined ->
            {error, closed};
        Engine ->
            case rabbitmq_stream_s3_nif:manifest_range(Engine, StreamId) of
                none ->
                    case rabbitmq_stream_s3_osiris:has_member(Shared) of
                        true -> pending;
                        false -> none
                    end;
                Known ->
                    Known
            end
    end.

local_first(#reader{shared = Shared}) ->
    osiris_log_shared:first_chunk_id(Shared).

retry_later(Reader) ->
    try_again(?RETRY_MS, Reader).

%% One wake-up for one end of stream that the owner believes. The stream protocol asks twice, and
%% two wake-ups for one would become four, and so on: the first answer only sets one that is late
%% enough for the second to replace it.
try_again(Ms, #reader{timer = Timer, wake = Wake, asks_again = AsksAgain} = Reader) ->
    _ = Timer =:= undefined orelse erlang:cancel_timer(Timer),
    Delay =
        case AsksAgain of
            true -> ?UNASKED_MS;
            false -> Ms
        end,
    {end_of_stream, {?MODULE, Reader#reader{timer = erlang:send_after(Delay, self(), Wake)}}}.

failed(Kind, Text, Reader) ->
    ok = say_once(Kind, Text, Reader),
    {error, {stream_s3, Kind}}.

%% A chunk: what went wrong is over, and will be said if it goes wrong again.
goes_on(#reader{counter_id = CounterId}) ->
    _ = erase({?MODULE, CounterId}),
    ok.

%% The same thing, or the same two, go wrong again on every try.
say_once(Kind, Text, #reader{stream_id = StreamId, counter_id = CounterId} = Reader) ->
    Said =
        case get({?MODULE, CounterId}) of
            undefined -> [];
            Kinds -> Kinds
        end,
    case lists:member(Kind, Said) of
        true ->
            ok;
        false ->
            _ = put({?MODULE, CounterId}, [Kind | Said]),
            ?LOG_ERROR("stream_s3: ~ts: a consumer cannot go on at offset ~b: ~0p: ~ts", [
                StreamId, next(Reader), Kind, Text
            ])
    end.

%%--------------------------------------------------------------------------------------------
%% Getters and the end

-spec next_offset(state()) -> osiris:offset().
next_offset({?MODULE, Reader}) ->
    next(Reader).

next(#reader{tier = {local, Log}}) -> osiris_log:next_offset(Log);
next(#reader{tier = {remote, Remote}}) -> rabbitmq_stream_s3_remote_log:next_offset(Remote).

-spec committed_offset(state()) -> integer().
committed_offset({?MODULE, #reader{shared = Shared}}) ->
    ?SPEC:committed_offset(Shared).

-spec committed_chunk_id(state()) -> integer().
committed_chunk_id({?MODULE, #reader{shared = Shared}}) ->
    osiris_log_shared:committed_chunk_id(Shared).

-spec close(state()) -> ok.
close({?MODULE, #reader{tier = Tier, timer = Timer, count = Count} = Reader}) ->
    case Tier of
        {local, Log} -> ok = osiris_log:close(Log);
        {remote, Remote} -> ok = rabbitmq_stream_s3_remote_log:close(Remote)
    end,
    _ = Timer =:= undefined orelse erlang:cancel_timer(Timer),
    _ = erase({?MODULE, Reader#reader.counter_id}),
    ok = rabbitmq_stream_s3_subscription:closed(Reader#reader.counter_id),
    _ = Count(-1),
    delete_counter(Reader).

delete_counter(#reader{counter_id = undefined}) -> ok;
delete_counter(#reader{counter_id = CounterId}) -> osiris_counters:delete(CounterId).
