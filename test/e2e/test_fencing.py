"""A writer that has been deposed in the middle of a persist loses it and stands down; nothing of the next writer is touched."""

import os
import re
import signal

import pytest

from stream_s3_e2e.consume import consume
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.wait import wait_until
from test_cluster import Cluster, reader_of, STREAM
from stream_s3_e2e.tiered import TieredBroker

SIZE = fixed(50_000)


@pytest.fixture(scope="module")
def cluster(run_dir, s3):
    settings = dict(fragment_size=2_000_000, persist_interval_ms=100, request_timeout="5m")
    nodes = [TieredBroker(run_dir, s3, f"rabbit{index + 1}", **settings) for index in range(3)]
    for index, node in enumerate(nodes):
        node.index = index
        node.start()
    for node in nodes[1:]:
        node.join(nodes[0])
    with nodes[1].client() as client:
        client.create(STREAM, stream_max_segment_size_bytes=4_000_000, initial_cluster_size=3)
    cluster = Cluster(nodes, s3)
    cluster.publish(cluster.leader())
    cluster.tier()
    return cluster


def pointer(node):
    """Epoch, key and revision that the metadata store has."""
    text = node.rpc(f'rabbitmq_stream_s3_db:get_consistent(<<"{node.stream_id(STREAM)}">>).')
    assert text.startswith("{ok"), text
    return tuple(int(part) for part in re.findall(r"\d+", text))


def hold_root(s3, barrier):
    """The next root that is written waits at the barrier."""
    s3.fault(name=barrier, operation="PutObject", key="/metadata/root.", count=1, hang=barrier)


def unsettled(cluster, s3, leader, barrier):
    """Publishes through the leader until its root is held; returns the request."""
    hold_root(s3, barrier)
    cluster.publish(leader)
    leader.cut(STREAM)
    return s3.wait_log(1, rule=barrier)[0]


def check(cluster, s3, epoch):
    """The newest root is of the next writer, whole, and every record is read through every node."""
    cluster.publish(cluster.leader())
    cluster.tier()
    assert cluster.check_bucket() > epoch
    for node in cluster.nodes:
        verify(consume(node, STREAM, cluster.count), 0, cluster.count, SIZE)


def test_the_leader_moves_while_its_root_is_on_its_way(cluster, s3):
    leader, target = cluster.leader(), cluster.replicas()[0]
    epoch, _, _ = pointer(leader)
    unsettled(cluster, s3, leader, "held-put")
    cluster.move_leader(target)
    cluster.publish(target)
    target.flush_tier(STREAM, cluster.count)
    moved = pointer(target)
    assert moved[0] > epoch
    wait_until(lambda: leader.rpc(reader_of(leader)) == "undefined", 30, "the deposed one has stood down")
    s3.release("held-put")
    assert pointer(leader) == moved, "the deposed writer has moved the pointer"
    check(cluster, s3, epoch)


def test_a_commit_that_comes_after_the_next_writer_s_is_refused(cluster, s3):
    """The root is in the bucket and the compare-and-swap not yet asked for: the reader is held there, and its writer deposed."""
    leader, target = cluster.leader(), cluster.replicas()[0]
    epoch, _, revision = pointer(leader)
    unsettled(cluster, s3, leader, "held-commit")
    reader = reader_of(leader).rstrip(".")
    assert leader.rpc(f"sys:suspend({reader}).") == "ok"
    s3.release("held-commit")

    def asked():
        text = leader.rpc(
            "[{E, U, N, R} || {rabbitmq_stream_s3, _, {commit_pointer, E, U, N, R}} <-"
            f" element(2, process_info({reader}, messages))]."
        )
        return re.findall(r"\{(\d+), *(\d+), *(\d+), *(\d+)\}", text)

    (wanted,) = wait_until(asked, 30, "the machine asks for the compare-and-swap")
    assert int(wanted[0]) == epoch and int(wanted[3]) == revision
    cluster.move_leader(target)
    cluster.publish(target)
    target.flush_tier(STREAM, cluster.count)
    moved = pointer(target)
    conflicts = leader.counter('metadata_writes_total{result="conflict"}')
    stream_id = leader.stream_id(STREAM)
    # Exactly what its shell would do with it.
    outcome = leader.rpc(
        f'rabbitmq_stream_s3_db:commit_pointer(<<"{stream_id}">>, rabbit_misc:r(<<"/">>, queue, <<"{STREAM}">>),'
        f" {', '.join(wanted)})."
    )
    assert outcome == "conflict"
    assert leader.counter('metadata_writes_total{result="conflict"}') == conflicts + 1
    assert pointer(leader) == moved
    assert leader.rpc(f"sys:resume({reader}).") == "ok"
    wait_until(lambda: leader.rpc(reader_of(leader)) == "undefined", 30, "the deposed one has stood down")
    assert pointer(leader) == moved
    check(cluster, s3, epoch)


def test_a_writer_that_was_frozen_through_its_deposition_changes_nothing(cluster, s3):
    """As a virtual machine that is paused: for itself no time has passed, and it goes on where it was."""
    leader, others = cluster.leader(), cluster.replicas()
    epoch, _, _ = pointer(leader)
    unsettled(cluster, s3, leader, "held-frozen")
    pid = leader.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        s3.release("held-frozen")
        for other in others:
            # What the others would find out by themselves after a minute of silence.
            other.rpc(f"erlang:disconnect_node('{leader.node}').")
        wait_until(lambda: others[0].wait_leader(STREAM, 60)[1] != leader.stream_port, 120, "another leader")
        cluster.publish(others[0])
        new = next(node for node in others if node.stream_port == others[0].wait_leader(STREAM)[1])
        new.flush_tier(STREAM, cluster.count)
        moved = pointer(new)
        assert moved[0] > epoch
    finally:
        os.kill(pid, signal.SIGCONT)
    leader.wait_leader(STREAM, 90)
    wait_until(lambda: leader.rpc(reader_of(leader)) == "undefined", 60, "the deposed one has stood down")
    assert pointer(leader)[0] >= moved[0] and pointer(leader)[2] >= moved[2]
    check(cluster, s3, epoch)
    assert leader.manifest(s3, STREAM).epoch >= moved[0]


def test_nothing_is_left_over(cluster):
    for node in cluster.nodes:
        assert node.counter("native_panics_total") == 0
        assert node.counter("manifests_pending") == 0
