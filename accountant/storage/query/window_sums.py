"""Reads and caches the sums from which usage windows are computed.

A window consists of `TimeSlice`s, each inside one quarter-hour. The sums of a slice (`Sums`) are grouped by `GpuGroup`
and by the queue reference of the payer's pod.

For a quarter-hour the cache can hold the totals of the groups, the same sums split by the start and end of the rows,
and the sums inside the down time of GPUs. The split sums serve slices that begin or end inside the quarter-hour; rows
that cross the edge of such a slice are read from the ledger. A commit adds its rows to cached quarter-hours if it can,
and otherwise removes these quarter-hours. A reader uses only entries that no commit after its own snapshot has changed.

Decayed sums are integers. Each row is decayed to the end of its quarter-hour and rounded there (see `window_decay`), so
the sums do not depend on the order in which rows arrived."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from accountant.core.claim_overlap import Span
from accountant.core.gpu_time_accounts import CELLS, sum_by_key
from accountant.core.periods import next_quarter
from accountant.core.window_decay import factor, reference_ms
from accountant.storage.duckdb_engine import Cursor, Row, statement
from accountant.storage.gpu_lifetimes import down_in
from accountant.storage.ledger_state import State
from accountant.storage.query.gpu_weights import GpuGroup, GpuGroups
from accountant.storage.query.usage_sums import straddling_parts
from accountant.storage.span_splitting import EVERY_GPU, TaggedSpan, near
from accountant.storage.write import record_columns
from accountant.storage.write.interval_writer import AddedRows, BookedChanges
from accountant.storage.write.record_columns import Numbering
from gputally.base.units import BUCKET_MS, MS_PER_HOUR

MOST_LINES: Final = 1_000_000
"""Largest number of lines of sums in the cache. When it is full, the older half of the quarter-hours is removed."""
MOST_KEYS: Final = 16
"""Largest number of keys in the cache, because every commit updates the sums of each key. The least recently used key
is removed first."""
MOST_PAYERS: Final = 100_000
"""Number of payers at which the cache of their queues begins anew."""
_EXACT: Final = 2**62

Integers = npt.NDArray[Any]
"""An int64 array, or an array of Python integers if the values do not fit."""


class Figures(NamedTuple):
    """GPU-microseconds and microjoules of a group. The first four are decayed, the rest not.

    `plain_blind` is time in service without a known energy."""

    allocated: int
    busy: int
    energy: int
    lost: int
    plain_allocated: int
    plain_unheld: int
    plain_lost: int
    plain_unknown: int
    plain_blind: int


def figures(cells: npt.NDArray[np.int64], weights: Sequence[float]) -> Integers:
    """The columns of `Figures` for each row of `cells`, an array of `AccountVector`s.

    The first four columns are multiplied by the row's decay weight and rounded, as accountant.core.window_decay.term
    does for one value."""
    cell = dict(zip(CELLS, cells.T, strict=True))
    allocated = cell["busy_us"] + cell["idle_us"] + cell["unknown_us"]
    decaying = np.stack([allocated, cell["busy_us"], cell["energy_uj"], cell["down_us"]], axis=1)
    plain = [allocated, cell["unheld_us"], cell["down_us"], cell["unknown_us"], cell["energy_blind_us"]]
    decayed = np.floor(decaying * np.asarray(weights)[:, None] + 0.5).astype(np.int64)
    return np.column_stack([decayed, *plain])


@dataclass(frozen=True, slots=True)
class TimeSlice(TaggedSpan):
    """Time inside one quarter-hour, of one GPU or of all. Its usage is decayed to the instant `reference_ms`.

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


@dataclass(frozen=True)
class Slices:
    """The slices of a window, adjacent and ascending, as columns. The tag of a slice is its index."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    references: npt.NDArray[np.int64]

    @classmethod
    def of(cls, start_ms: int, end_ms: int, edges: Iterable[int], half_life_s: int | None) -> Slices:
        """Split a window at every quarter-hour and at those `edges` that lie inside it."""
        grid = np.arange(next_quarter(start_ms), end_ms, BUCKET_MS, dtype=np.int64)
        inside = [at for at in edges if start_ms < at < end_ms]
        bounds = np.unique(np.concatenate([grid, np.array([start_ms, end_ms, *inside], np.int64)]))
        starts, ends = bounds[:-1], bounds[1:]
        return cls(starts, ends, reference_ms(starts, ends, half_life_s))

    @property
    def buckets(self) -> npt.NDArray[np.int64]:
        """The start of each slice's quarter-hour."""
        return self.starts - self.starts % BUCKET_MS

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, tag: int) -> TimeSlice:
        start, end, reference = (int(column[tag]) for column in (self.starts, self.ends, self.references))
        return TimeSlice(tag, start, end, EVERY_GPU, reference)

    def tags(self, start_ms: int, end_ms: int) -> range:
        """Return the tags of the slices in a span that begins and ends with a slice."""
        return range(*np.searchsorted(self.starts, [start_ms, end_ms]).tolist())

    def spans(self, tags: range) -> list[Span]:
        """Return (start, end) of the slices with these tags."""
        within = slice(tags.start, tags.stop)
        return list(zip(self.starts[within].tolist(), self.ends[within].tolist(), strict=True))


GROUP, QUEUE = 2, 3
"""Columns of `Sums.keys`."""
NO_PAYER: Final = 0
"""The queue number of time without a payer."""


class Sums(NamedTuple):
    """Sums as two arrays with one line per group.

    keys: (n, 4): start_ms, end_ms, GPU group, queue. Start and end are 0 if the sums are not by span.
    values: (n, 9): the columns of `Figures`."""

    keys: npt.NDArray[np.int64]
    values: Integers

    def select(self, lines: npt.NDArray[np.bool_]) -> Sums:
        """Return only these lines."""
        return Sums(self.keys[lines], self.values[lines])


NO_SUMS: Final = Sums(np.zeros((0, 4), np.int64), np.zeros((0, len(Figures._fields)), np.int64))


def added_up(parts: Sequence[Sums]) -> Sums:
    """Add the values of equal keys exactly."""
    if not parts:
        return NO_SUMS
    keys = np.concatenate([part.keys for part in parts])
    values = exact(np.concatenate([part.values for part in parts]))
    return Sums(*sum_by_key(keys, values))


def exact(values: Integers) -> Integers:
    """Return the same numbers, as Python integers if the sum of all of them could exceed 64 bits."""
    if values.dtype != object and int(values.max(initial=0)) * len(values) >= _EXACT:
        return values.astype(object)
    return values


def without_spans(sums: Sums) -> Sums:
    """Add up the sums of all spans."""
    keys = sums.keys.copy()
    keys[:, :2] = 0
    return added_up([Sums(keys, sums.values)])


RowSelection = Literal["whole", "by_span"] | tuple[tuple[int, int, int], ...]
"""The rows of a quarter-hour that are summed: all together, all by their spans, or those inside the down time of GPUs,
given as (gpu, start_ms, end_ms) of each down time."""


class CacheKey(NamedTuple):
    """The half-life of cached sums (None without decay) and `Weighting.grouping_key` of their groups."""

    half_life_s: int | None
    grouping: Hashable = None

    @property
    def decays_to_quarter_end(self) -> bool:
        """Whether the decayed sum of a row is the same wherever a slice begins or ends within its quarter-hour."""
        return reference_ms(0, 1, self.half_life_s) == BUCKET_MS


QuarterSums = Mapping[int, Mapping[RowSelection, Sums]]
"""Sums by the start of the quarter-hour."""


@dataclass(frozen=True, slots=True)
class QuarterTable:
    """The sums of whole quarter-hours, one after the other: those of `buckets[i]` are the lines `offsets[i]` to
    `offsets[i + 1]`."""

    buckets: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sums: Sums

    def from_on(self, bucket: int, quarters: QuarterSums) -> QuarterTable:
        """Return the table with the quarter-hours of `quarters` in place of its own from `bucket` on."""
        new = sorted((at, sums["whole"]) for at, sums in quarters.items() if at >= bucket and "whole" in sums)
        kept = int(np.searchsorted(self.buckets, bucket))
        lines = int(self.offsets[kept])
        lengths = np.array([len(sums.keys) for _, sums in new], np.int64)
        return QuarterTable(
            np.append(self.buckets[:kept], np.array([at for at, _ in new], np.int64)),
            np.append(self.offsets[: kept + 1], lines + np.cumsum(lengths)),
            Sums(
                np.concatenate([self.sums.keys[:lines], *(sums.keys for _, sums in new)]),
                np.concatenate([self.sums.values[:lines], *(sums.values for _, sums in new)]),
            ),
        )


_NO_QUARTERS: Final = QuarterTable(np.zeros(0, np.int64), np.zeros(1, np.int64), NO_SUMS)


class _Cached:
    """What is cached of one key. `table` has the sums "whole" of `quarters`, except from `stale_from` on."""

    def __init__(self) -> None:
        self.quarters: dict[int, Mapping[RowSelection, Sums]] = {}
        self.table = _NO_QUARTERS
        self.stale_from: int | None = None

    def put(self, bucket: int, sums: Mapping[RowSelection, Sums] | None) -> None:
        """Replace the sums of a quarter-hour; None: remove them."""
        if sums is not None:
            self.quarters[bucket] = sums
        elif self.quarters.pop(bucket, None) is None:
            return
        self.stale_from = bucket if self.stale_from is None else min(bucket, self.stale_from)

    def up_to_date(self) -> QuarterTable:
        if self.stale_from is not None:
            self.table, self.stale_from = self.table.from_on(self.stale_from, self.quarters), None
        return self.table


class SumsCache:
    """Caches sums of quarter-hours by `CacheKey`. Thread-safe.

    `groups` and `queues` number the GPU groups and the queue references of pods in the keys of sums."""

    def __init__(self) -> None:
        self.groups: Numbering[GpuGroup] = Numbering()
        self.queues: Numbering[str | None] = Numbering([None])
        self._payers: dict[int, int] = {}
        """The numbers of the queues of payers, by holder id."""
        self._lock = threading.Lock()
        self._sums: OrderedDict[CacheKey, _Cached] = OrderedDict()
        self._changed_by: dict[int, int] = {}
        """By quarter-hour, the version of the last commit that changed it."""
        self._last_change = 0
        self._cleared_by = 0

    def cached(self, key: CacheKey, version: int) -> tuple[QuarterSums, QuarterTable]:
        """Return the cached sums of a key that are valid for the snapshot of `version`, and those of whole
        quarter-hours as a table."""
        with self._lock:
            known = self._sums.setdefault(key, _Cached())
            self._sums.move_to_end(key)
            while len(self._sums) > MOST_KEYS:
                self._sums.popitem(last=False)
            if self._cleared_by > version:
                return {}, _NO_QUARTERS
            if self._last_change <= version:
                return dict(known.quarters), known.up_to_date()
            valid = {at: sums for at, sums in known.quarters.items() if self._changed_by.get(at, 0) <= version}
            return valid, _NO_QUARTERS.from_on(0, valid)

    def store(self, key: CacheKey, version: int, found: Iterable[tuple[int, RowSelection | None, Sums]]) -> None:
        """Cache sums that were read from the snapshot of `version`, unless a later commit changed their quarter-hour.

        found: (start of the quarter-hour, selection, sums). Sums with the selection None are not cached. Sums by span
        are cached together with their total for the whole quarter-hour."""
        with self._lock:
            known = self._sums.get(key)
            if known is None or self._cleared_by > version:
                return
            for bucket, selection, sums in found:
                if selection is not None and self._changed_by.get(bucket, 0) <= version:
                    new: dict[RowSelection, Sums] = {selection: sums}
                    if selection == "by_span":
                        new["whole"] = without_spans(sums)
                    known.put(bucket, {**known.quarters.get(bucket, {}), **new})
            tables = (
                sums for of in self._sums.values() for quarter in of.quarters.values() for sums in quarter.values()
            )
            if sum(len(sums.keys) for sums in tables) > MOST_LINES:
                for of in self._sums.values():
                    for bucket in sorted(of.quarters)[: (len(of.quarters) + 1) // 2]:
                        of.put(bucket, None)

    def queues_of(self, cursor: Cursor, version: int, payers: Collection[int]) -> Mapping[int, int]:
        """Return the numbers of the queues of payers. `cursor` reads the snapshot of `version`."""
        with self._lock:
            valid = self._payers if self._cleared_by <= version else {}
            known = {payer: valid[payer] for payer in payers if payer in valid}
        missing = sorted(set(payers) - known.keys())
        if not missing:
            return known
        sql = statement("holder_origins", payers="SELECT id FROM incoming")
        table = record_columns.column_table(record_columns.ID, [(payer,) for payer in missing])
        refs: dict[int, str | None] = dict(cursor.run(sql, None, table))
        found = {payer: self.queues[refs.get(payer)] for payer in missing}
        with self._lock:
            if self._cleared_by <= version:
                self._payers = (self._payers if len(self._payers) < MOST_PAYERS else {}) | found
        return known | found

    def additions(self, booked: BookedChanges) -> Mapping[tuple[CacheKey, int], Sums]:
        """Return the sums that a commit adds to cached quarter-hours.

        They are computed before the commit, while readers continue."""
        with self._lock:
            extended = [
                (key, bucket)
                for key, known in self._sums.items()
                if key.grouping is None
                for bucket in booked.added
                if bucket in known.quarters or bucket in booked.fresh
            ]
        return {(key, bucket): self._sums_of(booked.added[bucket](), bucket, key) for key, bucket in extended}

    def _sums_of(self, rows: AddedRows, bucket: int, key: CacheKey) -> Sums:
        """Return the sums of rows that are added to a quarter-hour."""
        spans = list(zip(rows.start_ms.tolist(), rows.end_ms.tolist(), strict=True))
        weight_of = {span: factor(*span, bucket + BUCKET_MS, key.half_life_s) for span in set(spans)}
        values = figures(rows.cells, [weight_of[span] for span in spans])
        groups = np.array([self.groups[GpuGroup(cluster)] for cluster in rows.cluster.values], np.int64)
        queues = np.array([self.queues[queue] for queue in rows.queue.values], np.int64)
        queue = np.where(rows.paid, queues[rows.queue.of_row], NO_PAYER)
        keys = np.stack([rows.start_ms, rows.end_ms, groups[rows.cluster.of_row], queue], axis=1)
        return added_up([Sums(keys, values)])

    def apply_commit(self, booked: BookedChanges, additions: Mapping[tuple[CacheKey, int], Sums], version: int) -> None:
        """Add the additions of the commit that creates `version`, and remove other quarter-hours that it changed."""
        with self._lock:
            if booked.requeued:
                self._clear(version)
            for bucket in booked.touched:
                self._changed_by[bucket] = self._last_change = version
                for key, known in self._sums.items():
                    before = known.quarters.get(bucket)
                    if bucket in booked.fresh and before is None and not booked.requeued:
                        before = {"by_span": NO_SUMS, "whole": NO_SUMS}
                    added = additions.get((key, bucket))
                    known.put(bucket, None if before is None or added is None else _extended(before, added))

    def clear(self, version: int) -> None:
        """Remove everything that was cached before the commit that creates `version`."""
        with self._lock:
            self._clear(version)

    def _clear(self, version: int) -> None:
        self._cleared_by = version
        self._payers = {}
        self._sums = OrderedDict((key, _Cached()) for key in self._sums)


def _extended(before: Mapping[RowSelection, Sums], added: Sums) -> Mapping[RowSelection, Sums]:
    """Return a quarter-hour after an addition, without its sums inside down time, which must be read again."""
    additions: dict[RowSelection, Sums] = {"by_span": added, "whole": without_spans(added)}
    return {
        selection: added_up([before[selection], sums]) for selection, sums in additions.items() if selection in before
    }


@dataclass(slots=True)
class _Request:
    """The sums of a slice that a window needs.

    `into` receives the sums. `selection` is their key in the cache, or None if they are not cached. `spans` are the
    spans whose rows are read if the cache does not have the sums."""

    slice: TimeSlice
    into: dict[int, Sums]
    selection: RowSelection | None
    spans: Sequence[TimeSlice]


@dataclass(slots=True)
class SliceSums:
    """The sums of slices, one line per slice, GPU group and queue, ascending."""

    tag: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    values: Integers

    @classmethod
    def of(cls, sums_of: Mapping[int, Sums], others: SliceSums | None = None) -> SliceSums:
        """Return the sums of slices by tag, and those of `others`, which are other slices."""
        others = others or SliceSums(np.zeros(0, np.int64), *NO_SUMS)
        parts, done = [], 0
        for tag, sums in sorted(sums_of.items(), key=itemgetter(0)):
            at = int(np.searchsorted(others.tag, tag))
            parts += [others._lines(done, at), (np.full(len(sums.keys), tag), *sums)]
            done = at
        tags, keys, values = zip(*parts, others._lines(done, len(others.tag)), strict=True)
        return cls(np.concatenate(tags), np.concatenate(keys), exact(np.concatenate(values)))

    def _lines(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Integers]:
        return self.tag[start:stop], self.keys[start:stop], self.values[start:stop]

    def lines_of(self, tags: range) -> slice:
        """Return the lines of the slices with these tags."""
        low, high = np.searchsorted(self.tag, [tags.start, tags.stop]).tolist()
        return slice(low, high)

    def of_group(self, tags: range, group: int) -> tuple[npt.NDArray[np.int64], Integers]:
        """Return the lines of a GPU group in these slices, and their `Figures` by slice."""
        within = self.lines_of(tags)
        lines = np.flatnonzero(self.keys[within, GROUP] == group) + within.start
        by_slice = np.zeros((len(tags), len(Figures._fields)), dtype=self.values.dtype)
        if len(lines):
            tag = self.tag[lines]
            first = np.flatnonzero(np.diff(tag, prepend=-1))
            by_slice[tag[first] - tags.start] = np.add.reduceat(self.values[lines], first, axis=0)
        return lines, by_slice


class SumsReader:
    """Takes the sums of slices from the cache, or reads them from the snapshot of `cursor` and caches them.

    `in_down_time` contains, by tag, the part of the sums inside down time of nodes."""

    def __init__(self, cache: SumsCache, cursor: Cursor | None, state: State, key: CacheKey, slices: Slices) -> None:
        self._cache = cache
        self._cursor = cursor
        self._state = state
        self._key = key
        self._slices = slices
        self._in_table = np.zeros(len(slices), dtype=bool)
        """The slices whose sums are taken from the table."""
        self._sums: dict[int, Sums] = {}
        self.in_down_time: dict[int, Sums] = {}

    @cached_property
    def _cached(self) -> tuple[QuarterSums, QuarterTable]:
        return self._cache.cached(self._key, self._state.version)

    def sums(self) -> SliceSums:
        """Return the sums of all slices that were added, without spans."""
        tags = np.flatnonzero(self._in_table)
        if not len(tags):
            return SliceSums.of(self._sums)
        _, table = self._cached
        buckets = np.searchsorted(table.buckets, self._slices.starts[tags])
        first, last, counts = int(buckets[0]), int(buckets[-1]), np.diff(table.offsets)
        lines: slice | npt.NDArray[np.bool_] = slice(int(table.offsets[first]), int(table.offsets[last + 1]))
        if last - first + 1 > len(tags):
            chosen = np.zeros(len(counts), dtype=bool)
            chosen[buckets] = True
            lines = np.repeat(chosen, counts)
        keys, values = table.sums.keys[lines], table.sums.values[lines]
        return SliceSums.of(self._sums, SliceSums(np.repeat(tags, counts[buckets]), keys, values))

    def add(self, tags: range, groups: GpuGroups, down: Iterable[tuple[int, Span]]) -> bool:
        """Add the sums of slices in which no GPU changes its group. `down` is the down time by GPU id.

        Returns False if some sums are not cached and there is no cursor to read them with."""
        requests = self._requests(tags, down)
        missing = {number: request for number, request in enumerate(requests) if self._of_cache(request) is None}
        found: Mapping[int, Sums] = {}
        rows = None
        if self._cursor is not None:
            rows = _RowSums(self._cursor, self._state, self._cache, self._key.half_life_s, groups)
        if missing:
            if rows is None:
                return False
            found = self._read(rows, missing)
        cut: list[TimeSlice] = []
        for number, request in enumerate(requests):
            sums = self._of_cache(request) if number not in found else found[number]
            assert sums is not None
            if request.selection == "by_span":
                sums, crossing = _inside(request.slice, sums)
                if crossing:
                    cut.append(request.slice)
            request.into[request.slice.tag] = sums
        if cut:
            if rows is None:
                return False
            for tag, sums in rows.straddling(cut).items():
                self._sums[tag] = added_up([self._sums[tag], sums])
        return True

    def _of_cache(self, request: _Request) -> Sums | None:
        quarter = self._cached[0].get(request.slice.bucket, {})
        return quarter.get(request.selection) if request.selection is not None else None

    def _requests(self, tags: range, down: Iterable[tuple[int, Span]]) -> list[_Request]:
        """Take the sums of whole quarter-hours from the table, and return requests for all other sums."""
        within, requests = slice(tags.start, tags.stop), []
        starts, buckets = self._slices.starts[within], self._slices.buckets[within]
        whole = self._slices.ends[within] - starts == BUCKET_MS
        self._in_table[within] = whole & np.isin(starts, self._cached[1].buckets, assume_unique=True)
        booked = buckets < self._state.fleet.newest_end_ms
        down_of: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for span in down_in(sorted(down), self._slices.spans(tags)):
            if booked[span.tag]:
                down_of[span.tag + tags.start].append((span.gpu, span.start_ms, span.end_ms))
        for tag in (np.flatnonzero(booked & ~self._in_table[within]) + tags.start).tolist():
            one = self._slices[tag]
            if one.whole:
                requests.append(_Request(one, self._sums, "whole", [one]))
            elif self._key.decays_to_quarter_end and (self._key.grouping is None or starts[0] <= one.bucket):
                # Cached sums by span belong to the groups at the beginning of the quarter-hour.
                quarter = replace(one, start_ms=one.bucket, end_ms=one.bucket + BUCKET_MS, by_span=True)
                requests.append(_Request(one, self._sums, "by_span", [quarter]))
            else:
                requests.append(_Request(one, self._sums, None, [one]))
        for tag, spans in down_of.items():
            one = self._slices[tag]
            parts = [replace(one, gpu=gpu, start_ms=low, end_ms=high) for gpu, low, high in spans]
            requests.append(_Request(one, self.in_down_time, tuple(spans) if one.whole else None, parts))
        return requests

    def _read(self, rows: _RowSums, requests: Mapping[int, _Request]) -> dict[int, Sums]:
        """Read the sums of numbered requests. Folded hours have quarter-hourly sums, but decayed sums need the rows."""
        folded = {
            request.slice.bucket: number
            for number, request in requests.items()
            if request.selection == "whole" and self._key.half_life_s is None
            and request.slice.bucket - request.slice.bucket % MS_PER_HOUR not in self._state.unfolded
        }  # fmt: skip
        found = dict.fromkeys(requests, NO_SUMS)
        if folded:
            found |= {folded[bucket]: sums for bucket, sums in rows.of_folded_hours(folded).items()}
        others = requests.keys() - folded.values()
        spans = [replace(span, tag=number) for number in sorted(others) for span in requests[number].spans]
        found |= rows.within(spans)
        new = [(request.slice.bucket, request.selection, found[number]) for number, request in requests.items()]
        self._cache.store(self._key, self._state.version, new)
        return found


def _inside(within: TimeSlice, sums: Sums) -> tuple[Sums, bool]:
    """Return the sums, out of those of a quarter-hour by span, of the rows that lie inside a slice, and whether any row
    crosses an edge of the slice."""
    starts, ends = sums.keys[:, 0], sums.keys[:, 1]
    inside = (starts >= within.start_ms) & (ends <= within.end_ms)
    crossing = (starts < within.end_ms) & (ends > within.start_ms) & ~inside
    return without_spans(sums.select(inside)), bool(crossing.any())


class _RowSums:
    """Sums rows in the snapshot of `cursor`, with the numbers of groups and queues that the cache assigns."""

    def __init__(
        self, cursor: Cursor, state: State, cache: SumsCache, half_life_s: int | None, groups: GpuGroups
    ) -> None:
        self._cursor = cursor
        self._half_life_s = half_life_s
        self._cache = cache
        self._version = state.version
        devices = state.device_names(cursor).items()
        self._group_of = {number: cache.groups[groups.of_device(device)] for number, device in devices}
        self._groups_table = record_columns.column_table(record_columns.KIND, self._group_of.items())

    def of_folded_hours(self, buckets: Collection[int]) -> dict[int, Sums]:
        """Return the sums of whole quarter-hours of folded hours, by their starts, without decay."""
        bounds = {"low": min(buckets), "high": max(buckets) + BUCKET_MS}
        table = record_columns.column_table(record_columns.HOUR, [(at,) for at in buckets])
        return self._run("window_quarters", bounds, table)

    def within(self, slices: Sequence[TimeSlice]) -> dict[int, Sums]:
        """Return the sums of rows inside the slices, by tag.

        They include the parts inside a slice of rows that cross its edge. No row crosses the edge of a whole
        quarter-hour."""
        found: dict[int, list[Sums]] = defaultdict(list)
        for nearby in near(slices):
            bounds = {"low": min(one.start_ms for one in nearby), "high": max(one.end_ms for one in nearby)}
            rows = [(index, one.gpu, one.start_ms, one.end_ms) for index, one in enumerate(nearby)]
            spans = self._cursor.rows("window_spans", bounds, record_columns.column_table(record_columns.SPAN, rows))
            weighted = []
            for index, gpu, start, end in spans:
                weight = factor(start, end, nearby[index].reference_ms, self._half_life_s)
                weighted.append((index, gpu, start, end, nearby[index].by_span, weight))
            table = record_columns.column_table(record_columns.WEIGHTED_SPAN, weighted)
            for index, sums in self._run("window_rows", bounds, table).items():
                found[nearby[index].tag].append(sums)
        for tag, sums in self.straddling([one for one in slices if not one.whole]).items():
            found[tag].append(sums)
        return {tag: added_up(several) for tag, several in found.items()}

    def straddling(self, slices: Sequence[TimeSlice]) -> dict[int, Sums]:
        """Return the parts inside a slice of rows that cross its edge, by tag. A set of rows is cut as a whole."""
        numbered = [TaggedSpan(index, one.start_ms, one.end_ms, one.gpu) for index, one in enumerate(slices)]
        parts = list(straddling_parts(self._cursor, numbered))
        if not parts:
            return {}
        queue_of = self._cache.queues_of(self._cursor, self._version, {part.payer for part in parts})
        keys = [(0, 0, self._group_of[part.device], queue_of[part.payer]) for part in parts]
        weights = [
            factor(part.start_ms, part.end_ms, slices[part.tag].reference_ms, self._half_life_s) for part in parts
        ]
        values = figures(np.array([part.cells for part in parts], np.int64), weights)
        tags = np.array([slices[part.tag].tag for part in parts])
        sums = Sums(np.array(keys, np.int64), values)
        return {tag: added_up([sums.select(tags == tag)]) for tag in set(tags.tolist())}

    def _run(self, name: str, bounds: Mapping[str, int], incoming: Any) -> dict[int, Sums]:
        found: dict[int, list[Row]] = defaultdict(list)
        for tag, start, end, group, queue, *values in self._cursor.rows(name, bounds, incoming, self._groups_table):
            found[tag].append((start, end, group, self._cache.queues[queue], *values))
        return {tag: _table(lines) for tag, lines in found.items()}


def _table(rows: Sequence[Row]) -> Sums:
    """Return sums from rows of keys and values. The values may exceed 64 bits."""
    whole = np.array(rows, dtype=object)
    values = whole[:, 4:]
    with suppress(OverflowError):
        values = values.astype(np.int64)
    return added_up([Sums(whole[:, :4].astype(np.int64), values)])
