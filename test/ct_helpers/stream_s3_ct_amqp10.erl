%% Streams over AMQP 1.0, with RabbitMQ's own client: read from a place, byte for byte.
-module(stream_s3_ct_amqp10).

-export([consume/5]).

-define(WAIT_MS, 30_000).
-define(CREDIT, 50).

%% Consumes records of stream_s3_ct_amqp:publish/4 from an offset and checks every byte. Answers their offsets.
-spec consume(
    stream_s3_ct_node:t(),
    binary(),
    osiris:offset(),
    {First :: non_neg_integer(), Count :: pos_integer()},
    pos_integer()
) -> [osiris:offset()].
consume(#{amqp_port := Port}, Stream, Offset, {First, Count}, Size) ->
    {ok, _} = application:ensure_all_started(amqp10_client),
    {ok, Connection} = amqp10_client:open_connection(#{
        address => "127.0.0.1",
        port => Port,
        container_id => ~"ct",
        sasl => {plain, ~"guest", ~"guest"}
    }),
    {ok, Session} = amqp10_client:begin_session_sync(Connection),
    Filter = #{~"rabbitmq:stream-offset-spec" => Offset},
    {ok, Receiver} = amqp10_client:attach_receiver_link(
        Session, ~"ct", <<"/queues/", Stream/binary>>, settled, none, Filter
    ),
    ok = amqp10_client:flow_link_credit(Receiver, ?CREDIT, ?CREDIT div 2),
    Offsets = [
        receive_record(Receiver, Number, Size)
     || Number <- lists:seq(First, First + Count - 1)
    ],
    ok = amqp10_client:close_connection(Connection),
    ok = forget(Connection, Receiver),
    Offsets.

receive_record(Receiver, Number, Size) ->
    receive
        {amqp10_msg, Receiver, Message} ->
            #{~"x-stream-offset" := Offset} = amqp10_msg:message_annotations(Message),
            [Body] = amqp10_msg:body(Message),
            Body =:= stream_s3_ct_records:payload(Number, Size) orelse
                ct:fail("the record at offset ~b is another than ~b", [Offset, Number]),
            Offset
    after ?WAIT_MS ->
        ct:fail("record ~b did not come over AMQP 1.0", [Number])
    end.

%% What was on its way must not be taken for the next consumer's.
forget(Connection, Receiver) ->
    receive
        {amqp10_event, {connection, Connection, {closed, _}}} -> forget(Receiver)
    after ?WAIT_MS -> ct:fail("the connection did not close")
    end.

forget(Receiver) ->
    receive
        {amqp10_msg, Receiver, _} -> forget(Receiver);
        {amqp10_event, _} -> forget(Receiver)
    after 0 -> ok
    end.
