"""Writes the tables of a report as JSON."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from typing import IO, TYPE_CHECKING, Final

from accountant.exports.protocol import ExportPlugin
from gputally.base.money import plain

if TYPE_CHECKING:
    from accountant.reports.report_builder import Report
    from accountant.reports.report_tables import Cell

SCHEMA = 1


def render(report: Report) -> str:
    """`{schema, tables: {name: [{column: value}]}}`; instants are RFC 3339 in UTC, unknown values null."""
    from accountant.reports.report_tables import tables

    rows_by_table = {
        table.name: [
            {name: _plain(cell) for (name, _), cell in zip(table.columns, row, strict=True)} for row in table.rows
        ]
        for table in tables(report)
    }
    document = {"schema": SCHEMA, "summary": rows_by_table.pop("summary")[0], "tables": rows_by_table}
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    if text.replace("\n", "").isprintable():
        return text
    # U+202E and its like would change how a terminal shows the rest.
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def _plain(cell: Cell) -> str | int | float | None:
    if isinstance(cell, Decimal):
        return plain(cell)
    return cell.strftime("%Y-%m-%dT%H:%M:%SZ") if isinstance(cell, datetime) else cell


def _write(report: Report, stream: IO[bytes]) -> None:
    stream.write(render(report).encode())


EXPORT: Final = ExportPlugin(
    name="json",
    title="JSON",
    media_type="application/json",
    suffix="json",
    write=_write,
    reaches="nothing",
    page="docs/reports.md",
    inline=True,
)
