"""Time in equal cells, as range queries answer it, and figures over them in whole numbers. Pure.

The value asked for at an instant t stands for the cell (t - step, t]; here a cell is [t - step, t). A figure is a whole
number per cell (parts per million, MiB, milliwatts) or None where nothing was recorded: unknown is not zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

from accountant.overlap import Span


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells of `step_ms` from start_ms on, up to end_ms; the span is a whole number of them."""

    start_ms: int
    end_ms: int
    step_ms: int

    def __post_init__(self) -> None:
        if self.step_ms <= 0 or self.end_ms <= self.start_ms or (self.end_ms - self.start_ms) % self.step_ms:
            raise ValueError(f"[{self.start_ms}, {self.end_ms}) is not a whole number of steps of {self.step_ms} ms")

    @property
    def count(self) -> int:
        return (self.end_ms - self.start_ms) // self.step_ms

    def span(self, first: int, last: int) -> Span:
        """From the beginning of cell `first` to the end of cell `last`."""
        return self.start_ms + first * self.step_ms, self.start_ms + (last + 1) * self.step_ms

    def spans(self, cells: Iterable[int]) -> tuple[Span, ...]:
        """Runs of cells as spans."""
        return tuple(self.span(first, last) for first, last in runs(cells))


def runs(cells: Iterable[int]) -> list[tuple[int, int]]:
    """(first, last) of every run of consecutive numbers, ascending."""
    found: list[tuple[int, int]] = []
    for cell in sorted(set(cells)):
        if found and cell == found[-1][1] + 1:
            found[-1] = (found[-1][0], cell)
        else:
            found.append((cell, cell))
    return found


def bridged(cells: Collection[int], silent: Collection[int]) -> set[int]:
    """With the stretches between two of the cells in which nobody could have said anything."""
    found = set(cells)
    for (_, last), (first, _) in pairwise(runs(found)):
        between = range(last + 1, first)
        if all(cell in silent for cell in between):
            found.update(between)
    return found


class Track:
    """A figure over a grid."""

    __slots__ = ("_grid", "_values")

    def __init__(self, grid: Grid, values: dict[int, int]) -> None:
        """values: by cell, not negative."""
        self._grid = grid
        self._values = values

    def over(self, start_ms: int, end_ms: int) -> tuple[int, list[Span]]:
        """(the integral over time: figure x ms, the parts of [start, end) for which there is none)."""
        grid, step = self._grid, self._grid.step_ms
        total, gaps = 0, list[Span]()
        at = start_ms
        while at < end_ms:
            cell = (at - grid.start_ms) // step
            until = min(end_ms, grid.start_ms + (cell + 1) * step)
            value = self._values.get(cell)
            if value is not None:
                total += value * (until - at)
            elif gaps and gaps[-1][1] == at:
                gaps[-1] = (gaps[-1][0], until)
            else:
                gaps.append((at, until))
            at = until
        return total, gaps
