"""What every holder held, as columns: accountant.books.held.Held of the ledger.

The engine sums by holder and kind of device; names are looked up once each, and who pays is worked out for the few
queues and namespaces there are. It says what `usage` says by team, namespace, job, user, cluster and PRICED_BY.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar
from zoneinfo import ZoneInfo

import numpy as np

from accountant.books.costs import PRICED_BY, Place
from accountant.books.held import Held, Hours, JobName, Peak, Whole, repeated
from accountant.store.classes import NOBODY, classes, named, tell, told_apart
from accountant.store.database import Cursor
from accountant.store.memory import Memory
from accountant.store.names import NO_DEVICE, HolderName
from accountant.store.pieces import Piece, key_of, pieces_of
from accountant.store.scan import accounts
from accountant.store.spans import EVERY_GPU, TaggedSpan
from accountant.store.state import State
from accountant.store.usage import unseen
from accountant.wire import Dimension
from agent.units import MS_PER_HOUR

V = TypeVar("V", str, Place, tuple[str, str], JobName)
_ASKED: tuple[Dimension, ...] = ("team", "namespace", "job", "user", "cluster")


def held(cursor: Cursor, state: State, edges: Sequence[int], timezone: str) -> Held:
    """Of each stretch between two neighbouring edges, which ascend."""
    asked, zone = frozenset(("team", *PRICED_BY)), ZoneInfo(timezone)
    stretch_of: list[int] = []
    pieces: list[Piece] = []
    for number, (start, end) in enumerate(pairwise(edges)):
        pieces += pieces_of(state, start, end, asked, zone) if start < end else []
        stretch_of += [number] * (len(pieces) - len(stretch_of))
    spans = [TaggedSpan(tag, piece.start_ms, piece.end_ms) for tag, piece in enumerate(pieces)]
    told = state.apart(cursor, frozenset(PRICED_BY))
    table = accounts(
        cursor, spans, state.unfolded, state.days.kept, by_device=told.by_device, kinds=told.kinds, by_payer=True
    )
    table = table[table[:, 2] != NOBODY]
    tags, kinds = table[:, 0], table[:, 1]
    names = _names(cursor, state, edges, table[:, 2])

    def team_of(tag: int, look: int) -> str:
        return key_of(("team",), state.fleet, pieces[tag], EVERY_GPU, NO_DEVICE, names.looks[look])[0]

    def place_of(tag: int, kind: int) -> Place:
        return Place(*key_of(PRICED_BY, state.fleet, pieces[tag], *told.shown[kind], None))

    teams, team = _looked_up(tags, names.look, team_of)
    places, place = _looked_up(tags, kinds, place_of)
    return Held(
        teams, names.jobs, names.clusters, names.users, places, np.array(stretch_of, dtype=np.int64)[tags], team,
        names.job, names.cluster, names.user, place, table[:, 3], table[:, 4], table[:, 5],
    )  # fmt: skip


def hours(cursor: Cursor, state: State, start_ms: int, end_ms: int, timezone: str) -> Hours:
    """What `usage` says by team, queue and hour."""
    asked: tuple[Dimension, ...] = ("team", "queue", "hour")
    fleet = state.fleet
    pieces = pieces_of(state, start_ms, end_ms, frozenset(asked), ZoneInfo(timezone)) if start_ms < end_ms else []
    if not pieces:
        return Hours((), (), (), *(np.zeros(0, dtype=np.int64) for _ in range(5)))
    spans = [TaggedSpan(tag, piece.start_ms, piece.end_ms) for tag, piece in enumerate(pieces)]
    known = classes(cursor, start_ms, end_ms, asked, {}, fleet.team_labels)
    table = accounts(cursor, spans, state.unfolded, state.days.kept, payers=known.of)
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
    held = np.flatnonzero((payer != NOBODY) & (busy + idle + unknown > 0))
    first = {piece.era: piece for piece in reversed(pieces)}

    def owner_of(era: int, look: int) -> tuple[str, str]:
        team, queue = key_of(asked[:2], fleet, first[era], EVERY_GPU, NO_DEVICE, known.names[look])
        return team, queue

    owners, owner = _looked_up(eras[tag[held]], payer[held], owner_of)
    return Hours(
        listed, capacity.tolist(), owners, owner, hour_of[tag[held]], busy[held], idle[held], unknown[held],
    )  # fmt: skip


def peaks(
    cursor: Cursor,
    state: State,
    start_ms: int,
    end_ms: int,
    jobs: Collection[tuple[str, str]],
    timezone: str,
    memory: Memory | None = None,
) -> dict[JobName, Peak]:
    """The most of any local hour of these jobs, as `usage` tells them apart."""
    if not jobs or start_ms >= end_ms:
        return {}
    fleet = state.fleet
    where: dict[Dimension, Collection[str]] = {"namespace": {name for name, _ in jobs}, "job": {job for _, job in jobs}}
    pieces = pieces_of(state, start_ms, end_ms, frozenset(("team", "hour")), ZoneInfo(timezone))
    spans = [TaggedSpan(tag, piece.start_ms, piece.end_ms) for tag, piece in enumerate(pieces)]
    known = classes(cursor, start_ms, end_ms, ("team", "namespace", "job"), where, fleet.team_labels, memory)
    table = accounts(cursor, spans, state.unfolded, state.days.kept, payers=known.of)
    table = table[table[:, 2] != NOBODY]
    tag, _, payer, busy, idle, unknown, _, _ = table.T
    first = {piece.era: piece for piece in reversed(pieces)}

    def job_of(era: int, look: int) -> JobName:
        name = known.names[look]
        (team,) = key_of(("team",), fleet, first[era], EVERY_GPU, NO_DEVICE, name)
        return team, name.namespace, name.job, name.cluster

    found, job = _looked_up(np.array([piece.era for piece in pieces], dtype=np.int64)[tag], payer, job_of)
    # A local hour may be several pieces.
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


class _Names(NamedTuple):
    """Lists of names that ascend, and by row the number of each. looks: what decides on the team."""

    jobs: Sequence[tuple[str, str]]
    clusters: Sequence[str]
    users: Sequence[str]
    looks: Sequence[HolderName]
    job: Whole
    cluster: Whole
    user: Whole
    look: Whole


def _names(cursor: Cursor, state: State, edges: Sequence[int], payers: Whole) -> _Names:
    labels = state.fleet.team_labels
    tell(cursor, edges[0], edges[-1], told_apart(_ASKED), {}, labels)
    look = told_apart(_ASKED[:1])
    columns = {"job": ("namespace", "job"), "cluster": ("cluster",), "user": ('"user"',), "look": look}
    numbers = ", ".join(f"dense_rank() OVER (ORDER BY {', '.join(of)}) - 1 AS n_{name}" for name, of in columns.items())
    found = cursor.columns(f"SELECT id, {numbers} FROM holder_class ORDER BY id")  # noqa: S608 - our own names
    at = np.searchsorted(found["id"], payers)
    listed = {
        name: cursor.run(f"SELECT DISTINCT {', '.join(of)} FROM holder_class ORDER BY ALL")  # noqa: S608 - as above
        for name, of in columns.items()
    }
    return _Names(
        [(namespace, job) for namespace, job in listed["job"]],
        [name for (name,) in listed["cluster"]],
        [name for (name,) in listed["user"]],
        [named(dict(zip(look, row, strict=True)), labels) for row in listed["look"]],
        *(found[f"n_{name}"][at].astype(np.int64) for name in columns),
    )


def _looked_up(tags: Whole, looks: Whole, of: Callable[[int, int], V]) -> tuple[list[V], Whole]:
    """What each pair gives, ascending and each once, and its number by row."""
    pairs, row = np.unique(np.stack([tags, looks], axis=1), axis=0, return_inverse=True)
    values = [of(tag, look) for tag, look in pairs.tolist()]
    listed = sorted(set(values))
    number = {value: place for place, value in enumerate(listed)}
    return listed, np.array([number[value] for value in values], dtype=np.int64)[row.reshape(-1)]
