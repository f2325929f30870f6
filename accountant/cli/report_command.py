"""Runs `report`. It is a module of its own, because its help lists the formats that are installed.

Output files are written atomically, because another program may be waiting for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from typer import Argument, Option

from accountant.cli.connection_options import End, Priced, Start, write_file
from accountant.exports.format_names import Format
from accountant.exports.protocol import default_format, exports, file_name
from gputally.base.clock import SystemClock
from gputally.base.command_options import with_option_groups
from gputally.base.errors import CannotStart
from gputally.base.file_formats import format_of_file

if TYPE_CHECKING:
    from accountant.core.periods import Month
    from gputally.base.accountant_connection import Query


app = typer.Typer(add_completion=False, rich_markup_mode=None)
_DEFAULT: Final = default_format("html")
LAST = "last"
"""Stands for the calendar month before the current one."""


@app.command()
@with_option_groups
def report(
    month: Annotated[str | None, Argument(help="A calendar month (2026-10), or `last` for the previous one.")] = None,
    start: Start = None,
    end: End = None,
    team: Annotated[str | None, Option(help="Report of this team only (default: the whole cluster).")] = None,
    format: Annotated[
        Format | None, Option(help=f"File format of the report (default: by the ending of --to, otherwise {_DEFAULT}).")
    ] = None,
    to: Annotated[
        Path | None,
        Option(
            help="File to write, or folder in which to make the file (default: standard output). The ending of a "
            "file's name is its format.",
        ),
    ] = None,
    *,
    at: Priced,
) -> None:
    """Write the report of a month (or of any span), as a page or as data."""
    from gputally.base.terminal import Terminal

    if (month is None) == (start is None and end is None):
        raise typer.BadParameter("give a month (2026-10), or --start and --end")
    if month == LAST:
        month = str(before(SystemClock().wall_ms(), at.timezone or "UTC"))
    span: Query = {"month": month} if month is not None else {"start": start, "end": end}
    query = {**span, "team": team, "timezone": at.timezone}
    form = format or _DEFAULT
    if to is not None and not to.is_dir():
        form = format_of_file(to, {name: export.suffix for name, export in exports().items()}, format, _DEFAULT)
    if to is None and sys.stdout.isatty() and not exports()[form].readable:
        raise CannotStart(f"{form} is no format for a terminal: name a file with --to, or redirect the output")
    with at.connection() as remote:
        body = remote.get("/v1/report", {**query, "format": form})
    if to is None:
        sys.stdout.buffer.write(body)
        return
    file = to / file_name(exports()[form].suffix, month or "span", team) if to.is_dir() else to
    write_file(file, body)
    Terminal(stderr=True).print(f"{file}  {len(body):,} bytes")


def before(at_ms: int, timezone: str) -> Month:
    """The calendar month before the one that contains `at_ms`. Raises ValueError for an unknown time zone."""
    from accountant.core import periods
    from accountant.core.periods import Month

    return Month.of(at_ms, periods.zone(timezone)).previous
