"""A run with its progress bar, its files and its summary: what `gputally demo` does once it knows what is wanted."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from accountant.periods import utc
from agent.output import Output
from gputally.demo import summary
from gputally.demo.crew import NICE
from gputally.demo.parts import Parts
from gputally.demo.pipeline import Pipeline
from gputally.demo.results import Results, collect
from gputally.demo.scenario import Scenario
from gputally.demo.workers import Worker, order

BASELINE = "gputally.demo.scenario:Baseline"
_DRAWN_PER_S = 2
"""Of the progress bar: drawing takes turns from those who work."""

_IN_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder made in it is this process's own
_ROOM_BYTES = 2 * 1024**3


def simulate(scenario: Scenario, pipeline: Pipeline, console: Console, folder: Path) -> Results:
    """The run with its progress bar; beside it, in a process of its own, the same jobs under static weights.

    When it is over the accountant has begun to write its files into `folder`."""
    began = time.monotonic()
    with (
        closing(Worker("the run under static weights", BASELINE, nice=2 * NICE)) as static,
        _progress(console) as progress,
    ):
        static.start(scenario)
        static.tell(order("books"))
        task = progress.add_task("", total=scenario.days * 24, now=utc(scenario.start_ms))

        def passed(now_ms: int) -> None:
            progress.update(task, advance=1, now=utc(now_ms))

        pipeline.run(passed)
        progress.update(task, now="the month's report, and the same jobs under static weights")
        figures = pipeline.figures()
        pipeline.write_files(folder)
        before = static.answer()
    return collect(pipeline, figures, before, time.monotonic() - began)


def run(
    scenario: Scenario, parts: Parts, out: Path, port: int | None, console: Console, output: Output = "table"
) -> bool:
    """Run it with its pages on `port` (0: any free one) until somebody interrupts, None: as long as it takes. Whether
    every check holds."""
    gpus = sum(len(node.gpus) for node in scenario.nodes)
    console.print(
        f"{len(scenario.nodes)} nodes, {gpus} GPUs, {len(scenario.policy.queues)} teams, {len(scenario.jobs):,} jobs, "
        f"{scenario.days} days from {utc(scenario.start_ms)[:10]}; seed {scenario.seed}"
    )
    with (
        tempfile.TemporaryDirectory(prefix="gputally-demo-", dir=_quick_disk()) as folder,
        Pipeline(scenario, Path(folder), port or 0, parts=parts, scratch=True) as pipeline,
    ):
        results = simulate(scenario, pipeline, console, out)
        summary.write_files(pipeline, results, out)
        summary.show(results, out, console, output)
        if port is not None:
            console.print(f"\nThe accountant's pages: [bold]{pipeline.url}[/bold]   (Ctrl-C ends the demo)")
            _until_interrupted()
    return results.ok


def _quick_disk() -> Path | None:
    """A file system in memory, if there is one with room: nine ledgers and spools on one disk would wait for each
    other's fsync, which nine machines do not. None: the usual place for temporary files."""
    try:
        space = os.statvfs(_IN_MEMORY)
    except OSError:
        return None
    roomy = space.f_bavail * space.f_frsize >= _ROOM_BYTES
    return _IN_MEMORY if roomy and os.access(_IN_MEMORY, os.W_OK | os.X_OK) else None


def _until_interrupted() -> None:
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.fields[now]}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        console=console, transient=True, refresh_per_second=_DRAWN_PER_S,
    )  # fmt: skip
