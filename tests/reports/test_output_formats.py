"""Every form of a report: read back, its lines add up; written twice, it is the same; a name stays text."""

from __future__ import annotations

import csv as csvfile
import hashlib
import io
import json
import re
import zipfile
from decimal import Decimal
from xml.etree import ElementTree as ET

import openpyxl
import pyarrow.parquet as pq
import pytest

from accountant.bookkeeping.month_closing import statement_hash
from accountant.exports.csv.lines import render_csv
from accountant.exports.parquet.table_file import SCHEMA
from accountant.exports.protocol import file_name
from accountant.exports.rendering_process import written
from accountant.reports import html_page, report_tables
from accountant.reports.report_builder import Report, build
from gputally.base.money import exact_sum
from gputally.base.untrusted_text import FORMULA, escaped
from tests.billing.usage_rows import held, price_book
from tests.fakes.list_ledger import ListLedger
from tests.reports import sample_month

PLAIN: tuple[str, ...] = ("html", "csv", "xlsx", "parquet", "json")
"""Forms that need no library of the system."""
NAMESPACE = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


@pytest.fixture(scope="module")
def report() -> Report:
    return sample_month.report()


def rendered(form: str, report: Report) -> bytes:
    return written(form, report)


def line_total(report: Report) -> tuple[Decimal, Decimal]:
    costs = (line.cost for line in report.lines if line.cost is not None)
    return exact_sum(line.gpu_hours for line in report.lines), exact_sum(costs)


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


def test_csv_has_what_is_due(report: Report) -> None:
    rows = list(csvfile.DictReader(io.StringIO(render_csv(report), newline="")))
    hours, cost = line_total(report)
    lines = [row for row in rows if row["record"] == "line"]
    assert exact_sum(Decimal(row["gpu_hours"]) for row in lines) == hours
    assert exact_sum(Decimal(row["cost"]) for row in lines if row["cost"]) == cost
    due = {row["team"]: Decimal(row["cost"]) for row in rows if row["record"] == "due"}
    assert due == report.statement.due
    (total,) = [row for row in rows if row["record"] == "due total"]
    assert Decimal(total["cost"]) == report.statement.due_total
    (credit,) = [row for row in rows if row["record"] == "adjustment"]
    assert (credit["cost"], credit["about"], credit["reason"]) == ("-250.00", "2026-10", "node-7 lost a night")


def test_a_workbooks_lines_add_up(report: Report) -> None:
    content = rendered("xlsx", report)
    _, *lines, total = sheet_cells(content, "Statement lines")
    for column, expected in zip("HI", line_total(report), strict=True):
        # A workbook's numbers are doubles: fifteen digits, far beyond the cent.
        found = exact_sum(Decimal(row.get(column) or 0) for row in lines)
        assert abs(found - expected) < Decimal("1e-9")
        assert abs(Decimal(total[column] or 0) - expected) < Decimal("1e-9")


def test_what_is_due_stands_by_team_in_workbook_and_json_as_in_csv(report: Report) -> None:
    _, *rows, total = sheet_cells(rendered("xlsx", report), "Due by team")
    assert [Decimal(row["B"] or 0) for row in rows] == list(report.statement.due.values())
    assert Decimal(total["B"] or 0) == report.statement.due_total
    told = json.loads(rendered("json", report))["tables"]["due"]
    assert {row["team"]: Decimal(row["amount"]) for row in told} == report.statement.due
    calm = sample_month.october(held("2026-10-01", "2026-10-03"))
    assert json.loads(rendered("json", calm))["tables"]["due"] == [], "nothing stands beside what is payable"


def test_a_workbook_is_numbers_under_a_frozen_header(report: Report) -> None:
    book = openpyxl.load_workbook(io.BytesIO(rendered("xlsx", report)))
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
    book = openpyxl.load_workbook(io.BytesIO(rendered("xlsx", report)))
    payable, budgets = book["Payable by team"], book["Budgets"]
    assert [cell.value for cell in payable[1]] == ["team", f"amount {currency}"]
    assert {cell.number_format for cell in payable["B"][1:]} == {shown}
    assert book["Statement lines"]["G1"].value == f"unit price {currency}"
    assert budgets["E1"].value == "limit", "their rows say of what they are"
    assert {row[3].value: row[4].number_format for row in budgets.iter_rows(min_row=2)}["EUR"] == "#,##0.00"


def test_parquet_is_exact_and_typed(report: Report) -> None:
    content = rendered("parquet", report)
    table = pq.read_table(io.BytesIO(content))
    assert table.schema.remove_metadata() == SCHEMA
    lines = [row for row in table.to_pylist() if row["record"] == "line"]
    hours, cost = line_total(report)
    assert sum(row["gpu_hours"] for row in lines) == hours
    assert sum(row["cost"] for row in lines if row["cost"] is not None) == cost
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert Decimal(metadata["gputally.lines_cost"]) == cost
    assert metadata["gputally.statement_sha256"] == statement_hash(report.statement)
    assert lines[0]["period_start"].isoformat() == "2026-10-01T00:00:00+00:00"
    for row in lines:
        if row["unit_price"] is not None:
            assert row["unit_price"] * row["gpu_hours"] == row["cost"]


def test_json_has_every_section_and_exact_figures(report: Report) -> None:
    document = json.loads(rendered("json", report))
    lines = document["tables"]["lines"]
    assert exact_sum(Decimal(line["gpu_hours"]) for line in lines) == line_total(report)[0]
    assert exact_sum(Decimal(line["cost"]) for line in lines if line["cost"] is not None) == line_total(report)[1]
    assert document["summary"]["statement_sha256"] == statement_hash(report.statement)
    assert document["summary"]["start"] == "2026-10-01T00:00:00Z"
    assert all(
        document["tables"][name] for name in ("budgets", "users", "spot", "waits", "hours", "beside", "unpriced")
    )


def test_a_second_report_is_the_same_in_every_form(report: Report) -> None:
    again = sample_month.report.__wrapped__()
    for form in PLAIN:
        first, second = (hashlib.sha256(rendered(form, one)).hexdigest() for one in (report, again))
        assert first == second, form


@pytest.mark.parametrize("name", sample_month.HOSTILE)
def test_names_stay_text_in_every_form(name: str) -> None:
    names = dict.fromkeys(("team", "namespace", "job", "user", "gpu_model", "pool"), name)
    report = sample_month.october(held("2026-10-01", "2026-10-03", gpus=8, busy=0.01, **names))
    page = html_page.render_html(report)
    assert "<script" not in page
    book = openpyxl.load_workbook(io.BytesIO(rendered("xlsx", report)))
    shown = escaped(name)
    cells = [cell for sheet in book for row in sheet.iter_rows() for cell in row if cell.value is not None]
    assert all(cell.data_type != "f" for cell in cells)
    assert any(str(cell.value).strip() == shown.strip() and cell.quotePrefix for cell in cells)
    rows = list(csvfile.reader(io.StringIO(render_csv(report), newline="")))
    assert not any(cell.startswith(FORMULA) for row in rows for cell in row if not re.fullmatch(r"-?[\d.]+", cell))
    found = pq.read_table(io.BytesIO(rendered("parquet", report))).to_pylist()
    assert {row["team"] for row in found} == {name}
    assert json.loads(rendered("json", report))["tables"]["users"][0]["user"] == name


@pytest.mark.parametrize("form", PLAIN)
def test_an_empty_month_has_every_form(form: str) -> None:
    for book in (None, sample_month.book()):
        assert rendered(form, build(ListLedger(), book, sample_month.START_MS, sample_month.END_MS))


def test_every_table_is_as_wide_as_its_heading(report: Report) -> None:
    for table in report_tables.tables(report):
        assert {len(row) for row in table.rows} <= {len(table.columns)}
        assert table.total is None or len(table.total) == len(table.columns)


def test_no_two_teams_share_a_file() -> None:
    teams = ("vision", "шахта", "школа", "a/b", "a_b", "a b", "x" * 253, "x" * 252, "\udc80")
    names = [file_name("focus-1.2.csv", "2026-10", team) for team in teams]
    assert names[0] == "gputally-2026-10-vision.focus-1.2.csv"
    assert names[4] == "gputally-2026-10-a_b.focus-1.2.csv"
    assert len(set(names)) == len(teams)
    assert all(len(name) < 255 and re.fullmatch(r"[\w.-]+", name, re.ASCII) for name in names)
