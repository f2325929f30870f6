"""Reports of whole months, and a ledger with two busy ones."""

from __future__ import annotations

from accountant.core.periods import Month, zone
from accountant.reports.report_builder import build
from tests.billing.usage_rows import quota_policy
from tests.fakes.list_ledger import ListLedger

OCTOBER = Month(2026, 10)


def build_month(ledger, book, month, timezone="UTC", team=None):
    """Build the report of a whole calendar month."""
    return build(ledger, book, *month.span(zone(timezone)), timezone, team=team)


def busy_ledger(rows):
    kept = ListLedger(rows)
    kept.put_policy(quota_policy(vision=16, language=16, robotics=12, genomics=8, teaching=4), 0)
    return kept
