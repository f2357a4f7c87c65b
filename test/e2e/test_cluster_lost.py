"""A replica that was not told what retention dropped: its consumers go on at what is the beginning now."""

import concurrent.futures

import pytest

from stream_s3_e2e.cluster import Cluster
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.streamproto import FIRST
from stream_s3_e2e.wait import wait_until

STREAM = "dropped"
COUNT, SIZE = 4_000, 2_000

# In the process itself: what it is told is lost, until nothing has come for a while.
LOSE_ALL = (
    "sys:replace_state(rabbitmq_stream_s3_manifest_replica, fun(State) ->"
    " Lose = fun Lose(Left) -> receive {'$gen_cast', Told} when element(1, Told) =:= manifest_edit;"
    " element(1, Told) =:= pointer_moved -> Lose(5_000) after Left -> State end end, Lose(30_000) end, 120_000), lost."
)


@pytest.fixture(scope="module")
def cluster(run_dir, s3):
    # A look finds what was not told; here it comes too late to help.
    with Cluster(
        run_dir, s3, fragment_size=500_000, fragment_max_age="1s", persist_interval_ms=100, reconciliation_interval="1h"
    ) as made:
        made.create(STREAM, stream_max_segment_size_bytes=1_000_000)
        made.wait_members(STREAM)
        yield made


def test_a_reader_whose_object_is_gone_asks_for_the_manifest_of_now(cluster, s3):
    leader, replica = cluster.wait_leader(STREAM), cluster.replicas(STREAM)[0]
    publish(leader, STREAM, COUNT, fixed(SIZE), batch=20)
    cluster.wait_uploads(STREAM, cluster.committed(STREAM))
    replica.wait_persisted(STREAM, leader.range(STREAM)[1], 60)
    replica.wait_trimmed(STREAM)
    assert replica.range(STREAM)[0] == 0
    oldest = min(s3.keys(f"{leader.stream_id(STREAM)}/data/"))
    lost, syncs = replica.counter("remote_reader_bad_places_total", kind="lost"), replica.counter("manifest_syncs_total")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        losing = pool.submit(replica.rpc, LOSE_ALL)
        leader.ctl("set_policy", "bound", f"^{STREAM}$", '{"max-length-bytes": 3000000}', "--apply-to", "streams")
        wait_until(lambda: oldest not in s3.keys(), 60, "the oldest fragment is deleted")
        assert losing.result() == "lost"
    first = leader.range(STREAM)[0]
    assert first > 0 and replica.range(STREAM)[0] == 0, "the replica knows nothing of it"
    with replica.client() as client:
        chunk = client.subscribe(STREAM, FIRST, credit=10).next_chunk(90)
        assert client.metadata_updates == []
    # Chunks are as large as the machine is fast, and so the local log may begin before what is left of the manifest.
    assert chunk.chunk_id == min(first, replica.segments(STREAM)[0][0])
    # It came by way of an object that is gone, and of a manifest that was asked for.
    assert replica.counter("remote_reader_bad_places_total", kind="lost") - lost == 1
    assert replica.counter("manifest_syncs_total") - syncs == 1
    assert replica.node_status()["read_alarm"] == "none", "a false alarm is over"
    assert "a consumer cannot continue" not in replica.log()
