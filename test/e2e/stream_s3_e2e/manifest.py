"""The persisted manifest of a stream, read from the bucket as docs/FORMAT.md says: pointer, root, groups, fragments.

A reader of its own, so that a mistake of the plugin's is not read back by the same mistake.
"""

import re
import struct

_HEAD, _ENTRY = 49, 34
_KINDS = {1: ("group", b"OSIG"), 2: ("kgroup", b"OSIK"), 3: ("mgroup", b"OSIM")}


class ManifestError(AssertionError):
    """The bucket does not hold what the manifest says."""


class Manifest:
    """`first`, `next`, `fragments` [(first offset, key)] of what is persisted now; `root`: its bytes."""

    def __init__(self, s3, folder, pointer):
        self._s3, self._folder = s3, folder
        self.epoch, self.uid, self.revision = pointer
        body = self.root = self._get(f"metadata/root.{self.epoch}.{self.uid:08x}.manifest", b"OSIR")
        self.first, self.next = struct.unpack_from(">QQ", body, 8)
        self.total_size = int.from_bytes(body[40:49], "big")
        self.fragments = list(self._leaves(body, self.next))

    def _get(self, key, magic):
        body = self._s3.get(f"{self._folder}/{key}")
        if body[:4] != magic:
            raise ManifestError(f"{key}: magic {body[:4]!r}")
        return body

    def _leaves(self, body, end):
        found = []
        for at in range(_HEAD, len(body), _ENTRY):
            offset, _, _, kind = struct.unpack_from(">QqqB", body, at)
            found.append((offset, kind, body[at + 30 : at + 34].hex()))
        ends = [offset for offset, _, _ in found[1:]] + [end]
        for (offset, kind, uid), end in zip(found, ends):
            # A group is immutable: it goes on naming what retention has dropped, and that is gone.
            if end <= self.first:
                continue
            if kind == 0:
                yield offset, f"data/{offset:020}.{uid}.fragment"
            else:
                ending, magic = _KINDS[kind]
                yield from self._leaves(self._get(f"metadata/{offset:020}.{uid}.{ending}", magic), end)

    def check(self, exact=True):
        """The fragments cover [first, next) without a hole, none twice, each is there and says the same of itself.

        `exact`: every object ends where the next begins; else (a log that had lost its end) it may go on behind that.
        """
        objects = {entry["key"]: entry for entry in self._s3.objects(f"{self._folder}/data/")}
        keys = [key for _, key in self.fragments]
        if len(set(keys)) != len(keys):
            raise ManifestError("a fragment is named twice")
        if self.fragments and self.fragments[0][0] > self.first:
            raise ManifestError(f"begins at {self.first}, its first fragment at {self.fragments[0][0]}")
        ends = [offset for offset, _ in self.fragments[1:]] + [self.next]
        for (offset, key), end in zip(self.fragments, ends):
            entry = objects.get(f"{self._folder}/{key}")
            if entry is None:
                raise ManifestError(f"{key} is not in the bucket")
            first, following = (int(entry["metadata"][name]) for name in ("first-offset", "next-offset"))
            if first != offset or following < end or (exact and following != end) or end <= offset:
                raise ManifestError(f"{key} holds [{first}, {following}), the manifest says [{offset}, {end})")
        return self

    def chunk_count(self):
        """Chunks of all fragments, osiris' own among them (no consumer sees those)."""
        objects = {entry["key"]: entry for entry in self._s3.objects(f"{self._folder}/data/")}
        return sum(int(objects[f"{self._folder}/{key}"]["metadata"]["chunks"]) for _, key in self.fragments)


def pointer(text):
    """(epoch, uid, revision) of what `rabbitmq_stream_s3_db:get_consistent/1` printed; None while there is none."""
    match = re.fullmatch(r"\{ok,\s*\{(\d+),\s*(\d+),\s*(\d+)\}\}", text.strip())
    return tuple(int(part) for part in match.groups()) if match else None


def check_puts(s3, stream_id, without=()):
    """No key was ever written twice. `without`: rules that answer 200 in the store's place, and nothing is written."""
    puts = [put for put in s3.log(operation="PutObject") if stream_id in put["key"] and put["rule"] not in without]
    keys = [put["key"] for put in puts if put["status"] == 200]
    if len(keys) != len(set(keys)):
        raise ManifestError("a key was written twice")
