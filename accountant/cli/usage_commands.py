"""Runs `usage`, `cost`, `check`, `report` and `jobs`.

Output files are written atomically, because another program may be waiting for them. A job can be named as the table
shows it or by a suffix of that name; the full id is needed only if the suffix is ambiguous."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from accountant.cli.connection_options import (
    End,
    Grouping,
    Ledger,
    Priced,
    Printed,
    Start,
    ZonedLedger,
    print_answer,
    write_file,
)
from accountant.reports.output_formats import READABLE, RENDERINGS, Form, file_name
from accountant.wire.option_types import JobState
from gputally.base.clock import SystemClock
from gputally.base.command_options import with_option_groups
from gputally.base.command_output import show
from gputally.base.errors import CannotStart
from gputally.base.file_formats import format_of_file

if TYPE_CHECKING:
    from accountant.core.periods import Month
    from gputally.base.accountant_connection import Query


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
@with_option_groups
def usage(output: Printed = "table", *, wanted: Grouping, at: ZonedLedger) -> None:
    """Show GPU-hours by account and group."""
    from accountant.cli import terminal_tables
    from accountant.wire.usage_cost_and_job_models import UsageAnswer

    with at.connection() as remote:
        found = remote.whole(UsageAnswer, "/v1/usage", _query(wanted, at.timezone))
    print_answer(output, found, lambda usage: terminal_tables.usage_table(usage, at.zone), found.lines)


@app.command()
@with_option_groups
def cost(output: Printed = "table", *, wanted: Grouping, at: Priced) -> None:
    """Show the exact cost by group."""
    from accountant.cli import terminal_tables
    from accountant.wire.usage_cost_and_job_models import CostAnswer

    with at.connection() as remote:
        found = remote.whole(CostAnswer, "/v1/cost", _query(wanted, at.timezone))
    print_answer(output, found, lambda cost: terminal_tables.cost_table(cost, at.zone), found.lines)


@app.command()
@with_option_groups
def check(
    output: Printed = "table",
    *,
    lake: Annotated[bool, Option("--lake", help="Also compare the lake with the ledger.")] = False,
    at: Ledger,
) -> None:
    """Recompute the accounts from the rows; exit 1 unless every GPU-microsecond is in exactly one account."""
    from accountant.api.bookkeeping_models import Balance
    from accountant.cli import terminal_tables

    balance = at.ask(Balance, "/v1/check", {"lake": "true"} if lake else {})
    print_answer(output, balance, terminal_tables.balance_table)
    if balance.imbalance_gpu_us or balance.month_faults or balance.lake_differences:
        raise typer.Exit(1)


def _query(wanted: Grouping, timezone: str | None) -> Query:
    filters = {f"where.{dimension}": values for dimension, values in wanted.filters.items()}
    return {"by": wanted.by, "start": wanted.start, "end": wanted.end, "timezone": timezone, **filters}


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
        Form | None, Option(help="File format of the report (default: by the ending of --to, otherwise html).")
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
    form: Form = format or "html"
    if to is not None and not to.is_dir():
        form = format_of_file(to, {each: RENDERINGS[each].extension for each in RENDERINGS}, format, "html")
    if to is None and sys.stdout.isatty() and form not in READABLE:
        raise CannotStart(f"{form} is no format for a terminal: name a file with --to, or redirect the output")
    with at.connection() as remote:
        body = remote.get("/v1/report", {**query, "format": form})
    if to is None:
        sys.stdout.buffer.write(body)
        return
    file = to / file_name(RENDERINGS[form].extension, month or "span", team) if to.is_dir() else to
    write_file(file, body)
    Terminal(stderr=True).print(f"{file}  {len(body):,} bytes")


def before(at_ms: int, timezone: str) -> Month:
    """The calendar month before the one that contains `at_ms`. Raises ValueError for an unknown time zone."""
    from accountant.core import periods
    from accountant.core.periods import Month

    return Month.of(at_ms, periods.zone(timezone)).previous


@app.command()
@with_option_groups
def jobs(
    job: Annotated[
        str | None,
        Argument(
            help="One job to show with its prices and epochs: its name in the list, the end of that name, or its id."
        ),
    ] = None,
    start: Start = None,
    end: End = None,
    state: Annotated[JobState | None, Option(help="Only jobs in this state.")] = None,
    team: Annotated[list[str] | None, Option(help="Only jobs that this team pays for (repeatable).")] = None,
    namespace: Annotated[list[str] | None, Option(help="Only jobs of this namespace (repeatable).")] = None,
    user: Annotated[list[str] | None, Option(help="Only jobs of this user (repeatable).")] = None,
    output: Printed = "table",
    *,
    at: Priced,
) -> None:
    """List jobs with their GPU-hours, cost so far, burn rate and wait; the highest cost first."""
    from accountant.cli.job_tables import called, epoch_record, job_record, jobs_table, print_job, rank
    from accountant.wire.usage_cost_and_job_models import JobAnswer, JobsAnswer

    zone = at.zone
    span: Query = {"start": start, "end": end, "timezone": at.timezone}
    with at.connection() as remote:
        if job is not None:
            job_answer = remote.ask(JobAnswer, f"/v1/jobs/{job if '~' in job else called(job, remote, span)}", span)
            epochs = [epoch_record(job_answer, line) for line in job_answer.epochs]
            show(output, lambda: print_job(job_answer, zone), job_answer.model_dump(mode="json"), epochs)
            return
        query = {**span, "state": state, "team": team, "namespace": namespace, "user": user}
        answer = remote.whole(JobsAnswer, "/v1/jobs", query)
    sorted_answer = answer.model_copy(update={"jobs": tuple(sorted(answer.jobs, key=rank))})
    rows = [job_record(job, answer.currency) for job in sorted_answer.jobs]
    show(output, lambda: jobs_table(sorted_answer, zone), sorted_answer.model_dump(mode="json"), rows)
