"""Counters, gauges and untyped series in the Prometheus text format.

A node with a hundred pods has a thousand series, most of whose labels are the same in every scrape: their
text is remembered, and only the numbers are written anew. The client library, which makes an object of every
label set, takes several times as long for a scrape and a quarter of the agent's start. What is written here, its
own parser reads back. Names are ours and valid.
Source: Prometheus exposition formats, text format 0.0.4.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from math import inf, isnan
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_REMEMBERED = 5_000
"""Label sets of one family; its label names are always the same."""

Kind = Literal["counter", "gauge", "untyped"]


class Family:
    """The series of one name. name: with the `_total` of a counter; labels: their names, of every series."""

    __slots__ = ("kind", "labels", "name", "series", "text")

    def __init__(self, name: str, text: str, kind: Kind, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.text = text
        self.kind = kind
        self.labels = tuple(labels)
        self.series: list[tuple[tuple[str, ...], float]] = []

    def add(self, labels: tuple[str, ...], value: float) -> None:
        """One series more. labels: its values in the order of the names."""
        self.series.append((labels, value))


class TextFormat:
    """Remembers the text of label sets. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[str, dict[tuple[str, ...], str]] = {}

    def render(self, families: Iterable[Family]) -> bytes:
        """One scrape."""
        lines: list[str] = []
        for family in families:
            name = family.name
            text = family.text.replace("\\", r"\\").replace("\n", r"\n")
            lines.append(f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n")
            known = self._texts.setdefault(name, {})
            for labels, value in family.series:
                series = known.get(labels) or self._remember(known, family, labels)
                number = float(value)
                lines.append(f"{series} {number!r}\n" if -inf < number < inf else f"{series} {_odd(number)}\n")
        return "".join(lines).encode()

    def _remember(self, known: dict[tuple[str, ...], str], family: Family, labels: tuple[str, ...]) -> str:
        named = sorted(zip(family.labels, labels, strict=True))
        pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in named)
        text = f"{family.name}{{{pairs}}}" if named else family.name
        with self._lock:
            if len(known) >= MAX_REMEMBERED:
                known.clear()  # pods come and go; the living ones are back with the next scrape
            known[labels] = text
        return text


def _odd(value: float) -> str:
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
