"""What the benchmark rows of whole brokers share: the form of a row, the fast client, and what processes use."""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
GIB = 1 << 30


def row(name, unit, values, against=None, base=None):
    """Prints one row in the form of native/bench; the ratio is the median of the rounds' own ratios."""
    ratios = [value / other for value, other in zip(values, base) if other] if base is not None else []
    line = {
        "row": name, "value": round(statistics.median(values), 3), "unit": unit, "against": against,
        "ratio": round(statistics.median(ratios), 3) if ratios else None,
        "runs": len(values), "min": round(min(values), 3), "max": round(max(values), 3),
    }
    print(json.dumps(line), flush=True)


def percentile(values, percent):
    """The percentile by nearest rank, as native/bench counts it."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def native(*words, **options):
    """Runs native/bench (its path comes from scripts/bench) and returns the JSON that it prints last."""
    command = [os.environ["STREAM_S3_BENCH"], *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600, **options)
    return json.loads(done.stdout.splitlines()[-1])


def test_server():
    """The S3 test server as scripts/bench built it, optimised."""
    return pathlib.Path(os.environ["STREAM_S3_BENCH"]).with_name("s3-testserver")


@contextlib.contextmanager
def null_endpoint():
    """An S3 that takes everything and keeps nothing, with next to no CPU of its own; its URL."""
    command = [os.environ["STREAM_S3_BENCH"], "endpoint"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def cpu_seconds(pid):
    """User and system time of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Rates:
    """Megabytes a second and CPU seconds per gigabyte, round by round."""

    def __init__(self):
        self.throughput, self.cpu = [], []

    def add(self, seen, cpu_s):
        """One round: what the client printed, and what the measured process used."""
        self.throughput.append(seen["bytes"] / seen["wall_s"] / 1e6)
        self.cpu.append(cpu_s / (seen["bytes"] / GIB))
