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
MAX_REMEMBERED = 5_000
"""Label sets of one family; its label names are always the same."""

_UNTYPED = {"unknown": "untyped"}
_any_number: Callable[[float], str] = floatToGoString


class TextFormat:
    """Remembers the text of label sets. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[str, dict[tuple[str, ...], str]] = {}

    def render(self, families: Iterable[Metric]) -> bytes:
        """One scrape."""
        lines: list[str] = []
        for family in families:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
            lines.append(f"# HELP {name} {text}\n# TYPE {name} {_UNTYPED.get(family.type, family.type)}\n")
            known = self._texts.setdefault(name, {})
            for sample in family.samples:
                values = tuple(sample.labels.values())
                labels = known.get(values)
                if labels is None:
                    labels = self._remember(known, values, sample.labels)
                lines.append(f"{sample.name}{labels} {_number(sample.value)}\n")
        return "".join(lines).encode()

    def _remember(self, known: dict[tuple[str, ...], str], values: tuple[str, ...], labels: dict[str, str]) -> str:
        pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))
        text = f"{{{pairs}}}" if labels else ""
        with self._lock:
            if len(known) >= MAX_REMEMBERED:
                known.clear()  # pods come and go; the living ones are back with the next scrape
            known[values] = text
        return text


def _number(value: float) -> str:
    return repr(float(value)) if 0 <= value < 1_000_000 else _any_number(value)  # an exponent is due from there on


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
