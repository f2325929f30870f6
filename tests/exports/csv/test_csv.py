"""CSV passes the suite of exports, and has what is due."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from accountant.exports.csv import EXPORT
from accountant.exports.rendering_process import written
from gputally.base.money import exact_sum
from gputally.testing.exports import ExportSuite
from tests.exports.format_cases import rows_of
from tests.reports import sample_month


class TestCsv(ExportSuite):
    plugin = EXPORT

    def due(self, content: bytes) -> Mapping[str, Decimal]:
        rows = [row for row in rows_of(content) if row["record"] == "payable"]
        return {row["team"]: Decimal(row["cost"]) for row in rows}


def test_csv_has_what_is_due() -> None:
    report = sample_month.report()
    rows = rows_of(written("csv", report))
    hours, cost = sample_month.line_total(report)
    lines = [row for row in rows if row["record"] == "line"]
    assert exact_sum(Decimal(row["gpu_hours"]) for row in lines) == hours
    assert exact_sum(Decimal(row["cost"]) for row in lines if row["cost"]) == cost
    due = {row["team"]: Decimal(row["cost"]) for row in rows if row["record"] == "due"}
    assert due == report.statement.due
    (total,) = [row for row in rows if row["record"] == "due total"]
    assert Decimal(total["cost"]) == report.statement.due_total
    (beside,) = [row for row in rows if row["record"] == "not_billed"]
    assert Decimal(beside["cost"]) == report.statement.not_billed == report.not_billed
    (credit,) = [row for row in rows if row["record"] == "adjustment"]
    assert (credit["cost"], credit["about"], credit["reason"]) == ("-250.00", "2026-10", "node-7 lost a night")
