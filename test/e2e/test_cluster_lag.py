"""A replica that stands still for a while: what it has not copied stays on the writer's node, within bounds."""

import pytest

from stream_s3_e2e.cluster import Cluster
from stream_s3_e2e.consume import consume
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.wait import wait_until

STREAM = "lagging"
SIZE = fixed(20_000)
SEGMENT = 1_000_000
# Several segments, and more than the buffers of a connection hold.
ROUND = 1_500


@pytest.fixture(scope="module")
def cluster(run_dir, s3):
    with Cluster(
        run_dir, s3, fragment_size=250_000, fragment_max_age="1s", persist_interval_ms=100, request_timeout="10s"
    ) as made:
        made.create(STREAM, stream_max_segment_size_bytes=SEGMENT)
        yield made


def standing(cluster, leader):
    """A replica whose standstill does not cost the metadata store its leader."""
    store = leader.rpc("element(2, ra_leaderboard:lookup_leader(rabbitmq_metadata)).")
    return next(node for node in cluster.others(leader) if node.node != store)


def round_of(cluster, leader, first):
    """Publishes while a replica stands still, until all of it is durable; returns the offset after it."""
    publish(leader, STREAM, ROUND, SIZE, first=first, batch=10, window=50)
    leader.flush_tier(STREAM, first + ROUND)
    return first + ROUND


def lags(leader, what):
    return leader.counter(f"replica_lag_{what}")


def wait_everywhere(cluster, leader, following):
    """Waits until all members have all of it, and nothing is kept for anybody."""

    def is_everywhere():
        ends = [node.rpc(f'maps:get(offset, osiris_counters:overview({{{kind(node, leader)}, {QNAME}}}), -1).') for node in cluster.nodes]
        return all(int(end) >= following - 1 for end in ends)

    wait_until(is_everywhere, 90, "all members have all of it")
    wait_until(lambda: lags(leader, "bytes") == 0, 60, "nothing is kept any more")
    leader.wait_trimmed(STREAM, segments=3)


QNAME = f'rabbit_misc:r(<<"/">>, queue, <<"{STREAM}">>)'


def kind(node, leader):
    return "osiris_writer" if node is leader else "osiris_replica"


def member(node):
    """The process of the member on this node: another one if it was started anew."""
    members = "element(2, rabbitmq_stream_s3_manifest_replica:members())"
    return node.rpc(f'element(2, maps:get(<<"{node.stream_id(STREAM)}">>, {members})).')


def crashes(cluster):
    return sum(node.log().count("accept_chunk_out_of_order") for node in cluster.nodes)


def test_what_a_replica_needs_stays_until_it_has_it(cluster):
    leader = cluster.wait_leader(STREAM)
    following = round_of(cluster, leader, 0)
    wait_everywhere(cluster, leader, following)
    replica = standing(cluster, leader)
    begun = member(replica)
    other = next(node for node in cluster.others(leader) if node is not replica)
    with cluster.frozen(replica):
        following = round_of(cluster, leader, following)
        kept = lags(leader, "segments")
        assert kept >= 5 and lags(leader, "streams") == 1
        assert lags(leader, "bytes") >= kept * SEGMENT / 2
        # All of it is on the leader's disk, and only there: nobody replicates from the other one.
        assert len(leader.segments(STREAM)) > kept
        other.wait_trimmed(STREAM, segments=3)
    wait_everywhere(cluster, leader, following)
    assert lags(leader, "given_up_total") == 0
    # The same member goes on: it was not started anew, and its log not thrown away.
    assert member(replica) == begun
    assert crashes(cluster) == 0


def test_no_more_stays_than_the_setting_allows(cluster):
    leader = cluster.wait_leader(STREAM)
    following = leader.range(STREAM)[1]
    # As with `stream_s3.replica_lag.max_bytes = 3MB` from the start.
    key = "{rabbitmq_stream_s3_config, checked}"
    leader.rpc(f"persistent_term:put({key}, (persistent_term:get({key}))#{{replica_lag_max_bytes := 3145728}}).")
    replica = standing(cluster, leader)
    with cluster.frozen(replica):
        following = round_of(cluster, leader, following)
        wait_until(lambda: lags(leader, "given_up_total") > 0, 60, "the oldest of it is given up")
        assert lags(leader, "bytes") <= 3_145_728
        assert "are no longer kept for replica" in leader.log()
    wait_everywhere(cluster, leader, following)
    # Nothing is lost: on that node, too, every record comes.
    replica.wait_persisted(STREAM, following)
    verify(consume(replica, STREAM, following), 0, following, SIZE)
