"""Serves the page of jobs, with the bar of a list (accountant.web.list_bar), and its files.

The parameters are those of `GET /v1/jobs`, with the same rights, limits and refusals. The files contain the jobs of the
view, on all its pages and with its columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Final, get_args

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from accountant.api.access_control import DocumentReader, Reader, check_teams, team_filter
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.query_parameters import JOBS_WIDTH, QuerySpan, check_cost, with_span_before
from accountant.billing.job_costs import JobChoice
from accountant.core import periods
from accountant.core.periods import Month
from accountant.core.record_age import is_old
from accountant.exports.protocol import file_name
from accountant.ledger.usage import Where
from accountant.reports import figure_formatting
from accountant.reports.figure_formatting import Relative
from accountant.web import month_and_decision_pages, page_queries, page_rows, saved_views
from accountant.web.list_bar import Bar, OrderedListParams, check_columns, longest
from accountant.web.list_files import FileFormat, ListRecords, against, list_file
from accountant.web.page_queries import ListSpan
from accountant.web.page_rows import paged
from accountant.wire.job_columns import COLUMNS, COMPARED, LOST, TEXTS, asks_lost, cells, file_columns
from accountant.wire.list_fields import FileCell, FileKind
from accountant.wire.list_order import ListOrder
from accountant.wire.option_types import JOB_ORDERS, JobKind, JobOrder, JobState
from accountant.wire.usage_cost_and_job_models import Job, JobSort
from gputally.server.tokens_and_grants import Principal

router = APIRouter(include_in_schema=False)
JOBS_A_PAGE: Final = 100
STATES: Final[tuple[JobState, ...]] = get_args(JobState)


class JobListParams(OrderedListParams):
    """The parameters of the page, as those of `GET /v1/jobs`."""

    ORDERS = JOB_ORDERS
    state: JobState | None = None
    kind: JobKind | None = None
    idle: bool = False
    stopped: bool = False
    sort: JobSort = "cost"

    @property
    def choice(self) -> JobChoice:
        lost = asks_lost(self.shown, self.order.column)
        return JobChoice(self.search, self.kind, self.order, self.idle, self.stopped, lost)

    @property
    def shown(self) -> tuple[str, ...]:
        """The columns of the list."""
        return self.columns or (*USUAL, *((LOST,) if self.stopped or self.order.column == LOST else ()))

    @property
    def own(self) -> dict[str, str | None]:
        """The parameters that other lists do not have; None for those that say nothing."""
        return {
            "state": self.state, "kind": self.kind, "idle": "true" if self.idle else None,
            "stopped": "true" if self.stopped else None, "sort": self.own_order,
        }  # fmt: skip


AskedJobs = Annotated[JobListParams, Query()]

USUAL: Final[tuple[str, ...]] = (
    "team", "user", "state", "gpus", "waited", "gpu_hours", "utilisation", "idle", "cost"
)  # fmt: skip


def bar_of(path: str, params: JobListParams, deps: Deps, more: Mapping[str, tuple[str, ...]] | None = None) -> Bar:
    """The bar of a list of jobs. more: further parameters of the page. Raises Refusal."""
    now = deps.clock.wall_ms()
    span = params.span(now, deps.settings.timezone, deps.settings.limits, deps.newest_ms())
    # Nothing of a ledger that stopped is of now.
    stopped = is_old(deps.newest_ms(), now)
    titles: dict[str, str] = {
        name: column.title.removesuffix(" now" if stopped else "") for name, column in COLUMNS.items()
    }
    bar = Bar(
        path=path, params=params, span=span, columns=titles, shown=params.shown,
        own={**params.own, **(more or {})}, now_ms=now, labels=deps.settings.exported_labels,
    )  # fmt: skip
    check_columns(bar)
    return bar


def _where(params: JobListParams, bar: Bar, deps: Deps, principal: Principal) -> Where:
    """The filters of a request, with the teams that the caller may see. Raises Refusal."""
    where = {**params.where, **team_filter(principal, params.where_team)}
    check_teams(deps, principal, params.where_team)
    for span in with_span_before(bar.span, deps.ledger.status().extent, compare=params.compare):
        check_cost(deps.ledger, deps.settings.limits, span, JOBS_WIDTH, params.where_cluster)
    return where


@router.get("/jobs")
def jobs_page(request: Request, params: AskedJobs, deps: AppDeps, principal: Reader) -> Response:
    bar = bar_of("/jobs", params, deps)
    if not bar.is_tidy(request):
        return RedirectResponse(bar.tidy, 303)
    where, span = _where(params, bar, deps, principal), ListSpan.of(params, deps, compared=params.compare)
    skipped = _before_page(params.page)
    answer = page_queries.jobs_of(deps, span, where, params.choice, skipped)
    jobs = answer.value.of(params.state)
    if not jobs.shown and jobs.count:  # a page beyond the last one
        skipped = _before_page(-(-jobs.count // JOBS_A_PAGE))
        answer = page_queries.jobs_of(deps, span, where, params.choice, skipped)
        jobs = answer.value.of(params.state)
    zone = periods.zone(span.timezone)
    until_ms = span.until(deps.clock.wall_ms())
    first_ms, newest_ms = deps.ledger.status().extent
    book, earlier = deps.book(), answer.value.before
    currency = book.currency if book is not None else None
    relative = figure_formatting.by_days(earlier.days if earlier else None)
    return month_and_decision_pages.page(
        request, "/jobs", "jobs.html", deps, bar=bar, titles=bar.titles, named=named, jobs=jobs, state=params.state,
        shown=paged(jobs.shown, params.page, JOBS_A_PAGE, bar.page_url, jobs.count, skipped),
        currency=currency, utilisation=page_rows.utilisation, before=earlier,
        change=partial(change_of, relative=relative), compared_columns=COMPARED,
        total_changes=total_changes(jobs, currency, relative),
        before_text=page_queries.before_text(earlier, zone),
        as_of_ms=answer.as_of_ms, months=month_steps(bar), span_zone=zone, columns=COLUMNS, texts=TEXTS,
        span_text=figure_formatting.span_of(span.start_ms, until_ms, zone),
        longest=longest(bar, deps.ledger, deps.settings.limits, JOBS_WIDTH),
        waiting_unknown=deps.waiting_unknown(params.where_cluster),
        recorded=newest_ms > span.start_ms and first_ms < until_ms,
        states=list(STATES), kinds=get_args(JobKind),
        idle_now=bar.url(**{**dict.fromkeys(bar.own), **page_queries.IDLE_NOW}, end=None, search=None),
        order=ListOrder(bar.url, params.order, JOB_ORDERS.ascending.__contains__),
        api=bar.url("/v1/jobs", columns=None, sort=str(params.order), lost="true" if params.choice.lost else None,
                    **bar.fixed),
        **saved_views.of(request, deps, principal),
        note=params.note(span.start_ms, deps.clock.wall_ms(), span.timezone, deps.newest_ms(), deps.silence_note()),
    )  # fmt: skip


def _before_page(number: int) -> int:
    """How many jobs are before those that are read together with this page."""
    return (number - 1) * JOBS_A_PAGE // page_queries.MOST_JOBS * page_queries.MOST_JOBS


def month_steps(bar: Bar) -> tuple[tuple[str, str], tuple[str, str] | None]:
    """Name and address of the month before the one in which the span begins, and of the one after it; None for one that
    has not begun."""
    zone = periods.zone(bar.span.timezone)
    month = Month.of(bar.span.start_ms, zone)

    def step(to: Month) -> tuple[str, str]:
        return str(to), bar.url(start=f"{to}-01", end=f"{to.next}-01" if to.span(zone)[1] <= bar.now_ms else None)

    return step(month.previous), step(month.next) if month.next.span(zone)[0] < bar.now_ms else None


def named(dimension: str, value: str) -> str:
    return figure_formatting.queue(value) if dimension == "queue" else figure_formatting.name(value)


@router.get("/jobs.csv")
def jobs_csv(request: Request, params: AskedJobs, deps: AppDeps, principal: DocumentReader) -> Response:
    return _file(request, params, deps, principal, "csv")


@router.get("/jobs.parquet")
def jobs_parquet(request: Request, params: AskedJobs, deps: AppDeps, principal: DocumentReader) -> Response:
    return _file(request, params, deps, principal, "parquet")


def _file(
    request: Request, params: JobListParams, deps: Deps, principal: Principal, file_format: FileFormat
) -> Response:
    """All jobs of the view, with exact hours and costs; a cost that lacks a price is empty."""
    bar = bar_of("/jobs", params, deps)
    where, span = _where(params, bar, deps, principal), ListSpan.of(params, deps, compared=params.compare)
    book = deps.book()
    currency = book.currency if book is not None else None
    jobs = page_queries.every_job(deps, span, where, params.choice, params.state)
    names, kinds, rows = file_rows(bar, ((currency, job) for job in jobs))
    about = {**bar.about, "price_book_version": book.version if book is not None else ""}
    records = ListRecords(names, kinds, rows, about=about)
    return list_file(request, records, file_format, file_name(file_format, "jobs", *span_names(bar.span)))


def file_rows(
    bar: Bar, jobs: Iterable[tuple[str | None, Job]]
) -> tuple[list[str], list[FileKind], list[list[FileCell]]]:
    """The names, kinds and cells of a file's columns. jobs: each with the currency of its costs, None without a price
    book."""
    parts, with_currency = file_columns([name for name in COLUMNS if name in bar.shown], compare=bar.params.compare)
    names, kinds = [part.name for part in parts], [part.kind for part in parts]
    if with_currency:
        names.append("currency")
        kinds.append("text")
    return names, kinds, [cells(parts, job, currency, with_currency=with_currency) for currency, job in jobs]


def change_of(
    name: JobOrder, job: Job, currency: str | None, relative: Relative = figure_formatting.relative_of
) -> str:
    """The figure of a column of `COMPARED` in the span before, and the change since."""
    return against(COMPARED[name], job, job.then, currency, relative)


def total_changes(
    jobs: page_rows.Jobs, currency: str | None, relative: Relative = figure_formatting.relative_of
) -> Mapping[str, str]:
    """The totals of the span before, and their changes since."""
    was = jobs.before
    if was is None:
        return dict.fromkeys(("gpu_hours", "idle", "cost"), f"before {figure_formatting.NOTHING}")
    texts = {
        name: f"before {figure_formatting.hours(then)}, {relative(now, then)}"
        for name, now, then in (
            ("gpu_hours", jobs.allocated_us, was.allocated_us), ("idle", jobs.idle_us, was.idle_us)
        )
    }  # fmt: skip
    cost = f"before {figure_formatting.money(was.total, currency)}"
    if was.unpriced:
        cost += " + unpriced"
    return {**texts, "cost": cost if jobs.unpriced or was.unpriced else f"{cost}, {relative(jobs.total, was.total)}"}


def span_names(span: QuerySpan) -> tuple[str, str]:
    """The first and the last day of a span, for the name of a file."""
    zone = periods.zone(span.timezone)
    return str(periods.local_date(span.start_ms, zone)), str(periods.local_date(span.end_ms - 1, zone))
