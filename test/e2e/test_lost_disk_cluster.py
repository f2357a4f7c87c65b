"""Disks that are lost on three nodes: a member that still has the log wins; if none has, the log goes on at the durable end."""

import concurrent.futures
import shutil

import pytest

from stream_s3_e2e.cluster import Cluster
from stream_s3_e2e.consume import consume
from stream_s3_e2e.lost_disk import BEGUN, DURABLE, MORE, SIZE, check_bucket, read_all
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import verify


@pytest.fixture(scope="module")
def cluster(run_dir, s3):
    with Cluster(run_dir, s3, fragment_size=1_000_000, persist_interval_ms=100) as cluster:
        # As in test_kill: a node that is killed right after its very first stream does not find its stream coordinator
        # again. Restarts in order get that out of the way.
        cluster.create("first")
        cluster.wait_members("first")
        for node in cluster.nodes:
            cluster.restart(node, "first")
        yield cluster


def filled(cluster, stream):
    """All is durable, and every member knows it."""
    cluster.create(stream)
    leader = cluster.wait_leader(stream)
    publish(leader, stream, DURABLE, SIZE)
    leader.flush_tier(stream, DURABLE)
    for node in cluster.nodes:
        node.wait_persisted(stream, DURABLE)
    return leader


def lose_on(cluster, stream, nodes):
    """Stops the nodes, takes their logs of the stream and starts them again."""
    directories = [node.stream_dir(stream) for node in nodes]
    for node in nodes:
        node.kill()
    for directory in directories:
        shutil.rmtree(directory)
    # Those that stopped last may have to be there for the first to start.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda node: node.start(), nodes))


@pytest.mark.parametrize("which", ["replica", "leader"])
def test_one_of_three(cluster, s3, stream_name, which):
    """Also the one that had the writer: a member that has the log wins, and nothing of ours begins a new one."""
    leader = filled(cluster, stream_name)
    lost = leader if which == "leader" else cluster.replicas(stream_name)[0]
    # More than is durable, which only the other members have.
    s3.fault(name="down", status=503)
    publish(leader, stream_name, MORE, SIZE, first=DURABLE)
    lose_on(cluster, stream_name, [lost])
    s3.clear_faults()
    cluster.wait_members(stream_name)
    end = DURABLE + MORE
    cluster.wait_leader(stream_name).flush_tier(stream_name, end)
    for node in cluster.nodes:
        node.wait_persisted(stream_name, end)
        verify(consume(node, stream_name, end), 0, end, SIZE)
    begun = [line for node in cluster.nodes for line in node.log().splitlines() if "the local log is empty" in line]
    assert not [line for line in begun if stream_name in line]
    check_bucket(cluster.wait_leader(stream_name), s3, stream_name, set())


def test_all_of_three(cluster, s3, stream_name):
    """The writer begins at the durable end, the replicas follow it."""
    filled(cluster, stream_name)
    fragments = set(s3.keys(".fragment"))
    lose_on(cluster, stream_name, cluster.nodes)
    cluster.wait_members(stream_name)
    leader = cluster.wait_leader(stream_name)
    for node in cluster.nodes:
        node.wait_persisted(stream_name, DURABLE)
        read_all(node, stream_name, DURABLE)
    publish(leader, stream_name, MORE, SIZE, first=DURABLE)
    leader.flush_tier(stream_name, BEGUN + MORE)
    for node in cluster.nodes:
        node.wait_persisted(stream_name, BEGUN + MORE)
        read_all(node, stream_name, BEGUN + MORE)
        assert node.segments(stream_name)[0][0] >= DURABLE
    assert check_bucket(leader, s3, stream_name, fragments) == BEGUN + MORE
