-module(rabbitmq_stream_s3_log_reader).
-moduledoc """
Owns the log state that a consumer of a tiered stream holds, as osiris_log's callers know it.
Every such reader is ours, also one that only reads local segments: a stock reader silently
steps over segments that tiering has deleted (it opens the segment named by the floor of the
log).
Opening one never waits and reading from one never waits: "no chunk yet" is the answer of everything
that takes time, and the owner is woken.

Does not own opening it (rabbitmq_stream_s3_reader_open), which tier it reads from
(rabbitmq_stream_s3_reader_tier), reading itself. Local: a stock reader inside; remote:
rabbitmq_stream_s3_reader_remote. Nor where a consumer starts: rabbitmq_stream_s3_reader_start.
""".

%% called by the wrappers in osiris_log
-export([init_offset_reader/2, resolve_offset_spec/2, adopt/2]).
-export([send_file/3, chunk_iterator/2, chunk_iterator/3, iterator_next/1]).
-export([next_offset/1, committed_offset/1, committed_chunk_id/1, close/1]).

-include("rabbitmq_stream_s3_reader.hrl").

%% Thrown through stock code: the floor has passed the reader.
-define(PASSED, {?MODULE, passed}).

-opaque state() :: {?MODULE, #reader{}}.
-export_type([state/0]).


-doc "Opens a reader on the tier that has the offset. A stream that is not tiered stays stock.".
-spec init_offset_reader(osiris:offset_spec(), map()) ->
    {ok, state() | osiris_log:state()} | {error, term()}.
init_offset_reader(Spec, Context) ->
    case rabbitmq_stream_s3_reader_open:open(Spec, Context) of
        {ok, Reader} -> {ok, {?MODULE, Reader}};
        {stock, Opened} -> Opened;
        {error, _} = Error -> Error
    end.

-doc "The chunk id at which a reader with this spec would start.".
-spec resolve_offset_spec(osiris:offset_spec(), map()) -> {ok, osiris:offset()} | {error, term()}.
resolve_offset_spec(Spec, Context) ->
    rabbitmq_stream_s3_reader_lookup:resolve_offset_spec(Spec, Context).

-doc """
Takes over a stock reader that was opened before the hooks were there. Inner is that reader with
its counting switched off.
""".
-spec adopt(osiris_log:state(), map()) -> {ok, state()} | false.
adopt(Inner, Parts) ->
    case rabbitmq_stream_s3_reader_open:adopt(Inner, Parts) of
        {ok, Reader} -> {ok, {?MODULE, Reader}};
        false -> false
    end.

-doc "As osiris_log:send_file/3. Never waits for the remote tier: no bytes yet is end_of_stream.".
-type callback() :: fun((map(), pos_integer()) -> iodata() | term()).
-spec send_file(gen_tcp:socket() | ssl:sslsocket(), state(), callback()) ->
    {ok, state()} | {end_of_stream, state()} | {error, term()}.
send_file(Socket, {?MODULE, Ours}, Callback) ->
    case rabbitmq_stream_s3_reader_state:current(Ours) of
        {ok, Reader} ->
            send_chunk(Socket, Reader, Callback);
        {unknown, Queue} ->
            ok = rabbitmq_stream_s3_reader_subscription:end_stream(Queue, unknown_reader),
            {end_of_stream, {?MODULE, Ours}};
        {error, _} = Error ->
            Error
    end.

send_chunk(Socket, Reader, Callback) ->
    case rabbitmq_stream_s3_reader_tier:read(Reader, stock_send_file(Socket, Callback)) of
        {chunk, Header, Data, Trailer, Next} ->
            case send_remote(Socket, Header, Data, Trailer, Reader, Callback) of
                ok -> {ok, {?MODULE, Next#reader{asks_again = true}}};
                {error, _} = Error -> Error
            end;
        {end_of_stream, #reader{asks_again = AsksAgain} = Next} ->
            {end_of_stream, {?MODULE, Next#reader{asks_again = not AsksAgain}}};
        {ok, Next} ->
            {ok, {?MODULE, Next#reader{asks_again = true}}};
        {refused, Kind, Next} ->
            %% An error would be logged by the connection, and its consumer would wait for ever; not
            %% every RabbitMQ 4 has a clause for it everywhere.
            ok = rabbitmq_stream_s3_reader_subscription:end_stream(
                Next#reader.counter_id, Next#reader.reference, Next#reader.shared, Kind
            ),
            {end_of_stream, {?MODULE, Next}};
        {error, _} = Error ->
            Error
    end.

%% Stock calls back right before it sends, and has no other way to be stopped than a throw.
stock_send_file(Socket, Callback) ->
    fun(Log, _Chained, Guard) ->
        Guarded = fun(#{chunk_id := Id} = Header, Size) ->
            case Guard(Id) of
                ok -> Callback(Header, Size);
                passed -> throw(?PASSED)
            end
        end,
        try
            osiris_log:send_file(Socket, Log, Guarded)
        catch
            throw:?PASSED -> passed
        end
    end.

send_remote(Socket, #{header_data := HeaderData} = Header, Data, Trailer, Reader, Callback) ->
    #reader{transport = Transport, chunk_selector = Selector} = Reader,
    {Size, Body} = body(Header, Data, Trailer, Selector),
    Frame = frame(Callback(Header, Size + byte_size(HeaderData))),
    send(Transport, Socket, [Frame, HeaderData | Body]).

%% Before RabbitMQ 4.1 the callback sends the start of the frame itself and returns no bytes.
frame(Frame) when is_binary(Frame); is_list(Frame) -> Frame;
frame(_) -> <<>>.

%% Stock leaves the trailer (tracking data) of a user chunk out, unless all chunks are wanted.
body(#{type := 0, data_size := Size}, Data, _, user_data) ->
    {Size, [Data]};
body(#{data_size := Size}, Data, Trailer, _) ->
    {Size + byte_size(Trailer), [Data, Trailer]}.

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
chunk_iterator({?MODULE, Ours}, Credit, Previous) ->
    case rabbitmq_stream_s3_reader_state:current(Ours) of
        {ok, Reader} ->
            next_chunk(unless_ended(Reader#reader{asks_again = false}), Credit, Previous);
        {unknown, Queue} ->
            ok = end_amqp_once(Queue, Ours),
            {end_of_stream, {?MODULE, Ours}};
        {error, _} = Error ->
            Error
    end.

end_amqp_once(Queue, Ours) ->
    Key = {?MODULE, not_understood, erlang:phash2(Ours)},
    case put(Key, ended) of
        undefined -> rabbitmq_stream_s3_reader_subscription:end_amqp(Queue);
        ended -> ok
    end.

next_chunk(Reader, Credit, Previous) ->
    Local = fun(Log, Chained, Guard) ->
        case stock_iterator(Log, Credit, Previous, Chained) of
            {ok, #{chunk_id := Id}, _, Next} = Chunk ->
                case Guard(Id) of
                    ok ->
                        Chunk;
                    passed ->
                        ok = osiris_log:close(Next),
                        passed
                end;
            Other ->
                Other
        end
    end,
    case rabbitmq_stream_s3_reader_tier:read(Reader, Local) of
        {chunk, Header, Data, _Trailer, Next} ->
            Iterator = rabbitmq_stream_s3_reader_remote:iterator(Header, Data),
            {ok, Header, Iterator, {?MODULE, Next}};
        {ok, Header, Iterator, Next} -> {ok, Header, Iterator, {?MODULE, Next}};
        {end_of_stream, Next} ->
            {end_of_stream, {?MODULE, Next}};
        {refused, _Kind, #reader{reference = Reference} = Next} ->
            %% An error would take the channel or session along.
            ok = rabbitmq_stream_s3_reader_subscription:end_amqp(Reference),
            {end_of_stream, {?MODULE, Next}};
        {error, _} = Error ->
            Error
    end.

%% A channel or session that ends the consumers of a stream keeps their readers.
unless_ended(#reader{tier = {ended, _}} = Reader) ->
    Reader;
unless_ended(#reader{reference = Reference, opened = Opened} = Reader) ->
    case rabbitmq_stream_s3_reader_subscription:is_ended(Reference, Opened) of
        true ->
            ok = rabbitmq_stream_s3_reader_wait:close_tier(Reader),
            Reader#reader{tier = {ended, rabbitmq_stream_s3_reader_wait:next(Reader)}};
        false ->
            Reader
    end.

stock_iterator(Log, Credit, Previous, Chained) ->
    %% osiris 1.8 has no third argument.
    case erlang:function_exported(osiris_log, chunk_iterator, 3) of
        true when Chained -> osiris_log:chunk_iterator(Log, Credit, Previous);
        true -> osiris_log:chunk_iterator(Log, Credit, undefined);
        false -> osiris_log:chunk_iterator(Log, Credit)
    end.

-doc "As osiris_log:iterator_next/1, for iterators of chunks of the remote tier.".
-spec iterator_next(rabbitmq_stream_s3_reader_remote:iterator()) ->
    end_of_chunk
    | {{osiris:offset(), osiris:entry()}, rabbitmq_stream_s3_reader_remote:iterator()}.
iterator_next(Iterator) ->
    rabbitmq_stream_s3_reader_remote:iterator_next(Iterator).

-spec next_offset(state()) -> osiris:offset().
next_offset({?MODULE, Ours}) ->
    rabbitmq_stream_s3_reader_view:next_offset(Ours).

-spec committed_offset(state()) -> integer().
committed_offset({?MODULE, Ours}) ->
    rabbitmq_stream_s3_reader_view:committed_offset(Ours).

-spec committed_chunk_id(state()) -> integer().
committed_chunk_id({?MODULE, Ours}) ->
    rabbitmq_stream_s3_reader_view:committed_chunk_id(Ours).

-spec close(state()) -> ok.
close({?MODULE, Ours}) ->
    case rabbitmq_stream_s3_reader_state:current(Ours) of
        {ok, Reader} -> close_reader(Reader);
        _NotUnderstood -> ok
    end.

close_reader(#reader{timer = Timer, count = Count, counter_id = CounterId} = Reader) ->
    ok = rabbitmq_stream_s3_reader_open:closing(Reader),
    ok = rabbitmq_stream_s3_reader_wait:close_tier(Reader),
    _ = Timer =:= undefined orelse erlang:cancel_timer(Timer),
    ok = rabbitmq_stream_s3_reader_wait:served(Reader),
    ok = rabbitmq_stream_s3_reader_subscription:closed(CounterId),
    ok = rabbitmq_stream_s3_reader_drain:closed(CounterId),
    _ = Count(-1),
    rabbitmq_stream_s3_reader_open:delete_counter(Reader).
