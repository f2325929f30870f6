"""FOCUS passes the suite of exports, as an archive and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from accountant.exports.focus import EXPORT, EXPORT_1_2
from gputally.testing.exports import ExportSuite
from tests.exports.focus.cases import charges
from tests.exports.format_cases import by_team, rows_of


class TestFocus(ExportSuite):
    plugin = EXPORT

    def due(self, content: bytes) -> Mapping[str, Decimal]:
        return by_team(rows_of(charges(content)), "SubAccountId", "BilledCost")


class TestFocusTable(ExportSuite):
    plugin = EXPORT_1_2

    def due(self, content: bytes) -> Mapping[str, Decimal]:
        return by_team(rows_of(content), "SubAccountId", "BilledCost")
