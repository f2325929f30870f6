"""Weeks of gangs on one pool of GPUs in seconds: the scheduler of the evaluation.

Event-driven on whole seconds with scheduling at ticks. Gangs are all or nothing; a queue is first in,
first out with a bounded look past what does not fit; free GPUs go to the queue first in order; a queue
that stays within its fair share with the gang takes it back from those above theirs, newest jobs first,
whole gangs only, never below a deserved quota and not before the minimum run time. Like KAI it looks at
a victim's share before it takes the gang, so one may end up below its share.

One pool without nodes: `fairshare.simulator.engine` knows nodes, GPU models, slices and outages, and is
what the demo runs on. Fair shares are fluid here (no rounding to whole GPUs) unless a `Dividing` says
otherwise. Deterministic: nothing depends on the order of a dict or a set. No clock, no I/O.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from fairshare.fluid import fair_shares
from fairshare.simulator.records import (
    CONTROL_S,
    SNAPSHOT_S,
    TICK_S,
    Dividing,
    Pool,
    Ranking,
    Record,
    Steering,
    View,
)
from fairshare.simulator.workload import Workload

__all__ = ["CONTROL_S", "SNAPSHOT_S", "TICK_S", "Dividing", "Pool", "Ranking", "Record", "Steering", "View", "replay"]


def replay(
    workload: Workload,
    pool: Pool,
    end_s: int,
    *,
    steering: Steering | None = None,
    dividing: Dividing | None = None,
    ranking: Ranking | None = None,
    control_s: int = CONTROL_S,
    tick_s: int = TICK_S,
    progress: Callable[[float], None] | None = None,
) -> Record:
    """Run `workload` until `end_s`. -1 in `started_s` and `finished_s`: not within the run."""
    run = _Run(workload, pool, end_s, dividing, ranking)
    submit, jobs = workload.submit_s, len(workload.submit_s)
    at, due = 0, 0
    now = 0
    while now <= end_s:
        controlled = False
        run.finish_until(now)
        while at < jobs and submit[at] <= now:
            run.submit(at)
            at += 1
        if now >= due:
            run.control(now, steering, snapshot=now % SNAPSHOT_S == 0)
            due += control_s
            controlled = True
            if progress is not None:
                progress(now / end_s if end_s else 1.0)
        run.schedule(now)
        if controlled:
            run.note()
        following = min(due, end_s + 1)
        if at < jobs and submit[at] < following:
            following = submit[at]
        if run.ends and run.ends[0][0] < following:
            following = run.ends[0][0]
        if run.blocked_until is not None and run.blocked_until < following:
            following = run.blocked_until
        now = max(now + tick_s, -(-following // tick_s) * tick_s)
    return run.close(end_s)


@dataclass(slots=True)
class _Debtor:
    """A queue above its share and quota. runs: (job, start), newest first. run: the next to be stopped, -1 if
    not looked up."""

    held: int
    deserved: float
    share: float
    runs: Iterator[tuple[int, int]]
    run: int = -1


class _Run:
    """Mutable state of one replay. Lists by job or by queue; a lane is a line of waiting jobs."""

    def __init__(
        self, workload: Workload, pool: Pool, end_s: int, dividing: Dividing | None, ranking: Ranking | None
    ) -> None:
        queues, jobs = len(workload.queues), len(workload.submit_s)
        self.workload, self.pool = workload, pool
        self.dividing, self.ranking = dividing, ranking
        self.gpus, self.queue = workload.gpus, workload.queue
        self.lane = [0] * jobs if pool.one_line else workload.queue
        self.left = list(workload.duration_s)
        self.free = pool.capacity
        self.weights = list(pool.weights)
        self.deserved = list(pool.deserved)
        self.limits = [pool.capacity if limit is None else limit for limit in pool.limits] or [pool.capacity] * queues
        self.held, self.asked = [0] * queues, [0] * queues
        self.used, self.since = [0] * queues, [0] * queues
        self.reclaims = [0] * queues
        self.waiting: list[list[int]] = [[] for _ in range(1 if pool.one_line else queues)]
        self.least = [0] * len(self.waiting)  # 0: to be looked up
        self.running: list[dict[int, int]] = [{} for _ in range(queues)]
        self.restart: dict[int, int] = {}
        self.attempt = [0] * jobs
        self.ends: list[tuple[int, int, int]] = []
        self.shares: list[float] = [0.0] * queues
        self.bound = [True] * queues
        self.stale = True
        self.fresh_work = True
        self.rank: Sequence[float] = [0.0] * len(self.waiting)
        self.blocked_until: int | None = None
        self.record = Record(workload, pool, end_s, started_s=[-1] * jobs, finished_s=[-1] * jobs, evicted=[0] * jobs)

    # --- events --------------------------------------------------------------------------------

    def submit(self, i: int) -> None:
        self.asked[self.queue[i]] += self.gpus[i]
        self.waiting[self.lane[i]].append(i)
        if len(self.waiting[self.lane[i]]) <= self.pool.scan_depth:
            self.least[self.lane[i]] = 0
        self._asked_changed(self.queue[i])

    def finish_until(self, now: int) -> None:
        ends = self.ends
        while ends and ends[0][0] <= now:
            at, i, attempt = heappop(ends)
            q = self.queue[i]
            if self.attempt[i] != attempt or i not in self.running[q]:
                continue
            del self.running[q][i]
            self.restart.pop(i, None)
            self._hold(q, -self.gpus[i], at)
            self.asked[q] -= self.gpus[i]
            self.left[i] = 0
            self.record.finished_s[i] = at
            self._asked_changed(q)

    def control(self, now: int, steering: Steering | None, *, snapshot: bool) -> None:
        for q in range(len(self.held)):
            self._settle(q, now)
        record = self.record
        record.used.append(list(self.used))
        if snapshot:
            record.backlog.append(self._backlog(now))
        if steering is not None or self.ranking is not None:
            view = self._view(now)
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

    def note(self) -> None:
        """What the control period begins with, once the weights have acted."""
        self.record.held.append(list(self.held))
        self.record.shares.append(tuple(self.shares))

    def close(self, end_s: int) -> Record:
        record = self.record
        for q in range(len(self.held)):
            self._settle(q, end_s)
        record.delivered_gpu_s = sum(self.used)
        return record

    # --- one tick --------------------------------------------------------------------------------

    def schedule(self, now: int) -> None:
        """Start what fits; then let those who are owed take it back."""
        if not self.fresh_work and (self.blocked_until is None or now < self.blocked_until):
            return
        self.fresh_work, self.blocked_until = False, None
        if self.pool.reclaim and self.stale:
            self._divide(now)
        if self.free > 0:
            self._start_what_fits(now)
        if self.pool.reclaim:
            self._take_back(now)

    def _divide(self, now: int) -> None:
        self.stale = False
        if self.dividing is not None:
            self.shares = self.dividing(self._view(now), self.weights)
        else:
            self.shares = fair_shares(self.pool.capacity, self.asked, self.deserved, self.weights)
        self.bound = [ask <= share for ask, share in zip(self.asked, self.shares, strict=True)]

    def _start_what_fits(self, now: int) -> None:
        free, least = self.free, self.least
        fitting = [
            lane for lane, waiting in enumerate(self.waiting) if waiting and (least[lane] or self._least(lane)) <= free
        ]
        if not fitting:
            return
        place = [0] * len(self.waiting)
        head = [0] * len(self.waiting)  # the gang a lane's key is for; 0: to be looked up
        keys: list[tuple[float, ...]] = [()] * len(self.waiting)  # only the one just served has another
        while free > 0 and fitting:
            chosen, full = -1, False
            for lane in fitting:
                if not 0 < head[lane] <= free:
                    place[lane] = at = self._next_that_fits(lane, place[lane], free)
                    if at < 0:
                        full = True
                        continue
                    head[lane] = gang = self.gpus[self.waiting[lane][at]]
                    keys[lane] = self._order(lane, gang)
                if chosen < 0 or keys[lane] < keys[chosen]:
                    chosen = lane
            if full:
                fitting = [lane for lane in fitting if place[lane] >= 0]
            if chosen >= 0:
                self._start(self.waiting[chosen].pop(place[chosen]), now)
                free -= head[chosen]
                least[chosen] = head[chosen] = 0

    def _next_that_fits(self, lane: int, at: int, free: int) -> int:
        """The place, from `at` on, of the first who may start on `free` GPUs; -1: nobody within the scan depth."""
        if self.least[lane] > free:
            return -1
        gpus, waiting = self.gpus, self.waiting[lane]
        for i in waiting[at : self.pool.scan_depth]:
            if gpus[i] <= free and self.held[q := self.queue[i]] + gpus[i] <= self.limits[q]:
                return at
            at += 1
        return -1

    def _least(self, lane: int) -> int:
        """The smallest gang within the scan depth of a lane in which somebody waits."""
        if not self.least[lane]:
            gpus = self.gpus
            self.least[lane] = min([gpus[i] for i in self.waiting[lane][: self.pool.scan_depth]])
        return self.least[lane]

    def _order(self, lane: int, gang: int) -> tuple[float, ...]:
        """Smallest first: within the share, within the quota, then by how full the share would be. A gang
        larger than its queue's whole share says nothing about who is further behind."""
        if not self.pool.reclaim:
            return (self.rank[lane], lane)
        held, share, deserved = self.held[lane], self.shares[lane], self.deserved[lane]
        due = max(deserved, share)
        with_gang = (held + gang) / due if gang <= due and due > 0 else inf
        return (held > share, held + gang > deserved, with_gang, lane)

    def _take_back(self, now: int) -> None:
        depth, gpus, held = self.pool.scan_depth, self.gpus, self.held
        shares, least = self.shares, self.least
        order = [
            q
            for q, waiting in enumerate(self.waiting)
            if waiting and held[q] + (least[q] or self._least(q)) <= shares[q]
        ]
        if len(order) > 1:
            order.sort(key=lambda q: self._order(q, 0))
        for q in order:
            in_vain = 1 << 60
            for i in self.waiting[q][:depth]:
                gang = gpus[i]
                if gang >= in_vain or held[q] + gang > self.shares[q] or held[q] + gang > self.limits[q]:
                    continue
                victims = self._victims(q, gang - self.free, now)
                if victims is None:
                    in_vain = gang
                    continue
                for victim in victims:
                    self._evict(victim, now, q)
                self.waiting[q].remove(i)
                self.least[q] = 0
                self._start(i, now)
                self.fresh_work = self.fresh_work or bool(victims)

    def _victims(self, reclaimer: int, missing: int, now: int) -> list[int] | None:
        """Whom to stop for `missing` GPUs: most over its share first, its newest first. None: not enough."""
        if missing <= 0:
            return []
        debtors = [
            _Debtor(held, self.deserved[q], self.shares[q], reversed(self.running[q].items()))
            for q, held in enumerate(self.held)
            if q != reclaimer and held > max(self.deserved[q], self.shares[q])
        ]
        victims: list[int] = []
        freed = 0
        while freed < missing:
            best, chosen = -1.0, None
            for debtor in debtors:
                if debtor.held > max(debtor.deserved, debtor.share) and self._look(debtor, now):
                    over = debtor.held / debtor.share if debtor.share > 0 else inf
                    if over > best:
                        best, chosen = over, debtor
            if chosen is None:
                return None
            gang = self.gpus[chosen.run]
            victims.append(chosen.run)
            chosen.held -= gang
            freed += gang
            chosen.run = -1
        return self._needed(victims, freed - missing)

    def _look(self, debtor: _Debtor, now: int) -> bool:
        """Make sure that `debtor.run` is its newest run that may be stopped; False: there is none."""
        while debtor.run < 0 or debtor.held - self.gpus[debtor.run] < debtor.deserved:
            i, start = next(debtor.runs, (-1, 0))
            if i < 0:
                return False
            free_from = start + self.pool.min_runtime_s
            if free_from <= now:
                debtor.run = i
            elif self.blocked_until is None or free_from < self.blocked_until:
                self.blocked_until = free_from
        return True

    def _needed(self, victims: list[int], surplus: int) -> list[int]:
        """Spare whom the gang can do without, the longest running first."""
        if surplus > 0:
            for i in sorted(victims, key=lambda i: (self.running[self.queue[i]][i], i)):
                if self.gpus[i] <= surplus:
                    surplus -= self.gpus[i]
                    victims.remove(i)
        return victims

    # --- starting and stopping -------------------------------------------------------------------

    def _start(self, i: int, now: int) -> None:
        q = self.queue[i]
        attempt = self.attempt[i] = self.attempt[i] + 1
        again = 0
        if attempt == 1:
            self.record.started_s[i] = now
        elif self.pool.restart_s:
            again = self.restart[i] = self.pool.restart_s
            self.record.lost_gpu_s += again * self.gpus[i]
        self.running[q][i] = now
        heappush(self.ends, (now + again + self.left[i], i, attempt))
        self._hold(q, self.gpus[i], now)

    def _evict(self, i: int, now: int, for_queue: int) -> None:
        q = self.queue[i]
        elapsed = now - self.running[q].pop(i)
        again = self.restart.pop(i, 0)
        progress = max(0, elapsed - again)
        saved = progress // self.pool.checkpoint_s * self.pool.checkpoint_s
        self.left[i] -= saved
        self.record.lost_gpu_s += (progress - saved) * self.gpus[i]
        self.record.evictions += 1
        self.record.evicted[i] += 1
        self.reclaims[for_queue] += 1
        self._hold(q, -self.gpus[i], now)
        insort(self.waiting[self.lane[i]], i)
        self.least[self.lane[i]] = 0

    def _hold(self, q: int, gpus: int, now: int) -> None:
        before = self.held[q]
        self.used[q] += before * (now - self.since[q])
        self.since[q] = now
        self.held[q] = before + gpus
        self.free -= gpus
        self.fresh_work = True

    def _settle(self, q: int, now: int) -> None:
        self.used[q] += self.held[q] * (now - self.since[q])
        self.since[q] = now

    def _asked_changed(self, q: int) -> None:
        """Fair shares change only where a request bounds a share, before or after."""
        self.fresh_work = True
        if self.bound[q] or self.asked[q] <= self.shares[q] or self.dividing is not None:
            self.stale = True

    def _view(self, now: int) -> View:
        gang = [self._least(lane) if waiting else 0 for lane, waiting in enumerate(self.waiting)]
        return View(now, self.pool.capacity, self.used, self.held, self.asked, gang, self.reclaims)

    def _backlog(self, now: int) -> tuple[list[int], list[int], list[int]]:
        jobs = [i for waiting in self.waiting for i in waiting]
        lefts = [self.left[i] for i in jobs]
        for runs in self.running:
            jobs += runs
            lefts += [start + self.restart.get(i, 0) + self.left[i] - now for i, start in runs.items()]
        return [self.queue[i] for i in jobs], [self.gpus[i] for i in jobs], lefts
