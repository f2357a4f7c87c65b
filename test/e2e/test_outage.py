"""S3 goes away while records are published: publishers notice nothing, uploads catch up, readers see everything."""

import time

import pytest

from stream_s3_e2e.consume import consume, consume_amqp091
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.s3 import Ceph
from stream_s3_e2e.tiered import TieredBroker

OUTAGE_SECONDS = 60
SIZE = fixed(20_000)
BURST = 5_000


@pytest.fixture(scope="module")
def s3(run_dir):
    with Ceph("outage", port=17720, folder=run_dir / "ceph") as server:
        yield server


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    with TieredBroker(run_dir, s3, fragment_size=8_000_000, persist_interval_ms=500) as node:
        yield node


def burst(broker, stream, first):
    """Publishes a burst; returns records per second."""
    begun = time.monotonic()
    publish(broker, stream, BURST, SIZE, first=first)
    return BURST / (time.monotonic() - begun)


@pytest.mark.parametrize("kind", ["pause", "down"])
def test_a_minute_without_s3(broker, s3, kind):
    stream = f"outage-{kind}"
    with broker.client() as client:
        client.create(stream, stream_max_segment_size_bytes=20_000_000)
    published, rates = 0, {"before": [], "during": []}
    for _ in range(3):
        rates["before"].append(burst(broker, stream, published))
        published += BURST
    broker.flush_tier(stream, published)
    getattr(s3, kind)()
    begun = time.monotonic()
    while time.monotonic() - begun < OUTAGE_SECONDS:
        rates["during"].append(burst(broker, stream, published))
        published += BURST
        if published >= 80_000:
            # Enough data to see that nothing waits; the minute goes on without more of it.
            time.sleep(max(0.0, OUTAGE_SECONDS - (time.monotonic() - begun)))
    first, durable = broker.range(stream)
    assert durable < published, "the outage did not bite: everything was persisted"
    {"pause": s3.resume, "down": s3.up}[kind]()
    broker.flush_tier(stream, published)
    broker.wait_trimmed(stream)
    before, during = (sorted(rates[when])[len(rates[when]) // 2] for when in ("before", "during"))
    print(f"{kind}: {before:.0f} records/s before, {during:.0f} during the outage (medians)")
    # Noise of a shared machine is far smaller than waiting for S3 would be.
    assert during > before * 0.5, f"publishers felt the outage: {before:.0f} -> {during:.0f} records/s"
    served = broker.counter("chunks_delivered_total", tier="remote")
    verify(consume(broker, stream, published), 0, published, SIZE)
    verify(consume_amqp091(broker, stream, published, prefetch=500, ack_every=50), 0, published, SIZE)
    assert broker.counter("chunks_delivered_total", tier="remote") > served
