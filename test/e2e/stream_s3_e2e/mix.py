"""The mix that the demo publishes: what record N of a stream is, how it is sent, and who can see it.

A mix is a list of phases, each a run of consecutive offsets sent in one way. Owns sizes and order, sends nothing itself
but by the publishers of `publish.py`.
"""

import bisect
import dataclasses

from . import records
from .publish import publish, publish_batches


@dataclasses.dataclass(frozen=True)
class Phase:
    """A run of records sent in one way."""

    kind: str
    first: int
    count: int
    sizes: object

    @property
    def end(self):
        """The offset after its last record."""
        return self.first + self.count


class Mix:
    """Phases in order; callable as the size rule of the whole stream."""

    def __init__(self, scale=1.0):
        self.phases = []
        add = self._add
        add("single", 100, records.fixed(16))
        add("plain", int(40_000 * scale), records.mixed)
        add("plain", int(150 * scale), records.fixed(1_000_000))
        add("gzip", int(20_000 * scale), records.fixed(1_000))
        add("batch", int(20_000 * scale), records.fixed(1_000))
        add("filtered", int(16_000 * scale), records.fixed(5_000))
        add("single", 100, records.fixed(16))
        add("plain", int(4_000 * scale), records.mixed)
        self._ends = [phase.end for phase in self.phases]

    def _add(self, kind, count, sizes):
        first = self.phases[-1].end if self.phases else 0
        self.phases.append(Phase(kind, first, count, sizes))

    @property
    def count(self):
        """Records in all."""
        return self.phases[-1].end

    @property
    def bytes(self):
        """Bytes of all bodies."""
        return sum(phase.sizes(n) for phase in self.phases for n in range(phase.first, phase.end))

    def phase(self, sequence):
        """The phase that a record belongs to."""
        return self.phases[bisect.bisect_right(self._ends, sequence)]

    def __call__(self, sequence):
        return self.phase(sequence).sizes(sequence)

    def visible_to_amqp(self, sequence):
        """A stock broker leaves compressed sub-batches out of AMQP deliveries."""
        return self.phase(sequence).kind != "gzip"

    def publish(self, broker, stream, progress=lambda phase: None):
        """Publishes everything, confirmed."""
        for phase in self.phases:
            progress(phase)
            if phase.kind == "single":
                # One at a time: each record becomes a chunk of its own.
                publish(broker, stream, phase.count, phase.sizes, first=phase.first, batch=1, window=0)
            elif phase.kind in ("gzip", "batch"):
                publish_batches(
                    broker, stream, phase.count, phase.sizes, first=phase.first, compressed=phase.kind == "gzip"
                )
            else:
                filters = records.filter_value if phase.kind == "filtered" else None
                publish(broker, stream, phase.count, phase.sizes, first=phase.first, filters=filters)
