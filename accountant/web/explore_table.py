"""The question behind the page Explore: usage and cost of any grouping and span, as a table, a pivot table and a chart.

The figures are those of `GET /v1/usage` and `GET /v1/cost` for the same parameters, of one moment. Usage and cost of a
table are of one question (`accountant.billing.displayed_costs`), and of a second one without the filter if there is
one, because amounts are divided from unfiltered wholes. A chart has questions of its own, because amounts are divided
among the values that it shows. A table holds its figures as columns of integers, because a month by pod has some
hundred thousand rows; a row is made when it is displayed.

An unknown figure is None, never 0. A group without a row in one of two compared spans used nothing in it, unless
nothing at all is known of that span."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from accountant.billing.displayed_costs import displayed_costs, displayed_usage
from accountant.billing.usage_pricing import cost_of
from accountant.core.periods import Days, days, hours, zone
from accountant.ledger.protocols import Moment
from accountant.ledger.usage import ACCOUNTS, HELD, EarlierSpan, Usage, Where, coverage, usage_line
from accountant.prices.price_book import PriceBook
from accountant.reports import charts
from accountant.wire.dimensions import OF_TIME
from accountant.wire.option_types import Order
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine
from gputally.base import called_off
from gputally.base.measures import SHOWN
from gputally.base.money import exact_sum, gpu_hours, sum_if_known

Kind = Literal["GPU-hours", "money", "price", "share", "GiB", "W", "kWh"]
Figure: TypeAlias = int | Decimal | float | None
"""GPU-hours are GPU-µs."""
Key: TypeAlias = tuple[str, ...]
Measure = Literal[
    "allocated", "busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down", "capacity", "cost"
]
"""What the chart and the pivot table show: figures that add up."""
MEASURES_SHOWN: Final[tuple[Measure, ...]] = get_args(Measure)


@dataclass(frozen=True, slots=True)
class Row:
    """One group. cost, unheld_cost, billed_us, unpriced_us: as in `CostLine`; the costs are None too if nothing of the
    group is billed. amount, unheld_amount: what pages show for the costs (accountant.billing.displayed_amounts)."""

    key: Key
    line: UsageLine
    cost: Decimal | None
    billed_us: int
    unpriced_us: int
    unheld_cost: Decimal | None
    amount: Decimal | None
    unheld_amount: Decimal | None

    @property
    def held_cost(self) -> Decimal | None:
        return _without(self.cost, self.unheld_cost)

    @property
    def held_amount(self) -> Decimal | None:
        return _without(self.amount, self.unheld_amount)


def _without(whole: Decimal | None, part: Decimal | None) -> Decimal | None:
    return None if whole is None or part is None else exact_sum([whole, part.copy_negate()])


@dataclass(frozen=True, slots=True)
class FigureColumn:
    """A column of figures. note: what it is, for who points at its head.

    of: the exact figure. amount: what is shown for a cost."""

    title: str
    kind: Kind
    note: str
    of: Callable[[Row], Figure]
    amount: Callable[[Row], Decimal | None] | None = None

    def shown(self, row: Row) -> Figure:
        return self.of(row) if self.amount is None else self.amount(row)


def _rate(row: Row) -> Decimal | None:
    billed = gpu_hours(row.billed_us)
    return row.cost / billed if row.cost is not None and billed else None


def _measure(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.line.shown(name)


def _account(name: str) -> Callable[[Row], int]:
    return lambda row: getattr(row.line.accounts_gpu_us, name)


FIGURES: Final[Mapping[str, FigureColumn]] = {
    "capacity": FigureColumn("Capacity", "GPU-hours", "all GPU time of the group", _account("total")),
    "allocated": FigureColumn("Held", "GPU-hours", "time that somebody held, busy or not", _account("allocated")),
    "busy": FigureColumn("Busy", "GPU-hours", "held and used", _account("busy")),
    "allocated_idle": FigureColumn("Idle", "GPU-hours", "held and not used", _account("allocated_idle")),
    "allocated_unknown": FigureColumn(
        "Use unknown", "GPU-hours", "held, and its use was not measured", _account("allocated_unknown")
    ),
    "unallocated": FigureColumn("Unallocated", "GPU-hours", "held by nobody", _account("unallocated")),
    "unmetered": FigureColumn("Unmetered", "GPU-hours", "no agent reported it", _account("unmetered")),
    "down": FigureColumn("Down", "GPU-hours", "the GPU or its node was out of service", _account("down")),
    "utilisation": FigureColumn(
        "Utilisation", "share", "busy part of the held time whose use is known",
        lambda row: row.line.accounts_gpu_us.utilisation,
    ),
    "cost": FigureColumn(
        "Cost", "money", "of all billed time, held or not; unknown if part of it has no price", lambda row: row.cost,
        lambda row: row.amount,
    ),
    "held_cost": FigureColumn(
        "Cost, held", "money", "of time that somebody held", lambda row: row.held_cost, lambda row: row.held_amount
    ),
    "unheld_cost": FigureColumn(
        "Cost, not held", "money", "of time that nobody held", lambda row: row.unheld_cost,
        lambda row: row.unheld_amount,
    ),
    "unpriced": FigureColumn("Unpriced", "GPU-hours", "billed time without a price", lambda row: row.unpriced_us),
    "rate": FigureColumn("Cost per GPU-hour", "price", "cost of a billed GPU-hour, on average", _rate),
    **{name: FigureColumn(one.title, one.kind, one.note, _measure(name)) for name, (_, one) in SHOWN.items()},
}  # fmt: skip
"""The columns, by their names in addresses and files."""
COLUMNS: Final = tuple(FIGURES)
DEFAULT_COLUMNS: Final[tuple[str, ...]] = ("allocated", "utilisation", "allocated_idle", "cost")


Int64Array: TypeAlias = npt.NDArray[np.int64]
Direction = Literal["up", "down"]
_ROW_BYTES: Final = 300
"""Approximate memory of a row without its names: its key, cost and billed time."""
_NAME_BYTES: Final = 100


@dataclass(frozen=True, slots=True)
class Table:
    """Usage and cost by group, sorted by key.

    names: the names of the columns of `figures`, as in `Usage`; int64, shape (rows, names).
    costs, unheld_costs: the cost of each row, and the part of time that nobody held; None if unknown, or nothing is
        billed. amounts, unheld_amounts: what pages show for them.
    billed_us, unpriced_us: of each row.
    of_jobs: the amounts to show for rows of a job; those of `amounts` add up to the total."""

    keys: Sequence[Key]
    names: tuple[str, ...]
    figures: Int64Array
    costs: Sequence[Decimal | None]
    billed_us: Sequence[int]
    unpriced_us: Sequence[int]
    unheld_costs: Sequence[Decimal | None]
    amounts: Sequence[Decimal | None]
    unheld_amounts: Sequence[Decimal | None]
    of_jobs: Mapping[Key, Decimal]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Approximate memory."""
        names = len(self.keys[0]) if self.keys else 0
        rows = len(self.keys) * (_ROW_BYTES + _NAME_BYTES * names) + len(self.of_jobs) * _NAME_BYTES
        return int(self.figures.nbytes) + rows

    def row(self, at: int) -> Row:
        key = self.keys[at]
        line = usage_line({}, dict(zip(self.names, self.figures[at].tolist(), strict=True)))
        return Row(key, line, self.costs[at], self.billed_us[at], self.unpriced_us[at], self.unheld_costs[at],
                   self.amount(at), self.unheld_amounts[at])  # fmt: skip

    def amount(self, at: int) -> Decimal | None:
        """What a row shows for its cost."""
        return None if self.amounts[at] is None else self.of_jobs.get(self.keys[at], self.amounts[at])

    def total(self, at: Int64Array, *, metered: bool) -> Row:
        """The sum of these rows. metered: whether anything of the span is metered; otherwise its cost is unknown."""
        figures = self.figures if len(at) == len(self) else self.figures[at]
        # Halves of the integers, because the sum of a column may exceed 64 bits.
        high, low = ((half.sum(axis=0)).tolist() for half in (figures >> 32, figures & 0xFFFF_FFFF))
        sums = {name: (above << 32) + below for name, above, below in zip(self.names, high, low, strict=True)}
        billed = [one for one in called_off.each(at.tolist()) if self.billed_us[one]]
        cost, unheld_cost, amount, unheld_amount = (
            sum_if_known(of) if metered else None
            for of in (
                [costs[one] for one in billed]
                for costs in (self.costs, self.unheld_costs, self.amounts, self.unheld_amounts)
            )
        )
        return Row((), usage_line({}, sums), cost, sum(self.billed_us[one] for one in billed),
                   sum(self.unpriced_us[one] for one in billed), unheld_cost, amount, unheld_amount)  # fmt: skip

    def values(self, column: str) -> list[Figure]:
        """A figure of every row."""
        if column == "cost":
            return list(self.costs)
        if column == "unpriced":
            return list(self.unpriced_us)
        if column in MEASURES_SHOWN:
            return list(_column(self.names, self.figures, column))
        of = FIGURES[column].of
        return [of(self.row(at)) for at in called_off.each(range(len(self)))]

    def only(self, at: Sequence[int]) -> Table:
        """These rows."""
        return Table(
            [self.keys[one] for one in at], self.names, self.figures[np.array(at, dtype=np.int64)],
            [self.costs[one] for one in at], [self.billed_us[one] for one in at], [self.unpriced_us[one] for one in at],
            [self.unheld_costs[one] for one in at], [self.amounts[one] for one in at],
            [self.unheld_amounts[one] for one in at], self.of_jobs,
        )  # fmt: skip

    def like(self, keys: Sequence[Key]) -> Table:
        """The rows of these keys; a key without a row has zeros."""
        number = {key: at for at, key in enumerate(self.keys)}
        at = [number.get(key) for key in keys]
        figures = np.zeros((len(keys), len(self.names)), dtype=np.int64)
        there = [(row, old) for row, old in enumerate(at) if old is not None]
        if there:
            rows, olds = np.array(there, dtype=np.int64).T
            figures[rows] = self.figures[olds]
        return Table(
            keys, self.names, figures,
            [Decimal(0) if one is None else self.costs[one] for one in at],
            [0 if one is None else self.billed_us[one] for one in at],
            [0 if one is None else self.unpriced_us[one] for one in at],
            [Decimal(0) if one is None else self.unheld_costs[one] for one in at],
            [Decimal(0) if one is None else self.amounts[one] for one in at],
            [Decimal(0) if one is None else self.unheld_amounts[one] for one in at], self.of_jobs,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimeCell:
    """The figures of one unit of time. unknown: the unmetered part of it, 1 if nothing is known of it.

    parts: by the number of the series, the amount or GPU-µs; None if unknown."""

    name: str
    unknown: float
    parts: Mapping[int, Figure]


@dataclass(frozen=True, slots=True)
class Series:
    """The parts of a chart. names: the values of `dimension` with an own part, and css: their classes; others: how many
    share the last."""

    dimension: Dimension | None
    names: tuple[str, ...]
    css: tuple[str, ...]
    others: int
    unit: Dimension
    cells: tuple[TimeCell, ...]


@dataclass(frozen=True, slots=True)
class Explored:
    """The answer. found_ms: when it was read.

    before: the table of the span before, with the same rows; None if it is not compared, or nothing is known of it.
    before_ms: the span before, or the part of it that has records; None if it is not compared.
    covered, covered_before: as `UsageAnswer.coverage`, without filters.
    unknown_before: the numbers of the rows of clusters of which nothing is known in the span before.
    days: how both are compared; as in `EarlierSpan`."""

    found_ms: int
    start_ms: int
    end_ms: int
    table: Table
    covered: float | None
    before: Table | None
    before_ms: tuple[int, int] | None
    covered_before: float | None
    chart: Series
    unknown_before: frozenset[int] = frozenset()
    days: Days | None = None

    def then(self, at: int) -> Row | None:
        """A row in the span before; None if it is not compared, or nothing is known of its cluster then."""
        return None if self.before is None or at in self.unknown_before else self.before.row(at)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + (0 if self.before is None else self.before.nbytes) + 400 * len(self.chart.cells)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. unit: the unit of time of the chart. search: the text that a name of a row has to contain; "" for
    all rows."""

    by: tuple[Dimension, ...]
    where: Where
    timezone: str
    measure: Measure
    unit: Dimension
    search: str = ""


def table_of(ledger: Moment, book: PriceBook | None, start_ms: int, end_ms: int, asked: Question) -> Table:
    """Usage and cost of a span by group."""
    usage, displayed = displayed_usage(ledger, book, start_ms, end_ms, asked.by, asked.where, asked.timezone)
    priced = cost_of(displayed.charges, book, start_ms, end_ms, asked.by)
    lines = {tuple(line.key.values()): line for line in priced.lines}
    keys = list(usage.row_keys())
    found = [lines.get(key) for key in keys]
    none = Decimal(0)
    return Table(
        keys, usage.names, usage.figures,
        [None if line is None else line.cost for line in found],
        [0 if line is None else line.gpu_us for line in found],
        [0 if line is None else line.unpriced_gpu_us for line in found],
        [None if line is None else line.unheld_cost for line in found],
        [None if line is None or line.cost is None else displayed.amounts.get(key, none)
         for key, line in zip(keys, found, strict=True)],
        [None if line is None or line.unheld_cost is None else displayed.unheld.get(key, none)
         for key, line in zip(keys, found, strict=True)], displayed.of_jobs,
    )  # fmt: skip


def explore(
    ledger: Moment,
    book: PriceBook | None,
    span: tuple[int, int],
    asked: Question,
    found_ms: int,
    most_series: int,
    named: Callable[[str], str],
    *,
    compare: bool,
) -> Explored:
    """Asks the question of a span, and of the span before if it is to be compared. The chart is of the rows that the
    search finds.

    most_series: parts of the chart.
    named: as in `selected`."""
    table = table_of(ledger, book, *span, asked)
    metered = ledger.usage(span, (asked.unit,), None, asked.timezone)
    covered = coverage(metered)
    chart = _chart(ledger, book, span, asked, _found(table, asked.search, named), most_series, metered)
    if not compare:
        return Explored(found_ms, *span, table, covered, None, None, None, chart)
    known = EarlierSpan.of(span, ledger, zone(asked.timezone))
    before = known.start_ms, known.end_ms
    chosen = asked.where.get("cluster") or known.clusters
    if not known.clusters.intersection(chosen):
        return Explored(found_ms, *span, table, covered, None, before, known.coverage, chart)
    earlier = table_of(ledger, book, *before, asked)
    keys = sorted({*table.keys, *earlier.keys}) if covered else table.keys
    place = asked.by.index("cluster") if "cluster" in asked.by else None
    unknown = frozenset(at for at, key in enumerate(keys) if place is not None and key[place] not in known.clusters)
    return Explored(
        found_ms, *span, table.like(keys), covered, earlier.like(keys), before, known.coverage, chart, unknown,
        known.days,
    )  # fmt: skip


def _chart(
    ledger: Moment,
    book: PriceBook | None,
    span: tuple[int, int],
    asked: Question,
    table: Table,
    most: int,
    metered: Usage,
) -> Series:
    """The measure by unit of time of the rows of the table: the largest values of one dimension, and the others
    together. metered: the usage of the span by unit of time, unfiltered."""
    series = _series(table, asked.by)
    names, others = _largest(table, asked, series, most)
    if asked.search:
        parts, whole = _of_rows(ledger, book, span, asked, table, series)
    else:
        parts = _by_time(ledger, book, span, asked, series, names) if names else {}
        whole = _by_time(ledger, book, span, asked, None, ()) if others or series is None else {}
    accounts_of = {line.key[asked.unit]: line.accounts_gpu_us for line in metered.lines()}
    cells = []
    for unit in _units(*span, asked.unit, asked.timezone):
        accounts = accounts_of.get(unit)
        gap = accounts.unmetered / accounts.total if accounts is not None and accounts.is_known else 1.0
        found: dict[int, Figure] = {}
        for number, name in enumerate(names):
            if (name, unit) in parts:
                found[number] = parts[name, unit]
        if others or series is None:
            found[len(names)] = _rest(whole.get(("", unit), 0), list(found.values()))
        cells.append(TimeCell(unit, gap, {number: value for number, value in found.items() if value != 0}))
    css = [f"s{number}" for number in range(len(names))]
    if series == "team":
        of_team = charts.colours(names, ledger.status().teams)
        css = [of_team[name] for name in names]
    return Series(series, names, tuple(css), others, asked.unit, tuple(cells))


def _rest(whole: Figure, parts: Sequence[Figure]) -> Figure:
    """The whole without its parts; None if one of them is unknown. Amounts of jobs are rounded by themselves, so that a
    rest may miss 0."""
    if whole is None or any(part is None for part in parts):
        return None
    if isinstance(whole, int):
        return whole - sum(part for part in parts if isinstance(part, int))
    amount = Decimal(str(whole)) if not isinstance(whole, Decimal) else whole
    return max(Decimal(0), exact_sum([amount, *(-part for part in parts if isinstance(part, Decimal))]))


def _series(table: Table, by: Sequence[Dimension]) -> Dimension | None:
    """The dimension whose values are the parts of the chart: the first that is no time and has several values."""
    candidates = [name for name in by if name not in OF_TIME]
    several = (name for name in candidates if len({key[by.index(name)] for key in called_off.each(table.keys)}) > 1)
    return next(several, candidates[0] if candidates else None)


def _largest(table: Table, asked: Question, series: Dimension | None, most: int) -> tuple[tuple[str, ...], int]:
    """The values of the dimension of the chart that have most of the measure, and how many others there are. A value
    with an unknown cost counts with the part that is known."""
    if series is None:
        return (), 0
    place = asked.by.index(series)
    sums: dict[str, Any] = {}
    unknown: set[str] = set()
    if asked.measure == "cost":
        values: Sequence[Any] = [one or Decimal(0) for one in table.costs]
        unknown = {key[place] for key, one, billed in zip(table.keys, table.costs, table.billed_us, strict=True)
                   if one is None and billed}  # fmt: skip
    else:
        values = _column(table.names, table.figures, asked.measure)
    for key, value in called_off.each(zip(table.keys, values, strict=True)):
        sums[key[place]] = sums.get(key[place], 0) + value
    ranked = sorted((name for name in sums if sums[name] or name in unknown), key=lambda name: (-sums[name], name))
    named = ranked if len(ranked) <= most else ranked[: most - 1]
    return tuple(named), len(ranked) - len(named)


def _by_time(
    ledger: Moment,
    book: PriceBook | None,
    span: tuple[int, int],
    asked: Question,
    series: Dimension | None,
    only: Sequence[str],
) -> dict[tuple[str, str], Figure]:
    """The measure by value of the chart's dimension and unit of time. series: None: all values together, as "". only:
    the values that count."""
    by = (asked.unit,) if series is None else (series, asked.unit)
    where = asked.where if series is None else {**asked.where, series: tuple(only)}
    if asked.measure == "cost":
        amounts = _amounts(ledger, book, span, by, where, asked.timezone)
        return {("" if series is None else key[0], key[-1]): amount for key, amount in amounts.items()}
    usage = ledger.usage(span, by, where, asked.timezone)
    values = _column(usage.names, usage.figures, asked.measure)
    return {
        ("" if series is None else key[0], key[-1]): value for key, value in zip(usage.row_keys(), values, strict=True)
    }


_FEW_VALUES: Final = 1_000
"""Values that a filter names at most."""
Parts: TypeAlias = dict[tuple[str, str], Figure]


def _of_rows(
    ledger: Moment,
    book: PriceBook | None,
    span: tuple[int, int],
    asked: Question,
    table: Table,
    series: Dimension | None,
) -> tuple[Parts, Parts]:
    """The measure of the rows of a table by value of the chart's dimension and unit of time, and of all values together
    as ""."""
    kept = frozenset(table.keys)
    if not kept:
        return {}, {}
    by = asked.by if asked.unit in asked.by else (*asked.by, asked.unit)
    # Fewer rows to read: a dimension only with the values that the rows have, if these are few.
    values = {name: tuple(sorted({key[place] for key in kept})) for place, name in enumerate(asked.by)}
    where = {**asked.where, **{name: few for name, few in values.items() if len(few) <= _FEW_VALUES}}
    rows: Iterable[tuple[Key, Figure]]
    if asked.measure == "cost":
        rows = _amounts(ledger, book, span, by, where, asked.timezone).items()
    else:
        usage = ledger.usage(span, by, where, asked.timezone)
        rows = zip(usage.row_keys(), _column(usage.names, usage.figures, asked.measure), strict=True)
    place, time = None if series is None else by.index(series), by.index(asked.unit)
    parts: dict[tuple[str, str], list[Figure]] = {}
    whole: dict[tuple[str, str], list[Figure]] = {}
    for key, value in called_off.each(rows):
        if key[: len(asked.by)] in kept:
            parts.setdefault(("" if place is None else key[place], key[time]), []).append(value)
            whole.setdefault(("", key[time]), []).append(value)
    return {at: added(of) for at, of in parts.items()}, {at: added(of) for at, of in whole.items()}


def _amounts(
    ledger: Moment,
    book: PriceBook | None,
    span: tuple[int, int],
    by: Sequence[Dimension],
    where: Where,
    timezone: str,
) -> Mapping[Key, Decimal | None]:
    """The amount that a table by these dimensions shows for each row; None if some of its time has no price."""
    found = displayed_costs(ledger, book, *span, by, where, timezone)
    return {key: amount and found.of_jobs.get(key, amount) for key, amount in found.known.items()}


def _column(names: Sequence[str], figures: Int64Array, measure: Measure) -> list[int]:
    """An account, or the sum of some, of every row."""
    of: Mapping[str, Sequence[str]] = {"allocated": HELD, "capacity": ACCOUNTS}
    found: list[int] = figures[:, [names.index(name) for name in of.get(measure, (measure,))]].sum(axis=1).tolist()
    return found


def _units(start_ms: int, end_ms: int, unit: Dimension, timezone: str) -> list[str]:
    """The names of the hours, days or months of a span, in order."""
    tz = zone(timezone)
    if unit == "hour":
        return list(hours(start_ms, end_ms, tz))
    names = [day.isoformat() for day, _, _ in days(start_ms, end_ms, tz)]
    return names if unit == "day" else list(dict.fromkeys(name[:7] for name in names))


@dataclass(frozen=True, slots=True)
class Pivot:
    """A table with the values of one dimension side by side.

    heads: its values; others: how many further ones share the last column.
    rows: for each group of the other dimensions its key, its figures by the number of their column, and their sum; None
        is unknown, and a figure that is not there is 0.
    sums: the sums of the columns, with that of all at the end."""

    heads: tuple[str, ...]
    others: int
    rows: Sequence[tuple[Key, Mapping[int, Figure], Figure]]
    sums: Sequence[Figure]

    @property
    def width(self) -> int:
        return len(self.heads) + (self.others > 0)


def pivot(
    table: Table,
    at: Int64Array,
    place: int,
    measure: Measure,
    most: int,
    *,
    in_order: bool,
    by_sum: Direction | None,
    exact: bool,
) -> Pivot:
    """Puts the values of one dimension side by side.

    at: the rows, in the order in which their groups are shown.
    place: the index of the dimension in the keys.
    most: columns at most; in_order: the last names in their order, as for time, instead of the largest first.
    by_sum: sort the rows by their sum, unknown ones last.
    exact: costs instead of the amounts that pages show for them."""
    costs = table.costs if exact else table.amounts
    values: list[Figure] = list(costs) if measure == "cost" else list(_column(table.names, table.figures, measure))
    cell_of = table.amount if measure == "cost" and not exact else values.__getitem__
    there = [one for one in at.tolist() if measure != "cost" or table.billed_us[one]]
    sums: dict[str, list[Figure]] = {}
    for one in called_off.each(there):
        sums.setdefault(table.keys[one][place], []).append(values[one])
    whole = {name: added(parts) for name, parts in sums.items()}
    ranked = sorted(whole) if in_order else sorted(whole, key=lambda name: (-(whole[name] or 0), name))
    few = ranked[1 - most :] if in_order else ranked[: most - 1]
    heads = tuple(ranked if len(ranked) <= most else few)
    column = {name: number for number, name in enumerate(heads)}
    rows: dict[Key, dict[int, list[Figure]]] = {}
    for one in called_off.each(at.tolist()):
        key = table.keys[one]
        cells = rows.setdefault(key[:place] + key[place + 1 :], {})
        if measure != "cost" or table.billed_us[one]:
            cells.setdefault(column.get(key[place], len(heads)), []).append(cell_of(one))
    shown = []
    for key, cells in called_off.each(rows.items()):
        summed = {number: added(cell) for number, cell in cells.items()}
        shown.append((key, summed, added(list(summed.values()))))
    if by_sum is not None:
        sign = -1 if by_sum == "down" else 1
        shown.sort(key=lambda row: (row[2] is None, sign * (row[2] or 0)))
    columns = [whole[name] for name in heads]
    if len(heads) < len(ranked):
        columns.append(added([whole[name] for name in ranked if name not in column]))
    return Pivot(heads, len(ranked) - len(heads), shown, [*columns, added(list(whole.values()))])


def added(values: Sequence[Figure]) -> Figure:
    """The exact sum; None if one is unknown."""
    if any(value is None for value in values):
        return None
    if any(isinstance(value, Decimal) for value in values):
        return exact_sum([value for value in values if isinstance(value, Decimal)])
    return sum(value for value in values if isinstance(value, int))


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows of a view. at: their numbers, in their order; total: their sum; total_before: of the span before."""

    at: Int64Array
    total: Row
    total_before: Row | None

    @property
    def nbytes(self) -> int:
        """Approximate memory."""
        return int(self.at.nbytes) + 2 * _ROW_BYTES


def selected(
    found: Explored, search: str, sort: Order, by: Sequence[Dimension], named: Callable[[str], str]
) -> Selection:
    """The rows that contain a text, in the given order, and their sums; see `_numbers`."""
    at = np.array(_numbers(found.table, search, sort, by, named), dtype=np.int64)
    before = None if found.before is None else found.before.total(at, metered=bool(found.covered_before))
    return Selection(at, found.table.total(at, metered=bool(found.covered)), before)


def _matching(table: Table, search: str, named: Callable[[str], str]) -> list[int]:
    """The numbers of the rows that contain a text."""
    at = list(range(len(table)))
    if not search:
        return at
    wanted = search.casefold()
    return [one for one in called_off.each(at) if any(wanted in text.casefold() or wanted in named(text).casefold()
                                                      for text in table.keys[one])]  # fmt: skip


def _found(table: Table, search: str, named: Callable[[str], str]) -> Table:
    """The rows that contain a text, as a table."""
    return table if not search else table.only(_matching(table, search, named))


def _numbers(table: Table, search: str, sort: Order, by: Sequence[Dimension], named: Callable[[str], str]) -> list[int]:
    """The numbers of the rows that contain a text, in the given order; unknown figures last.

    sort: by a dimension or a column; by anything else they stay as they are.
    named: the displayed name of a value, which is searched too."""
    at = _matching(table, search, named)
    name, down = sort
    if name in by:
        place = by.index(name)
        return sorted(at, key=lambda one: table.keys[one][place], reverse=down)
    if name not in COLUMNS:
        return at
    values = table.values(name)
    known = [one for one in at if values[one] is not None]
    known.sort(key=lambda one: values[one], reverse=down)  # type: ignore[arg-type,return-value]  # none is None
    return known + [one for one in at if values[one] is None]
