"""Benchmark rows of whole brokers: publishing with the plugin off, on, and on with an S3 that never answers.

Each mode has its own broker; they take turns, so that the ratio compares like with like on a noisy machine.
"""

import argparse
import json
import pathlib
import statistics
import time

from .broker import Broker
from .publish import publish
from .records import fixed
from .s3 import S3Test
from .tiered import TieredBroker

ROUNDS, RECORDS, SIZE = 7, 30_000, 1_000


def main():
    """Prints one JSON line per row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=pathlib.Path, required=True)
    options = parser.parse_args()
    with S3Test("bench") as s3, S3Test("bench") as silent:
        silent.black_hole()
        modes = {
            "plugin off": Broker(options.run / "off", "off"),
            "plugin on": TieredBroker(options.run / "on", s3, name="on"),
            "plugin on, S3 black-holed": TieredBroker(options.run / "hole", silent, name="hole"),
        }
        rates, confirms = {mode: [] for mode in modes}, {mode: [] for mode in modes}
        for mode, broker in modes.items():
            broker.start()
            with broker.client() as client:
                client.create("bench")
        for number in range(ROUNDS + 1):
            for mode, broker in modes.items():
                begun = time.monotonic()
                seen = publish(broker, "bench", RECORDS, fixed(SIZE), first=number * RECORDS)
                if number > 0:  # the first round warms up
                    rates[mode].append(RECORDS / (time.monotonic() - begun))
                    confirms[mode].append(statistics.quantiles(seen, n=100)[98] * 1000)
        put = len(s3.log(operation="PutObject"))
        assert put > 0, "the plugin uploaded nothing"
        for broker in modes.values():
            broker.kill()
            broker.wipe()
    row("publish, plugin off", "records/s", rates["plugin off"], None, None)
    row("publish, plugin off, p99 confirm", "ms", confirms["plugin off"], None, None)
    for mode in list(modes)[1:]:
        row(f"publish, {mode}", "records/s", rates[mode], "plugin off", rates["plugin off"])
        row(f"publish, {mode}, p99 confirm", "ms", confirms[mode], "plugin off", confirms["plugin off"])


def row(name, unit, values, against, base):
    """One row in the form of native/bench; the ratio is the median of the rounds' own ratios."""
    ratio = None if base is None else round(statistics.median(v / b for v, b in zip(values, base)), 3)
    print(
        json.dumps(
            {
                "row": name, "value": round(statistics.median(values), 3), "unit": unit, "against": against,
                "ratio": ratio, "runs": len(values), "min": round(min(values), 3), "max": round(max(values), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
