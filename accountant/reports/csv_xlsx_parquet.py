"""Writes a report's amounts as CSV, XLSX and Parquet.

CSV and Parquet contain the records of accountant.reports.report_tables, XLSX its tables, one sheet each. CSV has a
total row after the lines, one after the payable amounts and one after the amounts due. The cost of time without a price
is empty, never 0.

Text that a spreadsheet would interpret as a formula gets a leading apostrophe in CSV. In XLSX every text cell is stored
as text and marked so that editing it does not make it a formula (CWE-1236). The creation times that the library writes
are replaced by the end of the report's span, so equal reports give equal bytes.

In Parquet, GPU-hours are DECIMAL(38, 9), unit prices DECIMAL(38, 12), the precision of a price book, and money
DECIMAL(38, 21), so that price × hours fits without rounding; instants are UTC microseconds. There are no total rows:
totals of the lines and of the payable amounts, and the statement's hash, are in the file's metadata. There is one row
group. Equal reports give equal bytes with the same version of Arrow."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq
from openpyxl import Workbook
from openpyxl.cell.cell import Cell, MergedCell
from openpyxl.styles import Alignment, Border, Font, PatternFill, Side
from openpyxl.utils import get_column_letter
from openpyxl.worksheet.properties import PageSetupProperties
from openpyxl.worksheet.worksheet import Worksheet

from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.periods import utc
from accountant.prices.price_book import MAX_DECIMALS
from accountant.reports import focus_export, report_tables
from accountant.reports.report_builder import Report
from accountant.reports.report_tables import Record, instant, records
from gputally.base.money import HOUR_PLACES, exact_sum, minor_places, plain
from gputally.base.untrusted_text import escaped, for_cell

COLUMNS = (
    "record", "period_start", "period_end", "status", "team", "account", "gpu_model", "capacity_type", "price_row",
    "currency", "unit_price", "gpu_hours", "cost", "detail", "about", "reason",
)  # fmt: skip
_TOTALS = {"line": "total", "payable": "payable total", "due": "due total"}


def render_csv(report: Report) -> str:
    """CSV lines with CRLF, the header first. The report of one team contains only that team's lines."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\r\n")
    writer.writeheader()
    common = {
        "period_start": utc(report.start_ms),
        "period_end": utc(report.end_ms),
        "status": report.statement.status,
        "currency": report.currency or "",
    }
    by_kind = {kind: list(of_kind) for kind, of_kind in groupby(records(report), key=lambda record: record.record)}
    for kind, of_kind in {"line": by_kind.pop("line", []), **by_kind}.items():
        for record in of_kind:
            writer.writerow({**common, **_cells(record)})
        if kind in _TOTALS:
            total = _total(report, of_kind) if kind == "line" else {"cost": plain(_sum(of_kind, "cost"))}
            writer.writerow({**common, "record": _TOTALS[kind], **total})
    return text.getvalue()


def _cells(record: Record) -> dict[str, str]:
    return {
        **{name: for_cell(getattr(record, name)) for name in _TEXT},
        **{name: _number(getattr(record, name)) for name in _DECIMAL},
    }


def _total(report: Report, lines: Sequence[Record]) -> dict[str, str]:
    cost = report_tables.sum_of_lines(report, lines)
    time = _sum(lines, "gpu_hours") if lines else None
    if not report.statement.metered:
        reason = "nothing of this time is metered"
    elif any(record.cost is None for record in lines):
        reason = "some of the time has no price"
    else:
        reason = ""
    return {"cost": _number(cost), "gpu_hours": _number(time), "reason": reason}


def _number(value: Decimal | None) -> str:
    return "" if value is None else plain(value)


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
    members = focus_export.unpack(content.getvalue())
    created = report_tables.instant(report.end_ms).strftime("%Y-%m-%dT%H:%M:%SZ").encode()
    members[_CORE] = _INSTANT.sub(rb"\g<1>" + created + rb"\g<2>", members[_CORE])
    return focus_export.pack(members)


def _sheet(book: Workbook, table: report_tables.Table, currency: str | None) -> None:
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


def _heading(table: report_tables.Table, name: str, kind: report_tables.ColumnKind, currency: str | None) -> str:
    """The column's heading, with the currency if all its amounts are in the report's currency."""
    words = name.replace("_", " ")
    return f"{words} {currency}" if kind in ("money", "price") and currency and not _has_units(table) else words


def _has_units(table: report_tables.Table) -> bool:
    """Whether each row states the unit of its amounts, as budgets in money and GPU-hours do."""
    return (report_tables.UNIT, "text") in table.columns


def _unit(table: report_tables.Table, row: tuple[report_tables.Cell, ...], currency: str | None) -> str | None:
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


_PRECISION = 38
_TEXT = ("record", "team", "account", "detail", "gpu_model", "capacity_type", "price_row", "about", "reason")
_DECIMAL = {"unit_price": MAX_DECIMALS, "gpu_hours": HOUR_PLACES, "cost": MAX_DECIMALS + HOUR_PLACES}
SCHEMA = pa.schema(
    [
        pa.field("period_start", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("period_end", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("currency", pa.string()),
        *(pa.field(name, pa.string(), nullable=False) for name in _TEXT),
        *(pa.field(name, pa.decimal128(_PRECISION, places)) for name, places in _DECIMAL.items()),
    ]
)


def render_parquet(report: Report) -> bytes:
    """A Parquet file with metadata `gputally.*`."""
    all_records = list(records(report))
    lines = [record for record in all_records if record.record == "line"]
    start, end = instant(report.start_ms), instant(report.end_ms)
    columns: dict[str, list[object]] = {
        "period_start": [start] * len(all_records),
        "period_end": [end] * len(all_records),
        "status": [report.statement.status] * len(all_records),
        "currency": [report.currency] * len(all_records),
        **{name: [getattr(record, name) for record in all_records] for name in _TEXT},
        **{name: [getattr(record, name) for record in all_records] for name in _DECIMAL},
    }
    metadata = {
        "gputally.scope": report.team or "cluster",
        "gputally.timezone": report.tz.key,
        "gputally.statement_sha256": statement_hash(report.statement),
        "gputally.price_book_version": report.statement.price_book_version,
        "gputally.lines_gpu_hours": plain(_sum(lines, "gpu_hours")),
        "gputally.lines_cost": _number(report_tables.sum_of_lines(report, lines)),
        "gputally.payable_total": _number(report.payable_total),
    }
    table = pa.table(columns, schema=SCHEMA).replace_schema_metadata(metadata)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", row_group_size=max(1, len(all_records)))
    return sink.getvalue()


def _sum(some_records: Iterable[Record], column: str) -> Decimal:
    values = (getattr(record, column) for record in some_records)
    return exact_sum(value for value in values if value is not None)
