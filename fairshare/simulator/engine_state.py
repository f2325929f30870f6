"""Holds the engine's state: waiting lines, running jobs, queue tree, free slots.

A lane is a line of waiting jobs: a queue's, or the one of all where the pool has one line. What it must not do:
decide; `replay` says who starts and who stops. Deterministic, no clock, no I/O.

Three things are kept so that a tick costs only what changed in it:

- `fresh_work` says whether a job may start, or take GPUs back, that could not when the scheduler last looked. A
  job for which there is no room and no claim makes none.
- *Ends* come in groups, one per tick at which they are noticed, and the order within a group decides nothing. A run
  that is stopped stays in its group; it is known there by `end`, which says when a job's present run ends.
- *Use* of a queue up to t is held · t - origin, origin being Σ gang · start of its runs less what past runs
  delivered: whole GPU-seconds, in whatever order jobs start and end, and nothing to add up in between.

Jobs are numbers in the order of their submission. Jobs that may be examined are stored apart from those behind them, so
that neither a look nor a start costs more where thousands wait. Invariants: `jobs` rises, all jobs behind are later
than all of them, and no job is behind while there is room in front. No clock, no I/O.

Shares are KAI's division without history (k = 0) over the weights in force; a controller that wants
history to count changes the weights. Whole GPUs only. No clock, no I/O.

A gang that fits on one node goes to the node it fills best; a larger one takes the emptiest nodes
first and packs its rest. Everything is decided by (count, order of the nodes), never by the order
of a dict or a set.
"""

from __future__ import annotations

from array import array
from bisect import bisect, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

import numpy as np

from fairshare.core.model import UNLIMITED, Claim, DivisionProblem
from fairshare.laws.division import divide
from fairshare.preemption.preemption_claims import GPU
from fairshare.preemption.preemption_rules import Account, QueueResource
from fairshare.simulator.simulation_model import (
    TICK_S,
    ControllerView,
    Dividing,
    Flavour,
    Job,
    NodeSpec,
    Pool,
    Ranking,
    Record,
    Slot,
    Workload,
    slots_of,
)

NOBODY = (1 << 30) - 1
"""The smallest gang where none waits: more than any pool has."""


class Line:
    """jobs: those within the scan depth. gangs: their GPUs, in step."""

    __slots__ = ("_behind", "_depth", "_gpus", "gangs", "jobs")

    def __init__(self, depth: int, gpus: Sequence[int]) -> None:
        """gpus: of every job of the workload."""
        self.jobs: list[int] = []
        self.gangs: list[int] = []
        self._behind: deque[int] = deque()
        self._depth, self._gpus = depth, gpus

    def smallest(self) -> int:
        """The smallest gang within the scan depth."""
        return min(self.gangs) if self.gangs else NOBODY

    def join(self, job: int) -> bool:
        """At the end; it was submitted later than everyone in the line. Whether it is within the scan depth."""
        if len(self.jobs) < self._depth:
            self.jobs.append(job)
            self.gangs.append(self._gpus[job])
            return True
        self._behind.append(job)
        return False

    def leave(self, place: int) -> None:
        """Who stands at a place within the scan depth goes, and the first behind moves up."""
        del self.jobs[place], self.gangs[place]
        if self._behind:
            job = self._behind.popleft()
            self.jobs.append(job)
            self.gangs.append(self._gpus[job])

    def rejoin(self, job: int) -> None:
        """In the order of submission."""
        if self._behind and job > self.jobs[-1]:
            insort(self._behind, job)
            return
        place = bisect(self.jobs, job)
        self.jobs.insert(place, job)
        self.gangs.insert(place, self._gpus[job])
        if len(self.jobs) > self._depth:
            self._behind.appendleft(self.jobs.pop())
            self.gangs.pop()


NEVER = 1 << 60
_DONE = NEVER + 1
"""In `end`: of a job that has finished, while `NEVER` is that of one that does not run."""


class State:
    """One replay's. Lists by job, by queue or by lane."""

    __slots__ = (
        "asked", "blocked_until", "come", "deserved", "dividing", "end", "ending", "ends", "free", "fresh_work",
        "gpus", "held", "lane", "least", "left", "limited", "limits", "lines", "origin", "pool", "queue", "rank",
        "ranking", "reclaim", "reclaims", "record", "running", "shares", "stale", "submit_s", "tick_s", "walls",
        "weights", "whole", "workload",
    )  # fmt: skip

    def __init__(
        self,
        workload: Workload,
        pool: Pool,
        end_s: int,
        dividing: Dividing | None = None,
        ranking: Ranking | None = None,
        tick_s: int = TICK_S,
    ) -> None:
        queues, jobs = len(workload.queues), len(workload.submit_s)
        lanes = 1 if pool.one_line else queues
        self.workload, self.pool = workload, pool
        self.dividing, self.ranking = dividing, ranking
        self.tick_s = tick_s
        self.gpus, self.queue = workload.gpus, workload.queue
        self.lane = [0] * jobs if pool.one_line else workload.queue
        self.submit_s = [*workload.submit_s, NEVER]
        self.come = 0  # jobs submitted
        self.left = array("q", workload.duration_s)
        self.free = pool.capacity
        self.weights = list(pool.weights)
        self.deserved = list(map(float, pool.deserved))
        self.limits = [pool.capacity if limit is None else limit for limit in pool.limits] or [pool.capacity] * queues
        self.limited = any(limit < pool.capacity for limit in self.limits)
        self.reclaim = pool.reclaim
        self.walls = self.limited or pool.backfill  # some who fit may not start at once
        self.held = [0] * queues
        self.asked = [0.0] * queues  # whole GPUs, but only ever weighed against shares
        self.origin = [0] * queues
        self.reclaims = [0] * queues
        self.lines = [Line(pool.scan_depth, self.gpus) for _ in range(lanes)]
        self.least = [NOBODY] * lanes  # of each line, the smallest gang within the scan depth
        self.running: list[dict[int, int]] = [{} for _ in range(queues)]  # since when, newest last
        self.end = array("q", [NEVER]) * jobs
        self.ending: dict[int, list[int]] = {}
        self.ends = [NEVER]  # heap of the keys of `ending`
        self.shares: list[float] = [0.0] * queues
        self.whole = [0] * queues  # of the shares: gangs are whole, so who stays within one stays within the other
        self.stale = True
        self.fresh_work = True
        self.rank: Sequence[float] = [0.0] * lanes
        self.blocked_until = NEVER
        self.record = Record(workload, pool, end_s, started_s=[-1] * jobs, finished_s=[-1] * jobs, evicted=[0] * jobs)

    # Fair shares change only where a request bounds a share, before or after: one that grows can only have been a
    # bound, one that falls can become one. Where somebody else divides, whatever changes may count.

    def submit_until(self, now: int) -> None:
        submit_s, at, queue, gpus, lanes = self.submit_s, self.come, self.queue, self.gpus, self.lane
        held, asked, shares, whole, lines = self.held, self.asked, self.shares, self.whole, self.lines
        stale, fresh, free = self.stale or self.dividing is not None, self.fresh_work or self.walls, self.free
        least = self.least
        while submit_s[at] <= now:
            q, lane, gang = queue[at], lanes[at], gpus[at]
            if asked[q] <= shares[q]:
                stale = True
            asked[q] += gang
            if lines[lane].join(at) and gang < least[lane]:
                least[lane] = gang
                if gang <= free or held[q] + gang <= whole[q]:
                    fresh = True
            at += 1
        self.come, self.stale, self.fresh_work = at, stale, fresh or stale

    def finish_until(self, now: int) -> None:
        end, queue, gpus, finished_s = self.end, self.queue, self.gpus, self.record.finished_s
        ends, ending, running, origin = self.ends, self.ending, self.running, self.origin
        held, asked, shares, free = self.held, self.asked, self.shares, self.free
        stale = self.stale
        while ends[0] <= now:
            for i in ending.pop(heappop(ends)):
                at = end[i]
                if at > now:
                    continue  # that run was stopped
                end[i] = _DONE
                finished_s[i] = at
                q, gang = queue[i], gpus[i]
                del running[q][i]
                held[q] -= gang
                free += gang
                origin[q] -= gang * at
                left = asked[q] = asked[q] - gang
                if left <= shares[q]:
                    stale = True
        if free != self.free:
            self.free, self.fresh_work = free, True
            self.stale = stale or self.dividing is not None

    def share_out(self, shares: list[float]) -> None:
        self.shares = shares
        self.whole = list(map(int, shares))

    def close(self, end_s: int) -> Record:
        self.record.delivered_gpu_s = sum(self.used(end_s))
        return self.record

    def start(self, i: int, now: int) -> None:
        """It must have left its line."""
        q, gang, end = self.queue[i], self.gpus[i], now + self.left[i]
        started_s = self.record.started_s
        if started_s[i] < 0:
            started_s[i] = now
        else:
            end += self.pool.restart_s
            self.record.lost_gpu_s += self.pool.restart_s * gang
        self.running[q][i] = now
        self.end[i] = end
        noticed = -(-end // self.tick_s) * self.tick_s
        group = self.ending.get(noticed)
        if group is None:
            self.ending[noticed] = [i]
            heappush(self.ends, noticed)
        else:
            group.append(i)
        self.held[q] += gang
        self.free -= gang
        self.origin[q] += gang * now

    def evict(self, i: int, now: int, for_queue: int) -> None:
        q, lane, gang = self.queue[i], self.lane[i], self.gpus[i]
        start = self.running[q].pop(i)
        again = self.end[i] - start - self.left[i]
        progress = max(0, now - start - again)
        saved = progress // self.pool.checkpoint_s * self.pool.checkpoint_s
        self.left[i] -= saved
        self.end[i] = NEVER
        self.record.lost_gpu_s += (progress - saved) * gang
        self.record.evictions += 1
        self.record.evicted[i] += 1
        self.reclaims[for_queue] += 1
        self.held[q] -= gang
        self.free += gang
        self.origin[q] -= gang * now
        self.lines[lane].rejoin(i)
        self.least[lane] = self.lines[lane].smallest()

    def used(self, now: int) -> list[int]:
        """GPU-seconds of every queue since the start."""
        return [held * now - origin for held, origin in zip(self.held, self.origin, strict=True)]

    def to_end(self) -> Iterator[tuple[int, int]]:
        """(end, job) of all that runs, the next to end first."""
        for noticed in sorted(self.ending):
            yield from sorted({(self.end[i], i) for i in self.ending[noticed] if self.end[i] <= noticed})

    def view(self, now: int, used: list[int]) -> ControllerView:
        gang = [0 if least == NOBODY else least for least in self.least]
        return ControllerView(now, self.pool.capacity, used, self.held, self.asked, gang, self.reclaims)

    def backlog(self, now: int) -> tuple[array[int], array[int]]:
        """Every job that waits or runs, and the seconds that it has left. Thousands wait: hence columns of numpy's."""
        ends = np.asarray(self.end)[: self.come]
        jobs = np.flatnonzero(ends != _DONE)
        ends = ends[jobs]
        seconds = np.where(ends == NEVER, np.asarray(self.left)[jobs], ends - now)
        return array("q", jobs.astype(np.int64).tobytes()), array("q", seconds.tobytes())


@dataclass(frozen=True, slots=True)
class QueueState:
    """One queue as its status shows it, in whole GPUs. requested contains allocated; a parent contains
    its children. share: the scheduler's own fair share under the weights in force."""

    allocated: int
    allocated_non_preemptible: int
    requested: int
    share: float
    weight: float


class QueueTree:
    """Mutable counts over a fixed tree. Jobs belong to leaves; a parent counts its leaves."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        """Raises fairshare.core.errors.DivisionError for a tree that cannot be divided."""
        divide(DivisionProblem("check", 0.0, 0.0, tuple(claims)))
        self._claims = {claim.name: claim for claim in sorted(claims, key=lambda c: c.name)}
        parents = {claim.parent for claim in claims}
        self.leaves = tuple(name for name in self._claims if name not in parents)
        self._path: dict[str, tuple[str, ...]] = {}
        for leaf in self.leaves:
            path: list[str] = []
            at: str | None = leaf
            while at is not None:
                path.append(at)
                at = self._claims[at].parent
            self._path[leaf] = tuple(path)
        self._unlimited = {n for n, path in self._path.items() if all(self._limit(q) == inf for q in path)}
        self.allocated = dict.fromkeys(self._claims, 0)
        self._non_preemptible = dict.fromkeys(self._claims, 0)
        self.requested = dict.fromkeys(self._claims, 0)
        self._shares: Mapping[str, float] = {}
        self._divided: int | None = None
        """The total that `_shares` was divided from; None once a request or a weight has changed."""

    def set_weights(self, weights: Mapping[str, float]) -> bool:
        """Weights of some queues from now on; True if any changed. Raises KeyError for an unknown queue,
        ValueError for a negative weight."""
        changed = False
        for name, weight in weights.items():
            if not weight >= 0:
                raise ValueError(f"queue {name}: weight {weight} is not >= 0")
            if weight != self._claims[name].weight:
                self._claims[name] = replace(self._claims[name], weight=weight)
                changed = True
        if changed:
            self._divided = None
        return changed

    def deserved(self, name: str) -> float:
        quota = self._claims[name].deserved
        return inf if quota == UNLIMITED else quota

    def request(self, leaf: str, gpus: int) -> None:
        """`gpus` more are asked for (fewer, if negative)."""
        self._divided = None
        for name in self._path[leaf]:
            self.requested[name] += gpus

    def allocate(self, leaf: str, gpus: int, preemptible: bool) -> None:
        """`gpus` more are held (fewer, if negative)."""
        for name in self._path[leaf]:
            self.allocated[name] += gpus
            if not preemptible:
                self._non_preemptible[name] += gpus

    def admits(self, leaf: str, gpus: int, preemptible: bool) -> bool:
        """KAI's capacity gates on the whole path: within every limit; non-preemptible within deserved."""
        if preemptible and leaf in self._unlimited:
            return True
        return all(
            self.allocated[name] + gpus <= self._limit(name)
            and (preemptible or self._non_preemptible[name] + gpus <= self.deserved(name))
            for name in self._path[leaf]
        )

    def ever_admits(self, leaf: str, gpus: int, preemptible: bool) -> bool:
        """Whether the gates open for this gang while nothing else runs."""
        return all(
            gpus <= self._limit(name) and (preemptible or gpus <= self.deserved(name)) for name in self._path[leaf]
        )

    def shares(self, total: int) -> Mapping[str, float]:
        """Fair share of every queue out of `total` GPUs, given what is asked for now."""
        if total != self._divided:
            for name, claim in self._claims.items():
                if claim.request != self.requested[name]:
                    self._claims[name] = replace(claim, request=self.requested[name])
            self._shares = divide(DivisionProblem("cycle", total, 0.0, tuple(self._claims.values()))).shares
            self._divided = total
        return self._shares

    def order(self, leaf: str, gpus: int, shares: Mapping[str, float]) -> tuple[object, ...]:
        """Sort key of a queue whose next job needs `gpus`: the smallest goes first.

        Source: KAI-Scheduler queue_order.go, commit d5bc503a (one resource, usage acts through the share)."""
        claim = self._claims[leaf]
        held = self.allocated[leaf]
        allocatable = min(self._limit(leaf), max(self.deserved(leaf), shares[leaf]))
        with_job, without = ((held + gpus) / allocatable, held / allocatable) if allocatable > 0 else (inf, inf)
        return (
            held > shares[leaf],
            held + gpus > self.deserved(leaf),
            -claim.priority,
            with_job,
            without,
            claim.creation,
            leaf,
        )

    def accounts(self, total: int) -> dict[str, Account]:
        """Every queue as the rules of reclaim see it, now."""
        shares = self.shares(total)
        return {
            name: Account(
                name,
                claim.parent or "",
                {
                    GPU: QueueResource(
                        claim.deserved, shares[name], claim.limit, self.allocated[name], self._non_preemptible[name]
                    )
                },
            )
            for name, claim in self._claims.items()
        }

    def states(self, total: int) -> dict[str, QueueState]:
        shares = self.shares(total)
        return {
            name: QueueState(
                self.allocated[name], self._non_preemptible[name], self.requested[name], shares[name], claim.weight
            )
            for name, claim in self._claims.items()
        }

    def _limit(self, name: str) -> float:
        limit = self._claims[name].limit
        return inf if limit == UNLIMITED else limit


class Placement:
    """Free slots per flavour and node. A GPU may be withdrawn (several causes count) and restored."""

    def __init__(self, nodes: Sequence[NodeSpec]) -> None:
        self._slots: tuple[Slot, ...] = tuple(slot for node in nodes for slot in slots_of(node))
        self._ordinal = {slot: i for i, slot in enumerate(self._slots)}
        self._of_gpu: dict[str, list[int]] = {}
        self._node = [0] * len(self._slots)
        node_index = {node.name: i for i, node in enumerate(nodes)}
        if len(node_index) != len(nodes) or len(self._ordinal) != len(self._slots):
            raise ValueError("node names and GPU uuids must be unique")
        self._withdrawn: dict[str, int] = {gpu.uuid: 0 for node in nodes for gpu in node.gpus}
        self._free: dict[Flavour, dict[int, list[int]]] = {}
        self._count: dict[Flavour, int] = {}
        self._in_service: dict[Flavour, int] = {}
        for i, slot in enumerate(self._slots):
            self._of_gpu.setdefault(slot.gpu, []).append(i)
            self._node[i] = node_index[slot.node]
            self._free.setdefault(slot.flavour, {}).setdefault(self._node[i], []).append(i)
            self._count[slot.flavour] = self._count.get(slot.flavour, 0) + 1
        self._in_service.update(self._count)
        self._total = dict(self._count)
        self._allowed: dict[tuple[str, tuple[str, ...], tuple[str, ...]], tuple[Flavour, ...]] = {}

    def flavours(self, job: Job) -> tuple[Flavour, ...]:
        """Those the job may use, in the order of the nodes."""
        key = (job.shape, job.models, job.pools)
        if key not in self._allowed:
            self._allowed[key] = tuple(
                f
                for f in self._total
                if f.shape == job.shape
                and (not job.models or f.model in job.models)
                and (not job.pools or f.pool in job.pools)
            )
        return self._allowed[key]

    def possible(self, job: Job) -> bool:
        """Whether the gang fits on the empty, healthy cluster."""
        return any(self._total[f] >= job.gpus for f in self.flavours(job))

    def free(self, flavour: Flavour) -> int:
        return self._count[flavour]

    def most_free(self, shape: str) -> int:
        """The largest number of free slots of one flavour: no larger gang can start."""
        return max((n for f, n in self._count.items() if f.shape == shape), default=0)

    def in_service(self, shape: str) -> int:
        """Slots of a shape on usable GPUs, held or free."""
        return sum(n for f, n in self._in_service.items() if f.shape == shape)

    def fitting(self, job: Job, extra: Mapping[Flavour, int] | None = None) -> Flavour | None:
        """The flavour with the fewest free slots that takes the gang; `extra` counts as free too."""
        best: tuple[int, int, Flavour] | None = None
        for order, flavour in enumerate(self.flavours(job)):
            count = self._count[flavour] + (extra.get(flavour, 0) if extra else 0)
            if count >= job.gpus and (best is None or (count, order) < best[:2]):
                best = (count, order, flavour)
        return best[2] if best else None

    def take(self, job: Job, flavour: Flavour) -> tuple[Slot, ...]:
        """Hold slots for the whole gang. The caller has made sure that they are there."""
        nodes = self._free[flavour]
        taken: list[int] = []
        missing = job.gpus
        while missing:
            fill = min(((len(free), node) for node, free in nodes.items() if len(free) >= missing), default=None)
            if fill is None:
                emptiest = max(((len(free), -node) for node, free in nodes.items()), default=(0, 0))
                if not emptiest[0]:
                    raise ValueError(f"{job.id}: {job.gpus} slots of {flavour} are not free")
                fill = (emptiest[0], -emptiest[1])
            free = nodes[fill[1]]
            number = min(missing, len(free))
            taken += free[:number]
            del free[:number]
            missing -= number
        self._count[flavour] -= job.gpus
        return tuple(self._slots[i] for i in taken)

    def give(self, slots: Iterable[Slot]) -> None:
        """Free held slots. Those of a withdrawn GPU stay out of service."""
        for slot in slots:
            if self._withdrawn[slot.gpu] == 0:
                self._insert(self._ordinal[slot])

    def withdraw(self, gpu: str) -> None:
        """Take a GPU out of service for one more cause. Its holders must have been stopped."""
        self._withdrawn[gpu] += 1
        if self._withdrawn[gpu] == 1:
            for i in self._of_gpu[gpu]:
                flavour = self._slots[i].flavour
                free = self._free[flavour][self._node[i]]
                if i in free:
                    free.remove(i)
                    self._count[flavour] -= 1
                self._in_service[flavour] -= 1

    def restore(self, gpu: str) -> None:
        """Take back one cause; with the last one the slots are free again."""
        self._withdrawn[gpu] -= 1
        if self._withdrawn[gpu] == 0:
            for i in self._of_gpu[gpu]:
                self._insert(i)
                self._in_service[self._slots[i].flavour] += 1

    def _insert(self, i: int) -> None:
        flavour = self._slots[i].flavour
        insort(self._free[flavour][self._node[i]], i)
        self._count[flavour] += 1
