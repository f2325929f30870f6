"""Writes the tables of a report as XLSX, one sheet each.

Every text cell is stored as text and marked so that editing it does not make it a formula (CWE-1236). The creation
times that the library writes are replaced by the end of the report's span, so equal reports give equal bytes."""

from __future__ import annotations

import io
import re
from datetime import datetime

from openpyxl import Workbook
from openpyxl.cell.cell import Cell, MergedCell
from openpyxl.styles import Alignment, Border, Font, PatternFill, Side
from openpyxl.utils import get_column_letter
from openpyxl.worksheet.properties import PageSetupProperties
from openpyxl.worksheet.worksheet import Worksheet

from accountant.exports.zip_archive import pack, unpack
from accountant.reports import report_tables
from accountant.reports.report_builder import Report
from gputally.base.money import minor_places
from gputally.base.untrusted_text import escaped

_FORMATS: dict[report_tables.ColumnKind, str] = {
    "count": "#,##0", "hours": "#,##0.0", "price": "#,##0.00##########", "ratio": "0.0 %",
    "number": "#,##0.00", "instant": 'yyyy-mm-dd hh:mm "UTC"', "text": "@",
}  # fmt: skip
_HEAD = PatternFill("solid", fgColor="E8ECF1")
_SUM = Border(top=Side("thin", color="18212C"))
_WIDEST = 60
_CORE, _INSTANT = "docProps/core.xml", re.compile(rb"(<dcterms:\w+[^>]*>)[^<]*(</dcterms:\w+>)")


def render_xlsx(report: Report) -> bytes:
    """An .xlsx file. Empty tables have no sheet."""
    book = Workbook()
    book.remove(book.worksheets[0])
    for table in report_tables.tables(report):
        if table.rows:
            _sheet(book, table, report.currency)
    content = io.BytesIO()
    book.save(content)
    members = unpack(content.getvalue())
    created = report_tables.instant(report.end_ms).strftime("%Y-%m-%dT%H:%M:%SZ").encode()
    members[_CORE] = _INSTANT.sub(rb"\g<1>" + created + rb"\g<2>", members[_CORE])
    return pack(members)


def _sheet(book: Workbook, table: report_tables.ReportTable, currency: str | None) -> None:
    sheet: Worksheet = book.create_sheet(table.title[:31])
    sheet.freeze_panes = "B2" if table.columns[0][1] == "text" else "A2"
    for column, (name, kind) in enumerate(table.columns, 1):
        head = sheet.cell(1, column, _heading(table, name, kind, currency))
        head.font, head.fill = Font(bold=True), _HEAD
        head.alignment = Alignment(horizontal="left" if kind == "text" else "right", wrap_text=True, vertical="top")
    rows = [*table.rows, *([table.total] if table.total is not None else [])]
    for number, row in enumerate(rows, 2):
        for column, (value, (_, kind)) in enumerate(zip(row, table.columns, strict=True), 1):
            cell = sheet.cell(number, column)
            _put(cell, value, _format(kind, _unit(table, row, currency)))
            if number == len(table.rows) + 2:
                cell.font, cell.border = Font(bold=True), _SUM
    for column in range(1, len(table.columns) + 1):
        widths = [_shown(sheet.cell(number, column)) for number in range(2, len(rows) + 2)]
        widest = max([max(map(len, str(sheet.cell(1, column).value).split())), *widths])
        sheet.column_dimensions[get_column_letter(column)].width = min(_WIDEST, widest + 3)
    sheet.auto_filter.ref = f"A1:{get_column_letter(len(table.columns))}{len(table.rows) + 1}"
    sheet.page_setup.orientation, sheet.page_setup.fitToHeight = "landscape", 0
    sheet.sheet_properties.pageSetUpPr = PageSetupProperties(fitToPage=True)
    sheet.print_title_rows = "1:1"


def _heading(table: report_tables.ReportTable, name: str, kind: report_tables.ColumnKind, currency: str | None) -> str:
    """The column's heading, with the currency if all its amounts are in the report's currency."""
    words = name.replace("_", " ")
    return f"{words} {currency}" if kind in ("money", "price") and currency and not _has_units(table) else words


def _has_units(table: report_tables.ReportTable) -> bool:
    """Whether each row states the unit of its amounts, as budgets in money and GPU-hours do."""
    return (report_tables.UNIT, "text") in table.columns


def _unit(table: report_tables.ReportTable, row: tuple[report_tables.Cell, ...], currency: str | None) -> str | None:
    return str(row[table.columns.index((report_tables.UNIT, "text"))]) if _has_units(table) else currency


def _format(kind: report_tables.ColumnKind, unit: str | None) -> str:
    """The number format; for money, with the decimals of its currency: a yen has none, a dinar has three."""
    if kind != "money":
        return _FORMATS[kind]
    places = minor_places(unit or "")
    return f"#,##0.{'0' * places}" if places else "#,##0"


def _put(cell: Cell | MergedCell, value: report_tables.Cell, number_format: str) -> None:
    if value is None:
        return
    if isinstance(value, str):
        cell.value = escaped(value)
        cell.data_type = "s"
        cell.style = "Normal"
        cell.number_format = _FORMATS["text"]
        cell.quotePrefix = True
        return
    # Workbooks have no time zones: instants are UTC, and their format says so.
    cell.value = value.replace(tzinfo=None) if isinstance(value, datetime) else value
    cell.number_format = number_format


def _shown(cell: Cell | MergedCell) -> int:
    """Approximate number of characters that the cell displays."""
    if cell.value is None:
        return 0
    if cell.data_type == "s":
        return len(str(cell.value))
    return 20 if isinstance(cell.value, datetime) else len(f"{float(cell.value):,.2f}")  # type: ignore[arg-type]
