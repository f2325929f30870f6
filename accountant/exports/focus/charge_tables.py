"""Fills the FOCUS columns of each charge of a month, and writes FOCUS 1.4 and 1.2 files.

`render_bundle` writes the three data sets of FOCUS 1.4. An invoice line is the sum of a team's charges of one kind:
usage (commitments included), correction, credit, additional charge or rounding. The rounding to the currency's minor
unit is an invoice line of its own: its ChargeCategory is Adjustment, and FOCUS requires that all charges of an invoice
line have one category. `notes.json` lists the GPU time that is in no charge (unpriced, unmetered, down) and the
versions on which the figures are based, so that a reader sees what the files leave out. Equal reports give equal bytes.

`render_projection` writes the one table of FOCUS 1.2. Compared with 1.4, it has no Invoice Detail or Billing Period,
ServiceProviderName is called ProviderName, and PublisherName is required. Prices and costs are also given in the
pricing currency, which equals the billing currency.

Rules for the format (FOCUS 1.4, columns and attributes):

- A period is half-open, in UTC.
- Null is an empty cell, and numbers are plain decimals.
- Custom columns begin with `x_` and come last.
- Without a SkuPriceId there is no unit price, quantity or pricing category."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import Final

from accountant.billing import budget_forecast
from accountant.billing.charge import ALLOCATED, BILLED
from accountant.billing.statements import StatementLine, invoice_number
from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.errors import CannotRender
from accountant.core.periods import Month, utc
from accountant.core.settings import InvoiceIssuer
from accountant.exports.zip_archive import pack
from accountant.reports.report_builder import Report
from accountant.reports.statement_line_charges import Details, FocusCharge, Kind, charge_key, of_lines, rounding
from accountant.wire.policy_models import IDLE
from gputally.base.money import exact_product, exact_sum, plain
from gputally.base.untrusted_text import for_cell


def month_of(report: Report) -> Month:
    """The calendar month that the report covers, or whose beginning it covers. Raises CannotRender for any other
    span."""
    month = budget_forecast.month_of(report.start_ms, report.end_ms, report.tz.key)
    if month is None:
        raise CannotRender("a FOCUS file covers a calendar month, and this report has another span: ask for a month")
    return month


def details_of(report: Report) -> Details:
    """The report's details. Raises CannotRender if it was built without them."""
    if report.details is None:
        raise CannotRender("FOCUS files need the charges by day and pod: build the report with an issuer")
    return report.details


def issuer_of(report: Report) -> InvoiceIssuer:
    return details_of(report).issuer


def currency_of(report: Report) -> str:
    """The report's currency. Raises CannotRender without a price book."""
    if report.currency is None:
        raise CannotRender("FOCUS files need prices, and there is no price book: set `prices: FILE`")
    return report.currency


def charges(report: Report) -> list[FocusCharge]:
    """All charges of the month in the statement's order; per team they add up to the amount due, and of IDLE
    to what is not billed."""
    month, details = month_of(report), details_of(report)
    of_month = [
        *of_lines(month, report.tz, (*report.lines, *report.commitments), details),
        *_unmetered_charges(month, report),
    ]
    return [*of_month, *rounding(month, report.tz, report.charged, of_month)]


def _unmetered_charges(month: Month, report: Report) -> Iterator[FocusCharge]:
    start_ms, end_ms = month.span(report.tz)
    seen: dict[Hashable, int] = {}

    def key(kind: Kind, *names: str) -> str:
        seen[names] = seen.get(names, 0) + 1
        return charge_key(month, kind, str(seen[names]), *names)

    for correction in report.corrections:
        line = correction.line
        if line.account not in BILLED:  # unmetered and down time is no charge, nor is a change of it
            continue
        then_ms, until_ms = Month.parse(correction.month).span(report.tz)
        yield FocusCharge(
            key=key("correction", correction.month, *line.key),
            kind="correction",
            team=line.team,
            start_ms=then_ms,
            end_ms=until_ms,
            billed=correction.amount,
            line=line,
            about=correction.month,
            reason=correction.reason,
        )
    for adjustment in report.adjustments:
        yield FocusCharge(
            key=key("credit", adjustment.id),
            kind="credit",
            team=adjustment.team,
            start_ms=start_ms,
            end_ms=end_ms,
            billed=adjustment.amount,
            about=adjustment.month,
            reason=adjustment.reason,
        )


Row = dict[str, str]

COST_AND_USAGE: Final = (
    "AvailabilityZone", "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd",
    "ChargePeriodStart", "CommitmentDiscountCategory", "CommitmentDiscountId", "CommitmentDiscountName",
    "CommitmentDiscountQuantity", "CommitmentDiscountStatus", "CommitmentDiscountType", "CommitmentDiscountUnit",
    "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "ContractedUnitPrice", "EffectiveCost", "HostProviderName",
    "InvoiceDetailId", "InvoiceId", "InvoiceIssuerName", "ListCost", "ListUnitPrice", "PricingCategory",
    "PricingQuantity", "PricingUnit", "RegionId", "RegionName", "ResourceId", "ResourceName", "ResourceType",
    "ServiceCategory", "ServiceName", "ServiceProviderName", "ServiceSubcategory", "SkuId", "SkuMeter",
    "SkuPriceDetails", "SkuPriceId", "SubAccountId", "SubAccountName", "SubAccountType", "Tags",
    "x_Account", "x_AboutMonth", "x_ChargeKey", "x_ClusterId", "x_Detail", "x_GpuHoursAllocated", "x_GpuHoursIdle",
    "x_GpuHoursUsed", "x_PriceBookVersion", "x_Reason",
)  # fmt: skip
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

_INVOICE_LINES: Final = {
    "usage": ("Usage", "GPU time"),
    "correction": ("Usage", "Corrections of earlier months"),
    "credit": ("Credit", "Credits"),
    "charge": ("Adjustment", "Charges booked by hand"),
    "rounding": ("Adjustment", "Rounding to the currency's minor unit"),
}
"""ChargeCategory and description of an invoice line, which sums charges of one category, as FOCUS requires."""
_UNIT = "GPU-Hours"
_RESOURCES = {"Slurm": "Slurm Job", "Container": "Container", "Process": "Process"}
"""Resource types by the kind of a job that is not a Kubernetes workload."""
_USES = {
    "busy": "GPU time used", "allocated_idle": "GPU time held and idle", "allocated_unknown": "GPU time held",
    "unallocated": "Unheld GPU time", "unused_commitment": "Committed GPU time not used",
}  # fmt: skip
_DETAILS = {
    "spread": "Share of unheld GPU time", "reserved": "Guaranteed GPU time not used",
    "starting": "GPU time while starting", "gang_waiting": "GPU time waiting for its gang",
}  # fmt: skip


def number(value: Decimal) -> str:
    """A plain decimal with a point, because readers that guess types would read `3` as an integer."""
    text = plain(value)
    return text if "." in text else f"{text}.0"


def _invoice_line(charge: FocusCharge) -> str:
    """The invoice line of a charge. Unused commitments are GPU time; an additional payment (a positive credit) is a
    charge."""
    if charge.kind == "commitment":
        return "usage"
    return "charge" if charge.kind == "credit" and charge.billed > 0 else charge.kind


def category(charge: FocusCharge) -> str:
    return _INVOICE_LINES[_invoice_line(charge)][0]


def invoice_line(month: Month, charge: FocusCharge) -> str:
    """The InvoiceDetailId of a charge."""
    return f"{invoice_number(month, charge.team)}-{_invoice_line(charge)}"


def _of_invoice(month: Month, charge: FocusCharge) -> Row:
    """The invoice of a charge; nothing for what no team is billed for."""
    if charge.team == IDLE:
        return {}
    return {"InvoiceDetailId": invoice_line(month, charge), "InvoiceId": invoice_number(month, charge.team)}


def rows(report: Report, charges: Iterable[FocusCharge]) -> Iterator[Row]:
    """For each charge the cells of COST_AND_USAGE that are not null."""
    month, issuer = month_of(report), issuer_of(report)
    start_ms, end_ms = month.span(report.tz)
    always = {
        "BillingAccountId": issuer.billing_account,
        "BillingAccountName": issuer.billing_account_name,
        "BillingCurrency": currency_of(report),
        "BillingPeriodStart": utc(start_ms),
        "BillingPeriodEnd": utc(end_ms),
        "HostProviderName": issuer.host,
        "InvoiceIssuerName": issuer.name,
        "ServiceCategory": "Compute",
        "ServiceName": "GPU cluster",
        "ServiceProviderName": issuer.name,
        "ServiceSubcategory": "Containers",
        "SubAccountType": "Team",
        "x_PriceBookVersion": report.statement.price_book_version,
    }
    instant = cache(utc)
    for charge in charges:
        billed = number(charge.billed)
        yield {
            **always,
            "BilledCost": billed,
            "EffectiveCost": billed,
            "ContractedCost": billed,
            "ListCost": billed,
            "ChargeCategory": category(charge),
            "ChargeDescription": _description(charge),
            "ChargeFrequency": "Usage-Based" if charge.kind == "usage" else "One-Time",
            "ChargePeriodStart": instant(charge.start_ms),
            "ChargePeriodEnd": instant(charge.end_ms),
            **_of_invoice(month, charge),
            "SubAccountId": charge.team,
            "SubAccountName": charge.team,
            "Tags": _json(_tags(charge)),
            "x_AboutMonth": charge.about,
            "x_ChargeKey": charge.key,
            "x_ClusterId": charge.use.cluster,
            "x_Reason": charge.reason,
            **(_of_line(charge, charge.line) if charge.line is not None else {}),
            **(
                _priced(charge, charge.line, charge.hours)
                if charge.line is not None and charge.hours is not None
                else {}
            ),
        }


def _of_line(charge: FocusCharge, line: StatementLine) -> Row:
    """The cells of a charge for GPU time, except those of its price. The hours of a correction are a difference."""
    hours = charge.hours if charge.hours is not None else line.gpu_hours
    cells = {
        "SkuId": _sku(line),
        "SkuMeter": "GPU Hours",
        "x_Account": line.account,
        "x_Detail": line.detail,
    }
    if charge.kind == "correction":
        cells["ChargeClass"] = "Correction"
    if line.account in ALLOCATED:
        cells["x_GpuHoursAllocated"] = number(hours)
    if line.account == "busy":
        cells["x_GpuHoursUsed"] = number(hours)
    if line.account == "allocated_idle":
        cells["x_GpuHoursIdle"] = number(hours)
    return cells


def _priced(charge: FocusCharge, line: StatementLine, hours: Decimal) -> Row:
    assert line.unit_price is not None
    assert charge.list_price is not None
    quantity, use = number(hours), charge.use
    cells = {
        "AvailabilityZone": use.zone,
        "ContractedUnitPrice": number(line.unit_price),
        "ListCost": number(exact_product(charge.list_price, hours)),
        "ListUnitPrice": number(charge.list_price),
        "PricingCategory": _category(charge, line),
        "PricingQuantity": quantity,
        "PricingUnit": _UNIT,
        "RegionId": use.region,
        "RegionName": use.region,
        "SkuPriceDetails": _json({"GpuCount": 1, "x_GpuModel": line.gpu_model}),
        # A price row may apply to several models, but a SKU price belongs to one SKU.
        "SkuPriceId": f"{_sku(line)}@{line.price_row}",
    }
    unused = charge.kind == "commitment"
    if not unused:
        cells |= {"ConsumedQuantity": quantity, "ConsumedUnit": _UNIT}
    if use.pod:
        cells |= {
            "ResourceId": "/".join((use.cluster, use.namespace, use.pod)),
            "ResourceName": use.pod,
            "ResourceType": _RESOURCES.get(use.job.partition("/")[0], "Kubernetes Pod"),
        }
    if charge.commitment:
        cells |= {
            "CommitmentDiscountCategory": "Usage",
            "CommitmentDiscountId": charge.commitment,
            "CommitmentDiscountName": charge.commitment,
            "CommitmentDiscountQuantity": quantity,
            "CommitmentDiscountStatus": "Unused" if unused else "Used",
            "CommitmentDiscountType": "Committed GPUs",
            "CommitmentDiscountUnit": _UNIT,
        }
    if unused:
        cells |= {
            "ResourceId": charge.commitment,
            "ResourceName": charge.commitment,
            "ResourceType": "Committed GPUs",
        }
    return cells


def _category(charge: FocusCharge, line: StatementLine) -> str:
    if charge.commitment or line.capacity_type == "reserved":
        return "Committed"
    return "Dynamic" if line.capacity_type == "spot" else "Standard"


def _sku(line: StatementLine) -> str:
    return "-".join(part for part in ("gpu", line.gpu_model.lower().replace(" ", "-"), line.capacity_type) if part)


def _description(charge: FocusCharge) -> str:
    line, use = charge.line, charge.use
    if charge.kind == "rounding":
        return "Rounding of the team's charges to the currency's minor unit"
    if line is None:
        return f"{'Credit' if charge.billed < 0 else 'Charge'} about {charge.about}"
    what = f"{_DETAILS.get(line.detail) or _USES[line.account]}, {line.gpu_model}"
    if charge.kind == "correction":
        return f"Correction of {charge.about}: {what}"
    return f"{what}, {use.namespace}/{use.pod}" if use.pod else what


def _tags(charge: FocusCharge) -> dict[str, str]:
    use = charge.use
    tags = {
        "job": use.job, "namespace": use.namespace, "pool": use.pool, "queue": "" if use.queue == IDLE else use.queue,
        "user": use.user,
    }  # fmt: skip
    idle = {"x_idle": "true"} if charge.line is not None and charge.line.account == "unallocated" else {}
    return {name: value for name, value in tags.items() if value} | idle


def _json(content: Mapping[str, object]) -> str:
    return json.dumps(content, sort_keys=True, ensure_ascii=False) if content else ""


BUNDLE_VERSION = "1.4"
NUMBERS = frozenset(
    {
        "BilledCost", "CommitmentDiscountQuantity", "ConsumedQuantity", "ContractedCost", "ContractedUnitPrice",
        "EffectiveCost", "ListCost", "ListUnitPrice", "PricingCurrencyContractedUnitPrice",
        "PricingCurrencyEffectiveCost", "PricingCurrencyListUnitPrice", "PricingQuantity", "x_GpuHoursAllocated",
        "x_GpuHoursIdle", "x_GpuHoursUsed",
    }
)  # fmt: skip
"""Numeric columns."""


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
