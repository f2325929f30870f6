"""The demo closes each month of which it has records, with an invoice of the provider for the time since they began."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from accountant.core.periods import Month
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from gputally.demo.closed_month import close_month, month_to_close
from gputally.demo.options import DAYS, DemoOptions
from gputally.demo.scenario import START_MS, build

GRACE_MS = 5 * MS_PER_DAY


def at(day: str) -> int:
    """Return the beginning of a day in milliseconds since 1970."""
    return round(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() * 1000)


def closed_in(start_ms: int, days: int) -> list[tuple[str, int]]:
    """Return the months that a demo closes, each with the hour in which it does."""
    return [
        (str(month), hour)
        for hour in range(1, days * 24 + 1)
        if (month := month_to_close(start_ms, start_ms + hour * MS_PER_HOUR, GRACE_MS))
    ]


def test_the_demo_of_a_month_closes_the_one_in_which_its_records_begin() -> None:
    begin = at("2026-10-16")
    assert begin == START_MS
    assert closed_in(START_MS, DAYS) == [("2026-10", 21 * 24)]


@pytest.mark.parametrize(("begin", "days", "months"), [
    ("2026-11-01", 31, []), ("2026-11-01", 40, ["2026-11"]), ("2026-10-31", 10, ["2026-10"]),
    ("2026-10-01", 70, ["2026-10", "2026-11"]),
])  # fmt: skip
def test_a_month_without_records_is_not_closed(begin: str, days: int, months: list[str]) -> None:
    assert [month for month, _ in closed_in(at(begin), days)] == months


def test_the_invoice_is_of_the_time_since_the_records_began_and_a_draft_follows() -> None:
    asked: list[tuple[str, str, Any]] = []

    def ask(method: str, path: str, body: object) -> Any:
        asked.append((method, path, body))
        return {"objections": [{"kind": "coverage"}]}

    scenario = build(DemoOptions())
    close_month(ask, scenario, Month.parse("2026-10"))
    paths = [path for _, path, _ in asked]
    assert paths == [
        "/v1/periods/2026-10", "/v1/reconciliation/2026-10?keep=true", "/v1/periods/2026-10/close",
        "/v1/periods/2026-10/publish", "/v1/periods/2026-11/drafts",
    ]  # fmt: skip
    assert asked[2][2]["acknowledge"] == ["coverage"]
    lines = {line["item"]: Decimal(line["amount"]) for line in asked[1][2]["lines"]}
    h100 = sum(len(node.gpus) for node in scenario.nodes if "H100" in node.gpus[0].model)
    (amount,) = (amount for item, amount in lines.items() if "H100" in item)
    assert amount == Decimal("2.85") * h100 * 16 * 24
