"""Publishers: numbered records, confirmed, over each of the protocols."""

import asyncio

import pika
import rstream
from proton import Message
from proton.utils import BlockingConnection

from . import amqp10
from .records import filter_value, payload


def publish(broker, stream, count, sizes, first=0, batch=100, window=5000, filters=None, client=None, pace=None):
    """Raw stream protocol: records first..first+count-1, confirmed. Returns confirm latencies in seconds.

    `filters` is a rule from sequence to filter value (or None). `window` bounds what is unconfirmed.
    `pace(sequence)` is called before each frame (throttling, faults in the middle).
    """
    own = client is None
    client = client or broker.client()
    try:
        publisher = client.publisher(stream, publisher_id=_free_id(client))
        frame, frame_bytes = [], 0
        for sequence in range(first, first + count):
            message = amqp10.encode(payload(sequence, sizes(sequence)))
            if frame and (len(frame) >= batch or frame_bytes + len(message) > client.frame_max - 65_536):
                _flush(publisher, frame, filters, window, pace)
                frame, frame_bytes = [], 0
            frame.append((sequence, message))
            frame_bytes += len(message) + 64
        if frame:
            _flush(publisher, frame, filters, window, pace)
        publisher.wait_confirmed(seconds=300)
        return publisher.confirm_seconds
    finally:
        if own:
            client.close()


def _free_id(client):
    return next(number for number in range(256) if number not in client.publishers)


def _flush(publisher, frame, filters, window, pace):
    if pace:
        pace(frame[0][0])
    publisher.publish(frame, None if filters is None else [filters(sequence) for sequence, _ in frame])
    publisher.wait_confirmed(at_most=window, seconds=300)


def publish_batches(broker, stream, count, sizes, first=0, per_batch=50, compressed=True):
    """Raw stream protocol, sub-batches (gzip or plain)."""
    with broker.client() as client:
        publisher = client.publisher(stream)
        for start in range(first, first + count, per_batch):
            numbers = range(start, min(start + per_batch, first + count))
            messages = [amqp10.encode(payload(number, sizes(number))) for number in numbers]
            publisher.publish_batch(numbers[-1], messages, compressed)
            publisher.wait_confirmed(at_most=200)
        publisher.wait_confirmed(seconds=300)


def publish_rstream(broker, stream, count, sizes, first=0, gzip=False, filtered=False):
    """The `rstream` library, with confirms; optionally gzip sub-batches or filter values."""

    async def main():
        confirmed = 0
        done = asyncio.Event()

        def on_confirm(status):
            nonlocal confirmed
            assert status.is_confirmed, status
            confirmed += 1
            if confirmed == expected:
                done.set()

        def body(sequence):
            return amqp10.encode(payload(sequence, sizes(sequence)))

        options = {}
        if filtered:
            options["filter_value_extractor"] = _extract_filter
        producer = rstream.Producer(
            "127.0.0.1", port=broker.stream_port, username="guest", password="guest", **options
        )
        async with producer:
            if gzip:
                starts = range(first, first + count, 50)
                # One confirmation for each sub-batch.
                expected = len(starts)
                for start in starts:
                    entries = [body(n) for n in range(start, min(start + 50, first + count))]
                    await producer.send_sub_entry(
                        stream,
                        entries,
                        compression_type=rstream.CompressionType.Gzip,
                        on_publish_confirm=on_confirm,
                    )
            else:
                expected = count
                for start in range(first, first + count, 500):
                    numbers = range(start, min(start + 500, first + count))
                    for number in numbers:
                        message = _Tagged(body(number), number) if filtered else body(number)
                        await producer.send(stream, message, on_publish_confirm=on_confirm)
            await asyncio.wait_for(done.wait(), 300)

    asyncio.run(main())


class _Tagged(rstream.RawMessage):
    """A raw message that remembers which record it is, for the filter value."""

    def __init__(self, data, number):
        super().__init__(data=data)
        self.number = number


async def _extract_filter(message):
    return filter_value(message.number)


def publish_amqp091(broker, stream, count, sizes, first=0, filters=None):
    """AMQP 0-9-1 with publisher confirms."""
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", broker.amqp_port, heartbeat=0))
    channel = connection.channel()
    channel.confirm_delivery()
    for sequence in range(first, first + count):
        headers = {"x-stream-filter-value": filters(sequence)} if filters else None
        properties = pika.BasicProperties(delivery_mode=2, headers=headers)
        channel.basic_publish("", stream, payload(sequence, sizes(sequence)), properties, mandatory=True)
    connection.close()


def publish_amqp10(broker, stream, count, sizes, first=0):
    """AMQP 1.0, each message settled by the broker."""
    connection = BlockingConnection(f"amqp://guest:guest@127.0.0.1:{broker.amqp_port}", timeout=60, heartbeat=0)
    sender = connection.create_sender(f"/queues/{stream}")
    for sequence in range(first, first + count):
        sender.send(Message(body=payload(sequence, sizes(sequence)), inferred=True, durable=True))
    connection.close()


def declare(broker, stream, **arguments):
    """Declares a stream over AMQP 0-9-1 with any queue arguments (`x_max_age="1h"` and so on)."""
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", broker.amqp_port))
    named = {name.replace("_", "-"): value for name, value in arguments.items()}
    connection.channel().queue_declare(stream, durable=True, arguments={"x-queue-type": "stream", **named})
    connection.close()
