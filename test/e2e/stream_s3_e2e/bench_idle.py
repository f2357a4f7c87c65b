"""Benchmark rows of whole brokers: what idle streams cost a node in Erlang memory and in requests, beside a stock broker.

What the native side holds of a stream is a row of native/bench.
"""

import argparse
import pathlib
import time

from .bench_rows import row, test_server
from .broker import Broker
from .s3 import S3Test
from .tiered import TieredBroker
from .wait import wait_until

WARM_UP, STREAMS, IDLE_S = 20, 100, 20


def main():
    """Prints one JSON line per row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=pathlib.Path, required=True)
    options = parser.parse_args()
    with S3Test("bench", program=test_server()) as s3:
        tiered = TieredBroker(options.run / "tiered", s3, name="tiered", fragment_max_age="1s")
        stock = Broker(options.run / "stock", "stock")
        seen = {}
        try:
            for broker in (tiered, stock):
                broker.start()
                make(broker, "warm", WARM_UP, s3 if broker is tiered else None)
                before = memory_bytes(broker)
                make(broker, "idle", STREAMS, s3 if broker is tiered else None)
                seen[broker] = (memory_bytes(broker) - before) / STREAMS
                if broker is tiered:
                    last = s3.last_id()
                    time.sleep(IDLE_S)
                    # The look at the bucket every few minutes is the node's, whatever its streams do.
                    requests = [entry for entry in s3.log(after=last) if entry["operation"] != "ListObjectsV2"]
        finally:
            for broker in (tiered, stock):
                broker.kill()
                broker.wipe()
    row(f"idle stream, of {STREAMS}, stock broker: Erlang memory", "bytes", [seen[stock]])
    row(f"idle stream, of {STREAMS}, tiered: Erlang memory", "bytes", [seen[tiered]], "stock broker", [seen[stock]])
    row(f"{STREAMS + WARM_UP} idle tiered streams of a node: S3 requests", "a minute", [len(requests) * 60 / IDLE_S])


def make(broker, prefix, count, s3):
    """Streams with a record each; tiered ones have it in S3 when this returns."""
    with broker.client() as client:
        for number in range(count):
            client.create(f"{prefix}-{number}")
            publisher = client.publisher(f"{prefix}-{number}", publisher_id=number)
            publisher.publish([(0, b"\0" * 100)])
            publisher.wait_confirmed()
    if s3:
        stored = lambda: len([key for key in s3.keys(".manifest") if f"__{prefix}-" in key]) >= count  # noqa: E731
        wait_until(stored, 120, f"roots of {count} streams")


def memory_bytes(broker):
    """What the virtual machine has allocated, garbage not counted."""
    time.sleep(2)
    return int(broker.rpc("begin [garbage_collect(P) || P <- processes()], erlang:memory(total) end."))


if __name__ == "__main__":
    main()
