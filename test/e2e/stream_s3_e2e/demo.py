"""`make demo`: the whole path on a real broker and a real S3 server, with every byte compared.

Publishes more than a gigabyte to two streams, watches local disk shrink and objects grow, reads everything back
over three protocols and attaches at random places. Exit 0 only if all of it held.
"""

import argparse
import bisect
import json
import pathlib
import random
import shutil
import sys
import threading
import time

from . import records
from .consume import consume_amqp10, consume_amqp091, consume_chunks
from .amqp10 import decode
from .mix import Mix
from .s3 import Ceph
from .streamproto import FIRST, at_offset, at_timestamp
from .tiered import TieredBroker

STREAMS = ("demo-orders", "demo-events")
SEGMENT_BYTES = 100_000_000
S3_PORT = 17640
RANDOM_OFFSETS, RANDOM_TIMESTAMPS = 200, 50


class Clock:
    """Where time went, phase by phase."""

    def __init__(self):
        self.started = time.monotonic()
        self.seconds = {}

    def phase(self, name, work, *arguments):
        """Runs a phase, prints and keeps its time."""
        print(f"[{time.monotonic() - self.started:6.1f} s] {name} ...", flush=True)
        begun = time.monotonic()
        result = work(*arguments)
        self.seconds[name] = round(time.monotonic() - begun, 1)
        return result


class DiskWatch(threading.Thread):
    """Remembers the most local bytes that each stream ever held."""

    def __init__(self, broker):
        super().__init__(daemon=True)
        self.broker, self.peak, self.done = broker, dict.fromkeys(STREAMS, 0), threading.Event()

    def run(self):
        while not self.done.wait(0.25):
            for stream in STREAMS:
                try:
                    self.peak[stream] = max(self.peak[stream], self.broker.local_bytes(stream))
                except (AssertionError, OSError):
                    continue

    def stop(self):
        """Ends the watch."""
        self.done.set()
        self.join()


def read_stream_protocol(broker, stream, mix):
    """Everything from `first`; returns the chunks' (id, next offset, timestamp) for the attach checks."""
    checker, chunks = records.Checker(0, mix), []
    for chunk in consume_chunks(broker, stream, FIRST, lambda chunk: chunk.next_offset >= mix.count, seconds=120):
        chunks.append((chunk.chunk_id, chunk.next_offset, chunk.timestamp))
        for offset, message in chunk.messages():
            checker.add(offset, decode(message))
    checker.finish(mix.count)
    return checker, chunks


def read_amqp(consumer, broker, stream, mix, **options):
    """Everything from `first` that a stock broker shows to AMQP."""
    checker = records.Checker(0, mix, wanted=mix.visible_to_amqp)
    last = max(n for n in range(mix.count - 1, mix.count - 1000, -1) if mix.visible_to_amqp(n))
    for offset, body in consumer(broker, stream, last + 1, spec=FIRST, seconds=120, **options):
        checker.add(offset, body)
    checker.finish(mix.count)
    return checker


def attach_everywhere(broker, stream, mix, chunks, seed):
    """Attaches at random offsets and timestamps; the first chunk must be the one that an untiered stream gives."""
    rng = random.Random(seed)
    ids = [chunk[0] for chunk in chunks]
    timestamps = [chunk[2] for chunk in chunks]
    seen = {"offset": 0, "timestamp": 0}
    with broker.client() as client:
        for _ in range(RANDOM_OFFSETS):
            offset = rng.randrange(mix.count)
            expected = chunks[bisect.bisect_right(ids, offset) - 1]
            seen["offset"] += _first_chunk_is(client, stream, at_offset(offset), expected, mix)
        for _ in range(RANDOM_TIMESTAMPS):
            timestamp = rng.randint(timestamps[0] - 5, timestamps[-1])
            expected = chunks[bisect.bisect_left(timestamps, timestamp)]
            seen["timestamp"] += _first_chunk_is(client, stream, at_timestamp(timestamp), expected, mix)
    return seen


def _first_chunk_is(client, stream, spec, expected, mix):
    subscription = client.subscribe(stream, spec, credit=1)
    chunk = subscription.next_chunk(60, credit=0)
    assert chunk is not None, f"{stream} {spec}: nothing came in 60 s"
    seen = (chunk.chunk_id, chunk.next_offset, chunk.timestamp)
    assert seen == expected, f"{stream} {spec}: first chunk {seen}, an untiered stream gives {expected}"
    chunk.check_crc()
    for offset, message in chunk.messages():
        records.check_body(decode(message), offset, mix(offset))
    subscription.close()
    return chunk.next_offset - chunk.chunk_id


def main():
    """Runs the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="where summary.json goes")
    parser.add_argument("--run", type=pathlib.Path, required=True, help="run folder of broker and S3 server")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the mix")
    parser.add_argument("--keep", action="store_true", help="leave broker and S3 server running")
    options = parser.parse_args()
    clock, mix = Clock(), Mix(options.scale)
    s3 = Ceph("demo", port=S3_PORT, folder=options.run / "s3")
    broker, ok = None, False
    try:
        clock.phase("start S3 server (Ceph RADOS gateway)", s3.start)
        broker = TieredBroker(options.run / "nodes", s3)
        clock.phase("start broker with the plugin", broker.start)
        summary = run(clock, mix, s3, broker)
        summary["seconds"] = clock.seconds
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(summary, indent=2) + "\n")
        show(summary, options.out)
        ok = True
    except AssertionError as error:
        print(f"\nDEMO FAILED: {error}\n", file=sys.stderr)
        if broker:
            print("\n".join(broker.errors()[-40:]), file=sys.stderr)
    finally:
        if options.keep and broker:
            print(f"left running: AMQP {broker.amqp_port}, stream {broker.stream_port}, S3 {s3.endpoint}")
        else:
            if broker:
                broker.kill()
            s3.stop()
            if ok:
                broker.wipe()
                shutil.rmtree(options.run, ignore_errors=True)
    return 0 if ok else 1


def run(clock, mix, s3, broker):
    """All phases; returns the summary."""
    with broker.client() as client:
        for stream in STREAMS:
            client.create(stream, stream_max_segment_size_bytes=SEGMENT_BYTES)
    watch = DiskWatch(broker)
    watch.start()
    for stream in STREAMS:
        clock.phase(f"publish {mix.count} records to {stream}", mix.publish, broker, stream)
    clock.phase("cut and persist the rest", lambda: [broker.flush_tier(s, mix.count) for s in STREAMS])
    clock.phase("wait for local segments to be trimmed", lambda: [broker.wait_trimmed(s) for s in STREAMS])
    watch.stop()
    before = broker.metrics()
    clients = []
    for number, stream in enumerate(STREAMS):
        checker, chunks = clock.phase(f"read {stream}: stream protocol", read_stream_protocol, broker, stream, mix)
        clients.append(client_row(stream, "stream", "first", checker))
        for protocol, consumer, extra in (
            ("amqp 0-9-1", consume_amqp091, {"ack_every": 50, "prefetch": 500}),
            ("amqp 1.0", consume_amqp10, {"credit": 500}),
        ):
            checker = clock.phase(
                f"read {stream}: {protocol}", lambda: read_amqp(consumer, broker, stream, mix, **extra)  # noqa: B023
            )
            clients.append(client_row(stream, protocol, "first", checker))
        seen = clock.phase(
            f"attach to {stream} at {RANDOM_OFFSETS} offsets and {RANDOM_TIMESTAMPS} timestamps",
            attach_everywhere, broker, stream, mix, chunks, number,
        )
        for spec, times in (("offset", RANDOM_OFFSETS), ("timestamp", RANDOM_TIMESTAMPS)):
            clients.append(
                {
                    "stream": stream, "protocol": "stream", "spec": spec, "attached": times,
                    "records": seen[spec], "byte_exact": True,
                }
            )
    served = broker.metrics().sum("rabbitmq_stream_s3_chunks_delivered_total", tier="remote") - before.sum(
        "rabbitmq_stream_s3_chunks_delivered_total", tier="remote"
    )
    assert served > 0, "no chunk was served from S3: the remote path did not run"
    objects = s3.objects()
    fragments = [entry for entry in objects if entry["key"].endswith(".fragment")]
    assert fragments, "no fragment in S3"
    segments = {stream: broker.segments(stream) for stream in STREAMS}
    for stream, files in segments.items():
        assert len(files) <= 2, f"{stream}: {len(files)} local segments are left"
    published = mix.bytes * len(STREAMS)
    assert published >= 1_000_000_000 or mix.count < 50_000, f"only {published} bytes were published"
    return {
        "versions": broker.versions(),
        "records_published": mix.count * len(STREAMS),
        "bytes_published": published,
        "fragments": len(fragments),
        "objects": len(objects),
        "bytes_in_s3": sum(entry["size"] for entry in objects),
        "local_bytes_at_peak": watch.peak,
        "local_bytes_after_trimming": {s: sum(size for _, size in files) for s, files in segments.items()},
        "local_segments_after_trimming": {s: len(files) for s, files in segments.items()},
        "chunks_served_from_s3": int(served),
        "clients": clients,
    }


def client_row(stream, protocol, spec, checker):
    """One row of the summary."""
    return {
        "stream": stream, "protocol": protocol, "spec": spec,
        "records": checker.count, "bytes": checker.bytes, "byte_exact": True,
    }


def show(summary, path):
    """Prints the summary for people."""
    print("\nwhere time went")
    for name, seconds in summary["seconds"].items():
        print(f"  {seconds:7.1f} s  {name}")
    print("\nwhat happened")
    for name in ("records_published", "bytes_published", "fragments", "objects", "bytes_in_s3", "chunks_served_from_s3"):
        print(f"  {summary[name]:>14,}  {name.replace('_', ' ')}")
    for stream in STREAMS:
        print(
            f"  {stream}: local disk {summary['local_bytes_at_peak'][stream]:,} at peak,"
            f" {summary['local_bytes_after_trimming'][stream]:,} after trimming"
            f" ({summary['local_segments_after_trimming'][stream]} segments)"
        )
    for row in summary["clients"]:
        where = f"{row['attached']} places by {row['spec']}" if "attached" in row else row["spec"]
        print(f"  {row['stream']}: {row['protocol']} from {where}: {row['records']:,} records byte-exact")
    print(f"\neverything held; {path}")


if __name__ == "__main__":
    sys.exit(main())
