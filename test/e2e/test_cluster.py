"""Three stock nodes with the plugin: the remote tier is there for consumers of every member, whoever writes.

One story, told in order: each test goes on with the stream as the test before it left it.
"""

import bisect
import concurrent.futures

import pytest

from stream_s3_e2e.consume import consume, consume_chunks
from stream_s3_e2e.manifest import check_puts
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.streamproto import FIRST, at_offset, at_timestamp
from stream_s3_e2e.tiered import PLUGIN, TieredBroker
from stream_s3_e2e.wait import wait_until

STREAM = "everywhere"
SIZE = fixed(50_000)
ROUND = 300


class Cluster:
    """Three nodes, and how far the stream has got."""

    def __init__(self, nodes, s3):
        self.nodes, self.s3, self.count = nodes, s3, 0

    def publish(self, through):
        """One more round of records, through a node."""
        publish(through, STREAM, ROUND, SIZE, first=self.count)
        self.count += ROUND

    def leader(self):
        """The node of the writer."""
        _, port = self.nodes[0].wait_leader(STREAM)
        return next(node for node in self.nodes if node.stream_port == port)

    def replicas(self):
        """The other nodes."""
        leader = self.leader()
        return [node for node in self.nodes if node is not leader]

    def move_leader(self, target):
        """Restarts the stream until `target` has the writer: the coordinator grants the wish only to one of the first to stop."""

        def granted():
            before = self.leader()
            if before is not target:
                before.streams("restart_stream", STREAM, "--preferred-leader-node", target.node)
                # It may also be the same again, with nothing to tell by.
                wait_until(lambda: self.leader() is not before, 5, "another leader")
            return self.leader() is target

        wait_until(granted, 90, f"the leader is {target.name}")

    def tier(self, nodes=None):
        """All that was published is durable, the nodes know it, and their disks hold the end of it only."""
        self.leader().flush_tier(STREAM, self.count)
        for node in nodes or self.nodes:
            node.wait_persisted(STREAM, self.count, 30)
            node.wait_trimmed(STREAM)
            assert node.segments(STREAM)[0][0] > 0, f"{node.name}: nothing was trimmed"

    def read_everywhere(self, nodes=None):
        """Every record from `first`, an old offset and a time, on each node, out of the remote tier."""
        for node in nodes or self.nodes:
            served = node.counter("chunks_delivered_total", tier="remote")
            chunks = list(consume_chunks(node, STREAM, FIRST, lambda chunk: chunk.next_offset >= self.count))
            assert chunks[0].chunk_id == 0
            served = moved(node, 'chunks_delivered_total{tier="remote"}', served, "from first")
            verify(consume(node, STREAM, self.count), 0, self.count, SIZE)
            served = moved(node, 'chunks_delivered_total{tier="remote"}', served, "from first, records")
            old = node.segments(STREAM)[0][0] // 2
            verify(consume(node, STREAM, self.count, at_offset(old)), old, self.count, SIZE)
            served = moved(node, 'chunks_delivered_total{tier="remote"}', served, "from an old offset")
            times = [chunk.timestamp for chunk in chunks]
            time = times[len(times) // 4]
            with node.client() as client:
                found = client.subscribe(STREAM, at_timestamp(time), credit=1).next_chunk(30, credit=0)
            assert found.chunk_id == chunks[bisect.bisect_left(times, time)].chunk_id
            moved(node, 'chunks_delivered_total{tier="remote"}', served, "from a timestamp")

    def check_bucket(self):
        """The manifest names fragments without hole or overlap, and no key was written twice. Returns its epoch."""
        leader = self.leader()
        manifest = leader.manifest(self.s3, STREAM).check()
        assert (manifest.first, manifest.next) == leader.range(STREAM)
        check_puts(self.s3, leader.stream_id(STREAM))
        return manifest.epoch


def moved(node, counter, before, what):
    """The counter has moved; its value now."""
    now = node.counter(counter)
    assert now > before, f"{node.name}: {counter} did not move: {what}"
    return now


@pytest.fixture(scope="module")
def cluster(run_dir, s3):
    nodes = []
    for index in range(3):
        node = TieredBroker(run_dir, s3, f"rabbit{index + 1}", fragment_size=2_000_000, persist_interval_ms=100)
        node.index = index
        nodes.append(node)
    nodes[0].start()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda node: node.start(), nodes[1:]))
    for node in nodes[1:]:
        node.join(nodes[0])
    with nodes[1].client() as client:
        client.create(STREAM, stream_max_segment_size_bytes=4_000_000, initial_cluster_size=3)
    return Cluster(nodes, s3)


def test_every_member_knows_the_manifest_trims_and_serves(cluster):
    cluster.publish(cluster.leader())
    cluster.tier()
    for replica in cluster.replicas():
        # Told, not found by looking: that would take a minute.
        assert replica.counter("manifest_notifications_total", result="received") > 0
        assert replica.counter("manifests_resolved_total") > 0
        assert replica.counter("manifest_notifications_total", result="missed") == 0
    cluster.read_everywhere()


def test_a_replica_is_restarted_while_publishing_goes_on(cluster):
    leader, replica = cluster.leader(), cluster.replicas()[0]
    replica.stop()
    cluster.publish(leader)
    leader.flush_tier(STREAM, cluster.count)
    replica.start()
    replica.wait_leader(STREAM)
    cluster.tier()
    cluster.read_everywhere([replica])


def test_the_leader_moves(cluster):
    epoch = cluster.check_bucket()
    before, target = cluster.leader(), cluster.replicas()[1]
    cluster.move_leader(target)
    cluster.publish(target)
    cluster.tier()
    cluster.read_everywhere()
    assert cluster.check_bucket() > epoch
    assert before.rpc(reader_of(before)) == "undefined", "the writer that was is still uploading"


def test_the_leader_is_killed(cluster):
    leader, others = cluster.leader(), cluster.replicas()
    epoch = cluster.check_bucket()
    leader.kill()
    wait_until(lambda: others[0].wait_leader(STREAM)[1] != leader.stream_port, 60, "another leader")
    publish(others[0], STREAM, ROUND, SIZE, first=cluster.count)
    cluster.count += ROUND
    leader.start()
    leader.wait_leader(STREAM)
    cluster.tier()
    cluster.read_everywhere([leader])
    assert cluster.check_bucket() > epoch


def test_the_plugin_is_off_on_one_node(cluster):
    leader, (off, on) = cluster.leader(), cluster.replicas()
    errors = {node.name: len(node.errors()) for node in cluster.nodes}
    off.plugins("disable", PLUGIN)
    cluster.publish(off)
    cluster.tier([leader, on])
    cluster.read_everywhere([leader, on])
    # What is local there, as on a stock node.
    first_local = off.segments(STREAM)[0][0]
    assert first_local > 0
    verify(consume(off, STREAM, cluster.count), first_local, cluster.count, SIZE)
    off.plugins("enable", PLUGIN)
    cluster.tier()
    cluster.read_everywhere([off])
    for node in cluster.nodes:
        assert node.errors()[errors[node.name]:] == []


def test_nothing_is_left_over(cluster):
    for node in cluster.nodes:
        assert node.counter("native_panics_total") == 0
        assert node.counter("manifests_pending") == 0
        assert node.counter("remote_reader_failures_total") == 0


def reader_of(node):
    """An expression: the replica reader of the stream on that node."""
    return f'rabbitmq_stream_s3_registry:whereis_name({{<<"{node.stream_id(STREAM)}">>, node()}}).'
