"""Publishers and consumers that go on whatever happens to the brokers, and write down what they did and saw.

Owns threads and connections: who reconnects to which node, and where it goes on. What it means is `history.py`'s.
"""

import contextlib
import threading
import time

from . import amqp10
from .history import Allowance, Ledger, Loss, Observation, check, key_of, parts_of, payload
from .streamproto import FIRST, Client, ProtocolError, at_offset
from .wait import wait_until

# A node that is frozen or alone does not answer; then another one is asked.
_PATIENCE_SECONDS = 8.0
_PAUSE_SECONDS = 0.1
_LOST = (OSError, ProtocolError, AssertionError)


class _Stopped(Exception):
    """The thread was told to end."""


class _Worker(threading.Thread):
    """Something that is done again and again until it is told to end."""

    def __init__(self, name):
        super().__init__(daemon=True, name=name)
        self._end = threading.Event()
        # Told to rest while clear; said to rest while set.
        self.may_work, self.rests = threading.Event(), threading.Event()
        self.may_work.set()
        # Held while it attaches; who holds it keeps it from that and from nothing else.
        self.attaching = threading.Lock()
        self.reconnects = 0
        self.last_trouble = None
        self.failure = None

    def end(self):
        """Ends it soon."""
        self._end.set()

    def _may_rest(self):
        """Whether it has nothing left to do that was begun."""
        return True

    def _goes_on(self):
        return self.may_work.is_set() and not self._end.is_set()

    def run(self):
        while not self._end.is_set():
            if not self.may_work.is_set() and self._may_rest():
                self.rests.set()
                self._end.wait(_PAUSE_SECONDS)
                continue
            self.rests.clear()
            try:
                self.work()
            except _Stopped:
                return
            except _LOST as error:
                self.reconnects += 1
                self.last_trouble = f"{type(error).__name__}: {error}"
                self._end.wait(_PAUSE_SECONDS)
            except Exception as error:  # noqa: BLE001 - a thread that dies silently would look like an idle one
                self.failure = error
                return


class Publisher(_Worker):
    """Publishes numbered records at a rate, through the leader's node, and sends again what was not confirmed."""

    def __init__(self, cluster, stream, ledger, rate=150, size=4_000, batch=10, window=400):
        super().__init__(f"publisher-{ledger.publisher}")
        self.cluster, self.stream, self.ledger = cluster, stream, ledger
        self.rate, self.size, self.batch, self.window = rate, size, batch, window
        self._finish = threading.Event()
        self.done = threading.Event()
        # Longest time without a confirmation: since the start, and since `take_silence`.
        self.longest_silence = self._silence = 0.0
        self._last_confirm = None

    def finish(self):
        """Sends nothing new, and is done when all that was sent is confirmed."""
        self._finish.set()

    def take_silence(self):
        """The longest time without a confirmation since this was asked last."""
        seen, self._silence = self._silence, 0.0
        return seen

    def _may_rest(self):
        return all(end <= self.ledger.first_unconfirmed for _, end in self.ledger.attempts)

    def work(self):
        ledger = self.ledger
        with _leader_client(self.cluster, self.stream, self.reconnects) as client:
            name = f"publisher-{ledger.publisher}" if ledger.named else ""
            publisher = client.publisher(self.stream, reference=name)
            following = ledger.first_unconfirmed
            if ledger.named:
                # Publishing ids count from 1. What it holds beyond that may not be committed: its confirmation says so.
                held = client.last_publishing_id(self.stream, name)
                if held < following and not ledger.ids_lost:
                    # A leader that is alone and does not know yet that there is another. If it is none, the end shows it.
                    raise OSError(f"{name}: {following} are confirmed, the broker knows of {held}")
            attempt = ledger.begin(following)
            publisher.on_confirm = self._confirmed
            sent_before = max((end for _, end in ledger.attempts[:-1]), default=0)
            while not self._end.is_set():
                if self._finish.is_set() and following >= sent_before:
                    publisher.wait_confirmed(seconds=_PATIENCE_SECONDS)
                    self.done.set()
                    raise _Stopped
                if not self.may_work.is_set() and following >= sent_before:
                    publisher.wait_confirmed(seconds=_PATIENCE_SECONDS)
                    return
                frame = [(n + 1, amqp10.encode(payload(ledger.publisher, attempt, n, self.size)))
                         for n in range(following, following + self.batch)]
                following += self.batch
                # Before it is on its way: an answer that is lost does not say what arrived.
                ledger.sent(following)
                publisher.publish(frame)
                self._pace(client, publisher)

    def _pace(self, client, publisher):
        """Until the next frame is due; fails if nothing is confirmed any more or the stream has moved."""
        due = time.monotonic() + self.batch / self.rate
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            now = time.monotonic()
            if client.metadata_updates or publisher.errors:
                raise OSError(f"{self.stream} has moved")
            if now >= due and len(publisher.unconfirmed) < self.window:
                return
            if now >= deadline or self._end.is_set():
                raise OSError(f"{len(publisher.unconfirmed)} records unconfirmed for {_PATIENCE_SECONDS} s")
            client.poll(max(0.01, due - now))

    def _confirmed(self, number):
        now = time.monotonic()
        self._silence = max(self._silence, now - (self._last_confirm or now))
        self.longest_silence = max(self.longest_silence, self._silence)
        self._last_confirm = now
        self.ledger.confirm(number - 1)


class Reader(_Worker):
    """Consumes on one node from `spec`, through every reconnect, as one observation; ends after `most` records."""

    def __init__(self, node, stream, observation, spec=FIRST, most=None):
        super().__init__(observation.label)
        self.node, self.stream, self.observation, self.spec = node, stream, observation, spec
        self.most = most

    def work(self):
        observation = self.observation
        with contextlib.ExitStack() as stack:
            with self.attaching:
                client = stack.enter_context(self.node.client(patience=_PATIENCE_SECONDS))
                spec, wanted = self.spec, observation.next_offset
                if observation.offsets:
                    spec = at_offset(wanted)
                subscription = client.subscribe(self.stream, spec, credit=5)
            while self._goes_on():
                if self.most is not None and len(observation.offsets) >= self.most:
                    raise _Stopped
                chunk = subscription.next_chunk(0.5)
                if chunk is not None:
                    take(observation, chunk, wanted)
                elif client.metadata_updates:
                    raise OSError(f"{self.stream} has moved")


class StoredOffsetReader(_Worker):
    """Consumes on one node, stores its offset now and then, and attaches again at the stored one; many observations.

    `floor()` is where the stream begins: what is stored below it is forgotten.
    """

    def __init__(self, node, stream, name, floor, store_every=100, attach_every=600):
        super().__init__(name)
        self.node, self.stream, self.floor = node, stream, floor
        self.store_every, self.attach_every = store_every, attach_every
        self.observations = []
        self.attached_at_stored = 0
        self._known = -1

    def forget(self):
        """What it knows to be stored may be gone."""
        self._known = -1

    def work(self):
        with contextlib.ExitStack() as stack:
            with self.attaching:
                client = stack.enter_context(self.node.client(patience=_PATIENCE_SECONDS))
                observation, start, subscription = self._attach(client)
            self._consume(client, observation, start, subscription)

    def _attach(self, client):
        stored = client.query_offset(self.stream, self.name)
        # Going back to one that was stored before is allowed: a broker that dies, or is alone, has told of one that
        # was not committed. Having none is not, unless the stream begins behind it.
        if stored is None and self.attached_at_stored > 2 and self._known >= self.floor():
            self.failure = AssertionError(f"{self.name}: stored {self._known}, now none")
            raise _Stopped
        start = 0 if stored is None else stored + 1
        self._known, self.attached_at_stored = start - 1, self.attached_at_stored + (stored is not None)
        observation = Observation(f"{self.name} from {start}", start=start)
        self.observations.append(observation)
        return observation, start, client.subscribe(self.stream, at_offset(start), credit=5)

    def _consume(self, client, observation, start, subscription):
        stored_at = 0
        while len(observation.offsets) < self.attach_every and self._goes_on():
            chunk = subscription.next_chunk(0.5)
            if chunk is None:
                if client.metadata_updates:
                    raise OSError(f"{self.stream} has moved")
                continue
            take(observation, chunk, start)
            if len(observation.offsets) - stored_at >= self.store_every:
                stored_at = len(observation.offsets)
                client.store_offset(self.stream, self.name, observation.offsets[-1])


class Workload:
    """Publishers and consumers of one stream on a cluster, and the history that they make."""

    def __init__(self, cluster, stream, rate=150, size=4_000, publishers=2):
        self.cluster, self.stream = cluster, stream
        # Every second one is named: the broker removes what it sends twice.
        ledgers = [Ledger(number + 1, named=number % 2 == 1) for number in range(publishers)]
        self.publishers = [Publisher(cluster, stream, ledger, rate, size) for ledger in ledgers]
        self.readers, self.stored, self.brief = [], [], []
        self._number = 0
        self.finished = False

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def start(self):
        """Begins to publish."""
        for publisher in self.publishers:
            publisher.start()
        return self

    def read(self, node, spec=FIRST):
        """One more consumer, on that node."""
        self.readers.append(self._reader(node, spec))
        return self.readers[-1]

    def read_brief(self, node, spec, most):
        """One more consumer, on that node, that ends after so many records."""
        self.brief.append(self._reader(node, spec, most))
        return self.brief[-1]

    def _reader(self, node, spec, most=None):
        self._number += 1
        claim = {"first": {"start": 0}, "offset": {"start": spec[-1]}, "timestamp": {"start_time": spec[-1]}}
        label = f"reader {self._number} on {node.name} from {' '.join(map(str, spec))}"
        reader = Reader(node, self.stream, Observation(label, **claim[spec[0]]), spec, most)
        reader.start()
        return reader

    def read_stored(self, node):
        """One more consumer, on that node, with stored offsets."""
        self._number += 1
        name = f"stored-{self._number}-{node.name}"
        reader = StoredOffsetReader(node, self.stream, name, lambda: self.cluster.manifest(self.stream).first)
        self.stored.append(reader)
        reader.start()
        return reader

    def read_everywhere(self):
        """On every node one consumer from `first` and one with stored offsets."""
        for node in self.cluster.nodes:
            self.read(node)
            self.read_stored(node)

    @property
    def confirmed(self):
        """Records confirmed so far."""
        return sum(publisher.ledger.confirmed_count for publisher in self.publishers)

    def wait_confirmed(self, more, seconds=60):
        """Waits until each publisher has had that many more records confirmed."""
        wanted = [(p, p.ledger.confirmed_count + more) for p in self.publishers]

        def reached():
            self.alive()
            return all(p.ledger.confirmed_count >= count for p, count in wanted)

        try:
            wait_until(reached, seconds, f"{more} more records of each publisher confirmed")
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.troubles()}") from error

    @contextlib.contextmanager
    def paused(self, *nodes, forgotten=False):
        """Consumers of these nodes are not attached while this lasts. `forgotten`: stored offsets may be, meanwhile."""
        workers = [w for w in (*self.readers, *self.stored, *self.brief) if w.node in nodes and w.is_alive()]
        for worker in workers:
            worker.may_work.clear()
        for worker in workers:
            wait_until(worker.rests.is_set, 60, f"{worker.name} rests")
        try:
            yield
        finally:
            for worker in self.stored if forgotten else ():
                worker.forget()
            for worker in workers:
                worker.may_work.set()

    @contextlib.contextmanager
    def no_attaching(self, node):
        """Consumers of that node which are attached stay so; none attaches anew while this lasts."""
        with contextlib.ExitStack() as stack:
            for worker in (*self.readers, *self.stored, *self.brief):
                if worker.node is node:
                    stack.enter_context(worker.attaching)
            yield

    @contextlib.contextmanager
    def at_rest(self):
        """Nobody publishes and nobody is attached while this lasts; all that was sent is confirmed before."""
        for publisher in self.publishers:
            publisher.may_work.clear()
        for publisher in self.publishers:
            wait_until(publisher.rests.is_set, 120, f"{publisher.name} rests")
        try:
            with self.paused(*self.cluster.nodes, forgotten=True):
                yield
        finally:
            for publisher in self.publishers:
                publisher.may_work.set()

    def lose(self, loss):
        """The records of a `Loss` are gone from the stream; who saw or sent them goes back to before."""
        for publisher in self.publishers:
            publisher.ledger.lose(loss)
        for observation in self.observations():
            observation.lose(loss)

    def observations(self):
        """Of all consumers."""
        whole = [reader.observation for reader in (*self.readers, *self.brief)]
        return whole + [seen for reader in self.stored for seen in reader.observations]

    def alive(self):
        """Fails if one of the threads has seen what must not be."""
        for worker in (*self.publishers, *self.readers, *self.stored, *self.brief):
            if worker.failure is not None:
                raise RuntimeError(f"{worker.name}: {worker.failure!r}") from worker.failure

    def troubles(self):
        """What each thread last stumbled over."""
        workers = (*self.publishers, *self.readers, *self.stored, *self.brief)
        return "; ".join(f"{worker.name}: {worker.last_trouble}" for worker in workers if worker.last_trouble)

    def finish(self, seconds=120):
        """Publishes nothing more, and waits until all that was sent is confirmed."""
        self.finished = True
        for publisher in self.publishers:
            publisher.finish()

        def done():
            self.alive()
            return all(publisher.done.is_set() for publisher in self.publishers)

        wait_until(done, seconds, f"publishers have all confirmed; {self.troubles()}")

    def truth(self, node, seconds=120):
        """What a fresh consumer sees from `first`, up to the last record of every publisher."""
        truth = Observation(f"truth on {node.name}", start=0)
        ends = {}
        for publisher in self.publishers:
            ledger = publisher.ledger
            last = ledger.first_unconfirmed - 1
            if last >= 0:
                ends[ledger.publisher] = {key_of(ledger.publisher, a, last) for a in range(len(ledger.attempts))}
        with node.client() as client:
            subscription = client.subscribe(self.stream, FIRST, credit=10)
            while ends:
                begin = len(truth.keys)
                chunk = subscription.next_chunk(seconds)
                if chunk is None:
                    # The check says what is missing.
                    break
                take(truth, chunk, 0)
                new = set(truth.keys[begin:])
                ends = {number: keys for number, keys in ends.items() if not keys & new}
        return truth

    def tail(self, node, start, seconds=60):
        """While all rest: what is there from an offset on, up to the last record of every publisher, as a `Loss`."""
        seen, last = Observation(f"tail on {node.name}", start=start), {}
        for publisher in self.publishers:
            last[publisher.ledger.publisher] = publisher.ledger.first_unconfirmed - 1
        with node.client() as client:
            subscription = client.subscribe(self.stream, at_offset(start), credit=10)
            while last:
                begin = len(seen.keys)
                chunk = subscription.next_chunk(seconds)
                assert chunk is not None, f"{self.stream}: nothing comes at {seen.next_offset}, {last} are missing"
                take(seen, chunk, start)
                for number, _, sequence in map(parts_of, seen.keys[begin:]):
                    if last.get(number) == sequence:
                        del last[number]
        assert not seen.wrong, seen.wrong
        return Loss(start, dict(zip(seen.offsets, seen.keys)))

    def check(self, node, allowed=Allowance(), seconds=120):
        """Publishers and consumers end; fails unless everything fits together. Returns the truth."""
        self.finish(seconds)
        truth = self.truth(node)
        end = truth.next_offset

        def caught_up():
            self.alive()
            whole = all(reader.observation.next_offset >= end for reader in self.readers)
            return whole and not any(reader.is_alive() for reader in self.brief)

        try:
            wait_until(caught_up, seconds, "consumers have caught up")
        finally:
            self.stop()
        self.alive()
        check([publisher.ledger for publisher in self.publishers], truth, self.observations(), allowed)
        return truth

    def check_again(self, node, truth):
        """A fresh consumer on that node sees the same, out of S3; one that asks for the end gets it from the local log."""
        served = node.counter("chunks_delivered_total", tier="remote")
        again = self.truth(node)
        assert (again.offsets, again.keys) == (truth.offsets, truth.keys), f"{node.name} has something else"
        remote = node.counter("chunks_delivered_total", tier="remote")
        most = self.cluster.manifest(self.stream).chunk_count()
        assert served < remote <= served + most, f"{node.name}: {remote - served} chunks from S3, which has {most}"
        with node.client() as client:
            last = client.subscribe(self.stream, at_offset(truth.offsets[-1])).next_chunk(30)
        assert last.next_offset == truth.next_offset
        assert node.counter("chunks_delivered_total", tier="remote") == remote, f"{node.name}: the end did not come from the local log"

    def summary(self, truth):
        """One line about what went on."""
        again = len(truth.keys) - len({parts_of(key)[::2] for key in truth.keys})
        return (
            f"{self.confirmed} records confirmed, {len(truth.keys)} there, {again} of them again,"
            f" {len(truth.chunk_ids)} chunks,"
            f" {sum(len(r.observation.offsets) for r in self.readers)} seen by {len(self.readers)} consumers,"
            f" {sum(r.attached_at_stored for r in self.stored)} times attached at a stored offset;"
            f" reconnects: publishers {sum(p.reconnects for p in self.publishers)},"
            f" consumers {sum(r.reconnects for r in (*self.readers, *self.stored))};"
            f" longest time without a confirmation {max(p.longest_silence for p in self.publishers):.1f} s"
        )

    def stop(self):
        """Ends all threads."""
        workers = (*self.publishers, *self.readers, *self.stored, *self.brief)
        workers = [worker for worker in workers if worker.ident is not None]
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join(30)


def take(observation, chunk, wanted):
    """Writes down what a chunk brings from offset `wanted` on, where its consumer attached (a chunk comes as a whole)."""
    try:
        chunk.check_crc()
    except AssertionError as error:
        # Not trouble with a connection, after which all is well: it was served.
        observation.wrong.append(str(error))
        raise
    observation.chunk(chunk.chunk_id, chunk.timestamp)
    for offset, message in chunk.messages():
        if offset >= wanted:
            observation.record(offset, amqp10.decode(message))


def _leader_client(cluster, stream, turn):
    """A connection to the leader's node. Another node is asked each time: one that is alone still thinks it has the leader."""
    last = OSError(f"no node answers for {stream}")
    nodes = list(cluster.nodes)
    for node in nodes[turn % len(nodes) :] + nodes[: turn % len(nodes)]:
        try:
            with node.client(patience=_PATIENCE_SECONDS) as client:
                leader, _replicas = client.metadata(stream)
            if leader is not None:
                return Client(leader[1], patience=_PATIENCE_SECONDS)
        except _LOST as error:
            last = error
    raise last
