"""A wall clock that a test sets: libfaketime in the server's process, the monotonic clock untouched."""

import pathlib

from .broker import TOP, run
from .wait import wait_until


class WallClock:
    """The clock of one broker; give it to the broker before it starts."""

    def __init__(self, run_dir, name="clock"):
        self.file = pathlib.Path(run_dir) / f"{name}.faketime"
        self.set(0)
        self.env = {
            "STREAM_S3_PRELOAD": run(TOP / "scripts" / "lib" / "faketime").strip(),
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_CACHE_DURATION": "1",
            # Two names for the same in two versions.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def wears(self, broker):
        """Makes a broker that has not started yet go by this clock."""
        broker.env = {**broker.env, **self.env}
        return broker

    def set(self, days):
        """So many days from the real time, in a second at most."""
        # Never half written: who reads it does so at any moment.
        part = self.file.with_suffix(".part")
        part.write_text(f"{days:+d}d\n")
        part.rename(self.file)

    def step(self, broker, days):
        """Sets it while the broker runs, and waits until the broker's system clock says so."""
        self.set(days)
        wait_until(lambda: abs(self.system_ahead_s(broker) - days * 86_400) < 60, 30, f"the clock is {days} days off")

    @staticmethod
    def system_ahead_s(broker):
        """How far the system's clock is ahead of the virtual machine's own, in seconds."""
        return int(broker.rpc("os:system_time(second) - erlang:system_time(second)."))
