"""A few quarter-hours span by span, so that a window may begin and end anywhere inside them.

Rows begin and end at whole intervals, unless their holder changed: a quarter-hour has few different spans. What is
remembered here is what `accountant.store.stretches` remembers of whole quarter-hours, before the spans are added up.
Bounded; whatever was not asked for longest goes first. Not thread-safe: who owns it holds a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import numpy as np

from accountant.accounts import Cells
from accountant.store import carving
from accountant.store.booking import Added
from accountant.store.figures import NOTHING, Figures, Found, figures, plus
from accountant.windows import factor

Span = tuple[int, int]
"""[start_ms, end_ms) of rows."""
Grain = Mapping[Span, Found]
"""All of one quarter-hour."""
Key = tuple[int | None, int]
"""(half-life in seconds, start of the quarter-hour)."""
MOST_FIGURES = 200_000
_NOBODY = -1
"""In place of a queue, where nobody pays."""


class Grains:
    """Quarter-hours by half-life."""

    def __init__(self, most_figures: int = MOST_FIGURES) -> None:
        self._most_figures = most_figures
        self._known: OrderedDict[Key, Grain] = OrderedDict()
        self._figures = 0
        self.half_lives: set[int | None] = set()
        """Asked for since the last `clear`: new quarter-hours are kept for these."""

    def get(self, half_life_s: int | None, bucket: int) -> Grain | None:
        found = self._known.get((half_life_s, bucket))
        if found is not None:
            self._known.move_to_end((half_life_s, bucket))
        return found

    def has(self, half_life_s: int | None, bucket: int) -> bool:
        return (half_life_s, bucket) in self._known

    def put(self, half_life_s: int | None, bucket: int, grain: Grain) -> None:
        self.drop(half_life_s, bucket)
        self.half_lives.add(half_life_s)
        self._known[half_life_s, bucket] = grain
        self._figures += _size(grain)
        while self._figures > self._most_figures:
            self._figures -= _size(self._known.popitem(last=False)[1])

    def drop(self, half_life_s: int | None, bucket: int) -> None:
        before = self._known.pop((half_life_s, bucket), None)
        if before is not None:
            self._figures -= _size(before)

    def clear(self) -> None:
        self._known.clear()
        self.half_lives.clear()
        self._figures = 0


def grown(before: Grain, came: Grain) -> Grain:
    """With what came to it."""
    return {**before, **{span: found.plus(before.get(span, NOTHING)) for span, found in came.items()}}


def came(added: Added, reference_ms: int, half_life_s: int | None) -> Grain:
    """What a commit added to a quarter-hour, decayed to `reference_ms`: term by term, as the engine does it."""
    refs = np.where(added.paid, added.queue.of_row, _NOBODY)
    keys = np.stack([added.start_ms, added.end_ms, refs], axis=1)
    if half_life_s is None:
        sums = ((key, figures(Cells(*row), 1.0)) for key, row in carving.summed(keys, added.cells).items())
    else:
        spans, place = np.unique(keys[:, :2], axis=0, return_inverse=True)
        weights = np.array([factor(start, end, reference_ms, half_life_s) for start, end in spans.tolist()])
        decayed = carving.figures(added.cells, weights[place.reshape(-1)])
        sums = ((key, Figures(*row)) for key, row in carving.summed(keys, decayed).items())
    of_span: dict[Span, dict[int, Figures]] = {}
    for (start, end, ref), found in sums:
        of_span.setdefault((start, end), {})[ref] = found
    named = added.queue.values
    return {
        span: Found(plus(by_ref.values()), {named[ref]: mine for ref, mine in by_ref.items() if ref != _NOBODY})
        for span, by_ref in of_span.items()
    }


def within(grain: Grain, start_ms: int, end_ms: int) -> tuple[list[tuple[Span, Found]], bool]:
    """What lies wholly inside, and whether anything reaches over an edge."""
    whole: list[tuple[Span, Found]] = []
    over = False
    for span, found in grain.items():
        start, end = span
        if start >= start_ms and end <= end_ms:
            whole.append((span, found))
        elif start < end_ms and end > start_ms:
            over = True
    return whole, over


def total(of: Iterable[Found]) -> Found:
    """All of them together."""
    by_ref: dict[str, list[Figures]] = {}
    every: list[Figures] = []
    for found in of:
        every.append(found.all)
        for ref, mine in found.by_ref.items():
            by_ref.setdefault(ref, []).append(mine)
    return Found(plus(every), {ref: plus(several) for ref, several in by_ref.items()})


def _size(grain: Grain) -> int:
    return sum(len(found.by_ref) + 1 for found in grain.values())
