"""Usage inside stretches of a window, decayed to the end of each.

A stretch lies inside one quarter-hour. What a window needs of whole ones is remembered per half-life, by the
queue_ref of the pods. A commit says which ones it touched, which pods it brought facts of, and what it only
added to: that is added here too, term by term as the engine would, so the quarter-hours a window gains as
time goes on are never asked for. A reader uses and fills only what no commit after its own snapshot touched.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from accountant.accounts import Cells, add, part
from accountant.store import columns
from accountant.store.booking import Added, Booked
from accountant.store.database import Cursor
from accountant.store.spans import TaggedSpan, near
from accountant.store.state import State
from accountant.windows import factor, term
from agent.units import BUCKET_MS, MS_PER_HOUR, MS_PER_SECOND


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


class Stretch(NamedTuple):
    """Time inside one quarter-hour; usage in it is decayed to its end."""

    start_ms: int
    end_ms: int

    @property
    def whole(self) -> bool:
        return self.end_ms - self.start_ms == BUCKET_MS


MOST_FIGURES = 400_000
"""Remembered at once, over all quarter-hours, half-lives and queues: some hundred MB. The oldest half goes first."""
DownTime = tuple[tuple[int, int, int], ...]
"""(gpu, start_ms, end_ms) of every GPU that was down in a stretch."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a stretch holds. by_ref: of held time, by the queue_ref of the holders' pods ("": none)."""

    all: Figures
    by_ref: Mapping[str, Figures]

    def plus(self, rows: Iterable[Added], reference_ms: int, half_life_s: int | None) -> Found:
        """With rows that came to it; usage is decayed to `reference_ms`."""
        cells: dict[tuple[str | None, int, int], list[Cells]] = defaultdict(list)
        for pod, queue_ref, start, end, held in rows:
            cells[None if pod is None else queue_ref, start, end].append(held)
        fresh: dict[str | None, Figures] = {}
        for (ref, start, end), alike in cells.items():
            if half_life_s is None:
                came = _figures(add(alike), 1.0)
            else:
                weight = factor(start, end, reference_ms, half_life_s)
                came = plus(_figures(held, weight) for held in alike)
            fresh[ref] = plus([fresh[ref], came]) if ref in fresh else came
        of_holders = {ref: figures for ref, figures in fresh.items() if ref is not None}
        return Found(
            plus([self.all, *fresh.values()]),
            {**self.by_ref, **{ref: plus([self.by_ref.get(ref, Figures()), f]) for ref, f in of_holders.items()}},
        )


NOTHING = Found(Figures(), {})


def plus(figures: Iterable[Figures]) -> Figures:
    """The sum; of nothing, zero."""
    return Figures(*map(sum, zip(*figures, strict=True)))


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

    def __init__(self, most_figures: int = MOST_FIGURES) -> None:
        self._most_figures = most_figures
        self._lock = threading.Lock()
        self._known: dict[int | None, dict[int, Found]] = defaultdict(dict)
        self._down: dict[int | None, dict[int, tuple[DownTime, Figures]]] = defaultdict(dict)
        self._figures = 0
        self._refs: dict[tuple[str, str], str] = {}
        """Of every pod that anything remembered depends on."""
        self._touched: dict[int, int] = {}
        self._all_touched = 0
        self._facts_touched = 0

    def take(self, booked: Booked, version: int) -> None:
        """The commit that makes `version` brought this. What it only added to is brought up to date."""
        with self._lock:
            for cluster, fact in booked.pods:
                # A reader of an older snapshot must not remember what the fact may have changed.
                self._facts_touched = version
                if self._refs.get((cluster, fact.uid), fact.queue_ref) != fact.queue_ref:
                    self._clear(version)
            for bucket in booked.touched:
                self._touched[bucket] = version
                for down in self._down.values():
                    down.pop(bucket, None)
                added = booked.added.get(bucket)
                for half_life_s, known in self._known.items():
                    before = known.pop(bucket, NOTHING if bucket in booked.fresh else None)
                    if before is None:
                        continue
                    self._figures -= len(before.by_ref)
                    if added is not None:
                        self._keep(half_life_s, bucket, before.plus(added, bucket + BUCKET_MS, half_life_s))
                        self._refs |= {row.pod: row.queue_ref for row in added if row.pod is not None}

    def forget_all(self, version: int) -> None:
        with self._lock:
            self._clear(version)

    def _clear(self, version: int) -> None:
        self._all_touched = version
        for known in self._known.values():
            known.clear()
        self._down.clear()
        self._refs.clear()
        self._figures = 0

    def _keep(self, half_life_s: int | None, bucket: int, found: Found) -> None:
        """Remember; where that becomes too much, the older half goes."""
        self._known[half_life_s][bucket] = found
        self._figures += len(found.by_ref)
        if self._figures > self._most_figures:
            self._figures = 0
            for known in self._known.values():
                for old in sorted(known)[: (len(known) + 1) // 2]:
                    del known[old]
                self._figures += sum(len(kept.by_ref) for kept in known.values())

    def read(
        self, cursor: Cursor | None, state: State, stretches: Sequence[Stretch], half_life_s: int | None
    ) -> list[Found] | None:
        """Figures of each stretch, as of the snapshot behind `cursor`, which is that of `state`. cursor None:
        None where not all of it is remembered."""
        version = state.version
        with self._lock:
            known, touched = self._known[half_life_s], self._touched
            fresh_enough = self._all_touched <= version
            ready = {
                tag: known[start]
                for tag, (start, end) in enumerate(stretches)
                if start in known and fresh_enough and end - start == BUCKET_MS and touched.get(start, 0) <= version
            }
        missing = [tag for tag in range(len(stretches)) if tag not in ready] if len(ready) < len(stretches) else []
        if missing:
            if cursor is None:
                return None
            fresh, refs = _fill(cursor, state.unfolded, missing, stretches, half_life_s)
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
                if self._touched.get(bucket, 0) <= version and bucket not in self._known[half_life_s]:
                    self._keep(half_life_s, bucket, figures)

    def down(
        self,
        cursor: Cursor | None,
        version: int,
        spans: Sequence[TaggedSpan],
        stretches: Sequence[Stretch],
        half_life_s: int | None,
    ) -> dict[int, Figures] | None:
        """What the rows hold inside down time, by stretch. cursor None: see `read`.

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
        if not missing:
            return ready
        if cursor is None:
            return None
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
    cursor: Cursor,
    unfolded: Collection[int],
    missing: Sequence[int],
    stretches: Sequence[Stretch],
    half_life_s: int | None,
) -> tuple[dict[int, Found], dict[tuple[str, str], str]]:
    """Figures of the missing stretches, and the queue_ref of every pod in them."""
    by_payer: dict[int, dict[int, Figures]] = {}
    rest = list(missing)
    if half_life_s is None:
        # Sums of folded hours are at hand; everything else is told by the rows.
        rest = [tag for tag in missing if not stretches[tag].whole or _hour(stretches[tag]) in unfolded]
        by_payer |= _undecayed(cursor, [(tag, 0, stretches[tag].start_ms) for tag in missing if tag not in set(rest)])
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


def _hour(stretch: Stretch) -> int:
    return stretch.start_ms - stretch.start_ms % MS_PER_HOUR


def _undecayed(cursor: Cursor, whole: Sequence[tuple[int, int, int]]) -> dict[int, dict[int, Figures]]:
    found: dict[int, dict[int, Figures]] = defaultdict(dict)
    if whole:
        bounds = {"low": min(w[2] for w in whole), "high": max(w[2] for w in whole)}
        table = columns.table(columns.BUCKET, whole)
        for tag, payer, *values in cursor.rows("sum_folded", bounds, incoming=table):
            found[tag][payer] = Figures(*values)
    return found


def _origins(cursor: Cursor, payers: Collection[int]) -> dict[int, tuple[tuple[str, str], str]]:
    """Per holder id: (cluster, uid) and the queue_ref of its pod."""
    if not payers:
        return {}
    rows = cursor.rows("holder_origins", incoming=columns.table(columns.ID, [(i,) for i in sorted(payers)]))
    return {number: ((cluster, uid), ref) for number, cluster, uid, ref in rows}
