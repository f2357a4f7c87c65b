-module(rabbitmq_stream_s3_reader_subscription).
-moduledoc """
Owns how a client learns that its subscription cannot continue, by means that stock has for it.

Stream protocol: a connection takes an error of a read for something of this moment: it logs it, keeps
the subscription and sends nothing more. Only the end of the stream's member makes it end the
subscription in order (metadata update, "stream not available"), so it is sent just that, with the
reference of its own monitor, which is in its state.
AMQP: an error of a read ends the channel or session, and with 0-9-1 the connection. A queue whose
replica on this node is deleted ends the consumers of that queue, and nothing else: basic.cancel, or
a detach.

Does not own what went wrong, and saying so in the log (rabbitmq_stream_s3_reader_wait).
""".

-export([end_stream/4, end_stream/2, end_amqp/1, is_ended/2, closed/1]).
-export([tell/4, monitor_of/3]).

-include_lib("kernel/include/logger.hrl").

%% Records within records of a connection's state.
-define(DEPTH_MAX, 4).
-define(ENDED(Reference), {?MODULE, ended, Reference}).

-doc """
Called by a connection whose reader has failed for good. Tells the connection once for each reader;
the answer to the read has to come first, so another process does it.
""".
-spec end_stream(ReaderId :: term(), Queue :: term(), atomics:atomics_ref(), Kind :: atom()) -> ok.
end_stream(ReaderId, Queue, Shared, Kind) ->
    case {put({?MODULE, ReaderId}, told), rabbitmq_stream_s3_host_osiris:member(Shared)} of
        {undefined, {ok, Member}} when element(1, Queue) =:= resource ->
            _ = spawn(?MODULE, tell, [self(), Member, Queue, Kind]),
            ok;
        _ ->
            ok
    end.

-doc """
Called by a channel, session or shovel whose reader has failed for good. It ends its consumers of this
queue when the read has been answered.
""".
-spec end_amqp(Queue :: term()) -> ok.
end_amqp(Queue) ->
    _ = put(?ENDED(Queue), erlang:unique_integer([monotonic])),
    Event =
        case proc_lib:initial_call(self()) of
            %% It overlooks a replica that is deleted. It starts again, as its configuration says.
            {rabbit_shovel_worker, _, _} -> eol;
            _ -> deleted_replica
        end,
    _ = self() ! {'$gen_cast', {queue_event, Queue, Event}},
    ok.

-doc "Whether a reader that this process opened at this moment belongs to a consumer that was ended.".
-spec is_ended(Queue :: term(), Opened :: integer()) -> boolean().
is_ended(Queue, Opened) ->
    case get(?ENDED(Queue)) of
        undefined -> false;
        Ended -> Opened < Ended
    end.

-doc "As end_stream/4, for a reader of which nothing but its queue is understood.".
-spec end_stream(Queue :: term(), Kind :: atom()) -> ok.
end_stream(Queue, Kind) ->
    Members = rabbitmq_stream_s3_host_osiris:members(),
    case [Pid || {Pid, _, _, _, Reference} <- Members, Reference =:= Queue] of
        [Member | _] ->
            case put({?MODULE, {Queue, Kind}}, told) of
                undefined ->
                    _ = spawn(?MODULE, tell, [self(), Member, Queue, Kind]),
                    ok;
                told ->
                    ok
            end;
        [] ->
            ok
    end.

-doc "The calling process has closed the reader.".
-spec closed(ReaderId :: term()) -> ok.
closed(ReaderId) ->
    _ = erase({?MODULE, ReaderId}),
    ok.

-doc false.
-spec tell(pid(), pid(), term(), atom()) -> ok.
tell(Connection, Member, Queue, Kind) ->
    Stream = element(4, Queue),
    try sys:get_state(Connection, infinity) of
        State ->
            case monitor_of(Member, Stream, State) of
                {ok, Monitor} ->
                    _ = Connection ! {'DOWN', Monitor, process, Member, {stream_s3, Kind}},
                    ok;
                none ->
                    %% Louder than it has to be, and better than silence.
                    ?LOG_WARNING("stream_s3: ~ts: a connection is closed, its subscription cannot be ended alone", [
                        Stream
                    ]),
                    _ = Connection ! {shutdown, "a record cannot be read"},
                    ok
            end
    catch
        %% It is gone, or nothing that could be told.
        exit:_ -> ok
    end.

-doc "The reference under which a connection monitors a member for a stream.".
-spec monitor_of(pid(), binary(), term()) -> {ok, reference()} | none.
monitor_of(Member, Stream, State) ->
    case [Ref || {Ref, Value} <- entries(State, ?DEPTH_MAX), Value =:= {Member, Stream}] of
        [Ref | _] -> {ok, Ref};
        [] -> none
    end.

entries(Map, _) when is_map(Map) ->
    [Entry || {Key, _} = Entry <- maps:to_list(Map), is_reference(Key)];
entries(Tuple, Depth) when is_tuple(Tuple), Depth > 0 ->
    lists:append([entries(Element, Depth - 1) || Element <- tuple_to_list(Tuple)]);
entries(_, _) ->
    [].
