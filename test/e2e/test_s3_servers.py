"""The two S3 servers behind one face, as the other tests use them."""

import os
import urllib.error
import urllib.request

import pytest

from stream_s3_e2e.s3 import Ceph, S3Test


def test_scripted_server_faults_and_log():
    with S3Test() as server:
        server.put("a/b.fragment", b"bytes")
        assert server.keys(".fragment") == ["a/b.fragment"]
        assert server.total_bytes() == 5 and server.get("a/b.fragment") == b"bytes"
        server.fault(name="no", status=503, code="SlowDown", count=1)
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(server.endpoint + "/streams/a", timeout=10)
        assert [rule["hits"] for rule in server.faults()] == [1]
        assert server.wait_log(1, rule="no")[0]["status"] == 503
        server.down()
        with pytest.raises(OSError):
            urllib.request.urlopen(server.endpoint, timeout=10)
        server.up()
        server.remove("a/b.fragment")
        assert server.objects() == []
        assert server.conf(fragment_size="1MB")["stream_s3.fragment_size"] == "1MB"


@pytest.mark.skipif(os.geteuid() != 0, reason="Ceph in a root of its own needs root")
@pytest.mark.timeout(600)
def test_ceph_signed_requests_and_outage(run_dir):
    server = Ceph("e2e-probe", port=18680, folder=run_dir / "ceph")
    with server:
        for key in server.keys():
            server.remove(key)
        server.put("deep/key with space", b"x" * 1000)
        assert server.objects() == [{"key": "deep/key with space", "size": 1000}]
        assert server.get("deep/key with space") == b"x" * 1000
        server.down()
        with pytest.raises(OSError):
            server.get("deep/key with space")
        server.up()
        assert server.get("deep/key with space") == b"x" * 1000
        server.remove("deep/key with space")
