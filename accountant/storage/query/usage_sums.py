"""Sums usage over any span from day, hour and quarter-hour sums and from rows.

Days that have sums, whole hours and quarter-hours come from their tables, or from the rows while their hour is not
folded. Inside an edge, rows that lie wholly inside are summed by the engine; a set that reaches over an edge is cut by
`accountant.core.accounts.part`. Sums of time leave the engine as 64-bit integers, which hold 292,000 GPU-years and
cost a third of its 128-bit ones to fetch; energy may need more, and one that did not fit would be an error, never
another number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from accountant.core import accounts as proration
from accountant.core.accounts import ACCOUNTS, CELLS, AccountVector, part
from accountant.storage.duckdb_engine import Cursor, Row, statement, streamed
from accountant.storage.ledger_state import Kinds
from accountant.storage.span_plan import EVERY_GPU, Bucket, SpanPlan, TaggedSpan, near, plan_spans
from accountant.storage.write import record_columns
from gputally.base.units import BUCKET_MS, MS_PER_HOUR

_FEW = 1_000
"""Payers that the engine is told by number."""
Key = tuple[int, int, int, int]
Whole = npt.NDArray[np.int64]
P = TypeVar("P")
_ACCOUNTS = ", ".join(f"sum({name})::BIGINT AS {name}" for name in CELLS[:ACCOUNTS])
_CELLS = ", ".join(f"sum({name})::BIGINT AS {name}" for name in CELLS)
_FIGURES = ", ".join(f"sum({name})" + "::BIGINT" * (name != "energy_uj") for name in CELLS)
"""Energy may need more than 64 bits."""
_PAYERS = pa.schema([("id", pa.int32()), ("class", pa.int32())])


@dataclass(frozen=True, slots=True)
class Sum:
    """payer: the class of holders, 0 without one. gpu and device are 0 where devices were not told apart; where
    kinds of them were, gpu is 0 and device the kind."""

    tag: int
    gpu: int
    device: int
    payer: int
    cells: AccountVector


def scan(
    cursor: Cursor,
    spans: Sequence[TaggedSpan],
    unfolded: Collection[int],
    kept: Sequence[tuple[int, int]] = (),
    *,
    by_device: bool,
    kinds: Kinds | None = None,
    payers: Mapping[int, int] | None = None,
    by_payer: bool = False,
    gpus: Collection[int] | None = None,
) -> list[Sum]:
    """Per tag and, if asked, GPU and device, or kind of device. Spans of one tag and GPU must not overlap.

    kept: days that have sums, ascending. kinds: of every device; then they are told apart no further.

    payers: class by holder id, 0 without one; holders without a class are left out. None: all, as class 1;
    by_payer: or by their ids. gpus: those that are looked at, of spans of every GPU too. None: all."""
    totals = summed(
        cursor, spans, unfolded, kept, by_device=by_device, kinds=kinds, payers=payers, by_payer=by_payer, gpus=gpus
    )
    return [Sum(*key, AccountVector(*values)) for key, values in totals.items()]


def summed(
    cursor: Cursor,
    spans: Sequence[TaggedSpan],
    unfolded: Collection[int],
    kept: Sequence[tuple[int, int]] = (),
    *,
    by_device: bool = False,
    kinds: Kinds | None = None,
    payers: Mapping[int, int] | None = None,
    by_payer: bool = False,
    gpus: Collection[int] | None = None,
) -> Mapping[Key, Sequence[int]]:
    """`scan`, as cells by the fields of a Sum: where there are many, making them costs as much as adding them up."""
    totals: dict[Key, Sequence[int]] = {}
    apart = _Grouping.of(by_device=by_device, kinds=kinds, payers=payers, by_payer=by_payer, gpus=gpus)
    for rows in _parts(cursor, plan_spans(spans, unfolded, kept), kept, apart, _rows(cursor)):
        _merge(totals, rows)
    return totals


def accounts(
    cursor: Cursor,
    spans: Sequence[TaggedSpan],
    unfolded: Collection[int],
    kept: Sequence[tuple[int, int]] = (),
    *,
    by_device: bool = False,
    kinds: Kinds | None = None,
    payers: Mapping[int, int] | None = None,
    by_payer: bool = False,
    memos: bool = False,
) -> Whole:
    """`scan` as columns, where there are very many: tag, device, payer and the accounts of the cells; with memos: all
    cells."""
    apart = _Grouping.of(by_device=by_device, kinds=kinds, payers=payers, by_payer=by_payer, gpus=None)
    parts = _parts(
        cursor, plan_spans(spans, unfolded, kept), kept, apart, _columns(cursor, _CELLS if memos else _ACCOUNTS)
    )
    shown = [0, 2, 3, *range(4, 4 + (len(CELLS) if memos else ACCOUNTS))]
    tables = [np.array(part, np.int64).reshape(-1, len(part[0]))[:, shown] for part in parts if len(part)]
    if len(tables) > 1:
        several = np.concatenate(tables)
        tables = [np.hstack(proration.merged(several[:, :3], several[:, 3:]))]
    return tables[0] if tables else np.zeros((0, len(shown)), np.int64)


def _parts(
    cursor: Cursor, asked: SpanPlan, kept: Sequence[tuple[int, int]], apart: _Grouping, ask: _SumQuery[P]
) -> Iterator[P | list[Row]]:
    """The sums of everything that is asked for, piece by piece, as `ask` fetches them."""
    if apart.gpus is not None and not apart.gpus:
        return
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
        reaching = statement("straddling", only=apart.only_sets)
        rows = cursor.run(reaching, {"low": low - BUCKET_MS, "high": high}, incoming=table)
        cut = []
        for tag, gpu, device, payer, *cells in _straddlers(rows, apart.payers, apart.gpus):
            group = apart.group(payer)
            if group is not None:
                cut.append((tag, gpu * apart.by_device, apart.kind(device), group, *cells))
        yield cut


@dataclass(frozen=True, slots=True)
class _SumQuery(Generic[P]):
    """figures: what is added up. fetch: runs a statement over a range of time, with the spans that are asked for."""

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
    """Where sums of whole buckets come from. width_ms: None of days. at: the start of a row's bucket; of: the column
    that is looked for in a range, which is the bucket's start or no earlier."""

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
    """What is told apart, as columns and joins: a join with an empty table costs a small question as much as its sums.

    only: a condition that leaves the GPUs, and of few payers the payers, that are looked at; only_sets: one that leaves
    the sets with any of these. kinds, payers: the tables that are joined, None for none."""

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
        *,
        by_device: bool,
        kinds: Kinds | None,
        payers: Mapping[int, int] | None,
        gpus: Collection[int] | None,
        by_payer: bool,
    ) -> _Grouping:
        """See `scan`."""
        gpu, device = ("e.gpu", "e.device") if by_device else ("0", "0")
        payer, joins = "e.payer" if by_payer else "least(e.payer, 1)", ""
        if kinds is not None:
            device, joins = "k.kind", "JOIN kinds k ON k.id = e.device"
        if payers is not None:
            payer, joins = "p.class", f"{joins} JOIN payers p ON p.id = e.payer"
        # Numbers in the text, not a joined table: the engine skips whole blocks of rows by them.
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

    def group(self, payer: int) -> int | None:
        """The class of a payer; None where it is not asked for."""
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
    """The sums of buckets; where they are all of a stretch, of every GPU and under one tag, of the stretch."""
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


def _straddlers(rows: Sequence[Row], payers: Collection[int] | None, gpus: Collection[int] | None) -> list[Row]:
    """The parts of sets inside the span they straddle (columns of straddling.sql), of sets that matter."""
    found: list[Row] = []
    for (tag, low, high, _, _, start, end, gpu), group in groupby(rows, key=lambda row: row[:8]):
        members = list(group)
        # A set is cut as a whole, or its parts would not add up.
        if (gpus is not None and gpu not in gpus) or (
            payers is not None and not any(row[9] in payers for row in members)
        ):
            continue
        begin, stop = max(start, low) - start, min(end, high) - start
        parts = part([AccountVector(*row[10:]) for row in members], end - start, begin, stop)
        found += [(tag, gpu, row[8], row[9], *held) for row, held in zip(members, parts, strict=True)]
    return found
