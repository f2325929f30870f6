"""Runs the simulation with a progress bar. Its pages are served from the first hour on, and fill while it runs."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from accountant.core.periods import utc
from gputally.base.command_output import Output
from gputally.base.errors import AccountantError
from gputally.demo import results as summary
from gputally.demo.pipeline import Pipeline
from gputally.demo.results import Results, collect
from gputally.demo.scenario import Scenario
from gputally.demo.worker_processes import NICE, WorkerProcess, WorkerProcesses, encode_call

BASELINE = "gputally.demo.scenario:Baseline"
_REFRESH_PER_S = 2
"""Refreshes of the progress bar per second. Each takes processor time from the workers."""

_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - the folder made in it is this process's own
_LEAST_FREE_BYTES = 2 * 1024**3


class DemoStopped(AccountantError):
    """The user has stopped the demo before its end."""


def simulate(scenario: Scenario, pipeline: Pipeline, console: Console, folder: Path, stop: threading.Event) -> Results:
    """Run the demo with its progress bar, and at the same time, in a separate process, the same jobs under static
    weights. On return, the accountant has begun to write its files into `folder`. Raises DemoStopped after the hour, or
    the part of the report, in which `stop` is set."""
    began = time.monotonic()
    with (
        closing(WorkerProcess("the run under static weights", BASELINE, nice=2 * NICE)) as static,
        _progress(console) as progress,
    ):
        static.start(scenario)
        static.send(encode_call("totals"))
        task = progress.add_task("", total=scenario.days * 24, now=utc(scenario.start_ms))

        def hour_passed(now_ms: int) -> None:
            progress.update(task, advance=1, now=utc(now_ms))
            _go_on(stop)

        pipeline.run(hour_passed)
        progress.update(task, now="the report, and the same jobs under static weights")
        figures = pipeline.figures()
        _go_on(stop)
        pipeline.write_files(folder)
        before = static.result()
        _go_on(stop)
    return collect(pipeline, figures, before, time.monotonic() - began)


def run(
    scenario: Scenario,
    processes: WorkerProcesses,
    out: Path,
    port: int | None,
    console: Console,
    stop: threading.Event,
    output: Output = "table",
) -> bool:
    """Run the demo, and serve its pages until `stop` is set. Return True if every check passes. Raises DemoStopped if
    `stop` is set before the results are complete.

    port: 0 for any free port; None to end after the run, and to show no address."""
    gpus = sum(len(node.gpus) for node in scenario.nodes)
    console.print(
        f"{len(scenario.nodes)} nodes, {gpus} GPUs, {len(scenario.policy.queues)} teams, {len(scenario.jobs):,} jobs, "
        f"{scenario.days} days from {utc(scenario.start_ms)[:10]}; seed {scenario.seed}"
    )
    console.print(f"The simulation takes about {_expected(scenario.days)} on two free processors.")
    with (
        tempfile.TemporaryDirectory(prefix="gputally-demo-", dir=_fast_folder()) as folder,
        Pipeline(
            scenario, Path(folder), port or 0, processes=processes, scratch=True, pages=port is not None
        ) as pipeline,
    ):
        if port is not None:
            console.print(f"The pages fill while the simulation runs: [bold]{pipeline.url}[/bold]")
        results = simulate(scenario, pipeline, console, out, stop)
        summary.write_files(pipeline, results, out)
        summary.show(results, out, console, output)
        if port is not None:
            console.print(f"\nThe pages stay at [bold]{pipeline.url}[/bold]   (Ctrl-C ends the demo)")
            stop.wait()
    return results.ok


def _expected(days: int) -> str:
    """Return in words how long a demo takes on two free processors (docs/performance.md)."""
    seconds = 5 + 2 * days
    return f"{round(seconds, -1) or 10} seconds" if seconds < 100 else f"{round(seconds / 60)} minutes"


def _fast_folder() -> Path | None:
    """Return a folder in memory with enough room; None for the usual temporary folder. On one disk, the ledger and the
    spools of eight nodes would wait for each other's fsync, as they would not on separate machines."""
    try:
        space = os.statvfs(_MEMORY_FOLDER)
    except OSError:
        return None
    large_enough = space.f_bavail * space.f_frsize >= _LEAST_FREE_BYTES
    return _MEMORY_FOLDER if large_enough and os.access(_MEMORY_FOLDER, os.W_OK | os.X_OK) else None


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise DemoStopped("stopped")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.fields[now]}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        TextColumn("left: about"), TimeRemainingColumn(), console=console, transient=True,
        disable=console.quiet or not console.is_terminal, refresh_per_second=_REFRESH_PER_S,
    )  # fmt: skip
