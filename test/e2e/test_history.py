"""The checker of histories itself: what is right passes, and each kind of wrong is noticed."""

import pytest

from stream_s3_e2e.history import (
    Allowance, HistoryError, Ledger, Loss, Observation, check, key_of, parts_of, payload, violations,
)
from stream_s3_e2e.workload import take

SIZE = 100


def ledger(count=10, publisher=1, named=False):
    """A publisher that sent `count` records in one attempt, all confirmed."""
    made = Ledger(publisher, named)
    made.begin(0)
    made.sent(count)
    for sequence in range(count):
        made.confirm(sequence)
    return made


def seen(records, label="truth", publisher=1, first=0, **start):
    """An observation of (attempt, sequence) records at consecutive offsets, two to a chunk."""
    made = Observation(label, **start)
    for number, (attempt, sequence) in enumerate(records):
        if number % 2 == 0:
            made.chunk(first + number, 1000 + first + number)
        made.record(first + number, payload(publisher, attempt, sequence, SIZE))
    return made


def plain(numbers):
    """Records of the first attempt."""
    return [(0, number) for number in numbers]


def wrong(text, *arguments, **more):
    """Exactly one violation, which says `text`."""
    found = violations(*arguments, **more)
    assert len(found) == 1 and text in found[0], found
    with pytest.raises(HistoryError, match="1 violations"):
        check(*arguments, **more)


def test_an_identity_survives_packing():
    for parts in ((1, 2, 3), (255, 65535, (1 << 40) - 1), (0, 0, 0)):
        assert parts_of(key_of(*parts)) == parts


def test_a_good_history_passes():
    truth = seen(plain(range(10)))
    readers = [seen(plain(range(10)), "all", start=0), seen(plain(range(4, 9)), "some", first=4, start=4)]
    readers.append(seen(plain(range(6, 10)), "by time", first=6, start_time=1005))
    check([ledger(named=True)], truth, readers)


def test_the_end_may_hold_what_was_sent_and_never_confirmed():
    made = ledger(5)
    made.sent(8)
    check([made], seen(plain(range(7))))


def test_a_retry_explains_a_duplicate():
    made = ledger(6)
    assert made.begin(4) == 1
    made.sent(8)
    records = plain(range(6)) + [(1, 4), (1, 5), (1, 6)]
    check([made], seen(records))
    # Not of a publisher whose duplicates the broker removes.
    made.named = True
    found = violations([made], seen(records))
    assert len(found) == 2 and all("sent twice" in text for text in found)


def test_missing():
    wrong("confirmed 3 (1 in all) missing", [ledger()], seen(plain([0, 1, 2, 4, 5, 6, 7, 8, 9])))
    wrong("confirmed 8-9 (2 in all) missing", [ledger()], seen(plain(range(8))))
    wrong("confirmed 0-9 (10 in all) missing", [ledger()], Observation("truth"))


def test_duplicate():
    wrong("is there twice", [ledger()], seen(plain([0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9])))


def test_reordered():
    wrong("out of order", [ledger()], seen(plain([0, 1, 3, 2, 4, 5, 6, 7, 8, 9])))


def test_offsets_that_go_back():
    truth = seen(plain(range(10)))
    truth.offsets[5] = 4
    wrong("offset 4 after 4", [ledger()], truth)


def test_wrong_bytes():
    truth = seen(plain(range(9)))
    body = bytearray(payload(1, 0, 9, SIZE))
    body[-1] ^= 1
    truth.record(9, bytes(body))
    found = violations([ledger()], truth)
    assert len(found) == 2 and "that nobody sent" in found[0] and "missing" in found[1]
    truncated = seen(plain(range(10)))
    truncated.record(10, payload(1, 0, 10, SIZE)[:50])
    wrong("that nobody sent", [ledger()], truncated)


def test_what_nobody_sent():
    wrong("was never sent", [ledger(9)], seen(plain(range(10))))
    wrong("was never sent", [ledger(3)], seen([(0, 0), (0, 1), (0, 2), (1, 3)]))
    wrong("publisher 2: unknown", [], seen(plain(range(3)), publisher=2))


def test_a_reader_that_missed_something():
    truth = seen(plain(range(10)))
    reader = seen(plain(range(10)), "reader")
    del reader.offsets[3:5], reader.keys[3:5]
    wrong("reader: offsets 3-4 (2 in all) were not delivered", [ledger()], truth, [reader])


def test_a_reader_that_saw_something_else():
    reader = seen(plain(range(10)), "reader")
    reader.keys[7] = key_of(1, 1, 7)
    wrong("offset 7: saw (1, 1, 7), the end has (1, 0, 7)", [ledger()], seen(plain(range(10))), [reader])
    beyond = seen(plain(range(10)), "reader")
    wrong("offset 9: saw (1, 0, 9), the end has nothing", [ledger(9)], seen(plain(range(9))), [beyond])


def test_a_reader_that_saw_something_twice():
    reader = seen(plain(range(10)), "reader")
    reader.offsets.insert(4, 3)
    reader.keys.insert(4, reader.keys[3])
    wrong("offset 3 after 3", [ledger()], seen(plain(range(10))), [reader])


def test_a_reader_that_began_at_the_wrong_place():
    truth = seen(plain(range(10)))
    wrong("began at 5, not at 4", [ledger()], truth, [seen(plain(range(5, 10)), "r", first=5, start=4)])
    wrong("began at 4, not at 6", [ledger()], truth, [seen(plain(range(4, 10)), "r", first=4, start_time=1005)])


def test_retention_explains_a_missing_beginning_only():
    late = seen(plain(range(4, 10)), first=4)
    check([ledger()], late, [seen(plain(range(10)), "saw it before", start=0)], Allowance(floor=4))
    wrong("confirmed 0-3", [ledger()], late)
    hole = seen(plain([4, 5, 7, 8, 9]), first=4)
    wrong("confirmed 6 (1", [ledger()], hole, allowed=Allowance(floor=4))


def test_a_declared_gap_explains_what_lies_in_it_only():
    truth = seen(plain([0, 1, 2]))
    for number in range(6, 10):
        truth.record(number, payload(1, 0, number, SIZE))
    check([ledger()], truth, allowed=Allowance(gaps=((3, 6),)))
    wrong("confirmed 3-5", [ledger()], truth)
    wrong("confirmed 3-5", [ledger()], truth, allowed=Allowance(gaps=((8, 9),)))


def lost(start, records):
    """A loss of these (attempt, sequence) records at consecutive offsets."""
    return Loss(start, {start + n: key_of(1, attempt, sequence) for n, (attempt, sequence) in enumerate(records)})


def test_records_that_were_lost_with_all_disks_have_to_be_sent_again():
    made, reader = ledger(named=True), seen(plain(range(10)), "reader", start=0)
    loss = lost(7, plain([7, 8, 9]))
    made.lose(loss)
    reader.lose(loss)
    assert (made.first_unconfirmed, made.confirmed_count, made.ids_lost) == (7, 7, True)
    assert (reader.next_offset, reader.wrong) == (7, [])
    # The log continues at the durable end, behind a record of the broker's own.
    made.begin(7)
    made.sent(10)
    for sequence in (7, 8, 9):
        made.confirm(sequence)
    assert not made.ids_lost
    truth = seen(plain(range(7)))
    for number in (7, 8, 9):
        for observation in (truth, reader):
            observation.record(number + 1, payload(1, 1, number, SIZE))
    check([made], truth, [reader])
    wrong("confirmed 7-9", [made], seen(plain(range(7))))


def test_a_loss_explains_nothing_but_its_own_records():
    made, reader = ledger(), seen(plain(range(10)), "reader", start=0)
    # The reader saw 9, and the disks had only 7 and 8 beyond what was durable.
    made.lose(lost(7, plain([7, 8])))
    reader.lose(lost(7, plain([7, 8])))
    found = violations([made], seen(plain(range(7))), [reader])
    assert len(found) == 2, found
    assert "reader: offset 9: saw (1, 0, 9), which is not among what was lost" in found[0]
    assert "confirmed 9 (1 in all) missing" in found[1]


def test_a_chunk_with_wrong_bytes_is_no_trouble_of_a_connection():
    class Damaged:
        def check_crc(self):
            raise AssertionError("chunk 3: CRC")

    reader = seen(plain(range(3)), "reader", start=0)
    with pytest.raises(AssertionError, match="chunk 3"):
        take(reader, Damaged(), 3)
    wrong("reader: chunk 3: CRC", [ledger(3)], seen(plain(range(3))), [reader])
