"""Writes the charges of a month as files of FOCUS 1.4 and 1.2. accountant.reports.focus_charge_rows makes the cells of
the charges, by the rules for the format that it lists.

`render_bundle` writes the three data sets of FOCUS 1.4. An invoice line is the sum of a team's charges of one kind:
usage (commitments included), correction, credit, additional charge or rounding. The rounding to the currency's minor
unit is an invoice line of its own: its ChargeCategory is Adjustment, and FOCUS requires that all charges of an invoice
line have one category. `notes.json` lists the GPU time that is in no charge (unpriced, unmetered, down) and the
versions on which the figures are based, so that a reader sees what the files leave out. Equal reports give equal bytes.

`render_projection` writes the one table of FOCUS 1.2. Compared with 1.4, it has no Invoice Detail or Billing Period,
ServiceProviderName is called ProviderName, and PublisherName is required. Prices and costs are also given in the
pricing currency, which equals the billing currency."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Final

from accountant.billing.statements import StatementLine, invoice_number
from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.periods import utc
from accountant.exports.zip_archive import pack
from accountant.reports.focus_charge_rows import (
    COST_AND_USAGE,
    INVOICE_LINES,
    NUMBERS,
    Row,
    charges,
    currency_of,
    invoice_line,
    issuer_of,
    month_of,
    number,
    rows,
)
from accountant.reports.report_builder import Report
from accountant.reports.statement_line_charges import FocusCharge
from accountant.wire.policy_models import IDLE
from gputally.base.money import exact_sum, plain
from gputally.base.untrusted_text import for_cell

BILLING_PERIOD: Final = (
    "BillingPeriodCreated", "BillingPeriodEnd", "BillingPeriodLastUpdated", "BillingPeriodStart",
    "BillingPeriodStatus", "InvoiceIssuerName",
)  # fmt: skip
INVOICE_DETAIL: Final = (
    "BilledCost", "BillingAccountId", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory",
    "InvoiceDetailCreated", "InvoiceDetailDescription", "InvoiceDetailGrain", "InvoiceDetailId",
    "InvoiceDetailLastUpdated", "InvoiceId", "InvoiceIssueDate", "InvoiceIssueStatus", "InvoiceIssuerName",
    "PaymentDueDate", "PaymentTerms", "ReferenceInvoiceId",
)  # fmt: skip
BUNDLE_VERSION = "1.4"


def render_bundle(report: Report) -> bytes:
    """A zip archive of three CSV files and notes.json. Raises CannotRender."""
    currency_of(report)
    of_month = charges(report)
    files = {
        "cost_and_usage.csv": table(COST_AND_USAGE, rows(report, of_month)),
        "billing_period.csv": table(BILLING_PERIOD, [_billing_period(report)]),
        "invoice_detail.csv": table(INVOICE_DETAIL, _invoice_details(report, of_month)),
        "notes.json": json.dumps(_notes(report, of_month), indent=1, ensure_ascii=False) + "\n",
    }
    return pack({name: content.encode() for name, content in files.items()})


def table(header: Sequence[str], rows: Iterable[Row]) -> str:
    """CSV with a header and CRLF; text that a spreadsheet would interpret as a formula gets an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(header)
    columns = [(name, name in NUMBERS) for name in header]
    for row in rows:
        writer.writerow(
            [row.get(name, "") if is_figure else for_cell(row.get(name, "")) for name, is_figure in columns]
        )
    return text.getvalue()


def _closed(report: Report) -> bool:
    return report.period in ("closed", "published")


def _updated_ms(report: Report) -> int:
    """When the month last changed: the time of its close, otherwise the end of the report."""
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


def _invoice_details(report: Report, month_charges: Iterable[FocusCharge]) -> Iterable[Row]:
    month = month_of(report)
    start_ms, end_ms = month.span(report.tz)
    sums: dict[tuple[str, str], Decimal] = {}
    for charge in month_charges:
        if charge.team == IDLE:
            continue
        key = charge.team, invoice_line(month, charge)
        sums[key] = exact_sum([sums.get(key, Decimal(0)), charge.billed])
    for (team, line), amount in sums.items():
        category, what = INVOICE_LINES[line.rpartition("-")[2]]
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
            "InvoiceId": invoice_number(month, team),
            "InvoiceIssueDate": utc(_updated_ms(report)) if _closed(report) else "",
            "InvoiceIssueStatus": "Issued" if _closed(report) else "Open",
            "InvoiceIssuerName": issuer_of(report).name,
            "PaymentTerms": "Internal transfer",
            "ReferenceInvoiceId": invoice_number(month, team),
        }


def _notes(report: Report, month_charges: Sequence[FocusCharge]) -> Mapping[str, object]:
    statement = report.statement
    return {
        "focus_version": BUNDLE_VERSION,
        "month": str(month_of(report)),
        "status": report.period,
        "scope": report.team or "cluster",
        "timezone": report.tz.key,
        "until": utc(report.end_ms),
        "statement_sha256": statement_hash(statement),
        "price_book_version": statement.price_book_version,
        "coverage": statement.coverage,
        "records_after_close": report.late,
        "charges": len(month_charges),
        "billed": plain(exact_sum(charge.billed for charge in month_charges)),
        "billed_by_team": {team: plain(amount) for team, amount in report.charged.items()},
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


_DROPPED = frozenset({"HostProviderName", "InvoiceDetailId", "ServiceProviderName"})
_ADDED = (
    "BillingAccountType", "PricingCurrency", "PricingCurrencyContractedUnitPrice", "PricingCurrencyEffectiveCost",
    "PricingCurrencyListUnitPrice", "ProviderName", "PublisherName",
)  # fmt: skip
_FOCUS = [name for name in COST_AND_USAGE if not name.startswith("x_") and name not in _DROPPED]
COLUMNS: Final = (
    *sorted([*_FOCUS, *_ADDED]),
    *(name for name in COST_AND_USAGE if name.startswith("x_")),
)


def render_projection(report: Report) -> str:
    """The table as CSV. Raises CannotRender."""
    currency = currency_of(report)
    return table(COLUMNS, (_projected(row, currency) for row in rows(report, charges(report))))


def _projected(row: Row, currency: str) -> Row:
    provider = row["ServiceProviderName"]
    return {
        **{name: value for name, value in row.items() if name not in _DROPPED},
        "BillingAccountType": "Organization",
        "PricingCurrency": currency,
        "PricingCurrencyContractedUnitPrice": row.get("ContractedUnitPrice", ""),
        "PricingCurrencyEffectiveCost": row["EffectiveCost"],
        "PricingCurrencyListUnitPrice": row.get("ListUnitPrice", ""),
        "ProviderName": provider,
        "PublisherName": provider,
    }
