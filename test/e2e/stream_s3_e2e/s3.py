"""S3 servers of a test: the scripted one with faults and a request log, and Ceph's gateway as the real one.

Both have `endpoint`, `access_key`, `secret_key`, `region`, `bucket`, `conf(...)` for rabbitmq.conf, and
`objects`, `get`, `put`, `remove` to look at and damage what is stored. Faults are of the scripted server only;
outages (`down`, `pause`) work on both.
"""

import datetime
import hashlib
import hmac
import json
import os
import pathlib
import re
import shlex
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from xml.etree import ElementTree

from .broker import TOP, CommandError, run


class _Server:
    """What every server offers."""

    endpoint = access_key = secret_key = region = bucket = None

    def conf(self, prefix="rabbitmq/stream", **settings):
        """Lines for rabbitmq.conf that point the plugin here; `fragment_size="1MB"` and so on are added."""
        settings = {
            "bucket": self.bucket,
            "region": self.region,
            "endpoint": self.endpoint,
            "path_style": "true",
            "prefix": prefix,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            **settings,
        }
        return {"stream_s3." + key.replace("__", "."): value for key, value in settings.items()}

    def keys(self, part=""):
        """Keys that hold `part`."""
        return [entry["key"] for entry in self.objects() if part in entry["key"]]

    def total_bytes(self, part=""):
        """Bytes of all objects whose key holds `part`."""
        return sum(entry["size"] for entry in self.objects() if part in entry["key"])

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()


class S3Test(_Server):
    """native/s3-testserver: exact faults, barriers, a log of every request. Keeps objects in memory."""

    def __init__(self, bucket="streams", tls=None, program=None):
        """`program` is a server that is built already (benchmarks: with optimisation)."""
        self.bucket = bucket
        self.tls = tls
        self.program = program
        self.process = None

    @staticmethod
    def binary():
        """The program, built if need be."""
        target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or _cache() / "target")
        # The profile of the unit tests: already compiled when they have run (its dependencies are optimised).
        program = target / "debug" / "s3-testserver"
        if not os.environ.get("STREAM_S3_NO_BUILD") or not program.exists():
            run(
                "cargo", "build", "--quiet", "--manifest-path", TOP / "Cargo.toml",
                "-p", "s3-testserver", "--bin", "s3-testserver", seconds=1200,
                env={"CARGO_TARGET_DIR": str(target)},
            )
        return program

    def start(self):
        """Starts it on free ports; it ends with this process."""
        command = [self.program or self.binary(), "--until-eof", "--bucket", self.bucket]
        if self.tls:
            command += ["--tls-cert", self.tls[0], "--tls-key", self.tls[1]]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line, "the S3 test server did not start"
        ready = json.loads(line)
        self.endpoint, self.control = ready["endpoint"], ready["control"]
        self.access_key, self.secret_key = ready["access_key"], ready["secret_key"]
        self.region = ready["region"]
        return self

    def stop(self):
        """Ends it; the objects are gone."""
        if self.process:
            self.process.stdin.close()
            self.process.wait(20)
            self.process = None

    def call(self, method, path, /, body=None, raw=False, **query):
        """One request to the control port; a timeout of a wait comes back as its entries."""
        url = self.control + path
        if query:
            url += "?" + urllib.parse.urlencode({k: v for k, v in query.items() if v is not None})
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            content = answer.read()
        return content if raw else json.loads(content)

    # -- faults and outages -----------------------------------------------------------------------

    def fault(self, **rule):
        """Adds a rule: operation, key, nth, count, status, hang, delay_ms, drop_connection, ..."""
        return self.call("POST", "/faults", rule)

    def faults(self):
        """The rules with how often each matched and hit."""
        return self.call("GET", "/faults")

    def clear_faults(self):
        """Removes all rules; who hangs goes on."""
        self.call("DELETE", "/faults")

    def release(self, barrier):
        """Lets the requests that hang at a barrier go on."""
        self.call("POST", "/release/" + barrier)

    def down(self):
        """Refuses connections."""
        self.call("POST", "/down")

    def up(self):
        """Listens again."""
        self.call("POST", "/up")

    def black_hole(self):
        """Accepts and never answers, until `clear_faults`."""
        self.fault(name="black-hole", hang="black-hole")

    # -- what happened ----------------------------------------------------------------------------

    def log(self, **filters):
        """Requests so far: method, operation, key (part), rule, status, after, done."""
        return self.call("GET", "/log", **filters)

    def wait_log(self, count, seconds=30.0, **filters):
        """Waits until that many requests match."""
        try:
            return self.call("GET", "/log", min=count, timeout_ms=int(seconds * 1000), **filters)
        except urllib.error.HTTPError as error:
            seen = json.loads(error.read())
            raise AssertionError(f"{len(seen)} of {count} requests match {filters} after {seconds} s") from error

    def clear_log(self):
        """Forgets the requests so far."""
        self.call("DELETE", "/log")

    def last_id(self):
        """Id of the newest request, for `log(after=...)`."""
        return max((entry["id"] for entry in self.log()), default=0)

    # -- objects ----------------------------------------------------------------------------------

    def objects(self, prefix=""):
        """key, size, etag, metadata, checksum_crc32 of every object."""
        return sorted(self.call("GET", "/objects", prefix=prefix), key=lambda entry: entry["key"])

    def get(self, key):
        """An object's bytes."""
        return self.call("GET", "/object", key=key, raw=True)

    def put(self, key, data):
        """Replaces an object's bytes and keeps its ETag, checksum and metadata: bit rot."""
        self.call("PUT", "/object", body=data, key=key)

    def remove(self, key):
        """Deletes an object."""
        self.call("DELETE", "/object", key=key)


class Ceph(_Server):
    """A real server: Ceph's RADOS gateway out of the host root (scripts/ceph)."""

    def __init__(self, bucket="streams", port=18480, folder=None):
        self.bucket, self.port, self.folder = bucket, port, folder

    def _ceph(self, *arguments):
        more = ["--dir", self.folder] if self.folder else []
        return run(TOP / "scripts" / "ceph", *arguments, "--port", self.port, *more, seconds=600)

    def start(self):
        """Starts mon, osd and gateway (what a cut-off run left is ended), and makes the bucket."""
        access = dict(re.findall(r"^(S3_\w+)=(.*)$", self._ceph("start"), re.M))
        access = {key: shlex.split(value)[0] for key, value in access.items()}
        self.endpoint, self.region = access["S3_ENDPOINT"], access["S3_REGION"]
        self.access_key, self.secret_key = access["S3_ACCESS_KEY"], access["S3_SECRET_KEY"]
        self._ceph("bucket", self.bucket)
        return self

    def stop(self):
        """Ends all three."""
        self._ceph("stop")

    def pause(self):
        """Accepts connections and never answers."""
        self._ceph("pause")

    def resume(self):
        """Answers again."""
        self._ceph("resume")

    def down(self):
        """Refuses connections."""
        self._ceph("kill-rgw")

    def up(self):
        """Listens again."""
        self._ceph("start-rgw")

    # -- objects, by signed requests --------------------------------------------------------------

    def request(self, method, key="", body=b"", query=None, headers=None):
        """One signed request (SigV4); returns (headers, body)."""
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        day, host = now[:8], urllib.parse.urlsplit(self.endpoint).netloc
        path = "/" + urllib.parse.quote(f"{self.bucket}/{key}" if key else self.bucket, safe="/-_.~")
        pairs = sorted((query or {}).items())
        search = "&".join(
            f"{urllib.parse.quote(k, safe='-_.~')}={urllib.parse.quote(v, safe='-_.~')}" for k, v in pairs
        )
        digest = hashlib.sha256(body).hexdigest()
        signed = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now, **(headers or {})}
        if method == "PUT":
            # urllib would add one of its own, and the gateway wants it signed.
            signed["content-type"] = "application/octet-stream"
        names = sorted(signed)
        canonical = "\n".join(
            [method, path, search, *(f"{name}:{signed[name]}" for name in names), "", ";".join(names), digest]
        )
        scope = f"{day}/{self.region}/s3/aws4_request"
        text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()])
        secret = ("AWS4" + self.secret_key).encode()
        for part in (day, self.region, "s3", "aws4_request"):
            secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
        signature = hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
        signed["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self.access_key}/{scope},"
            f" SignedHeaders={';'.join(names)}, Signature={signature}"
        )
        url = self.endpoint + path + ("?" + search if search else "")
        call = urllib.request.Request(url, body if method == "PUT" else None, signed, method=method)
        with urllib.request.urlopen(call, timeout=60) as answer:
            return dict(answer.headers), answer.read()

    def objects(self, prefix=""):
        """key and size of every object."""
        found, query = [], {"list-type": "2", "prefix": prefix}
        while True:
            _, body = self.request("GET", query=query)
            page = ElementTree.fromstring(body)
            space = page.tag.partition("}")[0] + "}" if page.tag.startswith("{") else ""
            for entry in page.iter(space + "Contents"):
                found.append({"key": entry.findtext(space + "Key"), "size": int(entry.findtext(space + "Size"))})
            token = page.findtext(space + "NextContinuationToken")
            if not token:
                return sorted(found, key=lambda entry: entry["key"])
            query["continuation-token"] = token

    def get(self, key):
        """An object's bytes."""
        return self.request("GET", key)[1]

    def head(self, key):
        """An object's headers (metadata as x-amz-meta-...)."""
        return self.request("HEAD", key)[0]

    def put(self, key, data):
        """Writes an object."""
        self.request("PUT", key, data)

    def remove(self, key):
        """Deletes an object."""
        self.request("DELETE", key)


def _cache():
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("STREAM_S3_CACHE") or pathlib.Path(home) / "rabbitmq-stream-s3")


__all__ = ["Ceph", "CommandError", "S3Test"]
