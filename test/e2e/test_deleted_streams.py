"""Objects of deleted streams go, whatever was down when the stream was deleted."""

import json

import pytest

from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.tiered import PLUGIN, TieredBroker
from stream_s3_e2e.wait import wait_until

COUNT = 200
SIZE = fixed(20_000)


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    with TieredBroker(
        run_dir, s3, fragment_size=1_000_000, persist_interval_ms=100, reconciliation_interval="1s"
    ) as node:
        yield node


def filled(broker, stream):
    """A stream with objects; returns its id."""
    with broker.client() as client:
        client.create(stream)
    publish(broker, stream, COUNT, SIZE)
    broker.flush_tier(stream, COUNT)
    return broker.stream_id(stream)


def delete(broker, stream):
    with broker.client() as client:
        client.delete(stream)


def folder(s3, stream_id):
    return s3.keys(f"rabbitmq/stream/{stream_id}/")


def wait_gone(s3, stream_id):
    wait_until(lambda: not folder(s3, stream_id), 60, f"objects of {stream_id} are deleted")


def test_s3_is_down_and_the_node_restarts(broker, s3):
    beside = filled(broker, "beside")
    kept = folder(s3, beside)
    stream_id = filled(broker, "while-down")
    s3.fault(name="down", status=503)
    delete(broker, "while-down")
    s3.wait_log(1, operation="ListObjectsV2", key=stream_id, status=503)
    broker.restart()
    assert folder(s3, stream_id)
    s3.clear_faults()
    wait_gone(s3, stream_id)
    assert folder(s3, beside) == kept


def test_deletions_are_refused(broker, s3):
    stream_id = filled(broker, "refused")
    s3.fault(name="forbidden", operation="DeleteObjects", status=403)
    delete(broker, "refused")
    s3.wait_log(1, operation="DeleteObjects", status=403)
    assert folder(s3, stream_id)
    # It does not come back because somebody recovers what the bucket has, and nobody beside it is touched.
    results = json.loads(broker.streams("stream_s3_recover", "run", "--formatter", "json"))
    verdicts = {result["stream_id"]: result["verdict"] for result in results}
    assert verdicts.pop(stream_id) == "deleted"
    assert set(verdicts.values()) == {"in_use"}
    assert broker.rpc('rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"refused">>)).') == "{error, not_found}"
    s3.clear_faults()
    wait_gone(s3, stream_id)


def test_the_plugin_is_disabled(broker, s3):
    stream_id = filled(broker, "while-disabled")
    broker.plugins("disable", PLUGIN)
    delete(broker, "while-disabled")
    before = folder(s3, stream_id)
    assert before
    broker.plugins("enable", PLUGIN)
    wait_gone(s3, stream_id)


def test_the_node_is_killed(broker, s3):
    stream_id = filled(broker, "while-killed")
    s3.fault(name="down", status=503)
    delete(broker, "while-killed")
    broker.kill()
    s3.clear_faults()
    broker.start()
    wait_gone(s3, stream_id)


def test_a_name_that_is_deleted_and_declared_again_in_a_loop(broker, s3):
    """Each incarnation has a folder of its own: those before go, the last one stays."""
    ids = []
    for _ in range(5):
        ids.append(filled(broker, "again"))
        delete(broker, "again")
    last = filled(broker, "again")
    for stream_id in ids:
        wait_gone(s3, stream_id)
    assert folder(s3, last)
