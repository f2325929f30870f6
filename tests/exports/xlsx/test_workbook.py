"""The workbook passes the suite of exports; its lines add up, its cells are numbers, and money is shown as counted."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from decimal import Decimal
from xml.etree import ElementTree as ET

import openpyxl
import pytest
from openpyxl import load_workbook

from accountant.exports.rendering_process import written
from accountant.exports.xlsx import EXPORT
from accountant.reports.report_builder import Report, build
from gputally.base.money import exact_sum
from gputally.testing.exports import ExportSuite
from tests.billing.usage_rows import held, price_book
from tests.exports.xlsx.cases import assert_is_text
from tests.fakes.list_ledger import ListLedger
from tests.reports import sample_month

NAMESPACE = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


class TestXlsx(ExportSuite):
    plugin = EXPORT

    def due(self, content: bytes) -> Mapping[str, Decimal]:
        book = load_workbook(io.BytesIO(content))
        if "Payable by team" not in book.sheetnames:
            return {}
        _, *rows, _ = book["Payable by team"].iter_rows(values_only=True)
        return {str(team): Decimal(str(amount)) for team, amount in rows}


@pytest.fixture(scope="module")
def report() -> Report:
    return sample_month.report()


def sheet_cells(content: bytes, title: str) -> list[dict[str, str | None]]:
    """Return the texts of a sheet's XML by column letter, exactly as written, without a conversion to float."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        book = ET.fromstring(archive.read("xl/workbook.xml"))
        names = [sheet.get("name") for sheet in book.iter(f"{NAMESPACE}sheet")]
        root = ET.fromstring(archive.read(f"xl/worksheets/sheet{names.index(title) + 1}.xml"))
    return [
        {(cell.get("r") or "").rstrip("0123456789"): cell.findtext(f"{NAMESPACE}v") for cell in row}
        for row in root.iter(f"{NAMESPACE}row")
    ]


def test_a_workbooks_lines_add_up(report: Report) -> None:
    content = written("xlsx", report)
    _, *lines, total = sheet_cells(content, "Statement lines")
    for column, expected in zip("HI", sample_month.line_total(report), strict=True):
        # A workbook's numbers are doubles: fifteen digits, far beyond the cent.
        found = exact_sum(Decimal(row.get(column) or 0) for row in lines)
        assert abs(found - expected) < Decimal("1e-9")
        assert abs(Decimal(total[column] or 0) - expected) < Decimal("1e-9")


def test_what_is_due_stands_by_team(report: Report) -> None:
    _, *rows, total = sheet_cells(written("xlsx", report), "Due by team")
    assert [Decimal(row["B"] or 0) for row in rows] == list(report.statement.due.values())
    assert abs(Decimal(total["B"] or 0) - report.statement.due_total) < Decimal("1e-9")


def test_a_workbook_is_numbers_under_a_frozen_header(report: Report) -> None:
    book = openpyxl.load_workbook(io.BytesIO(written("xlsx", report)))
    assert {"Summary", "Statement lines", "Users", "Queue waits", "Spot candidates"} <= set(book.sheetnames)
    for sheet in book:
        assert sheet.freeze_panes in ("A2", "B2")
        assert all(dimension.width for dimension in sheet.column_dimensions.values())
    lines = book["Statement lines"]
    assert {type(cell.value) for cell in lines["H"][1:]} <= {int, float}
    unpriced = next(row for row in lines.iter_rows(min_row=2, values_only=True) if row[3] == "Tesla T4")
    assert unpriced[-1] is None


@pytest.mark.parametrize(("currency", "shown"), [("JPY", "#,##0"), ("KWD", "#,##0.000"), ("EUR", "#,##0.00")])
def test_a_workbook_shows_money_as_its_currency_is_counted(currency: str, shown: str) -> None:
    ledger = ListLedger([held("2026-10-01", "2026-10-03")])
    ledger.put_policy(sample_month.policy(), 0)
    prices = price_book("id: a, model: H100, price: '1.2345', valid_from: 2026-01-01", currency)
    report = build(ledger, prices, sample_month.START_MS, sample_month.END_MS)
    book = openpyxl.load_workbook(io.BytesIO(written("xlsx", report)))
    payable, budgets = book["Payable by team"], book["Budgets"]
    assert [cell.value for cell in payable[1]] == ["team", f"amount {currency}"]
    assert {cell.number_format for cell in payable["B"][1:]} == {shown}
    assert book["Statement lines"]["G1"].value == f"unit price {currency}"
    assert budgets["E1"].value == "limit", "their rows say of what they are"
    assert {row[3].value: row[4].number_format for row in budgets.iter_rows(min_row=2)}["EUR"] == "#,##0.00"


@pytest.mark.parametrize(
    "name", ["\u202etxt.exe \u2066x", "esc \x1b[2J \ufeff bare\rreturn", "@SUM(1+9)*cmd|' /C calc'!A0"]
)
def test_names_steer_nothing(name: str) -> None:
    names = dict.fromkeys(("team", "job", "user"), name)
    assert_is_text(written("xlsx", sample_month.october(held("2026-10-01", "2026-10-03", **names))), name)
