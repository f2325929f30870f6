"""The workbook passes the suite of exports."""

from __future__ import annotations

import io
from collections.abc import Mapping
from decimal import Decimal

from openpyxl import load_workbook

from accountant.exports.xlsx import EXPORT
from gputally.testing.exports import ExportSuite

Due = Mapping[str, Decimal] | None


class TestXlsx(ExportSuite):
    plugin = EXPORT

    def due(self, content: bytes) -> Due:
        book = load_workbook(io.BytesIO(content))
        if "Payable by team" not in book.sheetnames:
            return {}
        _, *rows, _ = book["Payable by team"].iter_rows(values_only=True)
        return {str(team): Decimal(str(amount)) for team, amount in rows}
