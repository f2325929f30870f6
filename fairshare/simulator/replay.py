"""Weeks of gangs on one pool of GPUs in seconds: the scheduler of the evaluation.

Event-driven on whole seconds with scheduling at ticks. Gangs are all or nothing; a queue is first in,
first out with a bounded look past what does not fit; free GPUs go to the queue first in order; a queue
that stays within its fair share with the gang takes it back from those above theirs, newest jobs first,
whole gangs only, never below a deserved quota and not before the minimum run time. Like KAI it looks at
a victim's share before it takes the gang, so one may end up below its share. The rule is written out here, where
it is asked millions of times; that it is the controller's (`fairshare.preempting.reclaim`) is a property of the tests.

One pool without nodes: `fairshare.simulator.engine` knows nodes, GPU models, slices and outages, and is
what the demo runs on. Fair shares are fluid here (no rounding to whole GPUs) unless a `Dividing` says
otherwise. Deterministic: nothing depends on the order of a dict or a set. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from fairshare.simulator.backfill import reserve
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
from fairshare.simulator.state import State
from fairshare.simulator.workload import Workload
from fairshare.weighing.fluid import fair_shares

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
    run = _Scheduler(workload, pool, end_s, dividing, ranking)
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


_LAST = 4
"""Above every standing that `_order` gives."""


@dataclass(slots=True)
class _Debtor:
    """A queue above its share and quota. runs: (job, start), newest first. run: the next to be stopped, -1 if
    not looked up."""

    held: int
    deserved: float
    share: float
    runs: Iterator[tuple[int, int]]
    run: int = -1


class _Scheduler(State):
    """Who starts, and who is stopped for whom."""

    def control(self, now: int, steering: Steering | None, *, snapshot: bool) -> None:
        for q in range(len(self.held)):
            self.settle(q, now)
        record = self.record
        record.used.append(list(self.used))
        if snapshot:
            record.backlog.append(self.backlog(now))
        if steering is not None or self.ranking is not None:
            view = self.view(now)
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

    def schedule(self, now: int) -> None:
        """Start what fits; then let those who are owed take it back."""
        if not self.fresh_work and (self.blocked_until is None or now < self.blocked_until):
            return
        self.fresh_work, self.blocked_until = False, None
        if self.reclaim and self.stale:
            self._divide(now)
        if self.free > 0 and self.pool.backfill:
            self._backfill(now)
        elif self.free > 0:
            self._start_what_fits(now)
        if self.reclaim:
            self._take_back(now)

    def _divide(self, now: int) -> None:
        self.stale = False
        if self.dividing is not None:
            self.shares = self.dividing(self.view(now), self.weights)
        else:
            self.shares = fair_shares(self.pool.capacity, self.asked, self.deserved, self.weights)
        self.bound = [ask <= share for ask, share in zip(self.asked, self.shares, strict=True)]

    def _start_what_fits(self, now: int) -> None:
        free, least = self.free, self.least
        fitting = [
            lane
            for lane, waiting in enumerate(self.waiting)
            if waiting and (least[lane] or self.least_of(lane)) <= free
        ]
        if not fitting:
            return
        lanes = len(self.waiting)
        place, head = [0] * lanes, [0] * lanes  # head: the gang that standing and part are for; 0: to be looked up
        standing, part = [0] * lanes, [0.0] * lanes  # only the one just served has others
        while free > 0 and fitting:
            chosen, full, lowest, smallest = -1, False, _LAST, inf
            for lane in fitting:
                if not 0 < head[lane] <= free:
                    place[lane] = at = self._next_that_fits(lane, place[lane], free)
                    if at < 0:
                        full = True
                        continue
                    head[lane] = gang = self.gpus[self.waiting[lane][at]]
                    standing[lane], part[lane] = self._order(lane, gang)
                stands = standing[lane]
                if stands < lowest or (stands == lowest and part[lane] < smallest):
                    chosen, lowest, smallest = lane, stands, part[lane]
            if full:
                fitting = [lane for lane in fitting if place[lane] >= 0]
            if chosen >= 0:
                self.start(self.waiting[chosen].pop(place[chosen]), now)
                free -= head[chosen]
                least[chosen] = head[chosen] = 0

    def _next_that_fits(self, lane: int, at: int, free: int) -> int:
        """The place, from `at` on, of the first who may start on `free` GPUs; -1: nobody within the scan depth."""
        if self.least[lane] > free:
            return -1
        gpus, waiting, limited = self.gpus, self.waiting[lane], self.limited
        for i in waiting[at : self.depth]:
            if gpus[i] <= free and not (limited and self.held[q := self.queue[i]] + gpus[i] > self.limits[q]):
                return at
            at += 1
        return -1

    def _backfill(self, now: int) -> None:
        """In the order of the lanes, past who does not fit only as his reservation allows."""
        gpus, reservation = self.gpus, None
        lanes = [lane for lane, waiting in enumerate(self.waiting) if waiting]
        for lane in sorted(lanes, key=lambda lane: (self.rank[lane], lane)):
            if reservation is not None and self.least_of(lane) > self.free:
                continue
            waiting, started = self.waiting[lane], []
            for i in waiting[: self.pool.scan_depth]:
                gang = gpus[i]
                if gang > self.free:
                    reservation = reservation or reserve(gang, self.free, self.ends, gpus)
                elif reservation is None or reservation.admits(gang, now + self.left[i]):
                    self.start(i, now)
                    started.append(i)
            for i in started:
                waiting.remove(i)
                self.least[lane] = 0

    def _order(self, lane: int, gang: int) -> tuple[int, float]:
        """Smallest first, then by lane: within the share, within the quota (together below `_LAST`), then by how full
        the share would be. A gang larger than its queue's whole share says nothing about who is further behind."""
        if not self.reclaim:
            return 0, self.rank[lane]
        held, share, deserved = self.held[lane], self.shares[lane], self.deserved[lane]
        due = max(deserved, share)
        with_gang = held + gang
        standing = (2 if held > share else 0) + (with_gang > deserved)
        return standing, with_gang / due if gang <= due and due > 0 else inf

    def _take_back(self, now: int) -> None:
        depth, gpus, held = self.depth, self.gpus, self.held
        shares, least = self.shares, self.least
        order = [
            q
            for q, waiting in enumerate(self.waiting)
            if waiting and held[q] + (least[q] or self.least_of(q)) <= shares[q]
        ]
        if not order:
            return
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
                    self.evict(victim, now, q)
                self.waiting[q].remove(i)
                self.least[q] = 0
                self.start(i, now)
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
