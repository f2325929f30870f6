"""Runs `gputally advise`: queries the accountant for the facts, and prints the recommendations as tables and records.

Exit codes: 0 success, 1 failure (a one-line message on stderr, never a traceback), 2 wrong call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from accountant.cli.connection_options import Server
from gputally.advise.autoscaling_spot_and_sharing import (
    THRESHOLD,
    FileFormat,
    RestartAssumptions,
    autoscaler_file,
    pool_advice,
    sharing_advice,
    spot_advice,
)
from gputally.base.clock import SystemClock
from gputally.base.command_options import refuse_ignored, with_option_groups
from gputally.base.command_output import Output, show
from gputally.base.errors import AccountantError
from gputally.server.command_run import run_program

if TYPE_CHECKING:
    from accountant.wire.typed_accountant_client import AccountantClient
    from gputally.advise.advice_tables import Window


app = typer.Typer(
    help="Recommendations from the ledger: nodes, spot capacity, shared GPUs, idle cores.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
Start = Annotated[
    str, typer.Option("--start", "--since", help="Start of the window: 28d before its end, a date or RFC 3339.")
]
End = Annotated[
    str | None,
    typer.Option(help="End of the window: a date, RFC 3339 or 7d ago (default: the accountant's present)."),
]
Zone = Annotated[str, typer.Option(help="IANA time zone of the hours of the week.")]
OutputOption = Annotated[Output, typer.Option("--output", help="Format of the output.")]


@app.command()
@with_option_groups
def autoscaler(
    start: Start = "28d",
    end: End = None,
    timezone: Zone = "UTC",
    threshold: Annotated[
        float, typer.Option(help="Fraction of the GPUs that may be held before another node is needed.")
    ] = THRESHOLD,
    format: Annotated[
        FileFormat | None, typer.Option("--format", help="Print a file for an autoscaler instead of the table.")
    ] = None,
    output: OutputOption = "table",
    *,
    at: Server,
) -> None:
    """Show how many nodes every pool needs by hour of the week, the smallest and largest number, and the unused
    node-hours."""
    from gputally.advise.advice_tables import AdviceQueries, pool_records, pools_document, pools_table, span_text

    if format is not None:
        refuse_ignored("with --format", "output")
    with at.connection() as accountant:
        queries = AdviceQueries(accountant, _window(accountant, start, end, timezone))
        rows, coverage = queries.node_hours()
        prices = queries.prices(sorted({row.pool for row in rows}))
        currency = queries.currency()
    try:
        advised = pool_advice(rows, queries.window.lengths, prices, threshold)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if format is not None:
        print(autoscaler_file(format, advised, threshold, span_text(queries.window)), end="")
        return
    facts = (advised, queries.window, threshold, coverage, currency)
    show(output, lambda: pools_table(*facts), pools_document(*facts), pool_records(advised))


@app.command()
@with_option_groups
def spot(
    start: Start = "28d",
    end: End = None,
    timezone: Zone = "UTC",
    checkpoint: Annotated[str, typer.Option(help="Time to write a checkpoint.")] = "2m",
    restart: Annotated[str, typer.Option(help="Time from an interruption until the job works again.")] = "10m",
    interruption_every: Annotated[str, typer.Option(help="Mean time between interruptions of one node.")] = "24h",
    output: OutputOption = "table",
    *,
    at: Server,
) -> None:
    """List the batch jobs that would be cheaper on spot capacity, with the best interval between checkpoints and the
    saving."""
    from gputally.advise.advice_tables import AdviceQueries, spot_records, spots_document, spots_table

    assumed = RestartAssumptions(_seconds(checkpoint), _seconds(restart), _seconds(interruption_every))
    with at.connection() as accountant:
        queries = AdviceQueries(accountant, _window(accountant, start, end, timezone))
        report = queries.report()
        rows = report["tables"]["spot"]
        advised = spot_advice(rows, queries.nodes_of(rows), assumed)
    facts = (advised, queries.window, assumed, report["summary"]["coverage"], report["summary"]["currency"])
    show(output, lambda: spots_table(*facts), spots_document(*facts), spot_records(advised))


@app.command()
@with_option_groups
def sharing(
    start: Start = "28d", end: End = None, timezone: Zone = "UTC", output: OutputOption = "table", *, at: Server
) -> None:
    """List the jobs for which a MIG instance or a part of a time-sliced GPU would be enough, with what they used."""
    from gputally.advise.advice_tables import AdviceQueries, sharing_document, sharing_records, sharing_table

    with at.connection() as accountant:
        queries = AdviceQueries(accountant, _window(accountant, start, end, timezone))
        report = queries.report()
        rows = report["tables"]["hints"]
        advised = sharing_advice(rows, queries.uses_of([row for row in rows if row["kind"] == "slice"]))
    facts = (advised, queries.window, report["summary"]["coverage"], report["summary"]["currency"])
    show(output, lambda: sharing_table(*facts), sharing_document(*facts), sharing_records(advised))


@app.command()
@with_option_groups
def activity(
    start: Start = "28d", end: End = None, timezone: Zone = "UTC", output: OutputOption = "table", *, at: Server
) -> None:
    """List the jobs that keep GPUs busy but use few of their multiprocessors or tensor cores."""
    from gputally.advise.activity import activity_advice
    from gputally.advise.advice_tables import AdviceQueries, activity_document, activity_records, activity_table

    with at.connection() as accountant:
        queries = AdviceQueries(accountant, _window(accountant, start, end, timezone))
        jobs, coverage = queries.activity()
    advised = activity_advice(jobs)
    facts = (advised, queries.window, coverage)
    show(output, lambda: activity_table(*facts), activity_document(*facts), activity_records(advised))


def _window(accountant: AccountantClient, start: str, end: str | None, timezone: str) -> Window:
    from accountant.core.periods import zone
    from gputally.advise.advice_tables import Window
    from gputally.base.instants import parse_edge

    try:
        here = zone(timezone)
        now_ms = SystemClock().wall_ms()
        end_ms = accountant.clock_ms(now_ms) if end is None else parse_edge(end, here, now_ms)
        return Window.whole_hours(parse_edge(start, here, end_ms), end_ms, timezone)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _seconds(text: str) -> float:
    from gputally.server.config_loading import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not isinstance(seconds, int) or seconds <= 0:
        raise typer.BadParameter(f"{text!r} is not a duration above 0 (write for example 2m)")
    return float(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gputally advise` and return its exit code."""
    return run_program(app, "gputally advise", argv, (AccountantError,))


if __name__ == "__main__":
    sys.exit(main())
