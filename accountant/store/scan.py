"""Sums of what counts, over any spans: exactly what a scan of all rows would give.

Whole hours and quarter-hours come from their tables. Inside an edge, rows that lie wholly inside are
summed by the engine; a set that reaches over an edge is cut by `accountant.accounts.part`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from accountant.accounts import CELLS, Cells, part
from accountant.store import columns
from accountant.store.database import Cursor, Row
from accountant.store.spans import TaggedSpan, cover, near
from agent.units import BUCKET_MS

_Key = tuple[int, int, int, int]


_EVERY_PAYER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Sum:
    """payer 0: nobody. gpu and device are 0 where devices were not told apart, payer 1 where holders were not."""

    tag: int
    gpu: int
    device: int
    payer: int
    cells: Cells


def scan(cursor: Cursor, spans: Sequence[TaggedSpan], *, by_device: bool, by_payer: bool) -> list[Sum]:
    """Per tag and, as far as asked, GPU, device and payer. Spans of one tag and GPU must not overlap."""
    asked = cover(spans)
    keys = {"device": int(by_device), "payer": _EVERY_PAYER if by_payer else 1}
    totals: dict[_Key, list[int]] = defaultdict(lambda: [0] * len(CELLS))
    for name, buckets in (("sum_hours", asked.hours), ("sum_quarters", asked.quarters)):
        if buckets:
            bounds = {"low": min(b[2] for b in buckets), "high": max(b[2] for b in buckets)}
            _merge(totals, cursor.rows(name, {**keys, **bounds}, incoming=columns.table(columns.BUCKET, buckets)))
    for edges in near(asked.edges):
        table = columns.table(columns.SPAN, [(s.tag, s.gpu, s.start_ms, s.end_ms) for s in edges])
        low, high = min(s.start_ms for s in edges), max(s.end_ms for s in edges)
        _merge(totals, cursor.rows("sum_edges", {**keys, "low": low, "high": high}, incoming=table))
        for tag, gpu, device, payer, *cells in _straddlers(
            cursor.rows("straddling", {"low": low - BUCKET_MS, "high": high}, incoming=table)
        ):
            key = (gpu * keys["device"], device * keys["device"], min(payer, keys["payer"]))
            _merge(totals, [(tag, *key, *cells)])
    return [Sum(*key, Cells(*values)) for key, values in totals.items()]


def _merge(totals: dict[_Key, list[int]], rows: Sequence[Row]) -> None:
    for row in rows:
        total = totals[row[0], row[1], row[2], row[3]]
        for i, value in enumerate(row[4:]):
            total[i] += value


def _straddlers(rows: Sequence[Row]) -> list[Row]:
    """The parts of sets inside the span they straddle (columns of straddling.sql)."""
    found: list[Row] = []
    for (tag, low, high, _, _, start, end, gpu), group in groupby(rows, key=lambda row: row[:8]):
        members = list(group)
        begin, stop = max(start, low) - start, min(end, high) - start
        parts = part([Cells(*row[10:]) for row in members], end - start, begin, stop)
        found += [(tag, gpu, row[8], row[9], *held) for row, held in zip(members, parts, strict=True)]
    return found
