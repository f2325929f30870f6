"""Serves statements and reports, and closes, reopens and publishes months.

Statements and reports are computed on request and have an ETag of their content, so that a client with the same content
gets 304 instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field

from accountant.api.access_control import Administering, Reading, body, team_for
from accountant.api.bookkeeping_models import ObjectionLine, Period
from accountant.api.dependencies import Deps, Given
from accountant.api.problems import answers, refuses, takes
from accountant.api.query_parameters import REPORT_WIDTH, MonthText, SpanParams, check_cost, check_teams, invalid
from accountant.billing.cost_allocation import statement
from accountant.billing.statements import canonical
from accountant.bookkeeping.month_closing import ClosedMonths, Objecting
from accountant.core import periods
from accountant.core.periods import Month
from accountant.reports import report_builder
from accountant.reports.output_formats import RENDERINGS, Form, file_name
from gputally.server.config_loading import Model
from gputally.server.request_handling import tagged

statement_router = APIRouter(tags=["statements"])


class StatementParams(SpanParams):
    """A month, or start and end; without either the current month so far."""

    month: MonthText | None = None
    team: str | None = Field(default=None, max_length=253, description="One team instead of all.")


class ReportParams(StatementParams):
    format: Form = Field(default="html", description="In which form.")


@dataclass(frozen=True, slots=True)
class StatementSpan:
    """[start_ms, end_ms) in a time zone. month: set if it is one of the accountant's months, or the beginning of
    one."""

    start_ms: int
    end_ms: int
    timezone: str
    month: Month | None = None


def statement_span(asked: StatementParams, deps: Deps) -> StatementSpan:
    """The span of a request; the current month ends now. Raises Refusal."""
    now = deps.clock.wall_ms()
    if asked.month is None:
        start, end, name = asked.span(now, deps.settings.timezone, deps.settings.limits, deps.newest_ms())
        if asked.start is not None or asked.end is not None:
            check_cost(deps.ledger, deps.settings.limits, start, end, REPORT_WIDTH)
        return StatementSpan(start, end, name)
    if asked.start is not None or asked.end is not None:
        raise invalid("month", "give a month, or start and end, not both")
    name = asked.timezone or deps.settings.timezone
    month = Month.parse(asked.month)
    start, end = month.span(periods.zone(name))
    if start >= now:
        raise invalid("month", f"{asked.month} has not begun")
    return StatementSpan(start, min(end, now), name, month if name == deps.settings.timezone else None)


@statement_router.get(
    "/v1/statement",
    summary="Lines that add up, to the last digit",
    response_class=Response,
    responses=answers("Canonical JSON of the statement", "application/json")
    | refuses("not-found", "invalid-parameter", "ledger-unavailable"),
)
def month_statement(
    request: Request, asked: Annotated[StatementParams, Query()], deps: Given, principal: Reading
) -> Response:
    """Returns the statement as canonical JSON: equal records, prices and policies give equal bytes. The ETag is its
    SHA-256."""
    span = statement_span(asked, deps)
    team = team_for(principal, asked.team)
    check_teams(deps, principal, () if team is None else (team,))
    teams = None if team is None else (team,)
    if span.month is not None:
        found = deps.books.month(span.month, teams)
    else:
        found = statement(deps.ledger, deps.book(), span.start_ms, span.end_ms, span.timezone, teams=teams)
    return tagged(request, canonical(found), "application/json")


@statement_router.get(
    "/v1/report",
    summary="The report of a month or any span",
    response_class=Response,
    responses=answers("The report", *(form.media_type.partition(";")[0] for form in RENDERINGS.values()))
    | refuses("not-found", "invalid-parameter", "cannot-render", "ledger-unavailable"),
)
def month_report(
    request: Request, asked: Annotated[ReportParams, Query()], deps: Given, principal: Reading
) -> Response:
    """Returns the report as one self-contained page, or the same figures for printing, spreadsheets and programs. Equal
    records, prices and policies give equal bytes; the ETag is their SHA-256."""
    form = RENDERINGS[asked.format]
    span = statement_span(asked, deps)
    if form.charges and span.month is None:
        raise invalid("format", f"{asked.format} is of a calendar month of {deps.settings.timezone}: give a month")
    team = team_for(principal, asked.team)
    check_teams(deps, principal, () if team is None else (team,))
    found = report_builder.report(
        deps.ledger, deps.books, span.start_ms, span.end_ms, span.timezone, month=span.month, team=team,
        issuer=deps.settings.issuer if form.charges else None,
    )  # fmt: skip
    name = "" if form.inline else file_name(form.extension, asked.month, team)
    return tagged(request, form.render(found), form.media_type, name)


period_router = APIRouter(tags=["periods"])
InPath = Annotated[MonthText, Path(description="A calendar month: 2026-10.")]


class Close(Model):
    """The request to close a month. acknowledge: kinds of objections to accept; this needs a reason."""

    reason: str = Field(default="", max_length=1000)
    acknowledge: tuple[Objecting, ...] = ()


class CloseReason(Model):
    reason: str = Field(default="", max_length=1000)


_REFUSALS = refuses(
    "malformed-body", "too-large", "invalid-body", "invalid-parameter", "books-refuse", "ledger-unavailable"
)


@period_router.get("/v1/periods", summary="All months that are closed, and those that wait", responses=refuses())
def list_periods(deps: Given, _: Reading) -> list[Period]:
    """Lists the months, oldest first, from the first closed month, or the first with records, to the current month."""
    books, now = deps.books.books(), deps.clock.wall_ms()
    current = Month.of(now, deps.settings.zone)
    known = [Month.parse(closed.month) for closed in books.closed]
    waiting = known[-1].next if known else Month.of(min(now, deps.ledger.extent()[0] or now), deps.settings.zone)
    while waiting <= current:
        known.append(waiting)
        waiting = waiting.next
    return [_period(deps, month, books) for month in known]


@period_router.get("/v1/periods/{month}", summary="One month, with what speaks against closing it", responses=_REFUSALS)
def read_period(month: InPath, deps: Given, _: Reading) -> Period:
    return _with_objections(deps, Month.parse(month))


@period_router.post(
    "/v1/periods/{month}/close",
    summary="Close a month",
    **takes(Close, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def close(month: InPath, asked: Annotated[Close, body(Close)], deps: Given, principal: Administering) -> Period:
    """Closes the month: its statement does not change any more; later records are corrected in the next month."""
    deps.books.close(Month.parse(month), principal.name, asked.reason, asked.acknowledge)
    return _with_objections(deps, Month.parse(month))


@period_router.post(
    "/v1/periods/{month}/reopen",
    summary="Open the newest closed month again",
    **takes(CloseReason, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def reopen(
    month: InPath, asked: Annotated[CloseReason, body(CloseReason)], deps: Given, principal: Administering
) -> Period:
    """Opens a month that is not published yet; a reason is required."""
    deps.books.reopen(Month.parse(month), principal.name, asked.reason)
    return _with_objections(deps, Month.parse(month))


@period_router.post(
    "/v1/periods/{month}/publish",
    summary="Publish a closed month",
    **takes(CloseReason, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def publish(
    month: InPath, asked: Annotated[CloseReason, body(CloseReason)], deps: Given, principal: Administering
) -> Period:
    """Publishes the month, which cannot be reopened afterwards."""
    deps.books.publish(Month.parse(month), principal.name, asked.reason)
    return _with_objections(deps, Month.parse(month))


def _period(deps: Deps, month: Month, books: ClosedMonths) -> Period:
    start, end = month.span(deps.settings.zone)
    closed = books.of(str(month))
    return Period(
        month=str(month),
        start_ms=start,
        end_ms=end,
        status=deps.books.status(month, books),
        hash=closed.hash if closed else None,
        closed_ms=closed.at_ms if closed else None,
        closed_by=closed.who if closed else None,
    )


def _with_objections(deps: Deps, month: Month) -> Period:
    standing = tuple(ObjectionLine.from_object(found) for found in deps.books.standing(month))
    return _period(deps, month, deps.books.books()).model_copy(update={"objections": standing})
