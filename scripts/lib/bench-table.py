#!/usr/bin/env python3
"""Shows what scripts/bench measured. Usage: bench-table.py FOLDER [--write FILE CHECKOUT]

Prints a table of FOLDER/results.jsonl; with --write, puts it as Markdown between the marks of FILE, with machine and versions.
"""

import datetime
import json
import pathlib
import platform
import re
import shutil
import subprocess
import sys

BEGIN, END = "<!-- results: written by scripts/bench --table -->", "<!-- end of results -->"


def main():
    """Prints, or writes."""
    folder = pathlib.Path(sys.argv[1])
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    if sys.argv[2:3] != ["--write"]:
        return show(rows)
    page, checkout = pathlib.Path(sys.argv[3]), pathlib.Path(sys.argv[4])
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{conditions(folder, checkout)}\n{markdown(rows)}\n{END}{after}")
    print(f"{page}: {len(rows)} rows")


def show(rows):
    """The table for a terminal."""
    width = max(len(row["row"]) for row in rows)
    print(f"{'row':{width}}  {'median':>12}  {'unit':15}  {'min':>12}  {'max':>12}  ratio")
    for row in rows:
        print(f"{row['row']:{width}}  {number(row['value']):>12}  {row['unit']:15}  {number(row['min']):>12}  {number(row['max']):>12}  {ratio(row)}")


def markdown(rows):
    """The table for the page."""
    lines = ["| Row | Median | Unit | Smallest to largest of runs | Ratio |", "|---|---:|---|---:|---|"]
    for row in rows:
        spread = f"{number(row['min'])} to {number(row['max'])} of {row['runs']}"
        lines.append(f"| {row['row']} | {number(row['value'])} | {row['unit']} | {spread} | {ratio(row)} |")
    return "\n".join(lines) + "\n"


def ratio(row):
    """The ratio that counts, and to what."""
    return "" if row["ratio"] is None else f"{row['ratio']:.3f} of {row['against']}"


def number(value):
    """Three digits that matter, no more decimals than that needs."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 or size == int(size) else f"{value:.1f}" if size >= 10 else f"{value:.3f}"


def conditions(folder, checkout):
    """Machine, versions, commit, and how busy the machine was."""
    cpu = re.search(r"model name\s*:\s*(.*)", pathlib.Path("/proc/cpuinfo").read_text())
    cores = len(re.findall(r"^processor", pathlib.Path("/proc/cpuinfo").read_text(), re.M))
    memory = int(re.search(r"MemTotal:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text())[1]) >> 20
    measured = datetime.datetime.fromtimestamp((folder / "results.jsonl").stat().st_mtime, datetime.timezone.utc)
    facts = [
        f"Measured {measured:%Y-%m-%d} at commit `{said('git', '-C', checkout, 'rev-parse', '--short', 'HEAD')}`.",
        f"Machine: {cores} cores ({cpu[1] if cpu else platform.machine()}), {memory} GiB of memory, Linux {platform.release()}.",
        f"Versions: {said('rustc', '--version')}; {library(checkout, 'aws-sdk-s3')}; {host(checkout)}; {said('rclone', 'version').splitlines()[0] if shutil.which('rclone') else 'no rclone'}.",
    ]
    return "\n".join(f"- {fact}" for fact in facts) + "\n"


def library(checkout, name):
    """A crate's version."""
    found = re.search(rf'name = "{name}"\nversion = "([^"]+)"', (checkout / "Cargo.lock").read_text())
    return f"{name} {found[1]}" if found else name


def host(checkout):
    """Versions of the broker and of Erlang."""
    script = 'echo "RabbitMQ $(basename "$RABBITMQ_PLUGINS_STOCK"/rabbit-4*)" "OTP $(erl -noshell -eval "io:format(erlang:system_info(otp_release)), halt().")"'
    text = said(checkout / "scripts" / "lib" / "in-host", "sh", "-c", script)
    return text.replace("RabbitMQ rabbit-", "RabbitMQ ") or "no host"


def said(*command):
    """What a command prints, or nothing if it cannot."""
    try:
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


if __name__ == "__main__":
    main()
