"""Parquet passes the suite of exports; it is exact and typed."""

from __future__ import annotations

import io
from collections.abc import Mapping
from decimal import Decimal

import pyarrow.parquet as pq

from accountant.bookkeeping.month_closing import statement_hash
from accountant.exports.parquet import EXPORT
from accountant.exports.parquet.table_file import SCHEMA
from accountant.exports.rendering_process import written
from gputally.testing.exports import ExportSuite
from tests.reports import sample_month


class TestParquet(ExportSuite):
    plugin = EXPORT

    def due(self, content: bytes) -> Mapping[str, Decimal]:
        rows = pq.read_table(io.BytesIO(content)).to_pylist()
        return {row["team"]: row["cost"] for row in rows if row["record"] == "payable"}


def test_parquet_is_exact_and_typed() -> None:
    report = sample_month.report()
    content = written("parquet", report)
    table = pq.read_table(io.BytesIO(content))
    assert table.schema.remove_metadata() == SCHEMA
    lines = [row for row in table.to_pylist() if row["record"] == "line"]
    hours, cost = sample_month.line_total(report)
    assert sum(row["gpu_hours"] for row in lines) == hours
    assert sum(row["cost"] for row in lines if row["cost"] is not None) == cost
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert Decimal(metadata["gputally.lines_cost"]) == cost
    assert metadata["gputally.statement_sha256"] == statement_hash(report.statement)
    assert lines[0]["period_start"].isoformat() == "2026-10-01T00:00:00+00:00"
    for row in lines:
        if row["unit_price"] is not None:
            assert row["unit_price"] * row["gpu_hours"] == row["cost"]
