"""`gputally demo`: a cluster for a month, from GPU to bill and weight, in one command.

Loads next to nothing before the other processes are on their way, which have more to load."""

from __future__ import annotations

import argparse
import gc
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from accountant.errors import AccountantError
from accountant.wire import parse_duration
from agent.output import OUTPUTS
from agent.plaintext import for_terminal
from agent.units import BUCKET_MS, MS_PER_SECOND
from fairshare.explain.tracefile import TraceError
from gputally.demo.parts import Parts
from gputally.demo.scenario import DAYS, MOST_DAYS, Options, build
from gputally.demo.workers import spare_collections

_BUCKET_S = BUCKET_MS // MS_PER_SECOND
LOG = "demo.log"
"""Among the files: what agents and accountant have to say goes there, not over the bar."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 where every check holds, 1 where one fails or it cannot run, 2 for a wrong call."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 2
    thresholds = gc.get_threshold()
    interrupt = signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: what was begun is put away
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        log = options.out / LOG
        log.write_text("", encoding="utf-8")
        with Parts(log) as parts:
            return _run(options, parts)
    except (TraceError, AccountantError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or options.out}: {error.strerror or error}")
    except KeyboardInterrupt:
        return _fail("stopped")
    finally:
        signal.signal(signal.SIGTERM, interrupt)
        gc.set_threshold(*thresholds)


def _run(options: argparse.Namespace, parts: Parts) -> int:
    from agent.terminal import Terminal
    from gputally.demo.running import run

    spare_collections()
    scenario = build(Options(options.days, options.interval, options.seed, options.trace))
    console = Terminal(quiet=options.quiet, markup=True, stderr=options.output != "table")
    port = None if options.once else options.port
    return 0 if run(scenario, parts, options.out, port, console, options.output) else 1


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    made = argparse.ArgumentParser(
        prog="gputally demo",
        description="Simulate a cluster of 64 GPUs through the real agents, accountant and controller.",
    )
    made.add_argument("--days", type=_days, help=f"length of the run (default: {DAYS}, or as long as the trace)")
    made.add_argument(
        "--interval", type=_interval, default=_BUCKET_S, help="metering interval, must divide 15m (default: 15m)"
    )
    made.add_argument("--seed", type=int, default=1, help="of the workload and of the faults (default: 1)")
    made.add_argument("--trace", type=Path, help="replay a job trace instead (CSV, CSV.gz, Parquet; docs/traces.md)")
    made.add_argument("--out", type=Path, default=Path("demo-out"), help="folder of the files (default: ./demo-out)")
    made.add_argument("--port", type=_port, default=8080, help="of the accountant's pages (default: 8080)")
    made.add_argument("--once", action="store_true", help="exit when done; the pages do not stay up")
    made.add_argument("--quiet", action="store_true", help="print nothing but errors")
    made.add_argument("--output", choices=OUTPUTS, default="table", help="how to print the summary; csv: by team")
    return made


def _days(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of days from 1 to {MOST_DAYS}")
    return int(text)


def _interval(text: str) -> int:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(seconds, int) or seconds <= 0 or _BUCKET_S % seconds:
        raise argparse.ArgumentTypeError(f"{text!r} does not divide 15 minutes")
    return seconds


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _fail(reason: str) -> int:
    for line in reason.splitlines():
        print(for_terminal(f"gputally demo: {line}"), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
