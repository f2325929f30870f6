"""Replays a job trace under several policies, windows and loads in parallel, and prints and plots the comparison.

A window is a part of the trace, replayed from an empty cluster. Its first week only fills the cluster. The load is the
work of the whole trace over the capacity of the cluster. It determines the cluster's size, which is therefore the same
in all windows. The first-come-first-served run decides for all policies which weeks and days are contended.

Each worker process gets the jobs once, when it starts, so that tasks and results need not contain them. On Ctrl-C the
parent process drops the tasks that have not begun."""

from __future__ import annotations

import multiprocessing
import os
import signal
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, chain, combinations_with_replacement
from math import factorial, prod, sqrt
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from rich.table import Table
from rich.text import Text

from fairshare.explain.what_if_figure import COLOURS, DASHES, figure
from fairshare.simulator.simulation_model import SNAPSHOT_S, ReplayRecord, Workload
from gputally.base.terminal import figures, table
from tests.evaluation import fairness_measures, scheduling_policies
from tests.evaluation.fairness_measures import PolicyScore
from tests.evaluation.scheduling_policies import LAWS, Setup

COUNTED = 8
"""The largest number of windows for which `bootstrap` computes every resample instead of an approximation."""


@dataclass(frozen=True, slots=True)
class Window:
    """A span [start_s, end_s) of the trace, whose length is a multiple of the time between snapshots."""

    start_s: int
    end_s: int


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one policy in one window at one load.

    contended: the starts of the contended windows, by their length in hours (`fairness_measures.contended`)."""

    load: float
    capacity: int
    window: Window
    score: PolicyScore
    record: ReplayRecord
    contended: dict[int, frozenset[int]]


def windows_of(length_s: int, count: int, days: int) -> list[Window]:
    """Return `count` windows of `days` days, evenly spread over the trace; for a count of 1 the whole trace."""
    if count <= 1:
        return [Window(0, length_s)]
    size = days * 86_400
    room = (length_s - size) / (count - 1)
    starts = [round(i * room / SNAPSHOT_S) * SNAPSHOT_S for i in range(count)]
    return [Window(start, start + size) for start in starts]


@dataclass(frozen=True, slots=True)
class Task:
    """The arguments of one replay.

    name: the name of the policy.
    contended: see Result; None for the first-come-first-served run, which determines the contended windows."""

    name: str
    load: float
    capacity: int
    window: Window
    contended: dict[int, frozenset[int]] | None = None


ProgressCallback: TypeAlias = Callable[[str, float], None]
"""Called with the policy's name and the finished part (0..1)."""
Replays: TypeAlias = Callable[[Sequence[Task], ProgressCallback], Iterable[Result]]
"""Runs independent tasks, and returns the results in the order of the tasks."""


@dataclass(frozen=True, slots=True)
class TaskRunner:
    """Runs tasks on one workload, one after the other."""

    workload: Workload
    share: Sequence[float]

    def __call__(self, tasks: Sequence[Task], progress: ProgressCallback) -> Iterator[Result]:
        for number, task in enumerate(tasks):
            yield self.run(task, _task_progress(progress, task.name, number, len(tasks)))

    def jobs(self, task: Task) -> Workload:
        """Return the jobs of the task's window that the task's cluster can run."""
        return self.workload.between(task.window.start_s, task.window.end_s).fitting(task.capacity)

    def run(self, task: Task, progress: Callable[[float], None] | None = None) -> Result:
        setup, length = Setup(task.capacity, self.share), task.window.end_s - task.window.start_s
        record = scheduling_policies.run(task.name, self.jobs(task), setup, length, progress=progress)
        contended = fairness_measures.contended(record) if task.contended is None else task.contended
        score = fairness_measures.score(task.name, record, contended)
        return Result(task.load, task.capacity, task.window, score, record, contended)


def _task_progress(progress: ProgressCallback, name: str, before: int, tasks: int) -> Callable[[float], None]:
    return lambda part: progress(name, (before + part) / tasks)


def compare(
    names: Sequence[str],
    windows: Sequence[Window],
    capacities: Sequence[tuple[float, int]],
    replays: Replays,
    progress: ProgressCallback | None = None,
) -> list[Result]:
    """Run every policy of `names` in every window at every (load, capacity).

    The results are in the order of the capacities, then of the windows, then of the names."""
    fifo_tasks = [Task("fifo", load, capacity, window) for load, capacity in capacities for window in windows]
    replay_count = len(fifo_tasks) * (len(names) + ("fifo" not in names))

    def part_progress(before: int, count: int) -> ProgressCallback:
        return lambda name, part: progress(name, (before + part * count) / replay_count) if progress else None

    results: dict[tuple[str, int], Result] = {}
    tasks: list[tuple[int, Task]] = []
    for number, result in enumerate(replays(fifo_tasks, part_progress(0, len(fifo_tasks)))):
        results["fifo", number] = result
        task = replace(fifo_tasks[number], contended=result.contended)
        tasks += [(number, replace(task, name=name)) for name in names if name != "fifo"]
    others = replays([task for _, task in tasks], part_progress(len(fifo_tasks), len(tasks)))
    for (number, task), result in zip(tasks, others, strict=True):
        results[task.name, number] = result
    return [results[name, number] for number in range(len(fifo_tasks)) for name in names]


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a policy at one load over all windows.

    mean: the means of all figures.
    week_range: the smallest and the largest share error of a week.
    week_interval: the interval with 95 % of the mean week errors of resampled windows."""

    load: float
    capacity: int
    policy: str
    windows: int
    mean: PolicyScore
    week_range: tuple[float, float]
    week_interval: tuple[float, float]


def summarise(results: Sequence[Result]) -> list[Summary]:
    """Return one summary per load and policy, in the order in which they first occur.

    Windows without contention count in all figures except the share errors."""
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
    """Return the interval with the middle 95 % of the means of resampled `values`; (0, 0) without values.

    The result is exact for up to `COUNTED` values, and the normal approximation for more values."""
    size = len(values)
    if not values:
        return 0.0, 0.0
    if size > COUNTED:
        distance = 1.96 * pstdev(values) / sqrt(size)
        return fmean(values) - distance, fmean(values) + distance
    draws = combinations_with_replacement(range(size), size)
    means = sorted((fmean(values[i] for i in draw), _orders(draw)) for draw in draws)
    cumulative = list(accumulate(orders for _, orders in means))
    low, high = (means[bisect_left(cumulative, part * cumulative[-1])][0] for part in (0.025, 0.975))
    return low, high


def _orders(drawn: Sequence[int]) -> int:
    """Return the number of orders in which these items can be drawn."""
    return factorial(len(drawn)) // prod(factorial(count) for count in Counter(drawn).values())


def _mean(scores: Sequence[PolicyScore]) -> PolicyScore:
    contended = [score for score in scores if score.contended]
    means: dict[str, Any] = {}
    for name in PolicyScore.__slots__[1:]:
        some = [getattr(score, name) for score in (contended if name in ("week", "day") else scores)]
        if isinstance(getattr(scores[0], name), tuple):
            means[name] = tuple(map(fmean, zip(*some, strict=True))) or (0.0, 0.0)
        else:
            means[name] = fmean(some)
    return PolicyScore(scores[0].policy, **{**means, "preemptions": round(means["preemptions"])})


def _range(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 0.0)


_NO_JOBS = Workload((), (), (), (), ())
_runner: list[TaskRunner] = []
"""The runner of this worker process."""


@contextmanager
def parallel_replays(runner: TaskRunner, processes: int | None = None) -> Iterator[Replays]:
    """Yield a function that runs several tasks at once, each in a worker process.

    processes: the number of worker processes; None for one per core that this process may use."""
    count = len(os.sched_getaffinity(0)) if processes is None else processes
    if count < 2:
        yield runner
        return
    # Processes are not forked, because the process that read the trace has threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=(runner,))
    for _ in range(count):  # otherwise the other processes would start after the first run
        pool.submit(os.getpid)

    def replays(tasks: Sequence[Task], progress: ProgressCallback) -> Iterator[Result]:
        if tasks:
            progress(tasks[0].name, 0.0)
        for number, (task, result) in enumerate(zip(tasks, pool.map(_run_task, tasks), strict=True), 1):
            progress(task.name, number / len(tasks))
            result.record.workload = runner.jobs(task)
            yield result

    try:
        yield replays
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(runner: TaskRunner) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _runner[:] = [runner]


def _run_task(task: Task) -> Result:
    result = _runner[0].run(task)
    return replace(result, record=replace(result.record, workload=_NO_JOBS))


if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADER = (
    "load", "capacity", "start_s", "end_s", "policy", "week_error_mean", "week_error_p95", "day_error_mean",
    "day_error_p95", "jain", "worst_ratio", "utilisation", "wait_mean_h", "wait_p95_h", "wait_worst_queue_h",
    "gang8_wait_p95_h", "preemptions", "lost", "weight_movement_per_day", "weight_swing", "disparity", "contended",
    "slowdown_mean", "slowdown_p95",
)  # fmt: skip
_HEADINGS = (
    "week err %", "p95", "day err %", "p95", "Jain", "worst", "util %", "wait h", "p95", "worst q.", "gang≥8",
    "preempt", "lost %", "move/day", "swing", "slowdown",
)  # fmt: skip
MOST_DRAWN = len(COLOURS)
_LEVELS = 401
"""The number of points of a distribution in a plot."""
_COSTS: tuple[tuple[str, Callable[[PolicyScore], float], float], ...] = (
    ("share error of a day, %", lambda score: 100 * score.day[0], 0.1),
    ("preemptions", lambda score: score.preemptions, 1000.0),
    ("weights move, per day", lambda score: score.move_per_day, 0.01),
)
"""The costs of a small weekly error: the axis title, the figure, and the end of the linear part of the axis."""
_MOST_EMPTIER, _MOST_WORSE = 0.02, 2.5
"""The figure of costs shows a policy if its utilisation is at most `_MOST_EMPTIER` below the best one, and its week
error at most `_MOST_WORSE` times that of the first policy."""


def cells(score: PolicyScore) -> list[str]:
    """Return the figures as the cells of a table with the columns `_HEADINGS`."""
    return [
        f"{100 * score.week[0]:.2f}", f"{100 * score.week[1]:.2f}", f"{100 * score.day[0]:.2f}",
        f"{100 * score.day[1]:.2f}", f"{score.jain:.3f}", f"{score.worst_ratio:.2f}", f"{100 * score.utilisation:.2f}",
        f"{score.wait_mean_h:.1f}", f"{score.wait_p95_h:.0f}", f"{score.wait_worst_queue_h:.0f}",
        f"{score.gang_p95_h:.0f}", f"{score.preemptions:,}", f"{100 * score.lost:.2f}", f"{score.move_per_day:.3f}",
        f"{score.swing:,.1f}", f"{score.slowdown[0]:,.1f}",
    ]  # fmt: skip


def tables(summaries: Sequence[Summary]) -> Iterator[Table]:
    """Yield one table per load, with the policies in the order of the summaries."""
    for load, capacity in dict.fromkeys((summary.load, summary.capacity) for summary in summaries):
        some = [summary for summary in summaries if (summary.load, summary.capacity) == (load, capacity)]
        title = f"load {load:.2f}, {capacity:,} GPUs, {some[0].windows} window{'s' if some[0].windows > 1 else ''}"
        title += f", {100 * some[0].mean.contended:.0f} % of the weeks contended"
        headings, lines = [*_HEADINGS], [[summary.policy, *cells(summary.mean)] for summary in some]
        if some[0].windows > 1:
            headings += ["week err, windows", "95 % of means"]
            for line, summary in zip(lines, some, strict=True):
                spread = summary.week_range, summary.week_interval
                line += [f"{100 * low:.2f} … {100 * high:.2f}" for low, high in spread]
        yield table(Text(title, "bold"), ["policy", *figures(*headings)], lines)


def rows(results: Sequence[Result]) -> Iterator[tuple[object, ...]]:
    """Yield the CSV rows for `HEADER`. Errors and utilisation are parts of 1."""
    for result in results:
        position = (round(result.load, 4), result.capacity, result.window.start_s, result.window.end_s)
        figures = (each if isinstance(each, tuple) else (each,) for each in astuple(result.score))
        yield (*position, *chain.from_iterable(figures))


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw figures of the last load and return the files. Raises FairshareError.

    The figure of costs shows all windows and policies. The other figures show the first window and at most `MOST_DRAWN`
    policies, as many as there are colours."""
    load, window = results[-1].load, results[0].window
    chosen = [result for result in results if result.load == load and result.window == window]
    if len(chosen) > MOST_DRAWN:
        preferred = (chosen[0].score.policy, *LAWS)
        chosen = sorted(chosen, key=lambda result: result.score.policy not in preferred)[:MOST_DRAWN]
    paths = [folder / f"{name}.svg" for name in ("shares", "fairness", "waits", "costs")]
    with figure(paths[0], len(chosen), 1, 2.1 * len(chosen)) as axes:
        _draw_shares(chosen, axes)
    with figure(paths[1], 1, 2, 4.0) as axes:
        _draw_fairness(chosen, axes)
    with figure(paths[2], 1, 2, 4.0) as axes:
        _draw_waits(chosen, axes)
    with figure(paths[3], 1, len(_COSTS), 4.2, sharey=True) as axes:
        _draw_costs([summary for summary in summarise(results) if summary.load == load], axes)
    return paths


def _draw_shares(results: Sequence[Result], axes: Sequence[Axes]) -> None:
    """Draw the parts of the cluster that the four largest queues held (solid) and were due (dotted), day by day."""
    for result, axis in zip(results, axes, strict=True):
        days = fairness_measures.spans(result.record, 24)
        hours = [each.start_s / 86_400 + 1 for each in days]
        largest = np.argsort([-part for part in result.record.pool.weights], kind="stable")[:4]
        for colour, q in zip(COLOURS, largest.tolist(), strict=False):
            axis.plot(hours, [100 * s.used[q] / s.possible for s in days], color=colour, lw=1.4,
                      label=result.record.workload.queues[q])  # fmt: skip
            axis.plot(hours, [100 * s.due[q] / s.possible for s in days], color=colour, lw=1.0, ls=":")
        axis.set_ylabel("% of cluster")
        axis.set_title(f"{result.score.policy}: held (solid) and due (dotted), 24 h to the day shown", fontsize=9)
    axes[0].legend(ncols=4, fontsize=8, frameon=False, loc="upper right")
    axes[-1].set_xlabel("day of the replay")


def _draw_fairness(results: Sequence[Result], axes: Sequence[Axes]) -> None:
    """Draw Lorenz curves of satisfaction on the left, and Jain's index week by week on the right."""
    left, right = axes
    left.axhline(0.0, color="#999999", lw=0.8)
    for result, colour, dash in zip(results, COLOURS, DASHES, strict=False):
        weeks = fairness_measures.spans(result.record, 168)
        used, due = sum(s.used for s in weeks), sum(s.due for s in weeks)
        ratio = np.asarray(used) / np.maximum(np.asarray(due), 1.0)
        order = np.argsort(ratio, kind="stable")
        across = np.concatenate([[0.0], np.cumsum(np.asarray(due)[order]) / np.sum(due)])
        up = np.concatenate([[0.0], np.cumsum(np.asarray(used)[order]) / np.sum(used)])
        left.plot(across, up - across, color=colour, ls=dash, label=result.score.policy)
        jains = [(s.start_s / 86_400, value) for s in weeks if (value := s.jain) is not None]
        right.plot([at for at, _ in jains], [value for _, value in jains], color=colour, ls=dash)
    left.set_title("Lorenz curve of used against due GPU time, below the diagonal", fontsize=9)
    left.set_xlabel("part of the entitlement, least satisfied first")
    left.legend(fontsize=8, frameon=False)
    right.set_title("Jain's index of the week that begins on the day shown", fontsize=9)
    right.set_xlabel("day of the replay")


def _draw_costs(summaries: Sequence[Summary], axes: Sequence[Axes]) -> None:
    """Draw the share error of a week against that of a day, against preemptions and the movement of weights.

    Each point is a policy with a number, which the legend explains. The points of policies that no other policy beats
    in both figures are blue, and those of the other policies grey. Policies that leave the cluster emptier, or are far
    worse than the first policy, are left out."""
    fullest = max(summary.mean.utilisation for summary in summaries)
    summaries = [
        summary
        for summary in summaries
        if summary.mean.utilisation >= fullest - _MOST_EMPTIER
        and summary.mean.week[0] <= _MOST_WORSE * summaries[0].mean.week[0]
    ] or list(summaries)
    for axis, (heading, of, linear_to) in zip(axes, _COSTS, strict=True):
        points = [(of(summary.mean), 100 * summary.mean.week[0]) for summary in summaries]
        axis.set_xscale("symlog", linthresh=linear_to, subs=(2, 5))
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.xaxis.set_minor_formatter("{x:,g}")
        axis.tick_params(which="both", labelsize=7.5)
        for number, (x, y) in enumerate(points, 1):
            best = not any((a <= x and b < y) or (a < x and b <= y) for a, b in points)
            axis.plot(x, y, "o", ms=11, color=COLOURS[0] if best else "#B8C4CE")
            axis.annotate(
                str(number), (x, y), ha="center", va="center", fontsize=6.5, color="white" if best else "black"
            )
        axis.set_xlabel(heading)
    axes[0].set_ylabel("share error of a week, % of the cluster")
    for number, summary in enumerate(summaries, 1):
        axes[0].plot([], [], " ", label=f"{number}  {summary.policy}")
    axes[0].figure.legend(loc="outside right upper", fontsize=8, frameon=False, handlelength=0)


def _draw_waits(results: Sequence[Result], axes: Sequence[Axes]) -> None:
    """Draw on the left the part of the jobs that wait longer than a time, and on the right each queue's mean wait."""
    left, right = axes
    width = 0.8 / len(results)
    for i, (result, colour, dash) in enumerate(zip(results, COLOURS, DASHES, strict=False)):
        waits, queues, _ = fairness_measures.waits(result.record, fairness_measures.WARM_UP_S)
        levels = np.linspace(0, 1, _LEVELS)
        longest = np.quantile(waits, levels) if len(waits) else np.zeros(_LEVELS)
        left.plot(np.maximum(longest, 1 / 60), 1 - levels, color=colour, ls=dash, label=result.score.policy)
        means = [float(waits[queues == q].mean()) if (queues == q).any() else 0.0
                 for q in range(len(result.record.workload.queues))]  # fmt: skip
        right.bar(np.arange(len(means)) + i * width, means, width, color=colour)
    left.set_xscale("log")
    left.set_title("part of the jobs that wait longer", fontsize=9)
    left.set_xlabel("hours from submission to first start")
    left.legend(fontsize=8, frameon=False, loc="lower left")
    names = results[0].record.workload.queues
    right.set_xticks(np.arange(len(names)) + 0.4, names, rotation=60, fontsize=7)
    right.set_title("mean wait by queue, hours", fontsize=9)
