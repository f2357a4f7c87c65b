"""What readers share: history is fetched once however many read it, and whoever reads the tail fetches nothing.

Each test proves by the request log of the S3 server, and by a counter, that its path ran.
"""

import concurrent.futures
import os
import pathlib

import pytest

from stream_s3_e2e import records
from stream_s3_e2e.amqp10 import decode
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.streamproto import FIRST, NEXT, at_offset
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

SEGMENT = 4_000_000
READERS = 10
# Consumers that attach and are killed, and how many of them by one call.
KILLED, KILLED_AT_ONCE = 10_000, 1_000
# What memory may have grown by after all of them: far below what one of them in ten would hold.
GROWTH_BYTES_MAX = 64_000_000


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    settings = {"fragment_size": 2_000_000, "persist_interval_ms": 100, "read.cache_path": run_dir / "blocks"}
    with TieredBroker(run_dir, s3, **settings) as node:
        yield node


def tiered(broker, stream, count, size, **options):
    """A stream of so many records that is trimmed as far as it can be."""
    with broker.client() as client:
        client.create(stream, stream_max_segment_size_bytes=SEGMENT)
    publish(broker, stream, count, fixed(size), batch=10, **options)
    broker.flush_tier(stream, count)
    broker.wait_trimmed(stream)


def fetched(broker, s3, stream, since):
    """The GETs of the stream's fragments after this entry of the log."""
    part = f"{broker.stream_id(stream)}/data/"
    return [entry for entry in s3.log(operation="GetObject", after=since) if part in entry["key"]]


def told(gets):
    """What a failed assertion shows of them."""
    return [(entry["key"].rsplit("/", 1)[1], entry["range"], entry["response_bytes"]) for entry in gets]


def read_all(broker, stream, count, size, credit):
    checker = records.Checker(0, fixed(size))
    with broker.client() as client:
        subscription = client.subscribe(stream, FIRST, credit=credit)
        while checker.next_offset < count:
            for offset, message in subscription.next_chunk(60).messages():
                checker.add(offset, decode(message))
    checker.finish(count)


def test_ten_consumers_of_one_history_fetch_it_once(broker, s3, stream_name):
    count, size = 1_200, 20_000
    tiered(broker, stream_name, count, size)
    names = ["read_fetched_bytes_total", "read_delivered_bytes_total"]
    before = [broker.counter(name) for name in names]
    since = s3.last_id()
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        runs = [pool.submit(read_all, broker, stream_name, count, size, 2 + number) for number in range(READERS)]
        for run in runs:
            run.result()
    gets = fetched(broker, s3, stream_name, since)
    keys = {entry["key"] for entry in gets}
    stored = s3.objects(f"rabbitmq/stream/{broker.stream_id(stream_name)}/data/")
    objects = sum(entry["size"] for entry in stored if entry["key"] in keys)
    received = sum(entry["response_bytes"] for entry in gets)
    assert objects > count * size / 2, "most of it is read from S3"
    assert received <= 1.2 * objects, f"{received} bytes fetched of {objects}"
    fetched_bytes, delivered_bytes = [broker.counter(name) - was for name, was in zip(names, before)]
    assert fetched_bytes <= 1.2 * objects
    assert delivered_bytes > 5 * fetched_bytes, f"{delivered_bytes} delivered of {fetched_bytes}"
    wait_until(lambda: broker.counter("remote_readers") == 0, 10, "no reader left")
    wait_until(lambda: broker.counter("read_memory_reserved_bytes") == 0, 10, "memory is given back")
    wait_until(lambda: broker.counter("read_cache_disk_bytes") > 0, 10, "blocks are on disk")
    assert broker.counter("read_cache_disk_errors_total") == 0


def test_reading_one_record_costs_one_request(broker, s3, stream_name):
    count, size = 6_000, 2_000
    tiered(broker, stream_name, count, size, window=0)
    first_local = broker.segments(stream_name)[0][0]
    hits = broker.counter("read_index_requests_total", result="hit")
    since = s3.last_id()
    with broker.client() as client:
        # In the middle of a fragment: its index is known, because it was written here.
        subscription = client.subscribe(stream_name, at_offset(first_local // 2), credit=1)
        chunk = subscription.next_chunk(30, credit=0)
        assert chunk.chunk_id <= first_local // 2 < chunk.next_offset
        assert len(chunk.data) < 100_000, "less than a request brings"
        subscription.close()
    assert broker.counter("read_index_requests_total", result="hit") > hits
    gets = told(fetched(broker, s3, stream_name, since))
    assert len(gets) == 1, gets


def test_whoever_reads_the_tail_fetches_nothing(broker, s3, stream_name):
    with broker.client() as client:
        client.create(stream_name, stream_max_segment_size_bytes=SEGMENT)
    publish(broker, stream_name, 10, fixed(1_000))
    started = broker.counter("read_ranges_total")
    since = s3.last_id()
    with broker.client() as client:
        subscriptions = [client.subscribe(stream_name, NEXT, subscription_id=n, credit=100) for n in range(5)]
        # In steps, so that nobody falls behind what is trimmed meanwhile.
        for first in range(10, 1_010, 40):
            publish(broker, stream_name, 40, fixed(10_000), first=first, batch=10)
            for subscription in subscriptions:
                while subscription.next_chunk(30).next_offset < first + 40:
                    pass
    broker.flush_tier(stream_name, 1_010)
    broker.wait_trimmed(stream_name)
    assert broker.segments(stream_name)[0][0] > 10, "the beginning is only in S3"
    assert told(fetched(broker, s3, stream_name, since)) == []
    assert broker.counter("read_ranges_total") == started


def attach_and_kill(broker, stream, count):
    """So many consumers in turn: every second one is killed when it has its first chunk, the others while they attach."""
    done = broker.rpc(
        f"""begin
        {{ok, Queue}} = rabbit_amqqueue:lookup(<<"{stream}">>, <<"/">>),
        Member = amqqueue:get_pid(Queue),
        Options = #{{transport => tcp, chunk_selector => user_data}},
        Read = fun Read(Log) ->
            case osiris_log:chunk_iterator(Log, 1, undefined) of
                {{ok, #{{chunk_id := 0}}, _, _}} -> ok;
                {{end_of_stream, Next}} -> receive _ -> Read(Next) end
            end
        end,
        Attach = fun(Parent) ->
            {{ok, Log}} = osiris:init_reader(Member, first, {{attach_and_kill, []}}, Options),
            Parent ! attached,
            ok = Read(Log),
            Parent ! has_read,
            receive never -> ok end
        end,
        lists:foreach(
            fun(Number) ->
                Parent = self(),
                {{Pid, Monitor}} = spawn_monitor(fun() -> Attach(Parent) end),
                receive attached -> ok after 30000 -> exit(not_attached) end,
                _ = Number rem 2 =:= 0 andalso receive has_read -> ok after 30000 -> exit(not_read) end,
                true = exit(Pid, kill),
                receive {{'DOWN', Monitor, process, Pid, killed}} -> ok end
            end,
            lists:seq(1, {count})
        ),
        true = osiris_counters:delete(attach_and_kill) =:= ok,
        killed
        end."""
    )
    assert done == "killed", done


def held(broker):
    """What a process can leave behind: descriptors, threads, bytes."""
    process = pathlib.Path(f"/proc/{broker.pid}")
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir(process / "fd")), len(os.listdir(process / "task")), resident


def test_ten_thousand_consumers_that_are_killed_leave_nothing(broker, s3, stream_name):
    tiered(broker, stream_name, 1_200, 20_000)
    served = broker.counter("chunks_delivered_total", tier="remote")
    attach_and_kill(broker, stream_name, KILLED_AT_ONCE)
    before = held(broker)
    for _ in range(KILLED // KILLED_AT_ONCE):
        attach_and_kill(broker, stream_name, KILLED_AT_ONCE)
    wait_until(lambda: broker.counter("remote_readers") == 0, 10, "no reader left")
    wait_until(lambda: broker.counter("read_memory_reserved_bytes") == 0, 10, "memory is given back")
    assert broker.counter("readers_waiting_for_memory") == 0
    descriptors, threads, resident = (after - was for after, was in zip(held(broker), before))
    # Connections to S3 come and go with what is fetched; threads that block come and go, too.
    assert descriptors < 20 and threads < 20, (descriptors, threads)
    assert resident < GROWTH_BYTES_MAX, f"{resident} bytes more"
    assert broker.counter("chunks_delivered_total", tier="remote") - served >= KILLED / 2
    read_all(broker, stream_name, 1_200, 20_000, 5)


def test_damage_that_stays_is_told_and_never_served(broker, s3, stream_name):
    count, size = 600, 20_000
    tiered(broker, stream_name, count, size)
    assert broker.node_status()["read_alarm"] == "none"
    # In the data of a chunk in the middle of the second fragment.
    objects = sorted(entry["key"] for entry in s3.objects(f"rabbitmq/stream/{broker.stream_id(stream_name)}/data/"))
    body = bytearray(s3.get(objects[1]))
    body[len(body) // 2] ^= 0x10
    s3.put(objects[1], bytes(body))
    with broker.client() as client:
        subscription = client.subscribe(stream_name, FIRST, credit=5)
        checker = records.Checker(0, fixed(size))
        while chunk := subscription.next_chunk(3):
            chunk.check_crc()
            for offset, message in chunk.messages():
                checker.add(offset, decode(message))
    assert 0 < checker.next_offset < count, "the consumer was not stopped at the damage"
    assert broker.counter("remote_reader_bad_places_total", kind="corrupt") >= 1
    assert broker.counter("read_refetches_total") >= 1
    assert broker.node_status()["read_alarm"] == "corrupt"
    assert broker.counter("integrity_incidents", kind="corrupt") == 1
    # Without the damage everything is there: what was spoilt was not kept.
    body[len(body) // 2] ^= 0x10
    s3.put(objects[1], bytes(body))
    read_all(broker, stream_name, count, size, 5)
