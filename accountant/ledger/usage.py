"""The relation of usage: GPU time and other figures by span of time and by the values of dimensions.

Example: `ledger.usage((monday, tuesday, wednesday), ("team", "hour"))` has a row for each team and hour of each of the
two days, with the six accounts and the measures in MEASURES. It is held as columns of integers, because a month by pod
and node has some hundred thousand rows. `Usage.lines` makes an object of a row when it is displayed.

Laws: the accounts of all rows add up to the capacity of the spans, to the microsecond; a filter selects rows and
changes none; a grouping by fewer dimensions is the sum of a finer one; the rows of adjacent spans add up to those of
their union."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args, overload
from zoneinfo import ZoneInfo

from accountant.core.periods import Days, compared_span
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension, UsageLine
from gputally.base import called_off
from gputally.base.measures import REPORTED
from gputally.base.units import MS_PER_DAY

if TYPE_CHECKING:  # a command that prints report rows does not load numpy
    import numpy as np
    import numpy.typing as npt

    from accountant.ledger.protocols import Moment

Int64Array: TypeAlias = "npt.NDArray[np.int64]"
Int32Array: TypeAlias = "npt.NDArray[np.int32]"
JobName: TypeAlias = tuple[str, str, str, str]
"""Team, namespace, job, cluster."""
Where: TypeAlias = Mapping[Dimension, Collection[str]]
"""A filter: the allowed values of some dimensions."""
PRICED_BY: Final[tuple[Dimension, ...]] = ("gpu_model", "pool", "region", "capacity_type")
"""The dimensions that a price may depend on."""
Capacity: TypeAlias = Literal["busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down"]
ACCOUNTS: Final[tuple[Capacity, ...]] = get_args(Capacity)
"""The accounts in display order, in GPU-µs; they add up to the capacity. Every relation of usage has them."""
HELD: Final[tuple[Capacity, ...]] = ("busy", "allocated_idle", "allocated_unknown")
"""The accounts of time that somebody held, the first of ACCOUNTS."""
UsageMeasure: TypeAlias = str
"""A name in MEASURES, START_UP or LENT."""
MEASURES: Final[tuple[UsageMeasure, ...]] = (
    "node_down", "borrowed_busy", "unattributed_busy",
    *(name for each in REPORTED for name in (each.name, each.unknown)),
)  # fmt: skip
"""The measures of a `UsageLine` besides the accounts."""
START_UP: Final[tuple[UsageMeasure, ...]] = ("starting", "gang_waiting")
"""The parts of `allocated_idle` in which a pod was bound without a running process, or waited for its gang. They take
reading every pod."""
LENT: Final[tuple[UsageMeasure, ...]] = ("lent_busy", "lent_allocated_idle", "lent_unallocated")
"""The changes of three accounts, which add up to 0, if borrowed time is billed to the pods that used it. They take
reading every borrowed quarter-hour."""
_NAMES: Final = (*MEASURES, *START_UP, *LENT)
_REPORTED: Final = [
    (each.name, each.unknown, each.field, each.unknown_field, each.known == "held") for each in REPORTED
]
_ENERGY_J: Final = "energy_j"
"""Whole joules besides `energy_uj`, which is then less than a joule a row that was added up."""


UJ_PER_J: Final = 1_000_000
_ROWS: Final = 1_000
"""This many rows become integers of Python at a time."""
_MOST_CODE: Final = 2**62


def names_of(measures: Collection[UsageMeasure]) -> tuple[str, ...]:
    """The names of the figures of a relation with these measures, in their order. Raises ValueError for others."""
    named = tuple(name for name in _NAMES if name in measures)
    if len(named) != len(set(measures)):
        raise ValueError(f"no measures: {', '.join(sorted(set(measures) - set(named)))}")
    return (*ACCOUNTS, *named, *((_ENERGY_J,) if "energy_uj" in measures else ()))


@dataclass(frozen=True, slots=True)
class Usage:
    """The relation of usage. Rows ascend by span and by the values of `by`, and no two rows have the same.

    by: the dimensions.
    values: for each dimension the values that occur, sorted.
    span: for each row the index of its span; span n lies between the edges n and n + 1. int64, shape (rows,).
    at: for each row the index of its value of each dimension; int32, shape (rows, len(by)).
    names: the names of the figures: ACCOUNTS, and the measures that were asked for.
    figures: GPU-µs and the units of `UsageLine`; int64, shape (rows, len(names))."""

    by: tuple[Dimension, ...]
    values: tuple[Sequence[str], ...]
    span: Int64Array
    at: Int32Array
    names: tuple[str, ...]
    figures: Int64Array

    def __len__(self) -> int:
        return len(self.span)

    @classmethod
    def summed(
        cls,
        by: Sequence[Dimension],
        known: Sequence[Sequence[str]],
        span: Int64Array,
        at: Int32Array,
        names: Sequence[str],
        figures: Int64Array,
    ) -> Usage:
        """Adds up rows in any order. known: for each dimension the values that `at` are indices of, in any order."""
        import numpy as np

        values: list[Sequence[str]] = []
        ranked = np.zeros(at.shape, dtype=np.int32)
        for column, names_by_index in enumerate(known):
            present = np.zeros(len(names_by_index), dtype=bool)
            present[at[:, column]] = True
            found = sorted((names_by_index[number], number) for number in np.flatnonzero(present).tolist())
            rank = np.zeros(len(names_by_index), dtype=np.int64)
            rank[[number for _, number in found]] = np.arange(len(found))
            ranked[:, column] = rank[at[:, column]]
            values.append([value for value, _ in found])
        code = _coded(span, ranked, [len(column) for column in values])
        order = np.argsort(code, kind="stable")
        code = code[order]
        first = np.flatnonzero(np.concatenate([np.ones(min(1, len(code)), dtype=bool), code[1:] != code[:-1]]))
        sums = np.add.reduceat(figures[order], first, axis=0) if len(first) else figures
        rows = order[first]
        return cls(tuple(by), tuple(values), span[rows], ranked[rows], tuple(names), sums)

    @classmethod
    def of_rows(
        cls,
        by: Sequence[Dimension],
        rows: Iterable[tuple[int, tuple[str, ...], Sequence[int]]],
        measures: Collection[UsageMeasure] = MEASURES,
    ) -> Usage:
        """The relation of rows (span, key, figures by the names of `names_of(measures)` without whole joules)."""
        import numpy as np

        names = names_of(measures)
        spans, keys, figures = [], [], []
        for span, key, row in rows:
            whole: list[int] = []
            own = list(row)
            if "energy_uj" in measures:
                joules, own[names.index("energy_uj")] = divmod(own[names.index("energy_uj")], UJ_PER_J)
                whole = [joules]
            spans.append(span)
            keys.append(key)
            figures.append([*own, *whole])
        known = [sorted({key[column] for key in keys}) for column in range(len(by))]
        number = [{value: index for index, value in enumerate(column)} for column in known]
        at = [[numbers[value] for numbers, value in zip(number, key, strict=True)] for key in keys]
        return cls.summed(
            by, known, np.array(spans, dtype=np.int64), np.array(at, dtype=np.int32).reshape(len(keys), len(by)), names,
            np.array(figures, dtype=np.int64).reshape(len(keys), len(names)),
        )  # fmt: skip

    def column(self, name: str) -> Int64Array:
        """One figure of all rows, shape (rows,)."""
        return self.figures[:, self.names.index(name)]

    def columns(self, names: Sequence[str]) -> Int64Array:
        """Some figures of all rows, shape (rows, len(names))."""
        return self.figures[:, [self.names.index(name) for name in names]]

    def only(self, names: Sequence[str]) -> Usage:
        """The rows with some of the figures."""
        return replace(self, names=tuple(names), figures=self.columns(names))

    def energy_uj(self) -> list[int]:
        """The energy of each row in µJ, which may need more than 64 bits."""
        joules, rest = self.column(_ENERGY_J).tolist(), self.column("energy_uj").tolist()
        return [whole * UJ_PER_J + part for whole, part in zip(joules, rest, strict=True)]

    def keyed(self, by: Sequence[Dimension]) -> tuple[list[tuple[str, ...]], Int64Array]:
        """The distinct values of some dimensions, sorted, and for each row their index, shape (rows,)."""
        import numpy as np

        columns = [self.by.index(name) for name in by]
        at = self.at[:, columns]
        code = _coded(np.zeros(len(self), dtype=np.int64), at, [len(self.values[column]) for column in columns])
        _, first, row = np.unique(code, return_index=True, return_inverse=True)
        parts = [self.values[column] for column in columns]
        keys = [
            tuple([values[index] for values, index in zip(parts, indices, strict=True)])
            for indices in called_off.each(at[first].tolist())
        ]
        return keys, row.reshape(-1)

    def row_keys(self) -> Iterator[tuple[str, ...]]:
        """The key of each row."""
        for begin in called_off.each(range(0, len(self), _ROWS)):
            for indices in self.at[begin : begin + _ROWS].tolist():
                yield tuple([values[index] for values, index in zip(self.values, indices, strict=True)])

    def grouped(self, by: Sequence[Dimension], *, spans: bool = True) -> Usage:
        """The sums by some of the dimensions. spans: of each span by itself; otherwise of all together."""
        columns = [self.by.index(name) for name in by]
        known = [self.values[column] for column in columns]
        span = self.span if spans else self.span * 0
        return self.summed(by, known, span, self.at[:, columns], self.names, self.figures)

    def lines(self, span: int = 0) -> UsageLines:
        """The rows of one span, each made an object when it is read."""
        import numpy as np

        begin, end = np.searchsorted(self.span, [span, span + 1]).tolist()
        return UsageLines(self, begin, end)

    def sum_of_accounts(self) -> Accounts:
        """The accounts of all rows together, which may need more than 64 bits."""
        return Accounts(**{name: sum(self.column(name).tolist()) for name in ACCOUNTS})


def _coded(first: Int64Array, columns: Int32Array, sizes: Sequence[int]) -> Int64Array:
    """A number for each row, which ascends as `first` and the columns do, the first one the most significant.

    sizes: the number of values of each column."""
    import numpy as np

    code, size = first, int(first.max(initial=0)) + 1
    for column, values in enumerate(sizes):
        if size * max(1, values) > _MOST_CODE:
            distinct, code = np.unique(code, return_inverse=True)
            code, size = code.reshape(-1), len(distinct)
        code, size = code * max(1, values) + columns[:, column], size * max(1, values)
    return code


def usage_line(key: dict[str, str], figures: Mapping[str, int]) -> UsageLine:
    """The line of a group. figures: by the names in ACCOUNTS and MEASURES, and perhaps `energy_j`, whole joules besides
    `energy_uj`; others are ignored."""
    accounts = Accounts(**{name: figures[name] for name in ACCOUNTS})
    held_us = accounts.allocated
    reported: dict[str, int | None] = {}
    for name, unknown, field, unknown_field, of_held in _REPORTED:
        unknown_us = reported[unknown_field] = figures[unknown]
        reported[field] = None if of_held and unknown_us and unknown_us >= held_us else figures[name]
    reported["energy_uj"] = figures["energy_uj"] + figures.get(_ENERGY_J, 0) * UJ_PER_J
    return UsageLine(
        key=key,
        accounts_gpu_us=accounts,
        node_down_us=figures["node_down"],
        borrowed_busy_us=figures["borrowed_busy"],
        unattributed_busy_us=figures["unattributed_busy"],
        **reported,
    )


class UsageLines(Sequence[UsageLine]):
    """The rows [begin, end) of a relation as lines, each made when it is read: a line takes ten times the memory of its
    row."""

    def __init__(self, usage: Usage, begin: int, end: int) -> None:
        self._usage, self._begin, self._end = usage, begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    @overload
    def __getitem__(self, at: int) -> UsageLine: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[UsageLine]: ...
    def __getitem__(self, at: int | slice) -> UsageLine | Sequence[UsageLine]:
        rows = range(self._begin, self._end)
        if isinstance(at, int):
            return self._line(self._usage.at[rows[at]].tolist(), self._usage.figures[rows[at]].tolist())
        chosen = rows[at]
        if chosen.step == 1:
            return UsageLines(self._usage, chosen.start, max(chosen.start, chosen.stop))
        return [self._line(self._usage.at[row].tolist(), self._usage.figures[row].tolist()) for row in chosen]

    def __iter__(self) -> Iterator[UsageLine]:
        for begin in called_off.each(range(self._begin, self._end, _ROWS)):
            end = min(self._end, begin + _ROWS)
            rows = self._usage.at[begin:end].tolist(), self._usage.figures[begin:end].tolist()
            for at, figures in zip(*rows, strict=True):
                yield self._line(at, figures)

    def sum_of_accounts(self) -> Accounts:
        """The accounts of all lines together, without making a line."""
        rows = self._usage.figures[self._begin : self._end]
        columns = {name: rows[:, self._usage.names.index(name)].tolist() for name in ACCOUNTS}
        return Accounts(**{name: sum(column) for name, column in columns.items()})

    def _line(self, at: Sequence[int], figures: Sequence[int]) -> UsageLine:
        named = zip(self._usage.by, self._usage.values, at, strict=True)
        key: dict[str, str] = {name: values[index] for name, values, index in named}
        return usage_line(key, dict(zip(self._usage.names, figures, strict=True)))


def added(accounts: Iterable[Accounts]) -> Accounts:
    """The sum, account by account."""
    summands = list(accounts)
    if len(summands) == 1:
        return summands[0]
    return Accounts(**{name: sum(getattr(summand, name) for summand in summands) for name in ACCOUNTS})


@dataclass(frozen=True, slots=True)
class EarlierSpan:
    """The span before, or the part of it that has records, to compare with (`periods.compared_span`).

    coverage: as `coverage`.
    clusters: those of which something is known. What is of another one is unknown and not zero.
    days: how both are compared if it is a part; None: as wholes."""

    start_ms: int
    end_ms: int
    coverage: float | None
    clusters: frozenset[str] = frozenset()
    days: Days | None = None

    @classmethod
    def of(cls, span: tuple[int, int], moment: Moment, tz: ZoneInfo) -> EarlierSpan:
        """The span with which `span` is compared. moment: of both."""
        before, days = compared_span(*span, moment.status().extent, tz)
        usage = moment.usage(before, ("cluster",))
        known = frozenset(line.key["cluster"] for line in usage.lines() if coverage([line]))
        return cls(*before, coverage(usage), known, days)

    @property
    def compared_ms(self) -> int | None:
        """The length of the span that is compared by day, up to the newest record; None if both are compared as
        wholes."""
        return None if self.days is None else round(self.days.now * MS_PER_DAY)

    @property
    def known(self) -> tuple[int, int] | None:
        """The span; None if nothing of it is known, so that its figures are unknown and not zero."""
        return (self.start_ms, self.end_ms) if self.coverage else None


def coverage(lines: Sequence[UsageLine] | Usage) -> float | None:
    """Metered share of the capacity without `down`, for complete usage of a span; None if there is no capacity."""
    if isinstance(lines, Usage | UsageLines):
        each = [lines.sum_of_accounts()]
    else:
        each = [line.accounts_gpu_us for line in lines]
    total = sum(accounts.total - accounts.down for accounts in each)
    unmetered = sum(accounts.unmetered for accounts in each)
    return (total - unmetered) / total if total else None


def sum_of_usage_lines(key: dict[str, str], lines: Sequence[UsageLine]) -> UsageLine:
    """The sum of one or more lines as one line with this key. A single line keeps its values, also unknown ones."""
    if len(lines) == 1:
        return lines[0].model_copy(update={"key": key})
    accounts = {name: sum(getattr(line.accounts_gpu_us, name) for line in lines) for name in ACCOUNTS}
    measures = {
        "node_down": sum(line.node_down_us or 0 for line in lines),
        "borrowed_busy": sum(line.borrowed_busy_us for line in lines),
        "unattributed_busy": sum(line.unattributed_busy_us for line in lines),
    }
    for each in REPORTED:
        measures[each.name] = sum(getattr(line, each.field) or 0 for line in lines)
        measures[each.unknown] = sum(getattr(line, each.unknown_field) for line in lines)
    return usage_line(key, accounts | measures)
