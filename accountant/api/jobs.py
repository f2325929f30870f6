"""GET /v1/jobs, GET /v1/jobs/{id}, POST /v1/jobs/{id}/progress: what jobs cost, and how far they are."""

from __future__ import annotations

import asyncio
from typing import Annotated
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field, TypeAdapter

from accountant import periods
from accountant.api.access import Progressing, Reading, teams_asked
from accountant.api.body import read_model
from accountant.api.deps import Deps, Given, Moment
from accountant.api.known import check_teams, nearest_jobs
from accountant.api.openapi import inline_body, refuses
from accountant.api.paging import open_page
from accountant.api.params import Instant, SpanParams, check_cost, instant, invalid
from accountant.api.problems import Refusal
from accountant.callers.auth import Principal
from accountant.freshness import age_note
from accountant.joblines import JobAnswer, JobsAnswer, JobState
from accountant.money import exact_sum
from accountant.near_names import shown
from accountant.progress import HIGHEST_EPOCH, MOST_EPOCHS, EpochReport, JobKey
from accountant.question_cost import JOBS_WIDTH
from accountant.wire import Model
from accountant.work import jobs as asking
from agent.units import MS_PER_DAY

router = APIRouter(tags=["jobs"])
MOST_REPORTS = 1_000
"""Of one request."""
Id = Annotated[
    str, Path(max_length=4_096, description="CLUSTER~NAMESPACE~KIND~NAME, as GET /v1/jobs writes it (`id`).")
]


class JobsParams(SpanParams):
    """A list of jobs, filtered and paged."""

    state: JobState | None = Field(default=None, description="Only these.")
    team: tuple[str, ...] = Field(default=(), description="Only what these teams pay.")
    namespace: tuple[str, ...] = Field(default=(), description="Only of these namespaces.")
    user: tuple[str, ...] = Field(default=(), description="Only what these users ran.")
    page: str | None = Field(default=None, max_length=4096, description="`next_page` of the answer before.")
    limit: int = Field(default=1_000, ge=1, description="Jobs of one page.")


class JobParams(SpanParams):
    """start defaults to the beginning of the job, end to now."""


class EpochEnded(Model):
    """An epoch that the job ended. at: when; the moment of the request without it."""

    epoch: int = Field(ge=0, le=HIGHEST_EPOCH)
    at: Instant = None


class Reported(Model):
    """recorded: reports that said something new. known: those that repeated what was there."""

    recorded: int
    known: int


_REPORTS = TypeAdapter(Annotated[tuple[EpochEnded, ...], Field(min_length=1, max_length=MOST_REPORTS)])


@router.get(
    "/v1/jobs",
    summary="Jobs and what they cost",
    responses=refuses("bad-page", "not-found", "page-gone", "invalid-parameter"),
)
async def listed(asked: Annotated[JobsParams, Query()], deps: Given, principal: Reading) -> JobsAnswer:
    """Jobs that held GPUs or had pods in the span, with what they did and cost in it; of the caller's teams. Pages that
    follow from one another are of one answer and add up to its `total_cost`, which every page shows, whatever is booked
    or priced anew meanwhile."""
    now, limits, newest = deps.clock.wall_ms(), deps.settings.limits, deps.newest_ms()
    start, end, zone = asked.span(now, deps.settings.timezone, limits, newest)
    where = teams_asked(principal, asked.team)
    where |= {name: values for name in ("namespace", "user") if (values := getattr(asked, name))}
    question = ["jobs", asked.start, asked.end, zone, asked.state, sorted(where.items())]
    page = open_page(question, start, end, now, asked.page, span_days=limits.span_days)
    note = asked.note(page.start_ms, page.at_ms, zone, newest, deps.silence_note()) or age_note(newest, page.at_ms)

    def find() -> JobsAnswer:
        check_teams(deps, principal, asked.team)
        check_cost(deps.ledger, limits, page.start_ms, page.end_ms, JOBS_WIDTH)
        book = deps.book()
        with deps.ledger.moment(page.start_ms, page.end_ms) as moment:
            every = asking.jobs(moment, book, page.start_ms, page.end_ms, page.at_ms, where or None, zone)
        found = tuple(one for one in every if asked.state in (None, one.state))
        costs = [one.cost for one in found]
        known = [cost for cost in costs if cost is not None]
        return JobsAnswer(
            start_ms=page.start_ms,
            end_ms=page.end_ms,
            currency=book.currency if book else None,
            price_book_version=book.version if book else "",
            jobs=found,
            total_gpu_us=sum(one.accounts_gpu_us.allocated for one in found),
            total_cost=exact_sum(known) if len(known) == len(costs) else None,
            note=note,
        )

    return await asyncio.to_thread(deps.kept.turn, page, deps.page_lines(asked.limit), find)


@router.get(
    "/v1/jobs/{id}",
    summary="One job, by price and by epoch",
    responses=refuses("invalid-parameter", "not-found"),
)
async def one(id: Id, asked: Annotated[JobParams, Query()], deps: Given, principal: Reading) -> JobAnswer:
    """From its beginning until now, or the span asked for. Epochs, with what followed the last one, add up to the
    job's cost exactly."""
    key, where = _key(id), teams_asked(principal, ())
    now = deps.clock.wall_ms()
    name = asked.timezone or deps.settings.timezone
    zone = periods.zone(name)
    start = None if asked.start is None else instant("start", asked.start, zone)
    end = now if asked.end is None else instant("end", asked.end, zone)
    _bounded(start, end, deps)

    def read() -> JobAnswer | None:
        with deps.ledger.moment(start or 0, end) as moment:
            return asking.job(moment, deps.book(), key, (start, end), now, where or None, name)

    found = await asyncio.to_thread(read)
    if found is None:
        near = await asyncio.to_thread(nearest_jobs, deps, principal, key)
        told = f"no job {shown(id)} held a GPU or had pods in that time, for this caller{near}"
        raise Refusal("not-found", told)
    return found


@router.post(
    "/v1/jobs/{id}/progress",
    summary="A job ended epochs",
    openapi_extra={"requestBody": inline_body(EpochEnded, at_most=MOST_REPORTS)},
    responses=refuses(
        "malformed-body", "too-large", "invalid-body", "invalid-parameter", "not-found", "too-many-epochs",
        "ledger-unavailable",
    ),
)  # fmt: skip
async def progress(id: Id, request: Request, deps: Given, principal: Progressing) -> Reported:
    """Idempotent by job and epoch: of several reports the earliest instant counts, in whatever order they come.
    A job that the ledger has not heard of yet is not found; report again later."""
    key = _key(id)
    told = await read_model(deps.intake, request, _REPORTS)
    now, zone = deps.clock.wall_ms(), periods.zone(deps.settings.timezone)
    reports = [EpochReport(key, one.epoch, _ended(one, now, zone), principal.name) for one in told]
    return await asyncio.to_thread(_record, deps, principal, key, reports, now)


def _record(deps: Deps, principal: Principal, key: JobKey, reports: list[EpochReport], now_ms: int) -> Reported:
    with deps.ledger.moment() as moment:
        _may_report(deps, moment, principal, key)
        known = {one.epoch for one in moment.epochs({key})}
    if len(known | {one.epoch for one in reports}) > MOST_EPOCHS:
        raise Refusal("too-many-epochs", f"a job has at most {MOST_EPOCHS} epochs: report every tenth of them")
    new = deps.ledger.report_epochs(reports, now_ms)
    return Reported(recorded=new, known=len(reports) - new)


def _may_report(deps: Deps, moment: Moment, principal: Principal, key: JobKey) -> None:
    """A pod reports for its own job, a team's token for jobs that the team pays. Raises Refusal."""
    if principal.pod is not None and principal.cluster is not None:
        if deps.ledger.job_of(principal.cluster, principal.pod) != key:
            raise Refusal("forbidden", f"{principal.name!r} may report the progress of its own job only")
        return
    held = moment.extents({key}).get(key)
    if held is not None and principal.teams is not None:
        paid = moment.usage_between(held, ("team",), asking.alone(key))[0]
        held = held if {line.key["team"] for line in paid} & principal.teams else None
    if held is None:
        raise Refusal("not-found", f"no job {key.id[:200]!r} has held a GPU yet, for this caller")


def _key(text: str) -> JobKey:
    try:
        return JobKey.parse(text)
    except ValueError as error:
        raise invalid("id", str(error)) from error


def _ended(one: EpochEnded, now_ms: int, zone: ZoneInfo) -> int:
    at = now_ms if one.at is None else instant("at", one.at, zone)
    if at > now_ms:
        raise invalid("at", f"epoch {one.epoch} ended in the future")
    return at


def _bounded(start_ms: int | None, end_ms: int, deps: Deps) -> None:
    if start_ms is not None and not 0 < end_ms - start_ms <= deps.settings.limits.span_days * MS_PER_DAY:
        raise invalid("end", f"a span is between a millisecond and {deps.settings.limits.span_days} days long")
