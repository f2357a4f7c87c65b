"""A local log that lost its end (a power cut: osiris does not sync): what only S3 has below it stays and is served,
what the log still has is uploaded again, nothing in the bucket is destroyed."""

import os

import pytest

from stream_s3_e2e.consume import consume, consume_amqp091, consume_chunks
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.s3 import S3Test
from stream_s3_e2e.streamproto import at_offset
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

SIZE = fixed(50_000)


@pytest.fixture(scope="module")
def s3():
    with S3Test() as server:
        yield server


@pytest.mark.parametrize("threshold", [1024, 2])
def test_lost_tail(run_dir, s3, threshold):
    """Also with a manifest of groups, which have to be opened for it."""
    broker = TieredBroker(
        run_dir, s3, fragment_size=1_000_000, persist_interval_ms=100, rebalance_threshold=threshold
    ).start()
    with broker.client() as client:
        client.create("tail", stream_max_segment_size_bytes=4_000_000)
    # Small chunks, so that half of a segment has some, also if only the last segment is left.
    publish(broker, "tail", 300, SIZE, batch=5, window=0)
    broker.flush_tier("tail", 300)
    broker.wait_trimmed("tail")
    first_local = broker.segments("tail")[0][0]
    assert first_local > 0, "nothing was trimmed"
    directory = broker.stream_dir("tail")
    broker.stop()
    fragments = set(s3.keys(".fragment"))
    # Half of the first segment that is left survives; what comes after it is lost.
    segments = sorted(directory.glob("*.segment"))
    for lost in segments[1:]:
        lost.unlink()
        lost.with_suffix(".index").unlink()
    os.truncate(segments[0], segments[0].stat().st_size // 2)
    broker.start()
    broker.wait_leader("tail")
    with broker.client() as client:
        # A writer that has just started has committed nothing yet.
        committed = lambda: client.stats("tail")["committed_chunk_id"]  # noqa: E731
        wait_until(lambda: committed() >= 0, 30, "the log is committed")
        survived = committed()
    assert first_local <= survived < 300, "the log lost nothing, or everything"
    # Publishing before the plugin has looked is the limit that docs/decisions/0008 names.
    wait_until(lambda: broker.counter("remote_tier_ahead_recoveries") == 1, 30, "the lost end is noticed")
    chunk_records = next(c.num_records for c in tail_chunk(broker, survived))
    resumed = survived + chunk_records
    publish(broker, "tail", 200, SIZE, first=resumed)
    end = resumed + 200
    broker.flush_tier("tail", end)
    broker.wait_trimmed("tail")
    assert broker.counter("remote_tier_ahead_recoveries") == 1
    assert broker.range("tail") == (0, end)
    served = broker.counter("chunks_served_remote")
    verify(consume(broker, "tail", end), 0, end, SIZE)
    verify(consume_amqp091(broker, "tail", end), 0, end, SIZE)
    assert broker.counter("chunks_served_remote") > served
    assert fragments <= set(s3.keys(".fragment")), "objects of acknowledged records are gone"
    broker.kill()
    broker.wipe()


def tail_chunk(broker, chunk_id):
    """The chunk of that id."""
    return consume_chunks(broker, "tail", at_offset(chunk_id), lambda chunk: True)
