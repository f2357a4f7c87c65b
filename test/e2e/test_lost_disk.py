"""A disk that was lost or replaced: the local log of a stream is empty. What is durable stays readable, before and after new
records, and the log goes on where it ends. On several nodes: test_lost_disk_cluster."""

import shutil

import pytest

from stream_s3_e2e.consume import consume
from stream_s3_e2e.lost_disk import BEGUN, DURABLE, MORE, SIZE, check_bucket, read_all
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import verify
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    broker = TieredBroker(run_dir, s3, fragment_size=1_000_000, persist_interval_ms=100).start()
    yield broker
    broker.kill()
    broker.wipe()


def fill(broker, stream):
    """A stream whose every record is durable."""
    with broker.client() as client:
        client.create(stream, stream_max_segment_size_bytes=4_000_000)
    publish(broker, stream, DURABLE, SIZE)
    broker.flush_tier(stream, DURABLE)


def lose_directory(directory):
    """An empty disk in place of the one that was there."""
    shutil.rmtree(directory)


def lose_segments(directory):
    """A directory in which the log has been created and nothing else: what a start without the plugin leaves behind."""
    for path in directory.iterdir():
        path.unlink()
    (directory / f"{0:020}.segment").write_bytes(b"OSIL" + bytes([0, 0, 0, 1]))
    (directory / f"{0:020}.index").write_bytes(b"OSII" + bytes([0, 0, 0, 1]))


@pytest.mark.parametrize("lose", [lose_directory, lose_segments])
def test_one_member(broker, s3, stream_name, lose):
    """Read before and after new records, and once more after another restart."""
    fill(broker, stream_name)
    fragments = set(s3.keys(".fragment"))
    directory = broker.stream_dir(stream_name)
    broker.stop()
    lose(directory)
    broker.start()
    broker.wait_leader(stream_name)
    wait_until(lambda: [first for first, _ in broker.segments(stream_name)] == [DURABLE], 60, "the log begins at the end")
    broker.wait_persisted(stream_name, DURABLE)
    read_all(broker, stream_name, DURABLE)
    with broker.client() as client:
        assert client.stats(stream_name)["first_chunk_id"] == 0
    publish(broker, stream_name, MORE, SIZE, first=DURABLE)
    read_all(broker, stream_name, BEGUN + MORE)
    broker.flush_tier(stream_name, BEGUN + MORE)
    assert check_bucket(broker, s3, stream_name, fragments) == BEGUN + MORE
    assert broker.counter("recoveries_total", kind="remote_tier_ahead") == 0
    assert broker.counter("recoveries_total", kind="local_log_ahead") == 0
    broker.restart()
    broker.wait_leader(stream_name)
    broker.wait_persisted(stream_name, BEGUN + MORE)
    read_all(broker, stream_name, BEGUN + MORE)
    publish(broker, stream_name, 10, SIZE, first=DURABLE + MORE)
    verify(consume(broker, stream_name, BEGUN + MORE + 10), 0, BEGUN + MORE + 10, SIZE, tracked=True)


def test_s3_is_down_when_the_disk_is_replaced(broker, s3, stream_name):
    """Publishers do not need S3 for it; who reads the past waits until it is back."""
    fill(broker, stream_name)
    directory = broker.stream_dir(stream_name)
    broker.stop()
    lose_directory(directory)
    s3.fault(name="down", status=503)
    broker.start()
    broker.wait_leader(stream_name)
    publish(broker, stream_name, MORE, SIZE, first=DURABLE)
    assert broker.segments(stream_name)[0][0] == DURABLE
    s3.clear_faults()
    broker.wait_persisted(stream_name, DURABLE)
    read_all(broker, stream_name, BEGUN + MORE)


def test_an_empty_log_without_the_plugin(broker, s3, stream_name):
    """Nothing has been written to it yet: restarting the stream is all that it takes."""
    fill(broker, stream_name)
    broker.plugins("disable", "rabbitmq_stream_s3")
    directory = broker.stream_dir(stream_name)
    broker.stop()
    lose_directory(directory)
    broker.start()
    broker.wait_leader(stream_name)
    broker.plugins("enable", "rabbitmq_stream_s3")
    stalled = lambda: "lost_log" in str(broker.stream_status(stream_name))  # noqa: E731
    wait_until(stalled, 60, "the status says lost_log")
    begun = broker.counter("logs_begun_at_durable_end_total")
    broker.streams("restart_stream", stream_name)
    wait_until(lambda: not stalled(), 60, "it is over")
    assert broker.counter("logs_begun_at_durable_end_total") == begun + 1
    broker.wait_leader(stream_name)
    broker.wait_persisted(stream_name, DURABLE)
    read_all(broker, stream_name, DURABLE)


def test_a_log_that_began_anew_without_the_plugin(broker, s3, stream_name):
    """Nobody said where it should begin: what is durable is kept, and it is said what is wrong."""
    fill(broker, stream_name)
    fragments = set(s3.keys(".fragment"))
    before = broker.manifest(s3, stream_name)
    broker.plugins("disable", "rabbitmq_stream_s3")
    directory = broker.stream_dir(stream_name)
    broker.stop()
    lose_directory(directory)
    broker.start()
    broker.wait_leader(stream_name)
    publish(broker, stream_name, 50, SIZE)
    broker.plugins("enable", "rabbitmq_stream_s3")
    stalled = lambda: "lost_log" in str(broker.stream_status(stream_name))  # noqa: E731
    wait_until(stalled, 60, "the status says lost_log")
    broker.cut(stream_name)
    publish(broker, stream_name, 50, SIZE, first=50)
    after = broker.manifest(s3, stream_name)
    assert (after.first, after.next, after.revision) == (0, DURABLE, before.revision)
    assert fragments <= set(s3.keys(".fragment"))
    assert broker.counter("recoveries_total", kind="remote_tier_ahead") == 0
    # The records of now are there for their readers.
    verify(consume(broker, stream_name, 100), 0, 100, SIZE)
    # The way out that docs/OPERATIONS.md names: without the new log, the old one goes on.
    broker.stop()
    lose_directory(directory)
    broker.start()
    broker.wait_leader(stream_name)
    broker.wait_persisted(stream_name, DURABLE)
    read_all(broker, stream_name, DURABLE)
