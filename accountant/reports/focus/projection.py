"""FOCUS 1.2: the same charges as one CSV, for systems that read no later version.

1.2 knows neither Invoice Detail nor Billing Period, calls ServiceProviderName ProviderName and asks for PublisherName;
prices and costs stand in the pricing currency too, which is the billing currency. Pure.
"""

from __future__ import annotations

from typing import Final

from accountant.reports.focus import columns
from accountant.reports.focus.bundle import table
from accountant.reports.focus.columns import Row
from accountant.reports.focus.month import charges, currency_of
from accountant.reports.model import Report

VERSION = "1.2"
_DROPPED = frozenset({"HostProviderName", "InvoiceDetailId", "ServiceProviderName"})
_ADDED = (
    "BillingAccountType", "PricingCurrency", "PricingCurrencyContractedUnitPrice", "PricingCurrencyEffectiveCost",
    "PricingCurrencyListUnitPrice", "ProviderName", "PublisherName",
)  # fmt: skip
_FOCUS = [name for name in columns.COST_AND_USAGE if not name.startswith("x_") and name not in _DROPPED]
COLUMNS: Final = (
    *sorted([*_FOCUS, *_ADDED]),
    *(name for name in columns.COST_AND_USAGE if name.startswith("x_")),
)


def render(report: Report) -> str:
    """One CSV. Raises CannotRender."""
    currency = currency_of(report)
    return table(COLUMNS, (_projected(row, currency) for row in columns.rows(report, charges(report))))


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
