"""Random faults from a seed, one after the other and now and then two at once, with the checker of histories on.

    python -m stream_s3_e2e.soak --run DIR --minutes 10 --seed 1

Owns which fault comes next and the summary. After each round everything is healed, and the round ends only when
publishing and uploading go on; at the end the whole history has to make sense. The same seed gives the same faults (not
the same moments: those are the machine's).
"""

import argparse
import collections
import contextlib
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
from .streamproto import at_timestamp
from .wait import wait_until
from .workload import Workload

STREAM, BOUNDED = "soak", "soak-bounded"
BOUND_BYTES = 8_000_000
SETTINGS = {
    "fragment_size": 500_000, "fragment_max_age": "1s", "persist_interval_ms": 200, "request_timeout": "10s",
    "rebalance_threshold": 16, "reconciliation_interval": "10s",
}
# A node that does not answer is missed within ten seconds instead of over a minute.
CONF = {"net_ticktime": 8}
# Counters of the nodes that the summary adds up over all lives of them.
COUNTERS = (
    "pointer_writes_ok", "pointer_writes_conflict", "pointer_writes_error", "local_log_ahead_recoveries",
    "remote_tier_ahead_recoveries", "readers_started", "manifests_resolved", "manifest_syncs",
    "manifest_edits_applied", "manifest_edits_unfitting", "manifest_edits_corrupt", "pointer_moves_missed",
    "chunks_served_remote", "native_panics",
)


class Soak:
    """A cluster, its loads, and one fault after the other."""

    def __init__(self, cluster, seed):
        self.cluster, self.random = cluster, random.Random(seed)
        self.load = Workload(cluster, STREAM)
        self.bounded = Workload(cluster, BOUNDED, rate=60)
        self.done, self.resumed = collections.Counter(), []
        self.leader_changes = self.rounds = 0
        self._totals, self._last = collections.Counter(), {}

    # -- faults: each does it, sees that it has bitten, and leaves it to `heal` to end it -------------

    def kill_leader(self):
        """SIGKILL of the node that writes."""
        self._kill(self.cluster.wait_leader(STREAM))

    def kill_replica(self):
        """SIGKILL of a node that does not."""
        self._kill(self.random.choice(self.cluster.replicas(STREAM)))

    def kill_in_mid_upload(self):
        """SIGKILL while a fragment is on its way."""
        self._kill_held("/data/")

    def kill_in_mid_persist(self):
        """SIGKILL while a root is on its way."""
        self._kill_held("/metadata/root.")

    def kill_before_the_pointer(self):
        """SIGKILL when the root is in S3 and the pointer does not name it."""
        self._kill_held("/metadata/root.", after_effect=True)

    def wipe_replica(self):
        """A replica is killed and its segments are gone."""
        node = self.random.choice(self.cluster.replicas(STREAM))
        self._kill(node)
        self.cluster.wipe_stream(node, STREAM)

    def restart_node(self):
        """An orderly restart of any node."""
        self.cluster.restart(self.random.choice(self.cluster.nodes), STREAM)

    def move_leader(self):
        """Another leader, by an operator's wish."""
        self.cluster.move_leader(STREAM)

    def move_leader_often(self):
        """Five in a row."""
        for _ in range(5):
            self.cluster.move_leader(STREAM)

    def isolate_leader(self):
        """The leader alone; S3 is still there for it."""
        self._isolate(self.cluster.wait_leader(STREAM))

    def isolate_leader_from_all(self):
        """The leader alone, and without S3."""
        leader = self.cluster.wait_leader(STREAM)
        leader.gateway.cut()
        self._isolate(leader)

    def isolate_before_the_pointer(self):
        """The leader alone when the root is in S3 and the pointer does not name it."""
        leader = self.cluster.wait_leader(STREAM)
        self._hold("/metadata/root.", after_effect=True)
        self._isolate(leader)
        self.cluster.s3.clear_faults()

    def isolate_replica(self):
        """A replica alone."""
        self._isolate(self.random.choice(self.cluster.replicas(STREAM)))

    def cut_one_link(self):
        """Two nodes do not see each other, the third sees both."""
        self.cluster.cut(*self.random.sample(self.cluster.nodes, 2))
        self._linger()

    def cut_s3_of_leader(self):
        """The leader cannot reach S3."""
        node = self.cluster.wait_leader(STREAM)
        self._bites([node], node.gateway.cut)

    def hold_s3_of_leader(self):
        """S3 takes the leader's connections and is silent."""
        node = self.cluster.wait_leader(STREAM)
        self._bites([node], node.gateway.hold)

    def cut_s3_of_all(self):
        """Nobody can reach S3."""
        nodes = self.cluster.nodes
        self._bites([self.cluster.wait_leader(STREAM)], lambda: [node.gateway.cut() for node in nodes])

    def s3_answers_with_errors(self):
        """Every third request is refused."""
        rules = [{"name": "busy", "nth": n, "count": 1, "status": 503, "code": "SlowDown"} for n in range(1, 60, 3)]
        for rule in rules:
            self.cluster.s3.fault(**rule)
        wait_until(lambda: len(self.cluster.s3.log(rule="busy")) >= 3, 60, "S3 has refused requests")

    def s3_loses_answers(self):
        """Requests take effect and their answers are lost."""
        self.cluster.s3.fault(name="lost", operation="PutObject", count=3, lose_answer=True)
        wait_until(lambda: len(self.cluster.s3.log(rule="lost")) >= 3, 60, "S3 has lost answers")

    def pause_leader(self):
        """The leader does not answer, for less than the others need to miss it."""
        with self.cluster.frozen(self.cluster.wait_leader(STREAM)):
            self._linger(4)

    def freeze_leader(self):
        """The leader does not answer until the others have another, and then goes on as if it still were."""
        leader = self.cluster.wait_leader(STREAM)
        with self.cluster.frozen(leader):
            self.cluster.wait_leader(STREAM, self.cluster.others(leader), seconds=90)

    def freeze_before_the_pointer(self):
        """The same when the root is in S3 and the pointer does not name it."""
        self._hold("/metadata/root.", after_effect=True)
        self.freeze_leader()
        self.cluster.s3.clear_faults()

    def freeze_replica(self):
        """A replica does not answer until the others miss it."""
        replica = self.random.choice(self.cluster.replicas(STREAM))
        with self.cluster.frozen(replica):
            self.cluster.wait_missed(replica)

    def take_replica_away(self):
        """A member less, and one more again."""
        node = self.random.choice(self.cluster.replicas(STREAM))
        self.cluster.delete_replica(STREAM, node)
        self.load.wait_confirmed(20)
        self.cluster.add_replica(STREAM, node)

    FAULTS = (
        kill_leader, kill_replica, kill_in_mid_upload, kill_in_mid_persist, kill_before_the_pointer, wipe_replica,
        restart_node, move_leader, move_leader_often, isolate_leader, isolate_leader_from_all,
        isolate_before_the_pointer, isolate_replica, cut_one_link, cut_s3_of_leader, hold_s3_of_leader, cut_s3_of_all,
        s3_answers_with_errors, s3_loses_answers, pause_leader, freeze_leader, freeze_before_the_pointer, freeze_replica,
        take_replica_away,
    )
    # May come on top of another one without costing a majority or what only one node has.
    ON_TOP = (cut_s3_of_leader, s3_answers_with_errors, s3_loses_answers)
    KILLS = frozenset(
        ("kill_leader", "kill_replica", "kill_in_mid_upload", "kill_in_mid_persist", "kill_before_the_pointer")
    )

    # -- the parts of them --------------------------------------------------------------------------

    def _kill(self, node):
        self._count_lives()
        self.cluster.kill(node)

    def _kill_held(self, part, **when):
        leader = self.cluster.wait_leader(STREAM)
        self._hold(part, **when)
        self._kill(leader)
        self.cluster.s3.clear_faults()

    def _hold(self, part, **when):
        stream_id = self.cluster.wait_leader(STREAM).stream_id(STREAM)
        key = stream_id + part
        self.cluster.s3.fault(name="held", operation="PutObject", key=key, count=1, hang="held", **when)
        log = self.cluster.s3.log
        wait_until(lambda: any(e["hanging"] == "held" for e in log(rule="held")), 60, f"a PUT of {part} hangs")

    def _isolate(self, node):
        self.cluster.isolate(node)
        self._linger()

    def _bites(self, nodes, fault):
        before = [node.gateway.bitten for node in nodes]
        fault()
        wait_until(lambda: all(n.gateway.bitten > b for n, b in zip(nodes, before)), 60, "the way to S3 is missed")
        self._linger()

    def _linger(self, most=12):
        # A fault lasts as long as the seed says: the one thing here that is about time.
        time.sleep(self.random.uniform(1, most))

    # -- rounds ---------------------------------------------------------------------------------------

    def round(self):
        """One fault, or two, and everything well again."""
        self.rounds += 1
        self.cluster.mark_logs()
        before = self.cluster.wait_leader(STREAM)
        epoch = self.cluster.manifest(STREAM).epoch
        faults = [self.random.choice(self.FAULTS)]
        if self.random.random() < 0.2:
            faults.append(self.random.choice(self.ON_TOP))
        names = [fault.__name__ for fault in faults]
        print(f"{time.strftime('%H:%M:%S')} round {self.rounds}: {', '.join(names)} (leader {before.name})", flush=True)
        begun = time.monotonic()
        for fault in faults:
            fault(self)
            self.done[fault.__name__] += 1
        if len(names) == 1 and names[0] in self.KILLS:
            self._resumes(begun)
        self._heal()
        self.leader_changes += self.cluster.manifest(STREAM).epoch - epoch
        silence = max(p.take_silence() for load in (self.load, self.bounded) for p in load.publishers)
        print(f"    {time.monotonic() - begun:.0f} s; longest time without a confirmation {silence:.1f} s", flush=True)

    def _resumes(self, begun):
        """With the killed node still down."""
        others = [node for node in self.cluster.nodes if node.running]
        self.cluster.wait_leader(STREAM, others)
        self.cluster.wait_uploads(STREAM, self.cluster.committed_on(STREAM, others), others)
        self.resumed.append(time.monotonic() - begun)

    def _heal(self):
        self.cluster.s3.clear_faults()
        self._count_lives()
        self.cluster.settle(STREAM, BOUNDED)
        for load in (self.load, self.bounded):
            load.wait_confirmed(50)
            self.cluster.wait_uploads(load.stream, self.cluster.committed(load.stream))
            self._check_manifest(load.stream)

    def _check_manifest(self, stream):
        # Uploading goes on: what is dropped or replaced meanwhile is looked for anew.
        agree = lambda: self.cluster.manifest(stream).check(exact=False)  # noqa: E731
        wait_until(agree, 30, f"{stream}: the manifest and the bucket agree")

    def _count_lives(self):
        """Adds up counters, which start again with each life of a node."""
        for node in self.cluster.nodes:
            with contextlib.suppress(OSError, AssertionError):
                page = node.metrics()
                for name in COUNTERS:
                    now, last = page.sum(f"rabbitmq_stream_s3_{name}"), self._last.get((node.name, name), 0)
                    self._totals[name] += now - last if now >= last else now
                    self._last[node.name, name] = now

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
            check_puts(self.cluster.s3, self.cluster.nodes[0].stream_id(load.stream))
        self._count_lives()
        assert self._totals["native_panics"] == 0
        print(f"{STREAM}: {self.load.summary(truth)}")
        print(f"{BOUNDED}: {self.bounded.summary(bounded)}; begins at {begin}; gaps {gaps}")

    def summary(self):
        """What it was, in a few lines."""
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.done.items()))
        resumed = f"{min(self.resumed):.1f} to {max(self.resumed):.1f} s" if self.resumed else "never"
        return "\n".join([
            f"{sum(self.done.values())} faults in {self.rounds} rounds: {faults}",
            f"{self.load.confirmed + self.bounded.confirmed} records confirmed, {self.leader_changes} leader changes",
            f"{self.cluster.woken} replicas restarted that the coordinator had for disconnected",
            f"uploads resumed after SIGKILL within {resumed}",
            ", ".join(f"{name} {int(self._totals[name])}" for name in COUNTERS),
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
    options = parser.parse_args()
    # Also in the background, where a shell has interrupts ignored: an orderly end, with the summary.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit("interrupted"))
    seed = options.seed if options.seed is not None else int(time.time())
    print(f"seed {seed}, {options.minutes:g} minutes", flush=True)
    with S3Test() as s3:
        cluster = Cluster(options.run, s3, conf=CONF, **SETTINGS)
        soak = Soak(cluster, seed)
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
