"""How much of the idle time was start-up: accountant.work.phases applied to the rows.

A breakdown of `allocated_idle`, asked for beside `usage` because only statements and reports need it.
However many pods the span has, they are looked at in parts, and rows are summed by the engine. Hourly sums say who
left anything idle in which hour: rows are read only of hours in which a phase ended, of hours at the ends of the
span, and of those that are not folded. The answer is that of reading them all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from zoneinfo import ZoneInfo

import pyarrow as pa

from accountant.ledger import IdlePhases
from accountant.overlap import union
from accountant.store.compaction import around
from accountant.store.database import Cursor, Row, statement
from accountant.store.names import NO_DEVICE, holders
from accountant.store.pieces import Piece, key_of, pieces_of
from accountant.store.state import State
from accountant.store.writing import columns
from accountant.wire import Dimension
from accountant.work.phases import Launch, Phase, PhaseSpan, gang, in_gangs, phase_spans
from agent.units import BUCKET_MS, MS_PER_HOUR

MOST_HOLDERS = 50_000
"""Holders looked at together: some 50 MiB."""
_GANG = pa.schema([("cluster", pa.string()), ("namespace", pa.string()), ("workload", pa.string())])
_PHASE = pa.schema([("holder", pa.int32()), ("phase", pa.string()), ("start_ms", pa.int64()), ("end_ms", pa.int64())])


def idle_phases(
    cursor: Cursor,
    state: State,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    timezone: str,
    most: int = MOST_HOLDERS,
) -> list[IdlePhases]:
    """See accountant.ledger.Ledger.idle_phases. most: holders that are held in memory at one time, about (a gang
    stays together)."""
    if start_ms >= end_ms:
        return []
    pieces = pieces_of(state, start_ms, end_ms, frozenset(by), ZoneInfo(timezone))
    device_names = state.devices.read(cursor)
    sums: dict[tuple[str, ...], dict[str, int]] = {}
    for rows in phased(cursor, state, pieces, most):
        names = holders(cursor, {row.payer for row in rows}, state.fleet.team_labels, users="user" in by)
        for row in rows:
            name, piece = device_names.get(row.device, NO_DEVICE), pieces[row.piece]
            group = sums.setdefault(key_of(by, state.fleet, piece, row.gpu, name, names[row.payer]), {})
            group[row.phase] = group.get(row.phase, 0) + row.idle_us
    return [
        IdlePhases(dict(zip(by, key, strict=True)), found.get("starting", 0), found.get("gang_waiting", 0))
        for key, found in sorted(sums.items())
    ]


class Phased(NamedTuple):
    """What a holder left idle of a device in a phase, inside one of the pieces that are asked for, by its number."""

    piece: int
    gpu: int
    device: int
    payer: int
    phase: Phase
    idle_us: int


def phased(cursor: Cursor, state: State, pieces: Sequence[Piece], most: int = MOST_HOLDERS) -> Iterator[list[Phased]]:
    """Part by part of the holders; pieces ascend and leave nothing out between the first and the last."""
    start_ms, end_ms = pieces[0].start_ms, pieces[-1].end_ms
    ((holding,),) = cursor.run(
        f"SELECT count(*) FROM ({statement('payers')})",  # noqa: S608 - our own text
        {"low": start_ms, "high": end_ms},
    )
    parts = -(-holding // most)
    for part in range(parts):
        inside = _inside(cursor, state, start_ms, end_ms, {"part": part, "parts": parts})
        if not inside:
            continue
        found = []
        for number, cut in enumerate(_by_piece(inside, pieces)):
            idle = _idle(cursor, cut, state.unfolded)
            found += [Phased(number, gpu, device, payer, phase, int(us)) for gpu, device, payer, phase, us in idle]
        yield found


def _inside(cursor: Cursor, state: State, start_ms: int, end_ms: int, part: Mapping[str, int]) -> list[PhaseSpan]:
    """The phases of one part of the holders in which they left anything idle."""
    rows = cursor.rows("launches", {**_held_in(start_ms - BUCKET_MS, end_ms, state.unfolded), **part})
    idle = {row[0] for row in rows}
    gangs = sorted({row[1:4] for row in rows if in_gangs(row[3])})
    members = cursor.rows("gang_members", incoming=columns.table(_GANG, gangs)) if gangs else []
    spans = phase_spans(
        Launch(holder, gang(workload, f"{cluster}/{namespace}"), created, scheduled, started, observed)
        for holder, cluster, namespace, workload, created, scheduled, started, observed in (
            {*rows, *members} if members else rows
        )
    )
    spans = [span for span in spans if span.holder in idle and span.start_ms < end_ms and span.end_ms > start_ms]
    if not spans:
        return []
    bounds = {"start": start_ms, "end": end_ms}
    folded = [PhaseSpan(*row) for row in cursor.rows("phase_hours", bounds, incoming=_table(spans))]
    return [*folded, *_within(spans, start_ms, end_ms, state.unfolded)]


def _held_in(low_ms: int, high_ms: int, unfolded: Collection[int]) -> dict[str, int]:
    """What `launches` has to know of (low_ms, high_ms): the whole hours inside, and those without sums."""
    first = min(low_ms - low_ms % MS_PER_HOUR + MS_PER_HOUR, high_ms)
    last = max(first, high_ms - high_ms % MS_PER_HOUR)
    raw = {f"raw_{name}": at for name, at in around(unfolded).items()}
    return {"low": low_ms, "first": first, "last": last, "high": high_ms, **raw}


def _within(spans: Iterable[PhaseSpan], start_ms: int, end_ms: int, unfolded: Collection[int]) -> list[PhaseSpan]:
    """What of the spans lies in [start_ms, end_ms) and in hours that are not folded."""
    raw = [(max(low, start_ms), min(high, end_ms)) for low, high in union((at, at + MS_PER_HOUR) for at in unfolded)]
    cut = (
        span._replace(start_ms=max(span.start_ms, low), end_ms=min(span.end_ms, high))
        for span in spans
        for low, high in raw
    )
    return [span for span in cut if span.start_ms < span.end_ms]


def _by_piece(spans: Iterable[PhaseSpan], pieces: Sequence[Piece]) -> list[list[PhaseSpan]]:
    """The spans, all of which lie in the pieces, cut to each of them; pieces ascend."""
    starts = [piece.start_ms for piece in pieces]
    found: list[list[PhaseSpan]] = [[] for _ in pieces]
    for span in spans:
        for number in range(bisect_right(starts, span.start_ms) - 1, bisect_left(starts, span.end_ms)):
            piece = pieces[number]
            low, high = max(span.start_ms, piece.start_ms), min(span.end_ms, piece.end_ms)
            found[number].append(span._replace(start_ms=low, end_ms=high))
    return found


def _idle(cursor: Cursor, spans: Iterable[PhaseSpan], unfolded: Collection[int]) -> list[Row]:
    """GPU, device, holder, phase and idle microseconds inside the spans: whole folded hours from their sums."""
    whole: list[PhaseSpan] = []
    rest: list[PhaseSpan] = []
    for span in spans:
        length_ms = span.end_ms - span.start_ms
        summed = length_ms == MS_PER_HOUR and not span.start_ms % MS_PER_HOUR and span.start_ms not in unfolded
        (whole if summed else rest).append(span)
    found: list[Row] = []
    if whole:
        bounds = {"low": min(span.start_ms for span in whole), "high": max(span.start_ms for span in whole)}
        found += cursor.rows("phase_idle_hours", bounds, incoming=_table(whole))
    if rest:
        bounds = {"low": min(s.start_ms for s in rest) - BUCKET_MS, "high": max(s.end_ms for s in rest)}
        found += cursor.rows("phase_idle", bounds, incoming=_table(rest))
    return found


def _table(spans: Iterable[PhaseSpan]) -> pa.Table:
    return columns.table(_PHASE, list(spans))
