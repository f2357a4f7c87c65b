"""The main path on a stock broker, against an S3 server whose every request is logged.

Each test proves by a counter, an object or a log entry that its path ran.
"""

import bisect
import struct
import zlib
import base64

import pytest

from stream_s3_e2e import records
from stream_s3_e2e.amqp10 import decode
from stream_s3_e2e.consume import consume, consume_amqp10, consume_amqp091, consume_chunks, consume_rstream
from stream_s3_e2e.mix import Mix
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, filter_value, verify
from stream_s3_e2e.streamproto import FIRST, at_offset, at_timestamp
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

MIX = Mix(0.05)
SEGMENT = 4_000_000


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    with TieredBroker(run_dir, s3, fragment_size=2_000_000, persist_interval_ms=100) as node:
        yield node


def tier(broker, stream, count):
    """Makes everything durable in S3 and waits until local disk is trimmed."""
    broker.flush_tier(stream, count)
    broker.wait_trimmed(stream)


@pytest.fixture(scope="module")
def mixed(broker):
    """A stream of every kind of record, tiered and trimmed; with the chunks that it has."""
    with broker.client() as client:
        client.create("mixed", stream_max_segment_size_bytes=SEGMENT)
    MIX.publish(broker, "mixed")
    tier(broker, "mixed", MIX.count)
    first_local = broker.segments("mixed")[0][0]
    assert first_local > 0, "nothing was trimmed"
    served = broker.counter("chunks_delivered_total", tier="remote")
    chunks = list(consume_chunks(broker, "mixed", FIRST, lambda chunk: chunk.next_offset >= MIX.count))
    assert broker.counter("chunks_delivered_total", tier="remote") > served
    return chunks


def seen(chunk):
    return chunk.chunk_id, chunk.next_offset, chunk.timestamp


def test_every_byte_from_first_over_the_stream_protocol(mixed):
    checker = records.Checker(0, MIX)
    for chunk in mixed:
        for offset, message in chunk.messages():
            checker.add(offset, decode(message))
    checker.finish(MIX.count)


@pytest.mark.parametrize("consumer", [consume_rstream, consume_amqp091, consume_amqp10])
def test_every_byte_from_first_with_clients_that_are_not_ours(broker, mixed, consumer):
    served = broker.counter("chunks_delivered_total", tier="remote")
    # rstream opens compressed sub-batches, a stock broker leaves them out of AMQP.
    wanted = None if consumer is consume_rstream else MIX.visible_to_amqp
    verify(consumer(broker, "mixed", MIX.count), 0, MIX.count, MIX, wanted=wanted)
    assert broker.counter("chunks_delivered_total", tier="remote") > served


def test_attaching_anywhere_gives_what_an_untiered_stream_gives(broker, s3, mixed):
    ids = [chunk.chunk_id for chunk in mixed]
    first_local = broker.segments("mixed")[0][0]
    edges = {0, MIX.count - 1, first_local}
    for entry in s3.objects(f"rabbitmq/stream/{broker.stream_id('mixed')}/data/"):
        edges.add(int(entry["key"].rsplit("/", 1)[1].split(".")[0]))
    wanted = sorted({o for edge in edges for o in (edge - 1, edge, edge + 1) if 0 <= o < MIX.count})
    assert len(wanted) > 20
    with broker.client() as client:
        for offset in wanted:
            subscription = client.subscribe("mixed", at_offset(offset), credit=1)
            chunk = subscription.next_chunk(30, credit=0)
            assert seen(chunk) == seen(mixed[bisect.bisect_right(ids, offset) - 1]), offset
            subscription.close()


def test_attaching_at_timestamps(broker, mixed):
    times = [chunk.timestamp for chunk in mixed]
    step = max(1, len(times) // 25)
    with broker.client() as client:
        for timestamp in [0, times[0] - 1] + [t + d for t in times[::step] for d in (-1, 0, 1)]:
            if timestamp > times[-1]:
                continue
            subscription = client.subscribe("mixed", at_timestamp(timestamp), credit=1)
            chunk = subscription.next_chunk(30, credit=0)
            assert seen(chunk) == seen(mixed[bisect.bisect_left(times, timestamp)]), timestamp
            subscription.close()


@pytest.mark.parametrize("consumer", [consume_amqp091, consume_amqp10])
@pytest.mark.parametrize("where", ["remote", "seam", "local"])
def test_amqp_from_an_exact_offset(broker, mixed, consumer, where):
    first_local = broker.segments("mixed")[0][0]
    offset = {"remote": first_local // 2, "seam": first_local - 1, "local": first_local + 1}[where]
    found = list(consumer(broker, "mixed", MIX.count, spec=at_offset(offset)))
    verify(found, offset, MIX.count, MIX, wanted=MIX.visible_to_amqp)


def test_fragments_are_contiguous_checked_and_self_described(broker, s3, mixed):
    stream_id = broker.stream_id("mixed")
    first, following = broker.range("mixed")
    objects = s3.objects(f"rabbitmq/stream/{stream_id}/data/")
    expected = first
    for entry in sorted(objects, key=lambda e: int(e["metadata"]["first-offset"])):
        meta = entry["metadata"]
        assert int(meta["first-offset"]) == expected, "hole or overlap between fragments"
        assert meta["stream"] == stream_id and meta["queue"] == "mixed"
        body = s3.get(entry["key"])
        assert body[:8] == b"OSIF\0\0\0\1"
        index = body[len(body) - 20 * int(meta["chunks"]):]
        assert struct.unpack_from(">Q", index)[0] == expected
        assert base64.b64decode(entry["checksum_crc32"]) == zlib.crc32(body).to_bytes(4, "big")
        expected = int(meta["next-offset"])
    assert expected == following
    puts = [p for p in s3.log(operation="PutObject") if stream_id in p["key"] and p["status"] == 200]
    keys = [p["key"] for p in puts]
    assert len(keys) == len(set(keys)), "a key was written twice"


def test_filtered_consumer_across_both_tiers(broker, stream_name):
    with broker.client() as client:
        client.create(stream_name, stream_max_segment_size_bytes=SEGMENT, stream_filter_size_bytes=32)
    publish(broker, stream_name, 10_000, fixed(2_000), filters=filter_value, window=200)
    tier(broker, stream_name, 10_000)
    served = broker.counter("chunks_delivered_total", tier="remote")
    wanted = lambda sequence: filter_value(sequence) == "green"  # noqa: E731
    found = consume(broker, stream_name, 9_500, properties={"filter.0": "green"})
    checked = verify(found, 0, 9_500, fixed(2_000), wanted=wanted)
    assert checked.count < 9_500, "the filter filtered nothing"
    assert broker.counter("chunks_delivered_total", tier="remote") > served


def test_slow_local_consumer_overtaken_by_trimming_misses_nothing(broker, stream_name):
    with broker.client(receive_buffer=65_536) as client:
        client.create(stream_name, stream_max_segment_size_bytes=SEGMENT)
        publish(broker, stream_name, 200, fixed(10_000), batch=10, window=0)
        # One chunk and no more: the reader now stands in the first local segment.
        subscription = client.subscribe(stream_name, FIRST, credit=1)
        chunk = subscription.next_chunk(30, credit=0)
        assert chunk.chunk_id == 0
        publish(broker, stream_name, 2_000, fixed(10_000), first=200, batch=10)
        tier(broker, stream_name, 2_200)
        assert broker.segments(stream_name)[0][0] > 200, "the reader's segments are still there"
        served = broker.counter("chunks_delivered_total", tier="remote")
        checker = records.Checker(0, fixed(10_000))
        while True:
            for offset, message in chunk.messages():
                checker.add(offset, decode(message))
            if chunk.next_offset >= 2_200:
                break
            subscription.credit(1)
            chunk = subscription.next_chunk(30, credit=0)
        assert broker.counter("chunks_delivered_total", tier="remote") > served, "it was all read locally"


def test_ten_subscriptions_one_of_them_hung_in_s3(broker, s3, stream_name):
    streams = [f"{stream_name}-{n}" for n in range(10)]
    for stream in streams:
        with broker.client() as client:
            client.create(stream, stream_max_segment_size_bytes=1_000_000)
        publish(broker, stream, 60, fixed(100_000), batch=5)
        tier(broker, stream, 60)
    hung = streams[4]
    s3.fault(name="hung", operation="GetObject", key=broker.stream_id(hung), hang="gate")
    try:
        with broker.client() as client:
            subscriptions = {s: client.subscribe(s, FIRST, subscription_id=n) for n, s in enumerate(streams)}
            for stream in streams:
                if stream != hung:
                    while subscriptions[stream].next_chunk(30).next_offset < 60:
                        pass
            assert s3.log(rule="hung"), "the fault did not bite"
            assert not subscriptions[hung].chunks, "the hung stream answered"
            s3.release("gate")
            checker = records.Checker(0, fixed(100_000))
            while checker.next_offset < 60:
                for offset, message in subscriptions[hung].next_chunk(30).messages():
                    checker.add(offset, decode(message))
    finally:
        s3.clear_faults()


def test_a_reader_goes_with_its_consumer(broker, s3, stream_name):
    # A stream of its own: nothing of it is in the cache.
    with broker.client() as client:
        client.create(stream_name, stream_max_segment_size_bytes=1_000_000)
    publish(broker, stream_name, 60, fixed(100_000), batch=5)
    tier(broker, stream_name, 60)
    wait_until(lambda: broker.counter("remote_readers") == 0, 10, "no reader left")
    s3.fault(name="stuck", operation="GetObject", key=broker.stream_id(stream_name), hang="stuck")
    try:
        client = broker.client()
        client.subscribe(stream_name, FIRST, credit=5)
        s3.wait_log(1, hanging="stuck")
        assert broker.counter("remote_readers") == 1
        client.socket.close()
        wait_until(lambda: broker.counter("remote_readers") == 0, 10, "the reader is gone")
    finally:
        s3.clear_faults()


def test_corrupt_bytes_are_never_delivered_and_end_the_subscription(broker, s3, mixed, stream_name):
    with broker.client() as client:
        client.create(stream_name, stream_max_segment_size_bytes=SEGMENT)
        publish(broker, stream_name, 200, fixed(50_000), batch=5, window=0)
        tier(broker, stream_name, 200)
        keys = s3.keys(f"{broker.stream_id(stream_name)}/data/")
        rotten = keys[1]
        body = bytearray(s3.get(rotten))
        body[len(body) // 2] ^= 0xFF
        s3.put(rotten, bytes(body))
        bystander = client.subscribe("mixed", FIRST, subscription_id=2, credit=1)
        subscription = client.subscribe(stream_name, FIRST, subscription_id=1, credit=100)
        checker = records.Checker(0, fixed(50_000))

        def ended():
            client.poll(0.1)
            while subscription.chunks:
                chunk = subscription.chunks.popleft()
                chunk.check_crc()
                for offset, message in chunk.messages():
                    checker.add(offset, decode(message))
            return client.metadata_updates

        # As when a member goes: "stream not available", and of this stream alone.
        assert wait_until(ended, 60, "the subscription is ended") == [(6, stream_name)]
        damaged = int(rotten.rsplit("/", 1)[1].split(".")[0])
        assert damaged <= checker.next_offset < 200, "the consumer was not stopped at the damage"
        for _ in range(3):
            assert bystander.next_chunk(30) is not None, "another stream's subscription has ended, too"
        # The connection has forgotten it: its number is free, and what is behind the damage can be read.
        behind = int(keys[2].rsplit("/", 1)[1].split(".")[0])
        assert client.subscribe(stream_name, at_offset(behind), subscription_id=1).next_chunk(30).chunk_id == behind
    assert broker.counter("chunk_crc_mismatches_total") > 0
    # AMQP has a word for it: the consumer is cancelled.
    given = list(consume_amqp091(broker, stream_name, 200))
    assert damaged <= len(given) < 200
    records.verify(given, 0, len(given), fixed(50_000))


def test_consumers_go_on_at_the_floor_of_a_gap(broker, s3, stream_name):
    """While S3 takes nothing the user's retention drops what was never uploaded: nobody has it, and nobody waits for it."""
    with broker.client() as client:
        client.create(stream_name, stream_max_segment_size_bytes=SEGMENT, max_length_bytes=2 * SEGMENT)
        publish(broker, stream_name, 40, fixed(50_000))
        broker.flush_tier(stream_name, 40)
        s3.fault(name="full", operation="PutObject", key=broker.stream_id(stream_name), status=503)
        try:
            publish(broker, stream_name, 600, fixed(50_000), first=40)
            floor = lambda: broker.segments(stream_name)[0][0]  # noqa: E731
            begins = wait_until(lambda: floor() > 40 and floor(), 60, "a gap")
            assert broker.range(stream_name) == (0, 40)
            reads, served = broker.counter("metadata_reads_total"), broker.counter("chunks_delivered_total", tier="remote")
            subscription = client.subscribe(stream_name, FIRST, credit=100)
            follows, jumps = 0, []
            while follows < 640:
                chunk = subscription.next_chunk(30, credit=1)
                assert chunk is not None, f"nothing comes after {follows}"
                if chunk.chunk_id != follows:
                    jumps.append((follows, chunk.chunk_id))
                follows = chunk.next_offset
            subscription.close()
            # The last files may have gone meanwhile.
            assert [start for start, _ in jumps] == [40] and begins <= jumps[0][1] <= floor()
            assert broker.counter("chunks_delivered_total", tier="remote") > served
            assert broker.counter("metadata_reads_total") > reads, "nobody asked whether the gap is one"
            # Certain for this floor: whoever attaches inside is sent to its end without another question.
            for again in (False, True):
                reads = broker.counter("metadata_reads_total")
                inside = client.subscribe(stream_name, at_offset(41), subscription_id=2, credit=1)
                assert inside.next_chunk(30).chunk_id == floor()
                inside.close()
                assert not again or broker.counter("metadata_reads_total") == reads
        finally:
            s3.clear_faults()
