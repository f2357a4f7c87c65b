"""What is in S3 stays what it is while the plugin does not work on the node: a wrong setting, no bucket, a library that does
not load, disabled, replaced by another version. Anyone who needs it waits; nobody is given what is left of the local log
instead, no stored offset is dropped, and everybody beside them notices nothing."""

import pathlib
import shutil

import pytest

from stream_s3_e2e import builds
from stream_s3_e2e.amqp10 import decode
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import HEADER, check_body, fixed
from stream_s3_e2e.streamproto import FIRST, NEXT, at_offset
from stream_s3_e2e.tiered import PLUGIN, TieredBroker
from stream_s3_e2e.wait import wait_until

HISTORY, BESIDE = "history", "beside"
SIZE = fixed(20_000)
SEGMENT = 1_000_000
COUNT = 400
STORED = 17
# More than a segment.
MORE = 100


class Node(TieredBroker):
    """A node that runs the archive, and one stream of it: how many records have been published.

    Stored offsets take places in the log, so from the first one on a record's offset is above its number.
    """

    def __init__(self, run_dir, s3, name):
        self.settings = {"fragment_size": 500_000, "persist_interval_ms": 100}
        super().__init__(run_dir, s3, name=name, **self.settings)
        self.folder = pathlib.Path(run_dir) / f"{name}-archive"
        self.folder.mkdir(parents=True)
        self.env["STREAM_S3_PLUGIN_DIR"] = str(self.folder)
        self.install(builds.archive())
        self.published = 0

    def install(self, archive):
        """Puts this archive where the one before was."""
        shutil.copy(archive, self.folder / builds.archive().name)

    def configure(self, **settings):
        """Takes effect with the next start."""
        lines = self.s3.conf(**{**self.settings, **settings})
        self.conf = {key: value for key, value in lines.items() if value is not None}

    def more(self, count=MORE):
        """Publishes to the stream with a history."""
        publish(self, HISTORY, count, SIZE, first=self.published, batch=5, window=50)
        self.published += count

    def floor(self):
        """Where the local log of the stream begins."""
        return self.segments(HISTORY)[0][0]

    def stored(self):
        """The offset that a consumer has stored."""
        with self.client() as client:
            return client.query_offset(HISTORY, "app")

    def mark(self):
        """Errors and crash reports from here on are what `new_errors` gives."""
        self.marked = len(self.errors())

    def new_errors(self):
        """Without the one line that says of a consumer that it waits."""
        lines = [line for line in self.errors()[self.marked :] if "waits until the plugin is on again" not in line]
        return [line for line in lines if "error" in line.lower() or "crash" in line.lower()]


@pytest.fixture(scope="module")
def node(run_dir, s3):
    node = Node(run_dir, s3, "inert1")
    with node:
        with node.client() as client:
            client.create(HISTORY, stream_max_segment_size_bytes=SEGMENT)
            client.create(BESIDE)
        node.more(COUNT)
        with node.client() as client:
            client.store_offset(HISTORY, "app", STORED)
            assert wait_until(lambda: client.query_offset(HISTORY, "app"), 30, "stored") == STORED
        settled(node)
        assert node.stored() == STORED
        yield node


def settled(node):
    """Everything is durable, and the past is only in S3."""
    with node.client() as client:
        end = client.stats(HISTORY)["committed_chunk_id"] + 1
    node.flush_tier(HISTORY, end)
    node.wait_trimmed(HISTORY)
    assert node.floor() > STORED


class Follow:
    """Whose records follow one another, byte for byte; from number `first`, or from the one that comes first."""

    def __init__(self, first=None):
        self.next = first

    def take(self, chunk, from_offset=0):
        chunk.check_crc()
        for offset, message in chunk.messages():
            if offset >= from_offset:
                body = bytes(decode(message))
                number = HEADER.unpack_from(body)[2]
                assert self.next in (None, number), f"record {number} comes where {self.next} should"
                check_body(body, number, SIZE(number))
                self.next = number + 1

    def read(self, subscription, until, from_offset=0, seconds=60):
        """Up to record `until` - 1."""
        while self.next is None or self.next < until:
            chunk = subscription.next_chunk(seconds)
            assert chunk is not None, f"nothing comes at record {self.next}"
            self.take(chunk, from_offset)
        return self


def whole(node, spec=FIRST):
    """From there on, everything is as it was published."""
    offset = spec[1] if spec[0] == "offset" else 0
    with node.client() as client:
        Follow(offset).read(client.subscribe(HISTORY, spec, credit=20), node.published, offset)


class Beside:
    """A connection that publishes, and consumes the tail of another stream, and one in history: is that all that it is."""

    def __init__(self, node, spec=NEXT):
        self.client = node.client()
        self.node = node
        self.tail = self.client.subscribe(BESIDE, spec, subscription_id=1, credit=100)
        self.history = None

    def attach(self, spec):
        self.history = self.client.subscribe(HISTORY, spec, subscription_id=2, credit=100)
        return self

    def works(self):
        """A record goes in and comes out."""
        publish(self.node, BESIDE, 1, fixed(100), client=self.client)
        assert self.tail.next_chunk(30) is not None, "the tail continues"
        assert not self.client.closed and not self.client.metadata_updates

    def waits(self, seconds=3):
        """The consumer in history is given nothing."""
        assert self.history.next_chunk(seconds) is None, "it waits"

    def reads(self, from_offset=0, first=None):
        """What the consumer in history gets, up to the end, is what was published."""
        Follow(first).read(self.history, self.node.published, from_offset)
        return self


def broken_library(node):
    builds.with_broken_library(node.folder / builds.archive().name)


WRONG = {
    "setting": (lambda node: node.configure(fragment_size="1"), "invalid_configuration"),
    "bucket": (lambda node: node.configure(bucket=None), "no_bucket"),
    "library": (broken_library, "native_library"),
}


@pytest.fixture(params=WRONG)
def inert(request, node):
    """The node with one thing wrong; mended afterwards."""
    wrong, reason = WRONG[request.param]
    settled(node)
    node.stop()
    wrong(node)
    node.start()
    node.wait_leader(HISTORY)
    node.mark()
    yield reason
    node.install(builds.archive())
    node.configure()
    node.restart()
    node.wait_leader(HISTORY)
    settled(node)
    assert node.node_status()["mode"] == "active"
    assert node.stored() == STORED
    whole(node, at_offset(STORED))
    whole(node)


def test_an_inert_node_protects_what_is_in_s3(node, s3, inert):
    status = node.node_status()
    assert (status["mode"], status["inert_reason"], status["osiris_attached"]) == ("inert", inert, True)
    wait_until(lambda: node.node_status()["protected_streams"] >= 1, 30, "the streams are known")
    status = node.node_status()
    assert "protected" in status["inert_meaning"] and status["inert_advice"]
    assert "restart" in node.streams("stream_s3_status") or inert != "invalid_configuration"
    assert node.counter("active") == 0 and node.counter("protected_streams") == status["protected_streams"]
    objects, segments = s3.objects(), node.segments(HISTORY)
    # What is local is served, and stock's own work continues.
    beside = Beside(node)
    beside.works()
    node.more()
    beside.attach(at_offset(node.floor() + 1)).reads(node.floor() + 1)
    beside.works()
    # A snapshot of the stored offsets was written with each new segment, and nothing is trimmed.
    after = node.segments(HISTORY)
    assert len(after) > len(segments) and after[0][0] == segments[0][0]
    assert node.stored() == STORED
    assert s3.objects() == objects
    assert node.new_errors() == []


def test_a_consumer_of_history_waits_on_an_inert_node(node, inert):
    """Depends on readers whose place is unknown (a third tier) to wait for it."""
    beside = Beside(node)
    beside.attach(at_offset(STORED))
    beside.works()
    beside.waits()
    again = Beside(node).attach(FIRST)
    again.waits()
    beside.works()
    assert not again.client.closed
    assert node.new_errors() == []


def test_disabling_keeps_stored_offsets_and_says_what_it_hides(node):
    settled(node)
    floor, pid = node.floor(), node.pid
    preview = node.streams("stream_s3_disable_preview")
    assert f"{HISTORY} in vhost /: {floor} records, offsets 0 to {floor - 1}" in preview
    node.mark()
    beside = Beside(node)
    beside.attach(at_offset(STORED))
    first = beside.history.next_chunk(30)
    assert first.chunk_id <= STORED
    before = len(node.segments(HISTORY))
    node.plugins("disable", PLUGIN)
    said = [line for line in node.log().splitlines() if "stream_s3: disabled on this node" in line]
    assert len(said) == 1 and f"{HISTORY} in vhost /: {floor} records, offsets 0 to {floor - 1}" in said[0]
    beside.works()
    node.more()
    assert len(node.segments(HISTORY)) > before
    assert node.stored() == STORED
    # Hidden: anyone who comes now is given what is local, as without the plugin.
    with node.client() as client:
        assert client.subscribe(HISTORY, FIRST, credit=1).next_chunk(10).chunk_id >= floor
    beside.works()
    node.plugins("enable", PLUGIN)
    assert node.stored() == STORED
    beside.works()
    node.more()
    assert node.stored() == STORED
    settled(node)
    assert node.pid == pid and node.new_errors() == []
    whole(node, at_offset(STORED))


@pytest.mark.parametrize("where", ["history", "tail"])
def test_consumers_that_are_there_live_through_disable_and_enable(node, where):
    settled(node)
    node.mark()
    beside = Beside(node)
    spec = FIRST if where == "history" else NEXT
    beside.history = beside.client.subscribe(HISTORY, spec, subscription_id=2, credit=1)
    follow = Follow(0 if where == "history" else node.published)
    if where == "tail":
        node.more(5)
    follow.read(beside.history, follow.next + 5)
    node.plugins("disable", PLUGIN)
    beside.works()
    if where == "tail":
        # A stock reader from here on.
        node.more()
        beside.history.credit(200)
        follow.read(beside.history, node.published)
    else:
        # What is on the way may come; then nothing, and certainly nothing that does not follow.
        while (chunk := beside.history.next_chunk(2)) is not None:
            follow.take(chunk)
        assert follow.next < COUNT // 2
    node.plugins("enable", PLUGIN)
    beside.works()
    node.more()
    beside.history.credit(200)
    follow.read(beside.history, node.published)
    assert not beside.client.closed
    assert node.new_errors() == []


# Wrappers of another version: only a restart brings those of this one.
OTHER_HOOKS = ("rabbitmq_stream_s3_host_forms.erl", r"-define\(VERSION, \d+\)", "-define(VERSION, 99)")
# Readers of another shape.
OTHER_READERS = (
    ("rabbitmq_stream_s3_reader.hrl", r"-define\(READER_VERSION, \d+\)", "-define(READER_VERSION, 99)"),
    ("rabbitmq_stream_s3_reader.hrl", r"(version = \?READER_VERSION :: pos_integer\(\))", r"\1, grown :: term()"),
)


def replaced(node, archive, meanwhile):
    """Disabled, swapped, enabled."""
    node.plugins("disable", PLUGIN)
    meanwhile()
    node.install(archive)
    node.plugins("enable", PLUGIN)


def test_hooks_of_another_version_protect(node, tmp_path):
    other = builds.recompiled(tmp_path / "other.ez", tmp_path, OTHER_HOOKS)
    settled(node)
    node.mark()
    beside = Beside(node).attach(FIRST)
    local = Beside(node)
    replaced(node, other, beside.works)
    status = node.node_status()
    assert (status["mode"], status["inert_reason"], status["osiris_attached"]) == ("inert", "restart_needed", True)
    wait_until(lambda: node.node_status()["protected_streams"] >= 1, 30, "the streams are known")
    segments = node.segments(HISTORY)
    node.more()
    beside.works()
    local.attach(at_offset(node.floor() + 1)).reads(node.floor() + 1)
    local.works()
    assert node.segments(HISTORY)[0][0] == segments[0][0] and len(node.segments(HISTORY)) > len(segments)
    assert node.stored() == STORED
    assert node.new_errors() == []
    node.restart()
    node.wait_leader(HISTORY)
    settled(node)
    assert node.node_status()["mode"] == "active"
    whole(node)
    assert node.stored() == STORED
    node.stop()
    node.install(builds.archive())
    node.start()
    node.wait_leader(HISTORY)
    settled(node)


def test_readers_of_another_version_are_carried_over(node, tmp_path):
    other = builds.recompiled(tmp_path / "other.ez", tmp_path, *OTHER_READERS)
    settled(node)
    node.mark()
    history, tail = Beside(node), Beside(node)
    history.history = history.client.subscribe(HISTORY, FIRST, subscription_id=2, credit=1)
    follow = Follow(0).read(history.history, 5)
    tail.attach(NEXT)
    first = node.published
    replaced(node, other, lambda: (node.more(), history.works(), tail.works()))
    assert node.node_status()["mode"] == "active"
    node.more()
    history.history.credit(500)
    follow.read(history.history, node.published)
    tail_follow = Follow(first).read(tail.history, node.published)
    history.works()
    assert node.new_errors() == []
    assert node.stored() == STORED
    # And back.
    replaced(node, builds.archive(), history.works)
    node.more()
    tail_follow.read(tail.history, node.published)
    assert node.new_errors() == []


def test_the_library_of_another_version_is_loaded_at_once(node, tmp_path):
    """It lies at another path, so it is another copy, and does not know which names the first copy has in this node."""
    other = builds.versioned(tmp_path / f"{PLUGIN}-9.9.9.ez", builds.archive(), "9.9.9")
    # Both copies are loaded for the first time.
    node.restart()
    node.wait_leader(HISTORY)
    settled(node)
    node.mark()
    begun = len(node.log())
    beside = Beside(node).attach(FIRST)
    node.plugins("disable", PLUGIN)
    (node.folder / builds.archive().name).unlink()
    shutil.copy(other, node.folder)
    node.plugins("enable", PLUGIN)
    assert node.versions()[PLUGIN] == "9.9.9"
    assert node.node_status()["mode"] == "active"
    assert "on_load function" not in node.log()[begun:]
    beside.works()
    beside.reads()
    assert node.stored() == STORED and node.new_errors() == []
    node.stop()
    (node.folder / other.name).unlink()
    node.install(builds.archive())
    node.start()
    node.wait_leader(HISTORY)
    assert node.versions()[PLUGIN] == builds.archive().stem.rsplit("-", 1)[1]
