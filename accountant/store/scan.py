"""Sums of what counts, over any spans: exactly what a scan of all rows would give.

Whole hours and quarter-hours come from their tables, or from the rows while their hour is not folded. Inside
an edge, rows that lie wholly inside are
summed by the engine; a set that reaches over an edge is cut by `accountant.accounts.part`. Sums of time leave the
engine as 64-bit integers, which hold 292,000 GPU-years and cost a third of its 128-bit ones to fetch; energy may
need more, and one that did not fit would be an error, never another number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa

from accountant.accounts import Cells, part
from accountant.store import columns
from accountant.store.database import Cursor, Row
from accountant.store.spans import TaggedSpan, cover, near
from agent.units import BUCKET_MS, MS_PER_HOUR

_Key = tuple[int, int, int, int]
_PAYERS = pa.schema([("id", pa.int32()), ("class", pa.int32())])
_KINDS = pa.schema([("id", pa.int32()), ("kind", pa.int32())])


@dataclass(frozen=True, slots=True)
class Sum:
    """payer: the class of holders, 0 for nobody. gpu and device are 0 where devices were not told apart; where
    kinds of them were, gpu is 0 and device the kind."""

    tag: int
    gpu: int
    device: int
    payer: int
    cells: Cells


def scan(
    cursor: Cursor,
    spans: Sequence[TaggedSpan],
    unfolded: Collection[int],
    *,
    by_device: bool,
    kinds: Mapping[int, int] | None = None,
    payers: Mapping[int, int] | None = None,
) -> list[Sum]:
    """Per tag and, if asked, GPU and device, or kind of device. Spans of one tag and GPU must not overlap.

    kinds: by id, of every device; then they are told apart no further.

    payers: class by holder id, 0 for nobody; holders without a class are left out. None: all, as class 1."""
    asked = cover(spans, unfolded)
    if not spans:
        return []
    keys = {"device": int(by_device), "every": payers is None}
    totals: dict[_Key, Sequence[int]] = {}
    holders = columns.table(_PAYERS, (payers or {}).items())
    parts = columns.table(_KINDS, (kinds or {}).items())
    of_all = not by_device and kinds is None and not any(gpu for _, gpu, _ in asked.hours)
    for name, buckets, more in (
        ("sum_hours_of_all", asked.hours if of_all else [], {}),
        ("sum_hours", [] if of_all else asked.hours, {"device": keys["device"]}),
        ("sum_quarters", asked.quarters, {"device": keys["device"]}),
        ("sum_rows", asked.raw_hours, {"device": keys["device"], "width": MS_PER_HOUR}),
        ("sum_rows", asked.raw_quarters, {"device": keys["device"], "width": BUCKET_MS}),
    ):
        if buckets:
            bounds = {"low": min(b[2] for b in buckets), "high": max(b[2] for b in buckets)}
            table = columns.table(columns.BUCKET, buckets)
            _merge(
                totals,
                cursor.rows(
                    name, {"every": keys["every"], **bounds, **more}, incoming=table, payers=holders, kinds=parts
                ),
            )
    for edges in near(asked.edges):
        table = columns.table(columns.SPAN, [(s.tag, s.gpu, s.start_ms, s.end_ms) for s in edges])
        low, high = min(s.start_ms for s in edges), max(s.end_ms for s in edges)
        _merge(
            totals,
            cursor.rows("sum_edges", {**keys, "low": low, "high": high}, incoming=table, payers=holders, kinds=parts),
        )
        for tag, gpu, device, payer, *cells in _straddlers(
            cursor.rows("straddling", {"low": low - BUCKET_MS, "high": high}, incoming=table)
        ):
            group = min(payer, 1) if payers is None else payers.get(payer)
            if group is not None:
                kind = kinds[device] if kinds is not None else device * by_device
                _merge(totals, [(tag, gpu * by_device, kind, group, *cells)])
    return [Sum(*key, Cells(*values)) for key, values in totals.items()]


def _merge(totals: dict[_Key, Sequence[int]], rows: Sequence[Row]) -> None:
    for row in rows:
        key, values = row[:4], row[4:]
        before = totals.get(key)
        totals[key] = values if before is None else [a + b for a, b in zip(before, values, strict=True)]


def _straddlers(rows: Sequence[Row]) -> list[Row]:
    """The parts of sets inside the span they straddle (columns of straddling.sql)."""
    found: list[Row] = []
    for (tag, low, high, _, _, start, end, gpu), group in groupby(rows, key=lambda row: row[:8]):
        members = list(group)
        begin, stop = max(start, low) - start, min(end, high) - start
        parts = part([Cells(*row[10:]) for row in members], end - start, begin, stop)
        found += [(tag, gpu, row[8], row[9], *held) for row, held in zip(members, parts, strict=True)]
    return found
