"""Sums usage over any span from day, hour and quarter-hour sums and from rows.

Whole days, hours and quarter-hours are read from their tables. If an hour is not folded yet, its sums do not exist, and
its rows are read. For example, in a folded past the span from 09:50 to 12:20 consists of rows from 09:50 to 10:00, the
hours 10 and 11, the quarter-hour at 12:00, and rows from 12:15 to 12:20.

At the edges the engine sums the rows that lie entirely inside the span. A set of rows that reaches over the edge is cut
by `part` of the GPU time accounts.

Sums leave the engine as 64-bit integers, which hold 292,000 GPU-years and are three times as cheap to fetch as 128-bit
integers. Energy may need more and is not converted. A value that does not fit raises an error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from accountant.core import gpu_time_accounts as proration
from accountant.core.gpu_time_accounts import ACCOUNTS, CELLS, AccountVector, part
from accountant.storage.duckdb_engine import Cursor, Row, statement, streamed
from accountant.storage.ledger_state import DeviceKinds, Kinds, State
from accountant.storage.span_splitting import EVERY_GPU, Bucket, TaggedSpan, near, plan_spans
from accountant.storage.write import record_columns
from gputally.base.units import BUCKET_MS, MS_PER_HOUR

_FEW = 1_000
"""Up to this many payers are written into the SQL statement."""
Key = tuple[int, int, int, int]
Whole = npt.NDArray[np.int64]
P = TypeVar("P")
_ACCOUNTS = ", ".join(f"sum({name})::BIGINT AS {name}" for name in CELLS[:ACCOUNTS])
_CELLS = ", ".join(f"sum({name})::BIGINT AS {name}" for name in CELLS)
_FIGURES = ", ".join(f"sum({name})" + "::BIGINT" * (name != "energy_uj") for name in CELLS)
"""Energy has no cast, because it may need more than 64 bits."""
_PAYERS = pa.schema([("id", pa.int32()), ("class", pa.int32())])


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of one group.

    payer: the class of holders, 0 without one.
    gpu, device: 0 if devices are not distinguished. If they are grouped by kind, gpu is 0 and device is the kind."""

    tag: int
    gpu: int
    device: int
    payer: int
    cells: AccountVector


def scan(
    cursor: Cursor,
    state: State,
    spans: Sequence[TaggedSpan],
    told: DeviceKinds | None = None,
    *,
    payers: Mapping[int, int] | None = None,
    by_payer: bool = False,
    gpus: Collection[int] | None = None,
) -> list[Sum]:
    """Return sums per tag of the spans. Depending on `told` they are also per GPU and device, or per kind of device.

    Spans with the same tag and GPU must not overlap.

    payers: class by holder id, 0 for time without a holder. Holders without a class are left out. If it is None, all
        holders count, as class 1.
    by_payer: if `payers` is None, each holder is a class of its own, with the holder's id as the class.
    gpus: the only GPUs that count, also in spans of every GPU. None: all."""
    totals: dict[Key, Sequence[int]] = {}
    apart = _Grouping.of(told, payers, by_payer=by_payer, gpus=gpus)
    for rows in _parts(cursor, state, spans, apart, _rows(cursor)):
        _merge(totals, rows)
    return [Sum(*key, AccountVector(*values)) for key, values in totals.items()]


def accounts(
    cursor: Cursor,
    state: State,
    spans: Sequence[TaggedSpan],
    told: DeviceKinds | None = None,
    *,
    payers: Mapping[int, int] | None = None,
    memos: bool = False,
) -> Whole:
    """Return the results of `scan` as columns, for very many of them: tag, device, payer and the accounts; with memos,
    all cells."""
    apart = _Grouping.of(told, payers)
    parts = _parts(cursor, state, spans, apart, _columns(cursor, _CELLS if memos else _ACCOUNTS))
    shown = [0, 2, 3, *range(4, 4 + (len(CELLS) if memos else ACCOUNTS))]
    tables = [np.array(part, np.int64).reshape(-1, len(part[0]))[:, shown] for part in parts if len(part)]
    if len(tables) > 1:
        several = np.concatenate(tables)
        tables = [np.hstack(proration.merged(several[:, :3], several[:, 3:]))]
    return tables[0] if tables else np.zeros((0, len(shown)), np.int64)


def _parts(
    cursor: Cursor, state: State, spans: Sequence[TaggedSpan], apart: _Grouping, ask: _SumQuery[P]
) -> Iterator[P | list[Row]]:
    """Yield the sums of all parts of the spans, which `ask` reads."""
    if apart.gpus is not None and not apart.gpus:
        return
    kept = state.days.kept
    asked = plan_spans(spans, state.unfolded, kept)
    of_all = not apart.by_device and apart.kinds is None and apart.gpus is None
    of_all = of_all and not any(gpu for _, gpu, _ in asked.hours)
    for source, buckets in (
        (_DAYS, asked.days),
        (_HOURS_OF_ALL if of_all else _HOURS, asked.hours),
        (_QUARTERS, asked.quarters),
        (_ROW_HOURS, asked.raw_hours),
        (_ROW_QUARTERS, asked.raw_quarters),
    ):
        if buckets:
            yield _of_buckets(ask, source, buckets, apart, kept)
    for edges in near(asked.edges):
        table = record_columns.column_table(record_columns.SPAN, [(s.tag, s.gpu, s.start_ms, s.end_ms) for s in edges])
        low, high = min(s.start_ms for s in edges), max(s.end_ms for s in edges)
        inside = "e.start_ms >= i.start_ms AND e.end_ms <= i.end_ms AND i.gpu IN (0, e.gpu)"
        yield _sums(ask, "i.tag", f"entry e JOIN incoming i ON {inside}", "e.start_ms", (low, high), apart, table)
        cut = []
        for one in straddling_parts(cursor, edges, apart):
            group = apart.group(one.payer)
            if group is not None:
                cut.append((one.tag, one.gpu * apart.by_device, apart.kind(one.device), group, *one.cells))
        yield cut


@dataclass(frozen=True, slots=True)
class _SumQuery(Generic[P]):
    """A query for sums.

    figures: the summed expressions.
    fetch: runs a statement over a range of time, joined with the queried spans."""

    figures: str
    fetch: Callable[[str, Mapping[str, int], pa.Table, _Grouping], P]


def _rows(cursor: Cursor) -> _SumQuery[list[Row]]:
    def fetch(sql: str, bounds: Mapping[str, int], incoming: pa.Table, apart: _Grouping) -> list[Row]:
        return cursor.run(sql, bounds, streamed(incoming), streamed(apart.payers_table), streamed(apart.kinds_table))

    return _SumQuery(_FIGURES, fetch)


def _columns(cursor: Cursor, figures: str) -> _SumQuery[Whole]:
    def fetch(sql: str, bounds: Mapping[str, int], incoming: pa.Table, apart: _Grouping) -> Whole:
        found = cursor.columns(
            sql, bounds, streamed(incoming), streamed(apart.payers_table), streamed(apart.kinds_table)
        )
        return np.stack([np.ma.getdata(column).astype(np.int64) for column in found.values()], axis=1)

    return _SumQuery(figures, fetch)


@dataclass(frozen=True, slots=True)
class _Source:
    """A table with sums of whole buckets.

    width_ms: size of a bucket, None for days.
    at: the start of a row's bucket.
    of: the column that is compared with the range. It lies at or after the bucket's start."""

    table: str
    width_ms: int | None
    at: str = "e.at_ms"
    of: str = "e.at_ms"
    by_gpu: bool = True


_DAYS = _Source("day", None)
_HOURS = _Source("hour", MS_PER_HOUR)
_HOURS_OF_ALL = _Source("hour_of_all", MS_PER_HOUR, by_gpu=False)
_QUARTERS = _Source("quarter", BUCKET_MS)
_ROW_HOURS = _Source("present", MS_PER_HOUR, f"e.start_ms - e.start_ms % {MS_PER_HOUR}", "e.start_ms")
_ROW_QUARTERS = _Source("present", BUCKET_MS, f"e.start_ms - e.start_ms % {BUCKET_MS}", "e.start_ms")


@dataclass(frozen=True, slots=True)
class _Grouping:
    """The columns and joins of the grouping.

    Unneeded joins are left out: even the join with an empty table takes a small query as long as its sums.

    only: a condition on the GPUs and, if they are few, on the payers.
    only_sets: a condition that keeps the sets with any matching row.
    kinds, payers: the joined tables, None for no join."""

    gpu: str
    device: str
    payer: str
    joins: str
    only: str
    only_sets: str
    kinds: Kinds | None
    payers: Mapping[int, int] | None
    gpus: Collection[int] | None
    by_device: bool
    by_payer: bool

    @classmethod
    def of(
        cls,
        told: DeviceKinds | None = None,
        payers: Mapping[int, int] | None = None,
        *,
        by_payer: bool = False,
        gpus: Collection[int] | None = None,
    ) -> _Grouping:
        """Return the grouping for these arguments of `scan`."""
        by_device, kinds = (told.by_device, told.kinds) if told is not None else (False, None)
        gpu, device = ("e.gpu", "e.device") if by_device else ("0", "0")
        payer, joins = "e.payer" if by_payer else "least(e.payer, 1)", ""
        if kinds is not None:
            device, joins = "k.kind", "JOIN kinds k ON k.id = e.device"
        if payers is not None:
            payer, joins = "p.class", f"{joins} JOIN payers p ON p.id = e.payer"
        # GPU numbers are written into the statement, so that the engine can skip whole blocks of rows.
        only = only_sets = "" if gpus is None else f"AND e.gpu IN ({_listed(gpus)})"
        if payers is not None and len(payers) <= _FEW:
            few = _listed(payers) or "NULL"
            only += f" AND e.payer IN ({few})"
            only_sets += f" AND (e.stream, e.set_seq) IN ({statement('sets_of', payers=few)})"
        return cls(gpu, device, payer, joins, only, only_sets, kinds, payers, gpus, by_device, by_payer)

    @property
    def kinds_table(self) -> pa.Table | None:
        return None if self.kinds is None else self.kinds.table

    @property
    def payers_table(self) -> pa.Table | None:
        return None if self.payers is None else record_columns.column_table(_PAYERS, self.payers.items())

    def looks_at(self, gpu: int, payers: Collection[int]) -> bool:
        """Return whether a set of rows of a GPU matches the filter."""
        wanted = self.payers is None or any(payer in self.payers for payer in payers)
        return wanted and (self.gpus is None or gpu in self.gpus)

    def group(self, payer: int) -> int | None:
        """Return the class of a payer; None if it is not among the queried ones."""
        if self.payers is None:
            return payer if self.by_payer else min(payer, 1)
        return self.payers.get(payer)

    def kind(self, device: int) -> int:
        return self.kinds.of[device] if self.kinds is not None else device * self.by_device


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(int(number)) for number in sorted(numbers))


def _of_buckets(
    ask: _SumQuery[P], source: _Source, buckets: Sequence[Bucket], apart: _Grouping, kept: Sequence[tuple[int, int]]
) -> P:
    """Return the sums of buckets.

    If the buckets form a contiguous range of every GPU with one tag, they are read as one range."""
    low, last = min(at for _, _, at in buckets), max(at for _, _, at in buckets)
    if source.width_ms is None:
        high, there = last + 1, sum(low <= start <= last for start, _ in kept)
    else:
        high = last + source.width_ms
        there = (high - low) // source.width_ms
    alike = {(tag, gpu) for tag, gpu, _ in buckets}
    if len(alike) == 1 and buckets[0][1] == EVERY_GPU and len(buckets) == there:
        return _sums(ask, str(buckets[0][0]), f"{source.table} e", source.of, (low, high), apart)
    match = f"{source.at} = i.at_ms" + (" AND i.gpu IN (0, e.gpu)" if source.by_gpu else "")
    joined = f"{source.table} e JOIN incoming i ON {match}"
    return _sums(
        ask, "i.tag", joined, source.of, (low, high), apart, record_columns.column_table(record_columns.BUCKET, buckets)
    )


def _sums(
    ask: _SumQuery[P],
    tag: str,
    source: str,
    of: str,
    bounds: tuple[int, int],
    apart: _Grouping,
    incoming: pa.Table = None,
) -> P:
    sql = statement(
        "sums",
        tag=tag, gpu=apart.gpu, device=apart.device, payer=apart.payer, source=source, joins=apart.joins, of=of,
        only=apart.only, figures=ask.figures,
    )  # fmt: skip
    return ask.fetch(sql, {"low": bounds[0], "high": bounds[1]}, incoming, apart)


def _merge(totals: dict[Key, Sequence[int]], rows: Sequence[Row]) -> None:
    for row in rows:
        key, values = row[:4], row[4:]
        before = totals.get(key)
        totals[key] = values if before is None else [a + b for a, b in zip(before, values, strict=True)]


class StraddlingPart(NamedTuple):
    """The part [start_ms, end_ms), inside a queried span, of a row that reaches over an edge of the span."""

    tag: int
    start_ms: int
    end_ms: int
    gpu: int
    device: int
    payer: int
    cells: AccountVector


_EVERYTHING = _Grouping.of()


def straddling_parts(
    cursor: Cursor, spans: Sequence[TaggedSpan], apart: _Grouping = _EVERYTHING
) -> Iterator[StraddlingPart]:
    """Yield the parts inside spans of sets that reach over an edge, if the sets match the filter of `apart`.

    A set is cut as a whole. If its rows were cut one by one, their parts would not add up."""
    rows = cursor.run(
        statement("straddling", only=apart.only_sets),
        {"low": min(s.start_ms for s in spans) - BUCKET_MS, "high": max(s.end_ms for s in spans)},
        record_columns.column_table(record_columns.SPAN, [(s.tag, s.gpu, s.start_ms, s.end_ms) for s in spans]),
    )
    for (tag, low, high, _, _, start, end, gpu), group in groupby(rows, key=lambda row: row[:8]):
        members = list(group)
        if not apart.looks_at(gpu, [row[9] for row in members]):
            continue
        begin, stop = max(start, low), min(end, high)
        parts = part([AccountVector(*row[10:]) for row in members], end - start, begin - start, stop - start)
        for row, cells in zip(members, parts, strict=True):
            yield StraddlingPart(tag, begin, stop, gpu, row[8], row[9], cells)
