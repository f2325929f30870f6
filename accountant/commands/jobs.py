"""`jobs`: what jobs cost, or one of them by price and by epoch.

A job may be called as the table prints it, or by the end of that; its id is needed only where that is not enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from accountant.commands import jobtables
from accountant.commands.asking import End, Priced, Printed, Start, connected
from accountant.joblines import Job, JobAnswer, JobsAnswer, JobState
from accountant.near_names import nearest
from accountant.remote import Query, Remote, Unanswered
from agent.output import show

_SHOWN = 5
"""Jobs named in an error that lists what may be meant."""


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(jobs)


@connected
def jobs(
    job: Annotated[
        str | None,
        typer.Argument(help="One job, as the list names it, by the end of that, or by id: prices and epochs."),
    ] = None,
    start: Start = None,
    end: End = None,
    state: Annotated[JobState | None, typer.Option(help="waiting, running or ended.")] = None,
    team: Annotated[list[str] | None, typer.Option(help="Only what these teams pay (repeatable).")] = None,
    namespace: Annotated[list[str] | None, typer.Option(help="Only of these namespaces (repeatable).")] = None,
    user: Annotated[list[str] | None, typer.Option(help="Only what these users ran (repeatable).")] = None,
    output: Printed = "table",
    *,
    at: Priced,
) -> None:
    """Jobs with their GPU-hours, cost so far, burn rate and wait; the most costly first."""
    zone = at.zone
    span: Query = {"start": start, "end": end, "timezone": at.timezone}
    with at.asking() as remote:
        if job is not None:
            one = remote.ask(JobAnswer, f"/v1/jobs/{job if '~' in job else _called(job, remote, span)}", span)
            epochs = _named(jobtables.EPOCH_COLUMNS, jobtables.epoch_rows(one))
            show(output, lambda: jobtables.one(one, zone), one.model_dump(mode="json"), epochs)
            return
        query = {**span, "state": state, "team": team, "namespace": namespace, "user": user}
        whole = _everything(list(remote.pages(JobsAnswer, "/v1/jobs", query)))
    rows = _named(jobtables.JOB_COLUMNS, jobtables.job_rows(whole))
    show(output, lambda: jobtables.many(whole, zone), whole.model_dump(mode="json"), rows)


def _called(name: str, remote: Remote, span: Query) -> str:
    """The id of the one job of the span that is called so. Raises Unanswered, with those that may be meant."""
    known = [job for page in remote.pages(JobsAnswer, "/v1/jobs", span) for job in page.jobs]
    found = sorted(job.id for job in meant(known, name))
    if len(found) == 1:
        return found[0]
    if not found:
        near = nearest(name.rpartition("/")[2], {job.job.rpartition("/")[2] for job in known})
        raise Unanswered(f"no job {name!r} held or asked for a GPU in that time{near} (--start looks further back)")
    shown = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else "")
    raise Unanswered(f"{name!r} may be any of {len(found):,} jobs, say which: {shown}")


def meant(jobs: Iterable[Job], name: str) -> list[Job]:
    """Those whose CLUSTER/NAMESPACE/KIND/NAME ends with the name; the kind may be left out."""
    end = f"/{name.strip('/')}"
    found = []
    for job in jobs:
        place, own = f"/{job.cluster}/{job.namespace}", job.job.rpartition("/")[2]
        if f"{place}/{job.job}".endswith(end) or f"{place}/{own}".endswith(end):
            found.append(job)
    return found


def _everything(pages: list[JobsAnswer]) -> JobsAnswer:
    """The pages as one answer, the most costly job first."""
    found = [one for page in pages for one in page.jobs]
    return pages[-1].model_copy(update={"jobs": tuple(sorted(found, key=_rank)), "next_page": None})


def _rank(job: Job) -> tuple[object, ...]:
    return -(job.cost or 0), -job.accounts_gpu_us.allocated, job.id


def _named(columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[dict[str, object]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]
