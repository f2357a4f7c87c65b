"""A receiver of AMQP 1.0 that drains is told "that was all" when it was: Qpid JMS' receiveNoWait, batch jobs that read until empty.

On a stock broker everything is local, and a drain is answered after all of it. Here it is in S3, which takes its time.
"""

import itertools

import pytest
from proton.utils import BlockingConnection, LinkDetached

from stream_s3_e2e.consume import _amqp10_filter
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.s3 import S3Test
from stream_s3_e2e.streamproto import FIRST, NEXT, at_offset
from stream_s3_e2e.tiered import TieredBroker

STREAM = "drained"
SIZE, COUNT = fixed(20_000), 200
PATIENCE_S = 3
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def s3():
    with S3Test() as server:
        yield server


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    settings = {"fragment_size": 500_000, "persist_interval_ms": 100, "read__drain_timeout": f"{PATIENCE_S}s"}
    with TieredBroker(run_dir, s3, plugins=("rabbitmq_stream_s3", "rabbitmq_prometheus"), **settings) as node:
        with node.client() as client:
            client.create(STREAM, stream_max_segment_size_bytes=500_000)
        publish(node, STREAM, COUNT, SIZE, batch=5, window=0)
        node.flush_tier(STREAM, COUNT)
        node.wait_trimmed(STREAM)
        assert node.segments(STREAM)[0][0] > COUNT // 2
        yield node


@pytest.fixture
def connection(broker):
    opened = BlockingConnection(f"amqp://guest:guest@127.0.0.1:{broker.amqp_port}", timeout=60, heartbeat=0)
    yield opened
    opened.close()


def receiver(connection, spec):
    name = f"link-{next(NUMBERS)}"
    return connection.create_receiver(f"/queues/{STREAM}", credit=0, name=name, options=[_amqp10_filter(spec)])


def drain(connection, link, credit):
    """The offsets that come before the broker says that there is nothing more."""
    link.link.drain(credit)
    connection.wait(lambda: not link.link.draining(), msg="the drain is answered")
    got = []
    while link.fetcher.has_message:
        # Not receive(), which gives a credit of its own.
        got.append(link.fetcher.pop().annotations["x-stream-offset"])
        link.accept()
    return got


@pytest.mark.parametrize("credit", [7, 50, 1000])
def test_a_drain_is_answered_after_everything_that_there_is(broker, s3, connection, credit):
    before = broker.counter("drains_deferred_total")
    s3.fault(name="slow", operation="GetObject", delay_ms=200)
    try:
        link, got = receiver(connection, FIRST), []
        while batch := drain(connection, link, credit):
            # As on stock: all that was asked for, or all that there is.
            assert len(batch) == min(credit, COUNT - len(got)), f"{len(batch)} records after {len(got)}"
            got += batch
        assert got == list(range(COUNT))
        assert s3.log(rule="slow"), "nothing came from S3"
    finally:
        s3.clear_faults()
    assert broker.counter("drains_deferred_total") > before, "S3 was never waited for"
    # What comes later is for later.
    assert drain(connection, link, 10) == []


def test_at_the_end_a_drain_is_answered_at_once(broker, connection):
    before = broker.counter("drains_deferred_total")
    link = receiver(connection, NEXT)
    assert drain(connection, link, 100) == []
    with broker.client() as client:
        client.create("beside")
    assert drain(connection, receiver(connection, at_offset(COUNT)), 5) == []
    assert broker.counter("drains_deferred_total") == before


def test_a_drain_that_s3_does_not_answer_ends_its_link_and_not_its_session(broker, s3):
    s3.fault(name="held", operation="GetObject", key="/data/", hang="held")
    try:
        # Records that no cache has.
        broker.restart()
        connection = BlockingConnection(f"amqp://guest:guest@127.0.0.1:{broker.amqp_port}", timeout=60, heartbeat=0)
        given_up = broker.counter("drains_given_up_total")
        link = receiver(connection, FIRST)
        with pytest.raises(LinkDetached) as detached:
            drain(connection, link, 10)
        assert detached.value.condition == "amqp:illegal-state"
        assert broker.counter("drains_given_up_total") == given_up + 1
        # The session lives: the same link again, and the end of the stream on it.
        assert drain(connection, receiver(connection, NEXT), 10) == []
    finally:
        s3.clear_faults()
    assert drain(connection, receiver(connection, FIRST), COUNT) == list(range(COUNT))
    connection.close()
