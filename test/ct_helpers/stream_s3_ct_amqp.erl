%% Streams over AMQP 0-9-1, with RabbitMQ's own client: declared, filled, and read back byte for byte.
-module(stream_s3_ct_amqp).

-include_lib("amqp_client/include/amqp_client.hrl").

-export([
    declare/2,
    declare/3,
    declare_classic/2,
    delete/2,
    publish/4,
    consume/4,
    consume/5,
    with_channel/2
]).

%% The record is named by its number in the stream: of AMQP publishers osiris keeps chunks of its own,
%% which take offsets and are delivered to nobody.
-type records() :: {First :: non_neg_integer(), Count :: pos_integer()}.

-import(stream_s3_ct_records, [payload/2]).

-define(WAIT_MS, 30_000).

-spec declare(stream_s3_ct_node:t(), binary()) -> ok.
declare(Node, Stream) ->
    declare(Node, Stream, []).

-spec declare(stream_s3_ct_node:t(), binary(), [{binary(), atom(), term()}]) -> ok.
declare(Node, Stream, Args) ->
    with_channel(Node, fun(Channel) ->
        #'queue.declare_ok'{} = amqp_channel:call(Channel, #'queue.declare'{
            queue = Stream,
            durable = true,
            arguments = [{~"x-queue-type", longstr, ~"stream"} | Args]
        }),
        ok
    end).

%% A queue that is no stream.
-spec declare_classic(stream_s3_ct_node:t(), binary()) -> ok.
declare_classic(Node, Queue) ->
    with_channel(Node, fun(Channel) ->
        #'queue.declare_ok'{} = amqp_channel:call(
            Channel, #'queue.declare'{queue = Queue, durable = true}
        ),
        ok
    end).

-spec delete(stream_s3_ct_node:t(), binary()) -> ok.
delete(Node, Stream) ->
    with_channel(Node, fun(Channel) ->
        #'queue.delete_ok'{} = amqp_channel:call(Channel, #'queue.delete'{queue = Stream}),
        ok
    end).

%% Publishes records of Size bytes, confirmed.
-spec publish(stream_s3_ct_node:t(), binary(), records(), pos_integer()) -> ok.
publish(Node, Stream, {First, Count}, Size) ->
    with_channel(Node, fun(Channel) ->
        #'confirm.select_ok'{} = amqp_channel:call(Channel, #'confirm.select'{}),
        Publish = #'basic.publish'{routing_key = Stream},
        Send = fun(Sequence) ->
            ok = amqp_channel:cast(Channel, Publish, #amqp_msg{payload = payload(Sequence, Size)}),
            %% Bounds what is in flight.
            (Sequence rem 1000 =/= 999) orelse amqp_channel:wait_for_confirms_or_die(Channel, 60)
        end,
        lists:foreach(Send, lists:seq(First, First + Count - 1)),
        true = amqp_channel:wait_for_confirms_or_die(Channel, 60),
        ok
    end).

%% Consumes from the beginning and checks every byte.
-spec consume(stream_s3_ct_node:t(), binary(), records(), pos_integer()) -> ok.
consume(Node, Stream, Records, Size) ->
    [_ | _] = consume(Node, Stream, {longstr, ~"first"}, Records, Size),
    ok.

%% Consumes from a place and checks every byte: each record once, in order. Answers their offsets.
-spec consume(stream_s3_ct_node:t(), binary(), {atom(), term()}, records(), pos_integer()) ->
    [non_neg_integer()].
consume(Node, Stream, {Type, Place}, {First, Count}, Size) ->
    with_channel(Node, fun(Channel) ->
        #'basic.qos_ok'{} = amqp_channel:call(Channel, #'basic.qos'{prefetch_count = 200}),
        #'basic.consume_ok'{} = amqp_channel:subscribe(
            Channel,
            #'basic.consume'{queue = Stream, arguments = [{~"x-stream-offset", Type, Place}]},
            self()
        ),
        Offsets = [receive_record(Channel, N, Size) || N <- lists:seq(First, First + Count - 1)],
        Offsets =:= lists:usort(Offsets) orelse ct:fail("offsets that do not grow: ~p", [Offsets]),
        Offsets
    end).

receive_record(Channel, Sequence, Size) ->
    receive
        {#'basic.deliver'{delivery_tag = Tag}, #amqp_msg{payload = Payload, props = Props}} ->
            #'P_basic'{headers = Headers} = Props,
            {_, _, Offset} = lists:keyfind(~"x-stream-offset", 1, Headers),
            Payload =:= payload(Sequence, Size) orelse
                ct:fail(
                    "record ~b at offset ~b: ~p", [Sequence, Offset, binary:part(Payload, 0, 16)]
                ),
            ok = amqp_channel:cast(Channel, #'basic.ack'{delivery_tag = Tag}),
            Offset
    after ?WAIT_MS ->
        ct:fail("record ~b did not come", [Sequence])
    end.

-spec with_channel(stream_s3_ct_node:t(), fun((pid()) -> T)) -> T.
with_channel(#{amqp_port := Port}, Fun) ->
    {ok, _} = application:ensure_all_started(amqp_client),
    {ok, Connection} = amqp_connection:start(#amqp_params_network{port = Port}),
    try
        {ok, Channel} = amqp_connection:open_channel(Connection),
        Fun(Channel)
    after
        close(Connection),
        forget_deliveries()
    end.

%% A connection that the test has killed is closed already.
close(Connection) ->
    try
        amqp_connection:close(Connection)
    catch
        exit:_ -> ok
    end.

%% What was on its way must not be taken for the next consumer's.
forget_deliveries() ->
    receive
        {#'basic.deliver'{}, _} -> forget_deliveries();
        #'basic.consume_ok'{} -> forget_deliveries()
    after 0 -> ok
    end.
