"""Replicas follow the manifest by what the writer's node sends them: a root is fetched only where no edit leads to it.

One story, told in order, under load all the time.
"""

import pytest

from stream_s3_e2e.cluster import Cluster
from stream_s3_e2e.wait import wait_until
from stream_s3_e2e.workload import Workload

STREAM = "edits"
# Persists that are waited for in a row.
ROUND = 20


@pytest.fixture(scope="module")
def cluster(run_dir, s3):
    # A look finds what was not told; here it comes too late to help.
    with Cluster(
        run_dir, s3, fragment_size=100_000, fragment_max_age="1s", persist_interval_ms=100, rebalance_threshold=8,
        reconciliation_interval="1h",
    ) as made:
        made.create(STREAM)
        yield made


@pytest.fixture(scope="module")
def load(cluster):
    with Workload(cluster, STREAM) as made:
        made.wait_confirmed(200)
        yield made


METRICS = {
    "sent": "manifest_edits_sent_total",
    **{result: f'manifest_edits_received_total{{result="{result}"}}' for result in ("applied", "unfitting", "corrupt")},
    "syncs": "manifest_syncs_total",
    "persists": 'manifest_objects_uploaded_total{kind="root"}',
}


class Counted:
    """What has been counted on a node since this was made."""

    def __init__(self, node):
        self.node, self._before = node, {}
        page = node.metrics()
        for name in METRICS:
            self._before[name] = page.sum(f"rabbitmq_stream_s3_{METRICS[name]}")

    def __getattr__(self, name):
        return self.node.counter(METRICS[name]) - self._before[name]


def follows(node, count=1):
    """Waits until so many edits have been applied on a node from now on."""
    counted = Counted(node)
    wait_until(lambda: counted.applied >= count, 60, f"{node.name} follows edits")


def in_step(cluster):
    """Waits until each node knows the range of the leader's, while records come."""
    leader = cluster.wait_leader(STREAM)
    persisted = leader.range(STREAM)[1]
    for node in cluster.replicas(STREAM):
        node.wait_persisted(STREAM, persisted, 30)


def root_requests(s3, since):
    """GETs of roots, of whatever node."""
    return s3.log(operation="GetObject", key="/metadata/root.", after=since)


def test_replicas_apply_edits_and_fetch_no_root(cluster, load, s3):
    leader, replicas = cluster.wait_leader(STREAM), cluster.replicas(STREAM)
    for node in replicas:
        follows(node)
    writer, counted, since = Counted(leader), [Counted(node) for node in replicas], s3.last_id()
    groups = leader.counter("manifest_objects_uploaded_total", kind="group")
    wait_until(lambda: writer.persists >= ROUND, 120, "persists")
    for node in counted:
        wait_until(lambda node=node: node.applied >= ROUND - 1, 30, f"{node.node.name}: an edit for each persist")
        assert (node.syncs, node.unfitting, node.corrupt) == (0, 0, 0)
    assert root_requests(s3, since) == []
    assert writer.sent >= 2 * (ROUND - 1)
    assert leader.counter("manifest_objects_uploaded_total", kind="group") > groups, "what became groups was followed, too"
    in_step(cluster)
    for node in replicas:
        # Local retention goes by it.
        node.wait_trimmed(STREAM)
        assert node.segments(STREAM)[0][0] > 0
        assert node.counter("manifest_notifications_total", result="missed") == 0


# In the process itself: of all that it is sent, the next edit and the announcement behind it are lost.
LOSE_ONE = (
    "sys:replace_state(rabbitmq_stream_s3_manifest_replica, fun(State) ->"
    " receive {'$gen_cast', Edit} when element(1, Edit) =:= manifest_edit -> ok end,"
    " receive {'$gen_cast', Moved} when element(1, Moved) =:= pointer_moved -> State end"
    " end, 60_000), lost."
)


def test_a_lost_edit_is_a_gap_that_leads_to_a_sync_and_edits_go_on(cluster, load, s3):
    replica, other = cluster.replicas(STREAM)
    follows(replica)
    counted, undisturbed, since = Counted(replica), Counted(other), s3.last_id()
    assert replica.rpc(LOSE_ONE) == "lost"
    wait_until(lambda: counted.syncs >= 1, 30, "the root is fetched")
    assert counted.unfitting >= 1, "the edit after the lost one"
    assert undisturbed.syncs == 0, "another node's loss"
    follows(replica, ROUND // 2)
    # Persists that were faster than the answer may have been fetched as well; then it was in step again.
    assert counted.corrupt == 0
    settled = counted.syncs
    assert len(root_requests(s3, since)) == settled
    follows(replica, ROUND // 2)
    assert counted.syncs == settled
    in_step(cluster)


def test_a_damaged_edit_is_told_counted_and_passed_over(cluster, load):
    leader, replica = cluster.wait_leader(STREAM), cluster.replicas(STREAM)[0]
    follows(replica)
    counted = Counted(replica)
    stream_id = replica.stream_id(STREAM)
    before = replica.log().count("sent a damaged change of the manifest")
    # From what is known there in that moment: another one may have come meanwhile, and then it does not fit.
    sent = (
        f'Id = <<"{stream_id}">>, {{ok, #{{pointer := {{E, U, R}} = From}}}} ='
        " rabbitmq_stream_s3_manifest_cache:range(Id),"
        " gen_server:cast(rabbitmq_stream_s3_manifest_replica,"
        " {manifest_edit, Id, From, {E, U bxor 1, R + 1}, E, <<\"OSIE\", 1:32, 0:800>>, node()}), sent."
    )

    def refused():
        assert replica.rpc(sent) == "sent"
        return counted.corrupt >= 1

    wait_until(refused, 60, "a damaged edit is refused")
    assert replica.log().count("sent a damaged change of the manifest") > before
    follows(replica, ROUND // 2)
    assert counted.syncs <= 1
    assert leader is cluster.wait_leader(STREAM)
    in_step(cluster)


def test_the_next_leader_is_followed(cluster, load):
    before = cluster.wait_leader(STREAM)
    now = cluster.move_leader(STREAM)
    assert now is not before
    for node in cluster.replicas(STREAM):
        follows(node, ROUND // 2)
    in_step(cluster)
    counted = [Counted(node) for node in cluster.replicas(STREAM)]
    for node in counted:
        follows(node.node, ROUND // 2)
        assert node.syncs == 0


def test_the_history_is_right_and_nothing_is_left_over(cluster, load):
    truth = load.check(cluster.nodes[0])
    for node in cluster.nodes:
        load.check_again(node, truth)
        assert node.counter("native_panics_total") == 0
        assert node.counter("manifests_pending") == 0
