"""What bad input gets: streams go on locally, the reason is in the log once and in the status, nothing is destroyed,
and a read that cannot be answered waits."""

import contextlib
import os
import pathlib
import shutil
import socketserver
import threading

import pytest

from stream_s3_e2e.broker import TOP, run
from stream_s3_e2e.certificates import certificates
from stream_s3_e2e.consume import consume, consume_amqp091
from stream_s3_e2e.publish import declare, publish, publish_amqp091
from stream_s3_e2e.records import fixed, verify
from stream_s3_e2e.s3 import S3Test
from stream_s3_e2e.streamproto import FIRST, NEXT
from stream_s3_e2e.tiered import TieredBroker
from stream_s3_e2e.wait import wait_until

SEGMENT = 4_000_000


@pytest.fixture
def node_name(request):
    return "bad" + "".join(c for c in request.node.name.split("[")[-1] if c.isalnum())[:24]


def streams_work(broker, name="still-works"):
    """Publishing and consuming on the node."""
    with broker.client() as client:
        client.create(name)
    publish(broker, name, 300, fixed(1_000))
    verify(consume(broker, name, 300), 0, 300, fixed(1_000))


def said_once(broker, *words):
    """Exactly one warning or error of the plugin has those words."""
    lines = [
        line for line in broker.log().splitlines()
        if "stream_s3:" in line and ("[warning]" in line or "[error]" in line) and all(w in line for w in words)
    ]
    assert len(lines) == 1, f"{words}: {len(lines)} lines\n" + "\n".join(lines)
    return lines[0]


class _Nonsense(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.recv(65_536)
        self.server.requests += 1
        self.request.sendall(self.server.answer)


@contextlib.contextmanager
def nonsense(answer):
    """A server that gives one answer to everything."""
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Nonsense)
    server.answer, server.requests, server.daemon_threads = answer, 0, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n<html>hello<", b"SSH-2.0-OpenSSH_9.2\r\n", b""],
    ids=["html", "ssh", "nothing"],
)
def test_endpoint_that_answers_nonsense(run_dir, s3, node_name, answer):
    with nonsense(answer) as server:
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        with TieredBroker(run_dir, s3, name=node_name, endpoint=endpoint, fragment_size=100_000) as broker:
            streams_work(broker)
            wait_until(lambda: server.requests > 0, 30, "the endpoint was asked")
            # Nothing that it says may look like a durable fragment.
            if answer.startswith(b"HTTP"):
                return
            assert broker.range("still-works") in (None, (0, 0))


def test_tls_that_does_not_verify(run_dir, node_name, tmp_path):
    authority, certificate, key = certificates(tmp_path)
    with S3Test(tls=(certificate, key)) as s3:
        with TieredBroker(run_dir, s3, name=node_name) as broker:
            streams_work(broker)
            wait_until(lambda: broker.node_status()["bucket_reason"] == "tls", 60, "tls")
            said_once(broker, "not accessible", "tls")
        # The same server, and its authority trusted: it works, over TLS.
        shutil.copy(authority, run_dir / "ca.pem")
        with TieredBroker(run_dir, s3, name=node_name + "ca", tls__ca_file=run_dir / "ca.pem") as broker:
            streams_work(broker)
            broker.flush_tier("still-works", 300)
            assert s3.keys(".fragment")


def test_s3_down_at_start_then_up(run_dir, s3, node_name):
    broker = TieredBroker(run_dir, s3, name=node_name, fragment_size=1_000_000, persist_interval_ms=100,
                          read__resolve_timeout="1s").start()
    with broker.client() as client:
        client.create("early", stream_max_segment_size_bytes=SEGMENT)
    publish(broker, "early", 400, fixed(50_000))
    broker.flush_tier("early", 400)
    broker.wait_trimmed("early")
    broker.stop()
    s3.down()
    try:
        broker.start()
        broker.wait_leader("early")
        with broker.client() as client:
            tail = client.subscribe("early", NEXT, credit=5)
            publish(broker, "early", 1, fixed(50_000), first=400)
            assert tail.next_chunk(30).chunk_id == 400
        # The tail works; the past is not known, and is waited for rather than served wrong.
        waiting = broker.client()
        history = waiting.subscribe("early", FIRST, credit=5)
        assert waiting.stats("early")["first_chunk_id"] == -1
        waiting.poll(2)
        assert not history.chunks
    finally:
        s3.up()
    assert history.next_chunk(60).chunk_id == 0
    waiting.close()
    wait_until(lambda: broker.range("early") is not None, 60, "the manifest is known again")
    verify(consume(broker, "early", 401), 0, 401, fixed(50_000))
    with broker:
        pass


def test_segment_cut_short(run_dir, s3, node_name):
    with TieredBroker(run_dir, s3, name=node_name, fragment_size=1_000_000, persist_interval_ms=100) as broker:
        with broker.client() as client:
            client.create("short", stream_max_segment_size_bytes=SEGMENT)
        # Held back by S3: sixteen fragments are on their way, and scanning waits. Chunks of five records, so that a fragment is of
        # one megabyte: of larger ones, sixteen could reach the victim, and what is in a socket's buffers before the damage is right.
        s3.fault(name="held", method="PUT", hang="held")
        publish(broker, "short", 800, fixed(50_000), batch=5, window=0)
        directory = broker.stream_dir("short")
        victim = sorted(directory.glob("*.segment"))[-2]
        asked = [int(p["key"].rsplit("/", 1)[1][:20]) for p in s3.log(method="PUT") if p["key"].endswith(".fragment")]
        assert max(asked) < int(victim.stem) - 100, "nothing of the victim is on its way"
        size = victim.stat().st_size
        os.truncate(victim, size - 60_000)
        s3.clear_faults()
        wait_until(lambda: broker.stream_status("short")["problem_kind"] in ("scan", "transfer"), 60, "the problem is shown")
        said_once(broker, broker.stream_id("short"))
        assert victim.exists() and victim.stat().st_size == size - 60_000
        found = broker.range("short")
        assert found[1] <= 800
        publish(broker, "short", 10, fixed(50_000), first=800)


@pytest.mark.parametrize(
    "name",
    ["with spaces and / slashes", "ünï-cødé-流-🐇", "x" * 233, "..", "percent%2Fslash?query#hash"],
    ids=["spaces", "unicode", "longest", "dots", "url"],
)
def test_stream_names_at_the_limits(limits, s3, name):
    declare(limits, name, x_stream_max_segment_size_bytes=SEGMENT)
    publish_amqp091(limits, name, 200, fixed(50_000))
    status = wait_until(lambda: limits.rpc_status(name), 60, "the stream has a reader")
    stream_id = status["stream_id"]
    wait_until(lambda: limits.cut_by_name(name) and limits.rpc_status(name)["persisted_next_offset"] >= 200, 60, "durable")
    keys = s3.keys(stream_id)
    assert keys and all(len(key.encode()) <= 1024 for key in keys)
    assert max(len(key.encode()) for key in keys) > (900 if len(name) > 200 else 700)
    verify(consume_amqp091(limits, name, 200), 0, 200, fixed(50_000), tracked=True)


class _ByName(TieredBroker):
    """Asks by queue name, whatever is in it."""

    def rpc_status(self, name):
        quoted = "<<" + ",".join(str(byte) for byte in name.encode()) + ">>"
        text = self.rpc(
            f'case rabbitmq_stream_s3_status:stream_status(<<"/">>, {quoted}) of'
            " {ok, #{stream_id := Id, persisted_next_offset := N}} -> {binary_to_atom(Id), N}; _ -> none end."
        )
        if text == "none":
            return None
        stream_id, following = text.strip("{}").rsplit(",", 1)
        return {"stream_id": stream_id.strip("'"), "persisted_next_offset": int(following)}

    def cut_by_name(self, name):
        quoted = "<<" + ",".join(str(byte) for byte in name.encode()) + ">>"
        self.rpc(f'rabbitmq_stream_s3_status:cut(<<"/">>, {quoted}).')
        return True


@pytest.fixture(scope="module")
def limits(run_dir, s3):
    # With the longest name that a stock broker can make a folder for, keys come close to S3's 1,024 bytes.
    prefix = "p/" + "q" * 387 + "/" + "r" * 300
    with _ByName(run_dir, s3, name="limits", prefix=prefix, fragment_size=1_000_000, persist_interval_ms=100) as node:
        yield node


def test_library_that_does_not_load(run_dir, s3, node_name):
    plugins = pathlib.Path(run(TOP / "scripts" / "dist", "--where").strip())
    broken = run_dir / "broken-plugins"
    shutil.copytree(plugins, broken)
    for library in broken.glob("*/priv/*.so"):
        library.chmod(0o755)
        library.write_bytes(b"not a library")
    broker = TieredBroker(run_dir, s3, name=node_name)
    broker.env = {"STREAM_S3_PLUGIN_DIR": str(broken)}
    with broker:
        streams_work(broker)
        status = broker.node_status()
        assert (status["mode"], status["inert_reason"]) == ("inert", "native_library")
        said_once(broker, "inert", "native library")
