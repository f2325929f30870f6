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
from math import inf

from fairshare.simulator.backfill import reserve
from fairshare.simulator.line import NOBODY
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
from fairshare.simulator.state import NEVER, State
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
"""The standing of who holds more than his share, and from there on."""


class _Scheduler(State):
    """Who starts, and who is stopped for whom."""

    __slots__ = ()

    def control(self, now: int, steering: Steering | None, *, snapshot: bool) -> None:
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
        """Of the first, from a place on, who may start on `free` GPUs; None: nobody within the scan depth."""
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
        """In the order of the lanes, past who does not fit only as his reservation allows."""
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
        """Whom to stop for `missing` GPUs: most over its share first, its newest first. None: not enough."""
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
        """Spare whom the gang can do without, the longest running first."""
        if surplus > 0:
            for i in sorted(victims, key=lambda i: (self.running[self.queue[i]][i], i)):
                if self.gpus[i] <= surplus:
                    surplus -= self.gpus[i]
                    victims.remove(i)
        return victims
