"""Benchmark rows of whole brokers: one client that reads history as fast as it can.

From S3 through the plugin, the same records from the local disk of a stock broker, and the same objects with bare ranged GETs by
the same SDK, in turn; then again with a store that takes 100 ms to the first byte and gives each connection 40 MB/s. And how long
the first record takes after attaching.
"""

import argparse
import pathlib
import random
import time

from .bench_rows import Rates, cpu_seconds, native, percentile, row, test_server
from .broker import Broker
from .s3 import S3Test
from .tiered import TieredBroker

STREAM, RECORD_BYTES, SEGMENT_BYTES, MANY = "history", 1_000, 64_000_000, 32
PART_BYTES = 4 << 20
# A history that fits into the cache would be read from there. Half of this is the cache's.
READ_MEMORY_BYTES = 512_000_000
SLOW = {"operation": "GetObject", "delay_ms": 100, "rate_bytes_per_s": 40_000_000}
SLOW_NAME = "100 ms and 40 MB/s per connection"


def main():
    """Prints one JSON line per row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=pathlib.Path, required=True)
    parser.add_argument("--records", type=int, default=800_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attaches", type=int, default=30)
    options = parser.parse_args()
    with S3Test("bench", program=test_server()) as s3:
        tiered = TieredBroker(options.run / "tiered", s3, name="tiered", read_memory=READ_MEMORY_BYTES)
        brokers = {"S3": tiered, "disk": Broker(options.run / "stock", "stock")}
        try:
            history = History(s3, brokers, options.records)
            history.catch_up("", options.rounds)
            history.attach("", options.attaches)
            s3.fault(**SLOW)
            history.catch_up(f", {SLOW_NAME}", options.rounds)
            history.attach(f", {SLOW_NAME}", options.attaches // 3)
        finally:
            for broker in brokers.values():
                broker.kill()
                broker.wipe()


class History:
    """The same records in both brokers; everything below `until` is in S3 only in one, on disk in the other."""

    def __init__(self, s3, brokers, records):
        self.s3, self.brokers, self.records = s3, brokers, records
        for broker in brokers.values():
            broker.start()
            with broker.client() as client:
                client.create(STREAM, stream_max_segment_size_bytes=SEGMENT_BYTES)
            native("publish", "--port", broker.stream_port, "--stream", STREAM, "--records", records,
                   "--record-bytes", RECORD_BYTES)
        tiered = brokers["S3"]
        tiered.flush_tier(STREAM, records)
        tiered.wait_trimmed(STREAM)
        self.until = tiered.segments(STREAM)[0][0]
        assert self.until > records // 2, "most of the stream is to be in S3 only"

    def read(self, tier, start=0, until=None):
        """Reads up to `until` and returns what the client saw and what the broker used."""
        broker = self.brokers[tier]
        before = cpu_seconds(broker.pid)
        seen = native("consume", "--port", broker.stream_port, "--stream", STREAM, "--from", start,
                      "--until", until or self.until)
        return seen, cpu_seconds(broker.pid) - before

    def catch_up(self, where, rounds):
        """Rows of one store; the first round warms up and tells how many requests the plugin makes at once."""
        remote, local, same, many = Rates(), Rates(), Rates(), Rates()
        at_once = 1
        for number in range(rounds + 1):
            last = self.s3.last_id()
            seen = self.read("S3")
            gets = self.s3.log(operation="GetObject", after=last)
            got = sum(entry["response_bytes"] for entry in gets)
            at_once = max(at_once, overlap(gets))
            if number == 0:
                continue
            assert got >= seen[0]["bytes"] * 0.95, f"{got} bytes came from S3 for {seen[0]['bytes']}"
            remote.add(*seen)
            local.add(*self.read("disk"))
            for rates, concurrency in (same, at_once), (many, MANY):
                bare = self.bare(concurrency)
                rates.add(bare, bare["cpu_s"])
        gets = f"{at_once} bare ranged GETs at once"
        disk = "local disk, stock broker"
        row(f"bare ranged GETs, {MANY} at once, test server{where}", "MB/s", many.throughput)
        row(f"bare ranged GETs, {at_once} at once as the plugin, test server{where}", "MB/s", same.throughput)
        row(f"catch-up from disk in turn with S3{where}", "MB/s", local.throughput)
        row(f"catch-up from disk in turn with S3{where}, broker's CPU", "s/GiB", local.cpu)
        row(f"catch-up from S3{where}", "MB/s", remote.throughput, disk, local.throughput)
        row(f"catch-up from S3{where}, beside GETs", "MB/s", remote.throughput, gets, same.throughput)
        row(f"catch-up from S3{where}, beside all that {MANY} GETs carry", "MB/s", remote.throughput, f"{MANY} bare ranged GETs at once", many.throughput)
        row(f"catch-up from S3{where}, broker's CPU", "s/GiB", remote.cpu, disk, local.cpu)

    def bare(self, at_once):
        """Gets the chunk bytes that lie in front of `until`, as the plugin has to."""
        lines = []
        for entry in self.s3.objects("rabbitmq/stream/"):
            name = entry["key"].rsplit("/", 1)[-1]
            if name.endswith(".fragment") and int(name[:20]) < self.until:
                lines.append(f"{entry['key']} 8 {entry['size']}")
        return native("get", "--endpoint", self.s3.endpoint, "--bucket", self.s3.bucket, "--key", self.s3.access_key,
                      "--secret", self.s3.secret_key, "--at-once", at_once, "--part-bytes", PART_BYTES,
                      input="\n".join(lines))

    def attach(self, where, attaches, rounds=3):
        """The first record at random offsets: at the tail (local in both), and in what only S3 has."""
        draw = random.Random(1)
        places = {
            "at the tail": ("S3", lambda: self.records - 1 - draw.randrange(1_000)),
            "in S3": ("S3", lambda: draw.randrange(self.until)),
            "on disk, stock broker": ("disk", lambda: draw.randrange(self.until)),
        }
        seen = {place: ([], []) for place in places}
        for _ in range(rounds):
            for place, (tier, offset) in places.items():
                times = []
                while len(times) < attaches:
                    start, last = offset(), self.s3.last_id()
                    first_ms = self.read(tier, start, start + 1)[0]["first_s"] * 1e3
                    # What another has just fetched is in the cache: that is not what is asked here.
                    if place != "in S3" or self.s3.log(operation="GetObject", after=last):
                        times.append(first_ms)
                seen[place][0].append(percentile(times, 50))
                seen[place][1].append(percentile(times, 99))
        base = seen.pop("on disk, stock broker")
        row(f"first record from disk, stock broker{where}: p50", "ms", base[0])
        for place, (p50, p99) in seen.items():
            row(f"first record {place}{where}: p50", "ms", p50, "disk, stock broker", base[0])
            row(f"first record {place}{where}: p99", "ms", p99, "disk, stock broker", base[1])


def overlap(entries):
    """Most requests that were open at the same time."""
    now = int(time.time() * 1000)
    moments = [(entry["start_ms"], 1) for entry in entries] + [(entry["end_ms"] or now, -1) for entry in entries]
    most = open_now = 0
    for _, change in sorted(moments):
        open_now += change
        most = max(most, open_now)
    return most


if __name__ == "__main__":
    main()
