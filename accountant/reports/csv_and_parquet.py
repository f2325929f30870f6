"""Writes a report's amounts as CSV and Parquet.

Both contain the records of accountant.reports.report_tables. CSV has a total row after the lines, one after the payable
amounts and one after the amounts due. The cost of time without a price is empty, never 0. Text that a spreadsheet would
interpret as a formula gets a leading apostrophe in CSV.

In Parquet, GPU-hours are DECIMAL(38, 9), unit prices DECIMAL(38, 12), the precision of a price book, and money
DECIMAL(38, 21), so that price × hours fits without rounding; instants are UTC microseconds. There are no total rows:
totals of the lines and of the payable amounts, and the statement's hash, are in the file's metadata. There is one row
group. Equal reports give equal bytes with the same version of Arrow."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq

from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.periods import utc
from accountant.prices.price_book import MAX_DECIMALS
from accountant.reports import report_tables
from accountant.reports.report_builder import Report
from accountant.reports.report_tables import Record, instant, records
from gputally.base.money import HOUR_PLACES, exact_sum, plain
from gputally.base.untrusted_text import for_cell

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
