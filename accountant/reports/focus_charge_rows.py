"""The charges of a month as rows with the cost and usage columns of FOCUS 1.4, for the export and for the lake.

Rules for the format (FOCUS 1.4, columns and attributes):

- A period is half-open, in UTC.
- Null is an absent cell, and numbers are plain decimals.
- Custom columns begin with `x_` and come last.
- Without a SkuPriceId there is no unit price, quantity or pricing category."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cache
from typing import Final

from accountant.billing import budget_forecast
from accountant.billing.charge import ALLOCATED, BILLED
from accountant.billing.statements import StatementLine, invoice_number
from accountant.core.errors import CannotRender
from accountant.core.periods import Month, utc
from accountant.core.settings import InvoiceIssuer
from accountant.reports.report_builder import Report
from accountant.reports.statement_line_charges import Details, FocusCharge, Kind, charge_key, of_lines, rounding
from accountant.wire.policy_models import IDLE
from gputally.base.money import exact_product, plain


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
        *_booked_charges(month, report),
    ]
    return [*of_month, *rounding(month, report.tz, report.charged, of_month)]


def _booked_charges(month: Month, report: Report) -> Iterator[FocusCharge]:
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
NUMBERS = frozenset(
    {
        "BilledCost", "CommitmentDiscountQuantity", "ConsumedQuantity", "ContractedCost", "ContractedUnitPrice",
        "EffectiveCost", "ListCost", "ListUnitPrice", "PricingCurrencyContractedUnitPrice",
        "PricingCurrencyEffectiveCost", "PricingCurrencyListUnitPrice", "PricingQuantity", "x_GpuHoursAllocated",
        "x_GpuHoursIdle", "x_GpuHoursUsed",
    }
)  # fmt: skip
"""Numeric columns."""

INVOICE_LINES: Final = {
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
_POD, _COMMITTED = "Kubernetes Pod", "Committed GPUs"
RESOURCE_TYPES: Final = (_POD, *_RESOURCES.values(), _COMMITTED)
"""The values of the column ResourceType."""
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
    return INVOICE_LINES[_invoice_line(charge)][0]


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
            "ResourceType": _RESOURCES.get(use.job.partition("/")[0], _POD),
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
            "ResourceType": _COMMITTED,
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
        "user": use.user, **dict(zip(use.labels[::2], use.labels[1::2], strict=True)),
    }  # fmt: skip
    idle = {"x_idle": "true"} if charge.line is not None and charge.line.account == "unallocated" else {}
    return {name: value for name, value in tags.items() if value} | idle


def _json(content: Mapping[str, object]) -> str:
    return json.dumps(content, sort_keys=True, ensure_ascii=False) if content else ""
