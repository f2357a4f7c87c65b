"""Consumers over each of the protocols; all yield (offset, body)."""

import asyncio
import dataclasses
import datetime
import ssl
import time

import pika
import rstream
from proton import Described, SSLDomain, symbol, ulong
from proton.reactor import Filter
from proton.utils import BlockingConnection

from . import amqp10
from .streamproto import FIRST


@dataclasses.dataclass(frozen=True)
class Doors:
    """Where consumers knock: ports of one kind. With a certificate authority (a path) they are of TLS."""

    stream_port: int
    amqp_port: int
    authority: object = None


def tls_context(broker):
    """What a client needs to talk TLS to a broker or doors, None if it need not."""
    return ssl.create_default_context(cafile=broker.authority) if broker.authority else None


def consume_chunks(broker, stream, spec=FIRST, stop=None, seconds=60.0, credit=10, client=None, **options):
    """Raw stream protocol: yields chunks until `stop(chunk)` is true or none came for `seconds`.

    Checks the broker's own CRC of every chunk.
    """
    own = client is None
    client = client or broker.client()
    try:
        subscription = client.subscribe(stream, spec, credit=credit, **options)
        while True:
            chunk = subscription.next_chunk(seconds)
            assert chunk is not None, f"{stream}: no chunk for {seconds} s"
            chunk.check_crc()
            yield chunk
            if stop is None or stop(chunk):
                return
    finally:
        if own:
            client.close()


def consume(broker, stream, until, spec=FIRST, seconds=60.0, credit=10, **options):
    """Raw stream protocol: records up to offset `until` - 1, from the exact offset asked for."""
    first = spec[1] if spec[0] == "offset" else 0
    stop = lambda chunk: chunk.next_offset >= until  # noqa: E731
    if first >= until:
        return
    for chunk in consume_chunks(broker, stream, spec, stop, seconds, credit, **options):
        for offset, message in chunk.messages():
            if first <= offset < until:
                yield offset, amqp10.decode(message)


def consume_rstream(broker, stream, until, offset=0, seconds=120.0):
    """The `rstream` library, from an offset."""
    records = []

    async def main():
        done = asyncio.Event()

        async def on_message(message, context):
            records.append((context.offset, amqp10.decode(message)))
            if context.offset + 1 >= until:
                done.set()

        consumer = rstream.Consumer(
            "127.0.0.1", port=broker.stream_port, username="guest", password="guest", ssl_context=tls_context(broker)
        )
        await consumer.start()
        await consumer.subscribe(
            stream,
            on_message,
            offset_specification=rstream.ConsumerOffsetSpecification(rstream.OffsetType.OFFSET, offset),
        )
        running = asyncio.ensure_future(consumer.run())
        await asyncio.wait_for(done.wait(), seconds)
        await consumer.close()
        running.cancel()

    asyncio.run(main())
    return [record for record in records if record[0] < until]


def _amqp091_spec(spec):
    if spec[0] == "timestamp":
        # AMQP 0-9-1 timestamps have whole seconds.
        return datetime.datetime.fromtimestamp(spec[1] // 1000, datetime.timezone.utc)
    return spec[1] if spec[0] == "offset" else spec[0]


def consume_amqp091(broker, stream, until, spec=FIRST, prefetch=100, seconds=60.0, ack_every=1, arguments=None):
    """AMQP 0-9-1: basic.qos, x-stream-offset, acks; until the record at `until` - 1 is in."""
    context = tls_context(broker)
    options = pika.SSLOptions(context, "127.0.0.1") if context else None
    parameters = pika.ConnectionParameters("127.0.0.1", broker.amqp_port, heartbeat=0, ssl_options=options)
    connection = pika.BlockingConnection(parameters)
    channel = connection.channel()
    channel.basic_qos(prefetch_count=prefetch)
    wanted = {"x-stream-offset": _amqp091_spec(spec), **(arguments or {})}
    count = 0
    try:
        for method, properties, body in channel.consume(stream, arguments=wanted, inactivity_timeout=seconds):
            assert method is not None, f"{stream}: no record for {seconds} s ({count} so far)"
            offset = properties.headers["x-stream-offset"]
            count += 1
            if count % ack_every == 0:
                channel.basic_ack(method.delivery_tag, multiple=ack_every > 1)
            if offset < until:
                yield offset, body
            if offset + 1 >= until:
                return
    finally:
        connection.close()


def _amqp10_filter(spec, more=None):
    if spec[0] == "timestamp":
        from proton import timestamp

        value = timestamp(spec[1] // 1000 * 1000)
    else:
        value = ulong(spec[1]) if spec[0] == "offset" else spec[0]
    name = symbol("rabbitmq:stream-offset-spec")
    filters = {name: Described(name, value)}
    for key, wanted in (more or {}).items():
        filters[symbol(key)] = Described(symbol(key), wanted)
    return Filter(filters)


def consume_amqp10(broker, stream, until, spec=FIRST, credit=100, seconds=60.0, filters=None):
    """AMQP 1.0 with the `rabbitmq:stream-offset-spec` filter."""
    domain, scheme = None, "amqp"
    if broker.authority:
        domain, scheme = SSLDomain(SSLDomain.MODE_CLIENT), "amqps"
        domain.set_trusted_ca_db(str(broker.authority))
        domain.set_peer_authentication(SSLDomain.VERIFY_PEER_NAME)
    url = f"{scheme}://guest:guest@127.0.0.1:{broker.amqp_port}"
    connection = BlockingConnection(url, timeout=seconds, heartbeat=0, ssl_domain=domain)
    try:
        options = [_amqp10_filter(spec, filters)]
        receiver = connection.create_receiver(f"/queues/{stream}", credit=credit, options=options)
        deadline = time.monotonic() + seconds
        while True:
            message = receiver.receive(timeout=max(0.1, deadline - time.monotonic()))
            receiver.accept()
            deadline = time.monotonic() + seconds
            offset = message.annotations[symbol("x-stream-offset")]
            body = message.body
            body = body if isinstance(body, bytes) else bytes(body)
            if offset < until:
                yield int(offset), body
            if offset + 1 >= until:
                return
    finally:
        connection.close()
