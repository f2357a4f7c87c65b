"""Faults of a soak that happen to nodes, their disks and the links between them.

Each does it, sees that it has taken effect, and leaves it to the round to end it.
"""

import concurrent.futures
import contextlib
import shutil

# Records of each publisher that are confirmed and not durable when every disk is lost.
NOT_DURABLE = 60


class NodeFaults:
    """See the module."""

    def __init__(self, world):
        self.world, self.cluster = world, world.cluster

    def kill_leader(self):
        """SIGKILL of the node that writes."""
        self.world.kill(self.world.leader())

    def kill_replica(self):
        """SIGKILL of a node that does not."""
        self.world.kill(self.world.replica())

    def kill_in_mid_upload(self):
        """SIGKILL while a fragment is on its way."""
        self._kill_held("/data/")

    def kill_in_mid_persist(self):
        """SIGKILL while a root is on its way."""
        self._kill_held("/metadata/root.")

    def kill_before_the_pointer(self):
        """SIGKILL when the root is in S3 and the pointer does not name it."""
        self._kill_held("/metadata/root.", after_effect=True)

    def wipe_replica(self):
        """A replica is killed and its segments are gone."""
        node = self.world.replica()
        self.world.kill(node)
        self.cluster.wipe_stream(node, self.world.stream)

    def restart_node(self):
        """An orderly restart of any node."""
        self.cluster.restart(self.world.any_node(), self.world.stream)

    def move_leader(self):
        """Another leader, by an operator's wish."""
        self.cluster.move_leader(self.world.stream)

    def move_leader_often(self):
        """Five in a row."""
        for _ in range(5):
            self.cluster.move_leader(self.world.stream)

    def isolate_leader(self):
        """The leader alone; S3 is still there for it."""
        self._isolate(self.world.leader())

    def isolate_leader_from_all(self):
        """The leader alone, and without S3."""
        leader = self.world.leader()
        leader.gateway.cut()
        self._isolate(leader)

    def isolate_before_the_pointer(self):
        """The leader alone when the root is in S3 and the pointer does not name it."""
        leader = self.world.leader()
        self.world.hold("/metadata/root.", after_effect=True)
        self._isolate(leader)
        self.cluster.s3.clear_faults()

    def isolate_replica(self):
        """A replica alone."""
        self._isolate(self.world.replica())

    def cut_one_link(self):
        """Two nodes do not see each other, the third sees both."""
        self.cluster.cut(*self.world.random.sample(self.cluster.nodes, 2))
        self.world.linger()

    def pause_leader(self):
        """The leader does not answer, for less than the others need to miss it."""
        with self.cluster.frozen(self.world.leader()):
            self.world.linger(4)

    def freeze_leader(self):
        """The leader does not answer until the others have another, and then continues as if it still were."""
        leader = self.world.leader()
        with self.cluster.frozen(leader):
            self.cluster.wait_leader(self.world.stream, self.cluster.others(leader), seconds=90)

    def freeze_before_the_pointer(self):
        """The same when the root is in S3 and the pointer does not name it."""
        self.world.hold("/metadata/root.", after_effect=True)
        self.freeze_leader()
        self.cluster.s3.clear_faults()

    def freeze_replica(self):
        """A replica does not answer until the others miss it."""
        replica = self.world.replica()
        with self.cluster.frozen(replica):
            self.cluster.wait_missed(replica)

    def take_replica_away(self):
        """A member less, and one more again."""
        node = self.world.replica()
        self.cluster.delete_replica(self.world.stream, node)
        self.world.load.wait_confirmed(20)
        self.cluster.add_replica(self.world.stream, node)

    # -- disks --------------------------------------------------------------------------------------

    def lose_disk_of_replica(self):
        """A node that does not write loses the logs of all streams."""
        self._lose_disk(self.world.replica())

    def lose_disk_of_leader(self):
        """The node that writes does."""
        self._lose_disk(self.world.leader())

    def lose_node(self):
        """A node loses everything that it had on disk: forgotten, joined again, given its replicas again."""
        node = self.world.any_node()
        self.world.count_lives()
        # Its archive and its settings are not among what it has lost.
        self.cluster.replace(node, *(load.stream for load in self.world.loads))
        self.world.effects["nodes replaced"] += 1

    def lose_every_disk(self):
        """All nodes lose their logs at once. What is durable has to stay; what is lost is known record by record.

        Everybody rests meanwhile: what has no quorum left cannot be told from what was never confirmed otherwise.
        """
        cluster, loads = self.cluster, self.world.loads
        for node in cluster.nodes:
            node.gateway.cut()
        for load in loads:
            load.wait_confirmed(NOT_DURABLE)
        with contextlib.ExitStack() as stack:
            for load in loads:
                stack.enter_context(load.at_rest())
            losses = [load.tail(cluster.wait_leader(load.stream), cluster.manifest(load.stream).next) for load in loads]
            self.world.count_lives()
            for node in cluster.nodes:
                node.kill()
            for node in cluster.nodes:
                self._wipe_logs(node)
            # Those that stopped last may have to be there for the first to start.
            with concurrent.futures.ThreadPoolExecutor() as pool:
                list(pool.map(lambda node: node.start(), cluster.nodes))
            for load, loss in zip(loads, losses):
                # S3 is still away: nothing of this waits for it.
                first = cluster.wait_leader(load.stream, seconds=120).segments(load.stream)[0][0]
                assert first == loss.start, f"{load.stream}: begins at {first}, durable is what is below {loss.start}"
                assert len(loss.records) >= NOT_DURABLE, "hardly anything was lost"
                load.lose(loss)
                self.world.effects["records lost with all disks, sent again"] += len(loss.records)

    FAULTS = (
        kill_leader, kill_replica, kill_in_mid_upload, kill_in_mid_persist, kill_before_the_pointer, wipe_replica,
        restart_node, move_leader, move_leader_often, isolate_leader, isolate_leader_from_all,
        isolate_before_the_pointer, isolate_replica, cut_one_link, pause_leader, freeze_leader,
        freeze_before_the_pointer, freeze_replica, take_replica_away,
    )
    NEW_FAULTS = (lose_disk_of_replica, lose_disk_of_leader, lose_node, lose_every_disk)
    KILLS = (kill_leader, kill_replica, kill_in_mid_upload, kill_in_mid_persist, kill_before_the_pointer)

    # -- the parts of them --------------------------------------------------------------------------

    def _kill_held(self, part, **when):
        leader = self.world.leader()
        self.world.hold(part, **when)
        self.world.kill(leader)
        self.cluster.s3.clear_faults()

    def _isolate(self, node):
        self.cluster.isolate(node)
        self.world.linger()

    def _lose_disk(self, node):
        self.world.kill(node)
        self.world.effects["logs lost"] += self._wipe_logs(node)

    @staticmethod
    def _wipe_logs(node):
        folders = list((node.data_dir / "stream").iterdir())
        assert folders, "there is nothing to lose"
        for folder in folders:
            shutil.rmtree(folder)
        return len(folders)
