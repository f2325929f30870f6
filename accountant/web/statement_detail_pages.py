"""Serves the pages behind a figure: statement lines and journal entries.

Every figure of the month's and the team's page links here with the selection of statement lines that it sums. The last
row of the table is the figure itself: the sum of all its lines, even if only the largest are listed.

A team lead sees the lines of their own teams, and only acts that concern these."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from accountant.api.access_control import Reader, own_teams_only, team_for
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.ingest_and_policy_routes import every_policy
from accountant.api.problems import Refusal
from accountant.api.query_parameters import Params
from accountant.billing.statement_breakdown import (
    DIMENSIONS,
    LATE,
    BreakdownRow,
    Cut,
    ItemAmount,
    Itemised,
    LineFilter,
    accounts_named,
    itemise,
)
from accountant.billing.statements import Statement, StatementLine
from accountant.bookkeeping.act_contents import ENTRIES, booked_by
from accountant.core.periods import Month
from accountant.exports.protocol import CSV, file_name
from accountant.ledger.journal import Act, ActKind
from accountant.ledger.protocols import JobKey
from accountant.ledger.usage import Capacity
from accountant.prices.price_book import PriceBook
from accountant.reports import figure_formatting
from accountant.web import month_and_decision_pages, page_queries
from accountant.web.page_queries import Bills, books
from accountant.web.page_rows import of_lines
from accountant.web.version_differences import MOST_LINES, difference_of
from accountant.wire.policy_models import IDLE
from gputally.base.money import exact_sum, plain
from gputally.base.untrusted_text import for_cell
from gputally.server.request_handling import tagged
from gputally.server.tokens_and_grants import Principal

router = APIRouter(include_in_schema=False)
MOST_ROWS = 200
_CUTS: dict[Cut, str] = {
    "team": "Team", "queue": "Queue", "job": "Job", "pod": "Pod", "user": "User", "node": "Node", "gpu": "GPU",
    "day": "Day",
}  # fmt: skip
LATE_TEXT = "records that came after the month was closed"
Choice = Literal[Capacity, "allocated", ""]


class LinesParams(Params):
    """The parameters of the page of a statement's lines.

    by: how the lines are grouped. None: by node for time without a holder, otherwise by team for the whole cluster and
        by job for one team."""

    team: str | None = Field(default=None, max_length=253)
    account: Choice = ""
    gpu_model: str | None = Field(default=None, max_length=200)
    capacity_type: str | None = Field(default=None, max_length=50)
    price_row: str | None = Field(default=None, max_length=200)
    payers: bool = False
    by: Cut | None = None

    def figure(self, team: str | None) -> LineFilter:
        return LineFilter(
            team, accounts_named(self.account), self.gpu_model, self.capacity_type, self.price_row, self.payers
        )


@router.get("/month/{month}/lines")
def lines(
    request: Request, month: str, params: Annotated[LinesParams, Query()], deps: AppDeps, principal: Reader
) -> Response:
    team, calendar_month, by = _chosen(month, params, deps, principal)
    figure, bills = params.figure(team), page_queries.bills_of(deps, calendar_month, by)
    kept = deps.books.kept(calendar_month)
    book = deps.books.priced_by(kept)
    # Lines depend only on this key: what was rendered from the same bills is reused.
    key = ("lines", calendar_month, figure, by, books(deps), bills.value.found_ms)
    shown = deps.answers.ask(key, lambda: _shown(kept, figure, bills.value, by), lambda: None).value
    query = params.model_dump(exclude_none=True, exclude_defaults=True) | ({"team": team} if team else {})
    return month_and_decision_pages.page(
        request, "/month", "lines.html", deps, month=calendar_month, team=team, params=params, by=by, found=shown,
        as_of_ms=bills.as_of_ms, metered=(kept or bills.value.stated).metered,
        cuts=[(cut, name, of_lines(calendar_month, query | {"by": cut})) for cut, name in _CUTS.items()
              if cut != "team" or team is None],
        file=of_lines(calendar_month, query | {"by": by}, ".csv"), currency=book.currency if book else None,
        sources={price.id: price.row for price in book.prices} if book else {}, named=_named, late=LATE_TEXT,
        whole_month=f"/team/{quote(team, safe='')}?month={calendar_month}" if team not in (None, IDLE) else
        f"/month/{calendar_month}" if principal.teams is None else None, mine=principal.teams is not None,
    )  # fmt: skip


@router.get("/month/{month}/lines.csv")
def lines_file(
    request: Request, month: str, params: Annotated[LinesParams, Query()], deps: AppDeps, principal: Reader
) -> Response:
    """The CSV file of all items: exact hours and costs, and the payable amounts, rounded to the currency's minor
    unit."""
    team, calendar_month, by = _chosen(month, params, deps, principal)
    kept, bills = deps.books.kept(calendar_month), page_queries.bills_of(deps, calendar_month, by).value
    stated = kept or bills.stated
    itemised = itemise(stated, params.figure(team), bills.groups, by)
    text = _lines_csv(itemised, deps.books.priced_by(kept), calendar_month, by, metered=stated.metered)
    return tagged(request, text.encode(), CSV, file_name("csv", str(calendar_month), team, "lines", by))


@dataclass(frozen=True, slots=True)
class _ShownLines:
    """The lines behind one figure, as far as the page shows them.

    rows: the most expensive things of the breakdown.
    rest: the `more` other things as one row; None if there are none.
    count: how many things have a name."""

    lines: Sequence[tuple[StatementLine, ItemAmount]]
    whole: ItemAmount
    rows: Sequence[BreakdownRow]
    rest: BreakdownRow | None
    more: int
    count: int


def _shown(stored: Statement | None, line_filter: LineFilter, bills: Bills, by: Cut) -> _ShownLines:
    """The lines behind one figure of a statement. stored: the statement of a closed month; None for an open month."""
    itemised = itemise(stored or bills.stated, line_filter, bills.groups, by)
    return _ShownLines(itemised.lines, itemised.whole, *itemised.dearest(MOST_ROWS), itemised.count)


def _chosen(month: str, params: LinesParams, deps: Deps, principal: Principal) -> tuple[str | None, Month, Cut]:
    team = team_for(principal, params.team)
    return team, month_and_decision_pages.month_of(deps, month), params.by or _fitting(params, team)


def _fitting(params: LinesParams, team: str | None) -> Cut:
    if team == IDLE or params.account in ("unallocated", "unmetered", "down"):
        return "node"
    return "team" if team is None else "job"


def _named(by: Cut, key: tuple[str, ...]) -> tuple[str, str, str | None]:
    """The name of an item, the text below it, and the URL of its page; None: it has no page."""
    if key == LATE:
        return LATE_TEXT, "", None
    names = dict(zip(DIMENSIONS[by], key, strict=True))
    name = names[by]
    if by in ("job", "pod"):
        job = names["job"]
        link = f"/job/{quote(JobKey(names['cluster'], names['namespace'], job).id)}" if job else None
        return name, names["namespace"], link
    if by == "queue":
        return figure_formatting.queue(name), "", None
    if by in ("node", "gpu"):
        node = names["node"]
        link = f"/node/{quote(names['cluster'], safe='')}/{quote(node, safe='')}" if node else None
        return name, node if by == "gpu" else names["cluster"], link
    return name, "", None


def _lines_csv(itemised: Itemised, book: PriceBook | None, month: Month, by: Cut, *, metered: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    own = [name for name in DIMENSIONS[by] if name != "team"]
    writer.writerow(
        ["month", "team", *own, "account", "detail", "gpu_model", "capacity_type", "price_row", "price_source",
         "currency", "unit_price", "gpu_hours", "cost", "payable"]
    )  # fmt: skip
    sources = {price.id: price.row.source for price in book.prices} if book else {}
    currency = book.currency if book else ""
    for item in itemised.items:
        line = item.line
        names = dict(zip(DIMENSIONS[by], item.key, strict=True)) if item.key != LATE else {}
        writer.writerow(
            [str(month), for_cell(line.team), *(for_cell(names.get(name, "")) for name in own), line.account,
             "late" if item.key == LATE else line.detail, for_cell(line.gpu_model), for_cell(line.capacity_type),
             for_cell(line.price_row or ""), for_cell(sources.get(line.price_row or "", "")), currency,
             *(_plain(each) for each in (line.unit_price, item.part.gpu_hours, item.part.cost, item.part.amount))]
        )  # fmt: skip
    whole = itemised.whole
    known = metered and not (not whole.cost and any(part.cost is None for _, part in itemised.lines))
    figures = (whole.gpu_hours, *((whole.cost, whole.amount) if known else (None, None)))
    writer.writerow(
        [str(month), "", *("" for _ in own), "total", "", "", "", "", "", currency, "",
         *(_plain(each) for each in figures)]
    )  # fmt: skip
    return text.getvalue()


def _plain(value: Decimal | None) -> str:
    return "" if value is None else plain(value)


WHAT: Final[Mapping[ActKind, str]] = {
    "prices": "A price book came into force", "closed": "The month was closed",
    "reopened": "The month was reopened",
    "published": "The month was published", "repriced": "The month was repriced",
    "corrected": "A proposal was booked", "refused": "A proposal was refused",
    "adjusted": "A credit or charge was booked",
    "invoiced": "An invoice was stored", "policy": "A policy came into force", "pods": "Facts about pods were reported",
    "delivery": "A delivery was recorded", "imported": "History was imported",
    "withdrawn": "An import was withdrawn",
    "retired": "GPUs were retired",
    "moved": "GPUs moved to another node",
    "redated": "Dates in the future were corrected",
    "lake": "Publication in a lake",
    "drafted": "A draft of the month was kept",
}  # fmt: skip


@router.get("/act/{number}")
def act(request: Request, number: int, deps: AppDeps, principal: Reader) -> Response:
    acts: list[Act] = []
    if 0 < number < 2**62:
        with deps.ledger.moment() as moment:
            acts = moment.acts(after=number - 1, limit=1)
    if not acts or acts[0].number != number:
        raise Refusal("not-found", f"the journal has no act {number}: the page Audit and GET /v1/audit list the acts")
    corrections, adjustments = booked_by(acts[0])
    if principal.teams is not None:
        corrections = tuple(booking for booking in corrections if booking.line.team in principal.teams)
        adjustments = tuple(booking for booking in adjustments if booking.team in principal.teams)
        if not corrections and not adjustments:
            raise own_teams_only(principal)
    book = deps.book()
    found = difference_of(acts[0], deps.books.prices.versions, every_policy(deps))
    return month_and_decision_pages.page(
        request, "/month", "act.html", deps, act=acts[0], what=WHAT[acts[0].kind], corrections=corrections,
        difference=None if found is None else found[:MOST_LINES], left_out=max(0, len(found or ()) - MOST_LINES),
        adjustments=adjustments, currency=book.currency if book else None,
        month=acts[0].kind in (*ENTRIES, "invoiced", "drafted"),
        total=exact_sum([*(booking.amount for booking in corrections), *(booking.amount for booking in adjustments)]),
        everyone=principal.teams is None,
    )  # fmt: skip
