"""The way of one node to S3: a TCP relay that can be cut, held and healed.

One thread with an event loop for each relay. Owns sockets and counts; knows nothing of HTTP.
"""

import asyncio
import socket
import struct
import threading
import urllib.parse

_PIECE = 1 << 16


class Gateway:
    """Relays to `endpoint` from a port of its own; its `endpoint` is what the node is given."""

    def __init__(self, endpoint):
        target = urllib.parse.urlsplit(endpoint)
        self._target = (target.hostname, target.port)
        self._scheme = target.scheme
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers = set()
        self._open = True
        self.endpoint = None
        # What happened so far: connections taken, refused, cut while open; reads held back.
        self.connections = self.refused = self.broken = self.held = 0
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait(10)

    # -- faults -----------------------------------------------------------------------------------

    def cut(self):
        """Breaks what is open and refuses what comes."""
        self._call(self._cut)

    def hold(self):
        """Takes connections and bytes, and passes nothing on."""
        self._call(self._flowing.clear)

    def heal(self):
        """Lets everything through; what was held goes on."""
        self._call(self._heal)

    def stop(self):
        """Ends the relay."""
        self._call(self._cut)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def bitten(self):
        """How often a fault was met."""
        return self.refused + self.broken + self.held

    # -- the loop ---------------------------------------------------------------------------------

    def _call(self, function):
        done = threading.Event()

        def call():
            function()
            done.set()

        self._loop.call_soon_threadsafe(call)
        assert done.wait(10), "the relay does not answer"

    def _cut(self):
        self._open = False
        self._flowing.set()
        for writer in list(self._writers):
            self.broken += 1
            _reset(writer)

    def _heal(self):
        self._open = True
        self._flowing.set()

    def _run(self, ready):
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_PIECE))
        self.endpoint = f"{self._scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader, writer):
        if not self._open:
            self.refused += 1
            _reset(writer)
            return
        self.connections += 1
        self._writers.add(writer)
        beyond = None
        try:
            beyond_reader, beyond = await asyncio.open_connection(*self._target, limit=_PIECE)
            await asyncio.gather(self._pass(reader, beyond), self._pass(beyond_reader, writer))
        except (OSError, asyncio.CancelledError):
            # Cancelled is only who is open when the relay ends.
            pass
        finally:
            self._writers.discard(writer)
            for end in (writer, beyond):
                if end is not None:
                    end.transport.abort()

    async def _pass(self, reader, writer):
        while data := await reader.read(_PIECE):
            if not self._flowing.is_set():
                self.held += 1
                await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


def _reset(writer):
    """Ends a connection as a router that has lost it does: not with a goodbye."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
