"""Runs `gputally demo`: parses its options, runs the simulation with a progress bar, and serves the pages.

The module imports few libraries, so that the worker processes, which import more, start early."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from accountant.core.periods import utc
from fairshare.simulator.job_traces import TraceError
from gputally.base.command_output import OUTPUTS, Output, Terminal
from gputally.base.errors import AccountantError
from gputally.base.units import BUCKET_MS, MS_PER_SECOND
from gputally.base.untrusted_text import for_terminal
from gputally.demo import results as summary
from gputally.demo.pipeline import Pipeline
from gputally.demo.results import Results, collect
from gputally.demo.scenario import DAYS, MOST_DAYS, Options, Scenario, build
from gputally.demo.worker_processes import NICE, Worker, WorkerProcesses, encode_call, freeze_garbage_collector
from gputally.server.config_loading import duration_seconds

_BUCKET_S = BUCKET_MS // MS_PER_SECOND
LOG = "demo.log"
"""Name of the log file of the agents and the accountant, whose lines would otherwise overwrite the progress bar."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Return 0 if every check passes, 1 if one fails or the demo cannot run, 2 for a wrong call."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 2
    thresholds = gc.get_threshold()
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        log = options.out / LOG
        log.write_text("", encoding="utf-8")
        with closing(WorkerProcesses(log)) as processes:
            return _run(options, processes)
    except (TraceError, AccountantError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or options.out}: {error.strerror or error}")
    except KeyboardInterrupt:
        return _fail("stopped")
    finally:
        signal.signal(signal.SIGTERM, handler)
        gc.set_threshold(*thresholds)


def _run(options: argparse.Namespace, processes: WorkerProcesses) -> int:
    freeze_garbage_collector()
    scenario = build(Options(options.days, options.interval, options.seed, options.trace))
    console = Terminal(quiet=options.quiet, markup=True, stderr=options.output != "table")
    port = None if options.once else options.port
    return 0 if run(scenario, processes, options.out, port, console, options.output) else 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    arguments = argparse.ArgumentParser(
        prog="gputally demo",
        description="Simulate a cluster of 64 GPUs through the real agents, accountant and controller.",
    )
    arguments.add_argument(
        "--days", type=_days, help=f"number of days to simulate (default: {DAYS}, or as long as the trace)"
    )
    arguments.add_argument(
        "--interval", type=_interval, default=_BUCKET_S, help="metering interval that divides 15m (default: 15m)"
    )
    arguments.add_argument("--seed", type=int, default=1, help="seed of the workload and of the faults (default: 1)")
    arguments.add_argument("--trace", type=Path, help="trace file to replay instead of generated jobs (docs/traces.md)")
    arguments.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder of the files (default: ./demo-out)"
    )
    arguments.add_argument("--port", type=_port, default=8080, help="port of the accountant's pages (default: 8080)")
    arguments.add_argument("--once", action="store_true", help="exit after the run instead of serving the pages")
    arguments.add_argument("--quiet", action="store_true", help="print nothing but errors")
    arguments.add_argument(
        "--output", choices=OUTPUTS, default="table", help="format of the summary; csv has a line per team"
    )
    return arguments


def _days(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of days from 1 to {MOST_DAYS}")
    return int(text)


def _interval(text: str) -> int:
    try:
        seconds = duration_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if seconds <= 0 or _BUCKET_S % seconds:
        raise argparse.ArgumentTypeError(f"{text!r} does not divide 15 minutes; write for example 1m, 5m or 15m")
    return seconds


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def _fail(reason: str) -> int:
    for line in reason.splitlines():
        print(for_terminal(f"gputally demo: {line}"), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

BASELINE = "gputally.demo.scenario:Baseline"
_REFRESH_PER_S = 2
"""Refreshes of the progress bar per second. Each takes processor time from the workers."""

_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - the folder made in it is this process's own
_LEAST_FREE_BYTES = 2 * 1024**3


def simulate(scenario: Scenario, pipeline: Pipeline, console: Console, folder: Path) -> Results:
    """Run the demo with its progress bar, and at the same time, in a separate process, the same jobs under static
    weights. On return, the accountant has begun to write its files into `folder`."""
    began = time.monotonic()
    with (
        closing(Worker("the run under static weights", BASELINE, nice=2 * NICE)) as static,
        _progress(console) as progress,
    ):
        static.start(scenario)
        static.send(encode_call("totals"))
        task = progress.add_task("", total=scenario.days * 24, now=utc(scenario.start_ms))

        def hour_passed(now_ms: int) -> None:
            progress.update(task, advance=1, now=utc(now_ms))

        pipeline.run(hour_passed)
        progress.update(task, now="the month's report, and the same jobs under static weights")
        figures = pipeline.figures()
        pipeline.write_files(folder)
        before = static.result()
    return collect(pipeline, figures, before, time.monotonic() - began)


def run(
    scenario: Scenario,
    processes: WorkerProcesses,
    out: Path,
    port: int | None,
    console: Console,
    output: Output = "table",
) -> bool:
    """Run the demo, then serve its pages until the user interrupts it. Return True if every check passes.

    port: 0 for any free port; None to serve no pages."""
    gpus = sum(len(node.gpus) for node in scenario.nodes)
    console.print(
        f"{len(scenario.nodes)} nodes, {gpus} GPUs, {len(scenario.policy.queues)} teams, {len(scenario.jobs):,} jobs, "
        f"{scenario.days} days from {utc(scenario.start_ms)[:10]}; seed {scenario.seed}"
    )
    with (
        tempfile.TemporaryDirectory(prefix="gputally-demo-", dir=_fast_folder()) as folder,
        Pipeline(scenario, Path(folder), port or 0, processes=processes, scratch=True) as pipeline,
    ):
        results = simulate(scenario, pipeline, console, out)
        summary.write_files(pipeline, results, out)
        summary.show(results, out, console, output)
        if port is not None:
            console.print(f"\nThe accountant's pages: [bold]{pipeline.url}[/bold]   (Ctrl-C ends the demo)")
            _until_interrupted()
    return results.ok


def _fast_folder() -> Path | None:
    """Return a folder in memory with enough room; None for the usual temporary folder. On one disk, the ledger and the
    spools of eight nodes would wait for each other's fsync, as they would not on separate machines."""
    try:
        space = os.statvfs(_MEMORY_FOLDER)
    except OSError:
        return None
    large_enough = space.f_bavail * space.f_frsize >= _LEAST_FREE_BYTES
    return _MEMORY_FOLDER if large_enough and os.access(_MEMORY_FOLDER, os.W_OK | os.X_OK) else None


def _until_interrupted() -> None:
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.fields[now]}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        console=console, transient=True, refresh_per_second=_REFRESH_PER_S,
    )  # fmt: skip
