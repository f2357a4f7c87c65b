"""What operators do to a cluster in use: plugin off and on, node by node, another version, restarts, policies, deletion."""

import re
import shutil

import pytest

from stream_s3_e2e.broker import run, TOP
from stream_s3_e2e.cluster import Cluster
from stream_s3_e2e.history import Allowance
from stream_s3_e2e.manifest import check_puts
from stream_s3_e2e.streamproto import FIRST
from stream_s3_e2e.tiered import PLUGIN
from stream_s3_e2e.wait import wait_until
from stream_s3_e2e.workload import Workload

STREAM = "changes"


@pytest.fixture(scope="module")
def cluster(run_dir, s3):
    with Cluster(
        run_dir, s3, fragment_size=500_000, fragment_max_age="1s", persist_interval_ms=200, reconciliation_interval="2s"
    ) as made:
        made.create(STREAM)
        yield made


@pytest.fixture(scope="module")
def load(cluster):
    with Workload(cluster, STREAM) as made:
        made.read_everywhere()
        made.wait_confirmed(200)
        yield made


def fresh_reader_sees_old_records(cluster, load, node):
    """A consumer that attaches now at `first` gets what only S3 has."""
    wait_until(lambda: node.segments(STREAM)[0][0] > 0, 60, f"{node.name}: trimmed")
    served = node.counter("chunks_delivered_total", tier="remote")
    load.read(node)
    wait_until(lambda: node.counter("chunks_delivered_total", tier="remote") > served, 30, f"{node.name} serves old records")


@pytest.fixture(autouse=True)
def enabled_in_the_end(cluster):
    """Whatever a test leaves: the next one finds the plugin on, everywhere."""
    yield
    for node in cluster.nodes:
        if node.running and PLUGIN not in node.rpc("rabbit_plugins:active()."):
            node.plugins("enable", PLUGIN)
    cluster.settle(STREAM)


def first_offset(node):
    """Where a consumer that attaches at `first` begins."""
    with node.client() as client:
        return client.subscribe(STREAM, FIRST, credit=1).next_chunk(30, credit=0).chunk_id


def test_the_plugin_is_disabled_and_enabled_while_records_come(cluster, load):
    cluster.wait_uploads(STREAM, cluster.committed(STREAM))
    leader = cluster.wait_leader(STREAM)
    # Consumers on this node would see the local tier only, and attach behind what they have not seen: they pause. Osiris
    # forgets offsets that are stored below what the writer has locally.
    with load.paused(leader, forgotten=True):
        for _ in range(2):
            leader.plugins("disable", PLUGIN)
            before = cluster.committed(STREAM)
            load.wait_confirmed(100)
            assert cluster.persisted(STREAM) < before, "without the plugin nobody uploads"
            assert leader is cluster.wait_leader(STREAM), "the stream did not notice"
            leader.plugins("enable", PLUGIN)
            cluster.wait_uploads(STREAM, cluster.committed(STREAM))
    fresh_reader_sees_old_records(cluster, load, leader)
    cluster.manifest(STREAM).check()


def test_the_plugin_is_enabled_on_one_node_after_the_other(cluster, load):
    leader, *replicas = cluster.wait_leader(STREAM), *cluster.replicas(STREAM)
    with load.paused(*cluster.nodes, forgotten=True):
        for node in cluster.nodes:
            node.plugins("disable", PLUGIN)
        load.wait_confirmed(50)
        # First where nobody writes: nothing to do, nothing to say, nothing goes wrong.
        for node in replicas:
            node.plugins("enable", PLUGIN)
            load.wait_confirmed(50)
            assert node.counter("active") == 1
            # Old records are there for consumers, but nothing is trimmed: the writer has not said that its log fits.
            assert first_offset(node) == 0
            assert node.range(STREAM) is None
        assert cluster.persisted(STREAM) == -1
        # The writer moves to one that has it, while the node it leaves does not.
        now = cluster.move_leader(STREAM, replicas[0])
        cluster.wait_uploads(STREAM, cluster.committed(STREAM), [now])
        leader.plugins("enable", PLUGIN)
        wait_until(lambda: leader.range(STREAM) is not None, 30, "the last one knows what is persisted")
    for node in cluster.nodes:
        fresh_reader_sees_old_records(cluster, load, node)
    cluster.manifest(STREAM).check()


def another_version(run_dir):
    """The plugin under another version number, in a folder of its own."""
    ours = run(TOP / "scripts" / "dist", "--where").strip()
    folder = run_dir / "other-version"
    shutil.copytree(ours, folder)
    (plugin,) = folder.iterdir()
    app = plugin / "ebin" / f"{PLUGIN}.app"
    text, count = re.subn(r'\{vsn, *"[^"]*"\}', '{vsn,"99.9.9"}', app.read_text())
    assert count == 1
    app.write_text(text)
    plugin.rename(folder / f"{PLUGIN}-99.9.9")
    return folder


def test_all_nodes_restart_into_another_version_and_back(cluster, load, run_dir):
    folder = another_version(run_dir)
    for env, version in (({"STREAM_S3_PLUGIN_DIR": str(folder)}, "99.9.9"), ({}, None)):
        for node in cluster.nodes:
            node.env = env
            cluster.restart(node, STREAM)
            assert version is None or node.versions()[PLUGIN] == version
            load.wait_confirmed(50)
            cluster.wait_uploads(STREAM, cluster.committed(STREAM))
    for node in cluster.nodes:
        fresh_reader_sees_old_records(cluster, load, node)
    cluster.manifest(STREAM).check()


def test_a_stream_is_deleted_while_it_uploads(cluster, s3):
    stream = "deleted"
    cluster.create(stream)
    stream_id = cluster.nodes[0].stream_id(stream)
    other = Workload(cluster, stream)
    try:
        other.start().wait_confirmed(200)
        cluster.wait_uploads(stream, 0)
        # One that lands after all objects have been removed.
        s3.fault(name="late", operation="PutObject", key=stream_id, count=1, hang="late")
        wait_until(lambda: any(e["hanging"] == "late" for e in s3.log(rule="late")), 60, "an upload hangs")
        with cluster.nodes[0].client() as client:
            client.delete(stream)
    finally:
        other.stop()
    wait_until(lambda: not s3.keys(stream_id), 60, "its objects are removed")
    for node in cluster.nodes:
        wait_until(lambda n=node: n.rpc(f'rabbitmq_stream_s3_registry:whereis_name({{<<"{stream_id}">>, node()}}).')
                   == "undefined", 60, "nobody uploads it any more")
    mark = s3.last_id()
    s3.release("late")
    # Two rounds of every reconciler, and a node that starts: nobody brings it back.
    cluster.restart(cluster.nodes[2], STREAM)
    for node in cluster.nodes:
        gone = node.rpc(f'rabbitmq_stream_s3_db:gone([<<"{stream_id}">>]) =:= {{ok, [<<"{stream_id}">>]}}.')
        assert gone == "true", gone
        assert stream_id not in node.rpc("rabbitmq_stream_s3_manifest_cache:streams().")
    late = [e for e in s3.log(after=mark, operation="PutObject", key=stream_id)]
    assert late == [], "something was uploaded after the deletion"
    # What was on its way when it was deleted may have landed; the second sweep takes it.
    assert len(s3.keys(stream_id)) <= 1


def test_a_policy_is_changed_while_records_come(cluster, s3):
    stream = "bounded"
    # A segment of 1 MB each, or the local log alone would be more than the bound.
    cluster.create(stream, stream_max_segment_size_bytes=1_000_000)
    other = Workload(cluster, stream, rate=250)
    try:
        other.start().wait_confirmed(1_500)
        for node in cluster.nodes:
            other.read(node)
        cluster.wait_uploads(stream, cluster.committed(stream))
        assert cluster.manifest(stream).first == 0
        cluster.nodes[0].ctl(
            "set_policy", "bound", "^bounded$", '{"max-length-bytes": 3000000}', "--apply-to", "streams"
        )
        wait_until(lambda: cluster.manifest(stream).first > 0, 60, "retention drops the beginning of the remote tier")
        first = cluster.manifest(stream).first
        other.wait_confirmed(500)
        wait_until(lambda: cluster.manifest(stream).first > first, 60, "and goes on")
        cluster.nodes[0].ctl("clear_policy", "bound")
        other.finish()
        cluster.wait_uploads(stream, cluster.committed(stream) - 1)
        found = cluster.manifest(stream).check()
        assert found.total_size < 6_000_000
        for node in cluster.nodes:
            with node.client() as client:
                begin = client.subscribe(stream, FIRST, credit=1).next_chunk(30).chunk_id
            assert begin == cluster.manifest(stream).first, f"{node.name}: a fresh consumer begins at {begin}"
        truth = other.check(cluster.nodes[0], Allowance(floor=found.first))
        assert truth.offsets[0] == found.first
    finally:
        other.stop()
    # What it dropped is gone from the bucket.
    names = {key for _, key in found.fragments}
    folder = f"{cluster.nodes[0].stream_id(stream)}/"
    wait_until(lambda: {key.split(folder)[1] for key in s3.keys(f"{folder}data/")} == names, 60, "what is named is there, alone")


def test_the_history_makes_sense(cluster, load, s3):
    truth = load.check(cluster.nodes[0])
    for node in cluster.nodes:
        load.check_again(node, truth)
    print(load.summary(truth))
    cluster.manifest(STREAM).check()
    check_puts(s3, cluster.nodes[0].stream_id(STREAM))
    for node in cluster.nodes:
        assert node.counter("native_panics_total") == 0
        assert node.counter("manifests_pending") == 0
