"""The report as one JSON document: the tables of accountant.reports.flat, decimals as text. Deterministic."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal

from accountant.money import plain
from accountant.reports.flat import Cell, tables
from accountant.reports.model import Report

SCHEMA = 1


def render(report: Report) -> str:
    """`{schema, tables: {name: [{column: value}]}}`; instants RFC 3339 in UTC, unknown null."""
    found = {
        table.name: [
            {name: _plain(cell) for (name, _), cell in zip(table.columns, row, strict=True)} for row in table.rows
        ]
        for table in tables(report)
    }
    document = {"schema": SCHEMA, "summary": found.pop("summary")[0], "tables": found}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _plain(cell: Cell) -> str | int | float | None:
    if isinstance(cell, Decimal):
        return plain(cell)
    return cell.strftime("%Y-%m-%dT%H:%M:%SZ") if isinstance(cell, datetime) else cell
