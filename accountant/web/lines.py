"""`/month/…/lines`: what a figure of a month's page is made of, down to jobs, pods, nodes or days, and as CSV.

Every figure of the month's and the team's page links here with the choice of statement lines that it sums up. The
last row is the figure; nothing is left out of it, also where only the largest rows are shown.
"""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from accountant import periods
from accountant.api.access import Reading, team_for
from accountant.api.conditional import tagged
from accountant.api.deps import Deps, Given
from accountant.api.params import Params
from accountant.books.costs import Capacity
from accountant.books.itemised import DIMENSIONS, LATE, Cut, Figure, Itemised, Part, Row, accounts_named, itemise
from accountant.books.statements import Statement, StatementLine
from accountant.callers.auth import Principal
from accountant.money import plain
from accountant.periods import Month
from accountant.prices.book import PriceBook
from accountant.progress import JobKey
from accountant.reports import formats
from accountant.reports.names import file_name
from accountant.web import asking, pages
from accountant.web.addresses import of_lines
from accountant.web.asking import Bills, books
from accountant.wire import IDLE
from agent.plaintext import for_cell

router = APIRouter(include_in_schema=False)
MOST_ROWS = 200
_CUTS: dict[Cut, str] = {
    "team": "Team", "queue": "Queue", "job": "Job", "pod": "Pod", "user": "User", "node": "Node", "gpu": "GPU",
    "day": "Day",
}  # fmt: skip
LATE_TEXT = "records that came after the month was closed"
Choice = Literal[Capacity, "allocated", ""]


class LinesParams(Params):
    """by None: by team where the figure is of several, by node where nobody held it, else by job."""

    team: str | None = Field(default=None, max_length=253)
    account: Choice = ""
    gpu_model: str | None = Field(default=None, max_length=200)
    capacity_type: str | None = Field(default=None, max_length=50)
    price_row: str | None = Field(default=None, max_length=200)
    payers: bool = False
    by: Cut | None = None

    def figure(self, team: str | None) -> Figure:
        return Figure(
            team, accounts_named(self.account), self.gpu_model, self.capacity_type, self.price_row, self.payers
        )


@router.get("/month/{month}/lines")
async def lines(
    request: Request, month: str, asked: Annotated[LinesParams, Query()], deps: Given, principal: Reading
) -> Response:
    team, chosen, by = _chosen(month, asked, deps, principal)

    def make() -> bytes:
        figure, cut = asked.figure(team), asking.bills_of(deps, chosen, by)
        kept = deps.books.kept(chosen)
        book = deps.books.priced_by(kept)
        # Nothing else makes a figure, so what was made of these bills once is made of them.
        key = ("lines", chosen, figure, by, books(deps), cut.value.found_ms)
        found = deps.prepared.ask(key, lambda: _shown(kept, figure, cut.value), lambda: None).value
        query = asked.model_dump(exclude_none=True, exclude_defaults=True) | ({"team": team} if team else {})
        return pages.page(
            request, "/month", "lines.html", deps, month=chosen, team=team, asked=asked, by=by, found=found,
            as_of_ms=cut.as_of_ms,
            cuts=[(cut, name, of_lines(chosen, query | {"by": cut})) for cut, name in _CUTS.items()
                  if cut != "team" or team is None],
            file=of_lines(chosen, query | {"by": by}, ".csv"), currency=book.currency if book else None,
            sources={price.id: price.row for price in book.prices} if book else {}, named=_named, late=LATE_TEXT,
            whole_month=f"/team/{quote(team, safe='')}?month={chosen}" if team not in (None, IDLE) else
            f"/month/{chosen}" if principal.teams is None else None, mine=principal.teams is not None,
        )  # fmt: skip

    return tagged(request, await asyncio.to_thread(make), pages.HTML)


@router.get("/month/{month}/lines.csv")
async def lines_file(
    request: Request, month: str, asked: Annotated[LinesParams, Query()], deps: Given, principal: Reading
) -> Response:
    """Every item, none left out: exact hours and costs beside the payable minor units."""
    team, chosen, by = _chosen(month, asked, deps, principal)

    def make() -> bytes:
        kept, cut = deps.books.kept(chosen), asking.bills_of(deps, chosen, by).value
        found = itemise(kept or cut.stated, asked.figure(team), cut.groups)
        return _csv(found, deps.books.priced_by(kept), chosen, by).encode()

    name = file_name("csv", str(chosen), team, "lines", by)
    return tagged(request, await asyncio.to_thread(make), "text/csv; charset=utf-8", name)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the page shows of a figure. rows: the dearest; rest: the `more` others as one."""

    lines: Sequence[tuple[StatementLine, Part]]
    whole: Part
    rows: Sequence[Row]
    rest: Row | None
    more: int


def _shown(kept: Statement | None, figure: Figure, cut: Bills) -> _Shown:
    """kept: of a closed month the statement that the books have."""
    found = itemise(kept or cut.stated, figure, cut.groups)
    return _Shown(found.lines, found.whole, *found.dearest(MOST_ROWS))


def _chosen(month: str, asked: LinesParams, deps: Deps, principal: Principal) -> tuple[str | None, Month, Cut]:
    team = team_for(principal, asked.team)
    chosen = pages.begun(month, deps.clock.wall_ms(), periods.zone(deps.settings.timezone))
    return team, chosen, asked.by or _fitting(asked, team)


def _fitting(asked: LinesParams, team: str | None) -> Cut:
    if team == IDLE or asked.account in ("unallocated", "unmetered", "down"):
        return "node"
    return "team" if team is None else "job"


def _named(by: Cut, key: tuple[str, ...]) -> tuple[str, str, str | None]:
    """What to call an item, what to say beneath, and the page that it has."""
    if key == LATE:
        return LATE_TEXT, "", None
    names = dict(zip(DIMENSIONS[by], key, strict=True))
    name = names[by]
    if by in ("job", "pod"):
        job = names["job"]
        link = f"/job/{quote(JobKey(names['cluster'], names['namespace'], job).id)}" if job else None
        return name, names["namespace"], link
    if by == "queue":
        return formats.queue(name), "", None
    if by in ("node", "gpu"):
        node = names["node"]
        link = f"/node/{quote(names['cluster'], safe='')}/{quote(node, safe='')}" if node else None
        return name, node if by == "gpu" else names["cluster"], link
    return name, "", None


def _csv(found: Itemised, book: PriceBook | None, month: Month, by: Cut) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    own = [name for name in DIMENSIONS[by] if name != "team"]
    writer.writerow(
        ["month", "team", *own, "account", "detail", "gpu_model", "capacity_type", "price_row", "price_source",
         "currency", "unit_price", "gpu_hours", "cost", "payable"]
    )  # fmt: skip
    sources = {price.id: price.row.source for price in book.prices} if book else {}
    currency = book.currency if book else ""
    for item in found.items:
        line = item.line
        names = dict(zip(DIMENSIONS[by], item.key, strict=True)) if item.key != LATE else {}
        writer.writerow(
            [str(month), for_cell(line.team), *(for_cell(names.get(name, "")) for name in own), line.account,
             "late" if item.key == LATE else line.detail, for_cell(line.gpu_model), for_cell(line.capacity_type),
             for_cell(line.price_row or ""), for_cell(sources.get(line.price_row or "", "")), currency,
             *(_plain(each) for each in (line.unit_price, item.part.gpu_hours, item.part.cost, item.part.amount))]
        )  # fmt: skip
    whole = found.whole
    writer.writerow(
        [str(month), "", *("" for _ in own), "total", "", "", "", "", "", currency, "",
         *(_plain(each) for each in (whole.gpu_hours, whole.cost, whole.amount))]
    )  # fmt: skip
    return text.getvalue()


def _plain(value: Decimal | None) -> str:
    return "" if value is None else plain(value)
