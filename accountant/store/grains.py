"""A few quarter-hours span by span, so that a window may begin and end anywhere inside them.

Rows begin and end at whole intervals, unless their holder changed: a quarter-hour has few different spans. What is
remembered here is what `accountant.store.stretches` remembers of whole quarter-hours, before the spans are added up.
Bounded; whatever was not asked for longest goes first. Not thread-safe: who owns it holds a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from accountant.accounts import add
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


def came(rows: Iterable[Added], reference_ms: int, half_life_s: int | None) -> Grain:
    """What a commit added to a quarter-hour, decayed to `reference_ms`: term by term, as the engine does it."""
    sorted_out: dict[Span, dict[str | None, list[Added]]] = {}
    for row in rows:
        of_span = sorted_out.setdefault((row.start_ms, row.end_ms), {})
        of_span.setdefault(None if row.pod is None else row.queue_ref, []).append(row)
    found: dict[Span, Found] = {}
    for span, of_span in sorted_out.items():
        by_ref: dict[str | None, Figures] = {}
        for ref, alike in of_span.items():
            if half_life_s is None:
                by_ref[ref] = figures(add(row.cells for row in alike), 1.0)
            else:
                weight = factor(*span, reference_ms, half_life_s)
                by_ref[ref] = plus(figures(row.cells, weight) for row in alike)
        held = {ref: mine for ref, mine in by_ref.items() if ref is not None}
        found[span] = Found(plus(by_ref.values()), held)
    return found


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
