"""Runs `gputally demo`: parses its options and starts the worker processes, which load their libraries while this
process loads `gputally.demo.session`."""

from __future__ import annotations

import argparse
import gc
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from gputally.base.background_tasks import set_on_signals
from gputally.base.command_output import OUTPUTS
from gputally.base.errors import AccountantError, FairshareError
from gputally.base.units import BUCKET_MS, MS_PER_SECOND
from gputally.base.untrusted_text import for_terminal
from gputally.demo.options import DAYS, MOST_DAYS, DemoOptions
from gputally.demo.worker_processes import WorkerProcesses, freeze_garbage_collector

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
    # An exception from a handler could leave half a message in a pipe, for the rest of which a worker waits for ever.
    stop = threading.Event()
    restore = set_on_signals(stop)
    try:
        if options.serve is not None:
            return _serve(options, stop)
        ledger = options.to / "ledger.duckdb"
        if ledger.exists() and not options.replace:
            return _fail(
                f"{ledger} is the ledger of an earlier demo: open it with --serve {options.to}, name another folder"
                " with --to, or overwrite it with --replace"
            )
        options.to.mkdir(parents=True, exist_ok=True)
        log = options.to / LOG
        log.write_text("", encoding="utf-8")
        with closing(WorkerProcesses(log)) as processes:
            return _run(options, processes, stop)
    except (FairshareError, AccountantError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or options.to}: {error.strerror or error}")
    finally:
        restore()
        gc.set_threshold(*thresholds)


def _run(options: argparse.Namespace, processes: WorkerProcesses, stop: threading.Event) -> int:
    # Imported here, because the worker processes then load their libraries at the same time.
    from gputally.base.terminal import Terminal
    from gputally.demo import session
    from gputally.demo.scenario import build

    freeze_garbage_collector()
    scenario = build(DemoOptions(options.days, options.interval, options.seed, options.trace))
    console = Terminal(quiet=options.quiet, markup=True, stderr=options.output != "table")
    port = None if options.once else options.port
    return 0 if session.run(scenario, processes, options.to, port, console, stop, options.output) else 1


def _serve(options: argparse.Namespace, stop: threading.Event) -> int:
    from gputally.base.terminal import Terminal
    from gputally.demo.finished import serve_finished
    from gputally.server import logs_and_metrics

    logs_and_metrics.configure("error")
    serve_finished(options.serve, options.port, Terminal(quiet=options.quiet, markup=True), stop.wait)
    return 0


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
        "--to", type=Path, default=Path("demo-out"), help="folder of the files (default: ./demo-out)"
    )
    arguments.add_argument(
        "--replace", action="store_true", help="overwrite the ledger and the files of an earlier demo in that folder"
    )
    arguments.add_argument(
        "--serve",
        type=Path,
        metavar="FOLDER",
        help="serve the finished demo in this folder again, and simulate nothing",
    )
    arguments.add_argument("--port", type=_port, default=8080, help="port of the pages (default: 8080)")
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
    from gputally.base.instants import duration_seconds

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
