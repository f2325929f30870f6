"""Serves the job pages, with the decisions that concern a job.

Decisions name gangs, whose names are `<job>` or `<job>-<suffix>`. KAI adds the prefix `pg-`, and Kueue the kind of the
job. A record about a victim lists its pods, which identify the job exactly. A record about a workload that claims GPUs
has no pods yet. It is assigned to the job with the longest matching name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from accountant.api.access_control import Reading, teams_asked
from accountant.api.dependencies import Deps, Given
from accountant.api.problems import Refusal
from accountant.api.query_parameters import Params, check_teams, invalid, nearest_jobs
from accountant.billing import job_costs
from accountant.core import periods
from accountant.core.errors import shown
from accountant.ledger.protocols import JobKey
from accountant.web import overview_pages, page_queries, page_rows
from accountant.web.node_pages import Timeline, timeline, timeline_svg
from accountant.web.overview_pages import address
from accountant.web.page_queries import recorded_of, records
from accountant.web.page_rows import paged
from accountant.wire import decision_text
from accountant.wire.policy_models import Decision
from accountant.wire.usage_models import Job, JobAnswer, JobState
from gputally.base.units import MS_PER_DAY


def gangs_of(key: JobKey) -> tuple[str, ...]:
    """The beginnings of the names of the job's gangs: namespace/name."""
    return tuple(f"{key.namespace}/{name}" for name in _names(key.job))


def decisions_about_job(
    decisions: Iterable[Decision], key: JobKey, pods: Collection[str], siblings: Collection[str]
) -> list[Decision]:
    """The decisions about the job, in the given order.

    pods: names of its pods.
    siblings: jobs of the same cluster and namespace, as in JobKey."""
    mine = {f"{key.namespace}/{name}" for name in pods}
    jobs = sorted({key.job, *siblings}, key=lambda job: (-len(_name(job)), job != key.job, job))
    return [one for one in decisions if _is_about(one, key, mine, jobs)]


def _is_about(one: Decision, key: JobKey, pods: Collection[str], jobs: Iterable[str]) -> bool:
    """Tell whether a decision is about this job. jobs: the longest name first, the job itself before others of its
    name."""
    named = one.subject.partition("/")[2]
    if named == f"{key.namespace}/{_name(key.job)}":
        return True
    victims = [name for name in decision_text.as_list(one.inputs.get("pods")) if isinstance(name, str)]
    if victims:
        return any(name in pods for name in victims)
    begin = f"{key.namespace}/"
    if not named.startswith(begin):
        return False
    return next((job for job in jobs if _is_of(named.removeprefix(begin), job)), None) == key.job


def _is_of(gang: str, job: str) -> bool:
    return any(gang == name or gang.startswith(f"{name}-") for name in _names(job))


def _names(job: str) -> tuple[str, ...]:
    kind, name = job.partition("/")[0], _name(job)
    return name, f"pg-{name}", f"{kind.lower()}-{name}"


def _name(job: str) -> str:
    """The name without the kind."""
    return job.partition("/")[2] or job


router = APIRouter(include_in_schema=False)
JOBS_A_PAGE = 100
MOST_DECISIONS = 500
_TIMELINE_MS = 31 * MS_PER_DAY
"""Longest timeline; for a longer job the timeline shows the last part."""


class JobsParams(Params):
    month: str | None = None
    team: str | None = Field(default=None, max_length=253)
    state: JobState | None = None
    page: int = Field(default=1, ge=1, le=10_000)


@router.get("/jobs")
def listed(request: Request, asked: Annotated[JobsParams, Query()], deps: Given, principal: Reading) -> Response:
    tz = periods.zone(deps.settings.timezone)
    at = deps.clock.wall_ms()
    month = (
        periods.month_with_records(at, deps.newest_ms(), tz)
        if asked.month is None
        else overview_pages.asked_month(asked.month, at, tz)
    )
    where = teams_asked(principal, () if asked.team is None else (asked.team,))
    check_teams(deps, principal, () if asked.team is None else (asked.team,))
    answer = page_queries.jobs_of(deps, month, where)
    chosen = answer.value.get(asked.state, page_rows.NO_JOBS)
    query = asked.model_dump(exclude_none=True) | {"month": str(month)}
    address = "/jobs?" + urlencode({name: value for name, value in query.items() if name != "page"}) + "&page="
    return overview_pages.page(
        request, "/jobs", "jobs.html", deps, month=month, team=asked.team, state=asked.state, jobs=chosen,
        shown=paged(chosen.dearest, asked.page, JOBS_A_PAGE, address, chosen.count), currency=_currency(deps),
        utilisation=page_rows.utilisation, as_of_ms=answer.as_of_ms,
        following=month.next if month.next.span(tz)[0] < at else None,
        demand_known=deps.settings.kubernetes.inventory, recorded=recorded_of(deps, month),
    )  # fmt: skip


@router.get("/job/{id:path}")
def one(request: Request, id: str, deps: Given, principal: Reading) -> Response:
    try:
        key = JobKey.parse(id)
    except ValueError as error:
        raise invalid("id", str(error)) from error
    at, timezone = deps.clock.wall_ms(), deps.settings.timezone
    where = teams_asked(principal, ())
    with deps.ledger.moment(0, at) as moment:
        found = job_costs.job(moment, deps.book(), key, (None, at), at, where or None, timezone)
        if found is None:
            near = nearest_jobs(deps, principal, key)
            told = f"no job {shown(id)} held a GPU or had pods, for this caller{near}"
            raise Refusal("not-found", told)
        begin, end = _life(found.job, found.start_ms, at)
        if end - begin > _TIMELINE_MS:
            begin, end = moment.recent_span(end, _TIMELINE_MS)
        filters = {**where, **job_costs.only_job(key)}
        strips, _ = timeline(moment, begin, end, filters, timezone)
        names = {pod.facts.name for pod in moment.pods(0, at, of={key})}
        siblings = moment.jobs_in(key.cluster, key.namespace)
    begun = deps.ledger.decisions(found.start_ms, at + 1, MOST_DECISIONS, kind="preemption", gang=gangs_of(key))
    decided = decisions_about_job(begun, key, names, siblings)
    waiting = found.job.state == "waiting"
    held = decision_text.shares(records(deps.ledger, at), found.job.queues) if waiting else []
    return _job_page(request, deps, found, strips, decided, held, everyone=principal.teams is None)


def _job_page(
    request: Request,
    deps: Deps,
    found: JobAnswer,
    strips: Timeline,
    decided: list[Decision],
    shares: list[decision_text.Share],
    *,
    everyone: bool,
) -> Response:
    """Return the page of one job. everyone: the reader may see other teams, and so the pages of decisions."""
    title = f"What each GPU did for {found.job.job}"
    return overview_pages.page(
        request, "/jobs", "job.html", deps, found=found, job=found.job, strips=strips, decided=decided, shares=shares,
        timeline=timeline_svg(strips, title) if strips.strips else "", utilisation=page_rows.utilisation,
        currency=found.currency,
        address=address if everyone else None,
    )  # fmt: skip


def _life(job: Job, start_ms: int, now_ms: int) -> tuple[int, int]:
    """The job's life."""
    end = job.held_until_ms if job.state == "ended" and job.held_until_ms is not None else now_ms
    return start_ms, max(end, start_ms + 1)


def _currency(deps: Deps) -> str | None:
    book = deps.book()
    return book.currency if book is not None else None
