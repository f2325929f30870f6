"""What a replay has at one instant: who waits, who runs, what was used and lost. Changed in place.

A lane is a line of waiting jobs: a queue's, or the one of all where the pool has one line. What it must not do:
decide; `replay` says who starts and who stops. Deterministic, no clock, no I/O.

Three things are kept so that a tick costs only what changed in it:

- `fresh_work` says whether somebody may start, or take GPUs back, who could not when the scheduler last looked. A
  job for which there is no room and no claim makes none.
- *Ends* come in groups, one per tick at which they are noticed, and the order within a group decides nothing. A run
  that is stopped stays in its group; it is known there by `end`, which says when a job's present run ends.
- *Use* of a queue up to t is held · t - origin, origin being Σ gang · start of its runs less what past runs
  delivered: whole GPU-seconds, in whatever order jobs start and end, and nothing to add up in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

import numpy as np

from fairshare.simulator.line import NOBODY, Line
from fairshare.simulator.records import TICK_S, Dividing, Pool, Ranking, Record, View
from fairshare.simulator.workload import Workload

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

    def view(self, now: int, used: list[int]) -> View:
        gang = [0 if least == NOBODY else least for least in self.least]
        return View(now, self.pool.capacity, used, self.held, self.asked, gang, self.reclaims)

    def backlog(self, now: int) -> tuple[array[int], array[int]]:
        """Every job that waits or runs, and the seconds that it has left. Thousands wait: hence columns of numpy's."""
        ends = np.asarray(self.end)[: self.come]
        jobs = np.flatnonzero(ends != _DONE)
        ends = ends[jobs]
        seconds = np.where(ends == NEVER, np.asarray(self.left)[jobs], ends - now)
        return array("q", jobs.astype(np.int64).tobytes()), array("q", seconds.tobytes())
