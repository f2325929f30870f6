"""Writes the rows of a list as CSV and as Parquet, with exact figures and one row for each row of the view."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, Literal, TypeVar

from fastapi import Request, Response

from accountant.core.file_cells import cell_text
from accountant.exports.protocol import CSV
from accountant.reports import figure_formatting
from accountant.reports.figure_formatting import Relative
from accountant.wire.list_fields import FileCell, FileKind, ListField
from gputally.base.number_format import NOTHING, number
from gputally.base.untrusted_text import for_cell
from gputally.server.request_handling import tagged

PARQUET: Final = "application/vnd.apache.parquet"
FileFormat = Literal["csv", "parquet"]
Row = TypeVar("Row")


def against(
    field: ListField[Row],
    now: Row,
    then: Row | None,
    currency: str | None,
    relative: Relative = figure_formatting.relative_of,
) -> str:
    """A figure of the span before and the change since, for people: `before 12.0, +25.0 %`."""
    if then is None:
        return f"before {NOTHING}"
    values = field.of(now), field.of(then)
    shares = [value if isinstance(value, float) else None for value in values]
    amounts = [value if isinstance(value, Decimal) else None for value in values]
    if field.kind == "float":
        return f"before {figure_formatting.percent(shares[1])}, {figure_formatting.points(*shares)}"
    was = amounts[1]
    if field.kind == "money":
        text = figure_formatting.money(was, currency)
    else:
        text = NOTHING if was is None else number(was, 1)
    return f"before {text}, {relative(*amounts)}"


@dataclass(frozen=True, slots=True)
class ListRecords:
    """A view as a table of a file.

    total: a last row of CSV; Parquet has it in its metadata. Empty: none.
    about: further metadata of Parquet."""

    names: Sequence[str]
    kinds: Sequence[FileKind]
    rows: Sequence[Sequence[FileCell]]
    total: Sequence[FileCell] = ()
    about: dict[str, str] = field(default_factory=dict)


def list_file(request: Request, records: ListRecords, file_format: FileFormat, name: str) -> Response:
    """The file to save. name: its name."""
    if file_format == "csv":
        return tagged(request, _csv(records), CSV, name)
    return tagged(request, _parquet(records), PARQUET, name)


def _csv(records: ListRecords) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(map(for_cell, records.names))
    for row in (*records.rows, *([records.total] if records.total else ())):
        writer.writerow([cell_text(value, kind) for value, kind in zip(row, records.kinds, strict=True)])
    return text.getvalue().encode()


def _parquet(records: ListRecords) -> bytes:
    """The rows without the total. Hours are DECIMAL(38, 9) and money DECIMAL(38, 21), as in the Parquet file of a
    report."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types: dict[FileKind, Any] = {
        "text": pa.string(), "hours": pa.decimal128(38, 9), "money": pa.decimal128(38, 21), "price": pa.float64(),
        "float": pa.float64(), "integer": pa.int64(), "instant": pa.timestamp("ms", "UTC"),
    }  # fmt: skip
    fields = [pa.field(name, types[kind]) for name, kind in zip(records.names, records.kinds, strict=True)]
    columns = [
        pa.array([float(row[at]) if kind == "price" and row[at] is not None else row[at] for row in records.rows],  # type: ignore[arg-type]  # a price is a number
                 type=of.type)
        for at, (kind, of) in enumerate(zip(records.kinds, fields, strict=True))
    ]  # fmt: skip
    totals = {
        f"total_{name}": cell_text(value, kind)
        for name, value, kind in zip(records.names, records.total or (None,) * len(fields), records.kinds, strict=True)
        if records.total and kind != "text"
    }
    metadata = {f"gputally.{name}": value for name, value in {**records.about, **totals}.items()}
    table = pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=metadata))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()
