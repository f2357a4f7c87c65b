"""Consumers that reach the broker over TLS read the remote tier like everybody else."""

import socket
import ssl

import pika
import pytest

from stream_s3_e2e import records
from stream_s3_e2e.amqp10 import decode
from stream_s3_e2e.certificates import certificates
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.s3 import S3Test
from stream_s3_e2e.streamproto import FIRST, Client
from stream_s3_e2e.tiered import TieredBroker

COUNT, SIZE = 400, fixed(50_000)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def ports():
    return {"amqp": free_port(), "stream": free_port()}


@pytest.fixture(scope="module")
def authority(run_dir):
    return certificates(run_dir)


@pytest.fixture(scope="module")
def broker(run_dir, ports, authority):
    ca, certificate, key = authority
    for path in authority:
        path.chmod(0o644)
    conf = {
        "ssl_options.cacertfile": ca, "ssl_options.certfile": certificate, "ssl_options.keyfile": key,
        "ssl_options.verify": "verify_none",
        "listeners.ssl.1": f"127.0.0.1:{ports['amqp']}", "stream.listeners.ssl.1": f"127.0.0.1:{ports['stream']}",
    }
    with S3Test() as s3, TieredBroker(run_dir, s3, conf=conf, fragment_size=1_000_000, persist_interval_ms=100) as node:
        with node.client() as client:
            client.create("secure", stream_max_segment_size_bytes=4_000_000)
        publish(node, "secure", COUNT, SIZE)
        node.flush_tier("secure", COUNT)
        node.wait_trimmed("secure")
        yield node


@pytest.fixture
def served(broker):
    before = broker.counter("chunks_delivered_total", tier="remote")
    yield
    assert broker.counter("chunks_delivered_total", tier="remote") > before, "nothing came from S3"


def test_stream_protocol_over_tls(broker, ports, authority, served):
    context = ssl.create_default_context(cafile=authority[0])
    with Client(ports["stream"], tls=context) as client:
        subscription, checker = client.subscribe("secure", FIRST), records.Checker(0, SIZE)
        while checker.next_offset < COUNT:
            chunk = subscription.next_chunk(30)
            chunk.check_crc()
            for offset, message in chunk.messages():
                checker.add(offset, decode(message))


def test_amqp_over_tls(broker, ports, authority, served):
    context = ssl.create_default_context(cafile=authority[0])
    options = pika.SSLOptions(context, "127.0.0.1")
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", ports["amqp"], ssl_options=options))
    channel, checker = connection.channel(), records.Checker(0, SIZE)
    channel.basic_qos(prefetch_count=50)
    for method, properties, body in channel.consume("secure", arguments={"x-stream-offset": "first"}, inactivity_timeout=30):
        assert method is not None, "nothing came in 30 s"
        channel.basic_ack(method.delivery_tag)
        checker.add(properties.headers["x-stream-offset"], body)
        if checker.next_offset == COUNT:
            break
    connection.close()
