"""Just enough of AMQP 1.0's message format for stream entries: a body of data sections, and skipping the rest."""

import struct

_DATA, _VALUE = 0x75, 0x77
# Bytes of a fixed-width value, by the high nibble of its constructor.
_FIXED = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}


def encode(body):
    """One message with one data section."""
    if len(body) < 256:
        return b"\x00\x53\x75\xa0" + bytes((len(body),)) + body
    return b"\x00\x53\x75\xb0" + len(body).to_bytes(4, "big") + body


def _value_end(data, position):
    """Where the value (constructor included) at `position` ends."""
    constructor = data[position]
    if constructor == 0x00:
        return _value_end(data, _value_end(data, position + 1))
    nibble = constructor >> 4
    if nibble in _FIXED:
        return position + 1 + _FIXED[nibble]
    if nibble in (0xA, 0xC, 0xE):
        return position + 2 + data[position + 1]
    if nibble in (0xB, 0xD, 0xF):
        return position + 5 + struct.unpack_from(">I", data, position + 1)[0]
    raise ValueError(f"AMQP constructor {constructor:#x} at {position}")


def decode(message):
    """The body of a message: its data sections joined."""
    if message[:4] == b"\x00\x53\x75\xb0" and len(message) == 8 + int.from_bytes(message[4:8], "big"):
        return bytes(message[8:])
    body, position = [], 0
    while position < len(message):
        if message[position] != 0x00 or message[position + 1] != 0x53:
            raise ValueError(f"no section at byte {position}: {bytes(message[position:position + 8]).hex()}")
        section, position = message[position + 2], position + 3
        end = _value_end(message, position)
        if section in (_DATA, _VALUE):
            skip = 2 if message[position] == 0xA0 else 5
            body.append(bytes(message[position + skip : end]))
        position = end
    return b"".join(body)
