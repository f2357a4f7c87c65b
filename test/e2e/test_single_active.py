"""Groups of consumers and the places that they store, with a client library: a super stream whose records are in S3.

The active consumer goes away in the middle of history; the next one goes on where it has stored that it was.
"""

import asyncio

import pytest
import rstream
from rstream import ConsumerOffsetSpecification, OffsetType
from rstream.schema import OffsetSpecification

from stream_s3_e2e import records
from stream_s3_e2e.amqp10 import decode
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.s3 import S3Test
from stream_s3_e2e.streamproto import at_offset
from stream_s3_e2e.tiered import TieredBroker

SUPER, PARTITIONS, GROUP = "invoices", 3, "accounting"
SEGMENT, SIZE, COUNT = 1_000_000, fixed(5_000), 800


@pytest.fixture(scope="module")
def broker(run_dir):
    with S3Test() as s3, TieredBroker(run_dir, s3, fragment_size=500_000, persist_interval_ms=100) as node:
        yield node


def fill(broker, stream, count, first=0):
    """Publishes, and has all of it in S3 and the beginning no longer here."""
    publish(broker, stream, count, SIZE, first=first, batch=20, window=0)
    with broker.client() as client:
        # Stored offsets take offsets themselves.
        end = client.stats(stream)["committed_chunk_id"] + 1
    broker.flush_tier(stream, end)
    broker.wait_trimmed(stream)
    assert broker.segments(stream)[0][0] > count // 2


class Member:
    """One consumer of the group: keeps what it is given, and stores its place after every record."""

    def __init__(self, broker, stop_after=None):
        self.consumer = rstream.SuperStreamConsumer(
            "127.0.0.1", port=broker.stream_port, username="guest", password="guest", super_stream=SUPER
        )
        self.stop_after = stop_after
        self.seen = {}
        self.stopped = asyncio.Event()

    async def start(self, done):
        """Joins the group; `done` is called after every record."""

        async def on_message(message, context):
            if self.stopped.is_set():
                return
            seen = self.seen.setdefault(context.stream, [])
            seen.append((context.offset, decode(message)))
            await context.consumer.store_offset(context.stream, GROUP, context.offset)
            if self.stop_after is not None and sum(map(len, self.seen.values())) >= self.stop_after:
                self.stopped.set()
            done()

        async def on_update(active, context):
            if not active:
                return OffsetSpecification(OffsetType.NEXT, 0)
            try:
                stored = await context.consumer.query_offset(context.stream, GROUP)
            except rstream.exceptions.OffsetNotFound:
                return OffsetSpecification(OffsetType.FIRST, 0)
            return OffsetSpecification(OffsetType.OFFSET, stored + 1)

        await self.consumer.start()
        await self.consumer.subscribe(
            on_message,
            offset_specification=ConsumerOffsetSpecification(OffsetType.FIRST, None),
            subscriber_name=GROUP,
            initial_credit=2,
            properties={"single-active-consumer": "true", "name": GROUP, "super-stream": SUPER},
            consumer_update_listener=on_update,
        )


def test_a_group_goes_on_in_history_when_its_active_consumer_goes(broker):
    broker.streams("add_super_stream", SUPER, "--partitions", str(PARTITIONS),
                   "--stream-max-segment-size-bytes", str(SEGMENT))
    partitions = [f"{SUPER}-{n}" for n in range(PARTITIONS)]
    for partition in partitions:
        fill(broker, partition, COUNT)
    served = broker.counter("chunks_delivered_total", tier="remote")

    async def main():
        everything = asyncio.Event()
        first, second = Member(broker, stop_after=PARTITIONS * COUNT // 4), Member(broker)

        def done():
            ends = [max((o for m in (first, second) for o, _ in m.seen.get(p, [])), default=-1) for p in partitions]
            if min(ends) >= COUNT - 1:
                everything.set()

        await first.start(done)
        await second.start(done)
        await asyncio.wait_for(first.stopped.wait(), 120)
        await first.consumer.close()
        await asyncio.wait_for(everything.wait(), 120)
        await second.consumer.close()
        return first, second

    first, second = asyncio.run(main())
    moved = 0
    for partition in partitions:
        earlier, later = first.seen.get(partition, []), second.seen.get(partition, [])
        # A group spreads over the partitions: the second may have had some for itself from the beginning.
        moved += bool(earlier and later)
        joined = earlier + [record for record in later if not earlier or record[0] > earlier[-1][0]]
        checker = records.Checker(0, SIZE, tracked=True)
        for offset, body in joined:
            checker.add(offset, body)
        assert checker.count == COUNT, partition
        if earlier and later:
            assert later[0][0] == earlier[-1][0] + 1 < broker.segments(partition)[0][0], "not where it was stored"
    assert moved, "no partition went from one to the other"
    assert broker.counter("chunks_delivered_total", tier="remote") > served


def test_a_stored_place_below_the_local_log_outlives_trimming_and_a_restart(broker, stream_name):
    with broker.client() as client:
        client.create(stream_name, stream_max_segment_size_bytes=SEGMENT)
        publish(broker, stream_name, 100, SIZE, batch=20, window=0)
        client.store_offset(stream_name, "app", 42)
        assert client.query_offset(stream_name, "app") == 42
    # Osiris writes the places into the log again with every segment, and leaves out what it takes for gone.
    fill(broker, stream_name, COUNT, first=100)
    assert broker.segments(stream_name)[0][0] > 42
    broker.restart()
    broker.wait_leader(stream_name)
    with broker.client() as client:
        assert client.query_offset(stream_name, "app") == 42
        served = broker.counter("chunks_delivered_total", tier="remote")
        subscription = client.subscribe(stream_name, at_offset(43))
        checker = records.Checker(43, SIZE, tracked=True)
        while checker.count < COUNT + 100 - 43:
            for offset, message in subscription.next_chunk(30).messages():
                if offset >= 43:
                    checker.add(offset, decode(message))
    assert broker.counter("chunks_delivered_total", tier="remote") > served
