"""Three stock nodes: streams get the members that they should have, and lose those whose nodes are gone; only if asked to.

One story, told in order. The interval is an hour: whatever happens here, a trigger has made it happen.
"""

import re

import pytest

from stream_s3_e2e.consume import consume
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

SIZE = fixed(20_000)
COUNT = 400
RECONCILER = "rabbitmq_stream_s3_membership_reconciliation"
ENABLED = {
    "continuous_membership_reconciliation__enabled": "true",
    "continuous_membership_reconciliation__auto_remove": "true",
    "continuous_membership_reconciliation__trigger_interval": "1s",
    "continuous_membership_reconciliation__interval": "1h",
}

TIER = {"fragment_size": 1_000_000, "persist_interval_ms": 100}


@pytest.fixture(scope="module")
def nodes(run_dir, s3):
    nodes = [TieredBroker(run_dir, s3, f"rabbit{index + 1}", **TIER) for index in range(3)]
    for index, node in enumerate(nodes):
        node.index = index
        node.start()
    for node in nodes[1:]:
        node.join(nodes[0])
    return nodes


def members(node, stream):
    """The nodes on which the stream's members run, as the coordinator has it."""
    text = node.rpc(
        f'begin {{ok, Q}} = rabbit_amqqueue:lookup(<<"{stream}">>, <<"/">>),'
        " {ok, M} = rabbit_stream_coordinator:members(maps:get(name, amqqueue:get_type_state(Q))),"
        " [N || {N, {P, _}} <- maps:to_list(M), is_pid(P)] end."
    )
    return set(re.findall(r"rabbit\d", text))


def wait_members(node, stream, expected, seconds=60):
    def same():
        found = members(node, stream)
        assert len(found) == expected if isinstance(expected, int) else found == expected, found
        return True

    wait_until(same, seconds, f"{stream}: members {expected}")


def leader(nodes, stream):
    """The node of the writer."""
    port = nodes[0].wait_leader(stream)[1]
    return next(node for node in nodes if node.stream_port == port)


def counted(nodes, name):
    return sum(node.counter(f"membership_{name}") for node in nodes)


def create(node, stream, size):
    with node.client() as client:
        client.create(stream, stream_max_segment_size_bytes=2_000_000, initial_cluster_size=size)
    publish(node, stream, COUNT, SIZE)


def target(node, stream, size):
    definition = f'{{"stream-target-group-size":{size}}}'
    node.ctl("set_policy", stream, f"^{stream}$", definition, "--apply-to", "streams")


def test_off_by_default(nodes):
    create(nodes[0], "grown", 2)
    target(nodes[0], "grown", 3)
    for node in nodes:
        assert node.rpc(f"whereis({RECONCILER}).") == "undefined"
        assert f"{{{RECONCILER}, undefined" in " ".join(
            node.rpc("supervisor:which_children(rabbitmq_stream_s3_sup).").replace(",", ", ").split()
        )
        assert node.counter("membership_rounds") == 0
    assert len(members(nodes[0], "grown")) == 2


def test_a_stream_grows_to_its_target_when_it_is_enabled(nodes, s3):
    for node in nodes:
        node.stop()
        node.conf = s3.conf(**TIER, **ENABLED)
        node.start()
    wait_members(nodes[0], "grown", 3)
    assert counted(nodes, "replicas_added") == 1
    leader(nodes, "grown").flush_tier("grown", COUNT)
    for node in nodes:
        node.wait_leader("grown")
        node.wait_persisted("grown", COUNT, 60)
        verify(consume(node, "grown", COUNT), 0, COUNT, SIZE)


def test_a_policy_is_a_trigger_and_each_step_comes_after_the_one_before(nodes):
    before = counted(nodes, "replicas_added")
    create(nodes[0], "later", 1)
    assert len(members(nodes[0], "later")) == 1
    target(nodes[0], "later", 3)
    wait_members(nodes[0], "later", 3)
    assert counted(nodes, "replicas_added") == before + 2
    verify(consume(nodes[1], "later", COUNT), 0, COUNT, SIZE)


def test_a_writer_that_comes_is_a_trigger(nodes):
    """Nobody else has a reason to look again: the node that had the writer never got to it, the others have looked."""
    before, others = counted(nodes[1:], "replicas_added"), nodes[1:]
    create(nodes[0], "moves", 2)
    (other,) = members(nodes[0], "moves") - {"rabbit1"}
    assert leader(nodes, "moves") is nodes[0]
    assert nodes[0].rpc(f"sys:suspend({RECONCILER}).") == "ok"
    looked = [node.counter("membership_rounds") for node in others]
    target(nodes[0], "moves", 3)
    for node, rounds in zip(others, looked):
        wait_until(lambda n=node, r=rounds: n.counter("membership_rounds") > r, 60, f"{node.name} has looked")
    assert len(members(nodes[0], "moves")) == 2

    def moved():
        nodes[0].rpc(
            'rabbit_stream_queue:restart_stream(<<"/">>, <<"moves">>,'
            f" #{{preferred_leader_node => '{other}@localhost'}})."
        )
        return leader(nodes, "moves") is not nodes[0]

    wait_until(moved, 60, "the writer moves", every=0.5)
    wait_members(nodes[0], "moves", 3)
    assert counted(others, "replicas_added") == before + 1
    assert nodes[0].rpc(f"sys:resume({RECONCILER}).") == "ok"
    with nodes[0].client() as client:
        client.delete("moves")


def test_a_policy_that_makes_no_sense_is_refused(nodes):
    with pytest.raises(AssertionError, match="number from 1 to 255"):
        target(nodes[0], "grown", 0)


def test_a_node_that_comes_back_is_a_trigger(nodes):
    before = counted(nodes[:2], "replicas_added")
    nodes[2].stop()
    create(nodes[0], "waits", 2)
    target(nodes[0], "waits", 3)
    wait_until(lambda: any("wait for a change: [node_down]" in node.log() for node in nodes[:2]), 60, "it waits")
    assert members(nodes[0], "waits") == {"rabbit1", "rabbit2"}
    nodes[2].start()
    wait_members(nodes[0], "waits", 3)
    assert counted(nodes[:2], "replicas_added") == before + 1


def test_a_minority_changes_nothing(nodes):
    """Alone, a node cannot know whether the others are gone."""
    alone = leader(nodes, "grown")
    others = [node for node in nodes if node is not alone]
    changes = [counted([alone], name) for name in ("replicas_added", "replicas_removed", "changes_refused")]
    said = alone.log().count("no_majority")
    for node in others:
        node.kill()
    wait_until(lambda: alone.log().count("no_majority") > said, 90, "it has looked, and does not know")
    assert changes == [counted([alone], name) for name in ("replicas_added", "replicas_removed", "changes_refused")]
    for node in others:
        node.start()
    for stream in ("grown", "later", "waits"):
        wait_members(nodes[0], stream, 3)
        nodes[0].wait_leader(stream)


def test_members_on_a_forgotten_node_are_removed(nodes):
    gone, stay = nodes[2], nodes[:2]
    gone.stop()
    # Only the cluster forgets: the command of the same name removes replicas itself.
    assert stay[0].rpc(f"rabbit_db_cluster:forget_member('{gone.node}', false).") == "ok"
    for stream in ("grown", "later", "waits"):
        wait_until(lambda s=stream: "rabbit3" not in recorded(stay[0], s), 90, f"{stream}: the member is removed")
        wait_members(stay[0], stream, {"rabbit1", "rabbit2"})
        stay[0].wait_leader(stream, 60)
        publish(stay[0], stream, COUNT, SIZE, first=COUNT)
        verify(consume(stay[1], stream, 2 * COUNT), 0, 2 * COUNT, SIZE)
    assert counted(stay, "replicas_removed") == 3


def recorded(node, stream):
    """The members that the queue's record has."""
    return node.rpc(
        f'begin {{ok, Q}} = rabbit_amqqueue:lookup(<<"{stream}">>, <<"/">>),'
        " maps:get(nodes, amqqueue:get_type_state(Q)) end."
    )


def test_nothing_is_left_over(nodes):
    for node in nodes[:2]:
        assert node.counter("native_panics") == 0
        assert not [line for line in node.errors() if "stream_s3" in line]
