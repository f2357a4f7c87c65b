"""Waiting for a condition with a deadline: the only way in which a test here waits."""

import time


class DeadlineError(AssertionError):
    """The condition did not hold in time; the text says what was seen last."""


def wait_until(condition, seconds=30.0, what="condition", every=0.05):
    """Polls until `condition()` is truthy and returns that value; fails saying what it last saw.

    A condition that raises AssertionError or OSError is "not yet", and its text is shown at the end.
    """
    deadline = time.monotonic() + seconds
    last = None
    while True:
        try:
            value = condition()
            if value:
                return value
            last = repr(value)
        except (AssertionError, OSError) as error:
            last = f"{type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            raise DeadlineError(f"{what}: not within {seconds} s (last: {last})")
        time.sleep(every)
