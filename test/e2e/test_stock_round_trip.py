"""The harness itself, against a broker without the plugin: what is published comes back over every protocol.

If one of these fails, no other end-to-end result means anything.
"""

import time

import pytest

from stream_s3_e2e import amqp10
from stream_s3_e2e.consume import (
    consume,
    consume_amqp10,
    consume_amqp091,
    consume_chunks,
    consume_rstream,
)
from stream_s3_e2e.publish import (
    declare,
    publish,
    publish_amqp10,
    publish_amqp091,
    publish_batches,
    publish_rstream,
)
from stream_s3_e2e.records import Mismatch, filter_value, fixed, mixed, payload, verify
from stream_s3_e2e.streamproto import LAST, NEXT, ProtocolError, at_offset, at_timestamp


@pytest.fixture(scope="module")
def filled(stock_broker):
    """A stream of 3,000 records of mixed sizes."""
    with stock_broker.client() as client:
        client.create("filled")
    publish(stock_broker, "filled", 3_000, mixed)
    return "filled"


@pytest.mark.parametrize("consumer", [consume, consume_rstream, consume_amqp091, consume_amqp10])
def test_raw_publish_comes_back(stock_broker, filled, consumer):
    verify(consumer(stock_broker, filled, 3_000), 0, 3_000, mixed)


@pytest.mark.parametrize(
    "publisher", [publish_batches, publish_rstream, publish_amqp091, publish_amqp10]
)
def test_other_publishers_come_back(stock_broker, stream_name, publisher):
    declare(stock_broker, stream_name)
    publisher(stock_broker, stream_name, 500, fixed(300))
    verify(consume(stock_broker, stream_name, 500), 0, 500, fixed(300))
    if publisher is not publish_batches:
        # RabbitMQ itself never hands sub-batches to AMQP consumers.
        verify(consume_amqp091(stock_broker, stream_name, 500), 0, 500, fixed(300))


def test_chunks_of_osiris_itself_take_offsets(stock_broker, stream_name):
    """AMQP publishers are tracked: each new segment starts with a chunk that nobody is sent."""
    declare(stock_broker, stream_name, x_stream_max_segment_size_bytes=100_000)
    publish_amqp091(stock_broker, stream_name, 500, fixed(1_000))
    with stock_broker.client() as client:
        last = client.stats(stream_name)["committed_chunk_id"]
    assert last > 500
    for consumer in (consume, consume_amqp091, consume_amqp10):
        checked = verify(consumer(stock_broker, stream_name, last + 1), 0, last + 1, fixed(1_000), tracked=True)
        assert checked.count == 500


def test_rstream_gzip_and_filters(stock_broker, stream_name):
    declare(stock_broker, stream_name)
    publish_rstream(stock_broker, stream_name, 500, fixed(300), gzip=True)
    publish_rstream(stock_broker, stream_name, 2_000, fixed(300), first=500, filtered=True)
    verify(consume(stock_broker, stream_name, 2_500), 0, 2_500, fixed(300))


def test_filtered_subscription(stock_broker, stream_name):
    declare(stock_broker, stream_name)
    publish(stock_broker, stream_name, 3_000, fixed(100), filters=filter_value, window=100)
    wanted = lambda sequence: filter_value(sequence) == "green"  # noqa: E731
    records = consume(stock_broker, stream_name, 2_000, properties={"filter.0": "green"})
    checked = verify(records, 0, 2_000, fixed(100), wanted=wanted)
    assert checked.count < 2_000, "the filter filtered nothing"


@pytest.mark.parametrize("consumer", [consume, consume_amqp091, consume_amqp10])
def test_from_offset(stock_broker, filled, consumer):
    records = list(consumer(stock_broker, filled, 3_000, spec=at_offset(1_234)))
    verify(records, 1_234, 3_000, mixed)


@pytest.mark.parametrize("consumer", [consume, consume_amqp091, consume_amqp10])
def test_last_and_next(stock_broker, stream_name, consumer):
    declare(stock_broker, stream_name)
    publish(stock_broker, stream_name, 200, fixed(64))
    records = list(consumer(stock_broker, stream_name, 200, spec=LAST))
    verify(records, records[0][0], 200, fixed(64))


def test_next_sees_only_new(stock_broker, stream_name):
    declare(stock_broker, stream_name)
    publish(stock_broker, stream_name, 100, fixed(64))
    with stock_broker.client() as client:
        subscription = client.subscribe(stream_name, NEXT)
        publish(stock_broker, stream_name, 10, fixed(64), first=100)
        chunk = subscription.next_chunk()
        assert chunk.chunk_id == 100


@pytest.mark.parametrize("consumer", [consume, consume_amqp091, consume_amqp10])
def test_from_timestamp(stock_broker, stream_name, consumer):
    declare(stock_broker, stream_name)
    publish(stock_broker, stream_name, 100, fixed(64))
    # AMQP carries whole seconds: the second part starts in a later one, by the broker's own clock.
    with stock_broker.client() as client:
        first = next(consume_chunks(stock_broker, stream_name, client=client))
    while time.time() < first.timestamp // 1000 + 2:
        time.sleep(0.05)
    middle = int(time.time()) * 1000
    publish(stock_broker, stream_name, 100, fixed(64), first=100)
    verify(consumer(stock_broker, stream_name, 200, spec=at_timestamp(middle)), 100, 200, fixed(64))


def test_ten_subscriptions_on_one_connection(stock_broker, filled):
    with stock_broker.client() as client:
        starts = [number * 300 for number in range(10)]
        readers = [client.subscribe(filled, at_offset(start), number) for number, start in enumerate(starts)]
        for start, reader in zip(starts, readers):
            records = []
            while not records or records[-1][0] < 2_999:
                chunk = reader.next_chunk()
                records += [(o, amqp10.decode(m)) for o, m in chunk.messages() if o >= start]
            verify(records, start, 3_000, mixed)


def test_credit_is_respected(stock_broker, filled):
    with stock_broker.client() as client:
        reader = client.subscribe(filled, credit=1)
        assert reader.next_chunk(credit=0) is not None
        assert reader.next_chunk(seconds=0.5, credit=0) is None
        reader.credit()
        assert reader.next_chunk(credit=0) is not None


def test_stats_resolve_and_offset_tracking(stock_broker, filled):
    with stock_broker.client() as client:
        assert client.stats(filled)["first_chunk_id"] == 0
        kind, start = client.resolve(filled, at_offset(17))
        assert kind == 4 and start <= 17
        assert client.query_offset(filled, "app") is None
        client.store_offset(filled, "app", 42)
        assert client.query_offset(filled, "app") == 42
        with pytest.raises(ProtocolError):
            client.subscribe("no-such-stream")


def test_killed_broker_keeps_confirmed_records(run_dir, stock_broker, stream_name):
    declare(stock_broker, stream_name)
    publish(stock_broker, stream_name, 1_000, fixed(500))
    stock_broker.kill()
    assert not stock_broker.running
    stock_broker.start()
    stock_broker.wait_leader(stream_name)
    verify(consume(stock_broker, stream_name, 1_000), 0, 1_000, fixed(500))
    assert stock_broker.local_bytes(stream_name) > 500_000
    assert stock_broker.metrics().sum("rabbitmq_build_info") == 1


def test_checker_sees_every_kind_of_damage():
    good = [(number, payload(number, 100)) for number in range(10)]
    verify(good, 0, 10, fixed(100))
    flipped = bytearray(good[4][1])
    flipped[-1] ^= 1
    for bad in (
        good[:-1],
        good[1:],
        good[:5] + good[6:],
        good[:5] + good[4:],
        good[:4] + [(5, good[5][1]), (4, good[4][1])] + good[6:],
        good[:4] + [(4, bytes(flipped))] + good[5:],
        good[:4] + [(4, payload(5, 100))] + good[5:],
    ):
        with pytest.raises(Mismatch):
            verify(bad, 0, 10, fixed(100))
