"""gputally's own exports pass the suite of exports."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from decimal import Decimal

import pyarrow.parquet as pq
import pytest

from accountant.exports.protocol import exports
from accountant.exports.zip_archive import unpack
from gputally.base.money import exact_sum
from gputally.testing.exports import ExportSuite

Due = Mapping[str, Decimal] | None
IDLE = "__idle__"


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def by_team(rows: list[dict[str, str]], team: str, amount: str) -> dict[str, Decimal]:
    teams = {row[team] for row in rows}
    return {name: exact_sum(Decimal(row[amount]) for row in rows if row[team] == name) for name in sorted(teams)}


class TestCsv(ExportSuite):
    plugin = exports()["csv"]

    def due(self, content: bytes) -> Due:
        rows = [row for row in rows_of(content.decode()) if row["record"] == "payable"]
        return {row["team"]: Decimal(row["cost"]) for row in rows}


class TestParquet(ExportSuite):
    plugin = exports()["parquet"]

    def due(self, content: bytes) -> Due:
        rows = pq.read_table(io.BytesIO(content)).to_pylist()
        return {row["team"]: row["cost"] for row in rows if row["record"] == "payable"}


class TestJson(ExportSuite):
    plugin = exports()["json"]

    def due(self, content: bytes) -> Due:
        rows = json.loads(content)["tables"]["payable"]
        return {row["team"]: Decimal(row["amount"]) for row in rows}


class TestFocus(ExportSuite):
    plugin = exports()["focus"]

    def due(self, content: bytes) -> Due:
        return by_team(rows_of(unpack(content)["cost_and_usage.csv"].decode()), "SubAccountId", "BilledCost")


class TestFocusTable(ExportSuite):
    plugin = exports()["focus-1.2"]

    def due(self, content: bytes) -> Due:
        return by_team(rows_of(content.decode()), "SubAccountId", "BilledCost")


class TestHtml(ExportSuite):
    plugin = exports()["html"]
    forbidden = ("<script>",)

    def due(self, content: bytes) -> Due:
        return None


@pytest.mark.real
class TestPdf(TestHtml):
    plugin = exports()["pdf"]
