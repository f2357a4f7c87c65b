"""The manifest as a tree: small groups on a stock broker, everything readable, and retention that reaches into them."""

import base64
import bisect
import random
import struct
import zlib

import pytest

from stream_s3_e2e.consume import consume, consume_chunks
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.streamproto import FIRST, at_offset, at_timestamp
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

SEGMENT = 2_000_000
RECORDS, RECORD_BYTES = 2_400, 5_000
# Frames of twenty records, one at a time: a chunk each, and a fragment each.
CHUNKS = {"batch": 20, "window": 0}
HEIGHTS = {"group": b"OSIG", "kgroup": b"OSIK", "mgroup": b"OSIM"}


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    # A mega-group of fours holds sixty-four fragments. With so little memory readers share nothing, and every path is walked.
    settings = {"fragment_size": 100_000, "rebalance_threshold": 4, "persist_interval_ms": 100, "read.memory": "1MB"}
    with TieredBroker(run_dir, s3, **settings) as node:
        yield node


def objects(s3, broker, stream, part):
    return s3.objects(f"rabbitmq/stream/{broker.stream_id(stream)}/{part}/")


def live_root(s3, broker, stream):
    """The root that the pointer names: (first offset, next offset, total size, entries)."""
    manifest = broker.manifest(s3, stream)
    return manifest.first, manifest.next, manifest.total_size, entries(manifest.root)


def entries(body):
    """(first offset, kind, size, uid) of every entry of a root or a group."""
    found = []
    for at in range(49, len(body), 34):
        offset, _, _, kind = struct.unpack_from(">QqqB", body, at)
        found.append((offset, kind, int.from_bytes(body[at + 25:at + 30], "big"), body[at + 30:at + 34].hex()))
    return found


@pytest.fixture(scope="module")
def grown(broker):
    """A stream with all heights of groups, trimmed locally; with the chunks that it has."""
    with broker.client() as client:
        client.create("grown", stream_max_segment_size_bytes=SEGMENT)
    publish(broker, "grown", RECORDS, fixed(RECORD_BYTES), **CHUNKS)
    broker.flush_tier("grown", RECORDS)
    broker.wait_trimmed("grown")
    return list(consume_chunks(broker, "grown", FIRST, lambda chunk: chunk.next_offset >= RECORDS))


def test_groups_of_every_height_are_in_s3_and_carry_their_checksum(broker, s3, grown):
    def heights():
        keys = [o["key"].rsplit(".", 1)[1] for o in objects(s3, broker, "grown", "metadata")]
        return set(HEIGHTS) <= set(keys)

    wait_until(heights, 30, "groups of every height")
    for entry in objects(s3, broker, "grown", "metadata"):
        body = s3.get(entry["key"])
        assert base64.b64decode(entry["checksum_crc32"]) == zlib.crc32(body).to_bytes(4, "big"), entry["key"]
        magic = HEIGHTS.get(entry["key"].rsplit(".", 1)[1])
        if magic:
            assert body[:4] == magic and len(entries(body)) == 4
            assert int(entry["metadata"]["first-offset"]) == struct.unpack_from(">Q", body, 8)[0]
    first, following, total, root = live_root(s3, broker, "grown")
    fragments = objects(s3, broker, "grown", "data")
    assert (first, following) == broker.range("grown") == (0, RECORDS)
    assert len(fragments) > 64 and len(root) <= 4 * 3 + 3
    assert total == sum(int(o["metadata"]["data-size"]) for o in fragments)
    counters = broker.stream_status("grown")["counters"]
    assert counters["groups_created"] >= 16 and counters["kilo_groups_created"] >= 4
    assert counters["mega_groups_created"] >= 1


def test_everything_is_read_through_the_groups(broker, grown):
    served = broker.counter("chunks_delivered_total", tier="remote")
    verify(consume(broker, "grown", RECORDS), 0, RECORDS, fixed(RECORD_BYTES))
    assert broker.counter("chunks_delivered_total", tier="remote") > served


def test_attaching_at_offsets_and_timestamps_costs_one_path(broker, s3, grown):
    ids, times = [c.chunk_id for c in grown], [c.timestamp for c in grown]
    first_local = broker.segments("grown")[0][0]
    assert first_local > RECORDS // 2
    chance = random.Random(7)
    with broker.client() as client:
        for offset in [0, 1, first_local - 1] + [chance.randrange(first_local) for _ in range(20)]:
            before = s3.last_id()
            subscription = client.subscribe("grown", at_offset(offset), credit=1)
            chunk = subscription.next_chunk(30, credit=0)
            assert chunk.chunk_id == ids[bisect.bisect_right(ids, offset) - 1], offset
            subscription.close()
            asked = [e["key"].rsplit(".", 1)[1] for e in s3.log(operation="GetObject", after=before)]
            heights = [kind for kind in asked[: asked.index("fragment")]]
            assert len(heights) == len(set(heights)), f"{offset}: {asked}"
        for timestamp in [0, times[0]] + [chance.choice(times) + d for _ in range(10) for d in (-1, 0, 1)]:
            if timestamp > times[-1]:
                continue
            subscription = client.subscribe("grown", at_timestamp(timestamp), credit=1)
            chunk = subscription.next_chunk(30, credit=0)
            assert chunk.timestamp == times[bisect.bisect_left(times, timestamp)], timestamp
            subscription.close()


def test_an_upload_of_a_group_that_fails_or_hangs_up_does_not_stop_the_stream(broker, s3, stream_name):
    with broker.client() as client:
        client.create(stream_name, stream_max_segment_size_bytes=SEGMENT)
    publish(broker, stream_name, 10, fixed(RECORD_BYTES))
    stream_id = broker.stream_id(stream_name)
    s3.fault(name="refused", operation="PutObject", key=f"{stream_id}/metadata/0", status=429, count=2)
    s3.fault(name="dropped", operation="PutObject", key=f"{stream_id}/metadata/0", drop_connection=True, nth=3, count=1)
    try:
        publish(broker, stream_name, 600, fixed(RECORD_BYTES), first=10, **CHUNKS)
        broker.flush_tier(stream_name, 610)
        wait_until(lambda: broker.stream_status(stream_name)["counters"]["groups_created"] >= 4, 30, "groups after all")
        assert s3.log(rule="refused"), "the fault did not bite"
    finally:
        s3.clear_faults()
    verify(consume(broker, stream_name, 610), 0, 610, fixed(RECORD_BYTES))


def test_retention_expires_inside_groups_and_their_objects_go(broker, s3, grown):
    first_before, _, total, _ = live_root(s3, broker, "grown")
    limit = total // 3
    broker.ctl("set_policy", "shrink", "^grown$", f'{{"max-length-bytes":{limit}}}', "--apply-to", "queues")
    wait_until(lambda: broker.range("grown")[0] > first_before, 30, "the beginning moves")

    def settled():
        first, _, total, root = live_root(s3, broker, "grown")
        return total <= limit and broker.range("grown")[0] == first

    wait_until(settled, 30, "the rest fits")
    first, following, total, root = live_root(s3, broker, "grown")
    assert limit - 200_000 < total <= limit and following == RECORDS
    kinds = [kind for _, kind, _, _ in root]
    assert kinds[0] > 0, "it ends inside a group"

    def swept():
        data = objects(s3, broker, "grown", "data")
        return min(int(o["metadata"]["first-offset"]) for o in data) == first

    wait_until(swept, 30, "objects below the beginning are gone")
    data = objects(s3, broker, "grown", "data")
    assert total == sum(int(o["metadata"]["data-size"]) for o in data), "accounting"
    for entry in objects(s3, broker, "grown", "metadata"):
        if entry["key"].rsplit(".", 1)[1] in HEIGHTS:
            assert int(entry["metadata"]["next-offset"]) > first, f"{entry['key']} is used up"
    assert broker.stream_status("grown")["counters"]["groups_deleted"] > 0
    verify(consume(broker, "grown", RECORDS, spec=FIRST), first, RECORDS, fixed(RECORD_BYTES))
    offset = (first + RECORDS) // 2
    found = list(consume(broker, "grown", RECORDS, spec=at_offset(offset)))
    verify(found, found[0][0], RECORDS, fixed(RECORD_BYTES))

    # A later writer finds the same, and goes on.
    broker.restart()
    broker.wait_leader("grown")
    publish(broker, "grown", 100, fixed(RECORD_BYTES), first=RECORDS, **CHUNKS)
    broker.flush_tier("grown", RECORDS + 100)
    wait_until(lambda: live_root(s3, broker, "grown")[2] <= limit, 30, "the rest fits again")
    assert live_root(s3, broker, "grown")[0] > first


def test_retention_may_take_nearly_everything(broker, s3, grown):
    broker.ctl("set_policy", "shrink", "^grown$", '{"max-length-bytes":1000}', "--apply-to", "queues")
    wait_until(lambda: not objects(s3, broker, "grown", "data"), 60, "no fragment is left")
    left = {o["key"].rsplit(".", 1)[1] for o in objects(s3, broker, "grown", "metadata")}
    assert left == {"manifest"}, left
