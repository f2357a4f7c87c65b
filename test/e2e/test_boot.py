"""While a node starts: whoever gets a place, gets the right one.

The listeners and the members of streams are there before the plugin has an engine. A consumer that comes then waits;
it must never be given the start of what is left of the local log. A node that does not take connections yet, or has
no member of the stream yet, refuses: that is stock's.
"""

import random
import threading

import pika
import pytest

from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.streamproto import FIRST, ProtocolError
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

STREAMS = [f"boot-{number}" for number in range(60)]
CLIENTS = 8
RECORDS = 24
RECORD_BYTES = 20_000
SEGMENT = 100_000
# Each client has to have been served by the node that is up, on every stream.
ROUNDS_AFTER_START = 1


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    settings = {"fragment_size": 100_000, "fragment_max_age": "1s", "persist_interval_ms": 100}
    with TieredBroker(run_dir, s3, **settings) as node:
        yield node


def tier_all(broker):
    with broker.client() as client:
        for stream in STREAMS:
            client.create(stream, stream_max_segment_size_bytes=SEGMENT)
            publish(broker, stream, RECORDS, fixed(RECORD_BYTES), batch=4, window=0, client=client)
    for stream in STREAMS:
        wait_until(lambda: broker.segments(stream)[0][0] > 0, 60, f"{stream}: its start is only in S3")


def first_over_amqp(broker, stream):
    """The offset of the first record that comes, over AMQP 0-9-1: its port opens before plugins start."""
    parameters = pika.ConnectionParameters("127.0.0.1", broker.amqp_port, heartbeat=0, socket_timeout=10)
    connection = pika.BlockingConnection(parameters)
    try:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1)
        for method, properties, _ in channel.consume(
            stream, arguments={"x-stream-offset": "first"}, inactivity_timeout=30
        ):
            if method is None:
                raise AssertionError(f"{stream}: no record in 30 s")
            return properties.headers["x-stream-offset"]
    finally:
        try:
            connection.close()
        except pika.exceptions.AMQPError:
            pass


class AmqpHammer(threading.Thread):
    """Asks one stream after the other for its first record, until the node has started."""

    def __init__(self, broker, started, seed):
        super().__init__(daemon=True)
        self.broker, self.started, self.random = broker, started, random.Random(seed)
        self.first_chunks, self.refused, self.error = [], 0, None

    def run(self):
        try:
            while not (self.started.is_set() and self.first_chunks):
                stream = self.random.choice(STREAMS)
                try:
                    self.first_chunks.append((stream, first_over_amqp(self.broker, stream)))
                except (pika.exceptions.AMQPError, OSError):
                    self.refused += 1
        except Exception as error:  # noqa: BLE001
            self.error = error


class Hammer(threading.Thread):
    """One client after the other, each asks every stream for its first chunk."""

    def __init__(self, broker, started, seed):
        super().__init__(daemon=True)
        self.broker, self.started, self.random = broker, started, random.Random(seed)
        self.first_chunks, self.refused, self.error = [], 0, None

    def run(self):
        try:
            rounds = 0
            while rounds < ROUNDS_AFTER_START:
                was_started = self.started.is_set()
                if self.round() and was_started:
                    rounds += 1
        except Exception as error:  # noqa: BLE001
            self.error = error

    def round(self):
        """Says whether every stream answered."""
        complete = True
        try:
            with self.broker.client() as client:
                for stream in self.random.sample(STREAMS, len(STREAMS)):
                    try:
                        subscription = client.subscribe(stream, FIRST, credit=1)
                    except ProtocolError:
                        self.refused += 1
                        complete = False
                        continue
                    chunk = subscription.next_chunk(30, credit=0)
                    if chunk is None:
                        raise AssertionError(f"{stream}: no chunk in 30 s")
                    self.first_chunks.append((stream, chunk.chunk_id))
                    subscription.close()
        except OSError:
            self.refused += 1
            return False
        return complete


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_nobody_starts_at_the_local_floor_while_a_node_starts(broker, how):
    if how == "stop":
        tier_all(broker)
    getattr(broker, how)()
    started = threading.Event()
    hammers = [Hammer(broker, started, seed) for seed in range(CLIENTS)]
    hammers += [AmqpHammer(broker, started, seed) for seed in range(CLIENTS)]
    for hammer in hammers:
        hammer.start()
    broker.start()
    started.set()
    for hammer in hammers:
        hammer.join(240)
        assert not hammer.is_alive(), "a client waits for ever"
    assert [hammer.error for hammer in hammers if hammer.error] == []
    wrong = [found for hammer in hammers for found in hammer.first_chunks if found[1] != 0]
    assert wrong == []
    assert sum(hammer.refused for hammer in hammers) > 0, "nobody was there before the node"
    assert sum(len(hammer.first_chunks) for hammer in hammers) >= CLIENTS * len(STREAMS)
