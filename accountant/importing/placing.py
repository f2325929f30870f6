"""Which slots the containers held that asked for them. Pure.

The kube-scheduler's books say who held how many GPUs of a node, not which; the exporter's labels say which, and may
be missing or late. So a demand first gets slots of the devices that were labelled with it, then free ones that nobody
else was labelled with, then any. Where an end is only known to within the tolerance, whoever comes next ends it.

What finds no slot is counted, not forced: no slot is ever held twice, so no GPU has more than its time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from accountant.importing.layout import Hold
from agent.wire import Holder

Device = tuple[str, int]
"""(GPU uuid, position of the part)."""
Slot = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Demand:
    """A holder's time on `count` slots of a pool. on: devices that were labelled with it."""

    holder: Holder
    pool: str
    count: int
    start_ms: int
    end_ms: int
    on: frozenset[Device] = frozenset()


@dataclass(slots=True)
class Placed:
    """unplaced_us: time of slots that were held by the books and do not exist."""

    holds: list[Hold] = field(default_factory=list)
    unplaced_us: int = 0


def place(demands: Sequence[Demand], pools: Mapping[str, Sequence[Slot]], tolerance_ms: int) -> Placed:
    """Holds of one node; those of one slot do not overlap, and none is longer than its demand."""
    taken: dict[Slot, list[Hold]] = {}
    labelled: dict[Device, list[Demand]] = {}
    for demand in demands:
        for device in demand.on:
            labelled.setdefault(device, []).append(demand)
    placed = Placed()
    for demand in sorted(demands, key=lambda one: (one.start_ms, one.holder.uid, one.holder.container, one.pool)):
        chosen = _choose(demand, pools.get(demand.pool, ()), taken, labelled, tolerance_ms)
        for slot in chosen:
            before = taken.setdefault(slot, [])
            if before and before[-1].end_ms > demand.start_ms:
                before[-1] = _ended(before[-1], demand.start_ms)
            before.append(Hold(*slot, demand.holder, demand.start_ms, demand.end_ms))
        placed.unplaced_us += (demand.count - len(chosen)) * (demand.end_ms - demand.start_ms) * 1000
    placed.holds = sorted(
        (hold for holds in taken.values() for hold in holds if hold.start_ms < hold.end_ms),
        key=lambda one: (one.gpu, one.part, one.slot, one.start_ms),
    )
    return placed


def _choose(
    demand: Demand,
    slots: Sequence[Slot],
    taken: Mapping[Slot, Sequence[Hold]],
    labelled: Mapping[Device, Collection[Demand]],
    tolerance_ms: int,
) -> list[Slot]:
    ranked: list[tuple[tuple[bool, bool, bool, int], Slot]] = []
    for position, slot in enumerate(slots):
        held = taken.get(slot)
        over = held[-1].end_ms - demand.start_ms if held else 0
        if held and over > 0 and (over > tolerance_ms or held[-1].start_ms >= demand.start_ms):
            continue
        device = slot[:2]
        others = any(_meet(one, demand) for one in labelled.get(device, ()) if one.holder != demand.holder)
        ranked.append(((device not in demand.on, others, over > 0, position), slot))
    return [slot for _, slot in sorted(ranked)[: demand.count]]


def _meet(one: Demand, other: Demand) -> bool:
    return one.start_ms < other.end_ms and other.start_ms < one.end_ms


def _ended(hold: Hold, at_ms: int) -> Hold:
    return Hold(hold.gpu, hold.part, hold.slot, hold.holder, hold.start_ms, at_ms)
