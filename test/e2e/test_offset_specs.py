"""Every way to name a place, on both sides of every boundary, on the writer's node and on a replica's.

The same records are in a stream of a stock broker, in the same chunks; whatever that one answers has to come here too. Times of
chunks differ between the two: for them the right answer follows from the chunks themselves.

One story, told in order: each test goes on with the stream as the test before it left it.
"""

import bisect
import concurrent.futures
import random
import threading
import time

import pytest

from stream_s3_e2e import amqp10
from stream_s3_e2e.broker import Broker
from stream_s3_e2e.consume import consume_amqp10, consume_amqp091, consume_chunks
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, payload, verify
from stream_s3_e2e.s3 import S3Test
from stream_s3_e2e.streamproto import FIRST, LAST, NEXT, at_offset, at_timestamp
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

STREAM = "places"
SIZE = fixed(5_000)
RECORDS, PER_CHUNK = 1_000, 5
SEGMENT = 1_000_000


def fill(broker, count, first=0):
    """A chunk for every few records, in the same places on every broker, each of a time of its own.

    Records that share an entry cannot be put into two chunks; confirmed one by one they cannot share one with others.
    """
    last = 0
    with broker.client() as client:
        publisher = client.publisher(STREAM)
        for start in range(first, first + count, PER_CHUNK):
            numbers = range(start, start + PER_CHUNK)
            wait_until(lambda: time.time() * 1000 >= last + 3, 5, "the clock goes on", every=0.001)
            publisher.publish_batch(numbers[-1], [amqp10.encode(payload(n, SIZE(n))) for n in numbers], compressed=False)
            publisher.wait_confirmed()
            last = int(time.time() * 1000)


class Places:
    """The two members, the chunks, and the boundaries between them."""

    def __init__(self, writer, replica, s3, twin):
        self.writer, self.replica, self.s3, self.twin = writer, replica, s3, twin
        self.nodes = {"writer": writer, "replica": replica}
        self.chunks, self.count, self.amqp = [], 0, False
        self.grow(RECORDS)

    def grow(self, count):
        """More of the same in both streams, all of it in the remote tier."""
        for broker in (self.writer, self.twin):
            fill(broker, count, self.count)
        self.count += count
        self.writer.flush_tier(STREAM, self.count)
        for node in self.nodes.values():
            node.wait_persisted(STREAM, self.count, 30)
            node.wait_trimmed(STREAM)
            assert 0 < node.segments(STREAM)[0][0], f"{node.name}: nothing was trimmed"
        self.read()

    def read(self):
        """All chunks, as a consumer of the writer's node gets them from the beginning."""
        end = lambda chunk: chunk.next_offset >= self.count  # noqa: E731
        self.chunks = list(consume_chunks(self.writer, STREAM, FIRST, end))
        self.ids = [chunk.chunk_id for chunk in self.chunks]
        self.times = [chunk.timestamp for chunk in self.chunks]
        twin = list(consume_chunks(self.twin, STREAM, FIRST, end))
        assert self.ids == [chunk.chunk_id for chunk in twin], "the twin has other chunks"
        assert self.times == sorted(set(self.times)), "two chunks of one time"

    def at(self, offset):
        """The chunk that has an offset."""
        return self.chunks[bisect.bisect_right(self.ids, offset) - 1]

    def boundaries(self, node):
        """Where something begins or ends: fragments, groups of all heights, the local log."""
        found = {0, self.count, node.segments(STREAM)[0][0]}
        for entry in self.s3.objects(f"rabbitmq/stream/{node.stream_id(STREAM)}/"):
            if not entry["key"].endswith(".manifest"):
                found |= {int(entry["metadata"]["first-offset"]), int(entry["metadata"]["next-offset"])}
        return sorted(found)


@pytest.fixture(scope="module")
def places(run_dir):
    with S3Test() as s3:
        # Four chunks in a fragment, four of a kind in a group.
        settings = {"fragment_size": 100_000, "rebalance_threshold": 4, "persist_interval_ms": 100}
        nodes = [TieredBroker(run_dir, s3, f"rabbit{n}", **settings) for n in (1, 2)]
        twin = Broker(run_dir, "twin")
        for index, node in enumerate([*nodes, twin]):
            node.index = index
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.start(), [*nodes, twin]))
        nodes[1].join(nodes[0])
        for broker, members in ((nodes[0], 2), (twin, 1)):
            with broker.client() as client:
                client.create(STREAM, stream_max_segment_size_bytes=SEGMENT, initial_cluster_size=members)
        _, leader = nodes[0].wait_leader(STREAM)
        nodes.sort(key=lambda node: node.stream_port != leader)
        yield Places(*nodes, s3, twin)


@pytest.fixture(params=["writer", "replica"])
def node(places, request):
    return places.nodes[request.param]


def first_chunk(client, spec):
    """The chunk that a subscription with this specification begins with."""
    subscription = client.subscribe(STREAM, spec, credit=1)
    chunk = subscription.next_chunk(30, credit=0)
    subscription.close()
    assert chunk is not None, f"{spec}: nothing came"
    return chunk


def test_there_are_boundaries_of_every_kind(places, node):
    kinds = {entry["key"].rsplit(".", 1)[1] for entry in places.s3.objects("rabbitmq/stream/")}
    assert kinds == {"fragment", "manifest", "group", "kgroup"}
    assert len(places.boundaries(node)) > 40
    floor = node.segments(STREAM)[0][0]
    assert RECORDS // 2 < floor < RECORDS and floor in places.ids


def test_offsets_around_every_chunk(places, node):
    floor = node.segments(STREAM)[0][0]
    served = node.counter("chunks_served_remote")
    edges = {edge + d for edge in places.boundaries(node) for d in (-1, 0, 1)}
    offsets = edges | {i + d for i in places.ids for d in (0, 2, PER_CHUNK - 1)}
    remote = 0
    with node.client() as client, places.twin.client() as twin:
        for offset in sorted(o for o in offsets if 0 <= o < places.count):
            chunk = first_chunk(client, at_offset(offset))
            expected = places.at(offset)
            assert (chunk.chunk_id, chunk.data) == (expected.chunk_id, expected.data), offset
            remote += chunk.chunk_id < floor
            if offset in edges:
                assert client.resolve_when_known(STREAM, at_offset(offset)) == (4, expected.chunk_id), offset
                assert first_chunk(twin, at_offset(offset)).data == expected.data, "the twin differs"
    assert node.counter("chunks_served_remote") >= served + remote > served + 100


def test_times_around_every_chunk(places, node):
    floor = node.segments(STREAM)[0][0]
    at = places.ids.index(floor)
    around = sorted({0, places.times[0] - 1000, *(t + d for t in places.times for d in (-1, 0, 1))})
    around = [t for t in around if t <= places.times[-1]]
    assert len(around) > 400

    def attach(client, timestamps):
        for timestamp in timestamps:
            expected = places.chunks[bisect.bisect_left(places.times, timestamp)]
            chunk = first_chunk(client, at_timestamp(timestamp))
            assert (chunk.chunk_id, chunk.timestamp) == (expected.chunk_id, expected.timestamp), timestamp
            assert client.resolve_when_known(STREAM, at_timestamp(timestamp)) == (4, expected.chunk_id), timestamp

    with node.client() as client:
        # Who asks for the very first local chunk is sent to the remote tier: others of its time may come before it.
        # Counted where they are served: what was read before comes from the cache, without a request.
        before, requests = node.counter("chunks_served_remote"), places.s3.last_id()
        attach(client, [t for t in around if t > places.times[at]])
        assert node.counter("chunks_served_remote") == before, "local chunks came from the remote tier"
        assert not places.s3.log(operation="GetObject", after=requests)
        attach(client, [t for t in around if t <= places.times[at]])
        assert node.counter("chunks_served_remote") > before


def test_the_ends(places, node):
    with node.client() as client, places.twin.client() as twin:
        for spec in (FIRST, LAST):
            ours, theirs = first_chunk(client, spec), first_chunk(twin, spec)
            assert (ours.chunk_id, ours.data) == (theirs.chunk_id, theirs.data), spec
        for spec in (FIRST, LAST, NEXT, at_offset(places.count), at_offset(places.count + 1_000), at_offset(2**62)):
            assert client.resolve_when_known(STREAM, spec) == twin.resolve(STREAM, spec), spec
        later = at_timestamp(places.times[-1] + 1)
        assert client.resolve_when_known(STREAM, later) == client.resolve(STREAM, NEXT) == (4, places.count)


def test_statistics_tell_of_both_tiers(places, node):
    assert node.segments(STREAM)[0][0] > 0
    with node.client() as client, places.twin.client() as twin:
        ours, theirs = client.stats(STREAM), twin.stats(STREAM)
    assert ours == theirs
    assert ours["first_chunk_id"] == 0 and ours["committed_chunk_id"] == places.ids[-1]


def test_the_number_of_messages_is_that_of_both_tiers(places):
    counters = lambda node, kind: node.rpc(  # noqa: E731
        f'maps:get(first_offset, osiris_counters:overview({{{kind}, rabbit_misc:r(<<"/">>, queue, <<"{STREAM}">>)}})).'
    )
    assert counters(places.writer, "osiris_writer") == "0"
    assert counters(places.replica, "osiris_replica") == "0"

    def messages():
        lines = places.writer.ctl("list_queues", "name", "messages", "--silent").splitlines()
        return dict(line.split("\t") for line in lines)[STREAM] == str(places.count)

    # RabbitMQ counts every five seconds.
    wait_until(messages, 30, f"{places.count} messages")


def test_absolute_offsets_are_refused_as_stock_refuses_them(places, node):
    def opened(broker, offset):
        return broker.rpc(
            "[Pid] = [P || {P, _, _, _, R, _} <- ets:tab2list(osiris_reader_context_cache),"
            f" element(4, R) =:= <<\"{STREAM}\">>],"
            f" case osiris:init_reader(Pid, {{abs, {offset}}}, {{{{test, self()}}, []}}, #{{}}) of"
            " {ok, Log} -> Next = osiris_log:next_offset(Log), osiris_log:close(Log), {ok, Next};"
            " Error -> Error end."
        ).replace("\n", "").replace(" ", "")

    floor = node.segments(STREAM)[0][0]
    for offset in (0, 7, floor - 1, floor, places.count - 1, places.count, places.count + 1, 2**62):
        ours, theirs = opened(node, offset), opened(places.twin, offset)
        if ours.startswith("{ok") and offset < floor:
            # A remote reader begins at the offset itself, and the chunk that has it is what it reads.
            assert ours == f"{{ok,{offset}}}" and theirs == f"{{ok,{places.at(offset).chunk_id}}}"
        else:
            assert ours == theirs, offset
    assert "offset_out_of_range" in opened(node, places.count)


@pytest.mark.parametrize("consumer", [consume_amqp091, consume_amqp10])
def test_amqp_begins_at_the_very_record(places, node, consumer):
    # A stock broker leaves records that share an entry out of AMQP: a stream of single ones.
    stream, count = f"{STREAM}-amqp", 600
    if not places.amqp:
        places.amqp = True
        with places.writer.client() as client:
            client.create(stream, stream_max_segment_size_bytes=SEGMENT, initial_cluster_size=2)
        publish(places.writer, stream, count, SIZE)
        wait_until(lambda: any(n.range(stream) for n in places.nodes.values()), 30, "its manifest is known")
        leader = next(n for n in places.nodes.values() if n.stream_port == places.writer.wait_leader(stream)[1])
        leader.flush_tier(stream, count)
    node.wait_persisted(stream, count, 30)
    node.wait_trimmed(stream)
    floor = node.segments(stream)[0][0]
    for offset in sorted({e + d for e in (0, 100, floor, count - 1) for d in (-1, 0, 2)}):
        if 0 <= offset < count:
            until = min(offset + 50, count)
            verify(list(consumer(node, stream, until, spec=at_offset(offset))), offset, until, SIZE)


def test_what_comes_next_is_for_whoever_waits_at_the_end(places, node):
    end = places.count
    specs = [NEXT, at_offset(end), at_offset(end + 1_000), at_timestamp(places.times[-1] + 60_000)]
    with node.client() as client, places.twin.client() as twin:
        waiting = [c.subscribe(STREAM, spec, n) for c in (client, twin) for n, spec in enumerate(specs)]
        places.grow(PER_CHUNK)
        for subscription in waiting:
            assert subscription.next_chunk(30).chunk_id == end, subscription.spec


def test_nothing_is_skipped_while_both_tiers_are_trimmed(places):
    """Consumers come and go at every place while the user's retention takes the beginning and tiering the local log.

    A consumer may only be moved on to where the stream begins by then, and must see all that follows.
    """
    policy = '{"max-length-bytes":3000000}'
    places.writer.ctl("set_policy", "shrink", f"^{STREAM}$", policy, "--apply-to", "queues")
    wait_until(lambda: places.replica.range(STREAM)[0] > 0, 60, "the beginning moves")
    done, failed = threading.Event(), []

    def grow():
        try:
            for _ in range(6):
                fill(places.writer, 100, places.count)
                places.count += 100
                places.writer.flush_tier(STREAM, places.count)
        except Exception as error:  # noqa: BLE001
            failed.append(error)
        finally:
            done.set()

    writing = threading.Thread(target=grow)
    chance = random.Random(11)
    begins, rounds = [places.writer.range(STREAM)[0]], 0
    writing.start()
    with places.writer.client() as one, places.replica.client() as other:
        while not done.is_set() or rounds < 20:
            rounds += 1
            client, node = chance.choice([(one, places.writer), (other, places.replica)])
            first, end = node.range(STREAM)[0], places.count - 2 * PER_CHUNK
            offset = chance.choice([0, first, chance.randrange(end), chance.randrange(first, end)])
            spec = chance.choice([FIRST, at_offset(offset)])
            subscription = client.subscribe(STREAM, spec, credit=2)
            chunk = subscription.next_chunk(30)
            follows = subscription.next_chunk(30)
            now = max(n.range(STREAM)[0] for n in places.nodes.values())
            begins.append(now)
            asked = first if spec == FIRST else max(first, offset)
            exact = asked - asked % PER_CHUNK
            assert exact <= chunk.chunk_id <= max(exact, now), f"{spec} from {first}: {chunk.chunk_id}, {now}"
            assert chunk.next_offset <= follows.chunk_id <= max(chunk.next_offset, now)
            for got in (chunk, follows):
                got.check_crc()
            subscription.close()
    writing.join()
    assert not failed, failed
    assert begins[-1] > begins[0], "retention took nothing meanwhile"
    for node in places.nodes.values():
        begin = node.range(STREAM)[0]
        assert 0 < begin < node.segments(STREAM)[0][0]
        with node.client() as client:
            assert first_chunk(client, FIRST).chunk_id == begin
            assert client.stats(STREAM)["first_chunk_id"] == begin
            assert first_chunk(client, at_timestamp(0)).chunk_id == begin
