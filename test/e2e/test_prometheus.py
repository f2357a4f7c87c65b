"""A real Prometheus scrapes a real node: every query of the dashboard and every rule has data there, and a fault fires its own alert."""

import json
import math
import re

import pytest

from stream_s3_e2e.broker import TOP
from stream_s3_e2e.consume import consume
from stream_s3_e2e.prometheus import Prometheus, at_once
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.streamproto import FIRST
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

RULES = TOP / "priv" / "prometheus" / "rules.yml"
DASHBOARD = TOP / "priv" / "grafana" / "RabbitMQ-Stream-Tiered-Storage.json"
STREAM, COUNT, SIZE = "watched", 600, fixed(20_000)
# Its four hours are computed from the seconds that this test has.
SLOW = ["StreamTierDiskBeforeS3"]


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    with TieredBroker(
        run_dir, s3, fragment_size=2_000_000, persist_interval_ms=100, bucket_check_interval="1s",
    ) as node:
        with node.client() as client:
            client.create(STREAM, stream_max_segment_size_bytes=4_000_000)
        yield node


@pytest.fixture(scope="module")
def prometheus(run_dir, broker):
    port = int((run_dir / "base-port").read_text()) + 15
    with Prometheus(run_dir / "prometheus", port, broker.prometheus_port, at_once(RULES.read_text(), SLOW)) as made:
        # Its first samples are of a node that has done nothing: rates are of what follows.
        wait_until(lambda: made.query("rabbitmq_stream_s3_active"), 30, "the plugin's metrics are scraped")
        publish(broker, STREAM, COUNT, SIZE, batch=10)
        broker.flush_tier(STREAM, COUNT)
        broker.wait_trimmed(STREAM)
        verify(consume(broker, STREAM, COUNT), 0, COUNT, SIZE)
        assert broker.counter("chunks_delivered_total", tier="remote") > 0
        yield made


def queries():
    """Title of the panel and expression of every query of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])]


def test_every_query_of_the_dashboard_has_data(prometheus):
    (identity, _), *_ = wait_until(
        lambda: prometheus.query('rabbitmq_identity_info{job="rabbitmq"}'), 30, "the node says who it is"
    )
    values = {
        "$rabbitmq_cluster": identity["rabbitmq_cluster"], "$namespace": "", "$endpoint": identity["rabbitmq_endpoint"],
        "$__rate_interval": "5m", "$__range": "5m",
    }
    assert len(queries()) > 40
    for title, expression in queries():
        for variable, value in values.items():
            expression = expression.replace(variable, value)
        assert "$" not in expression

        def has_numbers(expression=expression):
            found = prometheus.query(expression)
            return found and all(not math.isnan(value) for _, value in found)

        wait_until(has_numbers, 30, f"{title}: {expression}")


def test_every_rule_has_data(prometheus):
    rules = wait_until(
        lambda: (rules := prometheus.rules()) and all(rule["health"] == "ok" for rule in rules) and rules, 30, "rules are evaluated"
    )
    assert len(rules) == RULES.read_text().count("- alert:")
    for rule in rules:
        for name in set(re.findall(r"\brabbitmq_\w+\b(?=[\[{) ]|$)", rule["query"])) - {"rabbitmq_cluster", "rabbitmq_node"}:
            assert prometheus.query(name), f"{rule['name']}: {name}"


def test_a_healthy_node_fires_none(prometheus):
    wait_until(lambda: prometheus.firing() == set(), 30, "no alert")
    assert prometheus.query("rabbitmq_stream_s3_bucket_accessible")[0][1] == 1
    assert prometheus.query("rabbitmq_stream_s3_unpersisted_records")[0][1] == 0


def fires(prometheus, *names):
    """Waits until these alerts fire, and no other."""
    wait_until(lambda: prometheus.firing() == set(names), 60, f"{names or 'no alert'} fires")


def test_damage_fires_its_own_alert_until_it_is_repaired(prometheus, broker, s3):
    with broker.client() as client:
        client.create("damaged", stream_max_segment_size_bytes=4_000_000)
    publish(broker, "damaged", COUNT, SIZE, batch=10)
    broker.flush_tier("damaged", COUNT)
    broker.wait_trimmed("damaged")
    second = sorted(entry["key"] for entry in s3.objects(f"rabbitmq/stream/{broker.stream_id('damaged')}/data/"))[1]
    whole = s3.get(second)
    bad = bytearray(whole)
    bad[len(bad) // 2] ^= 0x10
    s3.put(second, bytes(bad))
    with broker.client() as client:
        subscription = client.subscribe("damaged", FIRST, credit=5)
        while subscription.next_chunk(3):
            pass
    fires(prometheus, "StreamTierIntegrity")
    assert [labels["kind"] for labels, places in prometheus.query("rabbitmq_stream_s3_integrity_incidents > 0")] == ["corrupt"]
    s3.put(second, whole)
    verify(consume(broker, "damaged", COUNT), 0, COUNT, SIZE)
    fires(prometheus)


def test_refused_requests_fire_their_own_alerts_until_they_are_allowed(prometheus, broker, s3):
    # Listing is allowed, writing is not.
    s3.fault(name="denied", operation="PutObject", status=403, code="AccessDenied")
    publish(broker, STREAM, COUNT, SIZE, first=COUNT, batch=10)
    broker.cut(STREAM)
    fires(prometheus, "StreamTierUploadStalled")
    ((labels, streams),) = prometheus.query("rabbitmq_stream_s3_streams_stalled")
    assert streams == 1 and prometheus.query("rabbitmq_stream_s3_durability_lag_seconds")[0][1] > 0
    s3.clear_faults()
    broker.flush_tier(STREAM, 2 * COUNT)
    fires(prometheus)
    s3.fault(name="bucket", status=403, code="AccessDenied")
    fires(prometheus, "StreamTierBucketUnusable")
    assert prometheus.query('rabbitmq_stream_s3_bucket_state{state="inaccessible"}')[0][1] == 1
    s3.clear_faults()
    fires(prometheus)
