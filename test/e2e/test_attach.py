"""Attaching while nobody can say where a consumer's place is: S3 does not answer after the node has started.

Every way to attach is accepted at once, waits without a word, and continues by itself when S3 is back. Whatever
else its connection, channel or session does, it does as without that consumer. What is refused for good costs
the consumers of that stream on that channel, session or connection, and nothing else.
"""

import datetime
import time

import pika
import pytest
from proton import Endpoint
from proton.utils import BlockingConnection, LinkDetached

from stream_s3_e2e import records
from stream_s3_e2e.amqp10 import decode
from stream_s3_e2e.consume import _amqp10_filter
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.s3 import S3Test
from stream_s3_e2e.streamproto import (
    FIRST, LAST, NEXT, NO_OFFSET, ProtocolError, at_offset, at_timestamp,
)
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

HISTORY, LIVE = "history", "live"
SIZE, COUNT = fixed(20_000), 200
CLIENTS = 40


@pytest.fixture(scope="module")
def s3():
    with S3Test() as server:
        yield server


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    settings = {"fragment_size": 500_000, "persist_interval_ms": 100}
    with TieredBroker(run_dir, s3, plugins=("rabbitmq_stream_s3", "rabbitmq_prometheus"), **settings) as node:
        with node.client() as client:
            for stream in (HISTORY, LIVE):
                client.create(stream, stream_max_segment_size_bytes=500_000)
        publish(node, HISTORY, COUNT, SIZE, batch=5, window=0)
        node.flush_tier(HISTORY, COUNT)
        node.wait_trimmed(HISTORY)
        assert node.segments(HISTORY)[0][0] > 0
        yield node


@pytest.fixture
def unknown(broker, s3):
    """The node has been started again, and S3 says nothing: what was persisted of the history is not known."""
    wait_until(lambda: broker.range(HISTORY) == (0, COUNT), 60, "all is well before")
    broker.stop()
    s3.black_hole()
    try:
        broker.start()
        for stream in (HISTORY, LIVE):
            broker.wait_leader(stream)
        assert broker.range(HISTORY) is None
        # Before that, connections that ask for a member which is just starting crash in stock.
        begins = len(broker.log())
        yield lambda: s3.clear_faults()
        assert crash_reports(broker, begins) == []
    finally:
        s3.clear_faults()


def crash_reports(broker, begins):
    """Why processes crashed since the log had this length."""
    signs = ("Reason for termination", " exception ", "badmatch")
    return [line for line in broker.log()[begins:].splitlines() if any(sign in line for sign in signs)]


def history_of(subscription, first=0):
    """Everything up to the end of the history, byte-exact."""
    checker = records.Checker(first, SIZE)
    while checker.next_offset < COUNT:
        chunk = subscription.next_chunk(60)
        assert chunk is not None, f"nothing comes after {checker.next_offset}"
        for offset, message in chunk.messages():
            if offset >= first:
                checker.add(offset, decode(message))


def live(broker, client, tail, count):
    """Publishes, and the tail consumer on the same connection gets it; how long each took at most."""
    committed = client.stats(LIVE)["committed_chunk_id"]
    longest = 0.0
    for _ in range(count):
        began = time.monotonic()
        publish(broker, LIVE, 1, SIZE, client=client, window=0)
        chunk = tail.next_chunk(30)
        longest = max(longest, time.monotonic() - began)
        assert chunk is not None and chunk.chunk_id > committed
        committed = chunk.chunk_id
    return longest


def test_connections_live_while_their_consumers_of_history_wait(broker, unknown):
    """Each client publishes, reads the tail of one stream, and attaches to the history of another, in every way."""
    specs = [FIRST, at_offset(3), at_offset(0), at_timestamp(0), at_offset(COUNT // 4)]
    clients, tails, waiting = [], [], []
    for number in range(CLIENTS):
        client = broker.client()
        tails.append(client.subscribe(LIVE, NEXT, subscription_id=1, credit=50))
        spec = specs[number % len(specs)]
        waiting.append((spec, client.subscribe(HISTORY, spec, subscription_id=2)))
        clients.append(client)
    # Over one connection after the other: publishing and the tail do not notice.
    for client, tail in zip(clients, tails):
        tail.close()
        live(broker, client, client.subscribe(LIVE, NEXT, subscription_id=1, credit=50), 3)
    # Nothing was given to whoever waits, and it was not refused either.
    assert not any(subscription.chunks for _, subscription in waiting)
    unknown()
    firsts = {0: 0, 1: 3, 2: 0, 3: 0, 4: COUNT // 4}
    for number, (_, subscription) in enumerate(waiting):
        history_of(subscription, firsts[number % len(specs)])
    for client in clients:
        assert client.closed is None and client.metadata_updates == []
        client.close()


def test_statistics_and_places_are_not_guessed(broker, unknown):
    with broker.client() as client:
        # -1 is "no offset" to clients: they refuse to use it.
        assert client.stats(HISTORY)["first_chunk_id"] == -1
        for spec in (FIRST, at_offset(3), at_timestamp(0)):
            with pytest.raises(ProtocolError) as refused:
                client.resolve(HISTORY, spec)
            assert refused.value.code == NO_OFFSET
        # What the local log knows is answered.
        floor = broker.segments(HISTORY)[0][0]
        assert client.resolve(HISTORY, at_offset(floor))[1] == floor
        assert client.resolve(HISTORY, LAST)[1] >= floor
        unknown()
        wait_until(lambda: client.stats(HISTORY)["first_chunk_id"] == 0, 60, "the first offset is known")
        wait_until(lambda: resolved(client, at_offset(3)) == 0, 60, "the place is known")


def resolved(client, spec):
    try:
        return client.resolve(HISTORY, spec)[1]
    except ProtocolError as refused:
        assert refused.code == NO_OFFSET
        return None


def test_a_single_active_consumer_waits_and_hands_over(broker, unknown):
    group = {"single-active-consumer": "true", "name": "group"}
    with broker.client() as one, broker.client() as two:
        active = one.subscribe(HISTORY, FIRST, properties=group)
        waits = two.subscribe(HISTORY, FIRST, properties=group)
        one.poll(1)
        assert not active.chunks
        # It goes while its place is unknown; the other one takes over, and waits in its turn.
        one.close()
        two.poll(1)
        assert not waits.chunks and two.closed is None
        unknown()
        history_of(waits)


def amqp091(broker):
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", broker.amqp_port, heartbeat=0))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=COUNT)
    return connection, channel


def events_until(connection, condition, seconds=60):
    """Runs a pika connection until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        connection.process_data_events(time_limit=1)


@pytest.mark.parametrize("spec", ["first", 3, -1, "timestamp"])
def test_an_amqp091_channel_works_while_a_consumer_of_history_waits(broker, unknown, spec):
    connection, channel = amqp091(broker)
    channel.queue_declare("classic")
    channel.confirm_delivery()
    got, beside = [], []

    def on_history(_channel, method, properties, body):
        got.append((properties.headers["x-stream-offset"], body))
        channel.basic_ack(method.delivery_tag)

    channel.basic_consume("classic", lambda _c, _m, _p, body: beside.append(body), auto_ack=True)
    offset = datetime.datetime(1971, 1, 1) if spec == "timestamp" else spec
    channel.basic_consume(HISTORY, on_history, arguments={"x-stream-offset": offset})
    for number in range(20):
        channel.basic_publish("", "classic", b"%d" % number, mandatory=True)
        channel.basic_publish("", LIVE, b"%d" % number, mandatory=True)
    events_until(connection, lambda: len(beside) == 20)
    assert got == []
    unknown()
    first = spec if spec == 3 else 0
    events_until(connection, lambda: len(got) == COUNT - first)
    assert [offset for offset, _ in got] == list(range(first, COUNT))
    records.check_body(got[-1][1], COUNT - 1, SIZE(COUNT - 1))
    connection.close()


def test_an_amqp10_session_works_while_a_consumer_of_history_waits(broker, unknown):
    connection = BlockingConnection(f"amqp://guest:guest@127.0.0.1:{broker.amqp_port}", timeout=60, heartbeat=0)
    waits = connection.create_receiver(f"/queues/{HISTORY}", credit=COUNT, options=[_amqp10_filter(FIRST)])
    tail = connection.create_receiver(f"/queues/{LIVE}", credit=50, options=[_amqp10_filter(NEXT)])
    with broker.client() as client:
        publish(broker, LIVE, 10, SIZE, client=client)
    for _ in range(10):
        tail.receive(timeout=30)
        tail.accept()
    assert not waits.fetcher.has_message
    unknown()
    for number in range(COUNT):
        message = waits.receive(timeout=60)
        waits.accept()
        assert message.annotations["x-stream-offset"] == number
    connection.close()


def test_the_local_member_restarts_under_an_amqp_consumer(broker, unknown):
    """Stock opens its reader again inside the channel, while the place is still unknown."""
    connection, channel = amqp091(broker)
    got = []

    def on_message(_channel, method, properties, _body):
        got.append(properties.headers["x-stream-offset"])
        channel.basic_ack(method.delivery_tag)

    channel.basic_consume(HISTORY, on_message, arguments={"x-stream-offset": "first"})
    connection.process_data_events(time_limit=1)
    member = lambda: broker.rpc(  # noqa: E731
        f'[P || {{P, _, N, _, _}} <- rabbitmq_stream_s3_host_osiris:members(), rabbitmq_stream_s3:stream_id(N) =:= <<"{broker.stream_id(HISTORY)}">>].'
    )
    before = member()
    assert before != "[]"
    broker.streams("restart_stream", HISTORY)
    wait_until(lambda: member() not in ("[]", before), 60, "the member is another one")
    for _ in range(5):
        connection.process_data_events(time_limit=1)
        assert got == [] and channel.is_open
    unknown()
    events_until(connection, lambda: len(got) == COUNT)
    assert got == list(range(COUNT))
    connection.close()


def test_what_waits_leaves_nothing_behind(broker, unknown):
    def processes_and_memory():
        return broker.rpc(
            "{erlang:system_info(process_count), length(ets:tab2list(consumer_created)),"
            " maps:size(maps:filter(fun(K, _) -> is_tuple(K) andalso element(1, K) =:= rabbit_stream_reader"
            " orelse is_tuple(K) andalso is_tuple(element(1, K)) end, osiris_counters:overview()))}."
        )

    def attach_and_go(times):
        for _ in range(times):
            with broker.client() as client:
                for n in range(5):
                    client.subscribe(HISTORY, FIRST, subscription_id=n)

    attach_and_go(4)
    wait_until(lambda: broker.rpc("length(rabbit_stream:list(<<\"/\">>)).") == "0", 30, "connections are gone")
    before = processes_and_memory()
    attach_and_go(60)
    wait_until(lambda: broker.rpc("length(rabbit_stream:list(<<\"/\">>)).") == "0", 30, "connections are gone")
    counted = lambda text: [int(n) for n in text.strip("{}").split(",")]  # noqa: E731
    wait_until(
        lambda: all(now <= was + 5 for now, was in zip(counted(processes_and_memory()), counted(before))),
        30,
        "no process and no counter is left",
    )
    assert broker.counter("remote_readers") == 0


def damaged(broker, s3, stream):
    """A stream whose second object is rotten."""
    with broker.client() as client:
        client.create(stream, stream_max_segment_size_bytes=500_000)
        publish(broker, stream, COUNT, SIZE, batch=5, window=0, client=client)
    broker.flush_tier(stream, COUNT)
    broker.wait_trimmed(stream)
    rotten = s3.keys(f"{broker.stream_id(stream)}/data/")[1]
    body = bytearray(s3.get(rotten))
    body[len(body) // 2] ^= 0xFF
    s3.put(rotten, bytes(body))
    return int(rotten.rsplit("/", 1)[1].split(".")[0])


def test_a_refused_amqp091_consumer_is_cancelled_and_its_channel_lives(broker, s3, stream_name):
    at = damaged(broker, s3, stream_name)
    connection, channel = amqp091(broker)
    got, beside, cancelled = [], [], []
    channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))

    def on_message(_channel, method, properties, _body):
        got.append(properties.headers["x-stream-offset"])
        channel.basic_ack(method.delivery_tag)

    channel.queue_declare("beside", auto_delete=False)
    channel.basic_consume("beside", lambda _c, _m, _p, body: beside.append(body), auto_ack=True)
    tag = channel.basic_consume(stream_name, on_message, arguments={"x-stream-offset": "first"})
    events_until(connection, lambda: cancelled)
    assert cancelled == [tag]
    # It was given everything before the damage, in order, and nothing of it.
    assert got == list(range(len(got))) and at <= len(got) < COUNT
    # The channel publishes and consumes as before, and what is behind the damage can be read on it.
    channel.basic_publish("", "beside", b"still here")
    behind = int(s3.keys(f"{broker.stream_id(stream_name)}/data/")[2].rsplit("/", 1)[1].split(".")[0])
    got.clear()
    channel.basic_consume(stream_name, on_message, arguments={"x-stream-offset": behind})
    events_until(connection, lambda: beside and len(got) == COUNT - behind)
    assert beside == [b"still here"] and got == list(range(behind, COUNT))
    connection.close()


def test_a_refused_amqp10_link_is_detached_and_its_session_lives(broker, s3, stream_name):
    at = damaged(broker, s3, stream_name)
    begins = len(broker.log())
    connection = BlockingConnection(f"amqp://guest:guest@127.0.0.1:{broker.amqp_port}", timeout=60, heartbeat=0)
    link = connection.create_receiver(f"/queues/{stream_name}", credit=0, options=[_amqp10_filter(FIRST)])
    # Credit once, and not with each record: stock closes a session whose client sends a flow for a link that it has just
    # detached and the client has not yet seen detached.
    link.link.flow(COUNT)
    got = 0
    with pytest.raises(LinkDetached) as detached:
        while True:
            connection.wait(lambda: link.fetcher.has_message, timeout=60)
            message = link.fetcher.pop()
            link.accept()
            assert message.annotations["x-stream-offset"] == got
            got += 1
    assert detached.value.condition == "amqp:illegal-state"
    assert at <= got < COUNT
    # The session of that link goes on: another one is attached to it, and is served.
    assert connection.conn.state & Endpoint.REMOTE_ACTIVE
    again = connection.create_receiver(
        f"/queues/{HISTORY}", credit=COUNT, name="again", options=[_amqp10_filter(FIRST)]
    )
    for number in range(COUNT):
        message = again.receive(timeout=60)
        again.accept()
        assert message.annotations["x-stream-offset"] == number
    connection.close()
    assert crash_reports(broker, begins) == []
