"""A month with an entry in every section of its report, and hostile names."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from functools import cache
from typing import Any

from accountant.billing.statements import Adjustment, BookedItems, Correction, StatementLine
from accountant.core.settings import InvoiceIssuer
from accountant.ledger.protocols import EpochReport, JobKey, QueuedPod
from accountant.prices.price_book import PriceBook
from accountant.reports.report_builder import MonthBooks, Report, build
from accountant.reports.statement_line_charges import ChargeListing
from accountant.wire.policy_models import Policy
from agent.wire import PodFacts
from gputally.base.money import exact_sum
from tests.billing.usage_rows import HOUR_MS, SAMPLE_PRICES, TEAMS, at, busy_month, held, price_book, unheld
from tests.fakes.list_ledger import ListLedger, Row

HOSTILE = (
    '=HYPERLINK("http://x")', "+1", "-1", "@SUM(A1)", "\tx", "\rx", "＝1", "<script>alert(1)</script>", "a\x00b\x0b",
)  # fmt: skip
"""Names that look like formulas or markup, or that contain control characters."""
USERS = ("ann", "bob", "chen", "dora", "emil", "fay")
DAY_MS = 24 * HOUR_MS
START_MS, END_MS = at("2026-10-01"), at("2026-11-01")


def book() -> PriceBook:
    return price_book(
        SAMPLE_PRICES + "\nid: h100-spot, model: H100, capacity_type: spot, price: '3.10', valid_from: 2026-01-01"
    )


def policy() -> Policy:
    deserved = {"vision": 16, "language": 16, "robotics": 12, "genomics": 8, "teaching": 4}
    return Policy.model_validate(
        {
            "schema": 1,
            "queues": [
                {"name": "root"},
                *({"name": name, "parent": "root", "team": name, "deserved": gpus} for name, gpus in deserved.items()),
            ],
            "budgets": [
                {"name": "vision in October", "team": "vision", "limit": "52000", "currency": "USD"},
                {"name": "language", "queue": "language", "limit": "60000", "currency": "USD"},
                {"name": "lab hours", "queue": "robotics", "limit": "9000"},
                {"name": "euros", "team": "genomics", "limit": "1000", "currency": "EUR"},
            ],
        }
    )


def ledger(since: str = "2026-09-25", until: str = "2026-10-14") -> ListLedger:
    """Build the busy cluster of the billing tests, with jobs of six users and a few hundred pods that waited."""
    rows = [
        replace(row, names={**row.names, "user": USERS[i % len(USERS)], "cluster": "prod"})
        if i % 7 and "job" in row.names
        else replace(row, names={**row.names, "cluster": "prod"})
        for i, row in enumerate(busy_month(since, until))
    ]
    found = ListLedger(rows)
    found.put_policy(policy(), 0)
    found.known_pods = [_pod(i) for i in range(300)]
    key = JobKey("prod", "robotics", "Job/policy-search")
    found.reported = [EpochReport(key, n, at("2026-10-06") + n * 9 * HOUR_MS, "a test") for n in range(1, 6)]
    return found


def _pod(number: int) -> QueuedPod:
    team = tuple(TEAMS)[number % len(TEAMS)]
    made = START_MS + number * 8 * HOUR_MS // 4
    waited = (number * number % 97) * 60_000
    placed = None if number == 299 else made + waited
    facts = PodFacts(
        seq=0, uid=f"uid-{number}", namespace=team, name=f"pod-{number}", node="", created_ms=made,
        scheduled_ms=placed, started_ms=None if placed is None else placed + 20_000, observed_ms=made,
    )  # fmt: skip
    return QueuedPod("prod", team, team, facts)


def beside() -> BookedItems:
    line = StatementLine(
        "vision", "busy", "", "NVIDIA H100 80GB HBM3", "on-demand", "h100", Decimal("6.88"), -5 * HOUR_MS * 1000,
        Decimal("-5.000000000"), Decimal("-34.40000000000"),
    )  # fmt: skip
    credit = Adjustment(
        "2026-10-A1", "2026-10", "2026-10", "vision", Decimal("-250.00"), "USD", "node-7 lost a night", "ann", "bob",
        START_MS + DAY_MS,
    )  # fmt: skip
    return BookedItems("2026-10", (Correction("2026-09", "2026-10", "late facts", line, Decimal("-34.40")),), (credit,))


def october(*rows: Row, **options: Any) -> Report:
    """Build the report's data of October 2026 from usage rows."""
    return build(ListLedger(rows), book(), START_MS, END_MS, **options)


@cache
def report(team: str | None = None, end_ms: int = END_MS) -> Report:
    """Build the report of October 2026, or of its first days."""
    return build(ledger(), book(), START_MS, end_ms, team=team, booked=MonthBooks(beside=beside()))


def line_total(report: Report) -> tuple[Decimal, Decimal]:
    """Return the GPU-hours and the cost of the lines."""
    costs = (line.cost for line in report.lines if line.cost is not None)
    return exact_sum(line.gpu_hours for line in report.lines), exact_sum(costs)


def charged_book() -> PriceBook:
    """Build a price book with commitments, with idle time that is spread in one pool, and with guarantees billed in
    another, so that a statement has every kind of line."""
    rate = {
        "id": "h100-committed", "model": "H100", "price": "2.00", "discount": "0.1", "commitment": "reserved-1",
        "per": "gpu-hour", "valid_from": "2026-01-01", "source": "a test", "as_of": "2026-01-01", "basis": "gpu-only",
    }  # fmt: skip
    plain = book()
    return PriceBook.model_validate(
        {
            **plain.model_dump(by_alias=True),
            "commitments": [{"id": "reserved-1", "gpus": 24, "owner": "genomics"}],
            "billing": {
                "idle": {"unallocated": "spread"},
                "pools": {"h100": {"unallocated": "keep", "guaranteed": "owner"}},
            },
            "rows": [*(row.model_dump() for row in plain.rows), rate],
        }
    )


def charged_ledger() -> ListLedger:
    """Build enough days for every kind of line, with two nights that cost nothing."""
    found = ledger("2026-09-30", "2026-10-04")
    found.add(unheld("2026-10-02", "2026-10-03", "down", 8))
    found.add(unheld("2026-10-03", "2026-10-04", "unmetered", 2))
    found.add(held("2026-10-02T08:00", "2026-10-03T20:00", 1, 0.3, gpu_model="Tesla T4", cluster="prod"))
    found.add(held("2026-10-02T08:00", "2026-10-03T20:00", 1, None, cluster="prod"))
    return found


@cache
def charged(end_ms: int = END_MS) -> Report:
    """Build a report with every kind of charge, and a manual credit and charge."""
    about = beside()
    (credit,) = about.adjustments
    extra = replace(credit, id="2026-10-A2", team="teaching", amount=Decimal("12.00"), reason="lab course")
    return build(
        charged_ledger(), charged_book(), START_MS, end_ms,
        booked=MonthBooks(beside=replace(about, adjustments=(credit, extra))),
        listing=ChargeListing(InvoiceIssuer(host="ACME DC1"), ()),
    )  # fmt: skip
