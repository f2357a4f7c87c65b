"""A thousand idle streams: what each costs this node, and S3. Run with -s, it prints the figures."""

import pytest

from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

STREAMS = 1_000
FIRST_STREAMS = 200
NATIVE_BYTES_MAX = 16 * 1024
SIZE = fixed(500)
RECORDS = 10


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    # The bucket is checked for the node, not for its streams.
    settings = {"fragment_max_age": "1s", "persist_interval_ms": 100, "bucket_check_interval": "0"}
    with TieredBroker(run_dir, s3, **settings) as node:
        yield node


def figures(broker):
    """Native bytes, resident bytes of the whole node, processes of ours and their bytes."""
    broker.rpc("[garbage_collect(P) || P <- processes()].")
    ours = broker.rpc(
        "lists:foldl(fun(P, {N, B}) -> case proc_lib:translate_initial_call(P) of"
        " {rabbitmq_stream_s3_replica_reader, _, _} -> {memory, M} = process_info(P, memory), {N + 1, B + M};"
        " {supervisor, rabbitmq_stream_s3_stream_sup, _} -> {memory, M} = process_info(P, memory), {N + 1, B + M};"
        " _ -> {N, B} end end, {0, 0}, processes())."
    )
    count, held = (int(part) for part in ours.strip("{}").split(","))
    return {
        "native": int(broker.counter("native_memory_bytes")),
        "resident": broker.rss_bytes(),
        "processes": count,
        "erlang": held,
    }


def tiered(broker, names):
    """Makes streams, publishes to them, and waits until all there are are durable."""
    for start in range(0, len(names), 200):
        # A connection has 256 publishers at most.
        with broker.client() as client:
            for name in names[start : start + 200]:
                client.create(name)
                publish(broker, name, RECORDS, SIZE, client=client)
    wait_until(lambda: pending(broker) == 0, 300, "all of them are durable", every=1.0)


def pending(broker):
    """Tiered streams that are not durable to their end."""
    return int(broker.rpc(
        f"length([x || {{_, Range}} <- ets:tab2list(rabbitmq_stream_s3_manifest_cache),"
        f" not is_map(Range) orelse maps:get(next_offset, Range) =/= {RECORDS}])."
    ))


def test_what_a_thousand_idle_streams_cost(broker, s3):
    # The first pay for what all share: connections and their buffers, tables that have grown.
    tiered(broker, [f"first{number}" for number in range(FIRST_STREAMS)])
    before = figures(broker)
    tiered(broker, [f"idle{number}" for number in range(STREAMS)])
    quiet_since = s3.last_id()
    with pytest.raises(AssertionError, match="0 of 1 requests"):
        s3.wait_log(1, seconds=60, after=quiet_since)
    after = figures(broker)
    each = {name: (after[name] - before[name]) / STREAMS for name in after}
    counted = broker.metrics().sum("rabbitmq_stream_s3_streams_uploading")
    assert counted == FIRST_STREAMS + STREAMS, "not all of them are tiered"
    print(
        f"{STREAMS} idle streams, each: {each['native']:.0f} bytes native; {each['processes']:.1f} Erlang processes of ours,"
        f" {each['erlang']:.0f} bytes; {each['resident']:.0f} bytes resident, RabbitMQ's own for a stream included;"
        " requests in 60 s: 0"
    )
    assert each["native"] < NATIVE_BYTES_MAX
    assert each["processes"] == 2
