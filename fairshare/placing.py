"""Which node suits a pod, and which victims are fair: what the kube-scheduler asks us. Pure.

Best fit: a node is the better the fewer GPUs it has left afterwards, so that whole nodes stay free for
gangs that need them; one that cannot take the pod scores nothing. Among equal fits, pods of queues above
their share gather (a later reclaim then frees whole nodes), and pods within their share keep away from them.

Preemption can be vetoed or narrowed here, never started. A victim is fair game if its queue holds more than
its share, or is the preemptor's own; pods of no known queue are not ours to protect. Nobody preempts across
queues for a queue that would itself be above its share. Of the nodes that remain, those with the least loss
are kept: a victim takes its whole gang with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum

from fairshare.kube.pods import taken_up
from fairshare.model import Pod

MOST_SCORE = 10
_FIT, _COMPANY = 8, 2
"""Parts of the score: how well it fits, and beside whom."""
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Share:
    """A queue's GPUs: what it holds and what it is due."""

    allocated: float
    entitled: float

    def above(self, more: float = 0.0) -> bool:
        return self.allocated + more > self.entitled + _SLACK


def _nobody(_pod: Pod) -> str | None:
    return None


SharesFor = Callable[[Pod], Mapping[str, Share]]


@dataclass(frozen=True, slots=True)
class Room:
    """The cluster as the answers see it. gpus: allocatable by node. pods: by uid. queue_of: policy queue of a
    pod, None where it has none. shares: by queue. shares_for: the same with what a pod asks for, which the cycle that
    made the shares may not have known; None: they do not depend on who asks."""

    gpus: Mapping[str, float]
    pods: Mapping[str, Pod]
    shares: Mapping[str, Share] = field(default_factory=dict)
    queue_of: Callable[[Pod], str | None] = _nobody
    shares_for: SharesFor | None = None

    def asked_by(self, pod: Pod) -> Room:
        """As it is for this pod's question."""
        if not self.shares or self.shares_for is None:
            return self
        return replace(self, shares=self.shares_for(pod), shares_for=None)


def used(room: Room) -> dict[str, list[Pod]]:
    """Pods by the node that has them."""
    on: dict[str, list[Pod]] = {}
    for pod in room.pods.values():
        if pod.node:
            on.setdefault(pod.node, []).append(pod)
    return on


def scores(pod: Pod, nodes: Sequence[str], room: Room, spent: Callable[[], bool] = lambda: False) -> dict[str, int]:
    """0..10 for each of `nodes`. spent: whether the time to answer is over; the rest then gets 0."""
    on = used(room)
    queue = room.queue_of(pod)
    mine = room.shares.get(queue) if queue is not None else None
    borrows = mine.above(pod.gpus) if mine is not None else None
    scored = dict.fromkeys(nodes, 0)
    largest = max((room.gpus.get(node, 0.0) for node in nodes), default=0.0)
    for node in nodes:
        if spent():
            break
        there = [other for other in on.get(node, ()) if other.uid != pod.uid]
        held = taken_up(there)
        left = room.gpus.get(node, 0.0) - held - pod.gpus
        if pod.gpus <= 0 or left < -_SLACK or largest <= 0:
            continue
        fit = _FIT * (1 - max(0.0, left) / largest)
        scored[node] = round(fit + _COMPANY * _company(borrows, there, room))
    return scored


def _company(borrows: bool | None, there: Sequence[Pod], room: Room) -> float:
    """Part (0..1) of the GPUs held on a node by pods that stand to their share as this one does."""
    if borrows is None or not there:
        return 0.5
    alike = 0.0
    for other in there:
        queue = room.queue_of(other)
        share = room.shares.get(queue) if queue is not None else None
        alike += other.gpus if share is not None and share.above() is borrows else 0.0
    return alike / fsum(other.gpus for other in there)


def fair_nodes(pod: Pod, victims: Mapping[str, Sequence[str]], room: Room) -> tuple[str, ...]:
    """Of the nodes (with the uids of their victims) those where preempting is fair and costs least.

    Without a view of the shares every node stays: who knows nothing vetoes nothing."""
    if not room.shares:
        return tuple(sorted(victims))
    room = room.asked_by(pod)
    queue = room.queue_of(pod)
    mine = room.shares.get(queue) if queue is not None else None
    gangs: dict[str, float] = {}
    for other in room.pods.values():
        if other.gang:
            gangs[other.gang] = gangs.get(other.gang, 0.0) + (other.gpus if other.held else 0.0)
    costs: dict[str, float] = {}
    for node, uids in victims.items():
        known = [room.pods[uid] for uid in uids if uid in room.pods]
        if all(_fair(pod, queue, mine, victim, room) for victim in known):
            lost = {victim.gang or victim.uid: gangs.get(victim.gang, victim.gpus) for victim in known}
            costs[node] = fsum(lost.values())
    least = min(costs.values(), default=0.0)
    return tuple(sorted(node for node, cost in costs.items() if cost <= least + _SLACK))


def _fair(pod: Pod, queue: str | None, mine: Share | None, victim: Pod, room: Room) -> bool:
    theirs = room.queue_of(victim)
    share = room.shares.get(theirs) if theirs is not None else None
    if share is None or theirs == queue:
        return True
    return share.above() and not (mine is not None and mine.above(pod.gpus))
