"""Brokers, by way of scripts/node: start, stop, kill, look inside."""

import os
import pathlib
import re
import subprocess

from . import metrics
from .streamproto import NEXT, Client, ProtocolError
from .wait import wait_until

TOP = pathlib.Path(__file__).resolve().parents[3]


class CommandError(AssertionError):
    """A command failed; the text holds what it printed."""


def run(*command, seconds=300, env=None):
    """Runs a command, returns its standard output, fails with everything that it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=seconds,
        text=True,
        errors="replace",
        env={**os.environ, **(env or {})},
    )
    if done.returncode:
        shown = " ".join(str(part) for part in command)
        raise CommandError(f"{shown}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


class Broker:
    """One node of a run folder. `conf` is text or a dict for rabbitmq.conf."""

    # Of its certificate; the ports below are plain.
    authority = None

    def __init__(self, run_dir, name="rabbit1", index=None, conf=None, plugins=(), env=None):
        self.run_dir = pathlib.Path(run_dir)
        self.name = name
        self.index = index
        self.conf = conf
        self.plugin_names = tuple(plugins)
        self.env = env or {}
        self._status = {}

    def _node(self, command, *arguments, seconds=300):
        script = TOP / "scripts" / "node"
        return run(script, "--dir", self.run_dir, command, self.name, *arguments, seconds=seconds, env=self.env)

    # -- life -------------------------------------------------------------------------------------

    def start(self):
        """Starts the node and returns once the broker has started."""
        arguments = []
        if self.index is not None:
            arguments += ["--index", self.index]
        if self.conf is not None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            path = self.run_dir / f"{self.name}.conf"
            path.write_text(self._conf_text())
            arguments += ["--conf", path]
        if self.plugin_names:
            arguments += ["--plugins", ",".join(self.plugin_names)]
        self._node("start", *arguments)
        # What was given is kept by the node: a restart must not undo what a test enabled meanwhile.
        self.conf, self.plugin_names = None, ()
        self.refresh()
        return self

    def _conf_text(self):
        if isinstance(self.conf, str):
            return self.conf
        return "".join(f"{key} = {value}\n" for key, value in self.conf.items())

    def stop(self):
        """Stops the broker in order."""
        self._node("stop")

    def kill(self):
        """SIGKILL."""
        self._node("kill")

    def restart(self):
        """Stop in order, start again on the same data."""
        self.stop()
        return self.start()

    def wipe(self):
        """Kills the node and removes all that it wrote."""
        self._node("wipe")

    def join(self, other):
        """Makes this node a member of `other`'s cluster."""
        self._node("join", other.name)

    def refresh(self):
        """Reads ports, folders and pid anew."""
        lines = self._node("status").splitlines()
        self._status = dict(line.split("=", 1) for line in lines if "=" in line)
        return self._status

    @property
    def running(self):
        """Whether its process exists right now."""
        return self.refresh()["state"] == "running"

    def __enter__(self):
        return self.start()

    def __exit__(self, kind, *_):
        self.kill()
        if kind is None and not os.environ.get("KEEP"):
            self.wipe()

    # -- where ------------------------------------------------------------------------------------

    def _port(self, which):
        return int(self._status[which + "_port"])

    amqp_port = property(lambda self: self._port("amqp"))
    stream_port = property(lambda self: self._port("stream"))
    management_port = property(lambda self: self._port("management"))
    prometheus_port = property(lambda self: self._port("prometheus"))
    node = property(lambda self: self._status["node"])
    pid = property(lambda self: int(self._status["pid"]))
    data_dir = property(lambda self: pathlib.Path(self._status["data_dir"]))

    def client(self, **options):
        """A raw stream protocol connection."""
        return Client(self.stream_port, **options)

    # -- looking inside ---------------------------------------------------------------------------

    def rpc(self, expression):
        """Evaluates Erlang on the node, returns the printed value."""
        return self._node("rpc", expression).strip()

    def ctl(self, *arguments):
        """rabbitmqctl"""
        return self._node("ctl", *arguments)

    def streams(self, *arguments):
        """rabbitmq-streams"""
        return self._node("streams", *arguments)

    def plugins(self, *arguments):
        """rabbitmq-plugins"""
        return self._node("plugins", *arguments)

    def log(self):
        """The whole log so far."""
        return pathlib.Path(self._status["log"]).read_text(errors="replace")

    def errors(self):
        """The log's lines that report errors or crashes."""
        return [line for line in self._node("log", "--errors").splitlines() if line.strip()]

    def stream_dir(self, stream):
        """The folder of a stream's segments on this node."""
        base = self.data_dir / "stream"
        pattern = re.compile(r"__" + re.escape(stream) + r"_\d+$")
        found = [path for path in base.iterdir() if pattern.search(path.name)] if base.is_dir() else []
        assert len(found) == 1, f"{stream}: {[path.name for path in found]} in {base}"
        return found[0]

    def segments(self, stream):
        """(first offset, size in bytes) of the local segment files, in order."""
        return sorted((int(path.stem), path.stat().st_size) for path in self.stream_dir(stream).glob("*.segment"))

    def local_bytes(self, stream):
        """Bytes in local segments."""
        return sum(size for _, size in self.segments(stream))

    def metrics(self, path="/metrics"):
        """A metrics page, parsed."""
        return metrics.fetch(self.prometheus_port, path)

    def rss_bytes(self):
        """Resident memory of the virtual machine."""
        status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"^VmRSS:\s+(\d+) kB", status, re.M)[1]) * 1024

    def wait_leader(self, stream, seconds=30):
        """Waits until the stream has a leader and its member here answers (after a crash: both again)."""

        def leader():
            try:
                with self.client() as client:
                    client.stats(stream)
                    # No credit, so nothing is read: the stock broker's reader crashes if a segment is just beginning.
                    client.subscribe(stream, NEXT, credit=0).close()
                    return client.metadata(stream)[0]
            except ProtocolError as error:
                raise OSError(str(error)) from error

        return wait_until(leader, seconds, f"leader of {stream}")
