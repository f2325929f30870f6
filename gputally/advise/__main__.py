"""Runs `gputally advise` and queries the accountant for the facts.

`main(argv)` returns an exit code: 0 success, 1 failure (a one-line message on stderr, never a traceback), 2 wrong call.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from accountant.cli.connection_options import Server
from accountant.core.periods import parse_instant, zone
from gputally.advise import advice_output as shown
from gputally.advise.advice_output import LedgerQuestions, Window
from gputally.advise.autoscaling_spot_and_sharing import THRESHOLD, Form, RestartAssumptions, rendered
from gputally.advise.autoscaling_spot_and_sharing import pools as by_pool
from gputally.advise.autoscaling_spot_and_sharing import sharing_advice as shares
from gputally.advise.autoscaling_spot_and_sharing import spot_advice as spots
from gputally.base.clock import SystemClock
from gputally.base.command_line import Output, show, with_option_groups
from gputally.base.errors import AccountantError
from gputally.base.untrusted_text import for_terminal
from gputally.server.config_loading import parse_duration

app = typer.Typer(
    help="What the books suggest: nodes, spot capacity, shared GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
Days = Annotated[int, typer.Option(min=1, max=366, help="Length of the window.")]
Until = Annotated[str | None, typer.Option(help="Its end: a date, RFC 3339 or epoch ms (default: now).")]
Zone = Annotated[str, typer.Option(help="IANA zone of the hours of the week.")]
Printed = Annotated[Output, typer.Option("--output", help="How to print it.")]


@app.command()
@with_option_groups
def autoscaler(
    days: Days = 28,
    until: Until = None,
    timezone: Zone = "UTC",
    threshold: Annotated[
        float, typer.Option(help="Part of a node's GPUs that may be held before one more.")
    ] = THRESHOLD,
    format: Annotated[
        Form | None, typer.Option("--format", help="Write the node counts as this instead: a file for the autoscaler.")
    ] = None,
    output: Printed = "table",
    *,
    at: Server,
) -> None:
    """Smallest and largest node count of every pool, by hour of the week, and unused node-hours."""
    with at.connection() as remote:
        books = LedgerQuestions(remote, _window(days, until, timezone))
        rows, coverage = books.node_hours()
        prices = books.prices(sorted({row.pool for row in rows}))
        currency = books.currency()
    try:
        found = by_pool(rows, books.window.lengths, prices, threshold)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if format is not None:
        print(rendered(format, found, threshold, shown.span(books.window)), end="")
        return
    told = (found, books.window, threshold, coverage, currency)
    show(output, lambda: shown.pools(*told), shown.pools_document(*told), shown.pool_records(found))


@app.command()
@with_option_groups
def spot(
    days: Days = 28,
    until: Until = None,
    timezone: Zone = "UTC",
    checkpoint: Annotated[str, typer.Option(help="Time to write a checkpoint.")] = "2m",
    restart: Annotated[str, typer.Option(help="Time from an interruption to work again.")] = "10m",
    interruption_every: Annotated[str, typer.Option(help="Mean time between interruptions of one node.")] = "24h",
    output: Printed = "table",
    *,
    at: Server,
) -> None:
    """List batch jobs that would be cheaper on spot capacity, the best interval between their checkpoints, and the
    saving."""
    assumed = RestartAssumptions(_seconds(checkpoint), _seconds(restart), _seconds(interruption_every))
    with at.connection() as remote:
        books = LedgerQuestions(remote, _window(days, until, timezone))
        report = books.report()
        rows = report["tables"]["spot"]
        found = spots(rows, books.nodes_of(rows), assumed)
    told = (found, books.window, assumed, report["summary"]["currency"])
    show(output, lambda: shown.spots(*told), shown.spots_document(*told), shown.spot_records(found))


@app.command()
@with_option_groups
def sharing(
    days: Days = 28, until: Until = None, timezone: Zone = "UTC", output: Printed = "table", *, at: Server
) -> None:
    """List jobs for which a MIG instance or a part of a time-sliced GPU would be enough, with what they used."""
    with at.connection() as remote:
        books = LedgerQuestions(remote, _window(days, until, timezone))
        report = books.report()
        rows = report["tables"]["hints"]
        found = shares(rows, books.uses_of([row for row in rows if row["kind"] == "slice"]))
    told = (found, books.window, report["summary"]["currency"])
    show(output, lambda: shown.sharings(*told), shown.sharings_document(*told), shown.sharing_records(found))


def _window(days: int, until: str | None, timezone: str) -> Window:
    try:
        end = SystemClock().wall_ms() if until is None else parse_instant(until, zone(timezone))
        return Window.before(end, days, timezone)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _seconds(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not isinstance(seconds, int) or seconds <= 0:
        raise typer.BadParameter(f"{text!r} is no time")
    return float(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        app(args=list(sys.argv[1:] if argv is None else argv), prog_name="gputally advise")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1
    except AccountantError as error:
        for line in str(error).splitlines():
            print(for_terminal(f"gputally advise: {line}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
