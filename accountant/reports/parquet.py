"""The report's money as Parquet: the records of accountant.reports.records with exact types.

GPU-hours are DECIMAL(38, 9); unit prices DECIMAL(38, 12), all a price book may write; money DECIMAL(38, 21), so that
price × hours fits without rounding; instants are UTC microseconds. Totals and the statement's hash stand in the file's
metadata, so that no row is a sum of others. One row group, no statistics that depend on a version: equal reports give
equal bytes with the same Arrow.
"""

from __future__ import annotations

import io
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq

from accountant.money import HOUR_PLACES, exact_sum, plain
from accountant.prices.amounts import MAX_PLACES
from accountant.reports.flat import instant
from accountant.reports.model import Report
from accountant.reports.records import Record, records

_PRECISION = 38
_TEXT = ("record", "team", "account", "detail", "gpu_model", "capacity_type", "price_row", "about", "reason")
_DECIMAL = {"unit_price": MAX_PLACES, "gpu_hours": HOUR_PLACES, "cost": MAX_PLACES + HOUR_PLACES}
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


def render(report: Report) -> bytes:
    """A Parquet file, its metadata `gputally.*` included."""
    found = list(records(report))
    start, end = instant(report.start_ms), instant(report.end_ms)
    columns: dict[str, list[object]] = {
        "period_start": [start] * len(found),
        "period_end": [end] * len(found),
        "status": [report.statement.status] * len(found),
        "currency": [report.currency] * len(found),
        **{name: [getattr(record, name) for record in found] for name in _TEXT},
        **{name: [getattr(record, name) for record in found] for name in _DECIMAL},
    }
    metadata = {
        "gputally.scope": report.team or "cluster",
        "gputally.timezone": report.tz.key,
        "gputally.statement_sha256": report.statement.hash,
        "gputally.price_book_version": report.statement.price_book_version,
        "gputally.lines_gpu_hours": plain(_sum(found, "line", "gpu_hours")),
        "gputally.lines_cost": plain(_sum(found, "line", "cost")),
        "gputally.payable_total": plain(_sum(found, "payable", "cost")),
    }
    table = pa.table(columns, schema=SCHEMA).replace_schema_metadata(metadata)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", row_group_size=max(1, len(found)))
    return sink.getvalue()


def _sum(found: list[Record], kind: str, figure: str) -> Decimal:
    values = (getattr(record, figure) for record in found if record.record == kind)
    return exact_sum(value for value in values if value is not None)
