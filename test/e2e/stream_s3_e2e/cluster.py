"""A cluster of stock nodes with the plugin, and what can happen to it.

Starts n nodes from one configuration, joins them, and does to them what the world does: kill, stop, freeze, wipe, cut
from each other, cut from S3, another leader, more and fewer replicas, plugin off and on. Each fault asserts that it has
bitten before it returns. Waits on conditions only.

Cutting two nodes from each other is done in the distribution: each gets a cookie for the other that the other does not
have, and drops the connection. Nothing connects again until both have the right one. Osiris' own replication
connections end with it, since their processes watch each other over the distribution. What this is not: a network that
loses packets without a word; for that there is `freeze`.
"""

import concurrent.futures
import contextlib
import itertools
import os
import re
import shutil
import signal
import time

from .broker import CommandError
from .gateway import Gateway
from .streamproto import ProtocolError
from .tiered import TieredBroker
from .wait import wait_until

_LOG_LINES = 60


class Node(TieredBroker):
    """One member, with a way to S3 of its own."""

    def __init__(self, run_dir, s3, index, conf=None, **settings):
        self.gateway = Gateway(s3.endpoint)
        super().__init__(run_dir, s3, f"rabbit{index + 1}", conf=conf, **{**settings, "endpoint": self.gateway.endpoint})
        self.index = index

    def peers(self):
        """Names of the nodes that this one is connected to."""
        return set(re.findall(r"\w+@\w+", self.rpc("nodes().")))

    def freeze(self):
        """Stops its process without ending it: connections stay, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self):
        """It goes on as if nothing had happened."""
        os.kill(self.pid, signal.SIGCONT)

    def persisted(self, stream):
        """The durable end of a stream that is written here; -1 if it is not, or nobody answers."""
        try:
            page = self.metrics("/metrics/per-object")
        except OSError:
            return -1
        return max(page.all("rabbitmq_stream_s3_stream_durable_next_offset", queue=stream).values(), default=-1)


class Cluster:
    """The nodes, and who is cut from whom."""

    def __init__(self, run_dir, s3, count=3, conf=None, **settings):
        self.s3 = s3
        self.nodes = [Node(run_dir, s3, index, conf, **settings) for index in range(count)]
        self._cuts = set()
        # Replicas that had to be restarted to be known again.
        self.woken = 0
        self._log_marks = {}

    def start(self):
        """Starts all of them and makes one cluster of them."""
        self.nodes[0].start()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.start(), self.nodes[1:]))
        for node in self.nodes[1:]:
            node.join(self.nodes[0])
        self.mark_logs()
        return self

    def __enter__(self):
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Kills what runs."""
        for node in self.nodes:
            with contextlib.suppress(OSError, CommandError, KeyError):
                node.thaw()
            node.kill()
            node.gateway.stop()

    def create(self, stream, **arguments):
        """A stream with a member on every node."""
        arguments = {"stream_max_segment_size_bytes": 4_000_000, "initial_cluster_size": len(self.nodes), **arguments}
        with self.nodes[0].client() as client:
            client.create(stream, **arguments)
        self.wait_leader(stream)

    # -- who is what ------------------------------------------------------------------------------

    def others(self, *but):
        """All nodes but these."""
        return [node for node in self.nodes if node not in but]

    def leader(self, stream, ask=None):
        """The node that has the writer, as a node sees it; None while there is none."""
        for node in [ask] if ask else self.nodes:
            try:
                with node.client(patience=5) as client:
                    leader, _ = client.metadata(stream)
            except (OSError, ProtocolError, AssertionError):
                continue
            if leader is not None:
                return next(n for n in self.nodes if n.stream_port == leader[1])
        return None

    def wait_leader(self, stream, among=None, seconds=60):
        """Waits until one of `among` (all) is the leader in its own eyes; returns it."""
        among = self.nodes if among is None else among

        def led():
            for node in among:
                if self.leader(stream, ask=node) is node:
                    return node
            return None

        return wait_until(led, seconds, f"{stream}: a leader among {[n.name for n in among]}", every=0.1)

    def replicas(self, stream):
        """The nodes that have a member and not the writer."""
        leader = self.wait_leader(stream)
        with leader.client() as client:
            _, members = client.metadata(stream)
        ports = {port for _, port in members}
        return [node for node in self.nodes if node is not leader and node.stream_port in ports]

    def wait_members(self, stream, nodes=None, seconds=60):
        """Waits until the stream has a running member on each node."""
        for node in self.nodes if nodes is None else nodes:
            node.wait_leader(stream, seconds)

    # -- life -------------------------------------------------------------------------------------

    def kill(self, node):
        """SIGKILL; the others have noticed when this returns."""
        node.kill()
        self.wait_missed(node)

    def wait_missed(self, node):
        """Waits until the nodes that run have lost their connections to this one."""
        others = [n for n in self.others(node) if n.running]
        wait_until(lambda: all(node.node not in n.peers() for n in others), 60, f"{node.name} is missed")

    def restart(self, node, stream=None):
        """Stops a node in order and starts it again."""
        node.restart()
        if stream:
            node.wait_leader(stream)

    @contextlib.contextmanager
    def frozen(self, node):
        """A node that does not answer while this lasts."""
        node.freeze()
        try:
            yield
        finally:
            node.thaw()

    def wipe_stream(self, node, stream):
        """Removes the segments of a stream on a node that is down."""
        folder = node.stream_dir(stream)
        assert any(folder.iterdir()), "there is nothing to wipe"
        shutil.rmtree(folder)

    def replace(self, node, *streams):
        """A node that has lost its disk for good: forgotten, started empty, joined, given replicas again."""
        self.kill(node)
        shutil.rmtree(node.data_dir)
        rest = self.others(node)
        rest[0].ctl("forget_cluster_node", node.node)
        node.start()
        node.join(rest[0])
        for stream in streams:
            # The coordinator tries to delete the member of before until the node answers, and takes the new one for it.
            wait_until(lambda s=stream: node not in self.coordinated(s), 60, f"the old member on {node.name} is gone")
            self.add_replica(stream, node)

    # -- members of a stream ----------------------------------------------------------------------

    def move_leader(self, stream, target=None):
        """Restarts the stream until another node (or `target`) has the writer; returns that node.

        The coordinator grants a wish only to one of the first members to stop.
        """
        before = self.wait_leader(stream)
        wish = target or self.others(before)[0]

        def moved():
            now = self.wait_leader(stream)
            if now is (target or now) and now is not before:
                return now
            now.rpc(
                f'rabbit_stream_queue:restart_stream(<<"/">>, <<"{stream}">>,'
                f" #{{preferred_leader_node => '{wish.node}'}})."
            )
            return None

        return wait_until(moved, 90, f"{stream}: another leader than {before.name}", every=0.2)

    def add_replica(self, stream, node, seconds=90):
        """Gives a node a member."""
        self._membership("add_replica", stream, node, seconds)
        node.wait_leader(stream, seconds)

    def delete_replica(self, stream, node, seconds=60):
        """Takes a node's member away; its folder goes."""
        folder = node.stream_dir(stream)
        self._membership("delete_replica", stream, node, seconds)
        wait_until(lambda: not folder.exists(), seconds, f"{folder} is gone")

    def _membership(self, what, stream, node, seconds):
        call = f'rabbit_stream_queue:{what}(<<"/">>, <<"{stream}">>, \'{node.node}\').'
        ask = self.others(node)[0]
        # Refused while another change or an election is under way.
        wait_until(lambda: _expect("ok", ask.rpc(call)), seconds, f"{what} of {stream} on {node.name}", every=0.5)

    def coordinated(self, stream):
        """What the coordinator has of the members: node -> the text of its state, also those that it is still deleting."""
        leader = self.wait_leader(stream)
        state = leader.rpc(
            "begin {ok, {_, S}, _} = ra:local_query({rabbit_stream_coordinator, node()}, fun(X) ->"
            ' lists:flatten(io_lib:format("~0p", [element(2, X)])) end), S end.'
        ).replace('\\"', '"')
        streams = re.split(r'"(__[^"]+)"\s*=>', state)
        mine = dict(zip(streams[1::2], streams[2::2])).get(leader.stream_id(stream))
        assert mine, f"{stream}: the coordinator does not know it"
        found = dict(re.findall(r"'?(\w+@\w+)'?\s*=>\s*{member,\s*(.*?)(?='?\w+@\w+'?\s*=>|$)", mine))
        return {node: found[node.node] for node in self.nodes if node.node in found}

    # -- links ------------------------------------------------------------------------------------

    def cut(self, one, other):
        """Cuts two nodes from each other."""
        for here, there in ((one, other), (other, one)):
            here.rpc(f"erlang:set_cookie('{there.node}', '{here.name}_is_cut_off').")
        for here, there in ((one, other), (other, one)):
            here.rpc(f"erlang:disconnect_node('{there.node}').")
        self._cuts.add(frozenset((one, other)))
        # It bites: the link is down, and connecting is refused.
        for here, there in ((one, other), (other, one)):
            wait_until(lambda h=here, t=there: t.node not in h.peers(), 20, f"{one.name} and {other.name} are cut")
        assert one.rpc(f"net_kernel:connect_node('{other.node}').") == "false", "the cut does not hold"

    def heal(self, one, other):
        """Connects them again, whichever of the two has been restarted meanwhile."""
        for here, there in ((one, other), (other, one)):
            if here.running:
                here.rpc(f"erlang:set_cookie('{there.node}', erlang:get_cookie()).")
        self._cuts.discard(frozenset((one, other)))
        if one.running and other.running:
            wait_until(
                lambda: one.rpc(f"net_kernel:connect_node('{other.node}').") == "true",
                30, f"{one.name} and {other.name} are connected",
            )

    def isolate(self, node):
        """Cuts a node from all others; not from S3."""
        for other in self.others(node):
            if other.running:
                self.cut(node, other)

    def heal_all(self):
        """No link is cut, and every way to S3 is open."""
        for pair in list(self._cuts):
            self.heal(*pair)
        for node in self.nodes:
            node.gateway.heal()

    def settle(self, *streams, seconds=120):
        """Everything runs, is connected, and the streams have all their members."""
        self.heal_all()
        for node in self.nodes:
            if not node.running:
                node.start()
        for one, other in itertools.combinations(self.nodes, 2):
            wait_until(
                lambda a=one, b=other: a.rpc(f"net_kernel:connect_node('{b.node}').") == "true",
                60, f"{one.name} and {other.name} are connected",
            )
        for stream in streams:
            self._wake_members(stream)
            self.wait_members(stream, seconds=seconds)

    def _wake_members(self, stream):
        """Restarts replicas that the coordinator has for `disconnected`.

        A replica whose node was cut from the coordinator's leader and not from the writer's goes on replicating. In
        RabbitMQ 4.3 the coordinator watches it again when the link is back, but does not have it for running again, so no
        client may attach there until that replica ends. With the plugin or without.
        """
        members = self.coordinated(stream)
        stream_id = self.wait_leader(stream).stream_id(stream)
        for node in members:
            if members[node].startswith("{disconnected"):
                self.woken += 1
                node.rpc(
                    "[exit(Pid, kill) || {Id, Pid, _, [osiris_replica]} <- supervisor:which_children(osiris_server_sup),"
                    f' rabbitmq_stream_s3:stream_id(Id) =:= <<"{stream_id}">>].'
                )

    # -- the tier ---------------------------------------------------------------------------------

    def persisted(self, stream):
        """The durable end, as the node that writes says; -1 while none does."""
        return max(node.persisted(stream) for node in self.nodes)

    def wait_uploads(self, stream, beyond, among=None, seconds=60):
        """Waits until one of `among` (all) has persisted something behind `beyond`; returns the seconds that took."""
        begun = time.monotonic()
        among = self.nodes if among is None else among
        wait_until(
            lambda: max(node.persisted(stream) for node in among) > beyond, seconds, f"{stream}: durable beyond {beyond}"
        )
        return time.monotonic() - begun

    def committed(self, stream):
        """The offset after the last committed chunk's first, as the leader says."""
        return self.committed_on(stream, self.nodes)

    def committed_on(self, stream, nodes):
        """As `committed`, of a leader among these nodes."""

        def told():
            try:
                with self.wait_leader(stream, nodes).client(patience=5) as client:
                    # An empty stream has -1.
                    return client.stats(stream)["committed_chunk_id"] + 2
            except ProtocolError as error:
                raise OSError(str(error)) from error

        return wait_until(told, 60, f"{stream}: what is committed") - 1

    def manifest(self, stream, among=None):
        """What is persisted now, read from the bucket by way of the pointer that a leader among these nodes has."""
        leader = self.wait_leader(stream, among)
        # The root may be replaced between the two.
        return wait_until(lambda: leader.manifest(self.s3, stream), 30, f"{stream}: a manifest")

    def sum(self, counter):
        """A plugin metric added up over the nodes that answer."""
        total = 0
        for node in self.nodes:
            with contextlib.suppress(OSError):
                total += node.counter(counter)
        return total

    # -- logs -------------------------------------------------------------------------------------

    def mark_logs(self):
        """The window of `log_window` begins here."""
        self._log_marks = {node.name: len(self._log_of(node)) for node in self.nodes}

    def log_window(self):
        """What the nodes logged since `mark_logs`: the errors, and the last lines."""
        parts = []
        for node in self.nodes:
            lines = self._log_of(node)[self._log_marks.get(node.name, 0) :].splitlines()
            # The first line of each report: crash reports of stock processes go on for pages.
            wrong = [line for _, report in itertools.groupby(lines, _reporter) for line in list(report)[:2]]
            wrong = [line for line in wrong if re.search(r"\[(error|critical|alert|emergency)\]", line)]
            parts += [f"--- {node.name}: {len(wrong)} errors", *wrong[:_LOG_LINES], f"--- {node.name}: last lines"]
            parts += lines[-_LOG_LINES:]
        return "\n".join(parts)

    @staticmethod
    def _log_of(node):
        try:
            return node.log()
        except (OSError, KeyError):
            return ""


def _reporter(line):
    """Who wrote a line: the process of it."""
    match = re.search(r"<\d+\.\d+\.\d+>", line)
    return match and match[0]


def _expect(wanted, answer):
    assert answer == wanted, answer
    return True
