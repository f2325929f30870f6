"""Writes a report's amounts as a Parquet file.

It has the records of accountant.reports.report_tables. GPU-hours are DECIMAL(38, 9), unit prices DECIMAL(38, 12), the
precision of a price book, and money DECIMAL(38, 21), so that price × hours fits without rounding; instants are UTC
microseconds. There are no total rows: totals of the lines and of the payable amounts, and the statement's hash, are in
the file's metadata. There is one row group. Equal reports give equal bytes with the same version of Arrow."""

from __future__ import annotations

import io
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq

from accountant.bookkeeping.month_closing import statement_hash
from accountant.reports import report_tables
from accountant.reports.report_builder import Report
from accountant.reports.report_tables import DECIMALS, TEXTS, instant, records, sum_of
from gputally.base.money import plain

_PRECISION = 38
SCHEMA = pa.schema(
    [
        pa.field("period_start", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("period_end", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("currency", pa.string()),
        *(pa.field(name, pa.string(), nullable=False) for name in TEXTS),
        *(pa.field(name, pa.decimal128(_PRECISION, places)) for name, places in DECIMALS.items()),
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
        **{name: [getattr(record, name) for record in all_records] for name in TEXTS},
        **{name: [getattr(record, name) for record in all_records] for name in DECIMALS},
    }
    metadata = {
        "gputally.scope": report.team or "cluster",
        "gputally.timezone": report.tz.key,
        "gputally.statement_sha256": statement_hash(report.statement),
        "gputally.price_book_version": report.statement.price_book_version,
        "gputally.lines_gpu_hours": plain(sum_of(lines, "gpu_hours")),
        "gputally.lines_cost": _text(report_tables.sum_of_lines(report, lines)),
        "gputally.payable_total": _text(report.payable_total),
    }
    table = pa.table(columns, schema=SCHEMA).replace_schema_metadata(metadata)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", row_group_size=max(1, len(all_records)))
    return sink.getvalue()


def _text(value: Decimal | None) -> str:
    return "" if value is None else plain(value)
