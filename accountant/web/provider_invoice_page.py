"""Serves the page of the provider's invoice: its lines beside the bills of the month, and the form that compares,
stores or applies one.

The page shows the newest stored invoice (of this form, `gputally accountant reconcile --keep`, or a true-up). The form
takes the sums of an invoice as text, a line an item; the command reads the provider's files, which have a line for
every hour of every machine."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from typing import Annotated, Final, Literal, TypeAlias, get_args

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import Field, ValidationError

from accountant.api.access_control import Reader, admit, check_form, require_all_teams
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.months_due import month_unknown
from accountant.api.problems import Refusal
from accountant.api.query_parameters import invalid
from accountant.billing.displayed_amounts import both_ways
from accountant.bookkeeping.invoice_reconciliation import (
    Invoice,
    InvoiceLine,
    KeptInvoice,
    ReconciledLine,
    Reconciliation,
)
from accountant.bookkeeping.month_closing import CannotClose
from accountant.core import periods
from accountant.core.periods import Month
from accountant.exports.protocol import CSV, file_name
from accountant.web import month_and_decision_pages
from accountant.web.month_and_decision_pages import TablesParams, sorting
from accountant.wire.list_order import PageTables, TableSorting
from gputally.base.money import Money, exact_sum, gpu_hours, half_unit, payable, plain
from gputally.base.untrusted_text import for_cell
from gputally.server.config_loading import fault_text
from gputally.server.request_handling import tagged

router = APIRouter(include_in_schema=False)
COLUMNS: Final = ("item", "gpu_model", "region", "capacity_type", "amount", "currency")
"""The columns of an invoice as text."""
_NEEDED: Final = {"item", "amount"}
_MOST_FORM_BYTES: Final = 262_144
Compared = Literal["compare", "keep", "apply"]
Show = Literal["all", "apart", "together", "foreign"]
SHOWS: dict[Show, str] = {
    "all": "all", "apart": "apart", "together": "in agreement", "foreign": "no GPU of the cluster",
}  # fmt: skip
PARTS = ("invoice", "teams", "idle", "unused_commitments", "unmatched")


ShownLine: TypeAlias = tuple[ReconciledLine, dict[str, Decimal]]
"""A line and the amounts that the page shows of it, by part: rows and columns of them add up."""


def _exact(part: str, shown: ShownLine) -> Decimal:
    amount: Decimal = getattr(shown[0], part)
    return amount


TABLES: Final = PageTables(
    {
        "lines": {
            "item": lambda shown: shown[0].items, "gpu_model": lambda shown: shown[0].gpu_model or None,
            **{part: partial(_exact, part) for part in PARTS},
            "gpu_hours": lambda shown: shown[0].gpu_us, "rate": lambda shown: shown[0].rate,
        }
    },
    frozenset({"item", "gpu_model"}),
)  # fmt: skip
"""The table that can be sorted, by the exact figures of its lines."""


class InvoiceParams(TablesParams):
    """The parameters of the page of an invoice. model: only lines of this GPU model, as in the price book."""

    show: Show = "all"
    model: str | None = Field(default=None, max_length=200)

    def order(self, month: Month) -> TableSorting:
        """The order of the lines. Raises Refusal."""
        show = None if self.show == "all" else self.show
        return sorting(TABLES, self, f"/invoice/{month}", show=show, model=self.model)

    def chosen(self, lines: Sequence[ShownLine], currency: str, order: TableSorting) -> Sequence[ShownLine]:
        """The lines that the page shows, in their order."""
        cent = half_unit(currency)
        return order.rows("lines", [shown for shown in lines if self.takes(shown[0], cent)])

    def takes(self, line: ReconciledLine, cent: Decimal) -> bool:
        ours, apart = bool(line.gpu_model), abs(line.unmatched) >= cent
        fits = {"all": True, "apart": ours and apart, "together": ours and not apart, "foreign": not ours}[self.show]
        return fits and self.model in (None, line.gpu_model)


@router.get("/invoice")
def newest(deps: AppDeps, principal: Reader) -> Response:
    """Redirects to the newest month with an invoice; without any, to the previous month."""
    require_all_teams(principal)
    with deps.ledger.moment() as moment:
        acts = moment.acts("invoiced")
    before = Month.of(deps.clock.wall_ms() - 1, periods.zone(deps.settings.timezone)).previous
    return RedirectResponse(f"/invoice/{max((act.subject for act in acts), default=str(before))}", 303)


@router.get("/invoice/{month}")
def against_the_books(
    request: Request, month: str, params: Annotated[InvoiceParams, Query()], deps: AppDeps, principal: Reader
) -> Response:
    require_all_teams(principal)
    calendar_month = month_and_decision_pages.month_of(deps, month)
    kept = deps.books.invoices.newest(calendar_month)
    reconciliation = _reconciled(deps, calendar_month, kept.invoice if kept else None)
    return _page(request, deps, calendar_month, params, reconciliation, kept, kept.invoice if kept else None)


@router.post("/invoice/{month}")
async def send(request: Request, month: str, deps: AppDeps) -> Response:
    """Compares the invoice of a form with the books; if the form says so, stores it, or prices the month by its rates
    (which stores it too), and leads to the page."""
    principal = await admit(request, deps, "admin", form=True)
    fields = await month_and_decision_pages.read_form(request, _MOST_FORM_BYTES)
    check_form(request, fields.pop("form_token", ""))
    calendar_month = month_and_decision_pages.month_of(deps, month)
    reason, who = fields.get("reason", "")[:1000], principal.actor
    step = fields.get("step", "compare")
    if step not in get_args(Compared):
        raise invalid("step", "a form compares an invoice, keeps it, or applies its rates: compare, keep, apply")

    def done() -> Response:
        currency = (book := deps.book()) and book.currency
        invoice = parse_invoice(fields.get("source", ""), fields.get("lines", ""), currency or "")
        if step == "compare":
            found = _reconciled(deps, calendar_month, invoice)
            kept = deps.books.invoices.newest(calendar_month)
            return _page(request, deps, calendar_month, InvoiceParams(), found, kept, invoice, compared=True)
        if step == "keep":
            deps.books.invoices.keep(calendar_month, invoice, who, reason)
        else:
            deps.books.true_up(calendar_month, invoice, who, reason)
        return RedirectResponse(f"/invoice/{calendar_month}", 303)

    async with deps.turns.turn("acts", request, who):
        return await asyncio.to_thread(done)


def parse_invoice(source: str, text: str, currency: str) -> Invoice:
    """Reads the sums of an invoice: a heading with some of COLUMNS, item and amount among them, and a line an item,
    separated by commas, semicolons or tabs.

    currency: of lines that name none. Raises Refusal with the number of the line, the reason and what to write."""
    text = text.strip("\ufeff \t\r\n").replace("\r\n", "\n").replace("\r", "\n")
    heading, _, _ = text.partition("\n")
    rows = csv.DictReader(io.StringIO(text), delimiter=max(",;\t", key=heading.count), restkey="")
    lines = []
    try:
        columns = _columns(rows.fieldnames or ())
        for row in rows:
            if row.get(""):
                raise invalid("lines", f"line {rows.line_num} has more values than the first line has columns")
            values = {column: (row[name] or "").strip() for column, name in columns.items()}
            lines.append(InvoiceLine.model_validate({**values, "currency": values.get("currency") or currency}))
        return Invoice(source=source.strip() or "entered on the page", lines=tuple(lines))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise invalid("lines", f"line {rows.line_num}, {field}: {fault_text(first)}") from error
    except csv.Error as error:
        raise invalid("lines", f"line {rows.line_num}: {error}") from error


def _columns(heading: Sequence[str]) -> dict[str, str]:
    """The columns of an invoice's text by their names, each as its heading writes it. Raises Refusal."""
    columns = {name.strip().casefold(): name for name in heading}
    if missing := sorted(_NEEDED - set(columns)):
        raise invalid(
            "lines", f"the first line has no column {' and '.join(missing)}: name the columns, of {', '.join(COLUMNS)}"
        )
    if unknown := sorted(set(columns) - set(COLUMNS)):
        raise invalid("lines", f"the first line has the column {unknown[0]!r}: the columns are {', '.join(COLUMNS)}")
    if len(columns) < len(heading):
        raise invalid("lines", "the first line names a column twice: keep the one that counts")
    return columns


def invoice_text(invoice: Invoice) -> str:
    """The invoice as `parse_invoice` reads it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for line in invoice.lines:
        writer.writerow((line.item, line.gpu_model, line.region, line.capacity_type, plain(line.amount), line.currency))
    return text.getvalue()


def _page(
    request: Request,
    deps: Deps,
    month: Month,
    params: InvoiceParams,
    found: Reconciliation | None,
    kept: KeptInvoice | None,
    sent: Invoice | None,
    *,
    compared: bool = False,
) -> Response:
    """found: the comparison that is shown. kept: the newest stored invoice. sent: the invoice in the form.

    compared: whether `found` is of an invoice that is not stored."""
    following, now_ms = month.next, deps.clock.wall_ms()
    totals, every = _shown(found) if found else ({}, [])
    cent = half_unit(found.currency) if found else Decimal(0)
    order = params.order(month)
    rows = params.chosen(every, found.currency, order) if found else []
    principal = request.state.caller
    return month_and_decision_pages.page(
        request, "/invoice", "invoice.html", deps, month=month, kept=kept, found=found, rows=rows, params=params,
        totals=totals, sums={part: exact_sum(amounts[part] for _, amounts in rows) for part in PARTS}, shows=SHOWS,
        also_charged=any(line.down_gpu_us or line.unmetered_gpu_us for line, _ in rows),
        models=sorted({line.gpu_model for line in found.lines if line.gpu_model}) if found else [],
        following=following if following.span(periods.zone(deps.settings.timezone))[0] < now_ms else None, parts=PARTS,
        cent=cent, compared=compared, may=principal.may("admin"),
        forms=month_and_decision_pages.takes_forms(request, deps),
        source=sent.source if sent else "", text=invoice_text(sent) if sent else "", columns=COLUMNS,
        order=order, priced=deps.book() is not None, unknown=month_unknown(deps, month),
    )  # fmt: skip


def _shown(found: Reconciliation) -> tuple[dict[str, Decimal], list[ShownLine]]:
    """The amounts that the page shows of the whole, by part, and of each line."""
    parts = PARTS[1:]
    whole = payable({part: Money(getattr(found, part), found.currency) for part in parts}, found.currency)
    totals = {part: money.amount for part, money in whole.items()}
    rows = both_ways(
        ([getattr(line, part) for part in parts] for line in found.lines), list(totals.values()), found.currency
    )
    lines = [
        (line, {"invoice": exact_sum(row), **dict(zip(parts, row, strict=True))})
        for line, row in zip(found.lines, rows, strict=True)
    ]
    return {"invoice": exact_sum(totals.values()), **totals}, lines


@router.get("/invoice/{month}/lines.csv")
def as_file(
    request: Request, month: str, params: Annotated[InvoiceParams, Query()], deps: AppDeps, principal: Reader
) -> Response:
    require_all_teams(principal)
    calendar_month = month_and_decision_pages.month_of(deps, month)
    kept = deps.books.invoices.newest(calendar_month)
    reconciliation = _reconciled(deps, calendar_month, kept.invoice if kept else None)
    if reconciliation is None:
        send = f"gputally accountant reconcile {calendar_month} --keep"
        raise Refusal("not-found", f"the accountant stores no invoice of {calendar_month}: send one with `{send}`")
    lines = params.chosen(_shown(reconciliation)[1], reconciliation.currency, params.order(calendar_month))
    text = _invoice_csv(reconciliation, lines)
    return tagged(request, text.encode(), CSV, file_name("csv", str(calendar_month), "invoice"))


def _reconciled(deps: Deps, month: Month, invoice: Invoice | None) -> Reconciliation | None:
    if invoice is None:
        return None
    try:
        return deps.books.invoices.reconcile(month, invoice)
    except CannotClose as error:
        raise Refusal("books-refuse", str(error)) from error


def _invoice_csv(reconciliation: Reconciliation, lines: Sequence[ShownLine]) -> str:
    """The lines with their exact amounts, and after them those that the page shows, and a line of the sums."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    shown_parts = [f"{part}_shown" for part in PARTS]
    writer.writerow(["month", "items", "gpu_model", "region", "capacity_type", "currency", *PARTS, "gpu_hours", "rate",
                     *shown_parts, "down_gpu_hours", "unmetered_gpu_hours", "billed_rate"])  # fmt: skip
    for line, amounts in lines:
        names = (for_cell(each) for each in ("; ".join(line.items), line.gpu_model, line.region, line.capacity_type))
        writer.writerow(
            [reconciliation.month, *names, reconciliation.currency, *(plain(getattr(line, part)) for part in PARTS),
             plain(gpu_hours(line.gpu_us)), _rate(line.rate), *(plain(amounts[part]) for part in PARTS),
             plain(gpu_hours(line.down_gpu_us)), plain(gpu_hours(line.unmetered_gpu_us)), _rate(line.billed_rate)]
        )  # fmt: skip
    sums = (plain(exact_sum(getattr(line, part) for line, _ in lines)) for part in PARTS)
    shown = (plain(exact_sum(amounts[part] for _, amounts in lines)) for part in PARTS)
    held, down, unmetered = (
        plain(exact_sum(gpu_hours(getattr(line, name)) for line, _ in lines))
        for name in ("gpu_us", "down_gpu_us", "unmetered_gpu_us")
    )
    writer.writerow([reconciliation.month, "total", "", "", "", reconciliation.currency, *sums, held, "", *shown, down,
                     unmetered, ""])  # fmt: skip
    return text.getvalue()


def _rate(rate: Decimal | None) -> str:
    return "" if rate is None else plain(rate)
