"""Compares policies over windows and loads on all cores.

A window is a stretch of the trace replayed from an empty cluster, its first week only to fill it. The
cluster's size follows from the load of the whole trace, so that every window of a load sees the same one.
Which of its weeks and days are contended, the first-come-first-served run says, for all policies.

What is the same for all of them goes to every process once, when it starts; a task is a few numbers. Results come back
without the jobs, which both sides have. Ctrl-C is the parent's business: it drops what has not begun.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, combinations_with_replacement
from math import factorial, prod, sqrt
from statistics import fmean, pstdev
from typing import TypeAlias

from accountant.wire.policy_models import DeficitPolicy
from fairshare.simulator import fairness_measures, scheduling_policies
from fairshare.simulator.fairness_measures import PolicyScore
from fairshare.simulator.scheduling_policies import Setup
from fairshare.simulator.simulation_model import SNAPSHOT_S, Record, Workload, capacity_for

COUNTED = 8
"""Windows up to which a bootstrap counts every resample."""


@dataclass(frozen=True, slots=True)
class Window:
    """[start_s, end_s) of the trace, a multiple of the snapshots long."""

    start_s: int
    end_s: int


@dataclass(frozen=True, slots=True)
class Result:
    """One policy in one window at one load. contended: see `measures.contended`."""

    load: float
    capacity: int
    window: Window
    score: PolicyScore
    record: Record
    contended: dict[int, frozenset[int]]


def windows_of(length_s: int, count: int, days: int) -> list[Window]:
    """`count` windows of `days` each, evenly over the trace; one window is the whole trace."""
    if count <= 1:
        return [Window(0, length_s)]
    size = days * 86_400
    room = (length_s - size) / (count - 1)
    starts = [round(i * room / SNAPSHOT_S) * SNAPSHOT_S for i in range(count)]
    return [Window(start, start + size) for start in starts]


@dataclass(frozen=True, slots=True)
class Task:
    """One replay. contended: see `measures.contended`; None: this is the first-come-first-served run that says it."""

    name: str
    load: float
    capacity: int
    window: Window
    contended: dict[int, frozenset[int]] | None = None


Heard: TypeAlias = Callable[[str, float], None]
"""Told the policy and the part that is done, of one replay or of all."""
Replays: TypeAlias = Callable[[Sequence[Task], Heard], Iterable[Result]]
"""Plays tasks, each independent of the others, and gives the results in their order."""


@dataclass(frozen=True, slots=True)
class TaskRunner:
    """Plays one task after the other."""

    workload: Workload
    share: Sequence[float]
    settings: DeficitPolicy | None = None

    def __call__(self, tasks: Sequence[Task], heard: Heard) -> Iterator[Result]:
        for number, task in enumerate(tasks):
            yield self.play(task, _of_one(heard, task.name, number, len(tasks)))

    def jobs(self, task: Task) -> Workload:
        """Those of its window that its cluster could run."""
        return self.workload.between(task.window.start_s, task.window.end_s).fitting(task.capacity)

    def play(self, task: Task, heard: Callable[[float], None] | None = None) -> Result:
        setup, length = Setup(task.capacity, self.share), task.window.end_s - task.window.start_s
        record = scheduling_policies.run(
            task.name, self.jobs(task), setup, length, settings=self.settings, progress=heard
        )
        contended = fairness_measures.contended(record) if task.contended is None else task.contended
        score = fairness_measures.score(task.name, record, contended)
        return Result(task.load, task.capacity, task.window, score, record, contended)


def _of_one(heard: Heard, name: str, before: int, all_: int) -> Callable[[float], None]:
    return lambda part: heard(name, (before + part) / all_)


def compare(
    names: Sequence[str],
    windows: Sequence[Window],
    capacities: Sequence[tuple[float, int]],
    replays: Replays,
    progress: Heard | None = None,
) -> list[Result]:
    """Every policy of `names` in every window at every (load, capacity), in that order."""
    firsts = [Task("fifo", load, capacity, window) for load, capacity in capacities for window in windows]
    every = len(firsts) * (len(names) + ("fifo" not in names))

    def heard(first: int, of: int) -> Heard:
        return lambda name, part: progress(name, (first + part * of) / every) if progress is not None else None

    found: dict[tuple[str, int], Result] = {}
    tasks: list[tuple[int, Task]] = []
    for place, result in enumerate(replays(firsts, heard(0, len(firsts)))):
        same_place = replace(firsts[place], contended=result.contended)
        tasks += [(place, replace(same_place, name=name)) for name in names if name != "fifo"]
        if "fifo" in names:
            found["fifo", place] = result
    others = replays([task for _, task in tasks], heard(len(firsts), len(tasks)))
    for (place, task), result in zip(tasks, others, strict=True):
        found[task.name, place] = result
    return [found[name, place] for place in range(len(firsts)) for name in names]


def capacities_for(workload: Workload, hours: float, loads: Sequence[float]) -> list[tuple[float, int]]:
    """(load, GPUs) of every load."""
    return [(load, capacity_for(workload, hours, load)) for load in loads]


@dataclass(frozen=True, slots=True)
class Summary:
    """A policy at one load over all windows: the mean of every figure; of the week's error the range, and where
    95 % of the means of windows drawn again, with replacement, lie."""

    load: float
    capacity: int
    policy: str
    windows: int
    mean: PolicyScore
    week_range: tuple[float, float]
    week_interval: tuple[float, float]


def summarise(results: Sequence[Result]) -> list[Summary]:
    """In the order in which (load, policy) first come. Windows without contention count in all but errors."""
    groups: dict[tuple[float, int, str], list[PolicyScore]] = {}
    for result in results:
        groups.setdefault((result.load, result.capacity, result.score.policy), []).append(result.score)
    summaries = []
    for (load, capacity, name), scores in groups.items():
        weeks = [score.week[0] for score in scores if score.contended]
        spread = _range(weeks), bootstrap(weeks)
        summaries.append(Summary(load, capacity, name, len(scores), _mean(scores), *spread))
    return summaries


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Where the middle 95 % of the means of resampled `values` lie. Exact, by counting every resample, for up to
    `COUNTED` values; the normal approximation of the same beyond. (0, 0) where there are none."""
    size = len(values)
    if not values:
        return 0.0, 0.0
    if size > COUNTED:
        reach = 1.96 * pstdev(values) / sqrt(size)
        return fmean(values) - reach, fmean(values) + reach
    drawn = combinations_with_replacement(range(size), size)
    means = sorted((fmean(values[i] for i in some), _orders(some)) for some in drawn)
    below = list(accumulate(orders for _, orders in means))
    low, high = (means[bisect_left(below, part * below[-1])][0] for part in (0.025, 0.975))
    return low, high


def _orders(drawn: Sequence[int]) -> int:
    """In how many orders these can be drawn."""
    return factorial(len(drawn)) // prod(factorial(count) for count in Counter(drawn).values())


def _mean(scores: Sequence[PolicyScore]) -> PolicyScore:
    def mean(of: Callable[[PolicyScore], float], some: Sequence[PolicyScore] = scores) -> float:
        return fmean(of(score) for score in some) if some else 0.0

    tight = [score for score in scores if score.contended]
    return PolicyScore(
        scores[0].policy,
        (mean(lambda s: s.week[0], tight), mean(lambda s: s.week[1], tight)),
        (mean(lambda s: s.day[0], tight), mean(lambda s: s.day[1], tight)),
        mean(lambda s: s.jain),
        mean(lambda s: s.worst_ratio),
        mean(lambda s: s.utilisation),
        mean(lambda s: s.wait_mean_h),
        mean(lambda s: s.wait_p95_h),
        mean(lambda s: s.wait_worst_queue_h),
        mean(lambda s: s.gang_p95_h),
        round(mean(lambda s: s.preemptions)),
        mean(lambda s: s.lost),
        mean(lambda s: s.move_per_day),
        mean(lambda s: s.swing),
        mean(lambda s: s.disparity),
        mean(lambda s: s.contended),
        (mean(lambda s: s.slowdown[0]), mean(lambda s: s.slowdown[1])),
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 0.0)


_NO_JOBS = Workload((), (), (), (), ())
_player: list[TaskRunner] = []
"""In a process of the pool: the one that plays."""


@contextmanager
def players(player: TaskRunner, most: int | None = None) -> Iterator[Replays]:
    """Plays as `player` does, several at once. most: processes; None: as many as this one may use cores."""
    count = len(os.sched_getaffinity(0)) if most is None else most
    if count < 2:
        yield player
        return
    # Not forked: whoever read the trace has threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(player,))
    for _ in range(count):  # else the others begin, with all they import, only once the first run is over
        pool.submit(os.getpid)

    def play(tasks: Sequence[Task], heard: Heard) -> Iterator[Result]:
        if tasks:
            heard(tasks[0].name, 0.0)
        for number, (task, result) in enumerate(zip(tasks, pool.map(_play, tasks), strict=True), 1):
            heard(task.name, number / len(tasks))
            result.record.workload = player.jobs(task)
            yield result

    try:
        yield play
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(player: TaskRunner) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _player[:] = [player]


def _play(task: Task) -> Result:
    result = _player[0].play(task)
    return replace(result, record=replace(result.record, workload=_NO_JOBS))
