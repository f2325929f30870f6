"""JSON passes the suite of exports; it has every section and exact figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal

from accountant.bookkeeping.month_closing import statement_hash
from accountant.exports.json import EXPORT
from accountant.exports.rendering_process import written
from gputally.base.money import exact_sum
from gputally.testing.exports import ExportSuite
from tests.billing.usage_rows import held
from tests.reports import sample_month


class TestJson(ExportSuite):
    plugin = EXPORT

    def due(self, content: bytes) -> Mapping[str, Decimal]:
        rows = json.loads(content)["tables"]["payable"]
        return {row["team"]: Decimal(row["amount"]) for row in rows}


def test_what_is_due_stands_by_team() -> None:
    report = sample_month.report()
    told = json.loads(written("json", report))["tables"]["due"]
    assert {row["team"]: Decimal(row["amount"]) for row in told} == report.statement.due
    calm = sample_month.october(held("2026-10-01", "2026-10-03"))
    assert json.loads(written("json", calm))["tables"]["due"] == [], "nothing stands beside what is payable"


def test_json_has_every_section_and_exact_figures() -> None:
    report = sample_month.report()
    document = json.loads(written("json", report))
    lines = document["tables"]["lines"]
    assert exact_sum(Decimal(line["gpu_hours"]) for line in lines) == sample_month.line_total(report)[0]
    assert (
        exact_sum(Decimal(line["cost"]) for line in lines if line["cost"] is not None)
        == sample_month.line_total(report)[1]
    )
    assert document["summary"]["statement_sha256"] == statement_hash(report.statement)
    assert document["summary"]["start"] == "2026-10-01T00:00:00Z"
    assert all(
        document["tables"][name] for name in ("budgets", "users", "spot", "waits", "hours", "beside", "unpriced")
    )
