"""Serves the pages and the API about all ledgers of a lake: overview, teams, jobs, nodes, usage, cost and months.

Each ledger computes its figures with its own price book and policies, and its months in its own time zone
(accountant.fleet.fleet_ledgers). A query for usage or cost has one span and one time zone for all ledgers."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Final, TypeVar, cast, get_args
from urllib.parse import quote

from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse
from pydantic import Field

from accountant.api.access_control import DocumentReader, Reader, require_all_teams, team_filter, team_for
from accountant.api.answer_cache import CachedAnswer, open_page
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.node_routes import NODES_WIDTH
from accountant.api.problems import Refusal
from accountant.api.query_parameters import (
    JOBS_WIDTH,
    GroupedParams,
    Params,
    QuerySpan,
    check_cost,
    invalid,
    with_span_before,
)
from accountant.billing.job_costs import rank_of
from accountant.billing.statements import Statement
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core import periods
from accountant.core.claim_overlap import Span
from accountant.core.errors import UnreadableLedger, UnsupportedQuestion
from accountant.core.periods import Month
from accountant.core.settings import Settings
from accountant.exports import rendering_process
from accountant.exports.format_field import FormatField
from accountant.exports.protocol import exports, file_name
from accountant.exports.zip_archive import pack
from accountant.fleet.fleet_ledgers import (
    Fleet,
    FleetMonth,
    FleetQuery,
    LedgerMonth,
    Member,
    TeamMonth,
    asked,
    refuse_left_out,
    statement_lines,
)
from accountant.ledger.usage import EarlierSpan, added
from accountant.reports import charts, figure_formatting, node_list
from accountant.reports.node_list import Machine
from accountant.web import month_and_decision_pages, page_queries, page_rows
from accountant.web.job_list_page import (
    JOBS_A_PAGE,
    STATES,
    JobListParams,
    change_of,
    file_rows,
    month_steps,
    named,
    span_names,
    total_changes,
)
from accountant.web.job_list_page import bar_of as jobs_bar_of
from accountant.web.list_bar import Bar
from accountant.web.list_files import FileFormat, ListRecords, list_file
from accountant.web.node_list_page import COLUMNS as NODE_COLUMNS
from accountant.web.node_list_page import NODES_A_PAGE, NodeListParams, bar_of, file_fields, totals_before, totals_of
from accountant.web.node_list_page import change_of as node_change_of
from accountant.web.page_queries import ListedNodes, ListSpan
from accountant.web.page_rows import paged
from accountant.wire.job_columns import COLUMNS as JOB_COLUMNS
from accountant.wire.job_columns import COMPARED, TEXTS
from accountant.wire.list_fields import FileKind
from accountant.wire.list_order import ListOrder, in_order
from accountant.wire.option_types import JOB_ORDERS, NODE_ORDERS, JobKind
from accountant.wire.policy_models import IDLE, UNASSIGNED
from accountant.wire.usage_cost_and_job_models import CostAnswer, Job, JobSort, JobsStops, UsageAnswer
from gputally.base.clock import Clock
from gputally.base.money import exact_sum, sum_if_known
from gputally.base.units import MS_PER_SECOND
from gputally.server.request_handling import tagged
from gputally.server.tokens_and_grants import Principal

_OWN_FORMATS: Final = ("json", "csv")
"""The formats that a month of all ledgers has itself."""
router = APIRouter()
A = TypeVar("A", UsageAnswer, CostAnswer)
B = TypeVar("B")
Chosen = Annotated[
    tuple[str, ...],
    Field(
        max_length=1_000,
        description="Names of the ledgers that count (repeatable); all without it.",
    ),
]


@dataclass(frozen=True)
class FleetStatus:
    """Of accountant.ledger.protocols.Status what several ledgers have in common."""

    _members: Sequence[Member]

    @property
    def extent(self) -> Span:
        begun = [member.status.first_ms for member in self._members if member.status.first_ms]
        return min(begun, default=0), self.newest_ms

    @property
    def newest_ms(self) -> int:
        return max((member.status.newest_ms for member in self._members), default=0)

    @property
    def newest_by_cluster(self) -> Mapping[str, int]:
        return {f"{m.name}/{name}": at for m in self._members for name, at in m.status.clusters.items()}

    @property
    def teams(self) -> frozenset[str]:
        return frozenset().union(*(member.status.teams for member in self._members))


@dataclass
class FleetState:
    """The ledgers served at present. The shared code of pages asks it for its status, as any ledger.

    _shown: the ledgers, and by ledger the dependencies of its own pages, with their cached answers."""

    fleet: Fleet
    settings: Settings
    clock: Clock
    _shown: tuple[Sequence[Member], Mapping[str, Deps]] = field(default=((), {}), init=False)

    @property
    def members(self) -> Sequence[Member]:
        return self._shown[0]

    def replace_members(self, members: Sequence[Member], pages: Mapping[str, Deps]) -> None:
        self._shown = (
            tuple(members),
            pages,
        )  # at once, so that no answer leaves out a ledger that is in one of them alone

    def asked(self, names: Collection[str], ask: Callable[[Deps], B]) -> tuple[dict[str, B], list[str]]:
        """By name the answers of these ledgers, computed with the dependencies of their own pages, and why the others
        cannot answer; of all if there are no names. Raises Refusal if one is not in the lake."""
        members, pages = self._shown
        unsupported: list[str] = []

        def of_member(member: Member) -> B | None:
            if member.fault:
                raise UnreadableLedger(member.fault)
            try:
                return ask(pages[member.name])
            except UnsupportedQuestion as error:
                unsupported.append(str(error))
                return None

        found, left_out = asked(_chosen(members, names), of_member)
        answers = {name: answer for name, answer in found.items() if answer is not None}
        return answers, [*unsupported, *left_out.values()]

    def chosen(self, names: Collection[str] = ()) -> list[Member]:
        """The ledgers with these names; all if there are no names. Raises Refusal if one is not in the lake."""
        return _chosen(self.members, names)

    def mark(self) -> tuple[object, ...]:
        """A value that changes when any ledger publishes, or is left out."""
        return tuple((one.name, one.status.until_ms, one.status.newest_ms, one.fault) for one in self.members)

    def status(self) -> FleetStatus:
        return FleetStatus(self.members)

    @property
    def no_books(self) -> Bookkeeper:
        """An empty stand-in without a price book, because each ledger of a fleet has its own."""
        return cast(Bookkeeper, SimpleNamespace(prices=SimpleNamespace(current=None), waiting=()))


def _chosen(members: Sequence[Member], names: Collection[str]) -> list[Member]:
    missing = sorted(set(names) - {member.name for member in members})
    if missing:
        raise invalid("ledger", f"no ledger {missing[0]!r} publishes in this lake")
    return [member for member in members if not names or member.name in names]


def _state(request: Request) -> FleetState:
    return cast(FleetState, request.app.state.fleet)


class FleetGrouped(GroupedParams):
    ledger: Chosen = ()


class FleetMonthParams(Params):
    month: str | None = Field(default=None, description="A calendar month of each ledger's own time zone: 2026-10.")
    ledger: Chosen = ()


class FleetReport(FleetMonthParams):
    format: FormatField = Field(
        default="json",
        description="json: the summary; csv: the lines of all statements; any other: a ZIP archive with each ledger's "
        "own report in that format.",
    )


class FleetJobs(JobListParams):
    """As the page of one ledger; the jobs that held most GPU time first, because prices and currencies differ."""

    sort: JobSort = "gpu_hours"
    ledger: Chosen = ()


FIRST_JOBS: Final = FleetJobs().choice
"""The jobs that the page shows first."""


class FleetNodes(NodeListParams):
    ledger: Chosen = ()


@router.get("/livez", include_in_schema=False)
async def livez() -> Response:
    return PlainTextResponse("ok\n")


@router.get("/readyz", include_in_schema=False)
async def readyz(deps: AppDeps) -> Response:
    faults = {} if deps.tasks is None else deps.tasks.faults()
    text = "".join(f"{name}: {fault}\n" for name, fault in faults.items())
    return PlainTextResponse(text or "ok\n", 503 if faults else 200)


@router.get("/metrics", include_in_schema=False)
async def metrics(deps: AppDeps, _: Reader) -> Response:
    return PlainTextResponse(await asyncio.to_thread(deps.metrics.exposition))


@router.get("/v1/ledgers", summary="The ledgers of the lake")
async def ledgers(request: Request, principal: Reader) -> Response:
    """The ledgers by name, and the instant up to which each has published figures. fault: why this version cannot read
    the ledger, null if it can."""
    require_all_teams(principal)
    statuses = [
        {
            "ledger": one.ledger, "timezone": one.timezone, "first_ms": one.first_ms, "newest_ms": one.newest_ms,
            "until_ms": one.until_ms, "clusters": sorted(one.clusters),
            "pages": f"/clusters/{quote(one.ledger, safe='')}/", "version": one.version,
            "exported_labels": one.exported_labels, "fault": member.fault or None,
        }
        for member, one in ((member, member.status) for member in _state(request).members)
    ]  # fmt: skip
    return JSONResponse(statuses)


async def _answer(
    request: Request,
    asked: FleetGrouped,
    deps: Deps,
    principal: Principal,
    kind: str,
    find: Callable[[Fleet, Sequence[Member], FleetQuery], A],
) -> A:
    """One page of the answer to a query.

    kind: the name of the answer, which is part of the key in the cache.
    find: computes the whole answer."""
    state = _state(request)
    span: QuerySpan = asked.span(deps.clock.wall_ms(), "UTC", deps.settings.limits, deps.newest_ms())
    where = dict(asked.where)
    where |= team_filter(principal, where.get("team", ()))
    members = state.chosen(asked.ledger)
    question = [kind, *span, asked.by, sorted(where.items()), sorted(asked.ledger), str(state.mark())]
    page = open_page(question, span, deps.clock.wall_ms(), asked.page, deps.settings.limits)

    def compute() -> A:
        for member in members:
            if member.fault:
                continue
            check_cost(member.ledger, deps.settings.limits, page.span, len(asked.by), asked.where_cluster)
        return find(state.fleet, members, FleetQuery(page.start_ms, page.end_ms, asked.by, where, span.timezone))

    return await asyncio.to_thread(deps.answers.page, page, deps.page_lines(asked.limit), compute)


@router.get("/v1/usage", summary="GPU time by account and group, added up over the ledgers")
async def usage(
    request: Request, asked: Annotated[FleetGrouped, Query()], deps: AppDeps, principal: Reader
) -> UsageAnswer:
    """Like the accountant's route; `note` names the ledgers whose published figures end before the span."""
    return await _answer(request, asked, deps, principal, "usage", Fleet.usage)


@router.get("/v1/cost", summary="Exact cost by group, each ledger's time at its own prices")
async def costs(
    request: Request, asked: Annotated[FleetGrouped, Query()], deps: AppDeps, principal: Reader
) -> CostAnswer:
    """Like the accountant's route. Amounts in several currencies are refused, unless the operator configured rates."""
    return await _answer(request, asked, deps, principal, "cost", Fleet.cost)


@router.get("/v1/report", summary="A month of every ledger")
async def report(
    request: Request, asked: Annotated[FleetReport, Query()], deps: AppDeps, principal: DocumentReader
) -> Response:
    """The statements of all ledgers for a month of their own time zones: a summary by ledger and team, every line,
    or each ledger's own report."""
    require_all_teams(principal)
    if asked.format not in _OWN_FORMATS:
        return await to_thread.run_sync(_reports, request, deps, asked)
    month = (await asyncio.to_thread(_months, request, deps, asked)).value
    if asked.format == "json":
        return tagged(request, month.summary.model_dump_json().encode(), "application/json")
    refuse_left_out(month.summary.left_out.values())  # a table of amounts has no place to name what it lacks
    text = io.StringIO()
    rows = list(statement_lines(month.stated))
    writer = csv.DictWriter(text, rows[0] if rows else ["ledger"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    name = f"gputally-{month.summary.month}-fleet.csv"
    return tagged(request, text.getvalue().encode(), "text/csv; charset=utf-8", name)


def _reports(request: Request, deps: Deps, asked: FleetReport) -> Response:
    """A ZIP archive with each ledger's own report, as its accountant renders it. Raises CannotRender."""
    state, export = _state(request), exports()[asked.format]
    month, issuer = shown_month(state, asked.month), deps.settings.issuer if export.charges else None
    files = {}
    for member in state.chosen(asked.ledger):
        content = rendering_process.render(asked.format, member.report(month, None, issuer))
        files[file_name(export.suffix, str(month), member.name)] = content
    return tagged(request, pack(files), "application/zip", f"gputally-{month}-fleet-{asked.format}.zip")


@dataclass(frozen=True, slots=True)
class _Stated:
    summary: FleetMonth
    stated: Mapping[str, Statement]


def _months(request: Request, deps: AppDeps, asked: FleetMonthParams) -> CachedAnswer[_Stated]:
    """The summary of a month and the statements that it sums, from the cache if possible. Raises Refusal if a ledger or
    the month is unknown, and SeveralCurrencies."""
    state = _state(request)
    members = state.chosen(asked.ledger)
    month = shown_month(state, asked.month)

    def compute() -> _Stated:
        return _Stated(*state.fleet.month(members, month))

    return deps.answers.ask(("fleet month", month, tuple(sorted(asked.ledger))), compute, state.mark)


def shown_month(state: FleetState, text: str | None) -> Month:
    """The month that a page shows: the named one, otherwise the newest one with records in any ledger."""
    if text is not None:
        return month_and_decision_pages.parse_month(text, state.clock.wall_ms(), periods.zone("UTC"))
    return periods.month_with_records(state.clock.wall_ms(), state.status().extent[1], periods.zone("UTC"))


@router.get("/", include_in_schema=False)
async def home(principal: Reader) -> Response:
    if principal.teams is not None:
        return RedirectResponse("/fleet/team/" + quote(team_for(principal, min(principal.teams)) or "", safe=""), 303)
    return RedirectResponse("/fleet", 303)


@router.get("/fleet", include_in_schema=False)
async def overview(
    request: Request, asked: Annotated[FleetMonthParams, Query()], deps: AppDeps, principal: Reader
) -> Response:
    require_all_teams(principal)
    state = _state(request)

    def make() -> Response:
        found = _months(request, deps, asked)
        summary = found.value.summary
        whole = added(one.accounts_gpu_us for one in summary.ledgers)
        shares = page_rows.account_rows(whole)
        return _page(
            request, deps, "fleet.html", found.as_of_ms,
            lines="csv" in exports(), exports=[one for one in exports().values() if one.name not in _OWN_FORMATS],
            summary=summary, ledgers=sorted(summary.ledgers, key=lambda one: (-(one.due or 0), one.ledger)),
            teams=_teams(summary.teams), shares=shares, whole_us=whole.total,
            bar=charts.accounts(shares, f"Capacity of all clusters in {summary.month}") if whole.total else "",
            months=_neighbours(state, summary.month), chosen=asked.ledger, names=[one.name for one in state.members],
            until=_until_text, utilisation=page_rows.utilisation,
        )  # fmt: skip

    return await asyncio.to_thread(make)


@router.get("/fleet/team/{team:path}", include_in_schema=False)
async def team_page(
    request: Request, team: str, asked: Annotated[FleetMonthParams, Query()], deps: AppDeps, principal: Reader
) -> Response:
    mine = team_for(principal, team)
    state = _state(request)

    def make() -> Response:
        found = _months(request, deps, asked)
        summary = found.value.summary
        rows = [one for one in summary.teams if one.team == mine]
        if not rows and mine not in state.status().teams:
            raise Refusal("not-found", f"no ledger of this lake knows the team {team!r}")
        zones = {one.ledger: one.timezone for one in summary.ledgers}
        return _page(
            request, deps, "fleet_team.html", found.as_of_ms,
            summary=summary, team=mine, rows=rows, zones=zones, totals=_owed(rows),
            months=_neighbours(state, summary.month),
        )  # fmt: skip

    return await asyncio.to_thread(make)


@dataclass(frozen=True, slots=True)
class _JobRow:
    """A job of one ledger."""

    ledger: str
    currency: str | None
    job: Job


@dataclass(frozen=True, slots=True)
class _Listed:
    """The first jobs of a ledger in the order of the view. jobs: counted in all of them."""

    shown: Sequence[Job]
    jobs: page_rows.Jobs
    before: EarlierSpan | None
    currency: str | None
    as_of_ms: int | None


AskedJobs = Annotated[FleetJobs, Query()]


@router.get("/fleet/jobs", include_in_schema=False)
def jobs_page(request: Request, asked: AskedJobs, deps: AppDeps, principal: Reader) -> Response:
    """The jobs of all clusters in a span, as far as each has published it."""
    bar = _jobs_bar(asked, deps)
    if not bar.is_tidy(request):
        return RedirectResponse(bar.tidy, 303)
    found, left_out = _jobs_of_ledgers(_state(request), asked, principal, asked.page * JOBS_A_PAGE)
    rows, sums = _in_order(found, asked), [one.jobs for one in found.values()]
    # The sums of all pages are exact, and so many jobs of each ledger are read that this page has its own.
    shown = paged(rows, asked.page, JOBS_A_PAGE, bar.page_url, sum(one.count for one in sums), 0)
    zone, span = periods.zone(bar.span.timezone), bar.span
    (whole, currency) = _added(sums, [one.currency for one in found.values()])
    compared = _compared(bar, [one.before for one in found.values()])
    return _page(
        request, deps, "fleet_jobs.html", min((one.as_of_ms for one in found.values() if one.as_of_ms), default=None),
        current="/fleet/jobs", bar=bar, titles=bar.titles, named=named, shown=shown, jobs=whole, state=asked.state,
        states=STATES, kinds=get_args(JobKind), columns=JOB_COLUMNS, texts=TEXTS, currency=currency,
        left_out=left_out, utilisation=page_rows.utilisation, months=month_steps(bar), span_zone=zone,
        span_text=figure_formatting.span_of(span.start_ms, span.end_ms, zone),
        order=ListOrder(bar.url, asked.order, JOB_ORDERS.ascending.__contains__),
        change=partial(change_of, relative=compared["relative"]), compared_columns=COMPARED,
        total_changes=total_changes(whole, currency, compared["relative"]), **compared,
    )  # fmt: skip


def _compared(bar: Bar, spans: Sequence[EarlierSpan | None]) -> dict[str, Any]:
    """What a list is compared with, as the templates need it. spans: of each ledger."""
    if not bar.params.compare:
        return {"before": None, "before_text": "", "relative": figure_formatting.relative_of}
    zone = periods.zone(bar.span.timezone)
    before = periods.span_before(bar.span.start_ms, bar.span.end_ms, zone)
    covered = [one.coverage or 0.0 for one in spans if one is not None]
    text, relative = figure_formatting.span_of(*before, zone), figure_formatting.by_days(None)
    if any(one is not None and one.days for one in spans):  # of each ledger other days are known
        text += ", of which some clusters have records only in part: changes are on their own pages"
        relative = figure_formatting.unknown_change
    return {"before": EarlierSpan(*before, min(covered, default=None)), "before_text": text, "relative": relative}


def _added(sums: Sequence[page_rows.Jobs], currencies: Sequence[str | None]) -> tuple[page_rows.Jobs, str | None]:
    """The sums of all ledgers, and the currency of their cost; None if it is not one."""
    earlier = [one.before for one in sums if one.count]
    before = None if None in earlier else [one for one in earlier if one is not None]
    whole = page_rows.Jobs(
        (), sum(one.count for one in sums), sum(one.allocated_us for one in sums), sum(one.idle_us for one in sums),
        exact_sum(one.total for one in sums), unpriced=any(one.unpriced for one in sums),
        before=_added(before, ())[0] if before else None,
        burn_per_hour=sum_if_known(one.burn_per_hour for one in sums), held=sum(one.held for one in sums),
        stops=_added_stops([one.stops for one in sums if one.count]),
    )  # fmt: skip
    return whole, currencies[0] if len(set(currencies)) == 1 else None


def _added_stops(of_ledgers: Sequence[JobsStops | None]) -> JobsStops | None:
    """What stops lost in all ledgers; None if that was not asked."""
    every = [one for one in of_ledgers if one is not None]
    if not every:
        return None
    lost_us, unknown = sum(one.known_lost_gpu_us for one in every), sum(one.unknown_jobs for one in every)
    return JobsStops(lost_gpu_us=None if unknown else lost_us, known_lost_gpu_us=lost_us, unknown_jobs=unknown)


@router.get("/fleet/jobs.csv", include_in_schema=False)
def jobs_csv(request: Request, asked: AskedJobs, deps: AppDeps, principal: DocumentReader) -> Response:
    return _jobs_file(request, asked, deps, principal, "csv")


@router.get("/fleet/jobs.parquet", include_in_schema=False)
def jobs_parquet(request: Request, asked: AskedJobs, deps: AppDeps, principal: DocumentReader) -> Response:
    return _jobs_file(request, asked, deps, principal, "parquet")


def _jobs_file(
    request: Request, asked: FleetJobs, deps: Deps, principal: Principal, file_format: FileFormat
) -> Response:
    """All jobs of the view. Raises UnreadableLedger if a ledger is left out, because a file cannot say so."""
    bar = _jobs_bar(asked, deps)
    found, left_out = _jobs_of_ledgers(_state(request), asked, principal, None)
    refuse_left_out(left_out)
    jobs = _in_order(found, asked)
    names, kinds, cells = file_rows(bar, ((row.currency, row.job) for row in jobs))
    rows = [[row.ledger, *of_row] for row, of_row in zip(jobs, cells, strict=True)]
    records = ListRecords(["ledger", *names], ["text", *kinds], rows, about=bar.about)
    return list_file(request, records, file_format, file_name(file_format, "fleet-jobs", *span_names(bar.span)))


def _jobs_bar(asked: FleetJobs, deps: Deps) -> Bar:
    return jobs_bar_of("/fleet/jobs", asked, deps, {"ledger": asked.ledger})


def _jobs_of_ledgers(
    state: FleetState, asked: FleetJobs, principal: Principal, most: int | None
) -> tuple[dict[str, _Listed], list[str]]:
    """The first jobs of each ledger by its name, and why others are left out. most: None for all jobs. Raises Refusal,
    also if the order is by amounts of several currencies."""
    where = {**asked.where, **team_filter(principal, asked.where_team)}
    month = shown_month(state, None) if asked.start is None and asked.end is None else None

    def of_ledger(pages: Deps) -> _Listed:
        span = ListSpan.of(asked, pages) if month is None else ListSpan.of_month(month, pages)
        span = replace(span, compared=asked.compare)

        def check() -> None:
            whole = QuerySpan(span.start_ms, span.until(pages.clock.wall_ms()), span.timezone)
            for one in with_span_before(whole, pages.ledger.status().extent, compare=asked.compare):
                check_cost(pages.ledger, pages.settings.limits, one, JOBS_WIDTH, asked.where_cluster)

        book = pages.book()
        answer = page_queries.jobs_of(pages, span, where, asked.choice, check=check)
        jobs = answer.value.of(asked.state)
        shown: Sequence[Job] = jobs.shown
        if len(shown) < jobs.count and (most is None or most > len(shown)):
            shown = page_queries.every_job(pages, span, where, asked.choice, asked.state, most)
        return _Listed(shown, jobs, answer.value.before, book.currency if book else None, answer.as_of_ms)

    found, left_out = state.asked(asked.ledger, of_ledger)
    currencies = sorted({one.currency for one in found.values() if one.currency})
    if asked.order.column in ("cost", "burn") and len(currencies) > 1:
        raise invalid("sort", f"the ledgers have prices in {' and '.join(currencies)}, which do not compare: sort by"
                              " another column, or choose ledgers with one currency (ledger)")  # fmt: skip
    return found, left_out


def _in_order(found: Mapping[str, _Listed], asked: FleetJobs) -> list[_JobRow]:
    """The jobs of the ledgers in the order of the view."""
    rows = [_JobRow(name, of.currency, job) for name, of in sorted(found.items()) for job in of.shown]
    rank = rank_of(asked.order.column)
    return in_order(rows, lambda row: rank(row.job), descending=asked.order.descending)


@dataclass(frozen=True, slots=True)
class _NodeRow:
    """A node of one ledger."""

    ledger: str
    node: Machine


AskedNodes = Annotated[FleetNodes, Query()]


@router.get("/fleet/nodes", include_in_schema=False)
def nodes_page(request: Request, asked: AskedNodes, deps: AppDeps, principal: Reader) -> Response:
    """The nodes of all clusters in a span, as far as each has published it."""
    bar = _nodes_bar(asked, deps, principal)
    if not bar.is_tidy(request):
        return RedirectResponse(bar.tidy, 303)
    rows, answers, left_out = _nodes_of_ledgers(_state(request), asked, bar)
    ledger_of = {id(row.node): row.ledger for row in rows}
    until_ms = {member.name: member.clock.wall_ms() for member in _state(request).members}
    ranked = [row.node for row in rows]
    shown = paged(ranked, asked.page, NODES_A_PAGE, bar.page_url)
    zone = periods.zone(bar.span.timezone)
    compared = _compared(bar, [answer.value.before for answer in answers])
    return _page(
        request, deps, "fleet_nodes.html", min((one.as_of_ms for one in answers if one.as_of_ms), default=None),
        current="/fleet/nodes", bar=bar,
        titles=bar.titles, named=named, shown=shown, nodes=shown.rows, left_out=left_out, columns=NODE_COLUMNS,
        texts=NODE_ORDERS.ascending, gpus=sum(node.gpus for node in ranked), totals=totals_of(ranked),
        ledger_of=lambda node: ledger_of[id(node)],
        is_silent=lambda node: node.is_silent(until_ms[ledger_of[id(node)]]),
        span_zone=zone, months=month_steps(bar),
        span_text=figure_formatting.span_of(bar.span.start_ms, bar.span.end_ms, zone),
        order=ListOrder(bar.url, asked.order, NODE_ORDERS.ascending.__contains__),
        compared_with=compared["before"], before_text=compared["before_text"],
        change=partial(node_change_of, relative=compared["relative"]),
        totals_before=totals_before(ranked, compared["before"]),
        relative=compared["relative"],
    )  # fmt: skip


@router.get("/fleet/nodes.csv", include_in_schema=False)
def nodes_csv(request: Request, asked: AskedNodes, deps: AppDeps, principal: Reader) -> Response:
    return _nodes_file(request, asked, deps, principal, "csv")


@router.get("/fleet/nodes.parquet", include_in_schema=False)
def nodes_parquet(request: Request, asked: AskedNodes, deps: AppDeps, principal: Reader) -> Response:
    return _nodes_file(request, asked, deps, principal, "parquet")


def _nodes_file(
    request: Request, asked: FleetNodes, deps: Deps, principal: Principal, file_format: FileFormat
) -> Response:
    """All nodes of the view. Raises UnreadableLedger if a ledger is left out, because a file cannot say so."""
    bar = _nodes_bar(asked, deps, principal)
    found, _, left_out = _nodes_of_ledgers(_state(request), asked, bar)
    refuse_left_out(left_out)
    parts = file_fields(bar)
    rows = [[row.ledger, *(part.of(row.node) for part in parts)] for row in found]
    kinds: list[FileKind] = ["text", *(part.kind for part in parts)]
    records = ListRecords(["ledger", *(part.name for part in parts)], kinds, rows, about=bar.about)
    return list_file(request, records, file_format, file_name(file_format, "fleet-nodes", *span_names(bar.span)))


def _nodes_bar(asked: FleetNodes, deps: Deps, principal: Principal) -> Bar:
    require_all_teams(principal)
    return bar_of("/fleet/nodes", asked, deps, {"ledger": asked.ledger})


def _nodes_of_ledgers(
    state: FleetState, asked: FleetNodes, bar: Bar
) -> tuple[list[_NodeRow], list[CachedAnswer[ListedNodes]], list[str]]:
    """The nodes of the ledgers in the order of the view, the answers, and why other ledgers are left out."""

    def of_ledger(pages: Deps) -> CachedAnswer[ListedNodes]:
        def check() -> None:
            for one in with_span_before(bar.span, pages.ledger.status().extent, compare=asked.compare):
                check_cost(pages.ledger, pages.settings.limits, one, NODES_WIDTH, asked.where_cluster)

        return page_queries.machines(pages, ListSpan.of(asked, pages, compared=asked.compare), asked.where, check)

    answers, left_out = state.asked(asked.ledger, of_ledger)
    rows = [_NodeRow(name, node) for name, answer in answers.items() for node in answer.value.nodes]
    ledger_of = {id(row.node): row.ledger for row in rows}
    ranked = node_list.chosen([row.node for row in rows], asked.choice)
    return [_NodeRow(ledger_of[id(node)], node) for node in ranked], list(answers.values()), left_out


def _page(
    request: Request, deps: Deps, template: str, as_of_ms: int | None, current: str = "/fleet", **values: Any
) -> Response:
    return month_and_decision_pages.page(
        request,
        current,
        template,
        deps,
        menu=month_and_decision_pages.menu_of(request, deps, "fleet"),
        as_of_ms=as_of_ms,
        **values,
    )


@dataclass(frozen=True, slots=True)
class _TeamRow:
    """The GPU time of a team in several ledgers. owed: (currency, amount that the team owes)."""

    team: str
    ledgers: Sequence[str]
    gpu_us: int
    owed: Sequence[tuple[str, Any]]


def _until_text(row: LedgerMonth) -> str:
    """The instant up to which a ledger has published figures, in its own time zone."""
    return f"{datetime.fromtimestamp(row.until_ms / MS_PER_SECOND, periods.zone(row.timezone)):%-d %b %H:%M}"


def _teams(rows: Sequence[TeamMonth]) -> list[_TeamRow]:
    """A row per team: the team that held most GPU time first, and time without a team last."""
    by_team: dict[str, list[TeamMonth]] = {}
    for row in rows:
        by_team.setdefault(row.team, []).append(row)
    team_rows = [
        _TeamRow(team, [one.ledger for one in several], sum(one.gpu_us for one in several), _owed(several))
        for team, several in by_team.items()
    ]
    return sorted(team_rows, key=lambda row: (row.team in (IDLE, UNASSIGNED), -row.gpu_us, row.team))


def _owed(rows: Sequence[TeamMonth]) -> list[tuple[str, Any]]:
    """The known amounts due, added up per currency, as (currency, amount)."""
    currencies = sorted({one.currency for one in rows if one.currency and one.due is not None})
    return [
        (currency, exact_sum(one.due for one in rows if one.currency == currency and one.due is not None))
        for currency in currencies
    ]


def _neighbours(state: FleetState, month: str) -> tuple[Month | None, Month | None]:
    """The months before and after a month, each None if it cannot have records."""
    shown, zone = Month.parse(month), periods.zone("UTC")
    begun, _ = state.status().extent
    before = shown.previous if begun and shown.span(zone)[0] > begun else None
    after = shown.next if shown.next.span(zone)[0] < state.clock.wall_ms() else None
    return before, after


ROUTES = router.routes
