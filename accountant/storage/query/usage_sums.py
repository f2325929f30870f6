"""Sums usage over any span from day, hour and quarter-hour sums and from rows.

Whole days, hours and quarter-hours are read from their tables. An hour is folded once its sums have been written
(accountant.storage.write.rollups). Of an hour that is not folded yet, the rows are read. For example, in a folded past
the span from 09:50 to 12:20 consists of rows from 09:50 to 10:00, the hours 10 and 11, the quarter-hour at 12:00, and
rows from 12:15 to 12:20.

At the edges DuckDB sums the rows that lie entirely inside the span. The rows of one GPU with the same span are a set. A
set that crosses an edge is cut as a whole and in proportion to time (accountant.core.gpu_time_accounts.part), so that
its parts add up.

Sums are 64-bit integers, which hold 292,000 GPU-years. A value that does not fit raises LedgerUnavailable. The energy
of a large fleet does not fit in microjoules, so it is summed in joules and a rest in microjoules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from accountant.core import gpu_time_accounts
from accountant.core.gpu_time_accounts import ACCOUNT_CELLS, CELLS, AccountVector, part
from accountant.ledger.usage import UJ_PER_J
from accountant.storage.duckdb_engine import Cursor, statement, streamed, sums_of
from accountant.storage.ledger_state import ONE_KIND, DeviceKinds, State
from accountant.storage.span_splitting import EVERY_GPU, Bucket, TaggedSpan, near, plan_spans
from accountant.storage.write import record_columns
from gputally.base.units import BUCKET_MS, MS_PER_HOUR

_FEW = 1_000
"""Up to this many payers are written into the SQL statement."""
Whole = npt.NDArray[np.int64]
GROUPED_BY = ("tag", "device", "payer")
"""The first columns of `sums`."""
ALL_CELLS = (*(name if name != "energy_uj" else "energy_rest_uj" for name in CELLS), "energy_j")
"""The summed columns of `sums` with memos: CELLS, but the energy as joules and the rest in microjoules."""
_ACCOUNTS = sums_of(CELLS[:ACCOUNT_CELLS])
_ALL_CELLS = ", ".join(
    [
        *(sums_of([name]) if name != "energy_uj" else f"sum(energy_uj % {UJ_PER_J})::BIGINT AS energy_rest_uj"
          for name in CELLS),
        f"sum(energy_uj // {UJ_PER_J})::BIGINT AS energy_j",
    ]
)  # fmt: skip
_PAYERS = pa.schema([("id", pa.int32()), ("class", pa.int32())])


def sums(
    cursor: Cursor,
    state: State,
    spans: Sequence[TaggedSpan],
    kinds: DeviceKinds = ONE_KIND,
    *,
    payers: Mapping[int, int] | None = None,
    by_payer: bool = False,
    gpus: Collection[int] | None = None,
    memos: bool = True,
) -> Whole:
    """Return sums per tag of the spans, kind of device and class of holders, one group per row.

    The columns are GROUPED_BY and ALL_CELLS; without memos, GROUPED_BY and the accounts. Spans with the same tag and
    GPU must not overlap.

    kinds: how devices are grouped. The device is 0 if they are not distinguished.
    payers: by id, the class of each holder that pays. Id 0 stands for time without a payer. Ids without a class are
        left out. If it is None, all holders that pay form class 1, and time without a payer is class 0.
    by_payer: if `payers` is None, each holder that pays is a class of its own, with the holder's id as the class.
    gpus: the only GPUs that count, also in spans of every GPU. None: all."""
    grouping = _Grouping.of(kinds, payers, by_payer=by_payer, gpus=gpus, figures=_ALL_CELLS if memos else _ACCOUNTS)
    tables = [table for table in _tables(cursor, state, spans, grouping) if len(table)]
    if not tables:
        return np.zeros((0, len(GROUPED_BY) + (len(ALL_CELLS) if memos else ACCOUNT_CELLS)), np.int64)
    if len(tables) == 1:
        return tables[0]
    several, width = np.concatenate(tables), len(GROUPED_BY)
    return np.hstack(gpu_time_accounts.sum_by_key(several[:, :width], several[:, width:]))


def _tables(cursor: Cursor, state: State, spans: Sequence[TaggedSpan], grouping: _Grouping) -> Iterator[Whole]:
    """Yield the sums of all parts of the spans."""
    if grouping.gpus is not None and not grouping.gpus:
        return
    plan = plan_spans(spans, state.unfolded, state.days.kept)
    one_kind = not grouping.kinds.by_device and grouping.kinds.kind_of is None
    of_all_gpus = one_kind and grouping.gpus is None and not any(gpu for _, gpu, _ in plan.hours)
    for source, buckets in (
        (_DAYS, plan.days),
        (_HOURS_OF_ALL if of_all_gpus else _HOURS, plan.hours),
        (_QUARTERS, plan.quarters),
        (_ROW_HOURS, plan.raw_hours),
        (_ROW_QUARTERS, plan.raw_quarters),
    ):
        if buckets:
            yield _of_buckets(cursor, source, buckets, grouping, state.days.kept)
    for edges in near(plan.edges):
        table = record_columns.column_table(record_columns.SPAN, [(s.tag, s.gpu, s.start_ms, s.end_ms) for s in edges])
        low, high = min(s.start_ms for s in edges), max(s.end_ms for s in edges)
        inside = "e.start_ms >= i.start_ms AND e.end_ms <= i.end_ms AND i.gpu IN (0, e.gpu)"
        joined = f"entry e JOIN incoming i ON {inside}"
        yield _run(cursor, "i.tag", joined, "e.start_ms", (low, high), grouping, table)
        yield _cut_at(cursor, edges, grouping)


def _cut_at(cursor: Cursor, edges: Sequence[TaggedSpan], grouping: _Grouping) -> Whole:
    """Return the parts inside the spans of rows that cross an edge."""
    rows = []
    for cut in straddling_parts(cursor, edges, grouping):
        payer = grouping.class_of(cut.payer)
        if payer is not None:
            joules, rest = divmod(cut.cells.energy_uj, UJ_PER_J)
            cells = (*cut.cells._replace(energy_uj=rest), joules)
            shown = cells if grouping.figures == _ALL_CELLS else cells[:ACCOUNT_CELLS]
            rows.append((cut.tag, grouping.kinds.kind(cut.device), payer, *shown))
    return np.array(rows, np.int64)


@dataclass(frozen=True, slots=True)
class _Source:
    """A table from which whole buckets are summed.

    width_ms: length of a bucket; None for days, whose lengths differ.
    bucket: SQL for the start of a row's bucket.
    instant: the column that is compared with the queried range. Its values are inside the bucket.
    by_gpu: whether the table distinguishes GPUs."""

    table: str
    width_ms: int | None
    bucket: str = "e.at_ms"
    instant: str = "e.at_ms"
    by_gpu: bool = True


_DAYS = _Source("day", None)
_HOURS = _Source("hour", MS_PER_HOUR)
_HOURS_OF_ALL = _Source("hour_of_all", MS_PER_HOUR, by_gpu=False)
_QUARTERS = _Source("quarter", BUCKET_MS)
_ROW_HOURS = _Source("present", MS_PER_HOUR, f"e.start_ms - e.start_ms % {MS_PER_HOUR}", "e.start_ms")
_ROW_QUARTERS = _Source("present", BUCKET_MS, f"e.start_ms - e.start_ms % {BUCKET_MS}", "e.start_ms")


@dataclass(frozen=True, slots=True)
class _Grouping:
    """The summed columns, and the columns and joins of the grouping.

    Unneeded joins are left out: even the join with an empty table takes a small query as long as its sums.

    condition: SQL for the GPUs and, if they are few, the payers.
    set_condition: SQL that keeps the sets with any matching row.
    payers: the class of each holder, joined as a table; None for no join."""

    figures: str
    device: str
    payer: str
    joins: str
    condition: str
    set_condition: str
    kinds: DeviceKinds
    payers: Mapping[int, int] | None
    gpus: Collection[int] | None
    by_payer: bool

    @classmethod
    def of(
        cls,
        kinds: DeviceKinds = ONE_KIND,
        payers: Mapping[int, int] | None = None,
        *,
        by_payer: bool = False,
        gpus: Collection[int] | None = None,
        figures: str = _ALL_CELLS,
    ) -> _Grouping:
        """Return the grouping for these arguments of `sums`."""
        device = "e.device" if kinds.by_device else "0"
        payer, joins = "e.payer" if by_payer else "least(e.payer, 1)", ""
        if kinds.kind_of is not None:
            device, joins = "k.kind", "JOIN kinds k ON k.id = e.device"
        if payers is not None:
            payer, joins = "p.class", f"{joins} JOIN payers p ON p.id = e.payer"
        # GPU numbers are written into the statement, so that the engine can skip whole blocks of rows.
        condition = set_condition = "" if gpus is None else f"AND e.gpu IN ({_listed(gpus)})"
        if payers is not None and len(payers) <= _FEW:
            few = _listed(payers) or "NULL"
            condition += f" AND e.payer IN ({few})"
            set_condition += f" AND (e.stream, e.set_seq) IN ({statement('sets_of', ids=few)})"
        return cls(figures, device, payer, joins, condition, set_condition, kinds, payers, gpus, by_payer)

    def matches(self, gpu: int, payers: Collection[int]) -> bool:
        """Return whether a set matches the filter. gpu: its GPU. payers: those of its rows."""
        with_payer = self.payers is None or any(payer in self.payers for payer in payers)
        return with_payer and (self.gpus is None or gpu in self.gpus)

    def class_of(self, payer: int) -> int | None:
        """Return the class of a payer; None if it is not among the queried ones."""
        if self.payers is None:
            return payer if self.by_payer else min(payer, 1)
        return self.payers.get(payer)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(int(number)) for number in sorted(numbers))


def _of_buckets(
    cursor: Cursor,
    source: _Source,
    buckets: Sequence[Bucket],
    grouping: _Grouping,
    kept: Sequence[tuple[int, int]],
) -> Whole:
    """Return the sums of buckets. kept: the days with sums.

    Buckets of all GPUs with one tag that follow each other without a gap are read as one range."""
    low, last = min(at for _, _, at in buckets), max(at for _, _, at in buckets)
    if source.width_ms is None:
        high, count = last + 1, sum(low <= start <= last for start, _ in kept)
    else:
        high = last + source.width_ms
        count = (high - low) // source.width_ms
    tags_and_gpus = {(tag, gpu) for tag, gpu, _ in buckets}
    if len(tags_and_gpus) == 1 and buckets[0][1] == EVERY_GPU and len(buckets) == count:
        return _run(cursor, str(buckets[0][0]), f"{source.table} e", source.instant, (low, high), grouping)
    match = f"{source.bucket} = i.at_ms" + (" AND i.gpu IN (0, e.gpu)" if source.by_gpu else "")
    joined = f"{source.table} e JOIN incoming i ON {match}"
    table = record_columns.column_table(record_columns.BUCKET, buckets)
    return _run(cursor, "i.tag", joined, source.instant, (low, high), grouping, table)


def _run(
    cursor: Cursor,
    tag: str,
    source: str,
    instant: str,
    bounds: tuple[int, int],
    grouping: _Grouping,
    incoming: pa.Table = None,
) -> Whole:
    sql = statement(
        "sums",
        tag=tag, device=grouping.device, payer=grouping.payer, source=source, joins=grouping.joins, instant=instant,
        condition=grouping.condition, figures=grouping.figures,
    )  # fmt: skip
    payers = None if grouping.payers is None else record_columns.column_table(_PAYERS, grouping.payers.items())
    tables = (streamed(table) for table in (incoming, payers, grouping.kinds.table))
    found = cursor.columns(sql, {"low": bounds[0], "high": bounds[1]}, *tables)
    return np.stack([np.ma.getdata(column).astype(np.int64) for column in found.values()], axis=1)


class StraddlingPart(NamedTuple):
    """The part [start_ms, end_ms), inside a queried span, of a row that crosses an edge of the span."""

    tag: int
    start_ms: int
    end_ms: int
    gpu: int
    device: int
    payer: int
    cells: AccountVector


_EVERYTHING = _Grouping.of()


def straddling_parts(
    cursor: Cursor, spans: Sequence[TaggedSpan], grouping: _Grouping = _EVERYTHING
) -> Iterator[StraddlingPart]:
    """Yield the parts inside the spans of sets that cross an edge of a span and match the filter of `grouping`.

    A set is cut as a whole. If its rows were cut one by one, their parts would not add up."""
    if not spans:
        return
    bounds = {"low": min(s.start_ms for s in spans) - BUCKET_MS, "high": max(s.end_ms for s in spans)}
    ranges = []
    for number, nearby in enumerate(near(spans)):
        # A row lies inside one quarter-hour, so it begins at most one before the span whose edge it crosses.
        bounds |= {
            f"low{number}": min(s.start_ms for s in nearby) - BUCKET_MS, f"high{number}": max(s.end_ms for s in nearby)
        }  # fmt: skip
        ranges.append(f"SELECT * FROM entry WHERE start_ms > $low{number} AND start_ms < $high{number}")  # noqa: S608
    rows = cursor.run(
        statement("straddling", rows=" UNION ALL ".join(ranges), condition=grouping.set_condition),
        bounds,
        record_columns.column_table(record_columns.SPAN, [(s.tag, s.gpu, s.start_ms, s.end_ms) for s in spans]),
    )
    for (tag, low, high, _, _, start, end, gpu), group in groupby(rows, key=lambda row: row[:8]):
        members = list(group)
        if not grouping.matches(gpu, [row[9] for row in members]):
            continue
        begin, stop = max(start, low), min(end, high)
        parts = part([AccountVector(*row[10:]) for row in members], end - start, begin - start, stop - start)
        for row, cells in zip(members, parts, strict=True):
            yield StraddlingPart(tag, begin, stop, gpu, row[8], row[9], cells)
