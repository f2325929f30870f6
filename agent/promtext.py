"""Counters, gauges and untyped series in the Prometheus text format, faster than the client library writes it.

A node with a hundred pods has a thousand series, most of whose labels are the same in every scrape: their
text is remembered. Byte for byte what `prometheus_client.exposition.generate_latest` writes for these
kinds; names are ours and valid. Must not be given other kinds.
Source: Prometheus exposition formats, text format 0.0.4.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_REMEMBERED = 20_000

_UNTYPED = {"unknown": "untyped"}
_number: Callable[[float], str] = floatToGoString
_Labels = tuple[tuple[str, str], ...]


class TextFormat:
    """Remembers the text of label sets. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[_Labels, str] = {}

    def render(self, families: Iterable[Metric]) -> bytes:
        """One scrape."""
        lines: list[str] = []
        for family in families:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
            lines.append(f"# HELP {name} {text}\n# TYPE {name} {_UNTYPED.get(family.type, family.type)}\n")
            lines += [f"{s.name}{self._labels(s.labels)} {_number(s.value)}\n" for s in family.samples]
        return "".join(lines).encode()

    def _labels(self, labels: dict[str, str]) -> str:
        if not labels:
            return ""
        key = tuple(labels.items())
        text = self._texts.get(key)
        if text is None:
            pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))
            text = f"{{{pairs}}}"
            with self._lock:
                if len(self._texts) >= MAX_REMEMBERED:
                    self._texts.clear()  # pods come and go; the living ones are back with the next scrape
                self._texts[key] = text
        return text


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
