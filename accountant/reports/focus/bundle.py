"""FOCUS 1.4: Cost and Usage, Billing Period and Invoice Detail as CSV in one archive, with what they leave out.

An invoice line sums up a team's charges of one category, which add up to it exactly. What rounds the invoice to whole
cents is a line of its own, since FOCUS wants a charge and its line to be of one category. `notes.json` names the time
that is no charge (unpriced, unmetered, down) and what the figures were made from, so that nobody takes a bundle for
more than it is. Equal reports give equal bytes. Pure.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

from accountant.books.statements import StatementLine
from accountant.money import exact_sum, plain
from accountant.periods import utc
from accountant.reports.archive import pack
from accountant.reports.focus import columns
from accountant.reports.focus.charges import FocusCharge
from accountant.reports.focus.columns import Row, number
from accountant.reports.focus.month import charges, currency_of, issuer_of, month_of
from accountant.reports.model import Report
from agent.plaintext import for_cell

VERSION = "1.4"
_NUMBERS = frozenset(
    {
        "BilledCost", "CommitmentDiscountQuantity", "ConsumedQuantity", "ContractedCost", "ContractedUnitPrice",
        "EffectiveCost", "ListCost", "ListUnitPrice", "PricingCurrencyContractedUnitPrice",
        "PricingCurrencyEffectiveCost", "PricingCurrencyListUnitPrice", "PricingQuantity", "x_GpuHoursAllocated",
        "x_GpuHoursIdle", "x_GpuHoursUsed",
    }
)  # fmt: skip
_INVOICE_LINES = {
    "usage": ("Usage", "GPU time"),
    "correction": ("Usage", "Corrections of earlier months"),
    "credit": ("Credit", "Credits"),
    "charge": ("Adjustment", "Charges booked by hand"),
    "rounding": ("Adjustment", "Rounding to cents"),
}
"""By the end of InvoiceDetailId: ChargeCategory and description."""


def render(report: Report) -> bytes:
    """A zip archive of three CSV files and notes.json. Raises CannotRender."""
    currency_of(report)
    found = charges(report)
    files = {
        "cost_and_usage.csv": table(columns.COST_AND_USAGE, columns.rows(report, found)),
        "billing_period.csv": table(columns.BILLING_PERIOD, [_billing_period(report)]),
        "invoice_detail.csv": table(columns.INVOICE_DETAIL, _invoice_details(report, found)),
        "notes.json": json.dumps(_notes(report, found), indent=1, ensure_ascii=False) + "\n",
    }
    return pack({name: content.encode() for name, content in files.items()})


def table(header: Sequence[str], rows: Iterable[Row]) -> str:
    """CSV with a header, CRLF; text that a spreadsheet would take for a formula gets an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(header)
    of = [(name, name in _NUMBERS) for name in header]
    for row in rows:
        writer.writerow([row.get(name, "") if figure else for_cell(row.get(name, "")) for name, figure in of])
    return text.getvalue()


def _closed(report: Report) -> bool:
    return report.period in ("closed", "published")


def _updated_ms(report: Report) -> int:
    """When what the month says was last changed: its close, else the newest time that it knows."""
    closing = report.statement.closing
    return closing.at_ms if closing is not None else report.end_ms


def _billing_period(report: Report) -> Row:
    start_ms, end_ms = month_of(report).span(report.tz)
    return {
        "BillingPeriodCreated": utc(start_ms),
        "BillingPeriodStart": utc(start_ms),
        "BillingPeriodEnd": utc(end_ms),
        "BillingPeriodLastUpdated": utc(_updated_ms(report)),
        "BillingPeriodStatus": "Closed" if _closed(report) else "Open",
        "InvoiceIssuerName": issuer_of(report).name,
    }


def _invoice_details(report: Report, found: Iterable[FocusCharge]) -> Iterable[Row]:
    month = month_of(report)
    start_ms, end_ms = month.span(report.tz)
    sums: dict[tuple[str, str], Decimal] = {}
    for charge in found:
        at = charge.team, columns.invoice_line(month, charge)
        sums[at] = exact_sum([sums.get(at, Decimal(0)), charge.billed])
    for (team, line), amount in sums.items():
        category, what = _INVOICE_LINES[line.rpartition("-")[2]]
        yield {
            "BilledCost": number(amount),
            "BillingAccountId": issuer_of(report).billing_account,
            "BillingCurrency": currency_of(report),
            "BillingPeriodStart": utc(start_ms),
            "BillingPeriodEnd": utc(end_ms),
            "ChargeCategory": category,
            "InvoiceDetailCreated": utc(start_ms),
            "InvoiceDetailDescription": f"{what} of {team}",
            "InvoiceDetailGrain": json.dumps({"SubAccountId": team}, ensure_ascii=False),
            "InvoiceDetailId": line,
            "InvoiceDetailLastUpdated": utc(_updated_ms(report)),
            "InvoiceId": columns.invoice_id(month, team),
            "InvoiceIssueDate": utc(_updated_ms(report)) if _closed(report) else "",
            "InvoiceIssueStatus": "Issued" if _closed(report) else "Open",
            "InvoiceIssuerName": issuer_of(report).name,
            "PaymentTerms": "Internal transfer",
            "ReferenceInvoiceId": columns.invoice_id(month, team),
        }


def _notes(report: Report, found: Sequence[FocusCharge]) -> Mapping[str, object]:
    statement = report.statement
    return {
        "focus_version": VERSION,
        "month": str(month_of(report)),
        "status": report.period,
        "scope": report.team or "cluster",
        "timezone": report.tz.key,
        "until": utc(report.end_ms),
        "statement_sha256": statement.hash,
        "price_book_version": statement.price_book_version,
        "coverage": statement.coverage,
        "records_after_close": report.late,
        "charges": len(found),
        "billed": plain(exact_sum(charge.billed for charge in found)),
        "billed_by_team": {team: plain(amount) for team, amount in report.due.items()},
        "no_charge": {
            "unpriced": [
                {
                    "team": line.team,
                    "gpu_model": line.gpu_model,
                    "capacity_type": line.capacity_type,
                    "account": line.account,
                    "gpu_hours": plain(line.gpu_hours),
                }
                for line in report.lines
                if line.cost is None
            ],
            "unmetered_gpu_hours": plain(_hours(report.lines, "unmetered")),
            "down_gpu_hours": plain(_hours(report.lines, "down")),
        },
    }


def _hours(lines: Iterable[StatementLine], account: str) -> Decimal:
    return exact_sum(line.gpu_hours for line in lines if line.account == account)
