"""`stream_s3.read.memory` is a bound: consumers that rest hold next to nothing, and those that ask are served.

Four hundred consumers at different places of one history of large chunks each take two chunks and then nothing.
"""

import pytest

from stream_s3_e2e import records
from stream_s3_e2e.amqp10 import decode
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.s3 import S3Test
from stream_s3_e2e.streamproto import FIRST, at_offset
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

STREAM = "large"
SIZE, PER_CHUNK, CHUNKS = fixed(50_000), 20, 120
COUNT = PER_CHUNK * CHUNKS
CONSUMERS, PER_CONNECTION = 400, 100
MEMORY = 64 << 20
# A place, open groups and a short queue for each.
PER_READER = 128 << 10


@pytest.fixture(scope="module")
def broker(run_dir):
    settings = {
        "fragment_size": "16MB",
        "persist_interval_ms": 100,
        "read__memory": "64MB",
        "read__ahead": "32MB",
        "read__request_size": "1MB",
    }
    with S3Test() as s3:
        with TieredBroker(run_dir, s3, plugins=("rabbitmq_stream_s3", "rabbitmq_prometheus"), **settings) as node:
            with node.client() as client:
                client.create(STREAM, stream_max_segment_size_bytes=16_000_000)
            publish(node, STREAM, COUNT, SIZE, batch=PER_CHUNK, window=0)
            node.flush_tier(STREAM, COUNT)
            node.wait_trimmed(STREAM)
            yield node


@pytest.mark.timeout(400)
def test_resting_consumers_hold_next_to_nothing_and_go_on_when_they_ask(broker):
    idle = broker.counter("native_memory_bytes")
    clients = [broker.client() for _ in range(CONSUMERS // PER_CONNECTION)]
    resting = []
    try:
        for number in range(CONSUMERS):
            client = clients[number // PER_CONNECTION]
            place = (number * PER_CHUNK) % (COUNT - 40 * PER_CHUNK)
            subscription = client.subscribe(
                STREAM, at_offset(place), subscription_id=number % PER_CONNECTION, credit=2
            )
            resting.append(subscription)
        for subscription in resting:
            for _ in range(2):
                assert subscription.next_chunk(120, credit=0) is not None, "a consumer starves"
        assert broker.counter("remote_readers") == CONSUMERS
        bound = idle + MEMORY + CONSUMERS * PER_READER
        wait_until(
            lambda: broker.counter("native_memory_bytes") <= bound,
            60,
            f"{CONSUMERS} resting consumers stay below {bound} bytes",
        )
        # One that reads is served as if the others were not there, and the bound holds while it does.
        with broker.client() as client:
            reader, checker = client.subscribe(STREAM, FIRST, credit=4), records.Checker(0, SIZE)
            end = COUNT - 40 * PER_CHUNK
            while checker.next_offset < end:
                chunk = reader.next_chunk(60)
                assert chunk is not None, f"nothing comes after {checker.next_offset}"
                for offset, message in chunk.messages():
                    checker.add(offset, decode(message))
        assert broker.counter("native_memory_bytes") <= bound
        # And whoever rested continues where it was.
        for subscription in resting[:: CONSUMERS // 20]:
            subscription.credit(1)
            assert subscription.next_chunk(60, credit=0) is not None, "a rested consumer does not continue"
    finally:
        for client in clients:
            client.socket.close()
    wait_until(lambda: broker.counter("remote_readers") == 0, 60, "all readers are gone")
