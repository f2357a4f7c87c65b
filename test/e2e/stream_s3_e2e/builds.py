"""Other versions of the plugin's archive, for what happens to a node when one takes the place of another."""

import pathlib
import re
import shutil
import zipfile

from .broker import TOP, run

PLUGIN = "rabbitmq_stream_s3"


def archive():
    """The archive that scripts/dist --ez has made."""
    found = list((TOP / "dist").glob(f"{PLUGIN}-*.ez"))
    assert len(found) == 1, f"scripts/dist --ez makes it: {found}"
    return found[0]


def rewritten(target, change):
    """Writes the archive to `target` with `change(name, bytes)` in place of the bytes of each file."""
    with zipfile.ZipFile(archive()) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry, change(entry.filename, old.read(entry.filename)))
    return target


def with_broken_library(target):
    """The native library is not one."""
    return rewritten(target, lambda name, data: b"not a library" if name.endswith(".so") else data)


def recompiled(target, work, *changes):
    """All modules compiled anew after `changes`: (file, pattern, replacement), each of which must fit once."""
    source, beams = pathlib.Path(work) / "src", pathlib.Path(work) / "beams"
    shutil.copytree(TOP / "erlang_src", source)
    beams.mkdir()
    for name, pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, (source / name).read_text())
        assert count == 1, f"{name}: {pattern} fits {count} times"
        (source / name).write_text(text)
    modules = sorted(source.glob("*.erl"))
    run(TOP / "scripts" / "lib" / "in-host", "erlc", "+debug_info", "-I", TOP / "include", "-o", beams, *modules)
    compiled = {beam.name: beam.read_bytes() for beam in beams.glob("*.beam")}
    return rewritten(target, lambda name, data: compiled.get(pathlib.PurePath(name).name, data))


def versioned(target, source, version):
    """The archive `source` with another version: of its folder and of its application."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            name, data = re.sub(rf"^{PLUGIN}-[^/]+", f"{PLUGIN}-{version}", entry.filename), old.read(entry.filename)
            if name.endswith(f"{PLUGIN}.app"):
                data, count = re.subn(rb'(\{vsn, *")[^"]+', rb"\g<1>" + version.encode(), data)
                assert count == 1, f"{name}: {count} versions"
            new.writestr(name, data)
    return target


class Installation:
    """The archive that a node runs, in a folder of its own, and the settings that it starts with."""

    def __init__(self, node):
        self.node, self._lines = node, dict(node.conf)
        self.folder = pathlib.Path(node.run_dir) / f"{node.name}-archive"
        node.env["STREAM_S3_PLUGIN_DIR"] = str(self.folder)
        self.install(archive())

    def install(self, path):
        """Puts this archive where the one before was."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("*.ez"):
            old.unlink()
        shutil.copy(path, self.folder)

    def configure(self, **settings):
        """What the node has with its next start; None takes a setting away."""
        lines = {**self._lines, **{f"stream_s3.{name}": value for name, value in settings.items()}}
        self.node.conf = {name: value for name, value in lines.items() if value is not None}
