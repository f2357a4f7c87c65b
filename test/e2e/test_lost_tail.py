"""A local log that lost its end (a power cut: osiris does not sync): what only S3 has below it stays and is served,
what the log still has is uploaded again, nothing in the bucket is destroyed. Also if publishers were faster than the
plugin: then the log has grown past the place where the manifest ends before anybody compares the two."""

import os

import pytest

from stream_s3_e2e.consume import consume, consume_amqp091, consume_chunks
from stream_s3_e2e.publish import publish, publish_batches
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.streamproto import at_offset
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

SIZE = fixed(50_000)
# What is published after the loss has other bytes under the same offsets.
LATER = fixed(40_000)
ENDS_AT = 300


def lose_end(broker):
    """Publishes, and takes the broker down with less in the local log than S3 has. Returns its first local offset."""
    with broker.client() as client:
        client.create("tail", stream_max_segment_size_bytes=4_000_000)
    # Small chunks, so that half of a segment has some, also if only the last segment is left.
    publish(broker, "tail", ENDS_AT, SIZE, batch=5, window=0)
    broker.flush_tier("tail", ENDS_AT)
    broker.wait_trimmed("tail")
    first_local = broker.segments("tail")[0][0]
    assert first_local > 0, "nothing was trimmed"
    directory = broker.stream_dir("tail")
    broker.stop()
    # Half of the first segment that is left survives; what comes after it is lost.
    segments = sorted(directory.glob("*.segment"))
    for lost in segments[1:]:
        lost.unlink()
        lost.with_suffix(".index").unlink()
    os.truncate(segments[0], segments[0].stat().st_size // 2)
    return first_local


def restart(broker, first_local):
    """Starts the broker again. Returns the offset after what the log still has."""
    broker.start()
    broker.wait_leader("tail")
    with broker.client() as client:
        # A writer that has just started has committed nothing yet.
        wait_until(lambda: client.stats("tail")["committed_chunk_id"] >= 0, 30, "the log is committed")
        survived = client.stats("tail")["committed_chunk_id"]
    assert first_local <= survived < ENDS_AT, "the log lost nothing, or everything"
    return survived + next(c.num_records for c in chunks(broker, survived, survived))


def chunks(broker, first, last):
    """The chunks that hold these offsets."""
    return consume_chunks(broker, "tail", at_offset(first), lambda chunk: chunk.next_offset > last)


def wait_noticed(broker):
    noticed = lambda: broker.counter("recoveries_total", kind="remote_tier_ahead") == 1  # noqa: E731
    wait_until(noticed, 30, "the lost end is noticed")


def check(broker, s3, fragments, resumed, end):
    """All that was ever acknowledged and not lost is durable and served; nothing is destroyed."""
    sizes = lambda sequence: (SIZE if sequence < resumed else LATER)(sequence)  # noqa: E731
    broker.flush_tier("tail", end)
    broker.wait_trimmed("tail")
    assert broker.counter("recoveries_total", kind="remote_tier_ahead") == 1
    assert broker.range("tail") == (0, end)
    served = broker.counter("chunks_delivered_total", tier="remote")
    verify(consume(broker, "tail", end), 0, end, sizes)
    verify(consume_amqp091(broker, "tail", end), 0, end, sizes)
    assert broker.counter("chunks_delivered_total", tier="remote") > served
    assert fragments <= set(s3.keys(".fragment")), "objects of acknowledged records are gone"


@pytest.mark.parametrize("threshold", [1024, 2])
def test_lost_tail(run_dir, s3, threshold):
    """Noticed before anything is published. Also with a manifest of groups, which have to be opened for it."""
    broker = TieredBroker(
        run_dir, s3, fragment_size=1_000_000, persist_interval_ms=100, rebalance_threshold=threshold
    ).start()
    first_local = lose_end(broker)
    fragments = set(s3.keys(".fragment"))
    resumed = restart(broker, first_local)
    wait_noticed(broker)
    publish(broker, "tail", 200, LATER, first=resumed)
    check(broker, s3, fragments, resumed, resumed + 200)
    broker.kill()
    broker.wipe()


@pytest.mark.parametrize("threshold", [1024, 2])
@pytest.mark.parametrize("across", [True, False], ids=["across", "exactly"])
def test_grown_past_the_place_before_the_first_look(run_dir, s3, across, threshold):
    """With a chunk across the place where the manifest ends, and with one that starts exactly there."""
    broker = TieredBroker(
        run_dir, s3, fragment_size=1_000_000, persist_interval_ms=100, rebalance_threshold=threshold
    ).start()
    first_local = lose_end(broker)
    fragments = set(s3.keys(".fragment"))
    # The plugin cannot look before it has the manifest.
    s3.clear_log()
    s3.fault(name="root", operation="GetObject", key="/metadata/root", hang="root")
    resumed = restart(broker, first_local)
    if across:
        # A sub-batch is never taken apart.
        publish(broker, "tail", ENDS_AT - 3 - resumed, LATER, first=resumed)
        publish_batches(broker, "tail", 7, LATER, first=ENDS_AT - 3, per_batch=7, compressed=False)
        published = ENDS_AT + 4
    else:
        publish(broker, "tail", ENDS_AT - resumed, LATER, first=resumed)
        published = ENDS_AT
    publish(broker, "tail", 100, LATER, first=published)
    end = published + 100
    starts_there = next(chunks(broker, ENDS_AT, ENDS_AT)).chunk_id == ENDS_AT
    assert starts_there != across
    s3.wait_log(1, rule="root")
    assert broker.range("tail") is None, "the plugin was to wait for the manifest"
    s3.clear_faults()
    wait_noticed(broker)
    check(broker, s3, fragments, resumed, end)
    broker.kill()
    broker.wipe()
