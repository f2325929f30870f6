"""Computes usage and held time as columns, for several groupings at once.

The engine sums by class of holders and kind of device. Names are looked up once per class and kind, and the paying team
once per queue and namespace. The figures equal those of `usage` with the same grouping.

Start-up time requires reading every pod, so it is computed once for all groupings. Memory grows with the results: it
holds their keys, and some hundred bytes per row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar
from zoneinfo import ZoneInfo

import numpy as np

from accountant.core import gpu_time_accounts as proration
from accountant.ledger.protocols import OF_HOLDERS
from accountant.ledger.usage_columns import (
    COLUMNS,
    MEMOS,
    PRICED_BY,
    Hours,
    JobName,
    Peak,
    Place,
    UsageColumns,
    Whole,
    repeated,
)
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.ledger_state import DeviceKinds, State
from accountant.storage.query.group_by_dimensions import (
    OF_TIME,
    UNHELD,
    ConstantSpan,
    HolderClasses,
    ResultCache,
    classes,
    key_of,
    pieces_of,
)
from accountant.storage.query.idle_time_query import IdleTime, idle_time
from accountant.storage.query.usage_query import unseen
from accountant.storage.query.usage_sums import accounts
from accountant.storage.span_splitting import EVERY_GPU, TaggedSpan
from accountant.storage.write.name_ids import NO_DEVICE
from accountant.wire.usage_models import Dimension
from gputally.base.units import MS_PER_HOUR

H = TypeVar("H", bound=Hashable)


def hours(cursor: Cursor, state: State, start_ms: int, end_ms: int, timezone: str) -> Hours:
    """Return the held time by team, queue and local hour."""
    asked: tuple[Dimension, ...] = ("team", "queue", "hour")
    fleet = state.fleet
    pieces = pieces_of(state, start_ms, end_ms, frozenset(asked), ZoneInfo(timezone)) if start_ms < end_ms else []
    if not pieces:
        return Hours((), (), (), *(np.zeros(0, dtype=np.int64) for _ in range(5)))
    spans = [TaggedSpan(tag, piece.start_ms, piece.end_ms) for tag, piece in enumerate(pieces)]
    known = classes(cursor, start_ms, end_ms, asked, {}, fleet.team_labels)
    table = accounts(cursor, state, spans, payers=known.of)
    tag, _, payer, busy, idle, unknown, unheld, down = table.T
    listed = sorted({piece.hour for piece in pieces})
    number = {name: place for place, name in enumerate(listed)}
    hour_of = np.array([number[piece.hour] for piece in pieces], dtype=np.int64)
    eras = np.array([piece.era for piece in pieces], dtype=np.int64)
    serving = busy + idle + unknown + unheld
    metered, capacity = np.zeros(len(pieces), dtype=np.int64), np.zeros(len(listed), dtype=np.int64)
    np.add.at(metered, tag, serving + down)
    np.add.at(capacity, hour_of[tag], serving)
    of_piece = {(place, EVERY_GPU): gpu_us for place, gpu_us in enumerate(metered.tolist())}
    told = state.apart(cursor, frozenset())
    for place, _, cells, unmetered_us, _ in unseen(cursor, state, pieces, asked, of_piece, told, None):
        capacity[hour_of[place]] += cells.unheld_us + unmetered_us
    held = np.flatnonzero((payer != UNHELD) & (busy + idle + unknown > 0))
    first = {piece.era: piece for piece in reversed(pieces)}

    def owner_of(era: int, look: int) -> tuple[str, str]:
        team, queue = key_of(asked[:2], fleet, first[era], EVERY_GPU, NO_DEVICE, known.names[look])
        return team, queue

    owners, owner = _lookup(eras[tag[held]], payer[held], owner_of)
    return Hours(
        listed, capacity.tolist(), owners, owner, hour_of[tag[held]], busy[held], idle[held], unknown[held],
    )  # fmt: skip


def hourly_peaks(
    cursor: Cursor,
    state: State,
    start_ms: int,
    end_ms: int,
    jobs: Collection[tuple[str, str]],
    timezone: str,
    memory: ResultCache | None = None,
) -> dict[JobName, Peak]:
    """Return the maximum of any local hour for these jobs, by team, namespace, job and cluster."""
    if not jobs or start_ms >= end_ms:
        return {}
    fleet = state.fleet
    where: dict[Dimension, Collection[str]] = {"namespace": {name for name, _ in jobs}, "job": {job for _, job in jobs}}
    pieces = pieces_of(state, start_ms, end_ms, frozenset(("team", "hour")), ZoneInfo(timezone))
    spans = [TaggedSpan(tag, piece.start_ms, piece.end_ms) for tag, piece in enumerate(pieces)]
    known = classes(cursor, start_ms, end_ms, ("team", "namespace", "job"), where, fleet.team_labels, memory)
    table = accounts(cursor, state, spans, payers=known.of)
    table = table[table[:, 2] != UNHELD]
    tag, _, payer, busy, idle, unknown, _, _ = table.T
    first = {piece.era: piece for piece in reversed(pieces)}

    def job_of(era: int, look: int) -> JobName:
        name = known.names[look]
        (team,) = key_of(("team",), fleet, first[era], EVERY_GPU, NO_DEVICE, name)
        return team, name.namespace, name.job, name.cluster

    found, job = _lookup(np.array([piece.era for piece in pieces], dtype=np.int64)[tag], payer, job_of)
    # A local hour may consist of several pieces.
    number = {name: place for place, name in enumerate(dict.fromkeys(piece.hour for piece in pieces))}
    hour = np.array([number[piece.hour] for piece in pieces], dtype=np.int64)[tag]
    cells, cell = np.unique(job * len(number) + hour, return_inverse=True)
    sums, most = np.zeros((len(cells), 2), dtype=np.int64), np.zeros((len(found), 2), dtype=np.int64)
    np.add.at(sums, cell.reshape(-1), np.stack([busy + idle + unknown, busy], axis=1))
    for name, length_ms in repeated(start_ms, end_ms, timezone).items():
        again = cells % len(number) == number[name]
        sums[again] = sums[again] * MS_PER_HOUR // length_ms
    np.maximum.at(most, cells // len(number), sums)
    peak_of = {name: Peak(*row) for name, row in zip(found, most.tolist(), strict=True)}
    return {name: peak for name, peak in peak_of.items() if name[1:3] in jobs and peak.held_us}


_WIDTH = len(COLUMNS)
_UNALLOCATED, _UNMETERED, _DOWN = (COLUMNS.index(name) for name in ("unallocated", "unmetered", "down"))
_PHASES = {name: COLUMNS.index(name) for name in ("starting", "gang_waiting")}


def usage_columns(
    cursor: Cursor,
    state: State,
    edges: Sequence[int],
    cuts: Sequence[Sequence[Dimension]],
    timezone: str,
    *,
    memos: bool = False,
) -> list[UsageColumns]:
    """Return the usage of each span between two neighbouring edges, which ascend.

    The result has one UsageColumns per grouping in `cuts`. Each is grouped by its dimensions and by PRICED_BY."""
    zone = ZoneInfo(timezone)
    tables = [_Table.of(cursor, state, edges, by, zone, memos=memos) for by in cuts]
    if edges[0] >= edges[-1]:
        return [table.answer() for table in tables]
    for table in tables:
        table.add_sums(cursor)
    every = frozenset(dimension for by in cuts for dimension in by) | set(PRICED_BY)
    _, finest = _cut(state, edges, every, zone)
    for rows in idle_time(cursor, state, finest):
        for table in tables:
            table.add_phases(rows, finest)
    return [table.answer() for table in tables]


def _cut(
    state: State, edges: Sequence[int], asked: frozenset[Dimension], zone: ZoneInfo
) -> tuple[list[int], list[ConstantSpan]]:
    """Return the pieces of all spans between edges, and for each piece the index of its span."""
    stretch_of: list[int] = []
    pieces: list[ConstantSpan] = []
    for number, (start, end) in enumerate(pairwise(edges)):
        pieces += pieces_of(state, start, end, asked, zone) if start < end else []
        stretch_of += [number] * (len(pieces) - len(stretch_of))
    return stretch_of, pieces


@dataclass(slots=True)
class _Numbers(Generic[H]):
    """Numbers values in the order in which they are first seen."""

    of: dict[H, int] = field(default_factory=dict)

    def number(self, value: H) -> int:
        return self.of.setdefault(value, len(self.of))

    def ascending(self) -> tuple[list[H], Whole]:
        """Return the sorted values, and for each number its position among them."""
        values = sorted(self.of)  # type: ignore[type-var]  # tuples of names
        place = np.zeros(len(values), dtype=np.int64)
        place[[self.of[value] for value in values]] = np.arange(len(values))
        return values, place


@dataclass(slots=True)
class _Table:
    """The rows of one grouping while they are collected.

    A key combines values of a class of holders, a kind of device and a piece of time. Each of the three is looked up
    once. Pieces of one era differ only in day and hour, which do not depend on holders and devices.

    stretch_of, era: by piece.
    of_era: one piece of each era."""

    state: State
    by: tuple[Dimension, ...]
    stretch_of: Whole
    pieces: Sequence[ConstantSpan]
    era: Whole
    of_era: Sequence[ConstantSpan]
    told: DeviceKinds
    known: HolderClasses
    memos: bool
    keys: _Numbers[tuple[str, ...]] = field(default_factory=_Numbers)
    places: _Numbers[Place] = field(default_factory=_Numbers)
    rows: list[tuple[Whole, Whole]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        cursor: Cursor,
        state: State,
        edges: Sequence[int],
        by: Sequence[Dimension],
        zone: ZoneInfo,
        *,
        memos: bool = False,
    ) -> _Table:
        asked = frozenset((*by, *PRICED_BY))
        stretch_of, pieces = _cut(state, edges, asked, zone)
        told = state.apart(cursor, asked - OF_HOLDERS - OF_TIME)
        known = classes(cursor, edges[0], edges[-1], asked & OF_HOLDERS, {}, state.fleet.team_labels)
        eras: dict[tuple[int, int], ConstantSpan] = {}
        for stretch, piece in zip(stretch_of, pieces, strict=True):
            eras.setdefault((stretch, piece.era), piece)
        number = {era: place for place, era in enumerate(eras)}
        era = [number[stretch, piece.era] for stretch, piece in zip(stretch_of, pieces, strict=True)]
        return cls(
            state, tuple(by), np.array(stretch_of, dtype=np.int64), pieces, np.array(era, dtype=np.int64),
            list(eras.values()), told, known, memos=memos,
        )  # fmt: skip

    @property
    def width(self) -> int:
        """Number of columns of a row: COLUMNS, and MEMOS if requested."""
        return _WIDTH + len(MEMOS) * self.memos

    def add_sums(self, cursor: Cursor) -> None:
        """Add the ledger's rows and sums, and the unmetered and down time, for which there are no rows."""
        told, state = self.told, self.state
        spans = [TaggedSpan(tag, piece.start_ms, piece.end_ms) for tag, piece in enumerate(self.pieces)]
        found = accounts(cursor, state, spans, told, payers=self.known.of, memos=self.memos)
        tag, device, payer, busy, idle, unknown, unheld, down, *rest_of_cells = found.T
        none = np.zeros(len(found), dtype=np.int64)
        of_holder = payer != UNHELD
        columns = [busy, idle, unknown, np.where(of_holder, 0, unheld), none, down, none, none]
        if self.memos:
            borrowed, unattributed, memory, energy, energy_blind, memory_blind = rest_of_cells
            columns += [none, borrowed, unattributed, memory, memory_blind, energy, energy_blind]
        held = np.stack(columns, axis=1)
        self._add(tag, device, payer, held)
        # The unheld part of a row with a holder has no holder.
        rest = np.flatnonzero(of_holder & (unheld > 0))
        loose = np.zeros((len(rest), self.width), dtype=np.int64)
        loose[:, _UNALLOCATED] = unheld[rest]
        self._add(tag[rest], device[rest], np.full(len(rest), UNHELD), loose)
        self._add_unseen(cursor, tag, device, busy + idle + unknown + unheld + down)

    def add_phases(self, rows: Sequence[IdleTime], finest: Sequence[ConstantSpan]) -> None:
        """Add start-up time. The pieces of `rows` are at least as fine as those of this table."""
        starts = [piece.start_ms for piece in self.pieces]
        at = np.searchsorted(starts, [piece.start_ms for piece in finest], side="right") - 1
        kinds, of_class = self.told.kinds, self.known.of
        tag = at[np.array([row.piece for row in rows], dtype=np.int64)]
        if kinds is not None:
            device = [kinds.of[row.device] for row in rows]
        else:
            device = [row.device * self.told.by_device for row in rows]
        payer = [of_class[row.payer] for row in rows]
        cells = np.zeros((len(rows), self.width), dtype=np.int64)
        cells[np.arange(len(rows)), [_PHASES[row.phase] for row in rows]] = [row.idle_us for row in rows]
        self._add(tag, np.array(device, dtype=np.int64), np.array(payer, dtype=np.int64), cells)

    def answer(self) -> UsageColumns:
        keys, key = self.keys.ascending()
        places, place = self.places.ascending()
        if not self.rows:
            empty = np.zeros((0, 3 + self.width), dtype=np.int64)
            return self._answer(keys, places, empty[:, :3], empty[:, 3:])
        numbers = np.concatenate([numbers for numbers, _ in self.rows])
        told = np.stack([numbers[:, 0], key[numbers[:, 1]], place[numbers[:, 2]]], axis=1)
        at, gpu_us = proration.merged(told, np.concatenate([cells for _, cells in self.rows]))
        there = gpu_us.any(axis=1)
        at, gpu_us = at[there], gpu_us[there]
        return self._answer(keys, places, at, gpu_us)

    def _answer(
        self, keys: Sequence[tuple[str, ...]], places: Sequence[Place], at: Whole, cells: Whole
    ) -> UsageColumns:
        memos = cells[:, _WIDTH:] if self.memos else None
        return UsageColumns(keys, places, at[:, 0], at[:, 1], at[:, 2], cells[:, :_WIDTH], memos)

    def _add_unseen(self, cursor: Cursor, tag: Whole, device: Whole, metered_us: Whole) -> None:
        at, sums = proration.merged(np.stack([tag, device], axis=1), metered_us.reshape(-1, 1))
        metered: dict[tuple[int, int], int] = defaultdict(int)
        for (piece, kind), (gpu_us,) in zip(at.tolist(), sums.tolist(), strict=True):
            metered[piece, self.told.member[kind]] += gpu_us
        wanted = (*self.by, *PRICED_BY)
        numbers, cells = [], []
        for piece, key, found, unmetered_us, down_us in unseen(
            cursor, self.state, self.pieces, wanted, metered, self.told, None
        ):
            place = Place(*key[len(self.by) :])
            numbers.append((piece, self.keys.number(key[: len(self.by)]), self.places.number(place)))
            row = [0] * self.width
            row[_UNALLOCATED], row[_UNMETERED], row[_DOWN] = found.unheld_us, unmetered_us, down_us
            if self.memos:
                row[_WIDTH + MEMOS.index("node_down")] = down_us
            cells.append(row)
        if numbers:
            told = np.array(numbers, dtype=np.int64)
            told[:, 0] = self.stretch_of[told[:, 0]]
            self.rows.append((told, np.array(cells, dtype=np.int64)))

    def _add(self, tag: Whole, device: Whole, payer: Whole, cells: Whole) -> None:
        """Add rows given by piece, kind of device and class of holders."""
        if not len(tag):
            return
        fleet, shown, names = self.state.fleet, self.told.shown, self.known.names
        of_holder = [name for name in self.by if name in OF_HOLDERS]
        of_time = [name for name in self.by if name in OF_TIME]
        of_place = [name for name in self.by if name not in OF_HOLDERS and name not in OF_TIME]

        def held_by(era: int, look: int) -> tuple[str, ...]:
            holder = names[look] if look != UNHELD else None
            return key_of(of_holder, fleet, self.of_era[era], EVERY_GPU, NO_DEVICE, holder)

        def standing(era: int, kind: int) -> tuple[str, ...]:
            return key_of(of_place, fleet, self.of_era[era], *shown[kind], None)

        def priced(era: int, kind: int) -> tuple[str, ...]:
            return key_of(PRICED_BY, fleet, self.of_era[era], *shown[kind], None)

        at = self.era[tag]
        holders, holder = _lookup(at, payer, held_by)
        spots, spot = _lookup(at, device, standing)
        costing, price = _lookup(at, device, priced)
        times = [tuple([getattr(piece, name) for name in of_time]) for piece in self.pieces]
        combined, row = _distinct(holder, spot, tag if of_time else np.zeros_like(tag))
        order = [*of_holder, *of_place, *of_time]
        put = [order.index(name) for name in self.by]
        number = self.keys.number
        key = np.array(
            [number(_arranged((*holders[h], *spots[s], *times[piece]), put)) for h, s, piece in combined.tolist()],
            dtype=np.int64,
        )
        place = np.array([self.places.number(Place(*values)) for values in costing], dtype=np.int64)
        self.rows.append((np.stack([self.stretch_of[tag], key[row], place[price]], axis=1), cells))


def _arranged(values: tuple[str, ...], put: Sequence[int]) -> tuple[str, ...]:
    return tuple([values[at] for at in put])


def _distinct(*columns: Whole) -> tuple[Whole, Whole]:
    """Return the distinct rows of some columns, and for each row the index of its distinct row."""
    code = columns[0]
    for column in columns[1:]:
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, row = np.unique(code, return_index=True, return_inverse=True)
    return np.stack([column[first] for column in columns], axis=1), row.reshape(-1)


def _lookup(eras: Whole, looks: Whole, of: Callable[[int, int], H]) -> tuple[list[H], Whole]:
    """Return the distinct results of `of` for the pairs, sorted, and for each row the index of its result."""
    shift = int(looks.min(initial=0))
    pairs, row = _distinct(eras, looks - shift)
    numbers: _Numbers[H] = _Numbers()
    number = np.array([numbers.number(of(era, look + shift)) for era, look in pairs.tolist()], dtype=np.int64)
    values, place = numbers.ascending()
    return values, place[number][row]
