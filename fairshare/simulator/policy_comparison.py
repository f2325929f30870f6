"""Compares policies over windows and loads on all cores, and prints and plots the comparison.

A window is a part of the trace that is replayed from an empty cluster. Its first week only fills the cluster. The
cluster's size follows from the load of the whole trace, so all windows of a load have the same size. The
first-come-first-served run decides for all policies which weeks and days are contended.

Common data goes to every process once, when it starts. A task is only a few numbers. Results come back without the
jobs, which both sides have. The parent process handles Ctrl-C by dropping the tasks that have not begun."""

from __future__ import annotations

import multiprocessing
import os
import signal
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from importlib.util import find_spec
from itertools import accumulate, chain, combinations_with_replacement
from math import factorial, prod, sqrt
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from rich import box
from rich.table import Table

from accountant.wire.policy_models import DeficitPolicy
from fairshare.simulator import fairness_measures, scheduling_policies
from fairshare.simulator.fairness_measures import PolicyScore
from fairshare.simulator.scheduling_policies import LAWS, Setup
from fairshare.simulator.simulation_model import SNAPSHOT_S, Record, Workload, capacity_for
from gputally.base.errors import FairshareError

COUNTED = 8
"""Largest number of windows for which a bootstrap counts every resample."""


@dataclass(frozen=True, slots=True)
class Window:
    """The span [start_s, end_s) of the trace. Its length is a multiple of the time between snapshots."""

    start_s: int
    end_s: int


@dataclass(frozen=True, slots=True)
class Result:
    """One policy in one window at one load. For `contended` see `fairness_measures.contended`."""

    load: float
    capacity: int
    window: Window
    score: PolicyScore
    record: Record
    contended: dict[int, frozenset[int]]


def windows_of(length_s: int, count: int, days: int) -> list[Window]:
    """Return `count` windows of `days` each, evenly spread over the trace; one window is the whole trace."""
    if count <= 1:
        return [Window(0, length_s)]
    size = days * 86_400
    room = (length_s - size) / (count - 1)
    starts = [round(i * room / SNAPSHOT_S) * SNAPSHOT_S for i in range(count)]
    return [Window(start, start + size) for start in starts]


@dataclass(frozen=True, slots=True)
class Task:
    """One replay.

    contended: see `fairness_measures.contended`. None: this is the first-come-first-served run, which determines it."""

    name: str
    load: float
    capacity: int
    window: Window
    contended: dict[int, frozenset[int]] | None = None


ProgressCallback: TypeAlias = Callable[[str, float], None]
"""A function that is called with the policy and the finished part, of one replay or of all."""
Replays: TypeAlias = Callable[[Sequence[Task], ProgressCallback], Iterable[Result]]
"""A function that runs tasks, each independent of the others, and returns the results in the order of the tasks."""


@dataclass(frozen=True, slots=True)
class TaskRunner:
    """Runs one task after the other."""

    workload: Workload
    share: Sequence[float]
    settings: DeficitPolicy | None = None

    def __call__(self, tasks: Sequence[Task], heard: ProgressCallback) -> Iterator[Result]:
        for number, task in enumerate(tasks):
            yield self.play(task, _of_one(heard, task.name, number, len(tasks)))

    def jobs(self, task: Task) -> Workload:
        """Return the jobs of its window that its cluster could run."""
        return self.workload.between(task.window.start_s, task.window.end_s).fitting(task.capacity)

    def play(self, task: Task, heard: Callable[[float], None] | None = None) -> Result:
        setup, length = Setup(task.capacity, self.share), task.window.end_s - task.window.start_s
        record = scheduling_policies.run(
            task.name, self.jobs(task), setup, length, settings=self.settings, progress=heard
        )
        contended = fairness_measures.contended(record) if task.contended is None else task.contended
        score = fairness_measures.score(task.name, record, contended)
        return Result(task.load, task.capacity, task.window, score, record, contended)


def _of_one(heard: ProgressCallback, name: str, before: int, all_: int) -> Callable[[float], None]:
    return lambda part: heard(name, (before + part) / all_)


def compare(
    names: Sequence[str],
    windows: Sequence[Window],
    capacities: Sequence[tuple[float, int]],
    replays: Replays,
    progress: ProgressCallback | None = None,
) -> list[Result]:
    """Run every policy of `names` in every window at every (load, capacity), in that order."""
    firsts = [Task("fifo", load, capacity, window) for load, capacity in capacities for window in windows]
    every = len(firsts) * (len(names) + ("fifo" not in names))

    def heard(first: int, of: int) -> ProgressCallback:
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
    """Return (load, GPUs) of every load."""
    return [(load, capacity_for(workload, hours, load)) for load in loads]


@dataclass(frozen=True, slots=True)
class Summary:
    """A policy at one load over all windows.

    mean: the mean of every figure.
    week_range: the range of the week's error.
    week_interval: the interval that contains 95 % of the means of resampled windows, for the week's error."""

    load: float
    capacity: int
    policy: str
    windows: int
    mean: PolicyScore
    week_range: tuple[float, float]
    week_interval: tuple[float, float]


def summarise(results: Sequence[Result]) -> list[Summary]:
    """Return summaries in the order in which (load, policy) first occur.

    Windows without contention count in all figures except errors."""
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

    For up to `COUNTED` values every resample is counted, so the result is exact. Beyond that it is the normal
    approximation."""
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
    """Return the number of orders in which these can be drawn."""
    return factorial(len(drawn)) // prod(factorial(count) for count in Counter(drawn).values())


def _mean(scores: Sequence[PolicyScore]) -> PolicyScore:
    tight = [score for score in scores if score.contended]
    means: dict[str, Any] = {}
    for name in PolicyScore.__slots__[1:]:
        some = [getattr(score, name) for score in (tight if name in ("week", "day") else scores)]
        if isinstance(getattr(scores[0], name), tuple):
            means[name] = tuple(map(fmean, zip(*some, strict=True))) or (0.0, 0.0)
        else:
            means[name] = fmean(some)
    return PolicyScore(scores[0].policy, **{**means, "preemptions": round(means["preemptions"])})


def _range(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 0.0)


_NO_JOBS = Workload((), (), (), (), ())
_player: list[TaskRunner] = []
"""The runner of a process of the pool."""


@contextmanager
def players(player: TaskRunner, most: int | None = None) -> Iterator[Replays]:
    """Yield a function that runs several tasks at once.

    most: number of processes; None for as many as this process may use cores."""
    count = len(os.sched_getaffinity(0)) if most is None else most
    if count < 2:
        yield player
        return
    # Processes are not forked, because the process that read the trace has threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(player,))
    for _ in range(count):  # otherwise the other processes would start after the first run
        pool.submit(os.getpid)

    def play(tasks: Sequence[Task], heard: ProgressCallback) -> Iterator[Result]:
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
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The colours of Okabe and Ito, which people with any colour vision can distinguish. Lines also differ in dashes."""
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MOST_DRAWN = len(COLOURS)
_LEVELS = 401
"""Levels of a distribution in a plot."""
_PRICES: tuple[tuple[str, Callable[[PolicyScore], float], float], ...] = (
    ("share error of a day, %", lambda score: 100 * score.day[0], 0.1),
    ("preemptions", lambda score: score.preemptions, 1000.0),
    ("weights move, per day", lambda score: score.move_per_day, 0.01),
)
"""The costs of a small weekly error, and the end of the linear part of each axis."""
_EMPTIER, _SIGHT = 0.02, 2.5


class PlotsMissing(FairshareError):
    """matplotlib is not installed."""


def available() -> None:
    """Raise PlotsMissing if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise PlotsMissing("plots need matplotlib: `pip install gputally` brings it")


def cells(score: PolicyScore) -> list[str]:
    """Return one row for people, in the order of the headings."""
    return [
        f"{100 * score.week[0]:.2f}", f"{100 * score.week[1]:.2f}", f"{100 * score.day[0]:.2f}",
        f"{100 * score.day[1]:.2f}", f"{score.jain:.3f}", f"{score.worst_ratio:.2f}", f"{100 * score.utilisation:.2f}",
        f"{score.wait_mean_h:.1f}", f"{score.wait_p95_h:.0f}", f"{score.wait_worst_queue_h:.0f}",
        f"{score.gang_p95_h:.0f}", f"{score.preemptions:,}", f"{100 * score.lost:.2f}", f"{score.move_per_day:.3f}",
        f"{score.swing:,.1f}", f"{score.slowdown[0]:,.1f}",
    ]  # fmt: skip


def tables(summaries: Sequence[Summary]) -> Iterator[Table]:
    """Yield one table per load, policies in the requested order."""
    for load, capacity in dict.fromkeys((summary.load, summary.capacity) for summary in summaries):
        some = [summary for summary in summaries if (summary.load, summary.capacity) == (load, capacity)]
        title = f"load {load:.2f}, {capacity:,} GPUs, {some[0].windows} window{'s' if some[0].windows > 1 else ''}"
        title += f", {100 * some[0].mean.contended:.0f} % of the weeks contended"
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("policy")
        for heading in _HEADINGS:
            table.add_column(heading, justify="right")
        if some[0].windows > 1:
            table.add_column("week err, windows", justify="right")
            table.add_column("95 % of means", justify="right")
        for summary in some:
            spread = [
                f"{100 * low:.2f} … {100 * high:.2f}" for low, high in (summary.week_range, summary.week_interval)
            ]
            table.add_row(summary.policy, *cells(summary.mean), *(spread if summary.windows > 1 else []))
        yield table


def rows(results: Sequence[Result]) -> Iterator[tuple[object, ...]]:
    """Yield CSV rows under `HEADER`, errors and utilisation as parts of 1."""
    for result in results:
        place = (round(result.load, 4), result.capacity, result.window.start_s, result.window.end_s)
        figures = (each if isinstance(each, tuple) else (each,) for each in astuple(result.score))
        yield (*place, *chain.from_iterable(figures))


def draw_days(folder: Path, panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[float, float]]]]]) -> Path:
    """Draw `what-if.svg`: of at most eight queues, GPUs held day by day, one line per case. Raises FairshareError."""
    pyplot = _pyplot()
    shown = panels[:8]
    figure, axes = pyplot.subplots(
        len(shown), 1, figsize=(11.0, 1.9 * len(shown)), squeeze=False, sharex=True, layout="constrained"
    )
    for (queue, lines), axis in zip(shown, (axis for line in axes for axis in line), strict=True):
        for (label, points), colour, dash in zip(lines.items(), COLOURS, DASHES, strict=False):
            axis.plot([at for at, _ in points], [held for _, held in points], color=colour, ls=dash, label=label)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("GPUs")
        axis.set_title(f"{queue}: mean GPUs held, 24 h to the day shown", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(ncols=3, fontsize=8, frameon=False)
    axes[-1][0].set_xlabel("day")
    path = folder / "what-if.svg"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
    except OSError as error:
        raise FairshareError(f"{folder}: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)
    return path


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw figures of the last load and return the files. Raises FairshareError.

    The figure of costs shows all windows and policies. The others show the first window and as many policies as can be
    distinguished."""
    pyplot = _pyplot()
    load, window = results[-1].load, results[0].window
    chosen = [result for result in results if result.load == load and result.window == window]
    if len(chosen) > MOST_DRAWN:
        wanted = (chosen[0].score.policy, *LAWS)
        chosen = sorted(chosen, key=lambda result: result.score.policy not in wanted)[:MOST_DRAWN]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, paint, size in (
            ("shares", _shares, (11.0, 2.1)), ("fairness", _fairness, (11.0, 4.0)), ("waits", _waits, (11.0, 4.0))
        ):  # fmt: skip
            rows_ = len(chosen) if paint is _shares else 1
            columns = 1 if paint is _shares else 2
            figure, axes = pyplot.subplots(
                rows_, columns, figsize=(size[0], size[1] * rows_), squeeze=False, layout="constrained"
            )
            paint(chosen, [axis for line in axes for axis in line])
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
            written.append(path)
        figure, axes = pyplot.subplots(1, len(_PRICES), figsize=(11.0, 4.2), sharey=True, layout="constrained")
        _costs([summary for summary in summarise(results) if summary.load == load], axes)
        written.append(folder / "costs.svg")
        figure.savefig(written[-1], metadata={"Date": None})
        pyplot.close(figure)
    except OSError as error:
        raise FairshareError(f"{folder}: {error.strerror or error}") from error
    return written


def _pyplot() -> Any:
    available()
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gputally"
    from matplotlib import pyplot

    return pyplot


def _shares(results: Sequence[Result], axes: Sequence[Axes]) -> None:
    """Draw the four largest queues: their part of the time that was delivered each day (solid) and due (dotted)."""
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
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(ncols=4, fontsize=8, frameon=False, loc="upper right")
    axes[-1].set_xlabel("day of the replay")


def _fairness(results: Sequence[Result], axes: Sequence[Axes]) -> None:
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
    left.set_title("Lorenz curve of what was had against what was due, below the diagonal", fontsize=9)
    left.set_xlabel("part of the entitlement, least satisfied first")
    left.legend(fontsize=8, frameon=False)
    right.set_title("Jain's index of the week that begins on the day shown", fontsize=9)
    right.set_xlabel("day of the replay")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)


def _costs(summaries: Sequence[Summary], axes: Sequence[Axes]) -> None:
    """Plot a week's error against a day's, against preemptions and against the movement of weights.

    Policies that no other policy beats in both figures are solid, the rest pale. The legend has the numbers. Policies
    that leave the cluster emptier, or are far from the first policy, are left out."""
    fullest = max(summary.mean.utilisation for summary in summaries)
    summaries = [
        summary
        for summary in summaries
        if summary.mean.utilisation >= fullest - _EMPTIER and summary.mean.week[0] <= _SIGHT * summaries[0].mean.week[0]
    ] or list(summaries)
    for axis, (heading, of, linear_to) in zip(axes, _PRICES, strict=True):
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
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share error of a week, % of the cluster")
    for number, summary in enumerate(summaries, 1):
        axes[0].plot([], [], " ", label=f"{number}  {summary.policy}")
    axes[0].figure.legend(loc="outside right upper", fontsize=8, frameon=False, handlelength=0)


def _waits(results: Sequence[Result], axes: Sequence[Axes]) -> None:
    """Draw on the left how many jobs wait longer than a time, and on the right the mean wait of every queue."""
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
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
