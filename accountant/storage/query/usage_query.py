"""Computes usage per group over any span, including unmetered and down time.

Whole days, hours and quarter-hours are read from their sums, and the edges from rows. Unmetered time has no rows, and
down time comes from the inventory. Both are computed per GPU and added, so that the accounts of every GPU add up to its
capacity exactly."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add
from zoneinfo import ZoneInfo

from accountant.core.gpu_time_accounts import AccountVector, full_us
from accountant.ledger.protocols import OF_HOLDERS
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.gpu_lifetimes import Fleet, down_in, in_service
from accountant.storage.ledger_state import DeviceKinds, State, device_kinds
from accountant.storage.query.group_by_dimensions import (
    OF_TIME,
    UNHELD,
    ConstantSpan,
    ResultCache,
    asks_for_unheld_time,
    classes,
    key_of,
    of_all,
    pieces_of,
)
from accountant.storage.query.usage_sums import Sum, scan
from accountant.storage.span_splitting import TaggedSpan
from accountant.storage.write.name_ids import DeviceName, holders
from accountant.wire.usage_models import Accounts, Dimension, UsageLine, known_memory
from gputally.base.units import MS_PER_HOUR

Where = Mapping[Dimension, Collection[str]]
_OF_PLACES: tuple[Dimension, ...] = ("cluster", "node", "gpu")
_NO_PAYER = -1
MOST_APART = 1_000
"""If a filter selects at most this many GPUs, only these are summed. Otherwise all are summed and the others are
dropped."""


@dataclass(slots=True)
class _Line:
    """The figures of one group while they are collected. The cells of rows do not include unmetered time."""

    cells: AccountVector
    unmetered_us: int = 0
    node_down_us: int = 0


def usage(
    cursor: Cursor,
    state: State,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Where | None = None,
    timezone: str = "UTC",
    memory: ResultCache | None = None,
) -> list[UsageLine]:
    """Return the usage per group, see `Ledger.usage`. memory: the snapshot's cache."""
    if start_ms >= end_ms:
        return []

    def find() -> list[UsageLine]:
        return usage_between(cursor, state, (start_ms, end_ms), by, where, timezone, memory)[0]

    return find() if memory is None else memory.usage(start_ms, end_ms, by, where, timezone, find)


def usage_between(
    cursor: Cursor,
    state: State,
    edges: Sequence[int],
    by: Sequence[Dimension],
    where: Where | None = None,
    timezone: str = "UTC",
    memory: ResultCache | None = None,
) -> list[list[UsageLine]]:
    """Return the `usage` of each span between two neighbouring edges, which ascend. The rows are read only once."""
    where = where or {}
    wanted = [*dict.fromkeys([*by, *where])]
    asked, zone = frozenset(wanted), ZoneInfo(timezone)
    stretch_of: list[int] = []
    pieces: list[ConstantSpan] = []
    for number, (start, end) in enumerate(pairwise(edges)):
        if start < end:
            pieces += pieces_of(state, start, end, asked, zone)
            stretch_of += [number] * (len(pieces) - len(stretch_of))
    lines: list[dict[tuple[str, ...], _Line]] = [{} for _ in pairwise(edges)]
    if not pieces:
        return [[] for _ in lines]
    filters = [(wanted.index(dimension), frozenset(allowed)) for dimension, allowed in where.items()]
    places = [wanted.index(dimension) for dimension in by]
    for tag, key, cells, unmetered, down in _contributions(cursor, state, pieces, wanted, where, memory):
        if filters and any(key[place] not in allowed for place, allowed in filters):
            continue
        group = tuple([key[place] for place in places])
        of_stretch = lines[stretch_of[tag]]
        line = of_stretch.get(group)
        if line is None:
            of_stretch[group] = _Line(cells, unmetered, down)
            continue
        line.cells = AccountVector(*map(add, line.cells, cells))
        line.unmetered_us += unmetered
        line.node_down_us += down
    return [[_answer(by, key, line) for key, line in sorted(found.items())] for found in lines]


def _answer(by: Sequence[Dimension], key: tuple[str, ...], line: _Line) -> UsageLine:
    cells = line.cells
    return UsageLine(
        key=dict(zip(by, key, strict=True)),
        accounts_gpu_us=Accounts(
            busy=cells.busy_us,
            allocated_idle=cells.idle_us,
            allocated_unknown=cells.unknown_us,
            unallocated=cells.unheld_us,
            unmetered=line.unmetered_us,
            down=cells.down_us + line.node_down_us,
        ),
        node_down_us=line.node_down_us,
        borrowed_busy_us=cells.borrowed_us,
        unattributed_busy_us=cells.unattributed_us,
        memory_mib_s=known_memory(cells.memory_mib_s, cells.memory_blind_us, cells.allocated_us),
        memory_unknown_us=cells.memory_blind_us,
        energy_uj=cells.energy_uj,
    )


Contribution = tuple[int, tuple[str, ...], AccountVector, int, int]
"""Index of the piece, key, cells of rows, unmetered and node-down microseconds."""


def _contributions(
    cursor: Cursor,
    state: State,
    pieces: Sequence[ConstantSpan],
    wanted: Sequence[Dimension],
    where: Where,
    memory: ResultCache | None,
) -> Iterable[Contribution]:
    fleet = state.fleet
    asked = frozenset(wanted)
    spans = [TaggedSpan(tag, piece.start_ms, piece.end_ms) for tag, piece in enumerate(pieces)]
    of_devices = asked - OF_HOLDERS - OF_TIME
    seen, gpus = _looked_at(cursor, state, where)
    told = state.apart(cursor, of_devices) if gpus is None else device_kinds(fleet, seen, of_devices)
    labels = fleet.team_labels if "team" in asked else ()
    known, sums = None, None
    if asked & OF_HOLDERS:
        short = pieces[-1].end_ms - pieces[0].start_ms <= MS_PER_HOUR
        if (short or gpus is not None) and not OF_HOLDERS & where.keys():
            # For a long span or a few GPUs, the sums themselves show the holders.
            sums = scan(cursor, state, spans, told, by_payer=True, gpus=gpus)
            payers = {found.payer for found in sums} - {UNHELD}
            known = of_all(holders(cursor, payers, labels, users="user" in asked))
        else:
            known = classes(cursor, pieces[0].start_ms, pieces[-1].end_ms, asked, where, labels, memory)
            if "queue" in where and not asks_for_unheld_time(where):
                rules, queues = {piece.era: piece.rules for piece in pieces}.values(), frozenset(where["queue"])
                known = known.only(lambda name: any(each.queue(name.queue_ref) in queues for each in rules))
    if sums is None:
        sums = scan(cursor, state, spans, told, payers=known.of if known else None, gpus=gpus)
    names = known.names if known else {}
    timed = [(place, dimension == "hour") for place, dimension in enumerate(wanted) if dimension in OF_TIME]
    looks: dict[tuple[int, int, int], tuple[str, ...]] = {}
    metered: dict[tuple[int, int], int] = defaultdict(int)
    for found in sums:
        metered[found.tag, told.member[found.device]] += found.cells.capacity_us
        piece, (gpu, device) = pieces[found.tag], told.shown[found.device]
        held, rest = _held_and_rest(found)
        if held is not None:
            look = (piece.era, found.device, found.payer)
            if look not in looks:
                looks[look] = key_of(wanted, fleet, piece, gpu, device, names.get(found.payer))
            yield found.tag, _at(piece, looks[look], timed), held, 0, 0
        if rest is not None:
            look = (piece.era, found.device, _NO_PAYER)
            if look not in looks:
                looks[look] = key_of(wanted, fleet, piece, gpu, device, None)
            yield found.tag, _at(piece, looks[look], timed), rest, 0, 0
    if not asks_for_unheld_time(where):
        return
    if OF_HOLDERS & where.keys():
        # The sums do not contain holders that the filter excludes, but their time was metered.
        metered = defaultdict(int)
        for found in scan(cursor, state, spans, told, gpus=gpus):
            metered[found.tag, told.member[found.device]] += found.cells.capacity_us
    yield from unseen(cursor, state, pieces, wanted, metered, told, gpus)


def _at(piece: ConstantSpan, key: tuple[str, ...], timed: Sequence[tuple[int, bool]]) -> tuple[str, ...]:
    """Return the key of another piece of the same era, with this piece's day and hour."""
    if not timed:
        return key
    values = list(key)
    for place, of_hour in timed:
        values[place] = piece.hour if of_hour else piece.day
    return tuple(values)


def _looked_at(cursor: Cursor, state: State, where: Where) -> tuple[Mapping[int, DeviceName], frozenset[int] | None]:
    """Return the devices that a filter by node or GPU can match, and their GPUs. None means that all must be read.

    A GPU that moved is included with all its devices. The filter drops its time on other nodes later."""
    if "node" not in where and "gpu" not in where:
        return {}, None  # a filter by cluster alone selects most GPUs
    fleet = state.fleet
    # A GPU that moved has devices on other nodes too.
    devices = state.device_names(cursor)
    near = state.devices.on(where["node"], devices) if "node" in where else devices
    asked = {dimension: where[dimension] for dimension in _OF_PLACES if dimension in where}
    seen = frozenset(
        name.gpu
        for name in near.values()
        if fleet.gpus[name.gpu].uuid in asked.get("gpu", (fleet.gpus[name.gpu].uuid,))
        and fleet.gpus[name.gpu].cluster in asked.get("cluster", (fleet.gpus[name.gpu].cluster,))
    )
    if len(seen) > MOST_APART:
        return {}, None
    return {number: name for number, name in devices.items() if name.gpu in seen}, seen


def _held_and_rest(found: Sum) -> tuple[AccountVector | None, AccountVector | None]:
    """Return the cells that the holder pays, and those without a payer."""
    cells = found.cells
    if not found.payer:
        return None, cells
    if not cells.unheld_us:
        return cells, None
    rest = AccountVector(unheld_us=cells.unheld_us)
    return AccountVector(*(a - b for a, b in zip(cells, rest, strict=True))), rest


def unseen(
    cursor: Cursor,
    state: State,
    pieces: Sequence[ConstantSpan],
    wanted: Sequence[Dimension],
    metered: Mapping[tuple[int, int], int],
    told: DeviceKinds,
    gpus: Collection[int] | None,
) -> Iterable[Contribution]:
    """Yield the time without rows: unmetered time, and the unheld or missing time in which the node was down."""
    fleet = state.fleet
    spans = down_in(fleet.census.down(), [(piece.start_ms, piece.end_ms) for piece in pieces])
    down_us: dict[tuple[int, int], int] = defaultdict(int)
    if gpus is not None:
        spans = [span for span in spans if span.gpu in gpus]
    for span in spans:
        down_us[span.tag, told.of_gpu[span.gpu]] += full_us(span.end_ms - span.start_ms)
    for found in scan(cursor, state, spans, told, gpus=gpus):
        down_us[found.tag, told.member[found.device]] -= found.cells.capacity_us
        # Unheld time of a node that is down moves from `unallocated` to `down`.
        if found.cells.unheld_us:
            key = key_of(wanted, fleet, pieces[found.tag], *told.shown[found.device], None)
            yield found.tag, key, AccountVector(unheld_us=-found.cells.unheld_us), 0, found.cells.unheld_us
    for tag, member, gpu, device, life_us in _lives(fleet, pieces, told, gpus):
        missing = life_us - metered.get((tag, member), 0)
        missing_down = down_us.get((tag, member), 0)
        if missing:
            key = key_of(wanted, fleet, pieces[tag], gpu, device, None)
            yield tag, key, AccountVector(), missing - missing_down, missing_down


def _lives(
    fleet: Fleet, pieces: Sequence[ConstantSpan], told: DeviceKinds, gpus: Collection[int] | None
) -> Iterable[tuple[int, int, int, DeviceName, int]]:
    """Yield the capacity in each piece as (tag, member, a GPU of it, its last device, microseconds)."""
    alike: dict[int, list[int]] = defaultdict(list)
    for gpu in fleet.tenures if gpus is None else gpus:
        member = told.of_gpu[gpu]
        if member in told.shared:
            alike[member].append(gpu)
            continue
        life = fleet.life(gpu)
        for tag, piece in enumerate(pieces):
            begin, end = max(piece.start_ms, life.start_ms), min(piece.end_ms, life.end_ms)
            if begin < end:
                device = DeviceName(life.node_at(end - 1), fleet.gpus[gpu].model, "")
                yield tag, member, gpu, device, full_us(end - begin)
    spans = [(piece.start_ms, piece.end_ms) for piece in pieces]
    for member, gpus in alike.items():
        lives = Counter((life.start_ms, life.end_ms) for life in map(fleet.life, gpus))
        for tag, parts in enumerate(in_service(lives, spans)):
            whole_us = sum(full_us(end - start) * count for (start, end), count in parts.items())
            yield tag, member, *told.shared[member], whole_us
