"""Benchmark rows of whole brokers: publishing with the plugin off, on, and on with an S3 that never answers.

Each mode has its own broker; they take turns, so that the ratio compares like with like on a noisy machine. The S3 of the row
that counts uses next to no CPU, as one on other machines does; one more row has a real server on the same cores.
"""

import argparse
import pathlib
import time

from .bench_rows import GIB, cpu_seconds, native, null_endpoint, row, test_server
from .broker import Broker
from .s3 import S3Test
from .tiered import TieredBroker

ROUNDS, RECORDS, SIZE = 9, 200_000, 1_000
# A third of what two cores can do, so that the cores are not what is measured.
PACED_RATE = 100_000
REST_SECONDS = 1
PERCENTILES = (50, 99)


def main():
    """Prints one JSON line per row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=pathlib.Path, required=True)
    options = parser.parse_args()
    servers = S3Test("bench", program=test_server()), S3Test("bench", program=test_server())
    with servers[0] as s3, servers[1] as silent, null_endpoint() as endpoint:
        silent.black_hole()
        on = TieredBroker(options.run / "on", s3, name="on", endpoint=endpoint)
        modes = {
            "plugin off": Broker(options.run / "off", "off"),
            "plugin on": on,
            "plugin on, S3 black-holed": TieredBroker(options.run / "hole", silent, name="hole"),
            "plugin on, S3 server on the same cores": TieredBroker(options.run / "beside", s3, name="beside"),
        }
        rates, cpu = {mode: [] for mode in modes}, {mode: [] for mode in modes}
        confirms = {percent: {mode: [] for mode in modes} for percent in PERCENTILES}
        paced = {percent: {mode: [] for mode in modes} for percent in PERCENTILES}
        for broker in modes.values():
            broker.start()
            with broker.client() as client:
                # What S3 does not take stays on disk; a bound keeps that from filling it.
                client.create("bench", max_length_bytes=1_000_000_000, stream_max_segment_size_bytes=100_000_000)
        for number in range(ROUNDS + 1):
            for mode, broker in modes.items():
                before = cpu_seconds(broker.pid)
                seen = publish(broker)
                # What is still uploaded is its own cost, and not the next one's.
                time.sleep(REST_SECONDS)
                if number > 0:  # the first round warms up
                    rates[mode].append(RECORDS / seen["wall_s"])
                    cpu[mode].append((cpu_seconds(broker.pid) - before) / (RECORDS * SIZE / GIB))
                    for percent, by_mode in confirms.items():
                        by_mode[mode].append(seen[f"p{percent}_ms"])
            for mode, broker in modes.items():
                seen = publish(broker, "--rate", PACED_RATE)
                time.sleep(REST_SECONDS)
                if number > 0:
                    for percent, by_mode in paced.items():
                        by_mode[mode].append(seen[f"p{percent}_ms"])
        assert s3.log(operation="PutObject"), "the plugin uploaded nothing"
        assert on.counter("fragments_uploaded_bytes_total") > RECORDS * SIZE, "the plugin uploaded nothing"
        for broker in modes.values():
            broker.kill()
            broker.wipe()
    for mode in modes:
        against, base = (None, None) if mode == "plugin off" else ("plugin off", rates["plugin off"])
        row(f"publish, {mode}", "records/s", rates[mode], against, base)
        base_cpu = None if against is None else cpu["plugin off"]
        row(f"publish, {mode}, broker's CPU", "s/GiB", cpu[mode], against, base_cpu)
        for percent, by_mode in confirms.items():
            base = None if against is None else by_mode["plugin off"]
            row(f"publish, {mode}, p{percent} confirm", "ms", by_mode[mode], against, base)
        for percent, by_mode in paced.items():
            base = None if against is None else by_mode["plugin off"]
            name = f"publish {PACED_RATE:,} records a second, {mode}, p{percent} confirm"
            row(name, "ms", by_mode[mode], against, base)


def publish(broker, *options):
    """What the client saw."""
    return native("publish", "--port", broker.stream_port, "--stream", "bench", "--records", RECORDS, "--record-bytes", SIZE, *options)


if __name__ == "__main__":
    main()
