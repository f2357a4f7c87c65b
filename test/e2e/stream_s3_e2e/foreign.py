"""Clients in another language: the program of test/clients, a library for each of the protocols."""

import os
import pathlib
import struct
import subprocess

from .broker import TOP, CommandError, run
from .streamproto import FIRST

_RECORD = struct.Struct(">QI")


def program():
    """The program, built if need be."""
    return pathlib.Path(run(TOP / "scripts" / "lib" / "foreign-clients", seconds=2400).strip())


def _consumer(protocol):
    def consume(broker, stream, until, spec=FIRST, seconds=300.0):
        port = broker.stream_port if protocol == "stream" else broker.amqp_port
        from_ = str(spec[1]) if spec[0] == "offset" else spec[0]
        command = [program(), protocol, str(port), stream, from_, str(until)]
        if broker.authority:
            command.append(str(broker.authority))
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, env=os.environ)
        if done.returncode:
            raise CommandError(f"{protocol}: exit {done.returncode}\n{done.stderr.decode(errors='replace')}")
        return _records(done.stdout)

    consume.__name__ = f"consume_foreign_{protocol}"
    return consume


def _records(data):
    position = 0
    while position < len(data):
        offset, size = _RECORD.unpack_from(data, position)
        position += _RECORD.size
        yield offset, data[position : position + size]
        position += size


consume_foreign_stream = _consumer("stream")
consume_foreign_amqp091 = _consumer("amqp091")
consume_foreign_amqp10 = _consumer("amqp10")
