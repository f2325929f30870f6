"""The report as a file: of one month, of the month that has just ended, or of any span.

A file appears whole or not at all, for something else may be waiting for it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from accountant import periods
from accountant.commands.asking import End, Priced, Start, connected
from accountant.errors import CannotStart
from accountant.periods import Month
from accountant.remote import Query
from accountant.reports.names import file_name
from accountant.reports.renderings import BINARY, RENDERINGS, Form
from agent import wholefile
from agent.clock import SystemClock
from agent.terminal import Terminal

LAST = "last"
"""What stands for the calendar month before this one."""


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(report)


@connected
def report(
    month: Annotated[str | None, typer.Argument(help="A calendar month: 2026-10; last: the one before this.")] = None,
    start: Start = None,
    end: End = None,
    team: Annotated[str | None, typer.Option(help="One team's report.")] = None,
    format: Annotated[Form, typer.Option(help="Form of the report.")] = "html",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write, or a folder to name it in (default: standard output)."),
    ] = None,
    *,
    at: Priced,
) -> None:
    """The report of a month (or of any span), as a page or as data."""
    if (month is None) == (start is None and end is None):
        raise typer.BadParameter("give a month (2026-10), or --start and --end")
    if month == LAST:
        month = str(before(SystemClock().wall_ms(), at.timezone or "UTC"))
    span: Query = {"month": month} if month is not None else {"start": start, "end": end}
    query = {**span, "team": team, "timezone": at.timezone}
    with at.asking() as remote:
        body = remote.get("/v1/report", {**query, "format": format})
    if output is None and sys.stdout.isatty() and format in BINARY:
        raise CannotStart(f"{format} is no text: name a file with -o, or redirect the output")
    if output is None:
        sys.stdout.buffer.write(body)
        return
    file = output / file_name(RENDERINGS[format].extension, month or "span", team) if output.is_dir() else output
    try:
        wholefile.write(file, body)
    except OSError as error:
        raise CannotStart(f"{file}: {error.strerror}") from error
    Terminal(stderr=True).print(f"{file}  {len(body):,} bytes")


def before(at_ms: int, timezone: str) -> Month:
    """The month that had ended at that instant, in UTC milliseconds. Raises ValueError for an unknown zone."""
    return Month.of(at_ms, periods.zone(timezone)).previous
