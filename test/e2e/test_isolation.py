"""One stream that cannot be helped parks alone: 200 others upload on, and it is picked up when it is healed."""

import re

import pytest

from stream_s3_e2e.consume import consume
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

OTHERS = [f"other{number}" for number in range(200)]
REFUSED, KILLED = "refused", "killed"
SIZE = fixed(2_000)
ROUND = 20
FACTORY = "rabbitmq_stream_s3_replica_reader_sup"


class Node:
    """The broker, and how far its streams have got."""

    def __init__(self, broker):
        self.broker, self.count = broker, {stream: 0 for stream in [REFUSED, KILLED, *OTHERS]}

    def publish(self, streams):
        """One more round of records into each of the streams."""
        with self.broker.client() as client:
            for stream in streams:
                publish(self.broker, stream, ROUND, SIZE, first=self.count[stream], client=client)
                self.count[stream] += ROUND

    def wait_durable(self, streams):
        """All that was published there is durable."""

        def behind():
            # By way of a file: what a call prints has lines of eighty characters.
            path = self.broker.run_dir / "ends"
            self.broker.rpc(
                f'file:write_file("{path}", [io_lib:format("~ts ~b~n", [I, maps:get(next_offset, R)])'
                " || {I, #{} = R} <- ets:tab2list(rabbitmq_stream_s3_manifest_cache)])."
            )
            found = re.findall(r"^__(\w+)_\d+ (\d+)$", path.read_text(), re.M)
            ends = {name: int(end) for name, end in found}
            return [stream for stream in streams if ends.get(stream, 0) < self.count[stream]]

        def durable():
            late = behind()
            assert not late, f"{len(late)} streams are not durable: {late[:5]}"
            return True

        wait_until(durable, 120, "all streams durable", every=0.5)

    def lookup(self, stream):
        """An expression: the stream's replica reader."""
        return f'rabbitmq_stream_s3_registry:whereis_name({{<<"{self.broker.stream_id(stream)}">>, node()}})'

    def reader(self, stream):
        """The stream's replica reader, as text."""
        return self.broker.rpc(self.lookup(stream) + ".")


@pytest.fixture(scope="module")
def node(run_dir, s3):
    settings = dict(
        fragment_max_age="1s", persist_interval_ms=100, request_timeout="5s",
        # Nothing is picked up before the test says so.
        reconciliation_interval="1h",
    )
    with TieredBroker(run_dir, s3, **settings) as broker:
        node = Node(broker)
        with broker.client() as client:
            for stream in node.count:
                client.create(stream)
        node.publish(node.count)
        node.wait_durable(node.count)
        yield node


def supervisors(node):
    """Pid of the factory, and how many streams it has."""
    text = node.broker.rpc(f"{{whereis({FACTORY}), proplists:get_value(active, supervisor:count_children({FACTORY}))}}.")
    factory, active = text.strip("{}").split(",")
    return factory, int(active)


def test_a_stream_that_s3_refuses_stalls_alone(node, s3):
    broker = node.broker
    prefix = f"/{broker.stream_id(REFUSED)}/data/"
    s3.fault(name="refused", operation="PutObject", key=prefix, status=403, code="AccessDenied")
    before = supervisors(node)
    completed = broker.counter("fragments_uploaded_total")
    node.publish(node.count)
    node.wait_durable([KILLED, *OTHERS])
    assert broker.counter("fragments_uploaded_total") >= completed + len(OTHERS) + 1
    wait_until(lambda: broker.stream_status(REFUSED)["problem_kind"] == "transfer", 60, "the problem is shown")
    assert [rule for rule in s3.faults() if rule["name"] == "refused"][0]["hits"] > 0
    assert supervisors(node) == before, "nothing was restarted for it"
    s3.clear_faults()
    node.wait_durable([REFUSED])


def test_a_stream_whose_reader_keeps_dying_parks_alone_and_is_picked_up(node):
    broker = node.broker
    others = {stream: node.reader(stream) for stream in OTHERS[:5]}
    factory, active = supervisors(node)
    started = broker.counter("replica_reader_starts_total")
    stream_id = broker.stream_id(KILLED)
    # Beyond its budget: each reader as soon as it is there, until its supervisor has given up.
    gave_up = broker.rpc(
        f'begin Name = {{<<"{stream_id}">>, node()}}, First = rabbitmq_stream_s3_registry:whereis_name(Name),'
        " {dictionary, D} = process_info(First, dictionary), [Sup | _] = proplists:get_value('$ancestors', D),"
        " Ref = monitor(process, Sup),"
        " Kill = fun(Kill, Kills) ->"
        "   case rabbitmq_stream_s3_registry:whereis_name(Name) of"
        "     undefined -> receive {'DOWN', Ref, _, _, Reason} -> {Kills, Reason} after 20 -> Kill(Kill, Kills) end;"
        "     Pid -> M = monitor(process, Pid), exit(Pid, kill), receive {'DOWN', M, _, _, _} -> Kill(Kill, Kills + 1) end"
        "   end end,"
        " Kill(Kill, 0) end."
    )
    assert gave_up.replace(" ", "") == "{4,shutdown}", gave_up
    assert broker.counter("replica_reader_starts_total") == started + 3
    assert supervisors(node) == (factory, active - 1)
    assert node.reader(KILLED) == "undefined"
    node.publish(node.count)
    node.wait_durable([REFUSED, *OTHERS])
    assert {stream: node.reader(stream) for stream in others} == others, "another stream's reader was restarted"
    assert broker.range(KILLED)[1] == node.count[KILLED] - ROUND, "it has parked, and what was durable is so still"
    # What the timer sends each minute.
    broker.rpc("rabbitmq_stream_s3_reconciler ! tick.")
    node.wait_durable([KILLED])
    assert supervisors(node) == (factory, active)
    verify(consume(broker, KILLED, node.count[KILLED]), 0, node.count[KILLED], SIZE)


def test_a_damaged_root_parks_its_stream_and_the_others_upload_on(node, s3):
    broker = node.broker
    keys = s3.keys(f"{broker.stream_id(KILLED)}/metadata/root.")
    whole = {key: s3.get(key) for key in keys}
    for key, body in whole.items():
        s3.put(key, b"\0" * len(body))
    # It is read again only by a reader that starts.
    broker.rpc(f"exit({node.lookup(KILLED)}, kill).")
    wait_until(lambda: broker.stream_status(KILLED)["problem_kind"] == "manifest", 60, "the problem is shown")
    node.publish(node.count)
    node.wait_durable([REFUSED, *OTHERS])
    assert broker.stream_status(KILLED)["problem_kind"] == "manifest"
    for key, body in whole.items():
        s3.put(key, body)
    node.wait_durable([KILLED])
    verify(consume(broker, KILLED, node.count[KILLED]), 0, node.count[KILLED], SIZE)


def test_disabled_and_enabled_again_all_streams_go_on(node):
    broker = node.broker
    broker.plugins("disable", "rabbitmq_stream_s3")
    node.publish(node.count)
    broker.plugins("enable", "rabbitmq_stream_s3")
    node.wait_durable(node.count)
    assert supervisors(node)[1] == len(node.count)
    assert broker.counter("native_panics_total") == 0
