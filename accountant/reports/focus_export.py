"""Writes FOCUS 1.4 and 1.2 files.

An invoice line sums up a team's charges of one category, which add up to it exactly. What rounds the invoice to whole
cents is a line of its own, since FOCUS wants a charge and its line to be of one category. `notes.json` names the time
that is no charge (unpriced, unmetered, down) and what the figures were made from, so that a bundle is not taken for
more than it is. Equal reports give equal bytes. Pure.

1.2 knows neither Invoice Detail nor Billing Period, calls ServiceProviderName ProviderName and asks for PublisherName;
prices and costs stand in the pricing currency too, which is the billing currency. Pure.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Final

from accountant.billing.statements import StatementLine
from accountant.core.periods import utc
from accountant.reports import focus_columns
from accountant.reports.focus_charges import FocusCharge
from accountant.reports.focus_columns import Row, charges, currency_of, issuer_of, month_of, number
from accountant.reports.report_model import Report
from gputally.base.money import exact_sum, plain
from gputally.base.text_escaping import for_cell

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest instant the format knows."""


def pack(members: Mapping[str, bytes]) -> bytes:
    """In the order given, without instants, owners or permissions."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return packed.getvalue()


def unpack(packed: bytes) -> dict[str, bytes]:
    """Raises zipfile.BadZipFile."""
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


BUNDLE_VERSION = "1.4"
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


def render_bundle(report: Report) -> bytes:
    """A zip archive of three CSV files and notes.json. Raises CannotRender."""
    currency_of(report)
    found = charges(report)
    files = {
        "cost_and_usage.csv": table(focus_columns.COST_AND_USAGE, focus_columns.rows(report, found)),
        "billing_period.csv": table(focus_columns.BILLING_PERIOD, [_billing_period(report)]),
        "invoice_detail.csv": table(focus_columns.INVOICE_DETAIL, _invoice_details(report, found)),
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
        at = charge.team, focus_columns.invoice_line(month, charge)
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
            "InvoiceId": focus_columns.invoice_id(month, team),
            "InvoiceIssueDate": utc(_updated_ms(report)) if _closed(report) else "",
            "InvoiceIssueStatus": "Issued" if _closed(report) else "Open",
            "InvoiceIssuerName": issuer_of(report).name,
            "PaymentTerms": "Internal transfer",
            "ReferenceInvoiceId": focus_columns.invoice_id(month, team),
        }


def _notes(report: Report, found: Sequence[FocusCharge]) -> Mapping[str, object]:
    statement = report.statement
    return {
        "focus_version": BUNDLE_VERSION,
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


PROJECTION_VERSION = "1.2"
_DROPPED = frozenset({"HostProviderName", "InvoiceDetailId", "ServiceProviderName"})
_ADDED = (
    "BillingAccountType", "PricingCurrency", "PricingCurrencyContractedUnitPrice", "PricingCurrencyEffectiveCost",
    "PricingCurrencyListUnitPrice", "ProviderName", "PublisherName",
)  # fmt: skip
_FOCUS = [name for name in focus_columns.COST_AND_USAGE if not name.startswith("x_") and name not in _DROPPED]
COLUMNS: Final = (
    *sorted([*_FOCUS, *_ADDED]),
    *(name for name in focus_columns.COST_AND_USAGE if name.startswith("x_")),
)


def render_projection(report: Report) -> str:
    """One CSV. Raises CannotRender."""
    currency = currency_of(report)
    return table(COLUMNS, (_projected(row, currency) for row in focus_columns.rows(report, charges(report))))


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
