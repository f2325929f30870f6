"""Reads and caches the sums from which usage windows are computed.

A window is split into `TimeSlice`s, each inside one quarter-hour. The sums of a slice (`Sums`) are grouped by place (a
cluster, or GPUs of one model with equal labels) and by the queue reference of the payer's pod.

Two kinds of sums are cached per `View`: those of whole quarter-hours, and those of quarter-hours by the spans of their
rows. A commit adds its rows to cached quarter-hours if it can. Otherwise it drops these quarter-hours. A reader uses
only entries that no commit after its own snapshot has changed.

Decayed sums are integers. Each row is decayed to the end of its quarter-hour and rounded there (see `window_decay`), so
the sums do not depend on the order in which rows arrived."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from accountant.core import gpu_time_accounts
from accountant.core.window_decay import factor, reference_ms
from accountant.storage.duckdb_engine import Cursor, Row, statement
from accountant.storage.query.usage_sums import straddling_parts
from accountant.storage.query.window_places_and_prices import Place
from accountant.storage.span_splitting import TaggedSpan, near
from accountant.storage.write import record_columns
from accountant.storage.write.interval_writer import AddedRows, BookedChanges
from gputally.base.units import BUCKET_MS, MS_PER_SECOND

MOST_LINES: Final = 1_000_000
"""Largest number of lines of sums in the cache, over all views. When it is full, the older half of the quarter-hours is
dropped."""
MOST_VIEWS: Final = 16
"""Largest number of views in the cache. It is limited because every commit updates each view. The least recently used
view is dropped first."""
_EXACT: Final = 2**62

Numbers = npt.NDArray[Any]
"""int64 arrays, or Python integers where values do not fit."""
N = TypeVar("N", bound=Hashable)


class Figures(NamedTuple):
    """GPU-microseconds and microjoules of a group. The first four are decayed, the rest not.

    `plain_blind` is working time without a known energy."""

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
class TimeSlice(TaggedSpan):
    """Time inside one quarter-hour, of one GPU or of all.

    reference_ms: the instant to which its usage is decayed.
    by_span: whether its rows are summed separately by their spans."""

    reference_ms: int = 0
    by_span: bool = False

    @property
    def bucket(self) -> int:
        """The start of the quarter-hour."""
        return self.start_ms - self.start_ms % BUCKET_MS

    @property
    def whole(self) -> bool:
        """Whether the slice is the entire quarter-hour."""
        return self.end_ms - self.start_ms == BUCKET_MS


class Numbering(Generic[N]):
    """Assigns numbers to names in the order in which they are first used. A number never changes. Thread-safe."""

    def __init__(self, *names: N) -> None:
        self.names: list[N] = list(names)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._lock = threading.Lock()

    def __getitem__(self, name: N) -> int:
        with self._lock:
            number = self._numbers.setdefault(name, len(self.names))
            if number == len(self.names):
                self.names.append(name)
            return number


NO_PAYER: Final = 0
"""The queue number of time without a payer."""


class Sums(NamedTuple):
    """Sums as two arrays with one row per group.

    keys: (n, 4): start_ms, end_ms, place, queue. Start and end are 0 if spans are not distinguished.
    values: (n, 9): the columns of `Figures`."""

    keys: npt.NDArray[np.int64]
    values: Numbers

    def of(self, lines: npt.NDArray[np.bool_]) -> Sums:
        return Sums(self.keys[lines], self.values[lines])


NO_SUMS: Final = Sums(np.zeros((0, 4), np.int64), np.zeros((0, len(Figures._fields)), np.int64))


def added_up(parts: Sequence[Sums]) -> Sums:
    """Add sums exactly for equal keys."""
    if not parts:
        return NO_SUMS
    keys = np.concatenate([one.keys for one in parts])
    values = exact(np.concatenate([one.values for one in parts]))
    return Sums(*gpu_time_accounts.merged(keys, values))


def exact(values: Numbers) -> Numbers:
    """Return the same numbers as a type in which adding them cannot overflow."""
    if values.dtype != object and int(values.max(initial=0)) * len(values) >= _EXACT:
        return values.astype(object)
    return values


def without_spans(sums: Sums) -> Sums:
    keys = sums.keys.copy()
    keys[:, :2] = 0
    return added_up([Sums(keys, sums.values)])


Form = Literal["whole", "by_span"] | tuple[tuple[int, int, int], ...]
"""The kind of cached sums of a quarter-hour: all rows, all rows by their spans, or the rows inside the down time of
GPUs. The last is given as (gpu, start_ms, end_ms) of each down time."""


class View(NamedTuple):
    """Identifies a set of cached sums.

    half_life_s: None without decay.
    placing: determines the places; None if they depend on the cluster only."""

    half_life_s: int | None
    placing: Hashable = None

    @property
    def steady(self) -> bool:
        """Whether the decayed sum of a row is the same wherever a slice begins or ends within its quarter-hour."""
        return reference_ms(0, 1, self.half_life_s) == BUCKET_MS


Buckets = Mapping[int, Mapping[Form, Sums]]
"""Sums by the start of the quarter-hour."""


class SumsCache:
    """Caches sums of quarter-hours by view. Thread-safe.

    places, queues: the names behind the numbers in keys. A queue is the queue reference of a pod."""

    def __init__(self) -> None:
        self.places: Numbering[Place] = Numbering()
        self.queues: Numbering[str | None] = Numbering(None)
        self._lock = threading.Lock()
        self._known: OrderedDict[View, dict[int, Mapping[Form, Sums]]] = OrderedDict()
        self._touched: dict[int, int] = {}
        self._cleared = 0

    def cached(self, view: View, version: int) -> Buckets:
        """Return the cached sums of a view that are valid for the snapshot of `version`."""
        with self._lock:
            known = self._known.setdefault(view, {})
            self._known.move_to_end(view)
            while len(self._known) > MOST_VIEWS:
                self._known.popitem(last=False)
            if self._cleared > version:
                return {}
            return {bucket: parts for bucket, parts in known.items() if self._touched.get(bucket, 0) <= version}

    def remember(self, view: View, version: int, found: Iterable[tuple[int, Form, Sums]]) -> None:
        """Cache sums read from the snapshot of `version`, unless a later commit changed them."""
        with self._lock:
            known = self._known.get(view)
            if known is None or self._cleared > version:
                return
            for bucket, form, sums in found:
                if self._touched.get(bucket, 0) <= version:
                    known[bucket] = {**known.get(bucket, {}), form: sums}
            tables = (sums for of in self._known.values() for forms in of.values() for sums in forms.values())
            if sum(len(sums.keys) for sums in tables) > MOST_LINES:
                for of in self._known.values():
                    for old in sorted(of)[: (len(of) + 1) // 2]:
                        del of[old]

    def additions(self, booked: BookedChanges) -> Mapping[tuple[View, int], Sums]:
        """Return the sums that a commit adds to cached quarter-hours.

        They are computed before the commit, while readers continue."""
        with self._lock:
            wanted = [
                (view, bucket)
                for view, known in self._known.items()
                if view.placing is None
                for bucket in booked.added
                if bucket in known or bucket in booked.fresh
            ]
        return {(view, bucket): self._added(booked.added[bucket](), bucket, view) for view, bucket in wanted}

    def _added(self, added: AddedRows, bucket: int, view: View) -> Sums:
        """Return the sums of the rows that are added to a quarter-hour."""
        spans = list(zip(added.start_ms.tolist(), added.end_ms.tolist(), strict=True))
        reference = bucket + BUCKET_MS
        weight_of = {span: factor(*span, reference, view.half_life_s) for span in set(spans)}
        values = gpu_time_accounts.figures(added.cells, [weight_of[span] for span in spans])
        places = np.array([self.places[Place(cluster)] for cluster in added.cluster.values], np.int64)
        queues = np.array([self.queues[queue] for queue in added.queue.values], np.int64)
        queue = np.where(added.paid, queues[added.queue.of_row], NO_PAYER)
        keys = np.stack([added.start_ms, added.end_ms, places[added.cluster.of_row], queue], axis=1)
        return added_up([Sums(keys, values)])

    def take(self, booked: BookedChanges, additions: Mapping[tuple[View, int], Sums], version: int) -> None:
        """Update the cache for the commit that creates `version`: add its additions and drop other changed
        quarter-hours."""
        with self._lock:
            if booked.requeued:
                self._clear(version)
            for bucket in booked.touched:
                self._touched[bucket] = version
                for view, known in self._known.items():
                    before = known.pop(bucket, None)
                    if bucket in booked.fresh and before is None and not booked.requeued:
                        before = {"by_span": NO_SUMS}
                    sums = additions.get((view, bucket))
                    if before is not None and sums is not None:
                        known[bucket] = _grown(before, sums)

    def forget_all(self, version: int) -> None:
        """Drop everything that was cached before the commit that creates `version`."""
        with self._lock:
            self._clear(version)

    def _clear(self, version: int) -> None:
        self._cleared = version
        for known in self._known.values():
            known.clear()


def _grown(before: Mapping[Form, Sums], sums: Sums) -> Mapping[Form, Sums]:
    """Return a quarter-hour after an addition. Its sums inside down time are dropped and must be read again."""
    added: dict[Form, Sums] = {"by_span": sums, "whole": without_spans(sums)}
    return {form: added_up([before[form], more]) for form, more in added.items() if form in before}


class Reader:
    """Reads sums from the snapshot of `cursor`. places: the number of every device's place."""

    def __init__(
        self, cursor: Cursor, half_life_s: int | None, queues: Numbering[str | None], places: Mapping[int, int]
    ) -> None:
        self._cursor = cursor
        self._half_life_s = half_life_s
        self._queues = queues
        self._places = places
        self._kinds = record_columns.column_table(record_columns.KIND, places.items())

    def folded(self, buckets: Collection[int]) -> dict[int, Sums]:
        """Return the sums of whole quarter-hours of folded hours, by their starts, without decay."""
        span = {"low": min(buckets), "high": max(buckets) + BUCKET_MS}
        table = record_columns.column_table(record_columns.HOUR, [(at,) for at in buckets])
        return self._run(statement("window_quarters", origins=_origins()), span, table)

    def rows(self, asked: Sequence[TimeSlice]) -> dict[int, Sums]:
        """Return the sums of rows inside the spans, by tag.

        They include the parts of rows that reach over an edge of the span. No row reaches over the edges of a whole
        quarter-hour."""
        found: dict[int, list[Sums]] = defaultdict(list)
        sql = statement("window_rows", weight=statement("weight"), origins=_origins())
        half_life_ms = None if self._half_life_s is None else self._half_life_s * MS_PER_SECOND
        for here in near(asked):
            low, high = min(one.start_ms for one in here), max(one.end_ms for one in here)
            rows = [
                (n, one.gpu, one.start_ms, one.end_ms, one.reference_ms, int(one.by_span)) for n, one in enumerate(here)
            ]
            table = record_columns.column_table(record_columns.WINDOW_SPAN, rows)
            sums_of = self._run(sql, {"low": low, "high": high, "half_life_ms": half_life_ms}, table)
            for number, sums in sums_of.items():
                found[here[number].tag].append(sums)
        for tag, sums in self.straddling([one for one in asked if not one.whole]).items():
            found[tag].append(sums)
        return {tag: added_up(several) for tag, several in found.items()}

    def straddling(self, asked: Sequence[TimeSlice]) -> dict[int, Sums]:
        """Return the parts inside a span of rows that reach over its edge, by tag. A set of rows is cut as a whole."""
        numbered = [TaggedSpan(number, one.start_ms, one.end_ms, one.gpu) for number, one in enumerate(asked)]
        parts = [one for here in near(numbered) for one in straddling_parts(self._cursor, here)]
        if not parts:
            return {}
        origins = self._origins({one.payer for one in parts})
        keys = [(0, 0, self._places[one.device], self._queues[origins.get(one.payer)]) for one in parts]
        weights = [factor(one.start_ms, one.end_ms, asked[one.tag].reference_ms, self._half_life_s) for one in parts]
        values = gpu_time_accounts.figures(np.array([one.cells for one in parts], np.int64), weights)
        tags = np.array([asked[one.tag].tag for one in parts])
        sums = Sums(np.array(keys, np.int64), values)
        return {tag: added_up([sums.of(tags == tag)]) for tag in set(tags.tolist())}

    def _origins(self, payers: Collection[int]) -> dict[int, str | None]:
        table = record_columns.column_table(record_columns.ID, [(payer,) for payer in sorted(payers)])
        return dict(self._cursor.run(statement("holder_origins", payers="SELECT id FROM incoming"), None, table))

    def _run(self, sql: str, bounds: Mapping[str, int | None], incoming: Any) -> dict[int, Sums]:
        found: dict[int, list[Row]] = defaultdict(list)
        for tag, start, end, place, queue, *values in self._cursor.run(sql, bounds, incoming, None, self._kinds):
            found[tag].append((start, end, place, self._queues[queue], *values))
        return {tag: _table(rows) for tag, rows in found.items()}


def _origins() -> str:
    return statement("holder_origins", payers=statement("payers"))


def _table(rows: Sequence[Row]) -> Sums:
    """Return sums from rows of keys and values. The values may exceed 64 bits."""
    whole = np.array(rows, dtype=object)
    values = whole[:, 4:]
    with suppress(OverflowError):
        values = values.astype(np.int64)
    return added_up([Sums(whole[:, :4].astype(np.int64), values)])
