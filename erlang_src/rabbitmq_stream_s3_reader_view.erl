-module(rabbitmq_stream_s3_reader_view).
-moduledoc """
What can be asked of a reader without reading: where it is, where the log ends, whose it is.

The argument is what a log state of rabbitmq_stream_s3_log_reader holds, which may be of another version of
the plugin (rabbitmq_stream_s3_reader_state). Owns no state. Does not own reading.
""".

-export([next_offset/1, committed_offset/1, committed_chunk_id/1, is_at_end/1, owner/1, wake_after/2]).

-include("rabbitmq_stream_s3_reader.hrl").

-spec next_offset(term()) -> osiris:offset().
next_offset(Ours) ->
    case rabbitmq_stream_s3_reader_state:current(Ours) of
        {ok, Reader} -> rabbitmq_stream_s3_reader_wait:next(Reader);
        _NotUnderstood -> 0
    end.

-spec committed_offset(term()) -> integer().
committed_offset(Ours) ->
    rabbitmq_stream_s3_reader_start:committed_offset(rabbitmq_stream_s3_reader_state:shared(Ours)).

-spec committed_chunk_id(term()) -> integer().
committed_chunk_id(Ours) ->
    osiris_log_shared:committed_chunk_id(rabbitmq_stream_s3_reader_state:shared(Ours)).

-doc """
Whether the consumer has been given everything up to the committed end of the stream, as far as the
member on this node knows it.
""".
-spec is_at_end(term()) -> boolean().
is_at_end(Ours) ->
    case rabbitmq_stream_s3_reader_state:current(Ours) of
        {ok, #reader{tier = {unknown, _}}} ->
            false;
        {ok, #reader{tier = {ended, _}}} ->
            true;
        {ok, #reader{shared = Shared} = Reader} ->
            rabbitmq_stream_s3_reader_wait:next(Reader) >
                rabbitmq_stream_s3_reader_start:committed_offset(Shared);
        %% It is about to be ended.
        _NotUnderstood ->
            true
    end.

-doc "The queue of a reader, and the name of its statistics.".
-spec owner(term()) -> {Reference :: term(), CounterId :: term()}.
owner(Ours) ->
    {element(#reader.reference, Ours), element(#reader.counter_id, Ours)}.

-doc "Wakes the owner of a reader after this time, as if there were a chunk for it.".
-spec wake_after(pos_integer(), term()) -> reference().
wake_after(Ms, Ours) ->
    erlang:send_after(Ms, self(), element(#reader.wake, Ours)).
