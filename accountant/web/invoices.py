"""`/invoice`: the provider's invoice of a month against its books, line by line, and as CSV.

The invoice is the newest one that was kept (`gputally accountant reconcile --keep`, or a true-up).
"""

from __future__ import annotations

import asyncio
import csv
import io
from decimal import Decimal
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import Field

from accountant import periods
from accountant.api.access import Reading, of_everyone
from accountant.api.conditional import tagged
from accountant.api.deps import Deps, Given
from accountant.api.params import Params
from accountant.api.problems import Refusal
from accountant.books.closing import CannotClose
from accountant.books.reconcile import KeptInvoice, ReconciledLine, Reconciliation
from accountant.money import exact_sum, gpu_hours, half_unit, plain
from accountant.periods import Month
from accountant.reports.names import file_name
from accountant.web import pages
from agent.plaintext import for_cell

router = APIRouter(include_in_schema=False)
Show = Literal["all", "apart", "together", "foreign"]
SHOWS: dict[Show, str] = {
    "all": "all", "apart": "apart", "together": "in agreement", "foreign": "no GPU of ours",
}  # fmt: skip
PARTS = ("invoice", "teams", "idle", "unused_commitments", "unmatched")


class InvoiceParams(Params):
    """model: of the invoice's lines, as the price book writes it."""

    show: Show = "all"
    model: str | None = Field(default=None, max_length=200)

    def takes(self, line: ReconciledLine, cent: Decimal) -> bool:
        ours, apart = bool(line.gpu_model), abs(line.unmatched) >= cent
        fits = {"all": True, "apart": ours and apart, "together": ours and not apart, "foreign": not ours}[self.show]
        return fits and self.model in (None, line.gpu_model)


@router.get("/invoice")
async def newest(deps: Given, principal: Reading) -> Response:
    """To the newest month with an invoice; without any, to the month before this one."""
    of_everyone(principal)
    kept = await asyncio.to_thread(deps.ledger.acts, "invoiced")
    before = Month.of(deps.clock.wall_ms() - 1, periods.zone(deps.settings.timezone)).previous
    return RedirectResponse(f"/invoice/{max((act.subject for act in kept), default=str(before))}", 303)


@router.get("/invoice/{month}")
async def against_the_books(
    request: Request, month: str, asked: Annotated[InvoiceParams, Query()], deps: Given, principal: Reading
) -> Response:
    of_everyone(principal)
    tz = periods.zone(deps.settings.timezone)
    chosen = pages.begun(month, deps.clock.wall_ms(), tz)

    def make() -> bytes:
        kept = deps.books.invoices.newest(chosen)
        found = _reconciled(deps, chosen, kept)
        lines = [line for line in found.lines if asked.takes(line, half_unit(found.currency))] if found else []
        return pages.page(
            request, "/invoice", "invoice.html", deps, month=chosen, kept=kept, found=found, lines=lines, asked=asked,
            sums={part: exact_sum(getattr(line, part) for line in lines) for part in PARTS}, shows=SHOWS,
            models=sorted({line.gpu_model for line in found.lines if line.gpu_model}) if found else [],
            following=chosen.next if chosen.next.span(tz)[0] < deps.clock.wall_ms() else None, parts=PARTS,
            cent=half_unit(found.currency) if found else None,
        )  # fmt: skip

    return tagged(request, await asyncio.to_thread(make), pages.HTML)


@router.get("/invoice/{month}/lines.csv")
async def as_file(
    request: Request, month: str, asked: Annotated[InvoiceParams, Query()], deps: Given, principal: Reading
) -> Response:
    of_everyone(principal)
    chosen = pages.begun(month, deps.clock.wall_ms(), periods.zone(deps.settings.timezone))

    def make() -> bytes:
        found = _reconciled(deps, chosen, deps.books.invoices.newest(chosen))
        if found is None:
            raise Refusal("not-found", f"no invoice of {chosen} was kept")
        return _csv(found, [line for line in found.lines if asked.takes(line, half_unit(found.currency))]).encode()

    name = file_name("csv", str(chosen), "invoice")
    return tagged(request, await asyncio.to_thread(make), "text/csv; charset=utf-8", name)


def _reconciled(deps: Deps, month: Month, kept: KeptInvoice | None) -> Reconciliation | None:
    if kept is None:
        return None
    try:
        return deps.books.reconcile(month, kept.invoice)
    except CannotClose as error:
        raise Refusal("books-refuse", str(error)) from error


def _csv(found: Reconciliation, lines: list[ReconciledLine]) -> str:
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
