"""GET /v1/statement and /v1/report: what a span costs, as data and as something to read.

Both are computed from the ledger when asked, and carry an ETag of their content, so that a reader who
has the same content is told so without sending it again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from accountant import periods
from accountant.api.access import Reading, team_for
from accountant.api.conditional import tagged
from accountant.api.deps import Deps, Given
from accountant.api.known import check_teams
from accountant.api.openapi import answers, refuses
from accountant.api.params import MonthText, SpanParams, check_cost, invalid
from accountant.books.statements import canonical, statement
from accountant.periods import Month
from accountant.question_cost import REPORT_WIDTH
from accountant.reports import making
from accountant.reports.names import file_name
from accountant.reports.renderings import RENDERINGS, Form

router = APIRouter(tags=["statements"])


class StatementParams(SpanParams):
    """A month, or start and end; without either the current month so far."""

    month: MonthText | None = None
    team: str | None = Field(default=None, max_length=253, description="One team instead of all.")


class ReportParams(StatementParams):
    format: Form = Field(default="html", description="In which form.")


@dataclass(frozen=True, slots=True)
class Period:
    """[start_ms, end_ms) in a time zone. month: where it is one of the accountant's own months, or its beginning."""

    start_ms: int
    end_ms: int
    timezone: str
    month: Month | None = None


def period(asked: StatementParams, deps: Deps) -> Period:
    """A running month ends now. Raises Refusal."""
    now = deps.clock.wall_ms()
    if asked.month is None:
        start, end, name = asked.span(now, deps.settings.timezone, deps.settings.limits, deps.newest_ms())
        if asked.start is not None or asked.end is not None:
            check_cost(deps.ledger, deps.settings.limits, start, end, REPORT_WIDTH)
        return Period(start, end, name)
    if asked.start is not None or asked.end is not None:
        raise invalid("month", "give a month, or start and end, not both")
    name = asked.timezone or deps.settings.timezone
    month = Month.parse(asked.month)
    start, end = month.span(periods.zone(name))
    if start >= now:
        raise invalid("month", f"{asked.month} has not begun")
    return Period(start, min(end, now), name, month if name == deps.settings.timezone else None)


@router.get(
    "/v1/statement",
    summary="Lines that add up, to the last digit",
    response_class=Response,
    responses=answers("Canonical JSON of the statement", "application/json")
    | refuses("not-found", "invalid-parameter", "ledger-unavailable"),
)
async def month_statement(
    request: Request, asked: Annotated[StatementParams, Query()], deps: Given, principal: Reading
) -> Response:
    """Canonical JSON: equal records, prices and policies give equal bytes. The ETag is its SHA-256."""
    span = period(asked, deps)
    team = team_for(principal, asked.team)

    def make() -> bytes:
        check_teams(deps, principal, () if team is None else (team,))
        teams = None if team is None else (team,)
        if span.month is not None:
            return canonical(deps.books.month(span.month, teams))
        return canonical(statement(deps.ledger, deps.book(), span.start_ms, span.end_ms, span.timezone, teams=teams))

    return tagged(request, await asyncio.to_thread(make), "application/json")


@router.get(
    "/v1/report",
    summary="The report of a month or any span",
    response_class=Response,
    responses=answers("The report", *(form.media_type.partition(";")[0] for form in RENDERINGS.values()))
    | refuses("not-found", "invalid-parameter", "cannot-render", "ledger-unavailable"),
)
async def month_report(
    request: Request, asked: Annotated[ReportParams, Query()], deps: Given, principal: Reading
) -> Response:
    """One self-contained page, or the same figures for paper, spreadsheets and programs.

    Equal records, prices and policies give equal bytes; the ETag is their SHA-256."""
    form = RENDERINGS[asked.format]
    span = period(asked, deps)
    if form.charges and span.month is None:
        raise invalid("format", f"{asked.format} is of a calendar month of {deps.settings.timezone}: give a month")
    team = team_for(principal, asked.team)

    def make() -> bytes:
        check_teams(deps, principal, () if team is None else (team,))
        found = making.report(
            deps.ledger, deps.books, span.start_ms, span.end_ms, span.timezone, month=span.month, team=team,
            issuer=deps.settings.issuer if form.charges else None,
        )  # fmt: skip
        return form.render(found)

    name = "" if form.inline else file_name(form.extension, asked.month, team)
    return tagged(request, await asyncio.to_thread(make), form.media_type, name)
