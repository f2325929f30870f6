"""Where everything is constant, and what a group of a question is called there.

A span is cut where a policy, a label of a node or a namespace, or the local day or hour changes, as far as these are
asked for. Inside a piece every value of a dimension follows from the holder, the device and the piece alone. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from zoneinfo import ZoneInfo

from accountant.overlap import cut
from accountant.store.apart import OF_NODES
from accountant.store.classes import ASSIGNED
from accountant.store.fleet import Fleet, changes_between
from accountant.store.names import DeviceName, HolderName
from accountant.store.spans import edges_inside, local_hours
from accountant.store.state import State
from accountant.store.writing.assignment import NOBODY_RULES, Assignment, in_force
from accountant.wire import IDLE, Dimension

OF_TIME: frozenset[Dimension] = frozenset({"day", "hour"})


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch in which policy, labels of nodes and namespaces, local day and local hour are constant, as
    far as they are asked for. era: pieces of one differ in day and hour alone."""

    start_ms: int
    end_ms: int
    rules: Assignment
    day: str = ""
    hour: str = ""
    era: int = 0


def pieces_of(state: State, start_ms: int, end_ms: int, wanted: frozenset[Dimension], zone: ZoneInfo) -> list[Piece]:
    """Those of [start_ms, end_ms) for these dimensions, in order and without gaps. zone: of days and hours."""
    pieces = [Piece(start_ms, end_ms, NOBODY_RULES)]
    if wanted & ASSIGNED:
        pieces = [Piece(*found) for found in in_force(state.policies, start_ms, end_ms)]
    relabelled = changes_between(state.fleet.charged.values() if "team" in wanted else (), start_ms, end_ms)
    relabelled += changes_between(state.fleet.placed.values() if wanted & OF_NODES else (), start_ms, end_ms)
    if relabelled:
        edges = sorted(set(relabelled))
        pieces = [replace(p, start_ms=b, end_ms=e) for p in pieces for b, e in cut((p.start_ms, p.end_ms), edges)]
    pieces = [replace(piece, era=number) for number, piece in enumerate(pieces)]
    if not wanted & OF_TIME:
        return pieces
    local: list[Piece] = []
    for hour in local_hours(start_ms, end_ms, zone):
        last = local[-1] if local else None
        if last is not None and "hour" not in wanted and last.day == hour.day:
            local[-1] = Piece(last.start_ms, hour.end_ms, NOBODY_RULES, hour.day)
        else:
            local.append(
                Piece(hour.start_ms, hour.end_ms, NOBODY_RULES, hour.day, hour.hour if "hour" in wanted else "")
            )
    eras = {piece.start_ms: piece for piece in pieces}
    changes = edges_inside(start_ms, end_ms, list(eras))
    current = pieces[0]
    found = []
    for stretch in local:
        for begin, end in cut((stretch.start_ms, stretch.end_ms), changes):
            current = eras.get(begin, current)
            found.append(Piece(begin, end, current.rules, stretch.day, stretch.hour, current.era))
    return found


def key_of(
    wanted: Sequence[Dimension], fleet: Fleet, piece: Piece, gpu: int, device: DeviceName, holder: HolderName | None
) -> tuple[str, ...]:
    """The values of the dimensions. holder None: nobody held it."""
    return tuple(_value(dimension, fleet, piece, gpu, device, holder) for dimension in wanted)


def _value(
    dimension: Dimension, fleet: Fleet, piece: Piece, gpu: int, device: DeviceName, holder: HolderName | None
) -> str:
    match dimension:
        case "team" | "queue":
            if holder is None:
                return IDLE
            queue = piece.rules.queue(holder.queue_ref)
            if dimension == "queue":
                return queue
            space = fleet.namespace_at((holder.cluster, holder.namespace), piece.start_ms)
            return piece.rules.team(queue, space, dict(holder.labels))
        case "namespace":
            return holder.namespace if holder is not None else ""
        case "job":
            return holder.job if holder is not None else ""
        case "pod":
            return holder.name if holder is not None else ""
        case "container" | "user":
            return getattr(holder, dimension) if holder is not None else ""
        case "gpu_model":
            return device.gpu_model
        case "gpu":
            return fleet.gpus[gpu].uuid
        case "node":
            return device.node
        case "cluster":
            return fleet.gpus[gpu].cluster
        case "mig_profile":
            return device.profile
        case "day":
            return piece.day
        case "hour":
            return piece.hour
        case _:
            facts = fleet.node_at((fleet.gpus[gpu].cluster, device.node), piece.start_ms)
            return getattr(facts, dimension) if facts is not None else ""
