-module(rabbitmq_stream_s3_reader_state).
-moduledoc """
Owns a reader that was made by another version of the plugin. It lives in a connection and
outlives the modules that made it, so it is carried over at its next use: to the same place, with
the transient part anew. What cannot be understood is ended by the protocol's own means.

Does not own which fields are where (rabbitmq_stream_s3_reader.hrl), reading, and reopening what
was open natively (rabbitmq_stream_s3_reader_tier, on the first read).
""".

-export([current/1, shared/1]).

-include_lib("kernel/include/logger.hrl").
-include("rabbitmq_stream_s3_reader.hrl").

%% Fields of a reader of a time when it had no version.
-define(UNVERSIONED_SIZE, 17).

-doc """
The reader as this version knows it. Costs one match for one that is. `unknown`: it cannot be carried
over, and the queue is all that is known of it; an error: not even that.
""".
-spec current(term()) -> {ok, #reader{}} | {unknown, term()} | {error, {stream_s3, unknown_reader}}.
current(#reader{version = ?READER_VERSION} = Reader) ->
    {ok, Reader};
current(Other) ->
    try carried(Other) of
        #reader{} = Reader -> {ok, Reader}
    catch
        error:_ -> unknown(Other)
    end.

-doc "What its log shares with its readers.".
-spec shared(term()) -> atomics:atomics_ref().
shared(Ours) ->
    element(#reader.shared, Ours).

%% Version 0 has no field for it; later ones may have any size.
carried(Other) when
    element(1, Other) =:= reader,
    (tuple_size(Other) =:= ?UNVERSIONED_SIZE orelse is_integer(element(#reader.version, Other)))
->
    StreamId = element(#reader.stream_id, Other),
    true = is_binary(StreamId),
    true = is_function(element(#reader.count, Other), 1),
    Reader = #reader{
        stream_id = StreamId,
        context = element(#reader.context, Other),
        shared = shared(Other),
        counter = element(#reader.counter, Other),
        counter_id = element(#reader.counter_id, Other),
        count = element(#reader.count, Other),
        transport = element(#reader.transport, Other),
        chunk_selector = element(#reader.chunk_selector, Other),
        filter = element(#reader.filter, Other),
        reference = element(#reader.reference, Other),
        wake = element(#reader.wake, Other),
        timer = element(#reader.timer, Other)
    },
    Reader#reader{tier = tier(element(#reader.tier, Other), Reader)}.

tier({local, Log}, _) ->
    true = is_tuple(Log),
    {local, Log};
tier({unknown, Spec}, _) ->
    {unknown, Spec};
tier({ended, Next}, _) when is_integer(Next) ->
    {ended, Next};
tier({remote, Remote0}, Reader) ->
    #reader{chunk_selector = Selector, filter = Filter, counter = Counter} = Reader,
    {ok, Remote} = rabbitmq_stream_s3_reader_remote:resumed(Remote0, Selector, Filter, Counter),
    {remote, Remote}.

%% The queue is all by which a subscription can be ended; without it an error has to do.
unknown(Other) ->
    case reference(Other) of
        {ok, Reference} ->
            case get({?MODULE, Reference}) of
                undefined ->
                    _ = put({?MODULE, Reference}, said),
                    ?LOG_ERROR(
                        "stream_s3: ~ts: a consumer was served by another version of the plugin and "
                        "cannot be carried over: its subscription ends, it may subscribe again",
                        [element(4, Reference)]
                    );
                said ->
                    ok
            end,
            {unknown, Reference};
        none ->
            {error, {stream_s3, unknown_reader}}
    end.

reference(Tuple) when is_tuple(Tuple) ->
    case [E || E <- tuple_to_list(Tuple), is_tuple(E), element(1, E) =:= resource] of
        [Reference | _] -> {ok, Reference};
        [] -> none
    end;
reference(_) ->
    none.
