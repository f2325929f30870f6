"""Serves the pages behind a figure: statement lines, journal entries, the provider's invoice.

Every figure of the month's and the team's page links here with the selection of statement lines that it sums. The last
row is the figure. It includes everything, even if only the largest rows are shown.

A team lead sees the lines of their own teams, and only acts that concern these.

The invoice is the newest stored one (`gputally accountant reconcile --keep`, or a true-up)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import Field

from accountant.api.access_control import Reading, of_everyone, team_for
from accountant.api.dependencies import Deps, Given
from accountant.api.problems import Refusal
from accountant.api.query_parameters import Params
from accountant.billing.statement_breakdown import (
    DIMENSIONS,
    LATE,
    Cut,
    ItemAmount,
    Itemised,
    LineFilter,
    Row,
    accounts_named,
    itemise,
)
from accountant.billing.statements import Statement, StatementLine
from accountant.billing.usage_pricing import Capacity
from accountant.bookkeeping.bookkeeper import ENTRIES
from accountant.bookkeeping.invoice_reconciliation import KeptInvoice, ReconciledLine, Reconciliation
from accountant.bookkeeping.month_closing import CannotClose
from accountant.core import periods
from accountant.core.periods import Month
from accountant.ledger.journal import ActKind
from accountant.ledger.protocols import JobKey
from accountant.prices.price_book import PriceBook
from accountant.reports import report_text
from accountant.reports.output_formats import file_name
from accountant.web import overview_pages, page_queries
from accountant.web.page_queries import Bills, books
from accountant.web.page_rows import booked, of_lines
from accountant.wire.policy_models import IDLE
from gputally.base.money import exact_sum, gpu_hours, half_unit, plain
from gputally.base.untrusted_text import for_cell
from gputally.server.request_handling import tagged
from gputally.server.tokens_and_grants import Principal

router = APIRouter(include_in_schema=False)
CSV = "text/csv; charset=utf-8"
MOST_ROWS = 200
_CUTS: dict[Cut, str] = {
    "team": "Team", "queue": "Queue", "job": "Job", "pod": "Pod", "user": "User", "node": "Node", "gpu": "GPU",
    "day": "Day",
}  # fmt: skip
LATE_TEXT = "records that came after the month was closed"
Choice = Literal[Capacity, "allocated", ""]


class LinesParams(Params):
    """The parameters of the page of a statement's lines. by: None: by team if the figure covers several, by node if it
    had no holder, otherwise by job."""

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
    request: Request, month: str, asked: Annotated[LinesParams, Query()], deps: Given, principal: Reading
) -> Response:
    team, chosen, by = _chosen(month, asked, deps, principal)
    figure, cut = asked.figure(team), page_queries.bills_of(deps, chosen, by)
    kept = deps.books.kept(chosen)
    book = deps.books.priced_by(kept)
    # Lines depend only on this key: what was rendered from the same bills is reused.
    key = ("lines", chosen, figure, by, books(deps), cut.value.found_ms)
    found = deps.answers.ask(key, lambda: _shown(kept, figure, cut.value), lambda: None).value
    query = asked.model_dump(exclude_none=True, exclude_defaults=True) | ({"team": team} if team else {})
    return overview_pages.page(
        request, "/month", "lines.html", deps, month=chosen, team=team, asked=asked, by=by, found=found,
        as_of_ms=cut.as_of_ms, metered=(kept or cut.value.stated).metered,
        cuts=[(cut, name, of_lines(chosen, query | {"by": cut})) for cut, name in _CUTS.items()
              if cut != "team" or team is None],
        file=of_lines(chosen, query | {"by": by}, ".csv"), currency=book.currency if book else None,
        sources={price.id: price.row for price in book.prices} if book else {}, named=_named, late=LATE_TEXT,
        whole_month=f"/team/{quote(team, safe='')}?month={chosen}" if team not in (None, IDLE) else
        f"/month/{chosen}" if principal.teams is None else None, mine=principal.teams is not None,
    )  # fmt: skip


@router.get("/month/{month}/lines.csv")
def lines_file(
    request: Request, month: str, asked: Annotated[LinesParams, Query()], deps: Given, principal: Reading
) -> Response:
    """Every item: exact hours and costs, and the payable minor units."""
    team, chosen, by = _chosen(month, asked, deps, principal)
    kept, cut = deps.books.kept(chosen), page_queries.bills_of(deps, chosen, by).value
    stated = kept or cut.stated
    found = itemise(stated, asked.figure(team), cut.groups)
    text = _lines_csv(found, deps.books.priced_by(kept), chosen, by, metered=stated.metered)
    return tagged(request, text.encode(), CSV, file_name("csv", str(chosen), team, "lines", by))


@dataclass(frozen=True, slots=True)
class _ShownLines:
    """The displayed part of a figure.

    rows: the most expensive.
    rest: the `more` others as one row."""

    lines: Sequence[tuple[StatementLine, ItemAmount]]
    whole: ItemAmount
    rows: Sequence[Row]
    rest: Row | None
    more: int


def _shown(kept: Statement | None, figure: LineFilter, cut: Bills) -> _ShownLines:
    """Return the lines behind one figure of a statement. kept: the stored statement of a closed month."""
    found = itemise(kept or cut.stated, figure, cut.groups)
    return _ShownLines(found.lines, found.whole, *found.dearest(MOST_ROWS))


def _chosen(month: str, asked: LinesParams, deps: Deps, principal: Principal) -> tuple[str | None, Month, Cut]:
    team = team_for(principal, asked.team)
    chosen = overview_pages.asked_month(month, deps.clock.wall_ms(), periods.zone(deps.settings.timezone))
    return team, chosen, asked.by or _fitting(asked, team)


def _fitting(asked: LinesParams, team: str | None) -> Cut:
    if team == IDLE or asked.account in ("unallocated", "unmetered", "down"):
        return "node"
    return "team" if team is None else "job"


def _named(by: Cut, key: tuple[str, ...]) -> tuple[str, str, str | None]:
    """The name of an item, the text below it, and the URL of its page, None without one."""
    if key == LATE:
        return LATE_TEXT, "", None
    names = dict(zip(DIMENSIONS[by], key, strict=True))
    name = names[by]
    if by in ("job", "pod"):
        job = names["job"]
        link = f"/job/{quote(JobKey(names['cluster'], names['namespace'], job).id)}" if job else None
        return name, names["namespace"], link
    if by == "queue":
        return report_text.queue(name), "", None
    if by in ("node", "gpu"):
        node = names["node"]
        link = f"/node/{quote(names['cluster'], safe='')}/{quote(node, safe='')}" if node else None
        return name, node if by == "gpu" else names["cluster"], link
    return name, "", None


def _lines_csv(found: Itemised, book: PriceBook | None, month: Month, by: Cut, *, metered: bool) -> str:
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
    known = metered and not (not whole.cost and any(part.cost is None for _, part in found.lines))
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
    "reopened": "The month was opened again",
    "published": "The month was published", "repriced": "The month was priced again",
    "corrected": "Late facts were booked", "refused": "Late facts were refused",
    "adjusted": "A credit or charge was booked",
    "invoiced": "An invoice was kept", "policy": "A policy came into force", "pods": "Facts of pods were imported",
    "delivery": "A report was sent again", "imported": "History was imported",
    "retired": "GPUs were taken out of the capacity",
    "moved": "GPUs were given to another node",
    "redated": "What a clock that was ahead dated wrongly was healed",
}  # fmt: skip


@router.get("/act/{number}")
def act(request: Request, number: int, deps: Given, principal: Reading) -> Response:
    found = deps.ledger.trail(number - 1, 1) if 0 < number < 2**62 else []
    if not found or found[0].number != number:
        raise Refusal("not-found", f"the books have no act {number}")
    corrections, adjustments = booked(found[0])
    if principal.teams is not None:
        corrections = tuple(one for one in corrections if one.line.team in principal.teams)
        adjustments = tuple(one for one in adjustments if one.team in principal.teams)
        if not corrections and not adjustments:
            raise Refusal("forbidden", f"{principal.name!r} may see its own teams only")
    book = deps.book()
    return overview_pages.page(
        request, "/month", "act.html", deps, act=found[0], what=WHAT[found[0].kind], corrections=corrections,
        adjustments=adjustments, currency=book.currency if book else None,
        month=found[0].kind in (*ENTRIES, "invoiced"),
        total=exact_sum([*(one.amount for one in corrections), *(one.amount for one in adjustments)]),
        everyone=principal.teams is None,
    )  # fmt: skip


Show = Literal["all", "apart", "together", "foreign"]
SHOWS: dict[Show, str] = {
    "all": "all", "apart": "apart", "together": "in agreement", "foreign": "no GPU of the cluster",
}  # fmt: skip
PARTS = ("invoice", "teams", "idle", "unused_commitments", "unmatched")


class InvoiceParams(Params):
    """The parameters of the page of an invoice. model: of the invoice's lines, as in the price book."""

    show: Show = "all"
    model: str | None = Field(default=None, max_length=200)

    def takes(self, line: ReconciledLine, cent: Decimal) -> bool:
        ours, apart = bool(line.gpu_model), abs(line.unmatched) >= cent
        fits = {"all": True, "apart": ours and apart, "together": ours and not apart, "foreign": not ours}[self.show]
        return fits and self.model in (None, line.gpu_model)


@router.get("/invoice")
def newest(deps: Given, principal: Reading) -> Response:
    """Redirects to the newest month with an invoice; without any, to the previous month."""
    of_everyone(principal)
    kept = deps.ledger.acts("invoiced")
    before = Month.of(deps.clock.wall_ms() - 1, periods.zone(deps.settings.timezone)).previous
    return RedirectResponse(f"/invoice/{max((act.subject for act in kept), default=str(before))}", 303)


@router.get("/invoice/{month}")
def against_the_books(
    request: Request, month: str, asked: Annotated[InvoiceParams, Query()], deps: Given, principal: Reading
) -> Response:
    of_everyone(principal)
    tz = periods.zone(deps.settings.timezone)
    chosen = overview_pages.asked_month(month, deps.clock.wall_ms(), tz)
    kept = deps.books.invoices.newest(chosen)
    found = _reconciled(deps, chosen, kept)
    lines = [line for line in found.lines if asked.takes(line, half_unit(found.currency))] if found else []
    return overview_pages.page(
        request, "/invoice", "invoice.html", deps, month=chosen, kept=kept, found=found, lines=lines, asked=asked,
        sums={part: exact_sum(getattr(line, part) for line in lines) for part in PARTS}, shows=SHOWS,
        models=sorted({line.gpu_model for line in found.lines if line.gpu_model}) if found else [],
        following=chosen.next if chosen.next.span(tz)[0] < deps.clock.wall_ms() else None, parts=PARTS,
        cent=half_unit(found.currency) if found else None,
    )  # fmt: skip


@router.get("/invoice/{month}/lines.csv")
def as_file(
    request: Request, month: str, asked: Annotated[InvoiceParams, Query()], deps: Given, principal: Reading
) -> Response:
    of_everyone(principal)
    chosen = overview_pages.asked_month(month, deps.clock.wall_ms(), periods.zone(deps.settings.timezone))
    found = _reconciled(deps, chosen, deps.books.invoices.newest(chosen))
    if found is None:
        raise Refusal("not-found", f"no invoice of {chosen} was kept")
    text = _invoice_csv(found, [line for line in found.lines if asked.takes(line, half_unit(found.currency))])
    return tagged(request, text.encode(), CSV, file_name("csv", str(chosen), "invoice"))


def _reconciled(deps: Deps, month: Month, kept: KeptInvoice | None) -> Reconciliation | None:
    if kept is None:
        return None
    try:
        return deps.books.reconcile(month, kept.invoice)
    except CannotClose as error:
        raise Refusal("books-refuse", str(error)) from error


def _invoice_csv(found: Reconciliation, lines: list[ReconciledLine]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(["month", "items", "gpu_model", "region", "capacity_type", "currency", *PARTS, "gpu_hours", "rate"])
    for line in lines:
        names = (for_cell(each) for each in ("; ".join(line.items), line.gpu_model, line.region, line.capacity_type))
        writer.writerow(
            [found.month, *names, found.currency, *(plain(getattr(line, part)) for part in PARTS),
             plain(gpu_hours(line.gpu_us)), "" if line.rate is None else plain(line.rate)]
        )  # fmt: skip
    sums = (plain(exact_sum(getattr(line, part) for line in lines)) for part in PARTS)
    hours = plain(exact_sum(gpu_hours(line.gpu_us) for line in lines))
    writer.writerow([found.month, "total", "", "", "", found.currency, *sums, hours, ""])
    return text.getvalue()
