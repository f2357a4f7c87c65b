"""What publishers did, what consumers saw, and whether the two agree.

A *history* is made of ledgers (one for each publisher: what it sent, in which attempt, and what was confirmed) and
observations (one for each consumer: which record it saw at which offset). `violations` compares them with the *truth*,
which is what a fresh consumer sees from `first` when all is over. Owns the bytes of the records and the judgement;
knows nothing of brokers, sockets or threads.

A record says who sent it: publisher, attempt (a new one for each connection) and sequence. So a record that is there
twice is told from one that was sent twice, because its first confirmation was never seen.
"""

import array
import bisect
import dataclasses
import struct

from .records import filler

HEADER = struct.Struct(">4sIBHQ")
MAGIC = b"S3HC"
SIZE_MIN = HEADER.size
_SEQUENCE_BITS, _ATTEMPT_BITS = 40, 16
_SHOWN = 20


class WrongBytes(AssertionError):
    """A record does not hold what any publisher sends."""


class HistoryError(AssertionError):
    """What was seen cannot be explained by what was done."""


def key_of(publisher, attempt, sequence):
    """A record's identity in one number."""
    return (publisher << (_ATTEMPT_BITS + _SEQUENCE_BITS)) | (attempt << _SEQUENCE_BITS) | sequence


def parts_of(key):
    """(publisher, attempt, sequence) of an identity."""
    sequence = key & ((1 << _SEQUENCE_BITS) - 1)
    attempt = (key >> _SEQUENCE_BITS) & ((1 << _ATTEMPT_BITS) - 1)
    return key >> (_ATTEMPT_BITS + _SEQUENCE_BITS), attempt, sequence


def payload(publisher, attempt, sequence, size):
    """The bytes of a record."""
    head = HEADER.pack(MAGIC, size, publisher, attempt, sequence)
    return head + filler(key_of(publisher, attempt, sequence), size - SIZE_MIN)


def identify(body, offset):
    """The identity of a record whose every byte is right; fails otherwise."""
    if len(body) >= SIZE_MIN:
        magic, size, publisher, attempt, sequence = HEADER.unpack_from(body)
        if magic == MAGIC and size == len(body) and payload(publisher, attempt, sequence, size) == body:
            return key_of(publisher, attempt, sequence)
    raise WrongBytes(f"offset {offset}: {len(body)} bytes that nobody sent, beginning {bytes(body[:24]).hex()}")


class Ledger:
    """What one publisher did. `named`: the broker removes what it sends twice."""

    def __init__(self, publisher, named=False):
        self.publisher, self.named = publisher, named
        # [first sequence, sequence after the last one sent] of each attempt.
        self.attempts = []
        self._confirmed = bytearray()
        self.confirmed_count = 0
        # The broker has forgotten by which ids it knows what is sent twice.
        self.ids_lost = False

    def begin(self, first):
        """A new attempt, which starts with that sequence; returns its number."""
        self.attempts.append([first, first])
        return len(self.attempts) - 1

    def sent(self, following):
        """The attempt has sent everything below that sequence."""
        self.attempts[-1][1] = following

    def confirm(self, sequence):
        """The broker has confirmed a record."""
        if sequence >= len(self._confirmed):
            self._confirmed.extend(bytes(sequence + 1 - len(self._confirmed)))
        self.confirmed_count += not self._confirmed[sequence]
        self._confirmed[sequence] = 1
        self.ids_lost = False

    def lose(self, loss):
        """What was confirmed and is lost has to be sent, and confirmed, again."""
        for publisher, _, sequence in map(parts_of, loss.records.values()):
            if publisher == self.publisher and self.is_confirmed(sequence):
                self._confirmed[sequence] = 0
                self.confirmed_count -= 1
        self.ids_lost = True

    def is_confirmed(self, sequence):
        """Whether the broker has confirmed it, in whichever attempt."""
        return sequence < len(self._confirmed) and bool(self._confirmed[sequence])

    @property
    def first_unconfirmed(self):
        """Where an attempt that misses nothing starts."""
        at = self._confirmed.find(0)
        return len(self._confirmed) if at < 0 else at

    def confirmed(self):
        """Confirmed sequences, in order."""
        return (sequence for sequence, known in enumerate(self._confirmed) if known)


class Observation:
    """What one consumer saw. `start`: the offset it asked for; `start_time`: the timestamp; None of both: no claim."""

    def __init__(self, label, start=None, start_time=None):
        self.label, self.start, self.start_time = label, start, start_time
        self.offsets, self.keys = array.array("Q"), array.array("Q")
        self.chunk_ids, self.chunk_times = array.array("Q"), array.array("q")
        self.wrong = []

    def chunk(self, chunk_id, timestamp):
        """A chunk begins: what attaching by time is judged by."""
        self.chunk_ids.append(chunk_id)
        self.chunk_times.append(timestamp)

    def record(self, offset, body):
        """A record, as delivered."""
        try:
            key = identify(body, offset)
        except WrongBytes as error:
            self.wrong.append(str(error))
        else:
            self.offsets.append(offset)
            self.keys.append(key)

    def lose(self, loss):
        """Forgets what it saw from where the loss starts; each record of that must be one of those that were lost."""
        kept = next((at for at, offset in enumerate(self.offsets) if offset >= loss.start), len(self.offsets))
        for offset, key in zip(self.offsets[kept:], self.keys[kept:]):
            if loss.records.get(offset) != key:
                self.wrong.append(f"offset {offset}: saw {parts_of(key)}, which is not among what was lost there")
        del self.offsets[kept:], self.keys[kept:]
        chunks = next((at for at, chunk_id in enumerate(self.chunk_ids) if chunk_id >= loss.start), len(self.chunk_ids))
        del self.chunk_ids[chunks:], self.chunk_times[chunks:]

    @property
    def next_offset(self):
        """The offset after the last record seen, or where it started."""
        return self.offsets[-1] + 1 if self.offsets else self.start or 0


@dataclasses.dataclass(frozen=True)
class Loss:
    """Every disk with a log was lost: exactly these records (offset -> identity) from `start` on are no more."""

    start: int
    records: dict


@dataclasses.dataclass(frozen=True)
class Allowance:
    """What may be missing: everything below `floor` (retention), and the declared gaps [from, to)."""

    floor: int = 0
    gaps: tuple = ()


def violations(ledgers, truth, observations=(), allowed=Allowance()):
    """Everything that cannot be explained, as text."""
    found = [f"{seen.label}: {text}" for seen in (truth, *observations) for text in seen.wrong]
    found += _order(truth)
    by_publisher = _by_publisher(truth)
    for ledger in ledgers:
        found += _publisher(ledger, by_publisher.pop(ledger.publisher, []), allowed)
    found += [f"publisher {number}: unknown, {len(seen)} records" for number, seen in by_publisher.items()]
    for observation in observations:
        found += _order(observation) or _against_truth(observation, truth, allowed)
    return found


def check(ledgers, truth, observations=(), allowed=Allowance()):
    """Fails if anything cannot be explained."""
    found = violations(ledgers, truth, observations, allowed)
    if found:
        shown = "\n".join(found[:_SHOWN])
        raise HistoryError(f"{len(found)} violations:\n{shown}")


def _order(seen):
    """Offsets only go up: nothing twice, nothing late."""
    return [
        f"{seen.label}: offset {after} after {before}: doubled or out of order"
        for before, after in zip(seen.offsets, seen.offsets[1:])
        if after <= before
    ]


def _by_publisher(truth):
    found = {}
    for offset, key in zip(truth.offsets, truth.keys):
        publisher, attempt, sequence = parts_of(key)
        found.setdefault(publisher, []).append((offset, attempt, sequence))
    return found


def _publisher(ledger, seen, allowed):
    """One publisher's records in the truth against its ledger."""
    name, found = f"publisher {ledger.publisher}", []
    last, present = {}, bytearray(max((end for _, end in ledger.attempts), default=0))
    highest = -1
    for offset, attempt, sequence in seen:
        at = f"{name}: offset {offset}: sequence {sequence} of attempt {attempt}"
        if attempt >= len(ledger.attempts) or not ledger.attempts[attempt][0] <= sequence < ledger.attempts[attempt][1]:
            found.append(f"{at} was never sent")
            continue
        if sequence == last.get(attempt, -1):
            found.append(f"{at} is there twice")
        elif sequence < last.get(attempt, -1):
            found.append(f"{at} after {last[attempt]} of the same attempt: doubled or out of order")
        elif ledger.named and sequence <= highest:
            found.append(f"{at} after {highest}, although the broker removes what is sent twice")
        last[attempt], highest = sequence, max(highest, sequence)
        present[sequence] = 1
    return found + _missing(ledger, seen, present, allowed)


def _missing(ledger, seen, present, allowed):
    """Confirmed records that are not there, less what retention or a declared gap explains."""
    missing = [n for n in ledger.confirmed() if not present[n]]
    if not missing:
        return []
    lowest = min((sequence for _, _, sequence in seen), default=None)
    holes = _holes(seen, allowed.gaps)
    unexplained = [
        n
        for n in missing
        if not (allowed.floor > 0 and (lowest is None or n < lowest)) and not any(a < n < b for a, b in holes)
    ]
    return [f"publisher {ledger.publisher}: confirmed {_ranges(unexplained)} missing"] if unexplained else []


def _holes(seen, gaps):
    """For each gap the sequences (before, behind) which lie on either side of it."""
    holes = []
    for start, end in gaps:
        before = max((sequence for offset, _, sequence in seen if offset < start), default=-1)
        behind = min((sequence for offset, _, sequence in seen if offset >= end), default=1 << _SEQUENCE_BITS)
        holes.append((before, behind))
    return holes


def _against_truth(seen, truth, allowed):
    """A consumer saw what the truth has, from where it asked, without a hole."""
    if not seen.offsets:
        return []
    found, lowest = [], max(allowed.floor, truth.offsets[0] if truth.offsets else 0)
    first = _first_expected(seen, truth, lowest)
    if first is not None and seen.offsets[0] != first:
        asked = f"offset {seen.start}" if seen.start is not None else f"time {seen.start_time}"
        found.append(f"{seen.label}: began at {seen.offsets[0]}, not at {first} (asked for {asked})")
    begin = bisect.bisect_left(truth.offsets, max(seen.offsets[0], lowest))
    end = bisect.bisect_right(truth.offsets, seen.offsets[-1])
    expected = dict(zip(truth.offsets[begin:end], truth.keys[begin:end]))
    for offset, key in zip(seen.offsets, seen.keys):
        if offset < lowest:
            continue
        known = expected.pop(offset, None)
        if known != key:
            other = "nothing" if known is None else parts_of(known)
            if known is None and any(start <= offset < stop for start, stop in allowed.gaps):
                continue
            found.append(f"{seen.label}: offset {offset}: saw {parts_of(key)}, the end has {other}")
    if expected:
        found.append(f"{seen.label}: offsets {_ranges(sorted(expected))} were not delivered")
    return found


def _first_expected(seen, truth, lowest):
    """The offset at which a consumer should have begun; None if that cannot be said (any more)."""
    if seen.offsets[0] < lowest:
        return None
    if seen.start is not None:
        at = bisect.bisect_left(truth.offsets, seen.start)
    elif seen.start_time is not None:
        chunk = next((i for i, time in enumerate(truth.chunk_times) if time >= seen.start_time), None)
        if chunk is None:
            return None
        at = bisect.bisect_left(truth.offsets, truth.chunk_ids[chunk])
    else:
        return None
    return truth.offsets[at] if at < len(truth.offsets) else None


def _ranges(numbers):
    """Numbers in ascending order as `a-b (n)`, the first few runs."""
    runs = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs[:5])
    return f"{shown}{', ...' if len(runs) > 5 else ''} ({len(numbers)} in all)"
