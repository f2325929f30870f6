"""Holds the state of the simulated scheduler: jobs, the queue tree, and free GPUs.

`scheduler_engine` decides which jobs start and stop. The state is deterministic: it does not depend on the order of a
set."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import TypeAlias

from fairshare.core.queues_and_weights import UNLIMITED, DivisionProblem, QueueClaim
from fairshare.laws.division import divide
from fairshare.preemption.reclaim_rules_and_limits import EPSILON
from fairshare.simulator.simulation_model import WHOLE, Flavour, SimulatedJob, SimulatedNodeSpec, Slot, slots_of

NEVER = 1 << 60
ANY_GPU = Flavour(WHOLE, "", "")
"""The flavour of all GPUs of a pool without nodes."""


class SimulatedGang:
    """One job, the work that it still needs, and its times. A time of -1 means that the event has not happened.

    number: its position in the order of submission, from 0.
    queue: the index of its queue in the tree. Queues of other schedulers have the indices after the tree's.
    divided: True if its GPUs count in the division of shares; False for slots that are parts of GPUs, and for jobs of
        other schedulers.
    flavours: the flavours on which it may run.
    slots: the numbers of the slots that it holds.
    queued_ms: its submission, or its newest stop.
    left_ms: the work that it still needs. lost_ms: the time that stops and restarts have cost."""

    __slots__ = (
        "attempt", "crashes", "divided", "end_ms", "evictions", "finish_ms", "first_start_ms", "flavour", "flavours",
        "gpus", "left_ms", "lost_ms", "name", "number", "preemptible", "queue", "queued_ms", "restart_ms", "slots",
        "start_ms", "submit_ms",
    )  # fmt: skip

    def __init__(self, number: int, submit_ms: int, gpus: int, left_ms: int, queue: int) -> None:
        self.number, self.submit_ms, self.gpus, self.left_ms, self.queue = number, submit_ms, gpus, left_ms, queue
        self.queued_ms = submit_ms
        self.flavours: tuple[Flavour, ...] = (ANY_GPU,)
        self.flavour = ANY_GPU
        self.preemptible = self.divided = True
        self.name = ""
        self.slots: tuple[int, ...] = ()
        self.attempt = self.restart_ms = self.evictions = self.crashes = self.lost_ms = 0
        self.start_ms = self.end_ms = self.first_start_ms = self.finish_ms = -1


_NUMBER = attrgetter("number")


class WaitingLine:
    """The waiting gangs of a queue, in the order of submission. Only the first `depth` gangs may start.

    smallest: the GPUs of the smallest gang that may start; `NEVER` if none waits."""

    def __init__(self, depth: int) -> None:
        self.gangs: list[SimulatedGang] = []
        self.smallest = NEVER
        self._depth = depth

    def front(self) -> list[SimulatedGang]:
        """Return the first `depth` gangs."""
        return self.gangs[: self._depth]

    def depth(self) -> int:
        """Return how many gangs may start, which is at most the line's depth."""
        return min(self._depth, len(self.gangs))

    def join(self, gang: SimulatedGang) -> None:
        gangs = self.gangs
        if not gangs or gangs[-1].number < gang.number:
            gangs.append(gang)
            if len(gangs) <= self._depth:
                self.smallest = min(self.smallest, gang.gpus)
        else:
            insort(gangs, gang, key=_NUMBER)
            self._update_smallest()

    def leave(self, place: int) -> None:
        del self.gangs[place]
        self._update_smallest()

    def _update_smallest(self) -> None:
        self.smallest = min([gang.gpus for gang in self.front()], default=NEVER)


@dataclass(frozen=True, slots=True)
class QueueState:
    """The whole GPUs that a queue holds, requests (held and waiting) and is due, and its weight in force."""

    allocated: int
    allocated_non_preemptible: int
    requested: int
    share: float
    weight: float


class QueueTree:
    """The GPUs that each queue holds and requests. A parent's GPUs include those of its leaves.

    All lists are by the index of the queue in `claims`.

    held, asked: the GPUs that each queue holds and requests. fixed: the held GPUs that are not preemptible."""

    def __init__(self, claims: Sequence[QueueClaim]) -> None:
        self.claims = tuple(claims)
        self.names = tuple(claim.name for claim in claims)
        self.index = {name: q for q, name in enumerate(self.names)}
        parents = {claim.parent for claim in claims}
        self.leaves = tuple(q for q, name in enumerate(self.names) if name not in parents)
        self._path = tuple(self._to_root(q) for q in range(len(claims)))
        self._levels = {
            (one, other): tuple(q for q in reversed(self._path[other]) if q not in self._path[one])
            for one in self.leaves
            for other in self.leaves
        }
        self.deserved = [inf if claim.deserved == UNLIMITED else claim.deserved for claim in claims]
        self.limits = [inf if claim.limit == UNLIMITED else claim.limit for claim in claims]
        self._limited = [any(self.limits[above] < inf for above in path) for path in self._path]
        self.weights = [claim.weight for claim in claims]
        self.held = [0] * len(claims)
        self.fixed = [0] * len(claims)
        self.asked = [0] * len(claims)
        self._origin_ms = [0] * len(claims)
        """The GPU-milliseconds to subtract from a leaf's held GPUs times the present time (see `used_ms`)."""

    def _to_root(self, q: int) -> tuple[int, ...]:
        parent = self.claims[q].parent
        return (q,) if parent is None else (q, *self._to_root(self.index[parent]))

    def path(self, q: int) -> tuple[int, ...]:
        """Return the indices of a queue, of its parent, and so on up to the root."""
        return self._path[q]

    def levels(self, asking: int, leaf: int) -> tuple[int, ...]:
        """Return the queues that lose GPUs when `asking` reclaims from `leaf`.

        These are the queues from the child of their lowest common ancestor down to the leaf."""
        return self._levels[asking, leaf]

    def above_share(self, q: int, held: Sequence[int], shares: Sequence[float]) -> bool:
        """Return True if a queue holds more GPUs than its limit, or more than both its share and its deserved quota.

        held, shares: of all queues. Other queues may take back what is above."""
        return held[q] > min(self.limits[q], max(self.deserved[q], shares[q])) + EPSILON

    def request(self, leaf: int, gpus: int) -> None:
        """Add `gpus` (negative: subtract) to the requests of a leaf and its parents."""
        for q in self._path[leaf]:
            self.asked[q] += gpus

    def allocate(self, leaf: int, gpus: int, now_ms: int, *, preemptible: bool) -> None:
        """Add `gpus` (negative: subtract) to the GPUs that a leaf and its parents hold."""
        self._origin_ms[leaf] += gpus * now_ms
        for q in self._path[leaf]:
            self.held[q] += gpus
            if not preemptible:
                self.fixed[q] += gpus

    def used_ms(self, now_ms: int) -> list[int]:
        """Return the GPU-milliseconds that each leaf has used since the start."""
        return [held * now_ms - origin for held, origin in zip(self.held, self._origin_ms, strict=True)]

    def room(self, leaf: int) -> float:
        """Return how many more GPUs a leaf can hold within its limit and those of its parents; inf without limits."""
        if not self._limited[leaf]:
            return inf
        return min(self.limits[q] - self.held[q] for q in self._path[leaf])

    def admits(self, leaf: int, gpus: int, *, preemptible: bool) -> bool:
        """Return True if the capacity gates admit these GPUs for a leaf and all its parents.

        Each queue must stay within its limit, and its non-preemptible GPUs within its deserved quota."""
        if preemptible and not self._limited[leaf]:
            return True
        return all(
            self.held[q] + gpus <= self.limits[q] and (preemptible or self.fixed[q] + gpus <= self.deserved[q])
            for q in self._path[leaf]
        )

    def ever_admits(self, leaf: int, gpus: int, *, preemptible: bool) -> bool:
        """Return True if the capacity gates admit these GPUs while nothing else runs."""
        return all(gpus <= self.limits[q] and (preemptible or gpus <= self.deserved[q]) for q in self._path[leaf])

    def shares_as_source(self, total: int) -> list[float]:
        """Return every queue's fair share of `total` GPUs by the rule of `laws.division`'s source, for the present
        requests, without history."""
        asking = tuple(
            replace(claim, request=asked, weight=weight)
            for claim, asked, weight in zip(self.claims, self.asked, self.weights, strict=True)
        )
        shares = divide(DivisionProblem("cycle", total, 0.0, asking)).shares
        return [shares[name] for name in self.names]

    def states(self, shares: Sequence[float]) -> dict[str, QueueState]:
        return {
            name: QueueState(self.held[q], self.fixed[q], self.asked[q], shares[q], self.weights[q])
            for q, name in enumerate(self.names)
        }


class PoolPlacement:
    """Places gangs in a pool of equal GPUs, which it only counts. For the methods see `NodePlacement`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free = capacity

    def whole_gpus(self) -> int:
        return self._capacity

    def most_free(self) -> int:
        return self._free

    def free(self, _flavour: Flavour) -> int:
        return self._free

    def fitting(self, gang: SimulatedGang) -> Flavour | None:
        return ANY_GPU if gang.gpus <= self._free else None

    def take(self, gang: SimulatedGang, _flavour: Flavour) -> None:
        self._free -= gang.gpus

    def give(self, gang: SimulatedGang) -> None:
        self._free += gang.gpus


class NodePlacement:
    """Places gangs on the slots of nodes. An outage withdraws a GPU and restores it; outages may overlap.

    A gang that fits on one node goes to the node with the fewest free slots that can hold it. A larger gang first takes
    the emptiest nodes as a whole, and its remaining members are placed like a smaller gang. Only the numbers of free
    slots and the order of the nodes decide."""

    def __init__(self, nodes: Sequence[SimulatedNodeSpec]) -> None:
        self.slots: tuple[Slot, ...] = tuple(slot for node in nodes for slot in slots_of(node))
        node_index = {node.name: i for i, node in enumerate(nodes)}
        if len(node_index) != len(nodes) or len(set(self.slots)) != len(self.slots):
            raise ValueError("node names and GPU uuids must be unique")
        self._node = [node_index[slot.node] for slot in self.slots]
        self._withdrawn = {gpu.uuid: 0 for node in nodes for gpu in node.gpus}
        self._of_gpu: dict[str, list[int]] = {gpu: [] for gpu in self._withdrawn}
        self._free: dict[Flavour, dict[int, list[int]]] = {}
        for i, slot in enumerate(self.slots):
            self._of_gpu[slot.gpu].append(i)
            self._free.setdefault(slot.flavour, {}).setdefault(self._node[i], []).append(i)
        self._total = {flavour: sum(map(len, free.values())) for flavour, free in self._free.items()}
        self._count = dict(self._total)
        self._in_service = dict(self._total)

    def flavours(self, job: SimulatedJob) -> tuple[Flavour, ...]:
        """Return the flavours that the job may use, in the order of the nodes."""
        return tuple(
            f
            for f in self._total
            if f.shape == job.shape
            and (not job.models or f.model in job.models)
            and (not job.pools or f.pool in job.pools)
        )

    def possible(self, job: SimulatedJob) -> bool:
        """Return True if the job's gang fits on the empty cluster without outages."""
        return any(self._total[f] >= job.gpus for f in self.flavours(job))

    def whole_gpus(self) -> int:
        """Return the whole GPUs that can be used, held or free."""
        return sum(n for f, n in self._in_service.items() if f.shape == WHOLE)

    def most_free(self) -> int:
        """Return the largest number of free whole GPUs of one flavour. No larger gang on whole GPUs can start."""
        return max((n for f, n in self._count.items() if f.shape == WHOLE), default=0)

    def free(self, flavour: Flavour) -> int:
        """Return the number of free slots of a flavour."""
        return self._count[flavour]

    def fitting(self, gang: SimulatedGang) -> Flavour | None:
        """Return the flavour with the fewest free slots that can hold the gang; None if no flavour can."""
        return min((f for f in gang.flavours if self._count[f] >= gang.gpus), key=self._count.__getitem__, default=None)

    def take(self, gang: SimulatedGang, flavour: Flavour) -> None:
        """Hold free slots of the flavour for the whole gang."""
        nodes = self._free[flavour]
        taken: list[int] = []
        while (missing := gang.gpus - len(taken)) > 0:
            fill = min(((len(free), node) for node, free in nodes.items() if len(free) >= missing), default=None)
            node = fill[1] if fill else max(nodes, key=lambda node: (len(nodes[node]), -node))
            taken += nodes[node][:missing]
            del nodes[node][:missing]
        self._count[flavour] -= gang.gpus
        gang.slots = tuple(taken)

    def give(self, gang: SimulatedGang) -> None:
        """Free the gang's slots, except those of a GPU that is out of service."""
        for i in gang.slots:
            if self._withdrawn[self.slots[i].gpu] == 0:
                self._insert(i)

    def withdraw(self, gpu: str) -> None:
        """Take a GPU out of service for one more outage. The gangs on it must have stopped."""
        self._withdrawn[gpu] += 1
        if self._withdrawn[gpu] == 1:
            for i in self._of_gpu[gpu]:
                flavour = self.slots[i].flavour
                self._free[flavour][self._node[i]].remove(i)
                self._count[flavour] -= 1
                self._in_service[flavour] -= 1

    def restore(self, gpu: str) -> None:
        """Record the end of one outage of a GPU. After the last one its slots are free again."""
        self._withdrawn[gpu] -= 1
        if self._withdrawn[gpu] == 0:
            for i in self._of_gpu[gpu]:
                self._insert(i)
                self._in_service[self.slots[i].flavour] += 1

    def _insert(self, i: int) -> None:
        flavour = self.slots[i].flavour
        insort(self._free[flavour][self._node[i]], i)
        self._count[flavour] += 1


Placement: TypeAlias = PoolPlacement | NodePlacement
