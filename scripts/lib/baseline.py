"""Faults that a room may still have, counted: scripts/lib/baseline.tsv holds CHECK, ROOM, COUNT. A count may only shrink.

Usage: imported by check-english and check-layout
"""

import collections
import pathlib

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
FILE = TOP / "scripts" / "lib" / "baseline.tsv"
ROOMS = ("docs/decisions", "docs", "scripts", "erlang_src", "priv", "native", "test")


def room(name):
    """The room of a file: a crate, or a folder near the top."""
    parts = name.split("/")
    if parts[0] in ("native", "test") and len(parts) > 2:
        return "/".join(parts[:2])
    return next((room for room in ROOMS if name.startswith(room + "/")), "top")


def allowed():
    """(check, room) to count."""
    rows = (line.split("\t") for line in FILE.read_text().splitlines() if line and not line.startswith("#"))
    return {(check, where): int(count) for check, where, count in rows}


def compare(check, faults, write=False):
    """Counts (file, message) pairs by room; prints the rooms that have more than they may, with their faults. True if one has."""
    found = collections.Counter(room(name) for name, _ in faults)
    before = allowed()
    if write:
        before = {key: count for key, count in before.items() if key[0] != check}
        before.update({(check, where): count for where, count in found.items()})
        head = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
        FILE.write_text("\n".join(head + sorted(f"{name}\t{where}\t{count}" for (name, where), count in before.items())) + "\n")
    worse = False
    for where, count in sorted(found.items()):
        may = before.get((check, where), 0)
        if count > may:
            worse = True
            for name, message in faults:
                if room(name) == where:
                    print(f"{check}: {message}")
            print(f"{check}: {where} has {count}, may have {may}")
    fewer = sorted(where for (name, where), may in before.items() if name == check and found[where] < may)
    if fewer:
        print(f"{check}: fewer than allowed in {', '.join(fewer)}: write it down with scripts/check-{check} --baseline")
    return worse
