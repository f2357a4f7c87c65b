"""SIGKILL of the broker at random moments of an upload: nothing below the persisted floor is lost, nothing is there twice."""

import random
import threading

from stream_s3_e2e.amqp10 import encode
from stream_s3_e2e.consume import consume, consume_amqp091
from stream_s3_e2e.records import fixed, payload, verify
from stream_s3_e2e.streamproto import LAST, ConnectionLost
from stream_s3_e2e.tiered import TieredBroker

KILLS = 20
SIZE = fixed(20_000)
STREAM = "killed"


class Publisher(threading.Thread):
    """Publishes numbered records under a name until the broker dies; the broker's deduplication makes resending safe."""

    def __init__(self, broker, stop_after):
        super().__init__(daemon=True)
        self.broker, self.stop_after, self.confirmed, self.error = broker, stop_after, 0, None

    def run(self):
        try:
            with self.broker.client() as client:
                publisher = client.publisher(STREAM, reference="numbers")
                # Publishing ids count from 1, records from 0.
                following = client.last_publishing_id(STREAM, "numbers")
                while following < self.stop_after:
                    numbers = range(following, min(following + 20, self.stop_after))
                    publisher.publish([(n + 1, encode(payload(n, SIZE(n)))) for n in numbers])
                    publisher.wait_confirmed(at_most=40)
                    following = numbers[-1] + 1
                    self.confirmed = following - len(publisher.unconfirmed)
                publisher.wait_confirmed()
                self.confirmed = following
        except (ConnectionLost, OSError):
            pass
        except AssertionError as error:
            self.error = error


def test_twenty_kills(run_dir, s3):
    rng = random.Random(20)
    broker = TieredBroker(run_dir, s3, fragment_size=1_000_000, persist_interval_ms=200).start()
    with broker.client() as client:
        client.create(STREAM, stream_max_segment_size_bytes=3_000_000)
    # A stock broker killed within a second of starting its very first stream does not find its stream coordinator
    # again (Ra's directory is on disk a little later); a restart in order gets that out of the way.
    broker.restart()
    broker.wait_leader(STREAM)
    acknowledged, target, floor = 0, 0, 0
    for kill in range(KILLS):
        target += 2_000
        publisher = Publisher(broker, target)
        requests = s3.last_id()
        publisher.start()
        # The moment of the kill is a number of requests that S3 has seen, not a time. A round makes at least 30.
        s3.wait_log(rng.randrange(1, 28), seconds=60, after=requests, operation="PutObject")
        known = broker.range(STREAM)
        broker.kill()
        publisher.join(60)
        assert publisher.error is None, publisher.error
        acknowledged = max(acknowledged, publisher.confirmed)
        floor = max(floor, known[1] if known else 0)
        broker.start()
        broker.wait_leader(STREAM)
    publisher = Publisher(broker, target)
    publisher.run()
    assert publisher.error is None and publisher.confirmed == target
    with broker.client() as client:
        # A named publisher's sequence is kept in chunks of osiris's own, which take offsets too.
        end = client.subscribe(STREAM, LAST, credit=1).next_chunk(30).next_offset
    broker.flush_tier(STREAM, end)
    first, durable = broker.range(STREAM)
    assert first == 0 and durable >= floor and acknowledged <= target
    broker.wait_trimmed(STREAM)
    served = broker.counter("chunks_delivered_total", tier="remote")
    for records in (consume(broker, STREAM, end), consume_amqp091(broker, STREAM, end, prefetch=200, ack_every=20)):
        assert verify(records, 0, end, SIZE, tracked=True).count == target
    assert broker.counter("chunks_delivered_total", tier="remote") > served
    names = [offset for offset, _ in broker.manifest(s3, STREAM).check().fragments]
    assert names == sorted(set(names)), "an offset is in the manifest twice"
    print(f"{KILLS} kills, {target} records, {len(names)} fragments in the manifest, {len(s3.keys('.fragment'))} objects")
    broker.wipe()
