"""`jobs`: what jobs cost, or one of them by price and by epoch."""

from __future__ import annotations

import csv
import sys
from typing import Annotated, Literal

import typer
from rich.console import Console

from accountant.commands import jobtables
from accountant.commands.asking import End, Priced, Start, connected
from accountant.joblines import Job, JobAnswer, JobsAnswer, JobState
from accountant.remote import Query


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(jobs)


@connected
def jobs(
    job: Annotated[
        str | None, typer.Argument(help="One job, CLUSTER~NAMESPACE~KIND~NAME: its prices and epochs.")
    ] = None,
    start: Start = None,
    end: End = None,
    state: Annotated[JobState | None, typer.Option(help="waiting, running or ended.")] = None,
    team: Annotated[list[str] | None, typer.Option(help="Only what these teams pay (repeatable).")] = None,
    namespace: Annotated[list[str] | None, typer.Option(help="Only of these namespaces (repeatable).")] = None,
    user: Annotated[list[str] | None, typer.Option(help="Only what these users ran (repeatable).")] = None,
    format: Annotated[
        Literal["table", "json", "csv"], typer.Option("--format", help="How to print the answer.")
    ] = "table",
    *,
    at: Priced,
) -> None:
    """Jobs with their GPU-hours, cost so far, burn rate and wait; the most costly first."""
    zone = at.zone
    span: Query = {"start": start, "end": end, "timezone": at.timezone}
    with at.asking() as remote:
        if job is not None:
            one = remote.ask(JobAnswer, f"/v1/jobs/{job}", span)
            if format == "table":
                Console().print(jobtables.one(one, zone))
            elif format == "json":
                typer.echo(one.model_dump_json(indent=2))
            else:
                _write_csv(jobtables.EPOCH_COLUMNS, jobtables.epoch_rows(one))
            return
        query = {**span, "state": state, "team": team, "namespace": namespace, "user": user}
        whole = _everything(list(remote.pages(JobsAnswer, "/v1/jobs", query)))
    if format == "table":
        Console().print(jobtables.many(whole, zone))
    elif format == "json":
        typer.echo(whole.model_dump_json(indent=2))
    else:
        _write_csv(jobtables.JOB_COLUMNS, jobtables.job_rows(whole))


def _everything(pages: list[JobsAnswer]) -> JobsAnswer:
    """The pages as one answer, the most costly job first."""
    found = [one for page in pages for one in page.jobs]
    return pages[-1].model_copy(update={"jobs": tuple(sorted(found, key=_rank)), "next_page": None})


def _rank(job: Job) -> tuple[object, ...]:
    return -(job.cost or 0), -job.accounts_gpu_us.allocated, job.id


def _write_csv(columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(columns)
    out.writerows(rows)
