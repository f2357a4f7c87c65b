"""The archive as a user installs it, disabled and enabled again while consumers are in the middle of both tiers."""

import pathlib
import shutil

import pytest

from stream_s3_e2e import records
from stream_s3_e2e.broker import TOP
from stream_s3_e2e.amqp10 import decode
from stream_s3_e2e.consume import consume
from stream_s3_e2e.publish import publish
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.streamproto import FIRST, ConnectionLost, NEXT, ProtocolError, at_offset
from stream_s3_e2e.tiered import PLUGIN, TieredBroker
from stream_s3_e2e.wait import wait_until

STREAM = "disabled"
SIZE = fixed(20_000)
COUNT = 600


@pytest.fixture(scope="module")
def broker(run_dir, s3):
    archives = list((TOP / "dist").glob(f"{PLUGIN}-*.ez"))
    assert len(archives) == 1, f"scripts/dist --ez makes it: {archives}"
    folder = pathlib.Path(run_dir) / "archive"
    folder.mkdir(parents=True)
    shutil.copy(archives[0], folder)
    node = TieredBroker(run_dir, s3, fragment_size=1_000_000, persist_interval_ms=100)
    node.env["STREAM_S3_PLUGIN_DIR"] = str(folder)
    with node:
        with node.client() as client:
            client.create(STREAM, stream_max_segment_size_bytes=2_000_000)
        publish(node, STREAM, COUNT, SIZE, batch=10, window=10)
        node.flush_tier(STREAM, COUNT)
        node.wait_trimmed(STREAM)
        yield node


class Reader:
    """A subscription that is read in steps; every record must follow the one before."""

    def __init__(self, broker, spec, first):
        self.client = broker.client()
        self.subscription = self.client.subscribe(STREAM, spec, credit=3)
        self.checker = records.Checker(first, SIZE)
        self.lost = None

    def read(self, chunks=10_000, until=None, seconds=5.0):
        """Takes chunks until that many, or that offset, or nothing more comes; a lost connection is an end, too."""
        try:
            for _ in range(chunks):
                if until is not None and self.checker.next_offset >= until:
                    return self
                chunk = self.subscription.next_chunk(seconds)
                if chunk is None:
                    return self
                for offset, message in chunk.messages():
                    self.checker.add(offset, decode(message))
        except (ConnectionLost, OSError) as error:
            self.lost = str(error)
        return self


def test_it_is_the_archive_that_runs(broker):
    where = broker.rpc(f"code:which({PLUGIN}).")
    assert "plugins-expand" in where, where


def test_consumers_of_both_tiers_are_open_while_it_is_disabled(broker):
    pid = broker.pid
    floor = broker.segments(STREAM)[0][0]
    assert floor > COUNT // 4
    remote = Reader(broker, FIRST, 0).read(chunks=5)
    local = Reader(broker, NEXT, COUNT)
    assert 0 < remote.checker.next_offset < floor, "it is in the remote tier"
    served = broker.counter("chunks_served_remote")
    assert served > 0
    broker.plugins("disable", PLUGIN)
    publish(broker, STREAM, COUNT, SIZE, first=COUNT, batch=10, window=10)
    assert broker.pid == pid and broker.running
    # Whatever becomes of them, nobody is given the wrong record: that is what the checker looks at.
    remote.read()
    assert remote.checker.next_offset <= COUNT * 2
    local.read(until=2 * COUNT)
    assert local.lost or local.checker.next_offset == 2 * COUNT
    print(f"remote: at {remote.checker.next_offset}, {remote.lost}; local: at {local.checker.next_offset}, {local.lost}")
    # As on a stock broker: what is local, by name.
    with broker.client() as client:
        first = client.subscribe(STREAM, FIRST, credit=1).next_chunk(10)
    assert first.chunk_id == broker.segments(STREAM)[0][0]
    broker.plugins("enable", PLUGIN)
    broker.flush_tier(STREAM, 2 * COUNT)

    def goes_on():
        try:
            return Reader(broker, at_offset(remote.checker.next_offset), remote.checker.next_offset)
        except ProtocolError as error:
            raise OSError(str(error)) from error

    again = wait_until(goes_on, 30, "the consumer is back").read(until=2 * COUNT)
    assert again.checker.next_offset == 2 * COUNT and not again.lost
    verify(consume(broker, STREAM, 2 * COUNT), 0, 2 * COUNT, SIZE)
    assert broker.counter("chunks_served_remote") > 0
    for reader in (remote, local, again):
        reader.client.socket.close()
    wait_until(lambda: broker.counter("remote_readers") == 0, 10, "no reader is left over")


def test_again_and_again(broker):
    """Five more times, with a reader that is asked for more all the while."""
    served = 0
    for _ in range(5):
        reader = Reader(broker, FIRST, 0).read(chunks=3)
        broker.plugins("disable", PLUGIN)
        reader.read(seconds=1.0)
        broker.plugins("enable", PLUGIN)
        wait_until(lambda: broker.range(STREAM) is not None, 30, "the manifest is known")
        verify(consume(broker, STREAM, 2 * COUNT), 0, 2 * COUNT, SIZE)
        served += broker.counter("chunks_served_remote")
        reader.client.socket.close()
    assert served > 0
    assert broker.counter("native_panics") == 0
