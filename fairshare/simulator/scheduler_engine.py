"""Simulates a gang scheduler with queues, shares, reclaim and backfilling; the one engine for demo, tests and
evaluation.

Event-driven on virtual milliseconds. Gangs are all or nothing; a queue is first in, first out with a
bounded look past jobs that do not fit; queues take turns by KAI's order; a queue below its fair share
reclaims from queues above theirs (`reclaim`). Slots that are parts of a GPU (MIG instances, replicas)
are pools of their own: first come first served, fewest held first, no shares.

Deterministic: the outcome depends on nodes, queues, jobs, outages, rules and the weights set over time,
not on the order in which dicts iterate. Capacity, limits and deserved quotas are never violated.
No clock, no I/O.

Event-driven on whole seconds with scheduling at ticks. Gangs are all or nothing; a queue is first in,
first out with a bounded look past what does not fit; free GPUs go to the queue first in order; a queue
that stays within its fair share with the gang takes it back from those above theirs, newest jobs first,
whole gangs only, never below a deserved quota and not before the minimum run time. Like KAI it looks at
a victim's share before it takes the gang, so one may end up below its share. The rule is written out here, where
it is asked millions of times; that it is the controller's (`fairshare.preemption.preemption_rules`) is a property of
the tests.

One pool without nodes: `fairshare.simulator.scheduler_engine` knows nodes, GPU models, slices and outages, and is
what the demo runs on. Fair shares are fluid here (no rounding to whole GPUs) unless a `Dividing` says
otherwise. Deterministic: nothing depends on the order of a dict or a set. No clock, no I/O.

Source: Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995; Mu'alem and Feitelson, "Utilization, predictability,
workloads, and user runtime estimates", IEEE TPDS 12(6), 2001. Run times are taken as known, which flatters it:
people's estimates are several times too long. Pure.

In reclaim, queues are compared at the children of their lowest common ancestor, by the controller's own rules
(`fairshare.preemption.preemption_rules`). Who is above what it may hold there gives back, most over its share first at
every level on the way down, its newest jobs first, until the gang fits or a queue on the way would fall below its
deserved quota. Whole gangs only. As in KAI the share is looked at before a victim is taken, so its gang may carry a
queue below its share; unlike there it never carries one below its quota. Pure.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from fairshare.core.model import UNLIMITED, Claim
from fairshare.laws.division import fair_shares
from fairshare.preemption.preemption_claims import GPU
from fairshare.preemption.preemption_rules import (
    Accounts,
    Claimant,
    TakenBundles,
    above_share,
    path,
    queues_to_compare,
    ratio,
)
from fairshare.simulator.engine_state import NEVER, NOBODY, Placement, QueueState, QueueTree, State
from fairshare.simulator.simulation_model import (
    CONTROL_S,
    SNAPSHOT_S,
    TICK_S,
    WHOLE,
    Dividing,
    Event,
    Flavour,
    Job,
    NodeSpec,
    Outage,
    OutageBegan,
    OutageEnded,
    Outcome,
    Pool,
    Ranking,
    Record,
    Rules,
    SimulatedController,
    Slot,
    Started,
    Stopped,
    StopReason,
    Workload,
)


@dataclass(slots=True)
class Run:
    """One attempt of one job: on its slots since `start_ms`, to end at `end_ms` if nothing stops it."""

    job: Job
    slots: tuple[Slot, ...]
    start_ms: int
    end_ms: int
    restart_ms: int
    attempt: int

    @property
    def flavour(self) -> Flavour:
        return self.slots[0].flavour


@dataclass(frozen=True, slots=True)
class Debtor:
    """A leaf queue that may have to give back: its preemptible runs past their minimum run time, newest first."""

    queue: str
    runs: Sequence[Run]


def levels(asking: str, queue: str, accounts: Accounts) -> tuple[str, ...]:
    """The queues that have to agree when a leaf gives back to another: from the child of their lowest common
    ancestor down to the leaf."""
    way = path(queue, accounts)
    return way[way.index(queues_to_compare(asking, queue, accounts)[1]) :]


def choose(
    job: Job, placement: Placement, debtors: Sequence[Debtor], accounts: Accounts
) -> tuple[Flavour, list[Run]] | None:
    """The flavour to run on and the jobs to stop, with as few GPUs as possible; None where nothing helps."""
    best: tuple[int, int, Flavour, list[Run]] | None = None
    for order, flavour in enumerate(placement.flavours(job)):
        victims = collect(job, job.gpus - placement.free(flavour), flavour, debtors, accounts)
        if victims:
            cost = sum(run.job.gpus for run in victims)
            if best is None or (cost, order) < best[:2]:
                best = (cost, order, flavour, victims)
    return (best[2], best[3]) if best else None


def collect(job: Job, missing: int, flavour: Flavour, debtors: Sequence[Debtor], accounts: Accounts) -> list[Run]:
    """The jobs to stop for `missing` GPUs of a flavour; none where it is not enough, or where the gang's queue or one
    above it would then be fuller than those it takes from."""
    taking = TakenBundles(Claimant(job.queue, {GPU: float(job.gpus)}, job.preemptible), accounts)
    rows = [
        (levels(job.queue, debtor.queue, accounts), [run for run in debtor.runs if run.flavour == flavour])
        for debtor in debtors
    ]
    at = [0] * len(rows)
    victims: list[Run] = []
    freed = 0
    while freed < missing:
        best: tuple[tuple[float, ...], int] | None = None
        for row, (way, runs) in enumerate(rows):
            if not above_share(accounts[way[0]], taking.held(way[0])):
                continue
            held = [taking.held(name)[GPU] for name in way]
            while at[row] < len(runs) and not _keeps_quotas(way, held, runs[at[row]].job.gpus, accounts):
                at[row] += 1
            if at[row] == len(runs):
                continue
            over = tuple(
                ratio(amount, accounts[name].stocks[GPU].share) for name, amount in zip(way, held, strict=True)
            )
            if best is None or over > best[0]:
                best = (over, row)
        if best is None:
            return []
        row = best[1]
        way, runs = rows[row]
        run = runs[at[row]]
        at[row] += 1
        taking.take(way[-1], {GPU: float(run.job.gpus)})
        freed += run.job.gpus
        victims.append(run)
    return _without_surplus(victims, freed - missing) if taking.fair() else []


def _keeps_quotas(way: Sequence[str], held: Sequence[float], gpus: int, accounts: Accounts) -> bool:
    """Whether every queue on the way still has its deserved quota without these GPUs."""
    for name, amount in zip(way, held, strict=True):
        quota = accounts[name].stocks[GPU].deserved
        if quota == UNLIMITED or amount - gpus < quota:
            return False
    return True


def _without_surplus(victims: list[Run], surplus: int) -> list[Run]:
    """Spare the jobs that the gang can do without, those who would lose most first: the longest running."""
    spared: set[int] = set()
    for i in sorted(range(len(victims)), key=lambda i: (victims[i].start_ms, victims[i].job.id)):
        if victims[i].job.gpus <= surplus:
            surplus -= victims[i].job.gpus
            spared.add(i)
    return [run for i, run in enumerate(victims) if i not in spared]


def loss_ms(run: Run, now_ms: int, checkpoint_ms: int) -> tuple[int, int]:
    """(saved, lost) of a run stopped now: work kept at its last checkpoint, and wall time that was in vain."""
    elapsed = now_ms - run.start_ms
    progress = max(0, elapsed - run.restart_ms)
    saved = progress // checkpoint_ms * checkpoint_ms
    return saved, elapsed - saved


_END, _RESTORE, _FAIL, _SUBMIT, _CYCLE = range(5)
"""What comes first at one instant: ends free slots, then outages, arrivals, and last the cycle."""


class Engine:
    """One cluster under one scheduler. Move it with `run_until`; set weights in between."""

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        queues: Sequence[Claim],
        jobs: Iterable[Job],
        *,
        outages: Sequence[Outage] = (),
        rules: Rules | None = None,
    ) -> None:
        """Raises ValueError for names that stand twice, DivisionError for an impossible queue tree."""
        self.rules = rules or Rules()
        self._placement = Placement(nodes)
        self._tree = QueueTree(queues)
        self._gpus = {("node", node.name): tuple(gpu.uuid for gpu in node.gpus) for node in nodes}
        self._gpus |= {("gpu", gpu.uuid): (gpu.uuid,) for node in nodes for gpu in node.gpus}
        self._jobs = sorted(jobs, key=lambda job: (job.submit_ms, job.id))
        self.outcomes = {job.id: Outcome(job) for job in self._jobs}
        if len(self.outcomes) != len(self._jobs):
            raise ValueError("job ids must be unique")
        self._ordinal = {job.id: i for i, job in enumerate(self._jobs)}
        self._remaining = [job.duration_ms for job in self._jobs]
        self._attempts = [0] * len(self._jobs)
        self._leaves = frozenset(self._tree.leaves)
        self._waiting: dict[tuple[str, bool], list[int]] = {}
        self._running: dict[str, dict[int, Run]] = {}
        self._foreign = 0
        self._events: list[tuple[int, int, int, int]] = [
            (job.submit_ms, _SUBMIT, i, 0) for i, job in enumerate(self._jobs)
        ]
        self._outages = tuple(outages)
        for i, outage in enumerate(self._outages):
            if (outage.target, outage.name) not in self._gpus:
                raise ValueError(f"outage of an unknown {outage.target}: {outage.name}")
            self._events.append((outage.start_ms, _FAIL, i, 0))
            if outage.end_ms is not None:
                self._events.append((outage.end_ms, _RESTORE, i, 0))
        heapify(self._events)
        self._cycle_at: int | None = None
        self._report: list[Event] = []
        self.now_ms = self._events[0][0] if self._events else 0

    def run_until(self, at_ms: int) -> list[Event]:
        """Everything that happens up to and including `at_ms`, in order."""
        self._report = []
        while self._events and self._events[0][0] <= at_ms:
            self.now_ms, rank, i, attempt = heappop(self._events)
            if rank == _END:
                self._end(i, attempt)
            elif rank == _SUBMIT:
                self._submit(i)
            elif rank == _FAIL:
                self._fail(self._outages[i])
            elif rank == _RESTORE:
                self._restore(self._outages[i])
            elif self.now_ms == self._cycle_at:
                self._cycle_at = None
                self._cycle()
        self.now_ms = max(self.now_ms, at_ms)
        return self._report

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Over-quota weights in force from the next cycle on. Raises KeyError, ValueError."""
        if self._tree.set_weights(weights):
            self._wake(self.now_ms + 1)

    def queue_states(self) -> dict[str, QueueState]:
        """What each queue holds, asks for and is due, now."""
        return self._tree.states(self._total())

    def running(self) -> list[Run]:
        """Runs in progress, in the order of their jobs."""
        return [run for _, run in sorted((i, run) for runs in self._running.values() for i, run in runs.items())]

    # --- events ------------------------------------------------------------------------------

    def _submit(self, i: int) -> None:
        job = self._jobs[i]
        own = job.queue in self._leaves and job.shape == WHOLE
        if not self._placement.possible(job) or (
            own and not self._tree.ever_admits(job.queue, job.gpus, job.preemptible)
        ):
            self.outcomes[job.id].rejected = True
            return
        if own:
            self._tree.request(job.queue, job.gpus)
        self._waiting.setdefault((job.queue, own), []).append(i)
        self._wake(self.now_ms)

    def _end(self, i: int, attempt: int) -> None:
        run = self._running.get(self._jobs[i].queue, {}).get(i)
        if run is not None and run.attempt == attempt:
            self._stop(i, run, "finished")
            self.outcomes[run.job.id].finish_ms = self.now_ms
            self._wake(self.now_ms)

    def _fail(self, outage: Outage) -> None:
        gpus = self._gpus[outage.target, outage.name]
        hit = [
            (i, run)
            for runs in self._running.values()
            for i, run in runs.items()
            if any(slot.gpu in gpus for slot in run.slots)
        ]
        for i, run in sorted(hit, key=lambda pair: pair[0]):
            self._stop(i, run, "outage")
            self.outcomes[run.job.id].crashes += 1
        for gpu in gpus:
            self._placement.withdraw(gpu)
        self._report.append(OutageBegan(self.now_ms, outage))
        self._wake(self.now_ms)

    def _restore(self, outage: Outage) -> None:
        for gpu in self._gpus[outage.target, outage.name]:
            self._placement.restore(gpu)
        self._report.append(OutageEnded(self.now_ms, outage))
        self._wake(self.now_ms)

    def _wake(self, at_ms: int) -> None:
        """Have a cycle at the first multiple of the cycle time from `at_ms` on."""
        at_ms = -(-at_ms // self.rules.cycle_ms) * self.rules.cycle_ms
        if self._cycle_at is None or at_ms < self._cycle_at:
            self._cycle_at = at_ms
            heappush(self._events, (at_ms, _CYCLE, 0, 0))

    # --- starting and stopping ---------------------------------------------------------------

    def _start(self, i: int, flavour: Flavour) -> None:
        job = self._jobs[i]
        own = job.queue in self._leaves and job.shape == WHOLE
        self._attempts[i] += 1
        restart = self.rules.restart_ms if self._attempts[i] > 1 else 0
        end = self.now_ms + restart + self._remaining[i]
        run = Run(job, self._placement.take(job, flavour), self.now_ms, end, restart, self._attempts[i])
        self._running.setdefault(job.queue, {})[i] = run
        if own:
            self._tree.allocate(job.queue, job.gpus, job.preemptible)
        elif job.shape == WHOLE:
            self._foreign += job.gpus
        outcome = self.outcomes[job.id]
        if outcome.first_start_ms is None:
            outcome.first_start_ms = self.now_ms
        heappush(self._events, (end, _END, i, run.attempt))
        self._report.append(Started(self.now_ms, job, run.slots, run.attempt))

    def _stop(self, i: int, run: Run, reason: StopReason, for_queue: str = "") -> None:
        job = run.job
        own = job.queue in self._leaves and job.shape == WHOLE
        del self._running[job.queue][i]
        self._placement.give(run.slots)
        if own:
            self._tree.allocate(job.queue, -job.gpus, job.preemptible)
        elif job.shape == WHOLE:
            self._foreign -= job.gpus
        outcome = self.outcomes[job.id]
        if reason == "finished":
            outcome.lost_gpu_ms += run.restart_ms * job.gpus
            if own:
                self._tree.request(job.queue, -job.gpus)
        else:
            saved, lost = loss_ms(run, self.now_ms, self.rules.checkpoint_ms)
            self._remaining[i] -= saved
            outcome.lost_gpu_ms += lost * job.gpus
            insort(self._waiting[job.queue, own], i)
        self._report.append(Stopped(self.now_ms, job, run.slots, run.attempt, reason, for_queue))

    # --- one scheduling cycle ----------------------------------------------------------------

    def _cycle(self) -> None:
        self._serve_as_they_come()
        self._allocate()
        if self.rules.reclaim:
            self._reclaim()

    def _total(self) -> int:
        """GPUs to be divided: whole, usable, and not held by another scheduler's jobs."""
        return self._placement.in_service(WHOLE) - self._foreign

    def _serve_as_they_come(self) -> None:
        """Parts of GPUs, and jobs of other schedulers: who holds least goes first, no look-ahead in a queue
        beyond the scan depth."""
        held = {
            queue: sum(run.job.gpus for run in self._running.get(queue, {}).values())
            for (queue, own), waiting in self._waiting.items()
            if not own and waiting
        }
        for queue in sorted(held, key=lambda name: (held[name], name)):
            waiting = self._waiting[queue, False]
            for i in waiting[: self.rules.scan_depth]:
                flavour = self._placement.fitting(self._jobs[i])
                if flavour is not None:
                    waiting.remove(i)
                    self._start(i, flavour)

    def _allocate(self) -> None:
        """Start what fits, one gang at a time, always from the queue that is first in order."""
        shares = self._tree.shares(self._total())
        at = {leaf: 0 for leaf in self._tree.leaves if self._waiting.get((leaf, True))}
        while True:
            best: tuple[tuple[object, ...], str, Flavour] | None = None
            most = self._placement.most_free(WHOLE)
            for leaf in at if most else ():
                flavour = self._next_that_fits(leaf, at, most)
                if flavour is not None:
                    job = self._jobs[self._waiting[leaf, True][at[leaf]]]
                    key = self._tree.order(leaf, job.gpus, shares)
                    if best is None or key < best[0]:
                        best = (key, leaf, flavour)
            if best is None:
                return
            _, leaf, flavour = best
            self._start(self._waiting[leaf, True].pop(at[leaf]), flavour)

    def _next_that_fits(self, leaf: str, at: dict[str, int], most: int) -> Flavour | None:
        """Move the queue's place on to its next job that can start now; none larger than `most` can."""
        waiting = self._waiting[leaf, True]
        depth = min(len(waiting), self.rules.scan_depth)
        while at[leaf] < depth:
            job = self._jobs[waiting[at[leaf]]]
            if job.gpus <= most:
                flavour = self._placement.fitting(job)
                if flavour is not None and self._tree.admits(leaf, job.gpus, job.preemptible):
                    return flavour
            at[leaf] += 1
        return None

    def _reclaim(self) -> None:
        """Let queues that stay within their share even with the gang take it back from those above theirs."""
        protected_until: int | None = None
        reclaimed = False
        shares = self._tree.shares(self._total())  # nothing below changes what is asked for
        for leaf in sorted(
            (leaf for leaf in self._tree.leaves if self._waiting.get((leaf, True))),
            key=lambda name: self._tree.order(name, 0, shares),
        ):
            in_vain: dict[tuple[object, ...], int] = {}
            for i in self._waiting[leaf, True][: self.rules.scan_depth]:
                job = self._jobs[i]
                constraint = (job.models, job.pools)
                if (
                    self._tree.allocated[leaf] + job.gpus > shares[leaf]
                    or job.gpus >= in_vain.get(constraint, job.gpus + 1)
                    or not self._tree.admits(leaf, job.gpus, job.preemptible)
                ):
                    continue
                accounts = self._tree.accounts(self._total())
                debtors, soonest = self._debtors(leaf, accounts)
                if soonest is not None:
                    protected_until = soonest if protected_until is None else min(protected_until, soonest)
                chosen = choose(job, self._placement, debtors, accounts)
                if chosen is None:
                    in_vain[constraint] = job.gpus
                    continue
                flavour, victims = chosen
                for victim in victims:
                    self._stop(self._ordinal[victim.job.id], victim, "reclaimed", leaf)
                    self.outcomes[victim.job.id].evictions += 1
                self._waiting[leaf, True].remove(i)
                self._start(i, flavour)
                reclaimed = True
        if reclaimed:
            self._wake(self.now_ms + 1)  # a gang stopped whole may leave more room than was asked for
        elif protected_until is not None:
            self._wake(protected_until)

    def _debtors(self, reclaimer: str, accounts: Accounts) -> tuple[list[Debtor], int | None]:
        """Queues that may lose something, with what may be stopped, and when the next protected run may be."""
        debtors: list[Debtor] = []
        soonest: int | None = None
        for leaf in self._tree.leaves:
            if leaf == reclaimer or not self._running.get(leaf):
                continue
            top = accounts[queues_to_compare(reclaimer, leaf, accounts)[1]]
            if not above_share(top, {GPU: top.stocks[GPU].allocated}):
                continue
            runs: list[Run] = []
            for run in reversed(self._running[leaf].values()):
                if not run.job.preemptible or run.job.shape != WHOLE:
                    continue
                free_from = run.start_ms + self.rules.min_runtime_ms
                if free_from <= self.now_ms:
                    runs.append(run)
                elif soonest is None or free_from < soonest:
                    soonest = free_from
            debtors.append(Debtor(leaf, runs))
        return debtors, soonest


@dataclass(slots=True)
class Reservation:
    """at_s: when the first in line can start. spare: GPUs left over then. Changed as others start."""

    at_s: int
    spare: int

    def admits(self, gang: int, end_s: int) -> bool:
        """Whether a gang that would hold its GPUs until `end_s` leaves the reservation where it is; it then counts
        as started."""
        if end_s <= self.at_s:
            return True
        if gang > self.spare:
            return False
        self.spare -= gang
        return True


def reserve(gang: int, free: int, ends: Iterable[tuple[int, int]], gpus: Sequence[int]) -> Reservation:
    """For a gang that does not fit `free` GPUs. ends: (end, job) of all that runs, the next to end first; all of it
    together with `free` is no less than the gang."""
    at_s, coming = 0, iter(ends)
    while free < gang:
        at_s, job = next(coming)
        free += gpus[job]
    return Reservation(at_s, free - gang)


def replay(
    workload: Workload,
    pool: Pool,
    end_s: int,
    *,
    steering: SimulatedController | None = None,
    dividing: Dividing | None = None,
    ranking: Ranking | None = None,
    control_s: int = CONTROL_S,
    tick_s: int = TICK_S,
    progress: Callable[[float], None] | None = None,
) -> Record:
    """Run `workload` until `end_s`. -1 in `started_s` and `finished_s`: not within the run."""
    run = _Scheduler(workload, pool, end_s, dividing, ranking, tick_s)
    ends, submit_s = run.ends, run.submit_s
    due, now = 0, 0
    while now <= end_s:
        if ends[0] <= now:
            run.finish_until(now)
        if submit_s[run.come] <= now:
            run.submit_until(now)
        if now >= due:
            run.control(now, steering, snapshot=now % SNAPSHOT_S == 0)
            due += control_s
            if progress is not None:
                progress(now / end_s if end_s else 1.0)
            run.schedule(now)
            run.note(now)
        else:
            run.schedule(now)
        following = min(due, submit_s[run.come], ends[0], run.blocked_until)
        now += tick_s
        if following > now:
            now = -(-following // tick_s) * tick_s
    return run.close(end_s)


Bid = tuple[int, float, int, int, int]
"""A lane that asks for GPUs, smallest first: its standing, how full its share would be, the lane itself, and the place
and gang of the one who would start."""


_ABOVE = 2
"""The rank of the first that holds more than its share, and from there on."""


class _Scheduler(State):
    """The job that starts, and those stopped for it."""

    __slots__ = ()

    def control(self, now: int, steering: SimulatedController | None, *, snapshot: bool) -> None:
        record, used = self.record, self.used(now)
        record.used.append(used)
        if snapshot:
            record.backlog.append(self.backlog(now))
        if steering is not None or self.ranking is not None:
            view = self.view(now, used)
            if steering is not None:
                weights = steering(view)
                if weights is not None and list(weights) != self.weights:
                    self.weights = list(weights)
                    self.stale = self.fresh_work = True
            if self.ranking is not None:
                self.rank = self.ranking(view)
        if self.dividing is not None:
            self.stale = self.fresh_work = True
        record.weights.append(tuple(self.weights))

    def note(self, now: int) -> None:
        """What the control period begins with, once the weights have acted."""
        if self.stale and self.reclaim:
            self._divide(now)
        self.record.held.append(list(self.held))
        self.record.shares.append(tuple(self.shares))

    def schedule(self, now: int) -> None:
        """Start what fits; then let those who are owed take it back."""
        if not self.fresh_work and now < self.blocked_until:
            return
        self.fresh_work, self.blocked_until = False, NEVER
        if self.stale and self.dividing is not None:
            self._divide(now)
        if sum(self.asked) <= self.pool.capacity and not self.walls:
            self._start_everyone(now)
            return
        if self.stale and self.reclaim:
            self._divide(now)
        if self.free > 0:
            if self.pool.backfill:
                self._backfill(now)
            else:
                self._start_what_fits(now)
        if self.reclaim:
            self._take_back(now)

    def _divide(self, now: int) -> None:
        self.stale = False
        if self.dividing is not None:
            self.share_out(self.dividing(self.view(now, self.used(now)), self.weights))
        else:
            self.share_out(fair_shares(self.pool.capacity, self.asked, self.deserved, self.weights))

    def _start_everyone(self, now: int) -> None:
        """Where there is room for all who wait, neither shares nor the order of the lanes decide anything."""
        for lane, gang in enumerate(self.least):
            if gang < NOBODY:
                line = self.lines[lane]
                while line.jobs:
                    self.start(line.jobs[0], now)
                    line.leave(0)
                self.least[lane] = NOBODY

    def _start_what_fits(self, now: int) -> None:
        free, lines, least = self.free, self.lines, self.least
        held, whole, reclaim = self.held, self.whole, self.reclaim
        bids: list[Bid] = []
        above: list[int] = []  # nobody need look at these while one within his share has somebody who fits
        for lane, gang in enumerate(least):
            if gang <= free:
                if reclaim and held[lane] > whole[lane]:
                    above.append(lane)
                elif bid := self._bid(lane, 0, free):
                    bids.append(bid)
        served = set()
        while bids or above:
            if above and (not bids or min(bids)[0] >= _ABOVE):
                bids += [bid for lane in above if least[lane] <= free and (bid := self._bid(lane, 0, free))]
                above = []
                continue
            best = min(bids)
            _, _, lane, place, gang = best
            line = lines[lane]
            self.start(line.jobs[place], now)
            line.leave(place)
            served.add(lane)
            free -= gang
            if not free:
                break
            again: list[Bid] = []
            for bid in bids:
                if bid is not best and bid[4] <= free:
                    again.append(bid)
                elif later := self._bid(bid[2], bid[3], free):
                    again.append(later)
            bids = again
        for lane in served:
            least[lane] = lines[lane].smallest()

    def _bid(self, lane: int, place: int, free: int) -> Bid | None:
        """Of the first, from a place on, who may start on `free` GPUs; None: none within the scan depth."""
        line = self.lines[lane]
        for gang in line.gangs[place:] if place else line.gangs:
            if gang <= free and not (self.limited and self._walled(line.jobs[place])):
                return self._order(lane, place, gang)
            place += 1
        return None

    def _walled(self, i: int) -> bool:
        """Whether its queue's limit is too low for it now."""
        q = self.queue[i]
        return self.held[q] + self.gpus[i] > self.limits[q]

    def _backfill(self, now: int) -> None:
        """In the order of the lanes, past a job that does not fit only as its reservation allows."""
        reservation = None
        lanes = [lane for lane, gang in enumerate(self.least) if gang < NOBODY]
        for lane in sorted(lanes, key=lambda lane: (self.rank[lane], lane)):
            if reservation is not None and self.least[lane] > self.free:
                continue
            line, started = self.lines[lane], []
            for place, (i, gang) in enumerate(zip(line.jobs, line.gangs, strict=True)):
                if gang > self.free:
                    reservation = reservation or reserve(gang, self.free, self.to_end(), self.gpus)
                elif reservation is None or reservation.admits(gang, now + self.left[i]):
                    self.start(i, now)
                    started.append(place)
            for place in reversed(started):
                line.leave(place)
                self.fresh_work = True
            self.least[lane] = line.smallest()

    def _order(self, lane: int, place: int, gang: int) -> Bid:
        """Within the share, within the quota, then by how full the share would be. A gang larger than its queue's whole
        share says nothing about who is further behind."""
        if not self.reclaim:
            return 0, self.rank[lane], lane, place, gang
        held, share, deserved = self.held[lane], self.shares[lane], self.deserved[lane]
        with_gang = held + gang
        standing = _ABOVE if held > self.whole[lane] else 0
        if with_gang > deserved:
            standing += 1
        due = share
        if deserved > due:
            due = deserved
        return standing, with_gang / due if gang <= due and due > 0.0 else inf, lane, place, gang

    def _take_back(self, now: int) -> None:
        held, whole = self.held, self.whole
        order = [q for q, gang in enumerate(self.least) if held[q] + gang <= whole[q]]
        if len(order) > 1:
            order.sort(key=lambda q: self._order(q, 0, 0))
        for q in order:
            line, gone = self.lines[q], 0
            in_vain = NOBODY
            for place, (i, gang) in enumerate(zip(line.jobs[:], line.gangs[:], strict=True)):
                if gang >= in_vain or held[q] + gang > whole[q] or held[q] + gang > self.limits[q]:
                    continue
                victims = self._victims(q, gang - self.free, now)
                if victims is None:
                    in_vain = gang
                    continue
                for victim in victims:
                    self.evict(victim, now, q)
                line.leave(place - gone)
                gone += 1
                self.start(i, now)
                self.fresh_work = True
            self.least[q] = line.smallest()

    def _victims(self, reclaimer: int, missing: int, now: int) -> list[int] | None:
        """The jobs to stop for `missing` GPUs: most over its share first, its newest first. None: not enough."""
        if missing <= 0:
            return []
        held, shares, whole, deserved = list(self.held), self.shares, self.whole, self.deserved
        over: dict[int, float] = {}  # of those that can give back: how full, by queue
        chosen: dict[int, int] = {}  # the run that would be next
        runs: dict[int, Iterator[tuple[int, int]]] = {}  # (job, start), newest first
        for q, has in enumerate(held):
            if has > whole[q] and has > deserved[q] and q != reclaimer:
                runs[q] = reversed(self.running[q].items())
                chosen[q] = self._look(runs[q], has, deserved[q], now)
                if chosen[q] >= 0:
                    over[q] = has / shares[q] if shares[q] > 0 else inf
        victims: list[int] = []
        freed = 0
        while over:
            q = max(over, key=over.__getitem__)
            gang = self.gpus[chosen[q]]
            victims.append(chosen[q])
            freed += gang
            if freed >= missing:
                return self._needed(victims, freed - missing)
            has = held[q] = held[q] - gang
            if has > whole[q] and has > deserved[q]:
                chosen[q] = self._look(runs[q], has, deserved[q], now)
                if chosen[q] >= 0:
                    over[q] = has / shares[q] if shares[q] > 0 else inf
                    continue
            del over[q]
        return None

    def _look(self, runs: Iterator[tuple[int, int]], has: int, quota: float, now: int) -> int:
        """The newest of further runs that may be stopped and leaves the queue its quota; -1: there is none."""
        for i, start in runs:
            free_from = start + self.pool.min_runtime_s
            if free_from > now:
                if free_from < self.blocked_until:
                    self.blocked_until = free_from
            elif has - self.gpus[i] >= quota:
                return i
        return -1

    def _needed(self, victims: list[int], surplus: int) -> list[int]:
        """Spare the jobs that the gang can do without, the longest running first."""
        if surplus > 0:
            for i in sorted(victims, key=lambda i: (self.running[self.queue[i]][i], i)):
                if self.gpus[i] <= surplus:
                    surplus -= self.gpus[i]
                    victims.remove(i)
        return victims
