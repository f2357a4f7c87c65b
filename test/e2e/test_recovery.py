"""All nodes and the metadata store are lost: every stream comes back from the bucket, and its history with it."""

import json

import pytest

from stream_s3_e2e.broker import CommandError
from stream_s3_e2e.cluster import Cluster
from stream_s3_e2e.consume import consume, consume_amqp10, consume_amqp091
from stream_s3_e2e.mix import Mix
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

MIX = Mix(0.02)
SIZE = fixed(20_000)
COUNT = 300
MORE = 100
SETTINGS = {"fragment_size": 1_000_000, "persist_interval_ms": 100}
ARGUMENTS = {"stream_max_segment_size_bytes": 2_000_000}
# Its name ends as that of the default one, so that folders of its streams are found in the same way.
VHOST = "the team/"
COUNTS = {"mixed": MIX.count, "plain": COUNT, "elsewhere": COUNT}
VHOSTS = {"mixed": "/", "plain": "/", "elsewhere": VHOST}


def recover(node, *words):
    """`rabbitmq-streams stream_s3_recover ...`: results by queue name."""
    results = json.loads(node.streams("stream_s3_recover", *words, "--formatter", "json"))
    return {result["queue"]: result for result in results}


def bucket(s3):
    return {entry["key"]: entry["size"] for entry in s3.objects()}


def arguments_of(node, vhost, queue):
    return node.rpc(
        f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost}">>, queue, <<"{queue}">>)),'
        " lists:sort(amqqueue:get_arguments(Q))."
    )


def fill(node):
    """Three streams: every kind of record, one with arguments, one in another virtual host. All is durable."""
    node.ctl("add_vhost", VHOST)
    node.ctl("set_permissions", "-p", VHOST, "guest", ".*", ".*", ".*")
    with node.client() as client:
        client.create("mixed", **ARGUMENTS)
        client.create("plain", **ARGUMENTS, max_length_bytes=1_000_000_000, max_age="7D")
    with node.client(vhost=VHOST) as client:
        client.create("elsewhere", **ARGUMENTS)
        publish(node, "elsewhere", COUNT, SIZE, client=client)
    MIX.publish(node, "mixed")
    publish(node, "plain", COUNT, SIZE)
    for name, count in COUNTS.items():
        node.flush_tier(name, count)


def read_everything(node, stream, until=None, tracked=False):
    """Every record over three protocols, and most of it from S3."""
    served = node.counter("chunks_delivered_total", tier="remote")
    sizes, until = (MIX if stream == "mixed" else SIZE), until or COUNTS.get(stream, COUNT)
    wanted = MIX.visible_to_amqp if stream == "mixed" else None
    verify(consume(node, stream, until), 0, until, sizes, tracked=tracked)
    verify(consume_amqp091(node, stream, until), 0, until, sizes, wanted=wanted, tracked=tracked)
    verify(consume_amqp10(node, stream, until), 0, until, sizes, wanted=wanted, tracked=tracked)
    assert node.counter("chunks_delivered_total", tier="remote") > served


class Lost:
    """A node that is empty, and what the one before it had."""

    def __init__(self, node, objects, arguments, ids):
        self.node, self.objects, self.arguments, self.ids = node, objects, arguments, ids


@pytest.fixture(scope="module")
def lost(run_dir, s3):
    before = TieredBroker(run_dir, s3, **SETTINGS)
    before.start()
    fill(before)
    arguments = {name: arguments_of(before, vhost, name) for name, vhost in VHOSTS.items()}
    ids = {name: before.stream_id(name) for name in COUNTS}
    before.wipe()
    objects = bucket(s3)
    with TieredBroker(run_dir, s3, **SETTINGS) as node:
        yield Lost(node, objects, arguments, ids)


def test_an_empty_metadata_store_deletes_nothing(lost, s3):
    """Not even when a stream of the new cluster is deleted, which sweeps the bucket for that one."""
    with lost.node.client() as client:
        client.create("new", **ARGUMENTS)
    publish(lost.node, "new", COUNT, SIZE)
    lost.node.flush_tier("new", COUNT)
    with lost.node.client() as client:
        client.delete("new")
    wait_until(lambda: not s3.keys("__new_"), 60, "the objects of the new stream are deleted")
    assert bucket(s3) == lost.objects


def test_list_and_plan_read_only(lost, s3):
    before = s3.last_id()
    for what in ("list", "plan"):
        found = recover(lost.node, what)
        assert {name: result["verdict"] for name, result in found.items()} == dict.fromkeys(COUNTS, "recoverable")
        for name, count in COUNTS.items():
            assert found[name]["stream_id"] == lost.ids[name]
            assert found[name]["vhost"] == VHOSTS[name]
            assert (found[name]["first_offset"], found[name]["next_offset"]) == (0, count)
    for name in COUNTS:
        assert found[name]["objects"]["named"] > 1
        assert found[name]["objects"]["affected"] == []
    methods = {entry["method"] for entry in s3.log(after=before)}
    assert methods <= {"GET", "HEAD"}
    assert bucket(s3) == lost.objects
    text = lost.node.streams("stream_s3_recover", "list")
    assert "3 streams: 3 recoverable" in text
    assert f"plain in /: recoverable, offsets [0, {COUNT})" in text
    assert lost.node.rpc("length(rabbit_amqqueue:list()).") == "0"


def test_what_is_damaged_is_said_before(lost, s3):
    key = s3.keys(f"{lost.ids['plain']}/data/")[1]
    data = s3.get(key)
    s3.remove(key)
    plain = recover(lost.node, "plan", "--queue", "plain")["plain"]
    assert [entry["key"] for entry in plain["objects"]["affected"]] == [key]
    first = plain["objects"]["affected"][0]["first_offset"]
    assert f"1 objects are missing or damaged, the first has offsets {first} to" in plain["text"]
    s3.put(key, data)


def test_a_stream_that_fails_costs_nobody_else_and_is_completed(lost, s3):
    s3.fault(name="no root", operation="PutObject", key=lost.ids["plain"], status=403)
    with pytest.raises(CommandError) as refused:
        lost.node.streams("stream_s3_recover", "run")
    s3.clear_faults()
    assert "exit 69" in str(refused.value)
    assert "3 streams: 1 failed, 2 recovered" in str(refused.value)
    assert "plain in /: failed" in str(refused.value)
    assert {name: result["verdict"] for name, result in recover(lost.node, "plan").items()} == {
        "elsewhere": "in_use",
        "mixed": "in_use",
        "plain": "interrupted",
    }
    assert bucket(s3).items() >= lost.objects.items()
    read_everything(lost.node, "mixed")
    assert recover(lost.node, "run", "--queue", "plain")["plain"]["verdict"] == "recovered"
    for name, vhost in VHOSTS.items():
        assert lost.node.stream_id(name) == lost.ids[name]
        assert arguments_of(lost.node, vhost, name) == lost.arguments[name]


def test_history_is_read_and_continues(lost, s3):
    node = lost.node
    read_everything(node, "plain")
    # The new log begins with a chunk of osiris' own kind, which takes one offset.
    publish(node, "plain", MORE, SIZE, first=COUNT)
    node.flush_tier("plain", COUNT + 1 + MORE)
    read_everything(node, "plain", COUNT + 1 + MORE, tracked=True)
    assert bucket(s3).items() >= {k: v for k, v in lost.objects.items() if k.endswith(".fragment")}.items()
    node.restart()
    read_everything(node, "plain", COUNT + 1 + MORE, tracked=True)
    # Users and their permissions are not in the bucket: definitions bring them.
    node.ctl("set_permissions", "-p", VHOST, "guest", ".*", ".*", ".*")
    with node.client(vhost=VHOST) as client:
        verify(consume(node, "elsewhere", COUNT, client=client), 0, COUNT, SIZE)


def test_a_second_run_does_nothing(lost, s3):
    before = bucket(s3)
    assert {result["verdict"] for result in recover(lost.node, "run").values()} == {"in_use"}
    assert bucket(s3) == before


def test_a_recovered_stream_is_deleted_whole(lost, s3):
    with lost.node.client() as client:
        client.delete("plain")
    wait_until(lambda: not s3.keys(lost.ids["plain"]), 60, "its objects are deleted")
    assert s3.keys(lost.ids["mixed"])


def test_three_nodes(run_dir, s3):
    """Members on all nodes; also if the first writer ends before it has persisted anything."""
    with Cluster(run_dir / "before", s3, **SETTINGS) as before:
        before.create("replicated")
        leader = before.wait_leader("replicated")
        publish(leader, "replicated", COUNT, SIZE)
        leader.flush_tier("replicated", COUNT)
    for node in before.nodes:
        node.wipe()
    with Cluster(run_dir / "after", s3, **SETTINGS) as cluster:
        found = recover(cluster.nodes[1], "run", "--queue", "replicated")
        assert found["replicated"]["verdict"] == "recovered"
        cluster.wait_members("replicated")
        cluster.move_leader("replicated")
        leader = cluster.wait_leader("replicated")
        read_everything(leader, "replicated")
        publish(leader, "replicated", MORE, SIZE, first=COUNT)
        end = COUNT + MORE + 1
        leader.flush_tier("replicated", end)
        for node in cluster.nodes:
            node.wait_persisted("replicated", end)
            verify(consume(node, "replicated", end), 0, end, SIZE, tracked=True)
            # Whichever node is asked.
            streams = json.loads(node.streams("stream_s3_list", "--formatter", "json"))["streams"]
            row = next(row for row in streams if row["stream"] == "replicated")
            assert (row["verdict"], row["node"], row["persisted_next_offset"]) == ("ok", leader.node, end)
