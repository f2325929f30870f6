"""Computes how much idle time was start-up, and how much time was borrowed on shared GPUs.

Start-up time (`idle_time`) is a part of `allocated_idle`. It is computed on request, because only statements and
reports need it. Holders are processed in batches, and DuckDB sums the rows. To read few rows, the hourly sums are read
first: they show which holder left GPUs idle in which hour. Rows are then read only for three kinds of hours: those in
which a phase began or ended, those at the ends of the span, and those without sums. The result equals that of reading
all rows.

Borrowed time (`lent_time`) is computed per GPU and quarter-hour, and only for hours in which something was borrowed. A
quarter-hour is cut where the span ends inside it. Borrowers are sorted by name, so the result does not depend on the
order of arrival. Only a limited number of hours is held in memory at a time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa

from accountant.core.borrowed_time import HolderTime, lend
from accountant.core.claim_overlap import union
from accountant.core.start_up import Launch, Phase, PhaseSpan, gang, in_gangs, phase_spans
from accountant.ledger.protocols import exported_in
from accountant.storage.duckdb_engine import Cursor, Row, statement
from accountant.storage.ledger_state import State
from accountant.storage.query.group_by_dimensions import ConstantSpan, key_of
from accountant.storage.query.usage_sums import ALL_CELLS, GROUPED_BY, sums
from accountant.storage.span_splitting import TaggedSpan
from accountant.storage.write import record_columns
from accountant.storage.write.name_ids import NO_DEVICE, holders
from accountant.storage.write.rollups import row_range
from accountant.wire.dimensions import sources
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base.units import BUCKET_MS, MS_PER_HOUR

MOST_HOLDERS = 50_000
"""Number of holders processed together. They take about 50 MiB."""
_GANG = pa.schema([("cluster", pa.string()), ("namespace", pa.string()), ("workload", pa.string())])
_PHASE = pa.schema([("holder", pa.int32()), ("phase", pa.string()), ("start_ms", pa.int64()), ("end_ms", pa.int64())])


class IdleTime(NamedTuple):
    """Idle time of a holder on a device in a start-up phase, within one piece.

    piece: index into the pieces."""

    piece: int
    gpu: int
    device: int
    payer: int
    phase: Phase
    idle_us: int


def idle_time(
    cursor: Cursor, state: State, pieces: Sequence[ConstantSpan], most: int = MOST_HOLDERS
) -> Iterator[list[IdleTime]]:
    """Yield the idle start-up time, one list per batch of holders. The pieces are ascending and adjacent."""
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
            found += [IdleTime(number, gpu, device, payer, phase, int(us)) for gpu, device, payer, phase, us in idle]
        yield found


def _inside(cursor: Cursor, state: State, start_ms: int, end_ms: int, part: Mapping[str, int]) -> list[PhaseSpan]:
    """Return the phases of one batch of holders in which they left GPUs idle."""
    rows = cursor.rows("launches", {**_held_in(start_ms - BUCKET_MS, end_ms, state.unfolded), **part})
    idle = {row[0] for row in rows}
    gangs = sorted({row[1:4] for row in rows if in_gangs(row[3])})
    members = cursor.rows("gang_members", incoming=record_columns.column_table(_GANG, gangs)) if gangs else []
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
    """Return the parameters of sql/launches.sql for a span: its ends, the whole hours inside it, and the range of hours
    without sums."""
    first = min(low_ms - low_ms % MS_PER_HOUR + MS_PER_HOUR, high_ms)
    last = max(first, high_ms - high_ms % MS_PER_HOUR)
    raw = {f"raw_{name}": at for name, at in row_range(unfolded).items()}
    return {"low": low_ms, "first": first, "last": last, "high": high_ms, **raw}


def _within(spans: Iterable[PhaseSpan], start_ms: int, end_ms: int, unfolded: Collection[int]) -> list[PhaseSpan]:
    """Return the parts of the spans that lie inside [start_ms, end_ms) and inside hours without sums."""
    raw = [(max(low, start_ms), min(high, end_ms)) for low, high in union((at, at + MS_PER_HOUR) for at in unfolded)]
    cut = (
        span._replace(start_ms=max(span.start_ms, low), end_ms=min(span.end_ms, high))
        for span in spans
        for low, high in raw
    )
    return [span for span in cut if span.start_ms < span.end_ms]


def _by_piece(spans: Iterable[PhaseSpan], pieces: Sequence[ConstantSpan]) -> list[list[PhaseSpan]]:
    """Return the spans, split by piece. All of them lie inside the pieces, which ascend."""
    starts = [piece.start_ms for piece in pieces]
    found: list[list[PhaseSpan]] = [[] for _ in pieces]
    for span in spans:
        for number in range(bisect_right(starts, span.start_ms) - 1, bisect_left(starts, span.end_ms)):
            piece = pieces[number]
            low, high = max(span.start_ms, piece.start_ms), min(span.end_ms, piece.end_ms)
            found[number].append(span._replace(start_ms=low, end_ms=high))
    return found


def _idle(cursor: Cursor, spans: Iterable[PhaseSpan], unfolded: Collection[int]) -> list[Row]:
    """Return the idle time inside the spans as (GPU, device, holder, phase, microseconds).

    Whole folded hours are read from their sums."""
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
    return record_columns.column_table(_PHASE, list(spans))


MOST_QUARTERS = 50_000
"""Number of quarter-hours of GPUs processed together. They take about 100 MiB."""


class LentTime(NamedTuple):
    """The change of one account of a group in [start_ms, end_ms), negative for a loss, when borrowed time is billed to
    the pods that used it.

    start_ms: an instant of the span of the change.
    key: the values of the dimensions of the group."""

    start_ms: int
    key: tuple[str, ...]
    account: str
    gpu_us: int


def lent_time(
    cursor: Cursor,
    state: State,
    pieces: Sequence[ConstantSpan],
    by: Sequence[Dimension],
    most: int = MOST_QUARTERS,
) -> Iterator[list[LentTime]]:
    """Yield the borrowed time, see `accountant.ledger.usage.LENT`. The pieces are ascending and adjacent, and the
    values of the dimensions are constant in each.

    most: number of quarter-hours of GPUs held in memory at a time, but at least those of one hour."""
    for begin, end in _parts(cursor, pieces[0].start_ms, pieces[-1].end_ms, most):
        yield _lent_in(cursor, state, begin, end, by, pieces)


class _ShareOfGpu(NamedTuple):
    """The figures of one holder of a GPU, or of no holder (payer 0), in one quarter-hour."""

    device: int
    payer: int
    idle_us: int
    borrowed_us: int
    unheld_us: int


def _parts(cursor: Cursor, start_ms: int, end_ms: int, most: int) -> list[tuple[int, int]]:
    """Split [start_ms, end_ms) into parts of whole hours with at most `most` borrowed quarter-hours each.

    The result is empty if nothing was borrowed."""
    edges: list[int] = []
    quarter_hours = 0
    for hour, count in cursor.run(
        f"SELECT at_ms - at_ms % {MS_PER_HOUR} AS hour, count(*) FROM ({statement('borrowed')}) GROUP BY 1 ORDER BY 1",  # noqa: S608 - our own text
        {"low": start_ms - BUCKET_MS, "high": end_ms},
    ):
        if not edges or quarter_hours + count > most:
            edges.append(max(start_ms, hour) if edges else start_ms)
            quarter_hours = 0
        quarter_hours += count
    return [(begin, end) for begin, end in pairwise([*edges, end_ms]) if begin < end]


def _spans(
    borrowed: Sequence[Row], pieces: Sequence[ConstantSpan], start_ms: int, end_ms: int
) -> tuple[list[TaggedSpan], list[ConstantSpan]]:
    """Return the borrowed quarter-hours, in order, cut to the span and its pieces; and the piece of each."""
    spans: list[TaggedSpan] = []
    piece_of: list[ConstantSpan] = []
    first = 0
    for at, gpu in borrowed:
        while first < len(pieces) and pieces[first].end_ms <= at:
            first += 1
        for piece in pieces[first:]:
            begin, end = max(at, piece.start_ms, start_ms), min(at + BUCKET_MS, piece.end_ms, end_ms)
            if piece.start_ms >= at + BUCKET_MS:
                break
            if begin < end:
                spans.append(TaggedSpan(len(spans), begin, end, gpu))
                piece_of.append(piece)
    return spans, piece_of


def _lent_in(
    cursor: Cursor,
    state: State,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    pieces: Sequence[ConstantSpan],
) -> list[LentTime]:
    """Return the time lent in [start_ms, end_ms)."""
    lent: list[LentTime] = []
    borrowed = cursor.rows("borrowed", {"low": start_ms - BUCKET_MS, "high": end_ms})
    spans, piece_of = _spans(borrowed, pieces, start_ms, end_ms)
    payers = {row[0]: row[0] for row in cursor.rows("payers", {"low": start_ms, "high": end_ms})}
    table = sums(cursor, state, spans, state.device_kinds(cursor, frozenset({"gpu"})), payers={**payers, 0: 0})
    labels, held_by = state.fleet.team_labels, set(table[:, GROUPED_BY.index("payer")].tolist()) - {0}
    names = holders(cursor, held_by, labels, exported_in(by), users="user" in sources(by))
    device_names = state.device_names(cursor)
    columns = [(*GROUPED_BY, *ALL_CELLS).index(name) for name in _ShareOfGpu._fields]
    shares: dict[int, list[_ShareOfGpu]] = defaultdict(list)
    for tag, *values in table[:, [0, *columns]].tolist():
        shares[tag].append(_ShareOfGpu(*values))

    def by_name(share: _ShareOfGpu) -> tuple[str, str, str, int, int]:
        name = names[share.payer]
        return name.cluster, name.namespace, name.name, share.device, share.payer

    for tag, group in shares.items():
        gpu, piece, span = spans[tag].gpu, piece_of[tag], spans[tag]
        held = sorted((share for share in group if share.payer), key=by_name)
        unheld = [share for share in group if share.unheld_us]
        # Unheld time of a node that is down counts as down time, which cannot be lent.
        down = any(start < span.end_ms and end > span.start_ms for start, end in state.fleet.life(gpu).down)
        unallocated_us = 0 if down else sum(share.unheld_us for share in unheld)
        free, parts = lend(unallocated_us, [HolderTime(share.idle_us, share.borrowed_us) for share in held])
        keys = [
            key_of(by, state.fleet, piece, gpu, device_names.get(share.device, NO_DEVICE), names[share.payer])
            for share in held
        ]
        for borrower, key in enumerate(keys):
            lent.append(LentTime(span.start_ms, key, "lent_busy", free[borrower] + sum(parts[borrower])))
            for lender, gpu_us in enumerate(parts[borrower]):
                lent.append(LentTime(span.start_ms, keys[lender], "lent_allocated_idle", -gpu_us))
        if sum(free):
            device = device_names.get(unheld[0].device, NO_DEVICE)
            key = key_of(by, state.fleet, piece, gpu, device, None)
            lent.append(LentTime(span.start_ms, key, "lent_unallocated", -sum(free)))
    return [one for one in lent if one.gpu_us]
