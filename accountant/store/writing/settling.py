"""Sets that overlap others, or cross a quarter-hour: what is kept of each.

The rows as received stay; what counts is computed anew from all sets that touch the region
(`accountant.overlap`), so the books do not depend on the order in which sets came.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from accountant import overlap
from accountant.accounts import Cells, part
from accountant.overlap import Claim, Rank, Span
from accountant.store.database import Cursor, Row
from accountant.store.spans import quarters
from accountant.store.writing import columns
from accountant.store.writing.validation import MAX_INTERVAL_MS
from agent.units import BUCKET_MS

SetId = tuple[int, int]
"""(stream id, set_seq)."""


@dataclass(frozen=True, slots=True)
class Region:
    """Time of one GPU in which a set arrived."""

    gpu: int
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class _Known:
    """A set of the neighbourhood, as the table has it."""

    gpu: int
    id: SetId
    claim: Claim
    booked: bool


def settle(cursor: Cursor, regions: Iterable[Region]) -> set[int]:
    """Settle everything that touches the regions; the starts of the quarter-hours that changed."""
    regions_of = _merged(regions)
    neighbours = _neighbours(cursor, [Region(gpu, *span) for gpu, spans in regions_of.items() for span in spans])
    kept: dict[SetId, list[Span]] = {}
    concerned: dict[SetId, _Known] = {}
    for gpu, known in neighbours.items():
        result = overlap.settle(item.claim for item in known)
        for item in known:
            if overlap.intersect(regions_of[gpu], [(item.claim.start_ms, item.claim.end_ms)]):
                concerned[item.id] = item
                kept[item.id] = [p for span in result[item.claim.rank] for p in quarters(*span)]
    before = _kept_before(cursor, concerned)
    changed = {key: item for key, item in concerned.items() if kept[key] != before[key]}
    if not changed:
        return set()
    _rewrite(cursor, changed, kept)
    return {
        bucket
        for item in changed.values()
        for bucket in range(item.claim.start_ms - item.claim.start_ms % BUCKET_MS, item.claim.end_ms, BUCKET_MS)
    }


def _merged(regions: Iterable[Region]) -> dict[int, list[Span]]:
    """Disjoint spans per GPU."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for region in regions:
        spans[region.gpu].append((region.start_ms, region.end_ms))
    return {gpu: overlap.union(found) for gpu, found in sorted(spans.items())}


def _neighbours(cursor: Cursor, regions: list[Region]) -> dict[int, list[_Known]]:
    """Per GPU: every set in the regions, and every set that touches one of those."""
    asked = [(0, r.gpu, r.start_ms - MAX_INTERVAL_MS, r.end_ms + MAX_INTERVAL_MS) for r in regions]
    streams = {row[0]: row[1:] for row in cursor.run("SELECT id, epoch, cluster || '/' || node FROM stream")}
    rows = cursor.rows(
        "overlapping_sets", _bounds(regions, 2 * MAX_INTERVAL_MS), incoming=columns.table(columns.SPAN, asked)
    )
    found: dict[int, list[_Known]] = defaultdict(list)
    for gpu, stream, set_seq, start, end, remove, booked in sorted(rows):
        epoch, node = streams[stream]
        claim = Claim(Rank(remove, epoch, set_seq, node), start, end)
        found[gpu].append(_Known(gpu, (stream, set_seq), claim, booked))
    return found


def _kept_before(cursor: Cursor, sets: dict[SetId, _Known]) -> dict[SetId, list[Span]]:
    before: dict[SetId, list[Span]] = {
        key: [(item.claim.start_ms, item.claim.end_ms)] if item.booked else [] for key, item in sets.items()
    }
    for stream, set_seq, start, end in cursor.rows("kept_pieces", incoming=_ids(sets)):
        before[stream, set_seq].append((start, end))
    return before


def _rewrite(cursor: Cursor, sets: dict[SetId, _Known], kept: dict[SetId, list[Span]]) -> None:
    bounds = _bounds([Region(i.gpu, i.claim.start_ms, i.claim.end_ms) for i in sets.values()], 0)
    rows: dict[SetId, list[Row]] = defaultdict(list)
    for row in cursor.rows("set_cells", bounds, incoming=_ids(sets)):
        rows[row[0], row[1]].append(row)
    whole = {key: kept[key] == [(item.claim.start_ms, item.claim.end_ms)] for key, item in sets.items()}
    pieces = []
    for key in sets:
        if not whole[key]:
            pieces += _pieces(rows[key], kept[key])
    flags = _ids(sets).append_column("booked", pa.array([whole[key] for key in sets], type=pa.bool_()))
    cursor.rows("mark_booked", bounds, incoming=flags)
    cursor.rows("drop_pieces", incoming=_ids(sets))
    if pieces:
        cursor.rows("add_piece", incoming=columns.table(columns.PIECE, pieces))


def _pieces(rows: list[Row], kept: list[Span]) -> list[tuple[object, ...]]:
    """Rows of PIECE for each kept span of one set (columns of set_cells.sql)."""
    start, end = rows[0][2], rows[0][3]
    cells = [Cells(*row[8:]) for row in rows]
    made: list[tuple[object, ...]] = []
    for begin, stop in kept:
        parts = part(cells, end - start, begin - start, stop - start)
        for (stream, set_seq, _, _, seq, gpu, device, payer, *_), held in zip(rows, parts, strict=True):
            made.append((stream, seq, set_seq, begin, stop, gpu, device, payer, *held))
    return made


def _ids(sets: Iterable[SetId]) -> pa.Table:
    return columns.table(columns.NUMBER, list(sets))


def _bounds(regions: Iterable[Region], reach_ms: int) -> dict[str, int]:
    """The range of start_ms that can matter: narrows the scan."""
    spans = [(r.start_ms, r.end_ms) for r in regions]
    return {"low": min(s for s, _ in spans) - reach_ms, "high": max(e for _, e in spans) + reach_ms}
