"""Usage inside stretches of a window, decayed to the end of each.

A stretch lies inside one quarter-hour. Whole quarter-hours of the past hardly ever change, so what a
window needs of them is remembered per half-life; a commit says which ones it touched. A reader uses and
fills only what no commit after its own snapshot has touched.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from accountant.accounts import Cells, part
from accountant.store import columns
from accountant.store.database import Cursor
from accountant.store.spans import TaggedSpan
from accountant.windows import factor, term
from agent.units import BUCKET_MS


class Figures(NamedTuple):
    """GPU-microseconds and microjoules. The first four decayed, the rest as they are; working time
    without energy is `blind`."""

    allocated: int = 0
    busy: int = 0
    energy: int = 0
    lost: int = 0
    plain_allocated: int = 0
    plain_unheld: int = 0
    plain_lost: int = 0
    plain_unknown: int = 0
    plain_blind: int = 0


ByPayer = Mapping[int, Figures]


class Tallied(NamedTuple):
    """What is in one stretch, by payer and in all."""

    by_payer: ByPayer
    all: Figures


@dataclass(frozen=True, slots=True)
class Stretch:
    """Time inside one quarter-hour; usage in it is decayed to its end."""

    start_ms: int
    end_ms: int

    @property
    def whole(self) -> bool:
        return self.end_ms - self.start_ms == BUCKET_MS

    @property
    def bucket_ms(self) -> int:
        return self.start_ms - self.start_ms % BUCKET_MS


def plus(figures: Iterable[Figures]) -> Figures:
    """The sum; of nothing, zero."""
    return Figures(*(sum(column) for column in zip(*figures, strict=True)))


def measure(
    cursor: Cursor, spans: Sequence[TaggedSpan], stretches: Sequence[Stretch], half_life_s: int | None
) -> dict[int, dict[int, Figures]]:
    """By tag and payer. A span's tag is the index of the stretch it lies in. Exactly what the rows give."""
    if not spans:
        return {}
    found: dict[int, dict[int, Figures]] = defaultdict(dict)
    table = columns.table(columns.SPAN, [(s.tag, s.gpu, s.start_ms, s.end_ms) for s in spans])
    low, high = min(s.start_ms for s in spans), max(s.end_ms for s in spans)
    weights = [
        (tag, gpu, start, end, factor(start, end, stretches[tag].end_ms, half_life_s))
        for tag, gpu, start, end in cursor.rows("spans_inside", {"low": low, "high": high}, incoming=table)
    ]
    if weights:
        bounds = {"low": low, "high": high}
        for tag, payer, *values in cursor.rows("decayed", bounds, incoming=columns.table(columns.WEIGHT, weights)):
            found[tag][payer] = Figures(*values)
    rows = cursor.rows("straddling", {"low": low - BUCKET_MS, "high": high}, incoming=table)
    for (tag, since, until, _, _, start, end, _), group in groupby(rows, key=lambda row: row[:8]):
        members = list(group)
        begin, stop = max(start, since), min(end, until)
        weight = factor(begin, stop, stretches[tag].end_ms, half_life_s)
        parts = part([Cells(*row[10:]) for row in members], end - start, begin - start, stop - start)
        for row, cells in zip(members, parts, strict=True):
            payer = row[9]
            found[tag][payer] = plus([found[tag].get(payer, Figures()), _figures(cells, weight)])
    return found


def _figures(cells: Cells, weight: float) -> Figures:
    return Figures(
        term(cells.allocated_us, weight), term(cells.busy_us, weight), term(cells.energy_uj, weight),
        term(cells.down_us, weight), cells.allocated_us, cells.unheld_us, cells.down_us, cells.unknown_us,
        cells.energy_blind_us,
    )  # fmt: skip


class StretchCache:
    """Whole quarter-hours by half-life. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int | None, dict[int, Tallied]] = defaultdict(dict)
        self._down: dict[int | None, dict[int, tuple[tuple[tuple[int, int, int], ...], Figures]]] = defaultdict(dict)
        self._touched: dict[int, int] = {}
        self._all_touched = 0

    def forget(self, buckets: Iterable[int], version: int) -> None:
        """The commit that makes `version` changed rows of these quarter-hours."""
        with self._lock:
            for bucket in buckets:
                self._touched[bucket] = version
                for known in self._known.values():
                    known.pop(bucket, None)
                for down in self._down.values():
                    down.pop(bucket, None)

    def forget_all(self, version: int) -> None:
        with self._lock:
            self._all_touched = version
            self._known.clear()
            self._down.clear()

    def read(
        self, cursor: Cursor, version: int, stretches: Sequence[Stretch], half_life_s: int | None
    ) -> list[Tallied]:
        """Figures of each stretch, as of the snapshot behind `cursor`, which is that of `version`."""
        with self._lock:
            known = self._known[half_life_s]
            ready = {
                tag: known[stretch.start_ms]
                for tag, stretch in enumerate(stretches)
                if stretch.whole and stretch.start_ms in known and self._fresh(stretch.start_ms, version)
            }
        missing = [tag for tag in range(len(stretches)) if tag not in ready]
        for tag, found in self._fill(cursor, missing, stretches, half_life_s).items():
            ready[tag] = Tallied(found, plus(found.values()))
        with self._lock:
            for tag in missing:
                if stretches[tag].whole and self._fresh(stretches[tag].start_ms, version):
                    self._known[half_life_s][stretches[tag].start_ms] = ready[tag]
        return [ready[tag] for tag in range(len(stretches))]

    def down(
        self,
        cursor: Cursor,
        version: int,
        spans: Sequence[TaggedSpan],
        stretches: Sequence[Stretch],
        half_life_s: int | None,
    ) -> dict[int, Figures]:
        """What the rows hold inside down time, by stretch.

        Remembered for whole stretches as long as neither their rows nor their down time change."""
        wanted: dict[int, list[TaggedSpan]] = defaultdict(list)
        for span in spans:
            wanted[span.tag].append(span)
        keys = {tag: tuple((span.gpu, span.start_ms, span.end_ms) for span in mine) for tag, mine in wanted.items()}
        ready: dict[int, Figures] = {}
        with self._lock:
            known = self._down[half_life_s]
            for tag, key in keys.items():
                stretch = stretches[tag]
                before = known.get(stretch.start_ms)
                if before is not None and before[0] == key and stretch.whole and self._fresh(stretch.start_ms, version):
                    ready[tag] = before[1]
        missing = [tag for tag in wanted if tag not in ready]
        found = measure(cursor, [span for tag in missing for span in wanted[tag]], stretches, half_life_s)
        for tag in missing:
            ready[tag] = plus(found.get(tag, {}).values())
        with self._lock:
            for tag in missing:
                stretch = stretches[tag]
                if stretch.whole and self._fresh(stretch.start_ms, version):
                    self._down[half_life_s][stretch.start_ms] = (keys[tag], ready[tag])
        return ready

    def _fresh(self, bucket: int, version: int) -> bool:
        return self._touched.get(bucket, 0) <= version and self._all_touched <= version

    def _fill(
        self, cursor: Cursor, missing: Sequence[int], stretches: Sequence[Stretch], half_life_s: int | None
    ) -> dict[int, ByPayer]:
        found: dict[int, ByPayer] = {tag: {} for tag in missing}
        rest = list(missing)
        if half_life_s is None:
            whole = [(tag, 0, stretches[tag].start_ms) for tag in missing if stretches[tag].whole]
            rest = [tag for tag in missing if not stretches[tag].whole]
            if whole:
                bounds = {"low": min(w[2] for w in whole), "high": max(w[2] for w in whole)}
                by_tag: dict[int, dict[int, Figures]] = defaultdict(dict)
                table = columns.table(columns.BUCKET, whole)
                for tag, payer, *values in cursor.rows("undecayed_quarters", bounds, incoming=table):
                    by_tag[tag][payer] = Figures(*values)
                found |= by_tag
        spans = [TaggedSpan(tag, stretches[tag].start_ms, stretches[tag].end_ms) for tag in rest]
        return found | measure(cursor, spans, stretches, half_life_s)
