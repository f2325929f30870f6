"""Usage inside stretches of a window, decayed to the end of each.

A stretch lies inside one quarter-hour. Whole quarter-hours of the past hardly ever change, so what a
window needs of them is remembered per half-life, by the queue_ref of the pods; a commit says which ones
it touched, and which pods it brought facts of. A reader uses and fills only what no commit after its own
snapshot has touched.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from accountant.accounts import Cells, part
from accountant.store import columns
from accountant.store.database import Cursor
from accountant.store.spans import TaggedSpan, near
from accountant.windows import factor, term
from agent.units import BUCKET_MS, MS_PER_SECOND
from agent.wire import PodFacts


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


@dataclass(frozen=True, slots=True)
class Stretch:
    """Time inside one quarter-hour; usage in it is decayed to its end."""

    start_ms: int
    end_ms: int

    @property
    def whole(self) -> bool:
        return self.end_ms - self.start_ms == BUCKET_MS


DownTime = tuple[tuple[int, int, int], ...]
"""(gpu, start_ms, end_ms) of every GPU that was down in a stretch."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a stretch holds. by_ref: of held time, by the queue_ref of the holders' pods ("": none)."""

    all: Figures
    by_ref: Mapping[str, Figures]


def plus(figures: Iterable[Figures]) -> Figures:
    """The sum; of nothing, zero."""
    return Figures(*(sum(column) for column in zip(*figures, strict=True)))


def measure(
    cursor: Cursor, spans: Sequence[TaggedSpan], stretches: Sequence[Stretch], half_life_s: int | None
) -> dict[int, dict[int, Figures]]:
    """By tag and payer. A span's tag is the index of the stretch it lies in. Exactly what the rows give."""
    found: dict[int, dict[int, Figures]] = defaultdict(dict)
    half_life_ms = None if half_life_s is None else half_life_s * MS_PER_SECOND
    for group in near(spans):
        rows = [(s.tag, s.gpu, s.start_ms, s.end_ms, stretches[s.tag].end_ms) for s in group]
        bounds = {"low": group[0].start_ms, "high": max(s.end_ms for s in group), "half_life_ms": half_life_ms}
        for tag, payer, *values in cursor.rows("decayed", bounds, incoming=columns.table(columns.STRETCH, rows)):
            # The same stretch may come in several groups: it has down time on many GPUs.
            found[tag][payer] = plus([found[tag].get(payer, Figures()), Figures(*values)])
        cut = [row[:4] for row in rows if row[2] % BUCKET_MS or row[3] % BUCKET_MS]
        if cut:
            # Only a span that ends inside a quarter-hour can have rows that reach over its edge.
            _add_straddlers(found, cursor, cut, stretches, half_life_s)
    return found


def _add_straddlers(
    found: dict[int, dict[int, Figures]],
    cursor: Cursor,
    spans: Sequence[tuple[int, int, int, int]],
    stretches: Sequence[Stretch],
    half_life_s: int | None,
) -> None:
    bounds = {"low": min(s[2] for s in spans) - BUCKET_MS, "high": max(s[3] for s in spans)}
    rows = cursor.rows("straddling", bounds, incoming=columns.table(columns.SPAN, spans))
    for (tag, since, until, _, _, start, end, _), group in groupby(rows, key=lambda row: row[:8]):
        members = list(group)
        begin, stop = max(start, since), min(end, until)
        weight = factor(begin, stop, stretches[tag].end_ms, half_life_s)
        parts = part([Cells(*row[10:]) for row in members], end - start, begin - start, stop - start)
        for row, cells in zip(members, parts, strict=True):
            payer = row[9]
            found[tag][payer] = plus([found[tag].get(payer, Figures()), _figures(cells, weight)])


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
        self._known: dict[int | None, dict[int, Found]] = defaultdict(dict)
        self._down: dict[int | None, dict[int, tuple[DownTime, Figures]]] = defaultdict(dict)
        self._refs: dict[tuple[str, str], str] = {}
        self._touched: dict[int, int] = {}
        self._all_touched = 0
        self._facts_touched = 0

    def forget(self, buckets: Iterable[int], facts: Iterable[tuple[str, PodFacts]], version: int) -> None:
        """The commit that makes `version` changed rows of these quarter-hours and brought these facts."""
        with self._lock:
            for bucket in buckets:
                self._touched[bucket] = version
                for known in self._known.values():
                    known.pop(bucket, None)
                for down in self._down.values():
                    down.pop(bucket, None)
            for cluster, fact in facts:
                # A reader of an older snapshot must not remember what the fact may have changed.
                self._facts_touched = version
                if self._refs.get((cluster, fact.uid), fact.queue_ref) != fact.queue_ref:
                    self._clear(version)

    def forget_all(self, version: int) -> None:
        with self._lock:
            self._clear(version)

    def _clear(self, version: int) -> None:
        self._all_touched = version
        self._known.clear()
        self._down.clear()
        self._refs.clear()

    def read(self, cursor: Cursor, version: int, stretches: Sequence[Stretch], half_life_s: int | None) -> list[Found]:
        """Figures of each stretch, as of the snapshot behind `cursor`, which is that of `version`."""
        with self._lock:
            known = self._known[half_life_s]
            ready = {
                tag: known[stretch.start_ms]
                for tag, stretch in enumerate(stretches)
                if stretch.start_ms in known and self._usable(stretch, version)
            }
        missing = [tag for tag in range(len(stretches)) if tag not in ready]
        if missing:
            fresh, refs = _fill(cursor, missing, stretches, half_life_s)
            ready |= fresh
            self._remember(
                version,
                {stretches[tag].start_ms: fresh[tag] for tag in missing if stretches[tag].whole},
                refs,
                half_life_s,
            )
        return [ready[tag] for tag in range(len(stretches))]

    def _remember(
        self, version: int, found: Mapping[int, Found], refs: Mapping[tuple[str, str], str], half_life_s: int | None
    ) -> None:
        with self._lock:
            if max(self._all_touched, self._facts_touched) > version:
                return
            self._refs |= refs
            for bucket, figures in found.items():
                if self._touched.get(bucket, 0) <= version:
                    self._known[half_life_s][bucket] = figures

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
                before = known.get(stretches[tag].start_ms)
                if before is not None and before[0] == key and self._usable(stretches[tag], version):
                    ready[tag] = before[1]
        missing = [tag for tag in wanted if tag not in ready]
        found = measure(cursor, [span for tag in missing for span in wanted[tag]], stretches, half_life_s)
        ready |= {tag: plus(found.get(tag, {}).values()) for tag in missing}
        with self._lock:
            for tag in missing:
                if self._usable(stretches[tag], version):
                    self._down[half_life_s][stretches[tag].start_ms] = (keys[tag], ready[tag])
        return ready

    def _usable(self, stretch: Stretch, version: int) -> bool:
        """Whether what is remembered of a stretch is what the snapshot of `version` shows."""
        fresh = self._touched.get(stretch.start_ms, 0) <= version and self._all_touched <= version
        return stretch.whole and fresh


def _fill(
    cursor: Cursor, missing: Sequence[int], stretches: Sequence[Stretch], half_life_s: int | None
) -> tuple[dict[int, Found], dict[tuple[str, str], str]]:
    """Figures of the missing stretches, and the queue_ref of every pod in them."""
    by_payer: dict[int, dict[int, Figures]] = {}
    rest = list(missing)
    if half_life_s is None:
        whole = [(tag, 0, stretches[tag].start_ms) for tag in missing if stretches[tag].whole]
        rest = [tag for tag in missing if not stretches[tag].whole]
        by_payer |= _undecayed(cursor, whole)
    by_payer |= measure(
        cursor,
        [TaggedSpan(tag, stretches[tag].start_ms, stretches[tag].end_ms) for tag in rest],
        stretches,
        half_life_s,
    )
    origins = _origins(cursor, {payer for found in by_payer.values() for payer in found if payer})
    ready = {}
    for tag in missing:
        found = by_payer.get(tag, {})
        by_ref: dict[str, list[Figures]] = defaultdict(list)
        for payer, figures in found.items():
            if payer:
                by_ref[origins[payer][1]].append(figures)
        ready[tag] = Found(plus(found.values()), {ref: plus(figures) for ref, figures in by_ref.items()})
    return ready, dict(origins.values())


def _undecayed(cursor: Cursor, whole: Sequence[tuple[int, int, int]]) -> dict[int, dict[int, Figures]]:
    found: dict[int, dict[int, Figures]] = defaultdict(dict)
    if whole:
        bounds = {"low": min(w[2] for w in whole), "high": max(w[2] for w in whole)}
        table = columns.table(columns.BUCKET, whole)
        for tag, payer, *values in cursor.rows("undecayed_quarters", bounds, incoming=table):
            found[tag][payer] = Figures(*values)
    return found


def _origins(cursor: Cursor, payers: Collection[int]) -> dict[int, tuple[tuple[str, str], str]]:
    """Per holder id: (cluster, uid) and the queue_ref of its pod."""
    if not payers:
        return {}
    rows = cursor.rows("holder_origins", incoming=columns.table(columns.ID, [(i,) for i in sorted(payers)]))
    return {number: ((cluster, uid), ref) for number, cluster, uid, ref in rows}
