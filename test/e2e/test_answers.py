"""One meaning for each answer of S3: what somebody says in its place, and what an archive keeps, is waited for and ends nobody."""

import threading

import pytest

from stream_s3_e2e import records
from stream_s3_e2e.amqp10 import decode
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.streamproto import FIRST
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

SEGMENT = 4_000_000
COUNT, SIZE = 600, 20_000
# Answers that a reader gets: by ten of them a reader used to be `lost`.
ANSWERS = 14


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    with TieredBroker(run_dir, s3, fragment_size=2_000_000, persist_interval_ms=100) as node:
        yield node


def tiered(broker, stream):
    """A stream of several fragments that is trimmed as far as it can be; returns the keys of the fragments."""
    with broker.client() as client:
        client.create(stream, stream_max_segment_size_bytes=SEGMENT)
    publish(broker, stream, COUNT, fixed(SIZE), batch=10)
    broker.flush_tier(stream, COUNT)
    broker.wait_trimmed(stream)
    return sorted(entry["key"] for entry in broker.s3.objects(f"rabbitmq/stream/{broker.stream_id(stream)}/data/"))


class Reading(threading.Thread):
    """A consumer from the first record to the last, on a connection that has to last."""

    def __init__(self, broker, stream):
        super().__init__(daemon=True)
        self.broker, self.stream = broker, stream
        self.checker, self.failure = records.Checker(0, fixed(SIZE)), None

    def run(self):
        try:
            with self.broker.client() as client:
                subscription = client.subscribe(self.stream, FIRST, credit=5)
                while self.checker.next_offset < COUNT:
                    for offset, message in subscription.next_chunk(120).messages():
                        self.checker.add(offset, decode(message))
                assert client.metadata_updates == []
        except BaseException as failure:
            self.failure = failure

    def end(self):
        self.join(120)
        assert self.failure is None, self.failure
        assert self.checker.next_offset == COUNT


PAGES = {"text": "default backend - 404", "html": "<html><body>404</body></html>", "nothing": ""}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_404_that_is_not_of_s3_is_waited_out(broker, s3, stream_name, page):
    keys = tiered(broker, stream_name)
    lost, bare = broker.counter("remote_reader_bad_places_total", kind="lost"), broker.counter("request_failures_total", reason="bare_404")
    s3.fault(name="ingress", key=keys[1], status=404, page=page, count=ANSWERS)
    reading = Reading(broker, stream_name)
    reading.start()
    wait_until(lambda: broker.counter("request_failures_total", reason="bare_404") - bare >= ANSWERS, 90, "that many answers")
    s3.clear_faults()
    reading.end()
    assert broker.counter("remote_reader_bad_places_total", kind="lost") == lost
    assert broker.node_status()["read_alarm"] == "none"


def test_an_archived_object_is_waited_for_and_named(broker, s3, stream_name):
    keys = tiered(broker, stream_name)
    s3.fault(name="glacier", operation="GetObject", key=keys[1], status=403, code="InvalidObjectState")
    reading = Reading(broker, stream_name)
    reading.start()
    wait_until(lambda: broker.node_status()["read_alarm"] == "archived", 30, "the alarm")
    assert broker.counter("integrity_incidents", kind="archived") == 1
    said = f"archived: archived: object {keys[1]} is in an archive class: restore it"
    wait_until(lambda: said in broker.log(), 90, "the log names the object and says what to do")
    assert reading.is_alive() and reading.failure is None
    s3.clear_faults()
    reading.end()
    assert broker.node_status()["read_alarm"] == "none", "over when the reader goes on"
    assert broker.log().count(said) == 1
