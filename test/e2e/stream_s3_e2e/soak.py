"""Random faults from a seed, one after the other and now and then two at once, with the checker of histories on.

    python -m stream_s3_e2e.soak --run DIR --minutes 10 --seed 1

Owns which fault comes next, the rounds and the summary; the faults are in `soak_node_faults`, `soak_store_faults` and
`soak_plugin_faults`. After each round everything is healed, and the round ends only when publishing and uploading
continue; at the end the whole history has to make sense. The same seed gives the same faults (not the same moments:
those are the machine's).
"""

import argparse
import collections
import pathlib
import random
import re
import signal
import sys
import time

from .broker import TOP, run
from .cluster import Cluster
from .history import Allowance
from .manifest import check_puts
from .s3 import S3Test
from .soak_node_faults import NodeFaults
from .soak_plugin_faults import PluginFaults
from .soak_store_faults import UNWRITTEN, StoreFaults
from .soak_world import COUNTERS, World
from .streamproto import at_timestamp
from .wait import wait_until
from .workload import Workload

STREAM, BOUNDED = "soak", "soak-bounded"
BOUND_BYTES = 8_000_000
SETTINGS = {
    "fragment_size": 500_000, "fragment_max_age": "1s", "persist_interval_ms": 200, "request_timeout": "10s",
    "rebalance_threshold": 16, "reconciliation_interval": "10s",
    # Small, so that history is fetched again and again.
    "read.memory": "32MB", "read.ahead": "8MB", "read.request_size": "512KB", "read.cache_size": "70MB",
}
# Publishers never wait for S3; for a machine that is busy they may.
SILENCE_MAX_S = 15
# A node that does not answer is missed within ten seconds instead of over a minute.
CONF = {"net_ticktime": 8}


class Soak:
    """A cluster, its loads, and one fault after the other."""

    def __init__(self, cluster, seed, only=()):
        self.cluster, self.random = cluster, random.Random(seed)
        self.load = Workload(cluster, STREAM)
        self.bounded = Workload(cluster, BOUNDED, rate=60)
        self.world = World(cluster, self.random, (self.load, self.bounded))
        self.nodes, self.store, self.plugin = NodeFaults(self.world), StoreFaults(self.world), PluginFaults(self.world)
        rooms = (self.nodes, self.store, self.plugin)
        every = [(room, fault) for room in rooms for fault in (*getattr(room, "FAULTS", ()), *room.NEW_FAULTS)]
        unknown = set(only) - {fault.__name__ for _, fault in every}
        assert not unknown, f"no such faults: {sorted(unknown)}"
        self.every = [(room, fault) for room, fault in every if not only or fault.__name__ in only]
        self.on_top = [] if only else [(self.store, fault) for fault in self.store.ON_TOP]
        self.deck = []
        self.done, self.resumed = collections.Counter(), []
        self.leader_changes = self.rounds = 0
        # The longest time without a confirmation in rounds that were about S3 alone.
        self.silence_without_s3 = 0.0

    # -- rounds ---------------------------------------------------------------------------------------

    def round(self):
        """One fault, or two, and everything well again."""
        self.rounds += 1
        self.cluster.mark_logs()
        before = self.cluster.wait_leader(STREAM)
        epoch = self.cluster.manifest(STREAM).epoch
        faults = [self._next_fault()]
        if self.on_top and faults[0][0] is self.nodes and self.random.random() < 0.2:
            faults.append(self.random.choice(self.on_top))
        names = [fault.__name__ for _, fault in faults]
        print(f"{time.strftime('%H:%M:%S')} round {self.rounds}: {', '.join(names)} (leader {before.name})", flush=True)
        begun = time.monotonic()
        self._take_silence()
        for room, fault in faults:
            fault(room)
            self.done[fault.__name__] += 1
        if len(faults) == 1 and faults[0][1] in self.nodes.KILLS:
            self._resumes(begun)
        silence = self._take_silence()
        self._heal()
        self.leader_changes += self.cluster.manifest(STREAM).epoch - epoch
        if all(room is self.store for room, _ in faults):
            self.silence_without_s3 = max(self.silence_without_s3, silence)
            assert silence < SILENCE_MAX_S, f"publishers waited for S3: {silence:.1f} s without a confirmation"
        silence = max(silence, self._take_silence())
        print(f"    {time.monotonic() - begun:.0f} s; longest time without a confirmation {silence:.1f} s", flush=True)

    def _next_fault(self):
        """Each comes once before one comes again, in an order that the seed says."""
        if not self.deck:
            self.deck = self.random.sample(self.every, len(self.every))
        return self.deck.pop()

    def _take_silence(self):
        return max(p.take_silence() for load in (self.load, self.bounded) for p in load.publishers)

    def _resumes(self, begun):
        """With the killed node still down."""
        others = [node for node in self.cluster.nodes if node.running]
        self.cluster.wait_leader(STREAM, others)
        self.cluster.wait_uploads(STREAM, self.cluster.committed_on(STREAM, others), others)
        self.resumed.append(time.monotonic() - begun)

    def _heal(self):
        self.cluster.s3.clear_faults()
        self.store.mend()
        self.world.count_lives()
        self.world.settle()
        for load in (self.load, self.bounded):
            load.wait_confirmed(50)
            self.cluster.wait_uploads(load.stream, self.cluster.committed(load.stream))
            self._check_manifest(load.stream)

    def _check_manifest(self, stream):
        # Uploading continues: what is dropped or replaced meanwhile is looked for again.
        agree = lambda: self.cluster.manifest(stream).check(exact=False)  # noqa: E731
        wait_until(agree, 30, f"{stream}: the manifest and the bucket agree")

    # -- all of it --------------------------------------------------------------------------------------

    def go(self, minutes):
        """Rounds until time is up, then the judgement."""
        deadline = time.monotonic() + minutes * 60
        for load in (self.load, self.bounded):
            load.start()
            load.read_everywhere()
        self.load.wait_confirmed(200)
        self.cluster.nodes[0].ctl(
            "set_policy", "bound", f"^{BOUNDED}$", f'{{"max-length-bytes": {BOUND_BYTES}}}', "--apply-to", "streams"
        )
        while time.monotonic() < deadline:
            self.round()
            if self.rounds % 5 == 0:
                node = self.random.choice(self.cluster.nodes)
                self.load.read(node, at_timestamp(int((time.time() - self.random.uniform(1, 60)) * 1000)))
        self._judge()

    def _judge(self):
        for load in (self.load, self.bounded):
            load.finish()
        truth = self.load.check(self.cluster.nodes[0], seconds=600)
        for node in self.cluster.nodes:
            self.load.check_again(node, truth)
        begin = self.cluster.manifest(BOUNDED).first
        gaps = tuple(gap for node in self.cluster.nodes for gap in declared_gaps(node.log()))
        bounded = self.bounded.check(self.cluster.nodes[0], Allowance(begin, gaps), seconds=600)
        assert begin > 0, "retention did nothing"
        for load in (self.load, self.bounded):
            self.cluster.manifest(load.stream).check(exact=False)
            check_puts(self.cluster.s3, self.cluster.nodes[0].stream_id(load.stream), without=(UNWRITTEN,))
        self.world.count_lives()
        assert self.world.totals["native_panics_total"] == 0
        print(f"{STREAM}: {self.load.summary(truth)}")
        print(f"{BOUNDED}: {self.bounded.summary(bounded)}; begins at {begin}; gaps {gaps}")

    def summary(self):
        """What it was, in a few lines."""
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.done.items()))
        resumed = f"{min(self.resumed):.1f} to {max(self.resumed):.1f} s" if self.resumed else "never"
        effects = ", ".join(f"{name} {int(count)}" for name, count in sorted(self.world.effects.items()))
        return "\n".join([
            f"{sum(self.done.values())} faults in {self.rounds} rounds: {faults}",
            f"seen to take effect: {effects}",
            f"longest time without a confirmation while only S3 was ill: {self.silence_without_s3:.1f} s",
            f"{self.load.confirmed + self.bounded.confirmed} records confirmed, {self.leader_changes} leader changes",
            f"{self.cluster.woken} replicas restarted that the coordinator had for disconnected",
            f"uploads resumed after SIGKILL within {resumed}",
            ", ".join(f"{name} {int(self.world.totals[name])}" for name in COUNTERS),
        ])


def declared_gaps(log):
    """[from, to) of what the log says that retention dropped before it was uploaded."""
    found = re.findall(r"local_log_ahead: retention dropped offsets (\d+) to (\d+) ", log)
    return [(int(first), int(last) + 1) for first, last in found]


def main():
    """Runs it; the exit code says whether it passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", nargs="*", default=(), help="names of faults; else all")
    options = parser.parse_args()
    # Also in the background, where a shell has interrupts ignored: an orderly end, with the summary.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit("interrupted"))
    seed = options.seed if options.seed is not None else int(time.time())
    print(f"seed {seed}, {options.minutes:g} minutes", flush=True)
    with S3Test() as s3:
        cluster = Cluster(options.run, s3, conf=CONF, **SETTINGS)
        soak = Soak(cluster, seed, options.only)
        try:
            cluster.start()
            for stream in (STREAM, BOUNDED):
                cluster.create(stream, stream_max_segment_size_bytes=2_000_000)
            soak.go(options.minutes)
        except BaseException as error:
            print(cluster.log_window())
            print(soak.summary())
            print(f"FAILED with seed {seed}: {error}")
            raise
        finally:
            soak.load.stop()
            soak.bounded.stop()
            cluster.stop()
        print(soak.summary())
        print(f"passed with seed {seed}")
    run(TOP / "scripts" / "node", "--dir", options.run, "wipe", "--all")


if __name__ == "__main__":
    sys.exit(main())
