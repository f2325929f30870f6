"""Caches the usage of each quarter-hour that windows are summed from.

Rows begin and end at whole intervals, unless their holder changed: a quarter-hour has few different spans. What is
remembered here is what `accountant.storage.query.window_buckets` remembers of whole quarter-hours, before the spans are
added up. Bounded; whatever was not asked for longest goes first. Not thread-safe: who owns it holds a lock.

What a commit brought is worked out in the same shape (`Coming`), once per view, before that lock is taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import numpy as np

from accountant.core import accounts
from accountant.core.accounts import AccountVector
from accountant.core.window_decay import factor
from accountant.storage.query.window_figures import NOTHING, Figures, Found, View, figures, plus
from accountant.storage.write.interval_writer import Added, Booked
from accountant.storage.write.name_ids import PodKey
from gputally.base.units import BUCKET_MS

RowSpan = tuple[int, int]
"""[start_ms, end_ms) of rows."""
Grain = Mapping[RowSpan, Found]
"""All of one quarter-hour."""
Key = tuple[View, int]
"""With the start of the quarter-hour."""
MOST_FIGURES = 200_000
_NOBODY = -1
"""In place of a queue, where nobody pays."""


class Grains:
    """Quarter-hours by view."""

    def __init__(self, most_figures: int = MOST_FIGURES) -> None:
        self._most_figures = most_figures
        self._known: OrderedDict[Key, Grain] = OrderedDict()
        self._figures = 0

    def get(self, view: View, bucket: int) -> Grain | None:
        found = self._known.get((view, bucket))
        if found is not None:
            self._known.move_to_end((view, bucket))
        return found

    def has(self, view: View, bucket: int) -> bool:
        return (view, bucket) in self._known

    def put(self, view: View, bucket: int, grain: Grain) -> None:
        self.drop(view, bucket)
        self._known[view, bucket] = grain
        self._figures += _size(grain)
        while self._figures > self._most_figures:
            self._figures -= _size(self._known.popitem(last=False)[1])

    def drop(self, view: View, bucket: int) -> None:
        before = self._known.pop((view, bucket), None)
        if before is not None:
            self._figures -= _size(before)

    def forget(self, view: View) -> None:
        """All of a view."""
        for key in [key for key in self._known if key[0] == view]:
            self.drop(*key)

    def clear(self) -> None:
        self._known.clear()
        self._figures = 0


class Coming:
    """What a commit only added to quarter-hours. Used by one thread."""

    def __init__(self, booked: Booked) -> None:
        self._booked = booked
        self._added: dict[int, Added] = {}
        self._grains: dict[Key, Grain] = {}

    def holds(self, bucket: int) -> bool:
        """False where the commit changed it otherwise."""
        return bucket in self._booked.added

    def grain(self, view: View, bucket: int) -> Grain:
        found = self._grains.get((view, bucket))
        if found is None:
            rows = _of(self._rows(bucket), view.cluster)
            found = self._grains[view, bucket] = came(rows, bucket + BUCKET_MS, view.half_life_s)
        return found

    def pods(self, bucket: int) -> Mapping[PodKey, str]:
        """Those that pay for it, each with its queue."""
        return self._rows(bucket).pods

    def _rows(self, bucket: int) -> Added:
        found = self._added.get(bucket)
        if found is None:
            found = self._added[bucket] = self._booked.added[bucket]()
        return found


def grown(before: Grain, came: Grain) -> Grain:
    """With what came to it."""
    return {**before, **{span: found.plus(before.get(span, NOTHING)) for span, found in came.items()}}


def _of(added: Added, cluster: str | None) -> Added:
    """Of one cluster alone; None: of all."""
    values = added.cluster.values
    if cluster is None or values == [cluster]:
        return added
    mine = np.flatnonzero(added.cluster.of_row == (values.index(cluster) if cluster in values else -1))
    return added.only(mine)


def came(added: Added, reference_ms: int, half_life_s: int | None) -> Grain:
    """What a commit added to a quarter-hour, decayed to `reference_ms`: term by term, as the engine does it."""
    refs = np.where(added.paid, added.queue.of_row, _NOBODY)
    keys = np.stack([added.start_ms, added.end_ms, refs], axis=1)
    if half_life_s is None:
        sums = ((key, figures(AccountVector(*row), 1.0)) for key, row in accounts.summed(keys, added.cells).items())
    else:
        spans = list(zip(added.start_ms.tolist(), added.end_ms.tolist(), strict=True))
        weight_of = {span: factor(*span, reference_ms, half_life_s) for span in set(spans)}
        decayed = accounts.figures(added.cells, [weight_of[span] for span in spans])
        sums = ((key, Figures(*row)) for key, row in accounts.summed(keys, decayed).items())
    of_span: dict[RowSpan, dict[int, Figures]] = {}
    for (start, end, ref), found in sums:
        of_span.setdefault((start, end), {})[ref] = found
    named = added.queue.values
    return {
        span: Found(plus(by_ref.values()), {named[ref]: mine for ref, mine in by_ref.items() if ref != _NOBODY})
        for span, by_ref in of_span.items()
    }


def within(grain: Grain, start_ms: int, end_ms: int) -> tuple[list[tuple[RowSpan, Found]], bool]:
    """What lies wholly inside, and whether anything reaches over an edge."""
    whole: list[tuple[RowSpan, Found]] = []
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
