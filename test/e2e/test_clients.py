"""Consumers with libraries of other people read history while it leaves the local disk.

Two languages, two libraries for each of the protocols, plain and TLS, all at once; every record once, in order, byte for byte.
"""

import concurrent.futures
import socket
import threading

import pytest

from stream_s3_e2e.certificates import certificates
from stream_s3_e2e.consume import Doors, consume_amqp10, consume_amqp091, consume_rstream
from stream_s3_e2e.foreign import consume_foreign_amqp10, consume_foreign_amqp091, consume_foreign_stream, program
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.s3 import S3Test
from stream_s3_e2e.streamproto import at_offset
from stream_s3_e2e.tiered import TieredBroker

CLIENTS = [
    consume_rstream, consume_amqp091, consume_amqp10,
    consume_foreign_stream, consume_foreign_amqp091, consume_foreign_amqp10,
]
SIZE, HALF = fixed(10_000), 1_000


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def doors(run_dir):
    ca, certificate, key = certificates(run_dir)
    for path in (ca, certificate, key):
        path.chmod(0o644)
    return ca, certificate, key, free_port(), free_port()


@pytest.fixture(scope="module")
def broker(run_dir, doors):
    ca, certificate, key, stream_port, amqp_port = doors
    # Built before the clock of a test runs.
    program()
    conf = {
        "ssl_options.cacertfile": ca, "ssl_options.certfile": certificate, "ssl_options.keyfile": key,
        "ssl_options.verify": "verify_none",
        "listeners.ssl.1": f"127.0.0.1:{amqp_port}", "stream.listeners.ssl.1": f"127.0.0.1:{stream_port}",
        "stream.advertised_host": "127.0.0.1", "stream.advertised_tls_host": "127.0.0.1",
    }
    with S3Test() as s3, TieredBroker(run_dir, s3, conf=conf, fragment_size=1_000_000, persist_interval_ms=100) as node:
        yield node


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_clients_of_both_languages_read_history_while_it_is_trimmed(broker, doors, kind):
    ca, _, _, stream_port, amqp_port = doors
    where = broker if kind == "plain" else Doors(stream_port, amqp_port, ca)
    stream = f"foreign-{kind}"
    with broker.client() as client:
        client.create(stream, stream_max_segment_size_bytes=2_000_000)
    publish(broker, stream, HALF, SIZE)
    broker.flush_tier(stream, HALF)
    broker.wait_trimmed(stream)
    floor, served = broker.segments(stream)[0][0], broker.counter("chunks_delivered_total", tier="remote")
    assert floor > 0
    started = threading.Barrier(len(CLIENTS) + 1)

    def read(consumer):
        started.wait(60)
        # `first` is for AMQP; both languages ask for an offset, too.
        return verify(consumer(where, stream, 2 * HALF), 0, 2 * HALF, SIZE)

    with concurrent.futures.ThreadPoolExecutor(len(CLIENTS)) as pool:
        readers = {consumer.__name__: pool.submit(read, consumer) for consumer in CLIENTS}
        started.wait(60)
        publish(broker, stream, HALF, SIZE, first=HALF, batch=20, window=100)
        broker.flush_tier(stream, 2 * HALF)
        for name, reader in readers.items():
            assert reader.result(300).count == 2 * HALF, name
    broker.wait_trimmed(stream)
    assert broker.segments(stream)[0][0] > floor, "nothing was trimmed meanwhile"
    assert broker.counter("chunks_delivered_total", tier="remote") > served + len(CLIENTS)


@pytest.mark.parametrize("consumer", [consume_foreign_stream, consume_foreign_amqp091, consume_foreign_amqp10])
def test_another_language_begins_at_the_very_record(broker, consumer):
    floor = broker.segments("foreign-plain")[0][0]
    for offset in (1, floor - 1, floor, floor + 1):
        until = min(offset + 150, 2 * HALF)
        verify(consumer(broker, "foreign-plain", until, spec=at_offset(offset)), offset, until, SIZE)
