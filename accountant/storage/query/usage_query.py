"""Computes usage per group over any span, including unmetered and down time, and the hourly usage of teams and jobs.

The engine sums by class of holders and kind of device (`usage_sums`). Names and teams are looked up once per class and
kind. Unmetered time has no rows, and down time comes from the inventory. Both are computed per GPU and added, so that
the accounts of every GPU add up to its capacity exactly.

Only `usage_columns` includes start-up time. It requires reading every pod, so it is computed once for all groupings.
Memory grows with the result: it holds the result's keys, and some hundred bytes per row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar
from zoneinfo import ZoneInfo

import numpy as np

from accountant.core.gpu_time_accounts import ACCOUNTS, CELLS, full_us, sum_by_key
from accountant.ledger.protocols import OF_HOLDERS
from accountant.ledger.usage_columns import (
    COLUMNS,
    MEMOS,
    PRICED_BY,
    UJ_PER_J,
    Hours,
    Int64Array,
    JobName,
    Peak,
    Place,
    UsageColumns,
    UsageLines,
)
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.gpu_lifetimes import Fleet, down_in, in_service
from accountant.storage.ledger_state import DeviceKinds, State, device_kinds
from accountant.storage.query.group_by_dimensions import (
    OF_TIME,
    UNHELD,
    ConstantSpan,
    HolderClasses,
    ResultCache,
    asks_for_unheld_time,
    classes,
    key_of,
    of_all,
    pieces_of,
)
from accountant.storage.query.startup_and_lent_time import IdleTime, idle_time
from accountant.storage.query.usage_sums import ALL_CELLS, GROUPED_BY, sums
from accountant.storage.span_splitting import EVERY_GPU, TaggedSpan
from accountant.storage.write.name_ids import NO_DEVICE, DeviceName, holders
from accountant.storage.write.record_columns import Numbering
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine
from gputally.base.units import MS_PER_HOUR

Where = Mapping[Dimension, Collection[str]]
H = TypeVar("H", bound=Hashable)
_OF_PLACES: tuple[Dimension, ...] = ("cluster", "node", "gpu")
MOST_GPUS = 1_000
"""If a filter selects at most this many GPUs, only these are summed. Otherwise all are summed and the others are
dropped."""
_TAG, _DEVICE, _PAYER = range(3)
_CELL = {name: column for column, name in enumerate((*GROUPED_BY, *ALL_CELLS))}
"""Columns of `sums`."""
_FIGURES = (*COLUMNS, *MEMOS, "energy_j")
"""The figures of a row of usage. `energy_uj` is the rest of the energy besides whole joules until the row is read."""
_SOURCES = {
    "busy": "busy_us", "allocated_idle": "idle_us", "allocated_unknown": "unknown_us", "unallocated": "unheld_us",
    "down": "down_us", "borrowed_busy": "borrowed_us", "unattributed_busy": "unattributed_us",
    "memory_mib_s": "memory_mib_s", "memory_unknown": "memory_blind_us", "energy_uj": "energy_rest_uj",
    "energy_unknown": "energy_blind_us", "energy_j": "energy_j",
}  # fmt: skip
"""The column of `sums` that each figure adds up. The other figures are not in the records."""
_UNALLOCATED, _UNMETERED, _DOWN, _NODE_DOWN, _ENERGY_UJ, _ENERGY_J = (
    _FIGURES.index(name) for name in ("unallocated", "unmetered", "down", "node_down", "energy_uj", "energy_j")
)
_PHASES = {name: _FIGURES.index(name) for name in ("starting", "gang_waiting")}


def usage(
    cursor: Cursor,
    state: State,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Where | None = None,
    timezone: str = "UTC",
    cache: ResultCache | None = None,
) -> Sequence[UsageLine]:
    """Return the usage per group, see `Ledger.usage`. `cache` is that of the snapshot."""
    if start_ms >= end_ms:
        return []

    def compute() -> Sequence[UsageLine]:
        return usage_between(cursor, state, (start_ms, end_ms), by, where, timezone, cache)[0]

    return compute() if cache is None else cache.usage(start_ms, end_ms, by, where, timezone, compute)


def usage_between(
    cursor: Cursor,
    state: State,
    edges: Sequence[int],
    by: Sequence[Dimension],
    where: Where | None = None,
    timezone: str = "UTC",
    cache: ResultCache | None = None,
) -> list[UsageLines]:
    """Return the `usage` of each span between two neighbouring edges, which ascend. The rows are read only once."""
    table = _UsageTable(cursor, state, edges, by, ZoneInfo(timezone), where=where or {}, cache=cache)
    keys, _, at, figures = table.merged()
    edges_of_rows = np.searchsorted(at[:, 0], np.arange(len(edges)))
    return [UsageLines(by, keys, at[b:e, 1], _FIGURES, figures[b:e]) for b, e in pairwise(edges_of_rows.tolist())]


def usage_columns(
    cursor: Cursor,
    state: State,
    edges: Sequence[int],
    cuts: Sequence[Sequence[Dimension]],
    timezone: str,
    cache: ResultCache | None = None,
    *,
    memos: bool = False,
) -> list[UsageColumns]:
    """Return the usage of each span between two neighbouring edges, which ascend.

    The result has one UsageColumns per grouping in `cuts`. Each is grouped by its dimensions and by PRICED_BY."""
    zone = ZoneInfo(timezone)
    tables = [_UsageTable(cursor, state, edges, by, zone, priced_by=PRICED_BY, memos=memos, cache=cache) for by in cuts]
    every = frozenset(dimension for by in cuts for dimension in by) | set(PRICED_BY)
    _, finest = _pieces(state, edges, every, zone)
    for rows in idle_time(cursor, state, finest) if finest else ():
        for table in tables:
            table.add_phases(rows, finest)
    return [table.columns() for table in tables]


def _pieces(
    state: State, edges: Sequence[int], dimensions: frozenset[Dimension], zone: ZoneInfo
) -> tuple[list[int], list[ConstantSpan]]:
    """Return two lists: for each piece of the spans between edges the index of its span, and the pieces."""
    span_of: list[int] = []
    pieces: list[ConstantSpan] = []
    for number, (start, end) in enumerate(pairwise(edges)):
        pieces += pieces_of(state, start, end, dimensions, zone) if start < end else []
        span_of += [number] * (len(pieces) - len(span_of))
    return span_of, pieces


def _spans(pieces: Sequence[ConstantSpan]) -> list[TaggedSpan]:
    return [TaggedSpan(tag, piece.start_ms, piece.end_ms) for tag, piece in enumerate(pieces)]


class _UsageTable:
    """The usage of one grouping, one row per piece of time, class of holders and kind of device.

    A key combines values of a class of holders, a kind of device and a piece of time. Each of the three is looked up
    once. Pieces of one era differ only in day and hour, which do not depend on holders and devices.

    `by` are the dimensions of the key, `priced_by` those of the place. Rows that `where` excludes are left out."""

    def __init__(
        self,
        cursor: Cursor,
        state: State,
        edges: Sequence[int],
        by: Sequence[Dimension],
        zone: ZoneInfo,
        *,
        priced_by: Sequence[Dimension] = (),
        where: Where | None = None,
        cache: ResultCache | None = None,
        memos: bool = True,
    ) -> None:
        self._state = state
        self._where = where or {}
        self._by = tuple(by)
        self._wanted = tuple(dict.fromkeys((*by, *self._where)))
        self._priced_by = priced_by
        self._memos = memos
        self._keys: Numbering[tuple[str, ...]] = Numbering()
        self._places: Numbering[tuple[str, ...]] = Numbering()
        self._rows: list[tuple[Int64Array, Int64Array]] = []
        self._classes: HolderClasses | None = None
        """The classes of holders; None if no dimension depends on holders."""
        dimensions = frozenset((*self._wanted, *priced_by))
        span_of, self._pieces = _pieces(state, edges, dimensions, zone)
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

    def _add_sums(self, cursor: Cursor, dimensions: frozenset[Dimension], cache: ResultCache | None) -> None:
        """Add the ledger's rows and sums, and the unmetered and down time, for which there are no rows."""
        state, where = self._state, self._where
        devices, gpus = _filtered_devices(cursor, state, where)
        of_devices = dimensions - OF_HOLDERS - OF_TIME
        kinds = (
            state.device_kinds(cursor, of_devices) if gpus is None else device_kinds(state.fleet, devices, of_devices)
        )
        self._kinds = kinds
        table = self._sums_by_class(cursor, dimensions, gpus, cache)
        unheld = _CELL["unheld_us"]
        of_holder = table[:, _PAYER] != UNHELD
        # The unheld part of a row with a holder has no holder.
        rest = table[of_holder & (table[:, unheld] > 0)]
        held = table.copy()
        held[of_holder, unheld] = 0
        self._add(held[:, _TAG], held[:, _DEVICE], held[:, _PAYER], self._figures(held))
        without_holder = np.zeros((len(rest), self._width), dtype=np.int64)
        without_holder[:, _UNALLOCATED] = rest[:, unheld]
        self._add(rest[:, _TAG], rest[:, _DEVICE], np.full(len(rest), UNHELD), without_holder)
        if asks_for_unheld_time(where):
            if OF_HOLDERS & where.keys():
                # The sums do not contain holders that the filter excludes, but their time was metered.
                table = sums(cursor, state, _spans(self._pieces), kinds, gpus=gpus, memos=False)
            self._add_unseen(cursor, table, gpus)

    def _sums_by_class(
        self, cursor: Cursor, dimensions: frozenset[Dimension], gpus: frozenset[int] | None, cache: ResultCache | None
    ) -> Int64Array:
        """Return the sums by class of holders, and store the classes."""
        state, spans, where = self._state, _spans(self._pieces), self._where
        if not dimensions & OF_HOLDERS:
            return sums(cursor, state, spans, self._kinds, gpus=gpus, memos=self._memos)
        start_ms, end_ms = self._pieces[0].start_ms, self._pieces[-1].end_ms
        labels = state.fleet.team_labels if "team" in dimensions else ()
        if (end_ms - start_ms <= MS_PER_HOUR or gpus is not None) and not OF_HOLDERS & where.keys():
            # For a short span or a few GPUs, the sums themselves show the holders.
            table = sums(cursor, state, spans, self._kinds, by_payer=True, gpus=gpus, memos=self._memos)
            payers = set(table[:, _PAYER].tolist()) - {UNHELD}
            self._classes = of_all(holders(cursor, payers, labels, users="user" in dimensions))
            return table
        found = classes(cursor, start_ms, end_ms, dimensions & OF_HOLDERS, where, labels, cache)
        if "queue" in where and not asks_for_unheld_time(where):
            rules, queues = {piece.era: piece.rules for piece in self._pieces}.values(), frozenset(where["queue"])
            found = found.only(lambda name: any(each.queue(name.queue_ref) in queues for each in rules))
        self._classes = found
        return sums(cursor, state, spans, self._kinds, payers=found.of, gpus=gpus, memos=self._memos)

    @property
    def _width(self) -> int:
        """Number of figures of a row: COLUMNS, or all with memos."""
        return len(_FIGURES) if self._memos else len(COLUMNS)

    def _figures(self, table: Int64Array) -> Int64Array:
        figures = np.zeros((len(table), self._width), dtype=np.int64)
        for column, name in enumerate(_FIGURES[: self._width]):
            if name in _SOURCES:
                figures[:, column] = table[:, _CELL[_SOURCES[name]]]
        return figures

    def add_phases(self, rows: Sequence[IdleTime], finest: Sequence[ConstantSpan]) -> None:
        """Add start-up time. finest: the pieces that `rows` refer to; each lies inside one piece of this table."""
        starts = [piece.start_ms for piece in self._pieces]
        piece_of = np.searchsorted(starts, [piece.start_ms for piece in finest], side="right") - 1
        tag = piece_of[np.array([row.piece for row in rows], dtype=np.int64)]
        device = [self._kinds.kind(row.device) for row in rows]
        payer = [1 if self._classes is None else self._classes.of[row.payer] for row in rows]
        figures = np.zeros((len(rows), self._width), dtype=np.int64)
        figures[np.arange(len(rows)), [_PHASES[row.phase] for row in rows]] = [row.idle_us for row in rows]
        self._add(tag, np.array(device, dtype=np.int64), np.array(payer, dtype=np.int64), figures)

    def columns(self) -> UsageColumns:
        """Return the rows that have a figure other than 0."""
        keys, places, at, figures = self.merged()
        present = figures.any(axis=1)
        at, figures = at[present], figures[present]
        memos = None
        if self._memos:
            energy = figures[:, _ENERGY_J].astype(object) * UJ_PER_J + figures[:, _ENERGY_UJ]
            figures[:, _ENERGY_UJ] = energy.astype(np.int64)
            memos = figures[:, len(COLUMNS) : _ENERGY_J]
        return UsageColumns(
            keys, [Place(*place) for place in places], at[:, 0], at[:, 1], at[:, 2], figures[:, : len(COLUMNS)], memos
        )

    def merged(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]], Int64Array, Int64Array]:
        """Return (keys, places, at, figures). Keys and places are sorted. `at` has for each row the indices of its
        span, key and place, by which the rows ascend, and `figures` its figures."""
        keys, key = _ascending(self._keys)
        places, place = _ascending(self._places)
        if not self._rows:
            return keys, places, np.zeros((0, 3), dtype=np.int64), np.zeros((0, self._width), dtype=np.int64)
        numbers = np.concatenate([numbers for numbers, _ in self._rows])
        at = np.stack([numbers[:, 0], key[numbers[:, 1]], place[numbers[:, 2]]], axis=1)
        return keys, places, *sum_by_key(at, np.concatenate([figures for _, figures in self._rows]))

    def _add_unseen(self, cursor: Cursor, table: Int64Array, gpus: frozenset[int] | None) -> None:
        metered_us = table[:, len(GROUPED_BY) : len(GROUPED_BY) + ACCOUNTS].sum(axis=1)
        at, totals = sum_by_key(table[:, [_TAG, _DEVICE]], metered_us.reshape(-1, 1))
        metered: dict[tuple[int, int], int] = defaultdict(int)
        for (piece, kind), (gpu_us,) in zip(at.tolist(), totals.tolist(), strict=True):
            metered[piece, self._kinds.member[kind]] += gpu_us
        dimensions = (*self._wanted, *self._priced_by)
        numbers, rows = [], []
        for one in _unseen(cursor, self._state, self._pieces, dimensions, metered, self._kinds, gpus):
            key = self._number(one.key[: len(self._wanted)])
            if key < 0:
                continue
            place = self._places[one.key[len(self._wanted) :]]
            numbers.append((self._span_of[one.piece], key, place))
            row = [0] * self._width
            row[_UNALLOCATED], row[_UNMETERED], row[_DOWN] = one.unallocated_us, one.unmetered_us, one.down_us
            if self._memos:
                row[_NODE_DOWN] = one.down_us
            rows.append(row)
        if numbers:
            self._rows.append((np.array(numbers, dtype=np.int64), np.array(rows, dtype=np.int64)))

    def _number(self, values: tuple[str, ...]) -> int:
        """Return the number of the key of these values; -1 if the filter excludes them."""
        found = dict(zip(self._wanted, values, strict=True))
        if any(found[dimension] not in allowed for dimension, allowed in self._where.items()):
            return -1
        return self._keys[tuple([found[dimension] for dimension in self._by])]

    def _add(self, tag: Int64Array, device: Int64Array, payer: Int64Array, figures: Int64Array) -> None:
        """Add rows given by piece, kind of device and class of holders."""
        if not len(tag):
            return
        fleet, shown = self._state.fleet, self._kinds.shown
        names = {} if self._classes is None else self._classes.names
        of_holder = [name for name in self._wanted if name in OF_HOLDERS]
        of_time = [name for name in self._wanted if name in OF_TIME]
        of_device = [name for name in self._wanted if name not in OF_HOLDERS and name not in OF_TIME]

        def holder_values(era: int, payer: int) -> tuple[str, ...]:
            return key_of(of_holder, fleet, self._piece_of_era[era], EVERY_GPU, NO_DEVICE, names.get(payer))

        def device_values(era: int, kind: int) -> tuple[str, ...]:
            return key_of(of_device, fleet, self._piece_of_era[era], *shown[kind], None)

        def price_values(era: int, kind: int) -> tuple[str, ...]:
            return key_of(self._priced_by, fleet, self._piece_of_era[era], *shown[kind], None)

        era = self._era[tag]
        by_holder, holder = _lookup(era, payer, holder_values)
        by_device, kind = _lookup(era, device, device_values)
        by_price, price = _lookup(era, device, price_values)
        by_time = [tuple([getattr(piece, name) for name in of_time]) for piece in self._pieces]
        combined, row = _distinct(holder, kind, tag if of_time else np.zeros_like(tag))
        order = [*of_holder, *of_device, *of_time]
        position = [order.index(name) for name in self._wanted]
        keys = []
        for holder_number, kind_number, piece in combined.tolist():
            values = (*by_holder[holder_number], *by_device[kind_number], *by_time[piece])
            keys.append(self._number(tuple([values[at] for at in position])))
        key = np.array(keys, dtype=np.int64)[row]
        place = np.array([self._places[values] for values in by_price], dtype=np.int64)[price]
        numbers = np.stack([self._span_of[tag], key, place], axis=1)
        self._rows.append((numbers[key >= 0], figures[key >= 0]))


def _ascending(numbers: Numbering[H]) -> tuple[list[H], Int64Array]:
    """Return the sorted values, and for each number its position among them."""
    values = sorted(numbers)  # type: ignore[type-var]  # tuples of names
    position = np.zeros(len(values), dtype=np.int64)
    position[[numbers[value] for value in values]] = np.arange(len(values))
    return values, position


def _distinct(*columns: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the distinct rows of a table, given by its columns of numbers that are not negative, and for each row of
    the table the index of the equal distinct row."""
    code = columns[0]
    for column in columns[1:]:
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, row = np.unique(code, return_index=True, return_inverse=True)
    return np.stack([column[first] for column in columns], axis=1), row.reshape(-1)


def _lookup(eras: Int64Array, numbers: Int64Array, values_of: Callable[[int, int], H]) -> tuple[list[H], Int64Array]:
    """Return the distinct results of `values_of` for the pairs of an era and a number, sorted, and for each row the
    index of its result."""
    shift = int(numbers.min(initial=0))
    pairs, row = _distinct(eras, numbers - shift)
    numbering: Numbering[H] = Numbering()
    number = np.array([numbering[values_of(era, one + shift)] for era, one in pairs.tolist()], dtype=np.int64)
    values, position = _ascending(numbering)
    return values, position[number][row]


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
    fleet: Fleet, pieces: Sequence[ConstantSpan], kinds: DeviceKinds, gpus: Collection[int] | None
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


def hours(
    cursor: Cursor, state: State, start_ms: int, end_ms: int, timezone: str, cache: ResultCache | None = None
) -> Hours:
    """Return the held time by team, queue and local hour."""
    dimensions: tuple[Dimension, ...] = ("team", "queue", "hour")
    fleet = state.fleet
    pieces = pieces_of(state, start_ms, end_ms, frozenset(dimensions), ZoneInfo(timezone)) if start_ms < end_ms else []
    if not pieces:
        return Hours((), (), (), *(np.zeros(0, dtype=np.int64) for _ in range(5)))
    known = classes(cursor, start_ms, end_ms, dimensions, {}, fleet.team_labels, cache)
    table = sums(cursor, state, _spans(pieces), payers=known.of, memos=False)
    tag, _, payer, busy, idle, unknown, unheld, down = table.T
    names = sorted({piece.hour for piece in pieces})
    number = {name: place for place, name in enumerate(names)}
    hour_of = np.array([number[piece.hour] for piece in pieces], dtype=np.int64)
    eras = np.array([piece.era for piece in pieces], dtype=np.int64)
    serving = busy + idle + unknown + unheld
    metered, capacity = np.zeros(len(pieces), dtype=np.int64), np.zeros(len(names), dtype=np.int64)
    np.add.at(metered, tag, serving + down)
    np.add.at(capacity, hour_of[tag], serving)
    of_piece = {(place, EVERY_GPU): gpu_us for place, gpu_us in enumerate(metered.tolist())}
    for one in _unseen(cursor, state, pieces, dimensions, of_piece, state.device_kinds(cursor, frozenset()), None):
        capacity[hour_of[one.piece]] += one.unallocated_us + one.unmetered_us
    held = np.flatnonzero((payer != UNHELD) & (busy + idle + unknown > 0))
    first = {piece.era: piece for piece in reversed(pieces)}

    def owner_of(era: int, payer: int) -> tuple[str, str]:
        team, queue = key_of(dimensions[:2], fleet, first[era], EVERY_GPU, NO_DEVICE, known.names[payer])
        return team, queue

    owners, owner = _lookup(eras[tag[held]], payer[held], owner_of)
    return Hours(names, capacity.tolist(), owners, owner, hour_of[tag[held]], busy[held], idle[held], unknown[held])


def hourly_peaks(
    cursor: Cursor,
    state: State,
    start_ms: int,
    end_ms: int,
    jobs: Collection[tuple[str, str]],
    timezone: str,
    cache: ResultCache | None = None,
) -> dict[JobName, Peak]:
    """Return the most that each job held and used in one local hour. jobs: the jobs as (namespace, job)."""
    if not jobs or start_ms >= end_ms:
        return {}
    fleet = state.fleet
    where: dict[Dimension, Collection[str]] = {"namespace": {name for name, _ in jobs}, "job": {job for _, job in jobs}}
    pieces = pieces_of(state, start_ms, end_ms, frozenset(("team", "hour")), ZoneInfo(timezone))
    known = classes(cursor, start_ms, end_ms, ("team", "namespace", "job"), where, fleet.team_labels, cache)
    table = sums(cursor, state, _spans(pieces), payers=known.of, memos=False)
    table = table[table[:, _PAYER] != UNHELD]
    tag, _, payer, busy, idle, unknown, _, _ = table.T
    first = {piece.era: piece for piece in reversed(pieces)}

    def job_of(era: int, payer: int) -> JobName:
        name = known.names[payer]
        (team,) = key_of(("team",), fleet, first[era], EVERY_GPU, NO_DEVICE, name)
        return team, name.namespace, name.job, name.cluster

    job_names, job = _lookup(np.array([piece.era for piece in pieces], dtype=np.int64)[tag], payer, job_of)
    # A local hour may consist of several pieces.
    number = {name: place for place, name in enumerate(dict.fromkeys(piece.hour for piece in pieces))}
    hour = np.array([number[piece.hour] for piece in pieces], dtype=np.int64)[tag]
    cells, cell = np.unique(job * len(number) + hour, return_inverse=True)
    totals, most = np.zeros((len(cells), 2), dtype=np.int64), np.zeros((len(job_names), 2), dtype=np.int64)
    np.add.at(totals, cell.reshape(-1), np.stack([busy + idle + unknown, busy], axis=1))
    np.maximum.at(most, cells // len(number), totals)
    peak_of = {name: Peak(*row) for name, row in zip(job_names, most.tolist(), strict=True)}
    return {name: peak for name, peak in peak_of.items() if name[1:3] in jobs and peak.held_us}
