"""A value that changes at known instants: the history behind a dimension. Pure.

A history is never empty, ascends, and neighbours differ. What holds at an instant depends on the
steps alone, never on the order in which somebody asked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Dated(Generic[T]):
    """steps: (since_ms, value), ascending. The first value holds before its instant too."""

    steps: tuple[tuple[int, T], ...]

    @classmethod
    def always(cls, value: T) -> Dated[T]:
        return cls(((0, value),))

    @property
    def latest(self) -> T:
        return self.steps[-1][1]

    def at(self, at_ms: int) -> T:
        """What held at an instant."""
        return self.steps[max(0, bisect_right(self.steps, at_ms, key=lambda step: step[0]) - 1)][1]

    def changes(self) -> Iterator[int]:
        """The instants at which another value began to hold."""
        return (since for since, _ in self.steps[1:])

    def changed(self, value: T, since_ms: int) -> Dated[T]:
        """`value` from `since_ms` on, whatever was thought to hold from then on; before, all stays as it was."""
        kept = tuple(step for step in self.steps if step[0] < since_ms)
        if not kept:
            return Dated(((since_ms, value),))
        if kept[-1][1] == value:
            return Dated(kept)
        return Dated((*kept, (since_ms, value)))
