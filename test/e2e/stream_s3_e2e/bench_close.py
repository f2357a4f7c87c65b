"""Benchmark rows of whole brokers: closing a consumer, and its connection, while S3 does not answer what they read."""

import argparse
import pathlib
import time

from .bench_rows import native, percentile, row, test_server
from .broker import Broker
from .s3 import S3Test
from .streamproto import FIRST
from .tiered import TieredBroker

STREAM, RECORDS, SAMPLES, ROUNDS = "history", 20_000, 10, 3
TARGET_MS = 100.0


def main():
    """Prints one JSON line per row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=pathlib.Path, required=True)
    options = parser.parse_args()
    with S3Test("bench", program=test_server()) as s3:
        hung = TieredBroker(options.run / "hung", s3, name="hung", fragment_size="1MB")
        stock = Broker(options.run / "stock", "stock")
        try:
            for broker in (hung, stock):
                broker.start()
                with broker.client() as client:
                    client.create(STREAM, stream_max_segment_size_bytes=2_000_000)
                native("publish", "--port", broker.stream_port, "--stream", STREAM, "--records", RECORDS)
            hung.flush_tier(STREAM, RECORDS)
            hung.wait_trimmed(STREAM)
            s3.fault(name="hung", operation="GetObject", hang="never")
            seen = {broker: {"consumer": ([], []), "connection": ([], [])} for broker in (hung, stock)}
            for _ in range(ROUNDS):
                for broker in (hung, stock):
                    for what, close in ("consumer", close_consumer), ("connection", close_connection):
                        times = [close(broker, s3 if broker is hung else None) for _ in range(SAMPLES)]
                        seen[broker][what][0].append(percentile(times, 50))
                        seen[broker][what][1].append(max(times))
        finally:
            for broker in (hung, stock):
                broker.kill()
                broker.wipe()
    for what in ("consumer", "connection"):
        (p50, most), (base_p50, _) = seen[hung][what], seen[stock][what]
        row(f"closing a {what}, stock broker, local: p50", "ms", base_p50)
        row(f"closing a {what} while S3 hangs: p50", "ms", p50, "stock broker, local", base_p50)
        row(f"closing a {what} while S3 hangs: longest", "ms", most, "at most 100 ms", [TARGET_MS] * len(most))


def attach(broker, s3):
    """A consumer whose first GET hangs (of the plugin), or one that has its credit used up (of stock)."""
    client = broker.client()
    last = s3.last_id() if s3 else None
    subscription = client.subscribe(STREAM, FIRST, credit=1)
    if s3:
        s3.wait_log(1, operation="GetObject", hanging="never", after=last)
    else:
        assert subscription.next_chunk(credit=0) is not None
    return client, subscription


def close_consumer(broker, s3):
    """Milliseconds from the request to its answer."""
    client, subscription = attach(broker, s3)
    begun = time.monotonic()
    subscription.close()
    elapsed = time.monotonic() - begun
    client.close()
    return elapsed * 1e3


def close_connection(broker, s3):
    """Milliseconds until the broker has agreed; the subscription is still there."""
    client, _ = attach(broker, s3)
    begun = time.monotonic()
    client.close()
    return (time.monotonic() - begun) * 1e3


if __name__ == "__main__":
    main()
