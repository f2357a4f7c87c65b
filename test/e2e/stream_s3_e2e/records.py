"""What record number N holds, so that any consumer can check every byte of it.

Record = magic "S3E2", size u32, sequence u64 (big-endian), then bytes of a fixed pseudo-random pool that
start where the sequence number says. Two records of one size never hold the same bytes.
"""

import hashlib
import struct

HEADER = struct.Struct(">4sIQ")
MAGIC = b"S3E2"
SIZE_MIN = HEADER.size
SIZE_MAX = 1_000_000

_POOL_STARTS = 1 << 20
_POOL = hashlib.shake_256(b"stream s3 end to end").digest(_POOL_STARTS + SIZE_MAX)


def payload(sequence, size):
    """The bytes of record `sequence` when it is `size` bytes long."""
    return HEADER.pack(MAGIC, size, sequence) + filler(sequence, size - SIZE_MIN)


def filler(number, size):
    """`size` bytes of the pool, from where `number` says."""
    start = number * 40503 % _POOL_STARTS
    return _POOL[start : start + size]


def fixed(size):
    """A size rule: every record has `size` bytes."""
    return lambda sequence: size


def mixed(sequence):
    """A size rule: mostly small, some large, one in a thousand near a megabyte."""
    draw = int.from_bytes(hashlib.blake2b(sequence.to_bytes(8, "big"), digest_size=8).digest(), "big")
    bucket, spread = draw % 1000, draw >> 16
    if bucket < 700:
        return SIZE_MIN + spread % 1_000
    if bucket < 960:
        return 1_000 + spread % 15_000
    if bucket < 999:
        return 16_000 + spread % 100_000
    return SIZE_MAX - spread % 100_000


def filter_value(sequence, values=("red", "green", "blue")):
    """The filter value of a record, in runs long enough to give chunks of one value."""
    return values[sequence // 500 % len(values)]


class Mismatch(AssertionError):
    """A record is missing, doubled, out of order or not what was published."""


def check_body(body, sequence, size):
    """Compares one record byte for byte."""
    expected = payload(sequence, size)
    if body == expected:
        return
    if len(body) >= SIZE_MIN and body[:4] == MAGIC:
        _, said_size, said_sequence = HEADER.unpack_from(body)
        at = next((i for i, (a, b) in enumerate(zip(body, expected)) if a != b), min(len(body), size))
        raise Mismatch(
            f"record {sequence}: got {len(body)} bytes that say sequence {said_sequence}, size {said_size};"
            f" expected {size} bytes; first difference at byte {at}"
        )
    raise Mismatch(f"record {sequence}: got {len(body)} bytes without our header: {body[:24].hex()}")


class Checker:
    """Takes records in the order in which a consumer sees them; byte-exact, in order, exactly once.

    `sizes` is the size rule they were published with. Record `sequence` sits at offset `sequence + base`.
    `wanted(sequence)` limits what has to arrive (filters); others may arrive too, at their place.
    `tracked`: the stream also holds chunks of osiris's own, which take an offset each and are delivered to nobody
    (named publishers, all AMQP publishers, stored consumer offsets). Then offsets may jump and sequences may not.
    """

    def __init__(self, first_offset, sizes, base=0, wanted=None, tracked=False):
        self.next_offset = first_offset
        self.first_offset = first_offset
        self.sizes = sizes
        self.base = base
        self.wanted = wanted
        self.tracked = tracked
        self.count = 0
        self.bytes = 0

    def add(self, offset, body):
        """One record, as delivered."""
        if offset < self.next_offset:
            raise Mismatch(f"offset {offset} after {self.next_offset - 1}: doubled or out of order")
        if self.tracked and offset > self.next_offset:
            self.base += offset - self.next_offset
            self.next_offset = offset
        for missed in range(self.next_offset, offset):
            if self.wanted is None or self.wanted(missed - self.base):
                raise Mismatch(f"offset {missed} is missing: {offset} came after {self.next_offset - 1}")
        sequence = offset - self.base
        check_body(bytes(body), sequence, self.sizes(sequence))
        self.next_offset = offset + 1
        self.count += 1
        self.bytes += len(body)

    def finish(self, next_offset):
        """Asserts that everything below `next_offset` has arrived."""
        for missed in range(self.next_offset, next_offset):
            if self.wanted is None or self.wanted(missed - self.base):
                raise Mismatch(f"offset {missed} did not arrive (stream has up to {next_offset - 1})")


def verify(records, first_offset, next_offset, sizes, base=0, wanted=None, tracked=False):
    """Checks a whole list of (offset, body)."""
    checker = Checker(first_offset, sizes, base, wanted, tracked)
    for offset, body in records:
        checker.add(offset, body)
    checker.finish(next_offset)
    return checker
