"""S3 that does not answer costs only who waits for it: everything else on the same connection goes on.

The order of events is what is looked at, not the clock: all of it happens while the answer is being held back.
"""

import pika
import pytest
from proton.utils import BlockingConnection

from stream_s3_e2e import records
from stream_s3_e2e.amqp10 import decode
from stream_s3_e2e.consume import _amqp10_filter
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.streamproto import FIRST, LAST, NO_OFFSET, ProtocolError, at_offset
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

SIZE, COUNT = fixed(50_000), 60
HUNG, QUICK = "hung", "quick"


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    with TieredBroker(
        run_dir, s3, fragment_size=1_000_000, persist_interval_ms=100, read__resolve_timeout=2000
    ) as node:
        for stream in (HUNG, QUICK):
            with node.client() as client:
                client.create(stream, stream_max_segment_size_bytes=500_000)
            publish(node, stream, COUNT, SIZE, batch=5)
            node.flush_tier(stream, COUNT)
            node.wait_trimmed(stream)
            assert node.segments(stream)[0][0] > 0
        yield node


@pytest.fixture
def held(broker, s3):
    """Holds every answer back that has to do with the hung stream; after the test none has been given."""
    wait_until(lambda: broker.counter("remote_readers") == 0, 10, "no reader left")
    s3.fault(name="held", operation="GetObject", key=broker.stream_id(HUNG), hang="held")
    before = s3.last_id()
    yield lambda: s3.wait_log(1, hanging="held")
    # Asked, and not answered until now: all that the test did was done before.
    asked = s3.log(rule="held", after=before)
    assert asked and not any(entry.get("status") == 200 for entry in asked), asked
    s3.clear_faults()


def all_of(subscription):
    """Every record of a quick stream."""
    checker = records.Checker(0, SIZE)
    while checker.next_offset < COUNT:
        for offset, message in subscription.next_chunk(30).messages():
            checker.add(offset, decode(message))


def no_reader(broker):
    """Its reader goes although its answer does not come."""
    wait_until(lambda: broker.counter("remote_readers") == 0, 10, "the reader is gone")


def test_a_subscription_that_waits_is_ended_and_its_connection_goes_on(broker, held):
    with broker.client() as client:
        waits = client.subscribe(HUNG, FIRST, subscription_id=1)
        held()
        # Subscribing, reading, publishing, asking: nothing of it stands behind the held answer.
        all_of(client.subscribe(QUICK, FIRST, subscription_id=2))
        client.create("other")
        publish(broker, "other", 5, SIZE, client=client)
        assert client.subscribe(HUNG, LAST, subscription_id=3).next_chunk(30).next_offset == COUNT
        assert client.stats(HUNG)["committed_chunk_id"] > 0
        waits.close()
        assert not waits.chunks
        client.subscriptions[2].close()
        no_reader(broker)
        all_of(client.subscribe(QUICK, FIRST, subscription_id=2))


def test_ten_subscriptions_that_wait_hold_nobody_up(broker, held):
    with broker.client() as client:
        waiting = [client.subscribe(HUNG, FIRST, subscription_id=n) for n in range(9)]
        held()
        all_of(client.subscribe(QUICK, FIRST, subscription_id=9))
        assert not any(subscription.chunks for subscription in waiting)
        for subscription in waiting:
            subscription.close()


def test_a_connection_that_waits_is_closed(broker, held):
    client = broker.client()
    client.subscribe(HUNG, FIRST)
    held()
    # Waits for the broker's answer.
    client.close()
    assert client.closed is None
    no_reader(broker)


def test_a_client_that_waits_just_goes(broker, held):
    client = broker.client()
    client.subscribe(HUNG, FIRST)
    held()
    client.socket.close()
    no_reader(broker)


def test_amqp091_channels_go_on_and_are_closed(broker, held):
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", broker.amqp_port, heartbeat=0))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=COUNT)
    got = {HUNG: [], QUICK: []}

    def consume(stream):
        def on_message(_channel, method, _properties, body):
            got[stream].append(body)
            channel.basic_ack(method.delivery_tag)

        return channel.basic_consume(stream, on_message, arguments={"x-stream-offset": "first"})

    tag = consume(HUNG)
    held()
    consume(QUICK)
    while len(got[QUICK]) < COUNT:
        connection.process_data_events(time_limit=30)
    assert not got[HUNG]
    channel.basic_cancel(tag)
    no_reader(broker)
    consume(HUNG)
    wait_until(lambda: broker.counter("remote_readers") == 1, 10, "another reader")
    channel.close()
    no_reader(broker)
    connection.close()


def test_amqp10_links_go_on_and_are_closed(broker, held):
    connection = BlockingConnection(f"amqp://guest:guest@127.0.0.1:{broker.amqp_port}", timeout=60, heartbeat=0)
    filters = [_amqp10_filter(FIRST)]
    waits = connection.create_receiver(f"/queues/{HUNG}", credit=COUNT, options=filters)
    held()
    quick = connection.create_receiver(f"/queues/{QUICK}", credit=COUNT, options=filters)
    for _ in range(COUNT):
        quick.receive(timeout=30)
        quick.accept()
    waits.close()
    quick.close()
    no_reader(broker)
    connection.create_receiver(f"/queues/{HUNG}", credit=COUNT, options=filters)
    wait_until(lambda: broker.counter("remote_readers") == 1, 10, "another reader")
    connection.close()
    no_reader(broker)


# The last one: the look-up goes on in the background, and what it fetches is in the cache.
def test_resolving_is_refused_at_once_and_the_connection_goes_on(broker, held):
    with broker.client() as client:
        for spec in (FIRST, at_offset(7)):
            with pytest.raises(ProtocolError) as refused:
                client.resolve(HUNG, spec)
            assert refused.value.code == NO_OFFSET
        all_of(client.subscribe(QUICK, FIRST, subscription_id=1))
        assert client.resolve(HUNG, LAST)[1] > 0
