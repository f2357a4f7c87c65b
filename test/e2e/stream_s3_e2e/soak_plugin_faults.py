"""Faults of a soak in the plugin's own life: inert, disabled, another version, its engine closed.

Each does it under load, sees that it has taken effect, and ends it itself.
"""

import tempfile

from . import builds
from .tiered import PLUGIN
from .wait import wait_until

# Readers of another shape: a live upgrade has to carry them over.
OTHER_READERS = (
    ("rabbitmq_stream_s3_reader.hrl", r"-define\(READER_VERSION, \d+\)", "-define(READER_VERSION, 99)"),
    ("rabbitmq_stream_s3_reader.hrl", r"(version = \?READER_VERSION :: pos_integer\(\))", r"\1, grown :: term()"),
)
OTHER_VERSION = "9.9.9"
# Fewer in a row than the supervisor bears.
CLOSED_IN_A_ROW = 3


class PluginFaults:
    """See the module."""

    def __init__(self, world):
        self.world, self.cluster = world, world.cluster
        self._work = tempfile.TemporaryDirectory(prefix="soak-builds-")
        self._other = self._broken = None

    def inert_by_a_setting(self):
        """A restart with a setting that is out of bounds, and one with it mended."""
        self._inert("invalid_configuration", lambda i: i.configure(fragment_size="1"))

    def inert_without_a_bucket(self):
        """A restart without a bucket, and one with it."""
        self._inert("no_bucket", lambda i: i.configure(bucket=None))

    def inert_by_the_library(self):
        """A restart with a native library that does not load, and one with one that does."""
        self._inert("native_library", lambda i: i.install(self._broken_archive()))

    def inert_writer(self):
        """A node without the plugin's work becomes the writer; it is mended, and another one writes again."""
        self._inert("invalid_configuration", lambda i: i.configure(fragment_size="1"), write=True)

    def disable_and_enable(self):
        """Off and on again on a node that runs; who is attached stays."""
        self._disabled(self.world.any_node(), lambda node: self.world.linger(4))

    def disable_and_enable_the_writer(self):
        """The same where the stream is written."""
        self._disabled(self.world.leader(), lambda node: self.world.linger(4))

    def swap_plugin(self):
        """Another version, on one node after the other, without a restart; at the next time back again."""
        archive = self._next_archive()
        for node in self.cluster.nodes:
            self._disabled(node, lambda n: self.world.installations[n.name].install(archive))
            self._runs(node, archive)

    def swap_plugin_by_restarts(self):
        """The same with a restart of each node."""
        archive = self._next_archive()
        for node in self.cluster.nodes:
            self.world.count_lives()
            node.stop()
            self.world.installations[node.name].install(archive)
            node.start()
            node.wait_leader(self.world.stream, 60)
            self._runs(node, archive)
            self.world.settle()

    def close_engine(self):
        """The engine's owner dies under load, on every node at about the same time."""
        for node in self.cluster.nodes:
            self.world.read_history(node)
            self.world.open_engine_anew(node)
            self.world.effects["engines closed"] += 1

    def close_engine_often(self):
        """The same on one node, again and again."""
        node = self.world.any_node()
        for _ in range(CLOSED_IN_A_ROW):
            self.world.read_history(node)
            self.world.open_engine_anew(node)
            self.world.effects["engines closed"] += 1
            self.world.linger(3)

    NEW_FAULTS = (
        inert_by_a_setting, inert_without_a_bucket, inert_by_the_library, inert_writer, disable_and_enable,
        disable_and_enable_the_writer, swap_plugin, swap_plugin_by_restarts, close_engine, close_engine_often,
    )

    # -- the parts of them --------------------------------------------------------------------------

    def _inert(self, reason, spoil, write=False):
        node, stream = self.world.any_node(), self.world.stream
        installed = self.world.installations[node.name]
        archive = next(installed.folder.glob("*.ez")).read_bytes(), next(installed.folder.glob("*.ez")).name
        self.world.count_lives()
        node.stop()
        spoil(installed)
        node.start()
        node.wait_leader(stream, 60)
        status = self.world.status(node)
        assert (status["mode"], status["inert_reason"], status["osiris_attached"]) == ("inert", reason, "true"), status
        protected = lambda: int(self.world.status(node)["protected_streams"]) >= len(self.world.loads)  # noqa: E731
        wait_until(protected, 60, f"{node.name}: the streams are protected")
        self.world.effects[f"inert: {reason}"] += 1
        if write and self.cluster.wait_leader(stream) is not node:
            self.cluster.move_leader(stream, node)
        self.world.load.wait_confirmed(30)
        self.world.linger(6)
        node.stop()
        for left in installed.folder.glob("*.ez"):
            left.unlink()
        (installed.folder / archive[1]).write_bytes(archive[0])
        installed.configure()
        node.start()
        node.wait_leader(stream, 60)
        assert self.world.status(node)["mode"] == "active", self.world.status(node)

    def _disabled(self, node, meanwhile):
        """Who attached while it is off would be given the local tier alone, as is said of it: so nobody does."""
        pid = node.pid
        self.world.count_lives()
        with self.world.nobody_attaches(node):
            self.world.plugin(node, on=False)
            self.world.load.wait_confirmed(20)
            meanwhile(node)
            self.world.plugin(node, on=True)
            status = self.world.status(node)
            assert status["mode"] == "active", status
            for load in self.world.loads:
                wait_until(lambda s=load.stream: node.range(s), 60, f"{node.name}: the manifest of {load.stream}")
        assert node.pid == pid, "the node was restarted"
        self.world.effects["disabled and enabled"] += 1

    def _next_archive(self):
        here = next(self.world.installations[self.cluster.nodes[0].name].folder.glob("*.ez"))
        return builds.archive() if OTHER_VERSION in here.name else self._other_archive()

    def _runs(self, node, archive):
        version = node.versions()[PLUGIN]
        assert version in archive.name, f"{node.name} runs {version}, not {archive.name}"
        self.world.effects[f"runs {version}"] += 1

    def _other_archive(self):
        if self._other is None:
            work = self._work_folder("other")
            shaped = builds.recompiled(work / "shaped.ez", work, *OTHER_READERS)
            self._other = builds.versioned(work / f"{PLUGIN}-{OTHER_VERSION}.ez", shaped, OTHER_VERSION)
        return self._other

    def _broken_archive(self):
        if self._broken is None:
            self._broken = builds.with_broken_library(self._work_folder("broken") / builds.archive().name)
        return self._broken

    def _work_folder(self, name):
        folder = builds.pathlib.Path(self._work.name) / name
        folder.mkdir()
        return folder
