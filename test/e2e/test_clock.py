"""Retention by age and clocks that are wrong: nothing goes that a stock broker would keep."""

import time

import pytest

from stream_s3_e2e.clock import WallClock
from stream_s3_e2e.consume import consume
from stream_s3_e2e.publish import declare, publish
from stream_s3_e2e.records import verify
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

DAYS = 30
SIZE = lambda sequence: 1_000  # noqa: E731
PER_FRAGMENT = 100


@pytest.fixture
def clock(run_dir):
    return WallClock(run_dir)


@pytest.fixture
def broker(run_dir, s3, clock):
    broker = clock.wears(
        TieredBroker(run_dir, s3, fragment_size=1_000_000, persist_interval_ms=100, bucket_check_interval="1s")
    ).start()
    yield broker
    s3.clear_faults()
    broker.kill()
    broker.wipe()


def fill(broker, stream, fragments, first=0):
    """So many fragments of a hundred records; returns the next offset."""
    for number in range(fragments):
        at = first + number * PER_FRAGMENT
        publish(broker, stream, PER_FRAGMENT, SIZE, first=at)
        broker.flush_tier(stream, at + PER_FRAGMENT)
    return first + fragments * PER_FRAGMENT


def nudge(broker, stream, seconds):
    """Events for the stream's machine, which rests otherwise."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        broker.cut(stream)
        time.sleep(0.3)


def problem(broker, stream):
    return broker.stream_status(stream)["problem_kind"]


def test_a_step_of_the_system_clock_forth_and_back_deletes_nothing(broker, s3, clock):
    declare(broker, "stepped", x_max_age="7D", x_stream_max_segment_size_bytes=150_000)
    end = fill(broker, "stepped", 7)
    objects = set(s3.keys(".fragment"))
    assert len(objects) == 7
    clock.step(broker, DAYS)
    nudge(broker, "stepped", 12)
    assert clock.system_ahead_s(broker) > (DAYS - 1) * 86_400, "the clock was to be ahead all the time"
    clock.step(broker, 0)
    # Whatever was decided meanwhile is persisted, and then carried out.
    end = fill(broker, "stepped", 1, first=end)
    nudge(broker, "stepped", 2)
    assert broker.range("stepped") == (0, end)
    assert objects <= set(s3.keys(".fragment"))
    assert broker.counter("clock_in_doubt") == 0 and problem(broker, "stepped") == "none"
    verify(consume(broker, "stepped", end), 0, end, SIZE)


def test_a_node_that_starts_with_a_wrong_clock_waits_says_so_and_uploads(broker, s3, clock):
    declare(broker, "started", x_max_age="7D", x_stream_max_segment_size_bytes=150_000)
    end = fill(broker, "started", 5)
    objects = set(s3.keys(".fragment"))
    broker.stop()
    clock.set(DAYS)
    # As S3 does: what is signed by a clock that is so wrong is refused.
    s3.fault(name="time", check_time=True)
    broker.start()
    broker.wait_leader("started")
    wait_until(lambda: problem(broker, "started") == "clock", 60, "the problem is shown")
    assert "2592000 s ahead of the store's" in broker.stream_status("started")["problem_text"].replace(
        "2591999", "2592000"
    )
    assert broker.counter("clock_in_doubt") == 1
    assert abs(broker.counter("clock_skew_seconds") / 86_400 - DAYS) < 0.01
    refused = s3.log(rule="time", status=403)
    assert 1 <= len(refused) <= 3, "one answer says what time it is"
    # Everything else goes on.
    end = fill(broker, "started", 1, first=end)
    assert broker.node_status()["bucket_accessible"] == "yes"
    nudge(broker, "started", 2)
    assert broker.range("started") == (0, end)
    assert objects <= set(s3.keys(".fragment"))
    # Set right while the node runs: its virtual machine will not follow, but two of three clocks agree.
    clock.set(0)
    nudge(broker, "started", 3)
    wait_until(lambda: problem(broker, "started") == "none", 70, "the problem is over")
    assert broker.counter("clock_in_doubt") == 0
    nudge(broker, "started", 2)
    assert broker.range("started") == (0, end)
    assert objects <= set(s3.keys(".fragment"))
    lines = [line for line in broker.log().splitlines() if "stream_s3" in line and "clock" in line]
    assert len(lines) == 2 and "nothing is deleted because of its age" in lines[0], "once when it begins, once when it ends"
    verify(consume(broker, "started", end), 0, end, SIZE)


def test_age_takes_all_but_the_newest_once_the_store_s_clock_agrees(broker, s3):
    # More than the clocks may differ by, less than signatures may.
    s3.fault(name="ahead", clock_ahead_ms=600_000)
    wait_until(lambda: broker.counter("clock_in_doubt") == 1, 30, "the store's time is heard")
    declare(broker, "aged", x_max_age="2s")
    end = fill(broker, "aged", 4)
    wait_until(lambda: problem(broker, "aged") == "clock", 90, "the problem is shown")
    assert "s behind the store's" in broker.stream_status("aged")["problem_text"]
    assert 590 < -broker.counter("clock_skew_seconds") < 610
    assert broker.range("aged") == (0, end)
    assert len(s3.keys("/data/")) >= 4
    s3.clear_faults()
    wait_until(lambda: broker.counter("clock_in_doubt") == 0, 30, "the store's time is right again")
    wait_until(lambda: broker.range("aged") == (end - PER_FRAGMENT, end), 90, "the old ones have gone")
    nudge(broker, "aged", 3)
    assert broker.range("aged") == (end - PER_FRAGMENT, end), "the newest stays, however old"
    assert problem(broker, "aged") == "none"
