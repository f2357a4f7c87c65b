"""Bloom filters: a chunk is given out from S3 if and only if it was given out from the local log.

The twin is the same stream before it was tiered: uploads wait until every kind of filter has been read locally.
"""

import pytest

from stream_s3_e2e.consume import consume_amqp10, consume_amqp091, consume_chunks
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.streamproto import FIRST, at_offset
from stream_s3_e2e.tiered import TieredBroker

STREAM, SIZE, COUNT, PER_CHUNK = "filtered", fixed(2_000), 3_000, 10
VALUES = ["red", "green", "blue", None, "a value with spaces, and \u00fcml\u00e4uts"]
# The last records carry no value: who filters sees where the end is only if all see the last chunk.
TAIL = 100


def value(sequence):
    """Runs of three chunks of a value, one of them none."""
    if sequence >= COUNT - TAIL:
        return "end"
    return VALUES[sequence // (3 * PER_CHUNK) % len(VALUES)]


SUBSCRIPTIONS = {
    "one": {"filter.0": "green"},
    "two": {"filter.0": "red", "filter.1": "blue"},
    "unfiltered-too": {"filter.0": "green", "match-unfiltered": "true"},
    "odd": {"filter.0": VALUES[-1]},
    "nobody": {"filter.0": "nobody has this"},
    "all": {f"filter.{n}": v for n, v in enumerate(v for v in VALUES if v)} | {"match-unfiltered": "true"},
}


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    with TieredBroker(run_dir, s3, fragment_size=500_000, persist_interval_ms=100) as node:
        yield node


def delivered(broker, properties, spec=FIRST):
    """Chunks of a filtered subscription, without the last ones, which end it."""
    wanted = properties | {"filter.9": "end"}
    last = lambda chunk: chunk.next_offset >= COUNT  # noqa: E731
    chunks = consume_chunks(broker, STREAM, spec, last, properties=wanted)
    return [(chunk.chunk_id, chunk.data) for chunk in chunks]


def amqp(broker):
    """What AMQP consumers are given: 0-9-1 by chunks, 1.0 by chunks and then by records."""
    wanted = ["green", "end"]
    return {
        "0-9-1": list(consume_amqp091(broker, STREAM, COUNT, arguments={"x-stream-filter": wanted})),
        "1.0": list(consume_amqp10(broker, STREAM, COUNT, filters={"rabbitmq:stream-filter": wanted})),
    }


@pytest.fixture(scope="module")
def local(broker, s3):
    """What every subscription gets from the local log; then the stream is tiered and trimmed."""
    s3.fault(name="later", operation="PutObject", hang="later")
    with broker.client() as client:
        client.create(STREAM, stream_max_segment_size_bytes=1_000_000, stream_filter_size_bytes=64)
    publish(broker, STREAM, COUNT, SIZE, batch=PER_CHUNK, window=0, filters=value)
    every = [(c.chunk_id, c.data) for c in consume_chunks(broker, STREAM, FIRST, lambda c: c.next_offset >= COUNT)]
    found = {name: delivered(broker, properties) for name, properties in SUBSCRIPTIONS.items()}
    found["amqp"] = amqp(broker)
    assert broker.counter("chunks_delivered_total", tier="remote") == 0
    s3.clear_faults()
    broker.flush_tier(STREAM, COUNT)
    broker.wait_trimmed(STREAM)
    assert broker.segments(STREAM)[0][0] > COUNT // 2
    return every, found


@pytest.mark.parametrize("name", SUBSCRIPTIONS)
def test_s3_gives_the_very_chunks_that_the_local_log_gave(broker, local, name):
    every, found = local
    served = broker.counter("chunks_delivered_total", tier="remote")
    assert delivered(broker, SUBSCRIPTIONS[name]) == found[name]
    # From inside, too.
    inside = every[len(every) // 3][0]
    behind = [chunk for chunk in found[name] if chunk[0] >= inside]
    assert delivered(broker, SUBSCRIPTIONS[name], at_offset(inside)) == behind
    assert broker.counter("chunks_delivered_total", tier="remote") > served
    if name == "all":
        assert found[name] == every
    else:
        assert len(found[name]) < len(every), "the filter filtered nothing"


def test_no_chunk_with_a_wanted_value_is_left_out(local):
    every, found = local
    for name, properties in SUBSCRIPTIONS.items():
        values = {v for key, v in properties.items() if key.startswith("filter.")} | {"end"}
        if "match-unfiltered" in properties:
            values.add(None)
        ids = {chunk_id for chunk_id, _ in found[name]}
        # Ends of chunks: where the next one begins.
        ends = [chunk_id for chunk_id, _ in every][1:] + [COUNT]
        for (chunk_id, _), end in zip(every, ends):
            if any(value(n) in values for n in range(chunk_id, end)):
                assert chunk_id in ids, f"{name}: chunk {chunk_id}"


def test_amqp_consumers_with_filters_get_the_same(broker, local):
    _, found = local
    served = broker.counter("chunks_delivered_total", tier="remote")
    assert amqp(broker) == found["amqp"]
    assert all(0 < len(records) < COUNT for records in found["amqp"].values())
    assert broker.counter("chunks_delivered_total", tier="remote") > served


def test_what_a_filter_costs(broker, s3, local):
    """The filter saves the connection, not the request: see docs/decisions, "filters are in the chunks"."""
    _, found = local
    before = s3.last_id()
    chunks = delivered(broker, SUBSCRIPTIONS["one"])
    fetched = sum(entry["response_bytes"] for entry in s3.log(operation="GetObject", after=before))
    kept = sum(len(data) for _, data in chunks)
    print(f"filtered: {kept} bytes delivered, {fetched} bytes fetched, {COUNT * SIZE(0)} bytes in the stream")
    assert len(chunks) == len(found["one"])
