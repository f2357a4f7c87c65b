"""The plugin opens no port by itself: its metrics are where rabbitmq_prometheus runs, whichever came first."""

import urllib.error

import pytest

from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.tiered import PLUGIN, TieredBroker
from stream_s3_e2e.wait import wait_until

METRIC = "rabbitmq_stream_s3_active"
LISTENERS = "[Protocol || {listener, _, Protocol, _, _, _, _} <- rabbit_networking:active_listeners()]."


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    with TieredBroker(run_dir, s3) as node:
        yield node


def ours(broker):
    """What the page has of the plugin; None without a page."""
    try:
        return broker.metrics().names(METRIC)
    except (urllib.error.URLError, ConnectionError):
        return None


def wait_shown(broker):
    wait_until(lambda: ours(broker) == [METRIC], 30, "the plugin's metrics are on the page")


def opens_nothing(broker):
    assert broker.node_status()["mode"] == "active"
    assert "http/prometheus" not in broker.rpc(LISTENERS)
    assert ours(broker) is None
    running = broker.rpc("[App || {App, _, _} <- application:which_applications()].")
    assert "rabbitmq_prometheus" not in running and PLUGIN in running


def test_metrics_come_and_go_with_rabbitmq_prometheus(broker):
    wait_shown(broker)
    # Without it, on a running node and after a start: no listener, and the plugin works.
    broker.plugins("disable", "rabbitmq_prometheus")
    opens_nothing(broker)
    broker.restart()
    opens_nothing(broker)
    # It comes later, goes, and comes back.
    broker.plugins("enable", "rabbitmq_prometheus")
    wait_shown(broker)
    broker.plugins("disable", "rabbitmq_prometheus")
    opens_nothing(broker)
    broker.plugins("enable", "rabbitmq_prometheus")
    wait_shown(broker)
    # Both at the start of the node.
    broker.restart()
    wait_shown(broker)
    # The plugin goes, and comes back after it.
    broker.plugins("disable", PLUGIN)
    assert ours(broker) == []
    broker.plugins("enable", PLUGIN)
    wait_shown(broker)
    for path in ("/metrics/per-object", "/metrics/detailed?family=stream_s3_metrics"):
        broker.metrics(path)
    assert broker.errors() == []


def test_an_inert_plugin_says_so_on_the_page(run_dir, s3):
    with TieredBroker(run_dir, s3, name="rabbit2", bucket=None) as node:
        assert node.node_status()["mode"] == "inert"
        wait_shown(node)
        assert node.counter("active") == 0


def test_the_sums_of_the_node_are_those_of_its_streams(broker):
    streams = ["sum-1", "sum-2"]
    with broker.client() as client:
        for number, stream in enumerate(streams, start=1):
            client.create(stream)
            publish(broker, stream, 100 * number, fixed(1_000), client=client)
    for number, stream in enumerate(streams, start=1):
        broker.flush_tier(stream, 100 * number)
    per_object = broker.metrics("/metrics/per-object")
    for name in ("manifest_total_size", "manifest_fragments", "edits_since_persist", "assembly_payload_bytes"):
        name = f"rabbitmq_stream_s3_stream_{name}"
        assert broker.metrics().value(name) == per_object.sum(name)
    assert broker.counter("stream_manifest_total_size") > 300_000
    assert broker.counter("stream_manifest_fragments") >= 2
    assert broker.counter("unpersisted_records") == broker.counter("streams_stalled") == 0
    # A stream that goes takes its share with it.
    with broker.client() as client:
        client.delete(streams[1])
    wait_until(lambda: broker.counter("stream_manifest_total_size") < 200_000, 30, "the sums follow")
