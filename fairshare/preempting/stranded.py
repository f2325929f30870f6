"""Free GPUs that are of no use to anybody who waits. Pure; for people and alerts, no decision rests on it.

What it must not do: guess where a scheduler will really put a pod, or look at node selectors: a GPU that only
a selector keeps from a gang counts as usable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fairshare.model import Gang
from fairshare.preempting.claims import to_start
from fairshare.preempting.room import Room


def stranded(free: Mapping[str, float], gangs: Iterable[Gang]) -> float:
    """GPUs left free once every waiting gang that fits has been placed, the largest first.

    0 where nobody is left waiting after that: such room is simply free. free: by node."""
    room = Room({node: max(0.0, amount) for node, amount in free.items()})
    waiting = sorted(
        (gang for gang in gangs if gang.waits > 0),
        key=lambda gang: (-gang.waits, gang.queue, gang.namespace, gang.name),
    )
    placed = [room.place(to_start(gang), gang.waits) for gang in waiting]
    return 0.0 if all(placed) else room.free()
