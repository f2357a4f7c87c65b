"""Benchmark rows of whole brokers: publishing with the plugin off, on, and on with an S3 that never answers.

Each mode has its own broker; they take turns, so that the ratio compares like with like on a noisy machine.
"""

import argparse
import pathlib

from .bench_rows import native, row, test_server
from .broker import Broker
from .s3 import S3Test
from .tiered import TieredBroker

ROUNDS, RECORDS, SIZE = 9, 200_000, 1_000
PERCENTILES = (50, 99)


def main():
    """Prints one JSON line per row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=pathlib.Path, required=True)
    options = parser.parse_args()
    with S3Test("bench", program=test_server()) as s3, S3Test("bench", program=test_server()) as silent:
        silent.black_hole()
        modes = {
            "plugin off": Broker(options.run / "off", "off"),
            "plugin on": TieredBroker(options.run / "on", s3, name="on"),
            "plugin on, S3 black-holed": TieredBroker(options.run / "hole", silent, name="hole"),
        }
        rates = {mode: [] for mode in modes}
        confirms = {percent: {mode: [] for mode in modes} for percent in PERCENTILES}
        for broker in modes.values():
            broker.start()
            with broker.client() as client:
                # What S3 does not take stays on disk; a bound keeps that from filling it.
                client.create("bench", max_length_bytes=1_000_000_000, stream_max_segment_size_bytes=100_000_000)
        for number in range(ROUNDS + 1):
            for mode, broker in modes.items():
                seen = native("publish", "--port", broker.stream_port, "--stream", "bench", "--records", RECORDS,
                              "--record-bytes", SIZE)
                if number > 0:  # the first round warms up
                    rates[mode].append(RECORDS / seen["wall_s"])
                    for percent, by_mode in confirms.items():
                        by_mode[mode].append(seen[f"p{percent}_ms"])
        put = len(s3.log(operation="PutObject"))
        assert put > 0, "the plugin uploaded nothing"
        for broker in modes.values():
            broker.kill()
            broker.wipe()
    for mode in modes:
        against, base = (None, None) if mode == "plugin off" else ("plugin off", rates["plugin off"])
        row(f"publish, {mode}", "records/s", rates[mode], against, base)
        for percent, by_mode in confirms.items():
            base = None if against is None else by_mode["plugin off"]
            row(f"publish, {mode}, p{percent} confirm", "ms", by_mode[mode], against, base)


if __name__ == "__main__":
    main()
