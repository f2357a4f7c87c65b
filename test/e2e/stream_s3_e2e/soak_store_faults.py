"""Faults of a soak between a node and its bytes in S3: no way, no answer, wrong answers, a cache disk that hangs.

Each does it, sees that it has taken effect, and leaves it to the round to end it. None of them may hold up a publisher.
"""

import contextlib
import os

from .wait import DeadlineError, wait_until

# Answers of each kind, and how many of them have to be seen: ten used to end a reader.
ANSWERS, SEEN = 14, 3
# Files that a hanging disk has waiting for what the cache writes next.
NEXT_FILES = 512
HTML = "<html><body>sign in to continue</body></html>"
LISTING = '<?xml version="1.0"?><ListBucketResult><Name>other</Name></ListBucketResult>'
# Answers 200 to what it has not written.
UNWRITTEN = "unwritten"


class StoreFaults:
    """See the module."""

    def __init__(self, world):
        self.world, self.cluster, self.s3 = world, world.cluster, world.cluster.s3
        self._pipes = []

    def cut_s3_of_leader(self):
        """The leader cannot reach S3."""
        node = self.world.leader()
        self._bites([node], node.gateway.cut)

    def hold_s3_of_leader(self):
        """S3 takes the leader's connections and is silent."""
        node = self.world.leader()
        self._bites([node], node.gateway.hold)

    def cut_s3_of_all(self):
        """Nobody can reach S3."""
        nodes = self.cluster.nodes
        self._bites([self.world.leader()], lambda: [node.gateway.cut() for node in nodes])

    def s3_answers_with_errors(self):
        """Every third request is refused."""
        for n in range(1, 60, 3):
            self.s3.fault(name="busy", nth=n, count=1, status=503, code="SlowDown")
        self._seen("busy")

    def s3_loses_answers(self):
        """Requests take effect and their answers are lost."""
        self.s3.fault(name="lost", operation="PutObject", count=3, lose_answer=True)
        self._seen("lost")

    def wrong_404_of_a_proxy(self):
        """What is there is answered with 404, by something that is not S3."""
        page = self.world.random.choice(["default backend - 404", HTML, ""])
        self._lies("proxy", 'request_failures_total{reason="bare_404"}', method="GET", status=404, page=page)

    def wrong_404_of_the_store(self):
        """What is there is answered with NoSuchKey."""
        self._lies("forgetful", 'request_failures_total{reason="not_found"}', operation="GetObject", status=404, code="NoSuchKey")

    def page_for_an_object(self):
        """A page with status 200 where bytes were asked for, also for a listing."""
        page = self.world.random.choice([HTML, LISTING, ""])
        self._lies("page", 'request_failures_total{reason="malformed"}', method="GET", status=200, page=page)

    def page_for_a_put(self):
        """A page with status 200 for a PUT that took no effect."""
        self.s3.fault(name=UNWRITTEN, operation="PutObject", count=ANSWERS, status=200, page=HTML)
        self._seen(UNWRITTEN)

    def page_after_a_put(self):
        """A page with status 200 for a PUT that took effect."""
        self.s3.fault(name="page-after", operation="PutObject", count=ANSWERS, status=502, page=HTML, after_effect=True)
        self._seen("page-after")

    def truncated_answers(self):
        """Bodies end in the middle, in the first record or later."""
        bytes_ = self.world.random.choice([0, 100, 70_000])
        self._lies("truncated", None, operation="GetObject", cut_after_bytes=bytes_)

    def range_ignored(self):
        """The whole object where a part was asked for."""
        self._lies("whole", 'request_failures_total{reason="malformed"}', operation="GetObject", ignore_range=True)

    def bytes_inverted(self):
        """A byte of an answer is another one."""
        self._lies("inverted", None, operation="GetObject", corrupt_at=self.world.random.randrange(2_000))

    def cache_disk_hangs(self):
        """Files of a node's cache do not answer, neither to reads nor to writes; well again with the next engine."""
        node = self.world.any_node()
        # Something is fetched and kept first: then the folder of this life is there.
        kept = lambda: self._fetching(node) and self._life(node)  # noqa: E731
        folder = wait_until(kept, 60, f"{node.name}: a cache on disk", every=1)
        files = [path for path in folder.rglob("*") if path.is_file()]
        newest = max((int(path.name, 16) for path in files), default=0)
        for path in files:
            self._hang(path)
        for number in range(newest + 1, newest + NEXT_FILES):
            self._hang(folder / f"{number % 256:02x}" / f"{number:016x}")
        unusable = lambda: self._fetching(node) and node.counter("read_cache_disk_unusable") == 1  # noqa: E731
        wait_until(unusable, 120, f"{node.name}: the disk is left alone", every=2)
        self.world.effects["read_cache_disk_unusable"] += 1
        self.world.linger(4)
        self.mend()
        self.world.open_engine_anew(node)
        assert node.counter("read_cache_disk_unusable") == 0, "the new engine has its disk again"

    FAULTS = (
        cut_s3_of_leader, hold_s3_of_leader, cut_s3_of_all, s3_answers_with_errors, s3_loses_answers,
    )
    NEW_FAULTS = (
        wrong_404_of_a_proxy, wrong_404_of_the_store, page_for_an_object, page_for_a_put, page_after_a_put,
        truncated_answers, range_ignored, bytes_inverted, cache_disk_hangs,
    )
    # May come on top of another one without costing a majority or what only one node has.
    ON_TOP = (cut_s3_of_leader, s3_answers_with_errors, s3_loses_answers)

    def mend(self):
        """Who hangs in a disk continues."""
        for path in self._pipes:
            # Both ends at once: who waits for either continues.
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
                path.unlink()
        self._pipes = []

    # -- the parts of them --------------------------------------------------------------------------

    def _lies(self, name, counter, **rule):
        """Answers of that kind; the nodes fetch until they have met them."""
        nodes = self.cluster.nodes
        before = sum(node.counter(counter) for node in nodes) if counter else 0
        self.s3.fault(name=name, count=ANSWERS, **rule)
        self._met(lambda: self._hits(name) >= SEEN, f"S3 answers as {name}")
        if counter:
            wait_until(lambda: sum(node.counter(counter) for node in nodes) > before, 30, f"{counter} rises")
        self.world.effects[f"answers: {name}"] += self._hits(name)

    def _met(self, condition, what):
        """Consumers read history; where the caches have it all, the engines are opened again."""
        for node in self.cluster.nodes:
            self.world.read_history(node)
        with contextlib.suppress(DeadlineError):
            wait_until(condition, 10, what)
            return
        for node in self.cluster.nodes:
            self.world.open_engine_anew(node)
            self.world.read_history(node)
        wait_until(condition, 60, what)

    def _hits(self, name):
        return sum(rule["hits"] for rule in self.s3.faults() if rule["name"] == name)

    def _seen(self, rule):
        wait_until(lambda: self._hits(rule) >= SEEN, 90, f"S3 answers as {rule}")
        self.world.effects[f"answers: {rule}"] += self._hits(rule)

    def _bites(self, nodes, fault):
        before = [node.gateway.bitten for node in nodes]
        fault()
        wait_until(lambda: all(n.gateway.bitten > b for n, b in zip(nodes, before)), 60, "the way to S3 is missed")
        self.world.effects["connections to S3 cut or held"] += 1
        self.world.linger()

    def _fetching(self, node):
        if not any(reader.node is node and reader.is_alive() for reader in self.world.load.brief):
            self.world.read_history(node)
        return True

    def _hang(self, path):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        self._pipes.append(path)

    def _life(self, node):
        """The folder of the blocks of the engine that runs; None while there is none."""
        lives = self.world.cache_path(node).glob("*/rabbitmq-stream-s3-blocks/*")
        lives = sorted(lives, key=lambda path: path.stat().st_mtime)
        return lives[-1] if lives and any(path.is_file() for path in lives[-1].rglob("*")) else None
