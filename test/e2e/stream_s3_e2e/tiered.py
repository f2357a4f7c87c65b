"""A broker with the plugin, and waiting for what the plugin promises.

Everything is asked of the operator's surfaces: the status command, the metrics page, the folder of segments.
"""

import json

from .broker import Broker
from .manifest import Manifest, pointer
from .wait import wait_until

PLUGIN = "rabbitmq_stream_s3"


class TieredBroker(Broker):
    """A node with the plugin enabled and pointed at `s3`."""

    def __init__(self, run_dir, s3, name="rabbit1", conf=None, plugins=(PLUGIN,), **settings):
        """`settings` are of the plugin (`fragment_size="1MB"`, None takes one away), `conf` is anything else."""
        self.s3 = s3
        lines = {**s3.conf(**settings), **(conf or {})}
        lines = {key: value for key, value in lines.items() if value is not None}
        super().__init__(run_dir, name=name, conf=lines, plugins=plugins)

    def node_status(self):
        """`rabbitmq-streams stream_s3_status --formatter json`"""
        return json.loads(self.streams("stream_s3_status", "--formatter", "json"))

    def stream_status(self, stream):
        """`rabbitmq-streams stream_s3_status STREAM --formatter json`"""
        return json.loads(self.streams("stream_s3_status", stream, "--formatter", "json"))

    def stream_id(self, stream):
        """The plugin's name of a stream: the folder of its segments."""
        return self.stream_dir(stream).name

    def manifest(self, s3, stream):
        """What is persisted now, read from the bucket by way of the pointer; None while there is none."""
        stream_id = self.stream_id(stream)
        found = pointer(self.rpc(f'rabbitmq_stream_s3_db:get_consistent(<<"{stream_id}">>).'))
        return found and Manifest(s3, f"rabbitmq/stream/{stream_id}", found)

    def range(self, stream):
        """The persisted range `(f, n)` that this node's readers count on, or None while it is not known."""
        text = self.rpc(
            f'case rabbitmq_stream_s3_manifest_cache:range(<<"{self.stream_id(stream)}">>) of'
            " {ok, #{first_offset := F, next_offset := N}} -> {F, N}; _ -> none end."
        )
        if text == "none":
            return None
        first, following = text.strip("{}").split(",")
        return int(first), int(following)

    def wait_persisted(self, stream, next_offset, seconds=120):
        """Waits until the persisted manifest covers everything below `next_offset`."""

        def covered():
            found = self.range(stream)
            return found is not None and found[1] >= next_offset

        wait_until(covered, seconds, f"{stream}: persisted up to {next_offset}")

    def cut(self, stream):
        """Cuts the fragment that is being assembled."""
        self.rpc(
            f'case rabbitmq_stream_s3_registry:whereis_name({{<<"{self.stream_id(stream)}">>, node()}}) of'
            " undefined -> none; Reader -> rabbitmq_stream_s3_replica_reader:cut(Reader) end."
        )

    def flush_tier(self, stream, next_offset, seconds=120):
        """Makes everything below `next_offset` durable in S3 now, without waiting for size or age."""

        def flushed():
            found = self.range(stream)
            if found is not None and found[1] >= next_offset:
                return True
            self.cut(stream)
            return False

        wait_until(flushed, seconds, f"{stream}: flushed up to {next_offset}")

    def wait_trimmed(self, stream, segments=2, seconds=60):
        """Waits until at most that many local segments are left."""
        wait_until(lambda: len(self.segments(stream)) <= segments, seconds, f"{stream}: trimmed")

    def counter(self, name, **labels):
        """A plugin metric of this node, added up over its labels, or of the samples with these; it must be on the page."""

        def there():
            page = self.metrics()
            # The collector is registered when both plugins run, whichever started first.
            return page if page.names("rabbitmq_stream_s3_active") else None

        page = wait_until(there, 30, "the plugin's metrics are there")
        found = page.all(f"rabbitmq_stream_s3_{name}", **labels)
        assert found, f"{name}{labels or ''} is no metric"
        return sum(found.values())

    def versions(self):
        """RabbitMQ, OTP, osiris and plugin versions."""
        text = self.rpc(
            'lists:join(" ", [begin {ok, V} = application:get_key(A, vsn), atom_to_list(A) ++ "=" ++ V end'
            " || A <- [rabbit, osiris, khepri, rabbitmq_stream_s3]] ++"
            ' ["otp=" ++ erlang:system_info(otp_release)]).'
        )
        return dict(pair.split("=", 1) for pair in text.replace('"', "").replace("[", "").replace("]", "").replace(",", "").split() if "=" in pair)
