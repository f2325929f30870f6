"""Holds the cached quarter-hours of one window as a matrix of queues by time.

A row is one `Found` of `accountant.storage.query.window_buckets`, by the queues of the rules that stood over it. It is
filled once and used as long as that very object is remembered there: what a commit changes is another object, so a
sheet needs no word of commits and can be no other than the sums it was filled from. One measure, one half-life.
Bounded: when it is full, only what is being asked for stays. Not thread-safe: who owns it holds a lock.

Adding is exact: 64-bit columns are added in halves, and a number that does not fit makes the columns hold integers of
any size. A product with a weight is that of Python, digit by digit, and products are added by `math.fsum`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt

from accountant.ledger.team_assignment import Assignment
from accountant.storage.query.window_buckets import Parts
from accountant.storage.query.window_figures import Figures, Found

MOST_ROWS = 4_096
"""Four weeks of quarter-hours with room for the spans of those that windows begin and end in."""
_HALF = 31
_LOW = 2**_HALF - 1
_WIDTH = len(Figures._fields)
_LOST, _ENERGY = Figures._fields.index("lost"), Figures._fields.index("energy")

Key = tuple[int, int]
"""[start_ms, end_ms) of what a row holds."""
Whole = npt.NDArray[Any]
"""int64, or Python's integers."""


class Sheet:
    """of: the figure that is kept by queue, as its place in `Figures`."""

    def __init__(self, of: int, most_rows: int = MOST_ROWS) -> None:
        self._of = of
        self._most_rows = most_rows
        self._rows: dict[Key, tuple[int, Found, Assignment]] = {}
        self._columns: dict[str, int] = {}
        self._held: Whole = np.zeros((64, 8), dtype=np.int64)
        self._all: Whole = np.zeros((64, _WIDTH), dtype=np.int64)

    @property
    def queues(self) -> Sequence[str]:
        """Of the columns; some may be of queues that nothing asked for holds."""
        return list(self._columns)

    def rows(self, asked: Sequence[tuple[Key, Found, Assignment]]) -> list[int]:
        """The numbers of their rows. Good until the next call."""
        if len(self._rows) + len(asked) > self._most_rows:
            self._shrink({key for key, _, _ in asked})
        known = self._rows
        numbers = []
        for key, found, rules in asked:
            row = known.get(key)
            if row is None or row[1] is not found or row[2] is not rules:
                row = known[key] = (len(known) if row is None else row[0], found, rules)
                self._fill(row[0], found, rules)
            numbers.append(row[0])
        return numbers

    def held(self, rows: Sequence[int]) -> Whole:
        """By row and queue."""
        chosen: Whole = self._held[rows, : len(self._columns)]
        return chosen

    def all(self, rows: Sequence[int]) -> Whole:
        """`Found.all` by row."""
        chosen: Whole = self._all[rows]
        return chosen

    def _fill(self, row: int, found: Found, rules: Assignment) -> None:
        of_queue: dict[str, int] = defaultdict(int)
        for ref, figures in found.by_ref.items():
            of_queue[rules.queue(ref)] += figures[self._of]
        for queue in of_queue:
            self._columns.setdefault(queue, len(self._columns))
        self._held = _roomy(self._held, row + 1, len(self._columns))
        self._all = _roomy(self._all, row + 1, _WIDTH)
        self._held[row] = 0
        for queue, value in of_queue.items():
            self._held = _put(self._held, row, self._columns[queue], value)
        for place, value in enumerate(found.all):
            self._all = _put(self._all, row, place, value)

    def _shrink(self, wanted: set[Key]) -> None:
        kept = [(key, row) for key, row in self._rows.items() if key in wanted]
        numbers = [row[0] for _, row in kept]
        self._held, self._all = self._held[numbers], self._all[numbers]
        self._rows = {key: (number, *row[1:]) for number, (key, row) in enumerate(kept)}


@dataclass(frozen=True, slots=True)
class Held:
    """rows: everything. lost, energy: by stretch. leaves: usage of each queue itself, of what belongs to none as
    UNASSIGNED; some may be 0."""

    rows: Figures
    lost: Sequence[int]
    energy: Sequence[int]
    leaves: Mapping[str, int]


def added_up(
    sheet: Sheet, parts: Sequence[Parts], policies: Sequence[Assignment], ages: Sequence[float] | None
) -> Held:
    """parts, policies, ages: of each stretch. Of a stretch the parts are added first, then it is weighed."""
    asked = [(span, found, rules) for mine, rules in zip(parts, policies, strict=True) for span, found in mine]
    numbers = sheet.rows(asked)
    every = sheet.all(numbers)
    lost, energy = every[:, _LOST].tolist(), every[:, _ENERGY].tolist()
    singles, weights = numbers, ages
    several: list[tuple[Sequence[int], float]] = []
    sizes = list(map(len, parts))
    if any(size != 1 for size in sizes):
        # Few are made of several parts, or of none: those a window begins and ends in.
        ends = list(accumulate(sizes))
        groups = {tag: slice(ends[tag] - size, ends[tag]) for tag, size in enumerate(sizes) if size != 1}
        for values in (lost, energy):
            for group in reversed(groups.values()):
                values[group] = [sum(values[group])]
        if ages is not None:
            singles = [numbers[end - 1] for end, size in zip(ends, sizes, strict=True) if size == 1]
            weights = [age for age, size in zip(ages, sizes, strict=True) if size == 1]
            several = [(summed(sheet.held(numbers[group])), ages[tag]) for tag, group in groups.items() if sizes[tag]]
    held = sheet.held(singles)
    values = summed(held) if weights is None else _combined(held, weights, several)
    return Held(Figures(*summed(every)), lost, energy, dict(zip(sheet.queues, values, strict=True)))


def _combined(values: Whole, weights: Sequence[float], more: Sequence[tuple[Sequence[int], float]]) -> list[int]:
    """accountant.core.window_decay.combine of each column. more: further rows, each with its weight."""
    columns = (values * np.array(weights)[:, None]).T.tolist()
    for row, weight in more:
        for column, value in zip(columns, row, strict=True):
            column.append(value * weight)
    return [round(math.fsum(column)) for column in columns]


def summed(values: Whole) -> list[int]:
    """Each column added up, exactly."""
    if values.dtype == object:
        return [int(value) for value in values.sum(axis=0)]
    high, low = (values >> _HALF).sum(axis=0).tolist(), (values & _LOW).sum(axis=0).tolist()
    return list(map(add, (value << _HALF for value in high), low))


def _roomy(values: Whole, rows: int, columns: int) -> Whole:
    """With room for at least so many."""
    high, wide = values.shape
    if rows <= high and columns <= wide:
        return values
    shape = (high if rows <= high else 2 * rows, wide if columns <= wide else columns + columns // 4)
    grown: Whole = np.zeros(shape, dtype=values.dtype)
    grown[:high, :wide] = values
    return grown


def _put(values: Whole, row: int, column: int, value: int) -> Whole:
    try:
        values[row, column] = value
    except OverflowError:
        values = values.astype(object)
        values[row, column] = value
    return values
