"""Computes usage per group over any span, including unmetered and down time.

The engine sums by class of holders and kind of device (`usage_sums`). Names and teams are looked up once per class and
kind. Unmetered time has no rows, and down time comes from the inventory. Both are computed per GPU and added, so that
the accounts of every GPU add up to its capacity exactly.

Start-up time takes reading every pod, so it is read once for all groupings of a span (`ResultCache.start_up`).
Memory grows with the result: some hundred bytes per row."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar
from zoneinfo import ZoneInfo

import numpy as np

from accountant.core.errors import UnsupportedQuestion
from accountant.core.gpu_time_accounts import ACCOUNT_CELLS, CELLS, full_us, sum_by_key
from accountant.ledger.protocols import exported_in, of_holders, unexported
from accountant.ledger.usage import (
    LENT,
    MEASURES,
    START_UP,
    Int32Array,
    Int64Array,
    Usage,
    UsageMeasure,
    Where,
    names_of,
)
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.gpu_lifetimes import GpuLifetimes, down_in, in_service
from accountant.storage.ledger_state import DeviceKinds, State, device_kinds
from accountant.storage.query.group_by_dimensions import (
    UNHELD,
    ConstantSpan,
    HolderClasses,
    ResultCache,
    UsageQuestion,
    asks_for_unheld_time,
    classes,
    key_of,
    of_all,
    pieces_of,
)
from accountant.storage.query.startup_and_lent_time import idle_time, lent_time
from accountant.storage.query.usage_sums import ALL_CELLS, GROUPED_BY, sums
from accountant.storage.span_splitting import EVERY_GPU, TaggedSpan
from accountant.storage.write.name_ids import NO_DEVICE, DeviceName, holders
from accountant.storage.write.record_columns import Numbering
from accountant.wire.dimensions import OF_TIME, sources
from accountant.wire.usage_cost_and_job_models import Dimension, is_label
from gputally.base import called_off
from gputally.base.measures import REPORTED
from gputally.base.units import MS_PER_HOUR

H = TypeVar("H", bound=Hashable)
_OF_PLACES: tuple[Dimension, ...] = ("cluster", "node", "gpu")
MOST_GPUS = 1_000
"""If a filter selects at most this many GPUs, only these are summed. Otherwise all are summed and the others are
dropped."""
_TAG, _DEVICE, _PAYER = range(3)
_CELL = {name: column for column, name in enumerate((*GROUPED_BY, *ALL_CELLS))}
"""Columns of `sums`."""
_SOURCES = {
    "busy": "busy_us", "allocated_idle": "idle_us", "allocated_unknown": "unknown_us", "unallocated": "unheld_us",
    "down": "down_us", "borrowed_busy": "borrowed_us", "unattributed_busy": "unattributed_us",
    **{each.name: each.field for each in REPORTED}, **{each.unknown: each.unknown_column for each in REPORTED},
    "energy_uj": "energy_rest_uj", "energy_j": "energy_j",
}  # fmt: skip
"""The column of `sums` that each figure adds up. The other figures are not in the records."""


def usage(
    cursor: Cursor,
    state: State,
    edges: Sequence[int],
    by: Sequence[Dimension],
    where: Where | None,
    timezone: str,
    measures: Collection[UsageMeasure],
    cache: ResultCache,
) -> Usage:
    """Return the usage of the spans between neighbouring edges, see `Moment.usage`. `cache` is that of the
    snapshot."""
    where, by = where or {}, tuple(dict.fromkeys(by))
    lacking = set(exported_in((*by, *where))) - set(state.exported_labels)
    if lacking:
        raise UnsupportedQuestion(unexported(min(lacking), state.exported_labels))

    def compute() -> Usage:
        return _UsageTable(cursor, state, edges, by, ZoneInfo(timezone), where, measures, cache).usage()

    filters = frozenset((name, frozenset(values)) for name, values in where.items())
    return cache.usage(UsageQuestion(tuple(edges), filters, timezone), by, names_of(measures), compute)


def _pieces(
    cursor: Cursor, state: State, edges: Sequence[int], dimensions: frozenset[Dimension], zone: ZoneInfo
) -> tuple[list[int], list[ConstantSpan]]:
    """Return two lists: for each piece of the spans between edges the index of its span, and the pieces."""
    label_changes: Sequence[int] = ()
    if any(map(is_label, dimensions)):
        bounds = {"low": edges[0], "high": edges[-1]}
        label_changes = [at for (at,) in cursor.rows("label_changes", bounds)]
    span_of: list[int] = []
    pieces: list[ConstantSpan] = []
    for number, (start, end) in enumerate(pairwise(edges)):
        pieces += pieces_of(state, start, end, dimensions, zone, label_changes) if start < end else []
        span_of += [number] * (len(pieces) - len(span_of))
    return span_of, pieces


def _spans(pieces: Sequence[ConstantSpan]) -> list[TaggedSpan]:
    return [TaggedSpan(tag, piece.start_ms, piece.end_ms) for tag, piece in enumerate(pieces)]


class _UsageTable:
    """The usage of one grouping, collected from the ledger's sums, from what they do not contain (unmetered and down
    time), and from what takes reading more (start-up and lent time).

    A key combines values of a class of holders, a kind of device and a piece of time. Each of the three is looked up
    once. Pieces of one era differ only in day and hour, which do not depend on holders and devices."""

    def __init__(
        self,
        cursor: Cursor,
        state: State,
        edges: Sequence[int],
        by: Sequence[Dimension],
        zone: ZoneInfo,
        where: Where,
        measures: Collection[UsageMeasure],
        cache: ResultCache,
    ) -> None:
        self._state = state
        self._where = where
        self._by = tuple(by)
        self._wanted = tuple(dict.fromkeys((*by, *where)))
        self._names = names_of(measures)
        self._measures = bool(set(measures) & set(MEASURES))
        self._values: list[Numbering[str]] = [Numbering() for _ in by]
        self._rows: list[tuple[Int64Array, Int32Array, Int64Array]] = []
        """Parts of the table: index of the span, indices of the values, and figures of each row."""
        self._spans: list[int] = []
        self._keys: list[list[int]] = []
        self._sums: list[list[int]] = []
        """Single rows in the same form."""
        self._classes: HolderClasses | None = None
        """The classes of holders; None if no dimension depends on holders."""
        dimensions = frozenset(self._wanted)
        span_of, self._pieces = _pieces(cursor, state, edges, dimensions, zone)
        self._span_of = np.array(span_of, dtype=np.int64)
        eras: dict[tuple[int, int], ConstantSpan] = {}
        for span, piece in zip(span_of, self._pieces, strict=True):
            eras.setdefault((span, piece.era), piece)
        self._piece_of_era = list(eras.values())
        number = {era: place for place, era in enumerate(eras)}
        of_piece = [number[span, piece.era] for span, piece in zip(span_of, self._pieces, strict=True)]
        self._era = np.array(of_piece, dtype=np.int64)
        if self._pieces:
            self._add_sums(cursor, dimensions, cache)
            if set(START_UP) & set(measures):
                self._add_start_up(cursor, cache)
            if set(LENT) & set(measures):
                self._add_lent(cursor)

    def _add_sums(self, cursor: Cursor, dimensions: frozenset[Dimension], cache: ResultCache) -> None:
        """Add the ledger's rows and sums, and the unmetered and down time, for which there are no rows."""
        state, where = self._state, self._where
        devices, gpus = _filtered_devices(cursor, state, where)
        of_devices = dimensions - of_holders(dimensions) - OF_TIME
        kinds = (
            state.device_kinds(cursor, of_devices) if gpus is None else device_kinds(state.fleet, devices, of_devices)
        )
        self._kinds, self._gpus = kinds, gpus
        table = self._sums_by_class(cursor, dimensions, gpus, cache)
        unheld = _CELL["unheld_us"]
        of_holder = table[:, _PAYER] != UNHELD
        # The unheld part of a row with a holder has no holder.
        rest = table[of_holder & (table[:, unheld] > 0)]
        held = table.copy()
        held[of_holder, unheld] = 0
        self._add(held[:, _TAG], held[:, _DEVICE], held[:, _PAYER], self._figures(held))
        without_holder = np.zeros((len(rest), len(self._names)), dtype=np.int64)
        without_holder[:, self._names.index("unallocated")] = rest[:, unheld]
        self._add(rest[:, _TAG], rest[:, _DEVICE], np.full(len(rest), UNHELD), without_holder)
        if asks_for_unheld_time(where):
            if of_holders(where):
                # The sums do not contain holders that the filter excludes, but their time was metered.
                table = sums(cursor, state, _spans(self._pieces), kinds, gpus=gpus, memos=False)
            self._add_unseen(cursor, table, gpus)

    def _sums_by_class(
        self, cursor: Cursor, dimensions: frozenset[Dimension], gpus: frozenset[int] | None, cache: ResultCache
    ) -> Int64Array:
        """Return the sums by class of holders, and store the classes."""
        state, spans, where = self._state, _spans(self._pieces), self._where
        of_holder = of_holders(dimensions)
        if not of_holder:
            return sums(cursor, state, spans, self._kinds, gpus=gpus, memos=self._measures)
        start_ms, end_ms = self._pieces[0].start_ms, self._pieces[-1].end_ms
        asked = sources(dimensions)
        labels = state.fleet.team_labels if "team" in asked else ()
        if (end_ms - start_ms <= MS_PER_HOUR or gpus is not None) and not of_holders(where):
            # For a short span or a few GPUs, the sums themselves show the holders.
            table = sums(cursor, state, spans, self._kinds, by_payer=True, gpus=gpus, memos=self._measures)
            payers = set(table[:, _PAYER].tolist()) - {UNHELD}
            self._classes = of_all(holders(cursor, payers, labels, exported_in(of_holder), users="user" in asked))
            return table
        found = classes(cursor, start_ms, end_ms, of_holder, where, labels, cache)
        if "queue" in where and not asks_for_unheld_time(where):
            rules, queues = {piece.era: piece.rules for piece in self._pieces}.values(), frozenset(where["queue"])
            found = found.only(lambda name: any(each.queue(name.queue_ref) in queues for each in rules))
        self._classes = found
        return sums(cursor, state, spans, self._kinds, payers=found.of, gpus=gpus, memos=self._measures)

    def _figures(self, table: Int64Array) -> Int64Array:
        figures = np.zeros((len(table), len(self._names)), dtype=np.int64)
        for column, name in enumerate(self._names):
            if name in _SOURCES:
                figures[:, column] = table[:, _CELL[_SOURCES[name]]]
        return figures

    def _add_start_up(self, cursor: Cursor, cache: ResultCache) -> None:
        pieces = self._pieces
        starts = [piece.start_ms for piece in pieces]

        def read() -> Iterable[Sequence[int]]:
            for rows in idle_time(cursor, self._state, pieces):
                yield from ((*row[:4], START_UP.index(row.phase), row.idle_us) for row in rows)

        found = cache.start_up(starts, pieces[-1].end_ms, read)
        piece, gpu, device, holder, phase, gpu_us = found.rows.T
        of = None if self._classes is None else self._classes.of
        kept = [
            (self._gpus is None or one in self._gpus) and (of is None or holding in of)
            for one, holding in zip(gpu.tolist(), holder.tolist(), strict=True)
        ]
        rows = np.flatnonzero(np.array(kept, dtype=bool))
        tag = np.searchsorted(starts, np.array(found.starts, dtype=np.int64)[piece[rows]], side="right") - 1
        kind = np.array([self._kinds.kind(one) for one in device[rows].tolist()], dtype=np.int64)
        payer = np.array([1 if of is None else of[one] for one in holder[rows].tolist()], dtype=np.int64)
        figures = np.zeros((len(rows), len(self._names)), dtype=np.int64)
        for number, name in enumerate(START_UP):
            if name in self._names:
                figures[:, self._names.index(name)] = np.where(phase[rows] == number, gpu_us[rows], 0)
        self._add(tag, kind, payer, figures)

    def _add_lent(self, cursor: Cursor) -> None:
        starts = [piece.start_ms for piece in self._pieces]
        for several in lent_time(cursor, self._state, self._pieces, self._wanted):
            for one in several:
                if one.account in self._names:
                    piece = bisect_right(starts, one.start_ms) - 1
                    self._add_row(piece, one.key, {one.account: one.gpu_us})

    def usage(self) -> Usage:
        """Return the relation."""
        single = (
            np.array(self._spans, dtype=np.int64),
            np.array(self._keys, dtype=np.int32).reshape(len(self._keys), len(self._by)),
            np.array(self._sums, dtype=np.int64).reshape(len(self._sums), len(self._names)),
        )
        spans, values, figures = zip(*self._rows, single, strict=True)
        known = [list(names) for names in self._values]
        parts = np.concatenate(spans), np.concatenate(values), np.concatenate(figures)
        return Usage.summed(self._by, known, parts[0], parts[1], self._names, parts[2])

    def _add_unseen(self, cursor: Cursor, table: Int64Array, gpus: frozenset[int] | None) -> None:
        metered_us = table[:, len(GROUPED_BY) : len(GROUPED_BY) + ACCOUNT_CELLS].sum(axis=1)
        at, totals = sum_by_key(table[:, [_TAG, _DEVICE]], metered_us.reshape(-1, 1))
        metered: dict[tuple[int, int], int] = defaultdict(int)
        for (piece, kind), (gpu_us,) in zip(at.tolist(), totals.tolist(), strict=True):
            metered[piece, self._kinds.member[kind]] += gpu_us
        for one in _unseen(cursor, self._state, self._pieces, self._wanted, metered, self._kinds, gpus):
            figures = {"unallocated": one.unallocated_us, "unmetered": one.unmetered_us, "down": one.down_us}
            self._add_row(one.piece, one.key, figures | {"node_down": one.down_us})

    def _add_row(self, piece: int, key: Sequence[str], figures: Mapping[str, int]) -> None:
        """Add one row given by its values of `_wanted`. Figures that were not asked for are left out."""
        found = dict(zip(self._wanted, key, strict=True))
        if any(found[dimension] not in allowed for dimension, allowed in self._where.items()):
            return
        self._spans.append(self._span_of[piece])
        self._keys.append([numbers[found[name]] for name, numbers in zip(self._by, self._values, strict=True)])
        self._sums.append([figures.get(name, 0) for name in self._names])

    def _add(self, tag: Int64Array, device: Int64Array, payer: Int64Array, figures: Int64Array) -> None:
        """Add rows given by piece, kind of device and class of holders."""
        if not len(tag):
            return
        fleet, shown = self._state.fleet, self._kinds.shown
        names = {} if self._classes is None else self._classes.names
        held = of_holders(self._wanted)
        of_holder = [name for name in self._wanted if name in held]
        of_time = [name for name in self._wanted if name in OF_TIME]
        of_device = [name for name in self._wanted if name not in held and name not in OF_TIME]

        def holder_values(era: int, payer: int) -> tuple[str, ...]:
            return key_of(of_holder, fleet, self._piece_of_era[era], EVERY_GPU, NO_DEVICE, names.get(payer))

        def device_values(era: int, kind: int) -> tuple[str, ...]:
            return key_of(of_device, fleet, self._piece_of_era[era], *shown[kind], None)

        era = self._era[tag]
        by_time = [key_of(of_time, fleet, piece, EVERY_GPU, NO_DEVICE, None) for piece in self._pieces]
        parts = (
            (of_holder, *_lookup(era, payer, holder_values)),
            (of_device, *_lookup(era, device, device_values)),
            (of_time, by_time, tag),
        )
        kept = np.ones(len(tag), dtype=bool)
        values = np.zeros((len(tag), len(self._by)), dtype=np.int32)
        for dimensions, several, row in parts:
            for position, name in enumerate(dimensions):
                column = [each[position] for each in several]
                if name in self._where:
                    allowed = self._where[name]
                    kept &= np.array([value in allowed for value in column], dtype=bool)[row]
                if name in self._by:
                    place = self._by.index(name)
                    numbers = self._values[place]
                    values[:, place] = np.array([numbers[value] for value in column], dtype=np.int32)[row]
        self._rows.append((self._span_of[tag][kept], values[kept], figures[kept]))


def _distinct(*columns: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the distinct rows of a table, given by its columns of numbers that are not negative, and for each row of
    the table the index of the equal distinct row."""
    code = columns[0]
    for column in columns[1:]:
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, row = np.unique(code, return_index=True, return_inverse=True)
    return np.stack([column[first] for column in columns], axis=1), row.reshape(-1)


def _lookup(eras: Int64Array, numbers: Int64Array, values_of: Callable[[int, int], H]) -> tuple[list[H], Int64Array]:
    """Return the result of `values_of` for each pair of an era and a number, and for each row the index of its
    result."""
    pairs, row = _distinct(eras, numbers)
    return [values_of(era, number) for era, number in called_off.each(pairs.tolist())], row


def _filtered_devices(
    cursor: Cursor, state: State, where: Where
) -> tuple[Mapping[int, DeviceName], frozenset[int] | None]:
    """Return the devices that a filter by node or GPU can match, and their GPUs. If these are None, the filter is not
    by node or GPU, or it matches more than MOST_GPUS, and all GPUs must be read.

    A GPU that moved is included with all its devices. The filter drops its time on other nodes later."""
    if "node" not in where and "gpu" not in where:
        return {}, None  # a filter by cluster alone selects most GPUs
    fleet = state.fleet
    devices = state.device_names(cursor)
    on_nodes = state.devices.on(where["node"], devices) if "node" in where else devices
    allowed = {dimension: where[dimension] for dimension in _OF_PLACES if dimension in where}
    gpus = frozenset(
        name.gpu
        for name in on_nodes.values()
        if fleet.gpus[name.gpu].uuid in allowed.get("gpu", (fleet.gpus[name.gpu].uuid,))
        and fleet.gpus[name.gpu].cluster in allowed.get("cluster", (fleet.gpus[name.gpu].cluster,))
    )
    if len(gpus) > MOST_GPUS:
        return {}, None
    return {number: name for number, name in devices.items() if name.gpu in gpus}, gpus


@dataclass(frozen=True, slots=True)
class _UnseenTime:
    """Time of a piece that has no rows (unmetered or down), or that rows count as `unallocated` although the node was
    down. Such time of rows is subtracted from `unallocated` and added to `down`."""

    piece: int
    key: tuple[str, ...]
    unallocated_us: int
    unmetered_us: int
    down_us: int


def _unseen(
    cursor: Cursor,
    state: State,
    pieces: Sequence[ConstantSpan],
    dimensions: Sequence[Dimension],
    metered: Mapping[tuple[int, int], int],
    kinds: DeviceKinds,
    gpus: Collection[int] | None,
) -> Iterable[_UnseenTime]:
    """Yield the time without rows: unmetered time, and the unheld or missing time in which the node was down.

    metered: microseconds of rows by piece and member of `kinds`."""
    fleet = state.fleet
    spans = down_in(fleet.census.down(), [(piece.start_ms, piece.end_ms) for piece in pieces])
    if gpus is not None:
        spans = [span for span in spans if span.gpu in gpus]
    down_us: dict[tuple[int, int], int] = defaultdict(int)
    for span in spans:
        down_us[span.tag, kinds.of_gpu[span.gpu]] += full_us(span.end_ms - span.start_ms)
    for tag, device, _, *accounts in sums(cursor, state, spans, kinds, gpus=gpus, memos=False).tolist():
        down_us[tag, kinds.member[device]] -= sum(accounts)
        # Unheld time of a node that is down moves from `unallocated` to `down`.
        unheld_us = accounts[CELLS.index("unheld_us")]
        if unheld_us:
            key = key_of(dimensions, fleet, pieces[tag], *kinds.shown[device], None)
            yield _UnseenTime(tag, key, -unheld_us, 0, unheld_us)
    for tag, member, gpu, device_name, life_us in _lives(fleet, pieces, kinds, gpus):
        missing_us = life_us - metered.get((tag, member), 0)
        missing_down_us = down_us.get((tag, member), 0)
        if missing_us:
            key = key_of(dimensions, fleet, pieces[tag], gpu, device_name, None)
            yield _UnseenTime(tag, key, 0, missing_us - missing_down_us, missing_down_us)


def _lives(
    fleet: GpuLifetimes, pieces: Sequence[ConstantSpan], kinds: DeviceKinds, gpus: Collection[int] | None
) -> Iterable[tuple[int, int, int, DeviceName, int]]:
    """Yield the capacity in each piece as (tag, member, a GPU of it, its last device, microseconds)."""
    gpus_of_member: dict[int, list[int]] = defaultdict(list)
    for gpu in fleet.tenures if gpus is None else gpus:
        member = kinds.of_gpu[gpu]
        if member in kinds.shared:
            gpus_of_member[member].append(gpu)
            continue
        life = fleet.life(gpu)
        for tag, piece in enumerate(pieces):
            begin, end = max(piece.start_ms, life.start_ms), min(piece.end_ms, life.end_ms)
            if begin < end:
                device = DeviceName(life.node_at(end - 1), fleet.gpus[gpu].model, "")
                yield tag, member, gpu, device, full_us(end - begin)
    spans = [(piece.start_ms, piece.end_ms) for piece in pieces]
    for member, gpus in gpus_of_member.items():
        lives = Counter((life.start_ms, life.end_ms) for life in map(fleet.life, gpus))
        counts, parts = in_service(lives, spans)
        capacity_us = [full_us(end - start) * count for (start, end), count in zip(spans, counts, strict=True)]
        for tag, (start, end), count in parts:
            capacity_us[tag] += full_us(end - start) * count
        for tag, whole_us in enumerate(capacity_us):
            yield tag, member, *kinds.shared[member], whole_us
