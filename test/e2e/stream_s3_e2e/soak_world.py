"""What the faults of a soak share: the cluster, its loads, chance, and what is done more than once.

Owns no fault and no judgement.
"""

import collections
import contextlib
import pathlib
import re
import time

from .builds import Installation
from .streamproto import at_offset
from .tiered import PLUGIN
from .wait import wait_until

# Counters of the nodes that the summary adds up over all lives of them.
COUNTERS = (
    'metadata_writes_total{result="ok"}',
    'metadata_writes_total{result="conflict"}',
    'metadata_writes_total{result="error"}',
    'recoveries_total{kind="local_log_ahead"}',
    'recoveries_total{kind="remote_tier_ahead"}',
    "logs_begun_at_durable_end_total",
    "replica_reader_starts_total",
    'remote_reader_bad_places_total{kind="lost"}',
    'remote_reader_bad_places_total{kind="corrupt"}',
    "manifests_resolved_total",
    "manifest_syncs_total",
    'manifest_edits_received_total{result="applied"}',
    'manifest_edits_received_total{result="unfitting"}',
    'manifest_edits_received_total{result="corrupt"}',
    'manifest_notifications_total{result="missed"}',
    'chunks_delivered_total{tier="remote"}',
    'request_failures_total{reason="bare_404"}',
    'request_failures_total{reason="not_found"}',
    'request_failures_total{reason="malformed"}',
    "read_cache_disk_errors_total",
    "native_panics_total",
)
# Records that a consumer which comes because of a fault reads at most.
BRIEF_RECORDS = 400


class World:
    """A cluster under load. `streams`: load by load."""

    def __init__(self, cluster, random, loads):
        self.cluster, self.random, self.loads = cluster, random, loads
        self.load = loads[0]
        for node in cluster.nodes:
            node.conf["stream_s3.read.cache_path"] = self.cache_path(node)
        self.installations = {node.name: Installation(node) for node in cluster.nodes}
        # How often a fault was seen to take effect, by what showed it.
        self.effects = collections.Counter()
        self.totals, self._last = collections.Counter(), {}

    @property
    def stream(self):
        """The stream that most faults are about."""
        return self.load.stream

    def linger(self, most=12):
        """A fault lasts as long as the seed says: the one thing here that is about time."""
        time.sleep(self.random.uniform(1, most))

    @staticmethod
    def cache_path(node):
        """The folder of the node's cache on disk."""
        return pathlib.Path(node.run_dir) / f"{node.name}-cache"

    def any_node(self):
        """One of all."""
        return self.random.choice(self.cluster.nodes)

    def leader(self):
        """The node that writes."""
        return self.cluster.wait_leader(self.stream)

    def replica(self):
        """A node that does not."""
        return self.random.choice(self.cluster.replicas(self.stream))

    def kill(self, node):
        """SIGKILL; its counters are added up before."""
        self.count_lives()
        self.cluster.kill(node)

    def hold(self, part, **when):
        """The next PUT of a key with that part hangs when this returns."""
        key = self.leader().stream_id(self.stream) + part
        self.cluster.s3.fault(name="held", operation="PutObject", key=key, count=1, hang="held", **when)
        log = self.cluster.s3.log
        wait_until(lambda: any(e["hanging"] == "held" for e in log(rule="held")), 60, f"a PUT of {part} hangs")

    @staticmethod
    def status(node):
        """Mode, reason, hooks and protected streams of a node, as text."""
        keys = "[mode, inert_reason, osiris_attached, protected_streams]"
        text = node.rpc(f"maps:to_list(maps:with({keys}, rabbitmq_stream_s3_status:node_status())).")
        return dict(re.findall(r"\{(\w+),\s*(\w+)\}", text))

    @staticmethod
    def plugin(node, on):
        """As rabbitmq-plugins does it, by a way that takes no seconds on a machine that is busy."""
        file = pathlib.Path(node.run_dir) / node.name / "enabled_plugins"
        names = [name for name in file.read_text().strip(" \n[].").split(",") if name != PLUGIN]
        file.write_text(f"[{','.join([*names, PLUGIN] if on else names)}].")
        answer = node.rpc(f'rabbit_plugins:ensure("{file}").')
        assert PLUGIN in answer, answer

    def settle(self):
        """Everything runs and has all its members."""
        self.cluster.settle(*(load.stream for load in self.loads))

    def read_history(self, node):
        """A consumer on that node that reads some of what is only in S3, from a place that the seed says."""
        manifest = self.cluster.manifest(self.stream)
        span = manifest.next - manifest.first
        return self.load.read_brief(node, at_offset(manifest.first + int(span * self.random.random())), BRIEF_RECORDS)

    def open_engine_anew(self, node):
        """Ends the owner of the node's native engine; the next one is open, with empty caches, when this returns."""
        before = node.rpc("whereis(rabbitmq_stream_s3_api_aws).")
        self.count_lives()
        node.rpc("exit(whereis(rabbitmq_stream_s3_api_aws), kill).")

        def opened():
            now = node.rpc("{whereis(rabbitmq_stream_s3_api_aws), rabbitmq_stream_s3:engine() =/= undefined}.")
            return now.startswith("{<") and now.endswith("true}") and before not in now

        wait_until(opened, 60, f"{node.name}: the engine is open again")

    @contextlib.contextmanager
    def nobody_attaches(self, node):
        """Consumers of the node that are attached stay; none attaches while this lasts."""
        with contextlib.ExitStack() as stack:
            for load in self.loads:
                stack.enter_context(load.no_attaching(node))
            yield

    def count_lives(self):
        """Adds up counters, which start again with each life of a node."""
        for node in self.cluster.nodes:
            with contextlib.suppress(OSError, AssertionError):
                page = node.metrics()
                for name in COUNTERS:
                    now, last = page.sum(f"rabbitmq_stream_s3_{name}"), self._last.get((node.name, name), 0)
                    self.totals[name] += now - last if now >= last else now
                    self._last[node.name, name] = now
