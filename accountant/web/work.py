"""The pages of work: `/jobs`, and `/job/…` with the timeline of its GPUs, its price, its epochs and what stopped it."""

from __future__ import annotations

import asyncio
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from accountant import periods
from accountant.api.access import Reading, teams_asked
from accountant.api.conditional import tagged
from accountant.api.deps import Deps, Given
from accountant.api.known import check_teams, nearest_jobs
from accountant.api.params import Params, invalid
from accountant.api.problems import Refusal
from accountant.joblines import Job, JobAnswer, JobState
from accountant.near_names import shown
from accountant.progress import JobKey
from accountant.web import asking, pages, reasons, views
from accountant.web.about import about, gangs_of
from accountant.web.asking import recorded_of, records
from accountant.web.deciding import address
from accountant.web.paging import paged
from accountant.web.timeline import Timeline, drawn, timeline
from accountant.wire import Decision
from accountant.work import jobs
from agent.units import MS_PER_DAY

router = APIRouter(include_in_schema=False)
JOBS_A_PAGE = 100
MOST_DECISIONS = 500
_TIMELINE_MS = 31 * MS_PER_DAY
"""Of a job that runs for longer, the timeline shows the end."""


class JobsParams(Params):
    month: str | None = None
    team: str | None = Field(default=None, max_length=253)
    state: JobState | None = None
    page: int = Field(default=1, ge=1, le=10_000)


@router.get("/jobs")
async def listed(request: Request, asked: Annotated[JobsParams, Query()], deps: Given, principal: Reading) -> Response:
    tz = periods.zone(deps.settings.timezone)
    at = deps.clock.wall_ms()
    month = (
        periods.month_with_records(at, deps.newest_ms(), tz)
        if asked.month is None
        else pages.begun(asked.month, at, tz)
    )
    where = teams_asked(principal, () if asked.team is None else (asked.team,))

    def make() -> bytes:
        check_teams(deps, principal, () if asked.team is None else (asked.team,))
        answer = asking.jobs_of(deps, month, where)
        chosen = answer.value.get(asked.state, views.NO_JOBS)
        query = asked.model_dump(exclude_none=True) | {"month": str(month)}
        address = "/jobs?" + urlencode({name: value for name, value in query.items() if name != "page"}) + "&page="
        return pages.page(
            request, "/jobs", "jobs.html", deps, month=month, team=asked.team, state=asked.state, jobs=chosen,
            shown=paged(chosen.dearest, asked.page, JOBS_A_PAGE, address, chosen.count), currency=_currency(deps),
            utilisation=views.utilisation, as_of_ms=answer.as_of_ms,
            following=month.next if month.next.span(tz)[0] < at else None,
            demand_known=deps.settings.kubernetes.inventory, recorded=recorded_of(deps, month),
        )  # fmt: skip

    return tagged(request, await asyncio.to_thread(make), pages.HTML)


@router.get("/job/{id:path}")
async def one(request: Request, id: str, deps: Given, principal: Reading) -> Response:
    try:
        key = JobKey.parse(id)
    except ValueError as error:
        raise invalid("id", str(error)) from error
    at, timezone = deps.clock.wall_ms(), deps.settings.timezone
    where = teams_asked(principal, ())

    def make() -> bytes:
        with deps.ledger.moment(0, at) as moment:
            found = jobs.job(moment, deps.book(), key, (None, at), at, where or None, timezone)
            if found is None:
                near = nearest_jobs(deps, principal, key)
                told = f"no job {shown(id)} held a GPU or had pods, for this caller{near}"
                raise Refusal("not-found", told)
            begin, end = _shown_span(found.job, found.start_ms, at)
            filters = {**where, **jobs.alone(key)}
            strips, _ = timeline(moment, begin, end, filters, timezone)
            names = {pod.facts.name for pod in moment.pods(0, at, of={key})}
            siblings = moment.jobs_in(key.cluster, key.namespace)
        begun = deps.ledger.decisions(found.start_ms, at + 1, MOST_DECISIONS, kind="preemption", gang=gangs_of(key))
        decided = about(begun, key, names, siblings)
        waiting = found.job.state == "waiting"
        held = reasons.shares(records(deps.ledger, at), found.job.queues) if waiting else []
        return _job_page(request, deps, found, strips, decided, held, everyone=principal.teams is None)

    return tagged(request, await asyncio.to_thread(make), pages.HTML)


def _job_page(
    request: Request,
    deps: Deps,
    found: JobAnswer,
    strips: Timeline,
    decided: list[Decision],
    shares: list[reasons.Share],
    *,
    everyone: bool,
) -> bytes:
    """everyone: the reader may see what is said of other teams, so the decisions' own pages too."""
    title = f"What each GPU did for {found.job.job}"
    return pages.page(
        request, "/jobs", "job.html", deps, found=found, job=found.job, strips=strips, decided=decided, shares=shares,
        timeline=drawn(strips, title) if strips.strips else "", utilisation=views.utilisation, currency=found.currency,
        address=address if everyone else None,
    )  # fmt: skip


def _shown_span(job: Job, start_ms: int, now_ms: int) -> tuple[int, int]:
    """Of the timeline: the job's life, and of a long one the end."""
    end = job.held_until_ms if job.state == "ended" and job.held_until_ms is not None else now_ms
    end = max(end, start_ms + 1)
    return max(start_ms, end - _TIMELINE_MS), end


def _currency(deps: Deps) -> str | None:
    book = deps.book()
    return book.currency if book is not None else None
