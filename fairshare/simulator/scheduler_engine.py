"""Simulates a gang scheduler with queues, shares, reclaim and backfilling, for the demo, the tests and evaluations.

The engine processes events on virtual milliseconds and schedules at multiples of the cycle. A gang starts as a whole or
not at all. Each queue is first in, first out, but a limited number of jobs may be tried after one that does not fit.
Free GPUs go to the queue that is first in order.

A queue that stays within its fair share with a gang takes GPUs back from queues above their share (reclaim). The engine
compares queues at the children of their lowest common ancestor. Victims come from queues that are above their share
there. At each level below the ancestor the queue most above its share comes first, and in the leaf the newest gang. A
gang is not stopped if a queue on the path would then fall below its deserved quota. If the stopped gangs would not
suffice, none is stopped. Gangs stop as a whole.

As in the source of `laws.division`, the engine checks the share before it takes a victim. A stopped gang may therefore
bring a queue below its share, but here never below its quota. These are the controller's rules
(`reclaim_rules_and_limits`) for one resource. Tests check that those rules allow every victim.

`SchedulerEngine` is the scheduler. `ClusterSimulation`, which the demo uses, adds nodes, GPU models, slices, outages
and a queue tree with the order and division of that source. `replay` runs a workload of weeks on one pool of equal GPUs
under a policy, so that policies can be compared. There `fair_shares` computes the fair shares without rounding to whole
GPUs, unless the argument `dividing` computes them.

The result is deterministic: it depends only on nodes, queues, jobs, outages, rules and the weights set over time.
Capacity, limits and deserved quotas are never violated.

Source of backfilling: Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995; Mu'alem and Feitelson, "Utilization,
predictability, workloads, and user runtime estimates", IEEE TPDS 12(6), 2001. Here backfilling knows the true run
times, so its result is better than with users' estimates, which are several times too long."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Reversible, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf
from operator import attrgetter
from typing import NamedTuple

from fairshare.core.queues_and_weights import UNLIMITED, DivisionProblem, QueueClaim
from fairshare.laws.division import divide, fair_shares
from fairshare.preemption.reclaim_rules_and_limits import EPSILON
from fairshare.simulator.engine_state import (
    NEVER,
    NodePlacement,
    Placement,
    PoolPlacement,
    QueueState,
    QueueTree,
    SimulatedGang,
    WaitingLine,
)
from fairshare.simulator.simulation_model import (
    CONTROL_S,
    SNAPSHOT_S,
    TICK_S,
    WHOLE,
    ControllerView,
    Dividing,
    Event,
    Flavour,
    JobOutcome,
    Outage,
    OutageBegan,
    OutageEnded,
    QueueAtReclaim,
    Ranking,
    ReplayPool,
    ReplayRecord,
    Rules,
    SimulatedController,
    SimulatedJob,
    SimulatedNodeSpec,
    Slot,
    Started,
    Stopped,
    StopReason,
    Workload,
)
from gputally.base.units import MS_PER_SECOND

_END, _RESTORE, _FAIL = range(3)
"""The kinds of events, in their order at one instant: jobs end, outages end, outages begin. Arrivals and the cycle
follow."""
Key = tuple[object, ...]
"""The sort key of a line. The line with the smallest key is served first."""
_NUMBER = attrgetter("number")


class _Bid(NamedTuple):
    """The first gang of a line that can start now, its place in the line, and the line's sort key."""

    key: Key
    line: int
    place: int
    gang: SimulatedGang


class SchedulerEngine(ABC):
    """A scheduler of gangs that arrive, wait, run and end. `run_until` advances its clock.

    A subclass computes the fair shares (`divide`) and the order in which waiting lines are served (`order`). A line
    holds the waiting gangs of one queue, or of all queues with the rule `one_line`. A subclass can react to starts,
    stops and outages."""

    def __init__(
        self,
        gangs: Sequence[SimulatedGang],
        tree: QueueTree,
        placement: Placement,
        rules: Rules,
        outages: Sequence[Outage] = (),
        other_queues: Sequence[str] = (),
    ) -> None:
        """gangs: in the order of their numbers. other_queues: the names of other schedulers' queues."""
        self.gangs, self.tree, self.placement, self.rules, self.outages = gangs, tree, placement, rules, outages
        self.now_ms = 0
        self._names = (*tree.names, *other_queues)
        self.lines = [WaitingLine(rules.scan_depth) for _ in range(1 if rules.one_line else len(tree.claims))]
        self.others = [WaitingLine(rules.scan_depth) for _ in self._names]
        """Waiting gangs that are not divided: parts of GPUs, and jobs of other schedulers. One line per queue."""
        self.running: list[dict[int, SimulatedGang]] = [{} for _ in self._names]
        """Running gangs by queue and number, newest last."""
        self.reclaims = [0] * len(tree.claims)
        """The number of gangs that were stopped for each queue."""
        self._foreign = 0
        self._arrivals_ms = [*(gang.submit_ms for gang in gangs), NEVER]
        self._submitted = 0
        self._cycle_ms = NEVER
        self.unsettled = False
        """True if a gang arrived, started or stopped, or a weight changed, since the last cycle began."""
        self._events: list[tuple[int, int, int]] = [(NEVER, _END, 0)]
        for i, outage in enumerate(outages):
            self._events.append((outage.start_ms, _FAIL, i))
            if outage.end_ms is not None:
                self._events.append((outage.end_ms, _RESTORE, i))
        heapify(self._events)
        self._shares: Sequence[float] = [0.0] * len(tree.claims)
        self._divided: int | None = None
        """The GPUs of the last division; None if a request or a weight has changed since."""

    @abstractmethod
    def divide(self, total: int) -> Sequence[float]:
        """Return the fair share of every queue out of `total` GPUs."""

    @abstractmethod
    def order(self, line: int, gpus: int) -> Key:
        """Return the sort key of a line whose next gang needs `gpus`."""

    def started(self, gang: SimulatedGang) -> None:  # noqa: B027
        """React to a gang that has got its GPUs."""

    def stopped(self, gang: SimulatedGang, reason: StopReason, claimant: SimulatedGang | None) -> None:  # noqa: B027
        """React to a gang that has lost its GPUs.

        claimant: the gang for which the GPUs were reclaimed; None if the reason is another one."""

    def fail(self, outage: Outage) -> None:  # noqa: B027
        """React to the beginning of an outage."""

    def restore(self, outage: Outage) -> None:  # noqa: B027
        """React to the end of an outage."""

    def run_until(self, at_ms: int, *, cycle: bool = True) -> None:
        """Advance to `at_ms`, and apply all events up to then. cycle: run a scheduling cycle that is due at `at_ms`."""
        while True:
            self.wake(min(self._events[0][0], self._arrivals_ms[self._submitted]))
            due_ms = self._cycle_ms
            self._apply_events(min(due_ms, at_ms))
            if due_ms > at_ms or (due_ms == at_ms and not cycle):
                return
            self.cycle()

    def wake(self, at_ms: int) -> None:
        """Make a cycle due at the first multiple of the cycle time that is not before `at_ms`."""
        every = self.rules.cycle_ms
        self._cycle_ms = min(self._cycle_ms, -(-at_ms // every) * every)

    def _apply_events(self, until_ms: int) -> None:
        """Apply the ends of jobs, outages and arrivals up to and including a time."""
        events, gangs = self._events, self.gangs
        while events[0][0] <= until_ms:
            self.now_ms, kind, number = heappop(events)
            if kind == _FAIL:
                self.fail(self.outages[number])
            elif kind == _RESTORE:
                self.restore(self.outages[number])
            elif gangs[number].end_ms == self.now_ms:  # otherwise the gang was stopped before this end
                self.stop(gangs[number], "finished")
        self.now_ms = max(self.now_ms, until_ms)
        while self._arrivals_ms[self._submitted] <= until_ms:
            gang = gangs[self._submitted]
            self._submitted += 1
            if gang.divided:
                self._request(gang, gang.gpus)
            self._wait(gang)

    def _wait(self, gang: SimulatedGang) -> None:
        """Add the gang to its line in the order of submission."""
        line = 0 if self.rules.one_line else gang.queue
        (self.lines[line] if gang.divided else self.others[gang.queue]).join(gang)
        self.unsettled = True

    def _request(self, gang: SimulatedGang, gpus: int) -> None:
        self.tree.request(gang.queue, gpus)
        self.divide_again()

    def divide_again(self) -> None:
        """Mark the shares as outdated."""
        self._divided = None
        self.unsettled = True

    def _start(self, gang: SimulatedGang, flavour: Flavour) -> None:
        """Start a gang that has left its line."""
        gang.attempt += 1
        gang.restart_ms = self.rules.restart_ms if gang.attempt > 1 else 0
        gang.start_ms = self.now_ms
        gang.end_ms = self.now_ms + gang.restart_ms + gang.left_ms
        gang.flavour = flavour
        if gang.first_start_ms < 0:
            gang.first_start_ms = self.now_ms
        self.placement.take(gang, flavour)
        self.running[gang.queue][gang.number] = gang
        self._hold(gang, gang.gpus)
        heappush(self._events, (gang.end_ms, _END, gang.number))
        self.started(gang)

    def stop(self, gang: SimulatedGang, reason: StopReason, claimant: SimulatedGang | None = None) -> None:
        """Stop a gang. If it has not finished, it waits again, and its work since the last checkpoint is lost."""
        del self.running[gang.queue][gang.number]
        gang.end_ms = -1
        self.placement.give(gang)
        self._hold(gang, -gang.gpus)
        if reason == "finished":
            gang.finish_ms = self.now_ms
            gang.lost_ms += gang.restart_ms
            if gang.divided:
                self._request(gang, -gang.gpus)
        else:
            elapsed = self.now_ms - gang.start_ms
            saved = max(0, elapsed - gang.restart_ms) // self.rules.checkpoint_ms * self.rules.checkpoint_ms
            gang.left_ms -= saved
            gang.lost_ms += elapsed - saved
            if claimant is not None:
                gang.evictions += 1
                self.reclaims[claimant.queue] += 1
            else:
                gang.crashes += 1
            gang.queued_ms = self.now_ms
            self._wait(gang)
        self.stopped(gang, reason, claimant)

    def _hold(self, gang: SimulatedGang, gpus: int) -> None:
        self.unsettled = True
        if gang.divided:
            self.tree.allocate(gang.queue, gpus, self.now_ms, preemptible=gang.preemptible)
        elif gang.flavours[0].shape == WHOLE:
            self._foreign += gpus

    def cycle(self) -> None:
        """Start the gangs that fit, and reclaim GPUs for others."""
        self._cycle_ms, self.unsettled = NEVER, False
        self._start_others()
        if not any(line.gangs for line in self.lines):
            return
        self.shares()
        if self.rules.backfill:
            self._backfill()
        else:
            self._start_what_fits()
        if self.rules.reclaim:
            self._reclaim()

    def shares(self) -> Sequence[float]:
        """Return the shares of the usable whole GPUs that no job of another scheduler holds."""
        total = self.placement.whole_gpus() - self._foreign
        if total != self._divided:
            self._divided = total
            self._shares = self.divide(total)
        return self._shares

    def _start_others(self) -> None:
        """Start gangs that are not divided. The queue that holds the fewest GPUs goes first."""
        waiting = [q for q, line in enumerate(self.others) if line.gangs]
        if not waiting:
            return
        held = {q: sum(gang.gpus for gang in self.running[q].values()) for q in waiting}
        for q in sorted(waiting, key=lambda q: (held[q], self._names[q])):
            line, place = self.others[q], 0
            while place < line.depth():
                gang = line.gangs[place]
                flavour = self.placement.fitting(gang)
                if flavour is None:
                    place += 1
                else:
                    line.leave(place)
                    self._start(gang, flavour)

    def _start_what_fits(self) -> None:
        """Start one gang at a time, each from the line that is then first in order."""
        most = self.placement.most_free()
        bids = [bid for q, line in enumerate(self.lines) if line.smallest <= most and (bid := self._bid(q, 0))]
        while bids:
            best = min(bids)
            flavour = self.placement.fitting(best.gang)
            assert flavour is not None
            self.lines[best.line].leave(best.place)
            self._start(best.gang, flavour)
            if not self.placement.most_free():
                return
            bids = [
                still
                for bid in bids
                if (still := bid if bid is not best and self._fits(bid.gang) else self._bid(bid.line, bid.place))
            ]

    def _bid(self, q: int, place: int) -> _Bid | None:
        """Return the bid of a line: its first gang, from `place` on, that can start now; None if no gang within the
        scan depth can."""
        line = self.lines[q]
        most = min(self.placement.most_free(), inf if self.rules.one_line else self.tree.room(q))
        if line.smallest > most:
            return None
        for at in range(place, line.depth()):
            gang = line.gangs[at]
            if gang.gpus <= most and self._fits(gang):
                return _Bid(self.order(q, gang.gpus), q, at, gang)
        return None

    def _fits(self, gang: SimulatedGang) -> bool:
        """Return True if the gang can start now, also within the limits of its queues."""
        return self.placement.fitting(gang) is not None and self.tree.admits(
            gang.queue, gang.gpus, preemptible=gang.preemptible
        )

    def _backfill(self) -> None:
        """Start gangs in order. The first gang that does not fit gets a reservation, which later gangs must keep."""
        reservation = None
        for line in sorted(range(len(self.lines)), key=lambda line: self.order(line, 0)):
            for gang in self.lines[line].front():
                flavour = self.placement.fitting(gang)
                if flavour is None:
                    free = self.placement.free(gang.flavours[0])
                    reservation = reservation or reserve(gang.gpus, free, self._ends())
                elif reservation is None or reservation.admits(gang.gpus, self.now_ms + gang.left_ms):
                    self.lines[line].leave(self.lines[line].gangs.index(gang))
                    self._start(gang, flavour)

    def _ends(self) -> Iterator[tuple[int, int]]:
        """Yield (end, GPUs) of every running gang, the next to end first."""
        ahead = self._events.copy()
        while ahead:
            end_ms, kind, number = heappop(ahead)
            if kind == _END and self.gangs[number].end_ms == end_ms:
                yield end_ms, self.gangs[number].gpus

    def _reclaim(self) -> None:
        """Stop gangs of queues above their share for queues that stay within their share with a waiting gang."""
        rules, tree, shares = self.rules, self.tree, self._shares  # nothing below changes requests
        again_ms, reclaimed = NEVER, False
        for q in self._claimants(shares):
            in_vain: dict[tuple[Flavour, ...], int] = {}
            for gang in self.lines[q].front():
                if (
                    tree.held[q] + gang.gpus > shares[q]
                    or gang.gpus >= in_vain.get(gang.flavours, gang.gpus + 1)
                    or not tree.admits(q, gang.gpus, preemptible=gang.preemptible)
                ):
                    continue
                fitting = None if rules.settle else self.placement.fitting(gang)
                chosen: tuple[Flavour, list[SimulatedGang]] | None = None if fitting is None else (fitting, [])
                if chosen is None:
                    debtors, soonest_ms = self._debtors(q, shares)
                    again_ms = min(again_ms, soonest_ms)
                    chosen = choose(gang, self.placement, debtors, tree, shares, self.now_ms - rules.min_runtime_ms)
                if chosen is None:
                    in_vain[gang.flavours] = gang.gpus
                    continue
                flavour, victims = chosen
                for victim in victims:
                    self.stop(victim, "reclaimed", gang)
                self.lines[q].leave(self.lines[q].gangs.index(gang))
                self._start(gang, flavour)
                reclaimed = True
        if reclaimed and rules.settle:
            again_ms = self.now_ms + 1
        if again_ms < NEVER:
            self.wake(again_ms)

    def _claimants(self, shares: Sequence[float]) -> list[int]:
        """Return the queues that stay within their share with their smallest gang, in order.

        With `settle` all waiting queues are returned, because a queue may lose jobs in this cycle."""
        held, settle = self.tree.held, self.rules.settle
        found = [
            q for q, line in enumerate(self.lines) if held[q] + line.smallest <= shares[q] or (settle and line.gangs)
        ]
        return sorted(found, key=lambda q: self.order(q, 0)) if len(found) > 1 else found

    def _debtors(self, reclaimer: int, shares: Sequence[float]) -> tuple[list[Debtor], int]:
        """Return the queues that may lose GPUs, and the time at which the next protected gang may be stopped."""
        debtors: list[Debtor] = []
        soonest_ms = NEVER
        for q in self.tree.leaves:
            if q == reclaimer or not self.running[q]:
                continue
            way = self.tree.levels(reclaimer, q)
            if not self.tree.above_share(way[0], self.tree.held, shares):
                continue
            for gang in reversed(self.running[q].values()):
                protected_until_ms = gang.start_ms + self.rules.min_runtime_ms
                if protected_until_ms <= self.now_ms:
                    break
                if gang.divided and gang.preemptible:
                    soonest_ms = min(soonest_ms, protected_until_ms)
            debtors.append(Debtor(way, self.running[q].values()))
        return debtors, soonest_ms


@dataclass(frozen=True, slots=True)
class Debtor:
    """A leaf queue that may have to give GPUs back.

    levels: the queues that lose GPUs with this leaf, from just below the common ancestor downwards
        (`QueueTree.levels`). None of them may fall below its deserved quota.
    gangs: the gangs that run in the leaf, newest last."""

    levels: tuple[int, ...]
    gangs: Reversible[SimulatedGang]


def choose(
    gang: SimulatedGang,
    placement: Placement,
    debtors: Sequence[Debtor],
    tree: QueueTree,
    shares: Sequence[float],
    by_ms: int,
) -> tuple[Flavour, list[SimulatedGang]] | None:
    """Return the flavour on which `gang` can run after a reclaim, and the gangs to stop; None if no flavour suffices.

    Of several flavours the one whose victims hold the fewest GPUs is chosen.
    by_ms: gangs that started later are not stopped."""
    best: tuple[int, int, Flavour, list[SimulatedGang]] | None = None
    for order, flavour in enumerate(gang.flavours):
        missing = gang.gpus - placement.free(flavour)
        victims = collect(gang, missing, flavour, debtors, tree, shares, by_ms)
        if victims:
            cost = sum(victim.gpus for victim in victims)
            if best is None or (cost, order) < best[:2]:
                best = (cost, order, flavour, victims)
    return (best[2], best[3]) if best else None


def collect(
    gang: SimulatedGang,
    missing: int,
    flavour: Flavour,
    debtors: Sequence[Debtor],
    tree: QueueTree,
    shares: Sequence[float],
    by_ms: int,
) -> list[SimulatedGang]:
    """Return the gangs to stop for `missing` GPUs of a flavour; none if the debtors have too few GPUs to give.

    The result is also empty if the queue of `gang`, or a queue above it, would then be fuller than a sibling from which
    it takes GPUs."""
    held = list(tree.held)
    sources = [_VictimSource(debtor.levels, _stoppable(debtor.gangs, flavour, by_ms)) for debtor in debtors]
    victims: list[SimulatedGang] = []
    freed = 0
    while freed < missing:
        fullest: _VictimSource | None = None
        for source in sources:
            if source.advance(held, tree, shares) and (fullest is None or source.fullness > fullest.fullness):
                fullest = source
        if fullest is None or fullest.newest is None:
            return []
        victim, fullest.newest = fullest.newest, None
        for q in tree.path(victim.queue):
            held[q] -= victim.gpus
        freed += victim.gpus
        victims.append(victim)
    victims = _without_surplus(victims, freed - missing)
    return victims if _fair(gang, victims, tree, shares) else []


def _stoppable(gangs: Reversible[SimulatedGang], flavour: Flavour, by_ms: int) -> Iterator[SimulatedGang]:
    """Yield the gangs that may be stopped, newest first."""
    for gang in reversed(gangs):
        if gang.divided and gang.preemptible and gang.start_ms <= by_ms and gang.flavour == flavour:
            yield gang


@dataclass(slots=True)
class _VictimSource:
    """The gangs of a debtor that can still become victims.

    levels: see Debtor.
    gangs: the gangs that have not been considered yet, newest first.
    newest: the next gang that can be stopped.
    fullness: held GPUs over the share, at each level."""

    levels: tuple[int, ...]
    gangs: Iterator[SimulatedGang]
    newest: SimulatedGang | None = None
    fullness: tuple[float, ...] = ()

    def advance(self, held: Sequence[int], tree: QueueTree, shares: Sequence[float]) -> bool:
        """Find the next victim. Return True if the queue is above its share at the compared level, and has a victim."""
        if not tree.above_share(self.levels[0], held, shares):
            return False
        while self.newest is None or any(held[q] - self.newest.gpus < tree.deserved[q] for q in self.levels):
            self.newest = next(self.gangs, None)
            if self.newest is None:
                return False
        self.fullness = tuple([_fullness(held[q], shares[q]) for q in self.levels])
        return True


def _fullness(held: float, share: float) -> float:
    return held / share if share > 0 else inf if held > 0 else 0.0


def _fair(gang: SimulatedGang, victims: Sequence[SimulatedGang], tree: QueueTree, shares: Sequence[float]) -> bool:
    """Return True if the gang's queue, and each queue above it, ends up no fuller than its siblings that lose GPUs."""
    held, giving = list(tree.held), set[int]()
    for victim in victims:
        for q in tree.path(victim.queue):
            held[q] -= victim.gpus
            giving.add(q)
    for mine in tree.path(gang.queue):
        full = _fullness(held[mine] + gang.gpus, shares[mine])
        if full > 1 + EPSILON and any(
            shares[q] > 0 and full >= _fullness(held[q], shares[q])
            for q in giving
            if q != mine and tree.claims[q].parent == tree.claims[mine].parent
        ):
            return False
    return True


def _without_surplus(victims: Sequence[SimulatedGang], surplus: int) -> list[SimulatedGang]:
    """Return the victims without gangs that the reclaim does not need. Gangs that have run longest are spared first,
    because they would lose most. surplus: the GPUs of the victims beyond the needed ones."""
    needed = list(victims)
    for victim in sorted(victims, key=lambda victim: (victim.start_ms, victim.name, victim.number)):
        if victim.gpus <= surplus:
            surplus -= victim.gpus
            needed.remove(victim)
    return needed


@dataclass(slots=True)
class Reservation:
    """A reservation for the first waiting gang that does not fit.

    at_ms: the time at which the gang can start.
    spare: the GPUs that are then left over. `admits` subtracts those of a gang that starts earlier and runs longer."""

    at_ms: int
    spare: int

    def admits(self, gpus: int, end_ms: int) -> bool:
        """Return True if another gang can hold `gpus` until `end_ms` without delaying the reservation."""
        if end_ms <= self.at_ms:
            return True
        if gpus > self.spare:
            return False
        self.spare -= gpus
        return True


def reserve(gpus: int, free: int, ends: Iterable[tuple[int, int]]) -> Reservation:
    """Return the reservation of a gang that does not fit into `free` GPUs.

    ends: (end, GPUs) of all running gangs, the next to end first. Their GPUs and `free` together must be enough."""
    at_ms, coming = 0, iter(ends)
    while free < gpus:
        at_ms, freed = next(coming)
        free += freed
    return Reservation(at_ms, free - gpus)


class ClusterSimulation(SchedulerEngine):
    """Simulates a cluster of nodes with outages, with the order and division of `laws.division`'s source.

    `events_until` advances its clock."""

    def __init__(
        self,
        nodes: Sequence[SimulatedNodeSpec],
        queues: Sequence[QueueClaim],
        jobs: Iterable[SimulatedJob],
        *,
        outages: Sequence[Outage] = (),
        rules: Rules | None = None,
    ) -> None:
        """Raises ValueError for duplicate names, DivisionError for an invalid queue tree."""
        divide(DivisionProblem("check", 0.0, 0.0, tuple(queues)))
        tree = QueueTree(sorted(queues, key=attrgetter("name")))
        self.nodes = NodePlacement(nodes)
        self._gpus = {("node", node.name): tuple(gpu.uuid for gpu in node.gpus) for node in nodes}
        self._gpus |= {("gpu", gpu.uuid): (gpu.uuid,) for node in nodes for gpu in node.gpus}
        for outage in outages:
            if (outage.target, outage.name) not in self._gpus:
                raise ValueError(f"outage of an unknown {outage.target}: {outage.name}")
        jobs = sorted(jobs, key=lambda job: (job.submit_ms, job.id))
        if len({job.id for job in jobs}) != len(jobs):
            raise ValueError("job ids must be unique")
        others = sorted({job.queue for job in jobs} - set(tree.names))
        index = tree.index | {name: len(tree.names) + i for i, name in enumerate(others)}
        self._jobs: list[SimulatedJob] = []
        self._rejected: list[SimulatedJob] = []
        gangs: list[SimulatedGang] = []
        for job in jobs:
            queue, flavours = index[job.queue], self.nodes.flavours(job)
            divided = queue in tree.leaves and job.shape == WHOLE
            admitted = not divided or tree.ever_admits(queue, job.gpus, preemptible=job.preemptible)
            if not admitted or not self.nodes.possible(job):
                self._rejected.append(job)
                continue
            gang = SimulatedGang(len(gangs), job.submit_ms, job.gpus, job.duration_ms, queue)
            gang.flavours, gang.preemptible, gang.divided, gang.name = flavours, job.preemptible, divided, job.id
            gangs.append(gang)
            self._jobs.append(job)
        self._report: list[Event] = []
        super().__init__(gangs, tree, self.nodes, rules or Rules(), outages, others)

    def events_until(self, at_ms: int) -> list[Event]:
        """Return everything that happens up to and including `at_ms`, in order."""
        self._report = []
        self.run_until(at_ms)
        return self._report

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set over-quota weights from the next cycle on. Raises KeyError for an unknown queue, ValueError for a weight
        that is not >= 0."""
        before = list(self.tree.weights)
        for name, weight in weights.items():
            if not weight >= 0:
                raise ValueError(f"queue {name}: weight {weight} is not >= 0")
            self.tree.weights[self.tree.index[name]] = weight
        if self.tree.weights != before:
            self.divide_again()
            self.wake(self.now_ms + 1)

    def queue_states(self) -> dict[str, QueueState]:
        """Return the GPUs that each queue holds, requests and is due now."""
        return self.tree.states(self.shares())

    @property
    def outcomes(self) -> dict[str, JobOutcome]:
        """Return the outcomes by job id, in the order of submission."""
        outcomes = {job.id: JobOutcome(job, rejected=True) for job in self._rejected}
        for job, gang in zip(self._jobs, self.gangs, strict=True):
            outcomes[job.id] = JobOutcome(
                job,
                gang.first_start_ms if gang.attempt else None,
                gang.finish_ms if gang.finish_ms >= 0 else None,
                gang.evictions,
                gang.crashes,
                gang.lost_ms * gang.gpus,
            )
        return dict(sorted(outcomes.items(), key=lambda item: (item[1].job.submit_ms, item[0])))

    def divide(self, total: int) -> Sequence[float]:
        return self.tree.shares_as_source(total)

    def order(self, line: int, gpus: int) -> Key:
        """Return the sort key of a line in the order of the division's source.

        Source: queue_order.go of the scheduler and commit that `laws.division` names, for one resource. Usage acts
        through the share."""
        tree, share = self.tree, self._shares[line]
        held, deserved, claim = tree.held[line], tree.deserved[line], tree.claims[line]
        allocatable = min(tree.limits[line], max(deserved, share))
        with_job, without = ((held + gpus) / allocatable, held / allocatable) if allocatable > 0 else (inf, inf)
        return (held > share, held + gpus > deserved, -claim.priority, with_job, without, claim.creation, line)

    def started(self, gang: SimulatedGang) -> None:
        job = self._jobs[gang.number]
        self._report.append(Started(self.now_ms, job, self._slots(gang), gang.attempt, gang.queued_ms))

    def stopped(self, gang: SimulatedGang, reason: StopReason, claimant: SimulatedGang | None) -> None:
        job, slots = self._jobs[gang.number], self._slots(gang)
        if claimant is None:
            self._report.append(Stopped(self.now_ms, job, slots, gang.attempt, reason))
            return
        taker = self._jobs[claimant.number]
        compared = (self._compared(gang.queue, gang.gpus), self._compared(claimant.queue, 0))
        stop = Stopped(self.now_ms, job, slots, gang.attempt, reason, taker.queue, taker.id, compared)
        self._report.append(stop)

    def _compared(self, queue: int, released: int) -> QueueAtReclaim:
        """Return a queue as it was before it `released` these GPUs."""
        tree, claim = self.tree, self.tree.claims[queue]
        held = tree.held[queue] + released
        return QueueAtReclaim(claim.name, held, tree.deserved[queue], self._shares[queue], claim.priority)

    def _slots(self, gang: SimulatedGang) -> tuple[Slot, ...]:
        return tuple(self.nodes.slots[i] for i in gang.slots)

    def fail(self, outage: Outage) -> None:
        gpus = self._gpus[outage.target, outage.name]
        hit = [
            gang
            for gangs in self.running
            for gang in gangs.values()
            if any(self.nodes.slots[i].gpu in gpus for i in gang.slots)
        ]
        for gang in sorted(hit, key=_NUMBER):
            self.stop(gang, "outage")
        for gpu in gpus:
            self.nodes.withdraw(gpu)
        self._report.append(OutageBegan(self.now_ms, outage))

    def restore(self, outage: Outage) -> None:
        for gpu in self._gpus[outage.target, outage.name]:
            self.nodes.restore(gpu)
        self._report.append(OutageEnded(self.now_ms, outage))


def replay(
    workload: Workload,
    pool: ReplayPool,
    end_s: int,
    *,
    steering: SimulatedController | None = None,
    dividing: Dividing | None = None,
    ranking: Ranking | None = None,
    control_s: int = CONTROL_S,
    tick_s: int = TICK_S,
    progress: Callable[[float], None] | None = None,
) -> ReplayRecord:
    """Run a workload until `end_s` under a policy, and return its record.

    steering: sets weights in every control period. dividing: computes the fair shares. ranking: orders the queues.
    control_s, tick_s: the seconds of a control period, and of a scheduling cycle. progress: gets the finished part."""
    run = _PoolReplay(workload, pool, dividing, tick_s)
    record = ReplayRecord(workload, pool, end_s)
    for due_s in range(0, end_s + 1, control_s):
        now_s = -(-due_s // tick_s) * tick_s
        if now_s > end_s:
            break
        run.run_until(now_s * MS_PER_SECOND, cycle=False)
        if now_s % SNAPSHOT_S == 0:
            record.backlog.append(run.backlog())
        record.used.append(run.used_s())
        if steering is not None:
            run.weigh(steering(run.view()))
        if ranking is not None:
            run.rank = ranking(run.view())
        record.weights.append(tuple(run.tree.weights))
        if progress is not None:
            progress(now_s / end_s if end_s else 1.0)
        if run.unsettled or dividing is not None:
            run.wake(run.now_ms)
        run.run_until(run.now_ms)
        record.held.append(list(run.tree.held))
        record.shares.append(tuple(run.shares()))
    run.run_until(end_s // tick_s * tick_s * MS_PER_SECOND)
    return run.close(record)


class _PoolReplay(SchedulerEngine):
    """Runs a workload on one pool of equal GPUs, with flat queues and weights that a controller may set."""

    def __init__(self, workload: Workload, pool: ReplayPool, dividing: Dividing | None, tick_s: int) -> None:
        columns = zip(workload.submit_s, workload.gpus, workload.duration_s, workload.queue, strict=True)
        gangs = [
            SimulatedGang(number, submit_s * MS_PER_SECOND, gpus, duration_s * MS_PER_SECOND, queue)
            for number, (submit_s, gpus, duration_s, queue) in enumerate(columns)
        ]
        limits = [UNLIMITED if limit is None else limit for limit in pool.limits] or [UNLIMITED] * len(workload.queues)
        tree = QueueTree(
            [
                QueueClaim(name, 0.0, deserved, limit, weight)
                for name, deserved, limit, weight in zip(
                    workload.queues, pool.deserved, limits, pool.weights, strict=True
                )
            ]
        )
        rules = replace(pool.rules, cycle_ms=tick_s * MS_PER_SECOND, settle=False)
        super().__init__(gangs, tree, PoolPlacement(pool.capacity), rules)
        self._pool, self._dividing = pool, dividing
        self.rank: Sequence[float] = [0.0] * len(self.lines)

    def weigh(self, weights: Sequence[float] | None) -> None:
        if weights is not None and list(weights) != self.tree.weights:
            self.tree.weights = list(weights)
            self.divide_again()

    def cycle(self) -> None:
        if self._dividing is not None:
            self.divide_again()  # the division depends on the time and on held GPUs
        super().cycle()

    def divide(self, total: int) -> Sequence[float]:
        tree = self.tree
        if self._dividing is not None:
            return self._dividing(self.view(), tree.weights)
        if self.rules.reclaim:
            return fair_shares(total, list(map(float, tree.asked)), self._pool.deserved, tree.weights)
        return [0.0] * len(tree.claims)

    def _request(self, gang: SimulatedGang, gpus: int) -> None:
        """Change the request of a queue. The shares are computed again only if the request limits the queue's share
        before or after the change."""
        q, asked, shares = gang.queue, self.tree.asked, self._shares
        was_limiting = asked[q] <= shares[q]
        self.tree.request(q, gpus)
        if was_limiting or asked[q] <= shares[q]:
            self.divide_again()

    def order(self, line: int, gpus: int) -> Key:
        """Return the sort key of a line: queues within their share first, then within their quota, then by fullness.

        Fullness is the part of the share that the queue would hold with the gang; it says nothing about a gang that is
        larger than the whole share, which comes last. Without shares the order is by rank."""
        if not self.rules.reclaim:
            return (self.rank[line], line)
        held, share, deserved = self.tree.held[line], self._shares[line], self.tree.deserved[line]
        due = max(deserved, share)
        with_gang = held + gpus
        return (held > share, with_gang > deserved, with_gang / due if gpus <= due and due > 0.0 else inf, line)

    def view(self) -> ControllerView:
        """Return the data that a controller sees now."""
        return ControllerView(
            self.now_ms // MS_PER_SECOND,
            self._pool.capacity,
            self.used_s(),
            list(self.tree.held),
            list(map(float, self.tree.asked)),
            [line.smallest if line.gangs else 0 for line in self.lines],
            list(self.reclaims),
        )

    def used_s(self, until_ms: int | None = None) -> list[int]:
        """Return the GPU-seconds of every queue since the start."""
        return [used // MS_PER_SECOND for used in self.tree.used_ms(self.now_ms if until_ms is None else until_ms)]

    def backlog(self) -> tuple[array[int], array[int]]:
        """Return the numbers of all jobs that wait or run, and their seconds of work left."""
        gangs = [gang for line in self.lines for gang in line.gangs]
        gangs += [gang for running in self.running for gang in running.values()]
        gangs.sort(key=_NUMBER)
        left = [(gang.end_ms - self.now_ms if gang.end_ms >= 0 else gang.left_ms) // MS_PER_SECOND for gang in gangs]
        return array("q", [gang.number for gang in gangs]), array("q", left)

    def close(self, record: ReplayRecord) -> ReplayRecord:
        """Return the record, completed with the outcomes of the jobs."""
        gangs = self.gangs
        record.started_s = [gang.first_start_ms // MS_PER_SECOND if gang.attempt else -1 for gang in gangs]
        record.finished_s = [gang.finish_ms // MS_PER_SECOND if gang.finish_ms >= 0 else -1 for gang in gangs]
        record.evicted = [gang.evictions for gang in gangs]
        record.evictions = sum(record.evicted)
        restarting = [gang.restart_ms * gang.gpus for gangs in self.running for gang in gangs.values()]
        record.lost_gpu_s = (sum(gang.lost_ms * gang.gpus for gang in gangs) + sum(restarting)) // MS_PER_SECOND
        record.delivered_gpu_s = sum(self.used_s(record.end_s * MS_PER_SECOND))
        return record
