"""Reads Prometheus text: {(name, frozenset of labels): value}."""

import re
import urllib.request

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class Samples(dict):
    """Samples of one scrape."""

    def value(self, name, **labels):
        """The one sample of that name with (at least) those labels; fails when there is not exactly one."""
        found = self.all(name, **labels)
        assert len(found) == 1, f"{name}{labels}: {len(found)} samples"
        return next(iter(found.values()))

    def sum(self, name, **labels):
        """All samples of that name with those labels, added up (0 when there are none)."""
        return sum(self.all(name, **labels).values())

    def all(self, name, **labels):
        """Samples of that name that carry those labels, and those that are written behind it as in `name{label="value"}`."""
        name, _, selector = name.partition("{")
        wanted = set(labels.items()) | set(_LABEL.findall(selector))
        return {key: value for key, value in self.items() if key[0] == name and wanted <= key[1]}

    def names(self, part=""):
        """Names that hold `part`."""
        return sorted({name for name, _ in self if part in name})


def parse(text):
    """Parses a page."""
    samples = Samples()
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        match = _LINE.match(line)
        assert match, f"not a sample: {line!r}"
        name, labels, value = match.groups()
        samples[(name, frozenset(_LABEL.findall(labels or "")))] = float(value)
    return samples


def fetch(port, path="/metrics"):
    """Scrapes one page of a node."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return parse(answer.read().decode())
