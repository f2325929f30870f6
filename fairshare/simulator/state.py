"""What a replay has at one instant: who waits, who runs, what was used and lost. Changed in place.

A lane is a line of waiting jobs: a queue's, or the one of all where the pool has one line. What it must not do:
decide; `replay` says who starts and who stops. Deterministic, no clock, no I/O.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from heapq import heappop, heappush

from fairshare.simulator.records import Dividing, Pool, Ranking, Record, View
from fairshare.simulator.workload import Workload


class State:
    """One replay's. Lists by job, by queue or by lane."""

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
        self.limited = any(limit < pool.capacity for limit in self.limits)
        self.depth, self.reclaim = pool.scan_depth, pool.reclaim
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

    def submit(self, i: int) -> None:
        self.asked[self.queue[i]] += self.gpus[i]
        self.waiting[self.lane[i]].append(i)
        if len(self.waiting[self.lane[i]]) <= self.depth:
            self.least[self.lane[i]] = 0
        self.asked_changed(self.queue[i])

    def finish_until(self, now: int) -> None:
        ends, running, restart = self.ends, self.running, self.restart
        while ends and ends[0][0] <= now:
            at, i, attempt = heappop(ends)
            q = self.queue[i]
            runs = running[q]
            if self.attempt[i] != attempt or i not in runs:
                continue
            del runs[i]
            if restart:
                restart.pop(i, None)
            gang = self.gpus[i]
            self.hold(q, -gang, at)
            self.asked[q] -= gang
            self.left[i] = 0
            self.record.finished_s[i] = at
            self.asked_changed(q)

    def note(self) -> None:
        """What the control period begins with, once the weights have acted."""
        self.record.held.append(list(self.held))
        self.record.shares.append(tuple(self.shares))

    def close(self, end_s: int) -> Record:
        record = self.record
        for q in range(len(self.held)):
            self.settle(q, end_s)
        record.delivered_gpu_s = sum(self.used)
        return record

    def least_of(self, lane: int) -> int:
        """The smallest gang within the scan depth of a lane in which somebody waits."""
        if not self.least[lane]:
            self.least[lane] = min(map(self.gpus.__getitem__, self.waiting[lane][: self.depth]))
        return self.least[lane]

    def start(self, i: int, now: int) -> None:
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
        self.hold(q, self.gpus[i], now)

    def evict(self, i: int, now: int, for_queue: int) -> None:
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
        self.hold(q, -self.gpus[i], now)
        insort(self.waiting[self.lane[i]], i)
        self.least[self.lane[i]] = 0

    def hold(self, q: int, gpus: int, now: int) -> None:
        before = self.held[q]
        self.used[q] += before * (now - self.since[q])
        self.since[q] = now
        self.held[q] = before + gpus
        self.free -= gpus
        self.fresh_work = True

    def settle(self, q: int, now: int) -> None:
        self.used[q] += self.held[q] * (now - self.since[q])
        self.since[q] = now

    def asked_changed(self, q: int) -> None:
        """Fair shares change only where a request bounds a share, before or after."""
        self.fresh_work = True
        if self.bound[q] or self.asked[q] <= self.shares[q] or self.dividing is not None:
            self.stale = True

    def view(self, now: int) -> View:
        gang = [self.least_of(lane) if waiting else 0 for lane, waiting in enumerate(self.waiting)]
        return View(now, self.pool.capacity, self.used, self.held, self.asked, gang, self.reclaims)

    def backlog(self, now: int) -> tuple[list[int], list[int], list[int]]:
        jobs = [i for waiting in self.waiting for i in waiting]
        lefts = [self.left[i] for i in jobs]
        for runs in self.running:
            jobs += runs
            lefts += [start + self.restart.get(i, 0) + self.left[i] - now for i, start in runs.items()]
        return [self.queue[i] for i in jobs], [self.gpus[i] for i in jobs], lefts
