"""A stream whose local log is lost: what is durable is read out of the remote tier, before and after new records."""

from .consume import consume, consume_amqp091
from .records import fixed, verify
from .streamproto import at_offset

SIZE = fixed(50_000)
DURABLE = 200
# The log begins with a chunk of osiris' own kind, which takes one offset and is delivered to nobody.
BEGUN = DURABLE + 1
MORE = 100


def read_all(broker, stream, until):
    """Every record, by both protocols, from `first` and from an offset, out of the remote tier."""
    served = broker.counter("chunks_delivered_total", tier="remote")
    verify(consume(broker, stream, until), 0, until, SIZE, tracked=True)
    verify(consume_amqp091(broker, stream, until), 0, until, SIZE, tracked=True)
    verify(consume(broker, stream, until, at_offset(DURABLE // 2)), DURABLE // 2, until, SIZE, tracked=True)
    assert broker.counter("chunks_delivered_total", tier="remote") > served


def check_bucket(broker, s3, stream, fragments):
    """One manifest without a hole, and nothing is gone."""
    manifest = broker.manifest(s3, stream)
    manifest.check()
    assert manifest.first == 0
    assert fragments <= set(s3.keys(".fragment")), "durable objects are gone"
    return manifest.next
