"""Three nodes under load, and everything that can happen to them; whatever it was, the history has to make sense.

One load runs through all of it: publishers, and on every node a consumer from `first` and one with stored offsets.
The last test compares what all of them did and saw.
"""

import time

import pytest

from stream_s3_e2e.cluster import Cluster
from stream_s3_e2e.manifest import check_puts
from stream_s3_e2e.streamproto import at_timestamp
from stream_s3_e2e.wait import wait_until
from stream_s3_e2e.workload import Workload

STREAM = "faults"
# After the loss of a node: promised, and far above what is measured.
RESUME_SECONDS = 30


@pytest.fixture(scope="module")
def cluster(run_dir, s3):
    with Cluster(
        # A node that does not answer is missed within ten seconds instead of over a minute.
        run_dir, s3, conf={"net_ticktime": 8}, fragment_size=500_000, fragment_max_age="1s", persist_interval_ms=200, request_timeout="10s"
    ) as made:
        made.create(STREAM)
        yield made


@pytest.fixture(scope="module")
def load(cluster):
    with Workload(cluster, STREAM) as made:
        made.read_everywhere()
        made.wait_confirmed(200)
        yield made


@pytest.fixture(autouse=True)
def healthy(cluster, load):
    """Each test begins and ends with all nodes up and the load going on."""
    load.wait_confirmed(50)
    yield
    cluster.s3.clear_faults()
    cluster.settle(STREAM)
    if not load.finished:
        load.wait_confirmed(50)
        cluster.wait_uploads(STREAM, cluster.persisted(STREAM))
    cluster.manifest(STREAM).check()


def held_put(cluster, part, **when):
    """Holds the next PUT of that kind of object; returns its key once it hangs."""
    name = f"held-{part.strip('/.')}"
    cluster.s3.fault(name=name, operation="PutObject", key=part, count=1, hang=name, **when)

    def hanging():
        return next((entry["key"] for entry in cluster.s3.log(rule=name) if entry["hanging"] == name), None)

    return wait_until(hanging, 60, f"a PUT of {part} hangs")


def resumes_elsewhere(cluster, load, leader, begun, what):
    """Uploads go on on another node within the time that is promised; returns the seconds since `begun`.

    How long the cluster takes to have another leader is not the plugin's: with the old one killed it is part of the
    promise, else it may have to notice first.
    """
    others = cluster.others(leader)
    cluster.wait_leader(STREAM, others, seconds=90)
    led = time.monotonic()
    cluster.wait_uploads(STREAM, cluster.committed_on(STREAM, others), others)
    now = time.monotonic()
    print(f"{what}: another leader after {led - begun:.1f} s, uploads resumed {now - led:.1f} s later")
    assert now - led < RESUME_SECONDS
    load.alive()
    return now - begun


@pytest.mark.parametrize(
    "moment, part, when",
    [
        ("in mid-upload", ".fragment", {}),
        ("in mid-persist", "/metadata/root.", {}),
        ("between root and pointer", "/metadata/root.", {"after_effect": True}),
    ],
    ids=["mid-upload", "mid-persist", "before-the-pointer"],
)
def test_the_leader_is_killed(cluster, load, moment, part, when):
    leader = cluster.wait_leader(STREAM)
    key = held_put(cluster, part, **when)
    begun = time.monotonic()
    cluster.kill(leader)
    assert resumes_elsewhere(cluster, load, leader, begun, f"killed {moment}") < RESUME_SECONDS
    cluster.s3.clear_faults()
    there = key in cluster.s3.keys(part)
    assert there == bool(when), "the PUT was not where it should have been"
    manifest = cluster.manifest(STREAM).check()
    # What the dead writer had not persisted is named by nobody.
    assert not key.endswith(f".{manifest.uid:08x}.manifest")
    assert all(not key.endswith(named) for _, named in manifest.fragments)


def test_the_leader_loses_the_others_between_root_and_pointer(cluster, load):
    leader = cluster.wait_leader(STREAM)
    tried, moved = leader.counter("metadata_write_attempts_total"), leader.counter("metadata_writes_total", result="ok")
    key = held_put(cluster, "/metadata/root.", after_effect=True)
    begun = time.monotonic()
    cluster.isolate(leader)
    cluster.s3.clear_faults()
    resumes_elsewhere(cluster, load, leader, begun, "leader alone")
    # It did try to move the pointer, and did not.
    wait_until(lambda: leader.counter("metadata_write_attempts_total") > tried, 30, "the deposed writer tries")
    assert leader.counter("metadata_writes_total", result="ok") == moved
    cluster.heal_all()
    cluster.wait_members(STREAM)
    assert not key.endswith(f".{cluster.manifest(STREAM).check().uid:08x}.manifest")


def test_the_leader_loses_the_others_and_s3(cluster, load):
    leader = cluster.wait_leader(STREAM)
    begun, bitten = time.monotonic(), leader.gateway.bitten
    leader.gateway.cut()
    cluster.isolate(leader)
    resumes_elsewhere(cluster, load, leader, begun, "leader without anything")
    wait_until(lambda: leader.gateway.bitten > bitten, 30, "the cut from S3 is felt")


def test_the_leader_freezes_and_wakes_up_deposed(cluster, load):
    leader = cluster.wait_leader(STREAM)
    key = held_put(cluster, "/metadata/root.", after_effect=True)
    begun = time.monotonic()
    with cluster.frozen(leader):
        cluster.s3.clear_faults()
        resumes_elsewhere(cluster, load, leader, begun, "leader frozen")
        epoch = cluster.manifest(STREAM, cluster.others(leader)).epoch
    cluster.settle(STREAM)
    # It had everything in hand to move the pointer, and does not get to.
    load.wait_confirmed(50)
    manifest = cluster.manifest(STREAM).check()
    assert manifest.epoch >= epoch
    assert not key.endswith(f".{manifest.uid:08x}.manifest")


def test_a_replica_is_killed_and_its_log_wiped(cluster, load):
    replica = cluster.replicas(STREAM)[0]
    wait_until(lambda: replica.segments(STREAM)[0][0] > 0, 60, "the log has been trimmed")
    cluster.kill(replica)
    cluster.wipe_stream(replica, STREAM)
    load.wait_confirmed(100)
    replica.start()
    cluster.wait_members(STREAM, [replica])
    assert replica.segments(STREAM)[0][0] > 0, "it began with what the others still have"
    served = replica.counter("chunks_delivered_total", tier="remote")
    load.read(replica)
    wait_until(lambda: replica.counter("chunks_delivered_total", tier="remote") > served, 30, "it serves old records")


def test_a_node_is_replaced(cluster, load):
    replica = cluster.replicas(STREAM)[0]
    cluster.replace(replica, STREAM)
    load.wait_confirmed(50)
    assert replica.segments(STREAM)[0][0] > 0
    served = replica.counter("chunks_delivered_total", tier="remote")
    load.read(replica)
    wait_until(lambda: replica.counter("chunks_delivered_total", tier="remote") > served, 30, "it serves old records")


def test_a_replica_is_taken_away_and_given_back(cluster, load):
    replica = cluster.replicas(STREAM)[0]
    stream_id = replica.stream_id(STREAM)
    cluster.delete_replica(STREAM, replica)
    load.wait_confirmed(50)
    # What it knew of the tier goes with the member.
    known = f'rabbitmq_stream_s3_manifest_cache:range(<<"{stream_id}">>).'
    wait_until(lambda: replica.rpc(known) == "none", 30, "the node knows nothing of it any more")
    cluster.add_replica(STREAM, replica)
    wait_until(lambda: replica.range(STREAM), 30, "the node knows what is durable")


def later_epoch(cluster, before):
    """The epoch of what is persisted, once it is another one."""
    epoch = cluster.manifest(STREAM).epoch
    return epoch if epoch != before else None


def test_the_leader_moves_ten_times(cluster, load):
    epochs = [cluster.manifest(STREAM).epoch]
    for _ in range(10):
        before, committed = cluster.wait_leader(STREAM), cluster.committed(STREAM)
        now = cluster.move_leader(STREAM)
        assert now is not before
        load.wait_confirmed(20)
        cluster.wait_uploads(STREAM, committed, [now])
        # The writer before may have persisted that; this one persists as well.
        epochs.append(wait_until(lambda e=epochs: later_epoch(cluster, e[-1]), 60, f"{now.name} persists"))
    assert epochs == sorted(set(epochs)), "each writer persists under an epoch of its own"


def test_s3_is_gone_for_all(cluster, load):
    # Attached by time: judged at the end, by the times of all chunks.
    for node in cluster.nodes:
        load.read(node, at_timestamp(int((time.time() - 20) * 1000)))
    load.wait_confirmed(20)
    bitten = [node.gateway.bitten for node in cluster.nodes]
    leader, silent, refusing = cluster.wait_leader(STREAM), *cluster.replicas(STREAM)
    leader.gateway.cut()
    refusing.gateway.cut()
    silent.gateway.hold()
    load.wait_confirmed(400)
    # Of these nothing was persisted: what was under way before the cut may just have been.
    still = cluster.persisted(STREAM)
    load.wait_confirmed(100)
    assert cluster.persisted(STREAM) == still, "the outage did not bite"
    assert leader.gateway.bitten > bitten[cluster.nodes.index(leader)]
    behind = cluster.committed(STREAM)
    cluster.heal_all()
    cluster.wait_uploads(STREAM, behind)


def test_the_history_makes_sense(cluster, load):
    truth = load.check(cluster.nodes[0])
    for node in cluster.nodes:
        load.check_again(node, truth)
    assert sum(reader.attached_at_stored for reader in load.stored) > len(cluster.nodes)
    print(load.summary(truth))
    cluster.manifest(STREAM).check()
    check_puts(cluster.s3, cluster.nodes[0].stream_id(STREAM))
    for node in cluster.nodes:
        assert node.counter("native_panics_total") == 0
        assert node.counter("manifests_pending") == 0
