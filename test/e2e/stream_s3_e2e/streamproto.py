"""A small client of the RabbitMQ stream protocol, for what client libraries hide.

Exact offsets, credit by hand, many subscriptions on one connection, chunk headers, statistics, resolving offsets.
One thread, one socket: `poll` reads one frame. Answers are matched by correlation id, everything else
lands in the subscription or publisher it is for. Owns no policy: tests decide when to give credit.
"""

import collections
import gzip
import select
import socket
import struct
import time
import zlib

DECLARE_PUBLISHER, PUBLISH, PUBLISH_CONFIRM, PUBLISH_ERROR, QUERY_PUBLISHER, DELETE_PUBLISHER = range(1, 7)
SUBSCRIBE, DELIVER, CREDIT, STORE_OFFSET, QUERY_OFFSET, UNSUBSCRIBE, CREATE, DELETE = range(7, 15)
METADATA, METADATA_UPDATE, PEER_PROPERTIES, SASL_HANDSHAKE, SASL_AUTHENTICATE, TUNE, OPEN = range(15, 22)
CLOSE, HEARTBEAT, CONSUMER_UPDATE, EXCHANGE_VERSIONS, STREAM_STATS, RESOLVE_OFFSET = 22, 23, 26, 27, 28, 31
RESPONSE = 0x8000
OK, NO_OFFSET = 1, 19

FIRST, LAST, NEXT = ("first",), ("last",), ("next",)


def at_offset(offset):
    """Offset specification: from this offset."""
    return ("offset", offset)


def at_timestamp(milliseconds):
    """Offset specification: from the chunk of this time."""
    return ("timestamp", milliseconds)


class ProtocolError(Exception):
    """The broker answered with a code other than OK."""

    def __init__(self, what, code):
        super().__init__(f"{what}: response code {code}")
        self.code = code


class ConnectionLost(OSError):
    """The broker closed the connection (or said that it will)."""


def _string(text):
    data = text.encode()
    return struct.pack(">h", len(data)) + data


def _map(properties):
    parts = [struct.pack(">i", len(properties))]
    for key, value in properties.items():
        parts += [_string(key), _string(str(value))]
    return b"".join(parts)


def _spec(spec):
    kinds = {"first": 1, "last": 2, "next": 3, "offset": 4, "timestamp": 5}
    head = struct.pack(">H", kinds[spec[0]])
    if spec[0] == "offset":
        return head + struct.pack(">Q", spec[1])
    if spec[0] == "timestamp":
        return head + struct.pack(">q", spec[1])
    return head


class _Body:
    """Reads fields off the front of a frame."""

    def __init__(self, data, position=0):
        self.data, self.position = data, position

    def take(self, form):
        values = struct.unpack_from(">" + form, self.data, self.position)
        self.position += struct.calcsize(">" + form)
        return values[0] if len(values) == 1 else values

    def string(self):
        size = self.take("h")
        if size < 0:
            return None
        text = bytes(self.data[self.position : self.position + size]).decode()
        self.position += size
        return text


class Chunk:
    """One delivered chunk: the header's fields, and its entries on demand."""

    __slots__ = (
        "chunk_type", "num_entries", "num_records", "timestamp", "epoch", "chunk_id", "crc", "data",
        "committed_chunk_id", "received",
    )

    def __init__(self, raw, committed_chunk_id):
        fields = struct.unpack_from(">BBHIqQQIIIB3x", raw, 0)
        if fields[0] != 0x50:
            raise ProtocolError(f"chunk magic {fields[0]:#x}", 0)
        self.chunk_type, self.num_entries, self.num_records, self.timestamp = fields[1:5]
        self.epoch, self.chunk_id, self.crc = fields[5:8]
        self.data = raw[48 : 48 + fields[8]]
        self.committed_chunk_id = committed_chunk_id
        self.received = time.monotonic()
        if len(self.data) != fields[8]:
            raise ProtocolError(f"chunk {self.chunk_id} holds {len(self.data)} of {fields[8]} bytes", 0)

    @property
    def next_offset(self):
        """The offset after this chunk's last record."""
        return self.chunk_id + self.num_records

    def check_crc(self):
        """The broker's own checksum of the data, as made when it was published."""
        seen = zlib.crc32(self.data)
        if seen != self.crc:
            raise AssertionError(f"chunk {self.chunk_id}: CRC {seen:#010x}, header says {self.crc:#010x}")

    def messages(self):
        """(offset, message bytes) of every record; sub-batches (plain or gzip) are opened."""
        data, position, offset = self.data, 0, self.chunk_id
        for _ in range(self.num_entries):
            if data[position] & 0x80:
                kind, records, plain_size, size = struct.unpack_from(">BHII", data, position)
                inner = data[position + 11 : position + 11 + size]
                position += 11 + size
                compression = (kind >> 4) & 0x07
                if compression == 1:
                    inner = gzip.decompress(inner)
                elif compression != 0:
                    raise ProtocolError(f"compression {compression} is not known here", 0)
                if len(inner) != plain_size:
                    raise AssertionError(f"sub-batch at {offset}: {len(inner)} bytes, said {plain_size}")
                at = 0
                for _ in range(records):
                    (length,) = struct.unpack_from(">I", inner, at)
                    yield offset, inner[at + 4 : at + 4 + length]
                    at += 4 + length
                    offset += 1
            else:
                (length,) = struct.unpack_from(">I", data, position)
                yield offset, data[position + 4 : position + 4 + length]
                position += 4 + length
                offset += 1
        if position != len(data):
            raise AssertionError(f"chunk {self.chunk_id}: {len(data) - position} bytes after its last entry")


class Subscription:
    """What arrived for one subscription and was not taken yet."""

    def __init__(self, client, subscription_id, stream, spec):
        self.client, self.id, self.stream, self.spec = client, subscription_id, stream, spec
        self.chunks = collections.deque()
        self.chunks_seen = 0

    def credit(self, count=1):
        """Lets the broker send `count` more chunks."""
        self.client.send(CREDIT, struct.pack(">BH", self.id, count))

    def next_chunk(self, seconds=30.0, credit=1):
        """Waits for a chunk and gives `credit` back; None when time is up."""
        deadline = time.monotonic() + seconds
        while not self.chunks:
            if not self.client.poll(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                return None
        chunk = self.chunks.popleft()
        if credit:
            self.credit(credit)
        return chunk

    def close(self):
        """Unsubscribes."""
        self.client.request(UNSUBSCRIBE, struct.pack(">B", self.id))
        self.client.subscriptions.pop(self.id, None)


class Publisher:
    """One publisher: counts what was sent and what was confirmed."""

    def __init__(self, client, publisher_id, stream):
        self.client, self.id, self.stream = client, publisher_id, stream
        self.unconfirmed = {}
        self.confirm_seconds = []
        self.errors = []
        # Called with the publishing id of each confirmed message.
        self.on_confirm = None

    def publish(self, messages, filters=None):
        """Sends (publishing id, encoded message) pairs in one frame; `filters` gives each a filter value."""
        parts = [struct.pack(">BI", self.id, len(messages))]
        now = time.monotonic()
        for index, (number, message) in enumerate(messages):
            parts.append(struct.pack(">Q", number))
            if filters is not None:
                parts.append(struct.pack(">h", -1) if filters[index] is None else _string(filters[index]))
            parts += [struct.pack(">I", len(message)), message]
            self.unconfirmed[number] = now
        self.client.send(PUBLISH, b"".join(parts), version=1 if filters is None else 2)

    def publish_batch(self, number, messages, compressed=True):
        """Sends one sub-batch: many messages under one publishing id."""
        plain = b"".join(struct.pack(">I", len(message)) + message for message in messages)
        data = gzip.compress(plain, 1) if compressed else plain
        head = struct.pack(
            ">BIQBHII", self.id, 1, number, 0x80 | (0x10 if compressed else 0), len(messages), len(plain), len(data)
        )
        self.unconfirmed[number] = time.monotonic()
        self.client.send(PUBLISH, head + data)

    def wait_confirmed(self, at_most=0, seconds=60.0):
        """Waits until at most that many are unconfirmed."""
        deadline = time.monotonic() + seconds
        while len(self.unconfirmed) > at_most:
            if not self.client.poll(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                raise AssertionError(f"{len(self.unconfirmed)} records are not confirmed after {seconds} s")
        if self.errors:
            raise AssertionError(f"publishing failed: {self.errors[:3]} ({len(self.errors)} in all)")


class Client:
    """One connection. `patience` is how many seconds it waits for an answer, or for the broker to take a frame."""

    def __init__(
        self, port, host="127.0.0.1", user="guest", password="guest", vhost="/", receive_buffer=None, tls=None,
        patience=60.0,
    ):
        self.patience = patience
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer:
            # Before connecting: only then the kernel offers the small window (a slow reader in earnest).
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(min(30, patience))
        self.socket.connect((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self.buffer = bytearray()
        self.correlation = 0
        self.answers = {}
        self.subscriptions = {}
        self.publishers = {}
        self.metadata_updates = []
        self.credit_errors = []
        self.tune = None
        self.closed = None
        self._log_in(user, password, vhost, patience)

    def _log_in(self, user, password, vhost, patience):
        self.request(PEER_PROPERTIES, _map({"product": "stream_s3_e2e", "connection_name": "stream_s3_e2e"}))
        self.request(SASL_HANDSHAKE, b"")
        secret = b"\0" + user.encode() + b"\0" + password.encode()
        self.request(SASL_AUTHENTICATE, _string("PLAIN") + struct.pack(">i", len(secret)) + secret)
        while self.tune is None:
            if not self.poll(patience):
                raise ConnectionLost(f"no tune within {patience} s")
        self.frame_max = self.tune[0]
        # No heartbeats: a test that stops reading on purpose must not be cut off for it.
        self.send(RESPONSE | TUNE, struct.pack(">II", self.frame_max, 0))
        self.request(OPEN, _string(vhost))
        versions = [(PUBLISH, 1, 2), (DELIVER, 1, 2)]
        body = struct.pack(">i", len(versions)) + b"".join(struct.pack(">HHH", *v) for v in versions)
        self.request(EXCHANGE_VERSIONS, body)

    # -- frames -----------------------------------------------------------------------------------

    def send(self, key, body, version=1):
        """One frame, all of it."""
        self.socket.settimeout(self.patience)
        self.socket.sendall(struct.pack(">IHH", 4 + len(body), key, version) + body)

    def request(self, key, body, seconds=None, expect_ok=True):
        """Sends a request and returns the body of its answer after the code."""
        seconds = self.patience if seconds is None else seconds
        self.correlation += 1
        correlation = self.correlation
        self.send(key, struct.pack(">I", correlation) + body)
        deadline = time.monotonic() + seconds
        while correlation not in self.answers:
            if not self.poll(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                raise AssertionError(f"no answer to command {key} within {seconds} s")
        code, answer = self.answers.pop(correlation)
        if expect_ok and code != OK:
            raise ProtocolError(f"command {key}", code)
        return answer if expect_ok else (code, answer)

    def poll(self, seconds=0.0):
        """Handles one frame if one comes in time; says whether one did."""
        frame = self._frame(seconds)
        if frame is None:
            return False
        self._handle(frame)
        return True

    def _frame(self, seconds):
        deadline = time.monotonic() + seconds
        while True:
            if len(self.buffer) >= 4:
                size = int.from_bytes(self.buffer[:4], "big")
                if len(self.buffer) >= 4 + size:
                    frame = bytes(self.buffer[4 : 4 + size])
                    del self.buffer[: 4 + size]
                    return frame
            if self.closed:
                raise ConnectionLost(self.closed)
            if not self._decrypted():
                readable, _, _ = select.select([self.socket], [], [], max(0.0, deadline - time.monotonic()))
                if not readable:
                    return None
            data = self.socket.recv(1 << 18)
            if not data:
                self.closed = "the broker closed the connection"
                raise ConnectionLost(self.closed)
            self.buffer += data

    def _decrypted(self):
        """Whether TLS has bytes that the socket no longer shows."""
        pending = getattr(self.socket, "pending", None)
        return pending is not None and pending() > 0

    def _handle(self, frame):
        body = _Body(frame)
        key, version = body.take("HH")
        if key == DELIVER:
            subscription = self.subscriptions.get(body.take("B"))
            committed = body.take("Q") if version == 2 else None
            if subscription is not None:
                subscription.chunks.append(Chunk(frame[body.position :], committed))
                subscription.chunks_seen += 1
        elif key == PUBLISH_CONFIRM:
            publisher = self.publishers.get(body.take("B"))
            count, now = body.take("I"), time.monotonic()
            for number in struct.unpack_from(f">{count}Q", frame, body.position):
                if publisher is not None:
                    publisher.confirm_seconds.append(now - publisher.unconfirmed.pop(number))
                    if publisher.on_confirm is not None:
                        publisher.on_confirm(number)
        elif key == PUBLISH_ERROR:
            publisher = self.publishers.get(body.take("B"))
            for _ in range(body.take("I")):
                number, code = body.take("QH")
                publisher.unconfirmed.pop(number, None)
                publisher.errors.append((number, code))
        elif key == TUNE:
            self.tune = body.take("II")
        elif key == METADATA_UPDATE:
            code = body.take("H")
            self.metadata_updates.append((code, body.string()))
        elif key == CLOSE:
            body.take("I")
            code = body.take("H")
            self.closed = f"the broker asked to close: {code} {body.string()}"
            raise ConnectionLost(self.closed)
        elif key == HEARTBEAT:
            pass
        elif key == RESPONSE | CREDIT:
            self.credit_errors.append(body.take("HB"))
        elif key == CONSUMER_UPDATE:
            correlation, subscription_id, _active = body.take("IBB")
            # Whoever becomes active begins where it subscribed.
            spec = self.subscriptions[subscription_id].spec
            self.send(RESPONSE | CONSUMER_UPDATE, struct.pack(">IH", correlation, OK) + _spec(spec))
        elif key & RESPONSE:
            correlation = body.take("I")
            code = OK if key == RESPONSE | METADATA else body.take("H")
            self.answers[correlation] = (code, body)
        else:
            raise ProtocolError(f"unexpected command {key}", 0)

    # -- commands ---------------------------------------------------------------------------------

    def create(self, stream, **arguments):
        """Creates a stream; `max_length_bytes=..` and the like become arguments."""
        named = {name.replace("_", "-"): value for name, value in arguments.items()}
        self.request(CREATE, _string(stream) + _map(named))

    def delete(self, stream):
        """Deletes a stream."""
        self.request(DELETE, _string(stream))

    def publisher(self, stream, publisher_id=0, reference=""):
        """Declares a publisher."""
        publisher = Publisher(self, publisher_id, stream)
        self.publishers[publisher_id] = publisher
        self.request(DECLARE_PUBLISHER, struct.pack(">B", publisher_id) + _string(reference) + _string(stream))
        return publisher

    def last_publishing_id(self, stream, reference):
        """The last publishing id that the broker holds for a named publisher."""
        return self.request(QUERY_PUBLISHER, _string(reference) + _string(stream)).take("Q")

    def subscribe(self, stream, spec=FIRST, subscription_id=0, credit=10, properties=None):
        """Subscribes; deliveries collect in the returned Subscription."""
        subscription = Subscription(self, subscription_id, stream, spec)
        self.subscriptions[subscription_id] = subscription
        body = struct.pack(">B", subscription_id) + _string(stream) + _spec(spec) + struct.pack(">H", credit)
        try:
            self.request(SUBSCRIBE, body + _map(properties or {}))
        except ProtocolError:
            del self.subscriptions[subscription_id]
            raise
        return subscription

    def store_offset(self, stream, reference, offset):
        """Stores a consumer's offset (no answer comes)."""
        self.send(STORE_OFFSET, _string(reference) + _string(stream) + struct.pack(">Q", offset))

    def query_offset(self, stream, reference):
        """A consumer's stored offset, None when there is none."""
        code, body = self.request(QUERY_OFFSET, _string(reference) + _string(stream), expect_ok=False)
        if code == NO_OFFSET:
            return None
        if code != OK:
            raise ProtocolError("query offset", code)
        return body.take("Q")

    def stats(self, stream):
        """Stream statistics: first_chunk_id, last_chunk_id, committed_chunk_id, ..."""
        body = self.request(STREAM_STATS, _string(stream))
        return {body.string(): body.take("q") for _ in range(body.take("i"))}

    def resolve(self, stream, spec):
        """What the broker resolves an offset specification to (4.3 and later)."""
        kind, value = self.request(RESOLVE_OFFSET, _string(stream) + _spec(spec) + _map({})).take("HQ")
        return kind, value

    def metadata(self, stream):
        """(leader, replicas) of a stream, each as (host, port); leader None while it has none."""
        body = self.request(METADATA, struct.pack(">i", 1) + _string(stream))
        brokers = {}
        for _ in range(body.take("i")):
            reference = body.take("H")
            brokers[reference] = (body.string(), body.take("I"))
        body.take("i")
        body.string()
        code, leader = body.take("HH")
        replicas = [brokers[body.take("H")] for _ in range(body.take("i"))]
        if code != OK:
            raise ProtocolError("metadata", code)
        return brokers.get(leader), replicas

    def close(self):
        """Says goodbye if the broker still listens, and closes the socket."""
        try:
            if not self.closed:
                self.request(CLOSE, struct.pack(">H", OK) + _string("done"), seconds=5)
        except (OSError, AssertionError):
            pass
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
