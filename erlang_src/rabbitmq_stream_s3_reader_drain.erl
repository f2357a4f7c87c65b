-module(rabbitmq_stream_s3_reader_drain).
-moduledoc """
Owns when an AMQP 1.0 receiver that drains is told that there was nothing more. Stock tells it at the
first end of stream that its reader answers, which in the remote tier only means "not yet". So, by
wrappers around two functions of rabbit_stream_queue, a drain completes when the reader has
reached the committed end. If no chunk comes for stream_s3.read.drain_timeout the link is detached
with an error: the receiver then knows that it has not seen everything.

Does not own the wrappers' text (rabbitmq_stream_s3_host_forms), loading them
(rabbitmq_stream_s3_host_osiris), where the reader is (rabbitmq_stream_s3_log_reader).
""".

%% called by the wrapper in rabbit_stream_queue
-export([is_complete/1]).
%% called by the shell
-export([closed/1]).

-include_lib("kernel/include/logger.hrl").

-define(TIMEOUT_MS, 60_000).
-define(KEY(CounterId), {?MODULE, CounterId}).

-doc """
Called by a session whose link drains, after it has read what there is. `false`: keep the credit, there
is more to come.
""".
-spec is_complete({rabbitmq_stream_s3_log_reader, term()}) -> boolean().
is_complete({rabbitmq_stream_s3_log_reader, Reader}) ->
    {Reference, CounterId} = rabbitmq_stream_s3_reader_view:owner(Reader),
    case rabbitmq_stream_s3_reader_view:is_at_end(Reader) of
        true ->
            ok = closed(CounterId),
            true;
        false ->
            Now = erlang:monotonic_time(millisecond),
            Next = rabbitmq_stream_s3_reader_view:next_offset(Reader),
            case get(?KEY(CounterId)) of
                {Next, Deadline} when Now < Deadline ->
                    ok;
                {Next, _Passed} ->
                    ok = closed(CounterId),
                    ok = give_up(Reference);
                _NoneOrMoved ->
                    ok = wait(Next, Now, CounterId, Reader)
            end,
            false
    end.

-doc "The calling process has closed the reader, or its drain is complete.".
-spec closed(CounterId :: term()) -> ok.
closed(CounterId) ->
    _ = erase(?KEY(CounterId)),
    ok.

%% As long as chunks come the receiver is being served.
wait(Next, Now, CounterId, Reader) ->
    Timeout = application:get_env(rabbitmq_stream_s3, read_drain_timeout_ms, ?TIMEOUT_MS),
    _ = put(?KEY(CounterId), {Next, Now + Timeout}),
    %% Not at the deadline itself, where "before" and "after" are a matter of a millisecond.
    _ = rabbitmq_stream_s3_reader_view:wake_after(Timeout + 1, Reader),
    ok = rabbitmq_stream_s3_counters:add(drains_deferred).

give_up(Reference) ->
    ok = rabbitmq_stream_s3_counters:add(drains_given_up),
    ?LOG_WARNING(
        "stream_s3: ~0p: a receiver that drains is detached, because the remote tier did not answer "
        "within stream_s3.read.drain_timeout. It has not seen the end of the stream; it can attach "
        "again where it stopped.",
        [Reference]
    ),
    rabbitmq_stream_s3_reader_subscription:end_amqp(Reference).
