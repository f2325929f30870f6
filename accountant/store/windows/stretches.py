"""Usage inside stretches of a window, decayed to the end of each quarter-hour.

A stretch lies inside one quarter-hour. What a window needs of whole ones is remembered per half-life and
cluster (`accountant.store.windows.views`), by the queue_ref of the pods; those it begins and ends in are remembered
span by span (`accountant.store.windows.grains`). A commit says which ones it touched, which pods it brought facts of,
and what it only added to: that is added here too, term by term as the engine would, so what a window gains as time
goes on is never asked for. A reader uses only what no commit after its own snapshot touched. What it reads itself is
remembered with what came meanwhile (`accountant.store.windows.meanwhile`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce

from accountant.store.database import Cursor
from accountant.store.spans import EVERY_GPU, TaggedSpan
from accountant.store.state import State
from accountant.store.windows.figures import NOTHING, Figures, Found, plus
from accountant.store.windows.filling import fill, read_grain
from accountant.store.windows.grains import Coming, Grain, Grains, Key, Span, grown, total, within
from accountant.store.windows.meanwhile import Reading
from accountant.store.windows.measuring import (
    Stretch,
    add_straddlers,
    assigned,
    measure,
)
from accountant.store.windows.quarterly import WhoseUsage
from accountant.store.windows.soon import Soon
from accountant.store.windows.views import View
from accountant.store.windows.whose import Whose
from accountant.store.writing.booking import Booked
from accountant.store.writing.origins import PodKey
from accountant.windows import reference_ms
from agent.units import BUCKET_MS

MOST_FIGURES = 400_000
"""Remembered at once, over all quarter-hours, half-lives and queues: some hundred MB. The oldest half goes first."""
MOST_HALF_LIVES = 16
"""Of one cluster, and of all together, for which anything is remembered: every commit is decayed for each. The one
asked for longest ago goes first."""
_EVERY_VERSION = 2**62
Parts = Sequence[tuple[Span, Found]]
"""Of one stretch: itself, or the spans inside it, which are to be added up."""
DownTime = tuple[tuple[int, int, int], ...]
"""(gpu, start_ms, end_ms) of every GPU that was down in a stretch."""


class StretchCache:
    """Whole quarter-hours by view. Thread-safe."""

    def __init__(self, most_figures: int = MOST_FIGURES) -> None:
        self._most_figures = most_figures
        self._lock = threading.Lock()
        self._known: OrderedDict[View, dict[int, Found]] = OrderedDict()
        self._down: dict[View, dict[int, tuple[DownTime, Figures]]] = defaultdict(dict)
        self._figures = 0
        self._grains = Grains()
        self._whose = Whose()
        self._readings: list[Reading] = []
        self._refs: dict[PodKey, str] = {}
        """Of every pod that anything remembered depends on."""
        self._soon = Soon()
        self._touched: dict[int, int] = {}
        self._all_touched = 0
        self._last_touched = 0

    def coming(self, booked: Booked) -> Coming:
        """What `take` will want of a commit, worked out before any lock is held: readers go on meanwhile."""
        found = Coming(booked)
        with self._lock:
            wanted = [
                (view, bucket)
                for bucket in booked.touched
                if found.holds(bucket)
                for view in self._views()
                if self._wants(view, bucket, fresh=bucket in booked.fresh)
            ]
        for view, bucket in wanted:
            found.grain(view, bucket)
        return found

    def take(self, booked: Booked, coming: Coming, version: int) -> None:
        """The commit that makes `version` brought this. What it only added to is brought up to date."""
        if booked.pods:
            self._whose.forget(version)
        with self._lock:
            for cluster, fact in booked.pods:
                pod = (cluster, fact.uid)
                if self._refs.get(pod, fact.queue_ref) != fact.queue_ref:
                    self._clear(version)
                for reading in self._readings:
                    reading.tell(version, pod, fact.queue_ref)
            if booked.touched:
                self._last_touched = version
            views = self._views()
            for bucket in booked.touched:
                self._touched[bucket] = version
                for down in self._down.values():
                    down.pop(bucket, None)
                for view in views:
                    self._take(version, bucket, view, coming, fresh=bucket in booked.fresh)

    def _views(self) -> set[View]:
        return set(self._known)

    def _of(self, view: View) -> dict[int, Found]:
        """What is remembered for a view that is asked for."""
        found = self._known.setdefault(view, {})
        self._known.move_to_end(view)
        alike = [known for known in self._known if known.cluster == view.cluster]
        for oldest in alike[:-MOST_HALF_LIVES]:
            gone = self._known.pop(oldest)
            self._figures -= sum(len(kept.by_ref) for kept in gone.values())
            self._down.pop(oldest, None)
            self._grains.forget(oldest)
            for reading in self._readings:
                if reading.view == oldest:
                    reading.forget(_EVERY_VERSION)
        return found

    def _wants(self, view: View, bucket: int, *, fresh: bool) -> bool:
        """Whether what comes to a quarter-hour is to be added: it is remembered, or being read, or begins."""
        if fresh or bucket in self._known[view] or self._grains.has(view, bucket):
            return True
        return any(reading.wants(view, bucket) for reading in self._readings)

    def _take(self, version: int, bucket: int, view: View, coming: Coming, *, fresh: bool) -> None:
        wanted = self._wants(view, bucket, fresh=fresh)
        before = self._known[view].pop(bucket, NOTHING if fresh else None)
        grain = self._grains.get(view, bucket)
        if grain is None and fresh and _steady(view.half_life_s):
            grain = {}
        self._figures -= len(before.by_ref) if before is not None else 0
        self._grains.drop(view, bucket)
        brought = coming.grain(view, bucket) if wanted and coming.holds(bucket) else None
        for reading in self._readings:
            if reading.wants(view, bucket):
                reading.take(version, bucket, brought)
        if brought is None:
            if before is not None:
                self._expect(view, bucket)
            return
        if before is not None:
            self._keep(view, bucket, total([before, *brought.values()]))
        if grain is not None:
            self._grains.put(view, bucket, grown(grain, brought))
        self._refs |= coming.pods(bucket)

    def forget_all(self, version: int) -> None:
        self._whose.forget(version)
        with self._lock:
            self._clear(version)

    def _clear(self, version: int) -> None:
        self._all_touched = version
        for known in self._known.values():
            known.clear()
        self._down.clear()
        self._grains.clear()
        self._soon.clear()
        self._refs.clear()
        self._figures = 0
        for reading in self._readings:
            reading.forget(version)

    @contextmanager
    def reading(self, view: View, start_ms: int, end_ms: int) -> Iterator[Reading]:
        """For whoever may have to ask the tables: begin before the snapshot is pinned."""
        begun = Reading(view, start_ms, end_ms)
        with self._lock:
            self._of(view)
            self._readings.append(begun)
        try:
            yield begun
        finally:
            with self._lock:
                self._readings.remove(begun)

    def _expect(self, view: View, bucket: int) -> None:
        if _steady(view.half_life_s) and not self._grains.has(view, bucket):
            self._soon.expect((view, bucket), self._touched.get(bucket, 0))

    def soon(self) -> list[Key]:
        """Quarter-hours to `look_into` before somebody has to wait for them. Told once."""
        with self._lock:
            told = self._soon.tell()
            return [key for key in told if key[0] in self._known and not self._grains.has(*key)]

    def look_into(self, cursor: Cursor, version: int, bucket: int, reading: Reading) -> None:
        """Remember a quarter-hour, span by span and whole, as of the snapshot behind `cursor`."""
        grain, refs = read_grain(cursor, self._in(cursor, version), bucket, reading.view)
        self._learn(reading, version, bucket, grain, refs)
        self._remember(reading, version, {bucket: total(grain.values())}, refs)

    def _learn(self, reading: Reading, version: int, bucket: int, grain: Grain, refs: Mapping[PodKey, str]) -> None:
        with self._lock:
            later = reading.since(version, bucket)
            if later is not None and not reading.contradicts(version, refs):
                self._refs |= refs
                self._grains.put(reading.view, bucket, reduce(grown, later, grain))

    def _keep(self, view: View, bucket: int, found: Found) -> None:
        """Remember; where that becomes too much, the older half goes."""
        self._known[view][bucket] = found
        self._figures += len(found.by_ref)
        if self._figures > self._most_figures:
            self._figures = 0
            for known in self._known.values():
                for old in sorted(known)[: (len(known) + 1) // 2]:
                    del known[old]
                self._figures += sum(len(kept.by_ref) for kept in known.values())

    def read(
        self,
        cursor: Cursor | None,
        state: State,
        stretches: Sequence[Stretch],
        view: View,
        reading: Reading | None = None,
    ) -> list[Parts] | None:
        """What makes up each stretch, as of the snapshot behind `cursor`, which is that of `state`. cursor None:
        None where not all of it is remembered. reading: without one, or of another view, nothing more is."""
        reading = reading if reading is not None and reading.view == view else None
        version, newest_ms = state.version, state.fleet.newest_end_ms
        with self._lock:
            known = self._of(view)
            if self._all_touched > version:
                known = {}
            if version < self._last_touched:  # of an older snapshot than what is remembered
                known = {start: found for start, found in known.items() if self._touched.get(start, 0) <= version}
            ready: dict[int, Parts] = {
                tag: [(stretch, known[stretch[0]])]
                for tag, stretch in enumerate(stretches)
                if stretch[0] in known and stretch[1] - stretch[0] == BUCKET_MS
            }
            if stretches:
                # A window slides: soon it begins inside the quarter-hour it begins with now, then inside the next.
                self._expect(view, stretches[0].bucket)
                self._expect(view, stretches[0].bucket + BUCKET_MS)
            for tag in {0, len(stretches) - 1} - ready.keys():
                grain = self._grain(stretches[tag], version, view)
                if grain is not None:
                    inside, over = within(grain, *stretches[tag])
                    if not over:
                        ready[tag] = inside
        missing = [tag for tag in range(len(stretches)) if tag not in ready] if len(ready) < len(stretches) else []
        ready |= {tag: () for tag in missing if stretches[tag].bucket >= newest_ms}  # nothing is booked there yet
        missing = [tag for tag in missing if tag not in ready]
        if missing:
            if cursor is None:
                return None
            parts = [tag for tag in missing if not stretches[tag].whole and _steady(view.half_life_s)]
            for tag in parts:
                ready[tag] = self._part(cursor, version, stretches, tag, view, reading)
            missing = [tag for tag in missing if tag not in ready]
        if missing:
            assert cursor is not None
            fresh, refs = fill(cursor, self._in(cursor, version), state.unfolded, missing, stretches, view)
            whole = {stretches[tag].start_ms: fresh[tag] for tag in missing if stretches[tag].whole}
            self._remember(reading, version, whole, refs)
            ready |= {tag: [(stretches[tag], found)] for tag, found in fresh.items()}
        return [ready[tag] for tag in range(len(stretches))]

    def _grain(self, stretch: Stretch, version: int, view: View) -> Grain | None:
        """Of the quarter-hour that the stretch is a part of, if it is as the snapshot of `version` shows it."""
        usable = max(self._touched.get(stretch.bucket, 0), self._all_touched) <= version
        return self._grains.get(view, stretch.bucket) if usable and _steady(view.half_life_s) else None

    def _part(
        self,
        cursor: Cursor,
        version: int,
        stretches: Sequence[Stretch],
        tag: int,
        view: View,
        reading: Reading | None,
    ) -> Parts:
        """Of a stretch that is not whole; its quarter-hour is remembered span by span."""
        stretch = stretches[tag]
        with self._lock:
            grain = self._grain(stretch, version, view)
        if grain is None:
            grain, refs = read_grain(cursor, self._in(cursor, version), stretch.bucket, view)
            if reading is not None:
                self._learn(reading, version, stretch.bucket, grain, refs)
        inside, over = within(grain, *stretch)
        if not over:
            return inside
        cut: dict[int, dict[int, Figures]] = defaultdict(dict)
        add_straddlers(cut, cursor, [(tag, EVERY_GPU, *stretch)], stretches, view)
        over_edges = assigned(cut[tag], self._whose.of(cursor, version, cut[tag]))
        return [(stretch, total([*(found for _, found in inside), over_edges]))]

    def _in(self, cursor: Cursor, version: int) -> WhoseUsage:
        return partial(self._whose.of, cursor, version)

    def _remember(
        self, reading: Reading | None, version: int, found: Mapping[int, Found], refs: Mapping[PodKey, str]
    ) -> None:
        with self._lock:
            if reading is None or reading.contradicts(version, refs):
                return
            self._refs |= refs
            for bucket, figures in found.items():
                later = reading.since(version, bucket)
                if later is not None and bucket not in self._known[reading.view]:
                    whole = (
                        total([figures, *(part for grain in later for part in grain.values())]) if later else figures
                    )
                    self._keep(reading.view, bucket, whole)

    def down(
        self,
        cursor: Cursor | None,
        version: int,
        spans: Sequence[TaggedSpan],
        stretches: Sequence[Stretch],
        view: View,
    ) -> dict[int, Figures] | None:
        """What the rows hold inside down time, by stretch. cursor None: see `read`.

        Remembered for whole stretches as long as neither their rows nor their down time change."""
        wanted: dict[int, list[TaggedSpan]] = defaultdict(list)
        for span in spans:
            wanted[span.tag].append(span)
        keys = {tag: tuple((span.gpu, span.start_ms, span.end_ms) for span in mine) for tag, mine in wanted.items()}
        ready: dict[int, Figures] = {}
        with self._lock:
            known = self._down[view]
            for tag, key in keys.items():
                before = known.get(stretches[tag].start_ms)
                if before is not None and before[0] == key and self._usable(stretches[tag], version):
                    ready[tag] = before[1]
        missing = [tag for tag in wanted if tag not in ready]
        if not missing:
            return ready
        if cursor is None:
            return None
        found = measure(cursor, [span for tag in missing for span in wanted[tag]], stretches, view)
        ready |= {tag: plus(found.get(tag, {}).values()) for tag in missing}
        with self._lock:
            for tag in missing:
                if self._usable(stretches[tag], version):
                    self._down[view][stretches[tag].start_ms] = (keys[tag], ready[tag])
        return ready

    def _usable(self, stretch: Stretch, version: int) -> bool:
        """Whether what is remembered of a stretch is what the snapshot of `version` shows."""
        fresh = self._touched.get(stretch.start_ms, 0) <= version and self._all_touched <= version
        return stretch.whole and fresh


def _steady(half_life_s: int | None) -> bool:
    """Whether the terms of a row are the same wherever in its quarter-hour a window begins or ends."""
    return reference_ms(0, 1, half_life_s) == BUCKET_MS
