"""Makes the rows of the table `focus` from a month's report: Cost and Usage of FOCUS 1.4.

The cells are those of the FOCUS export (accountant.reports.focus_export). An exact amount may have more decimals than
the column, so amounts are rounded cumulatively within each team's charges and add up to what the team owes."""

from __future__ import annotations

from datetime import datetime
from decimal import ROUND_HALF_EVEN, Decimal
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from accountant.lake.tables import DECIMALS, FOCUS
from accountant.reports.focus_export import charges, rows
from accountant.reports.report_builder import Report

_CHUNK: Final = 20_000
"""Number of rows that exist as dictionaries at one time."""
_QUANTUM: Final = Decimal(1).scaleb(-DECIMALS)
_AMOUNTS: Final = ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost")


def focus_rows(ledger: str, month: str, report: Report) -> pa.Table:
    """The charges of a month as rows of accountant.lake.tables.FOCUS. Raises CannotRender without a price book."""
    cells = rows(report, charges(report))
    sums: dict[tuple[str, str], Decimal] = {}
    chunks = []
    while chunk := list(islice(cells, _CHUNK)):
        made = [_typed(row, sums) | {"ledger": ledger, "month": month} for row in chunk]
        chunks.append(pa.Table.from_pylist(made, schema=FOCUS.arrow))
    if not chunks:
        return FOCUS.arrow.empty_table()
    return pa.concat_tables(chunks).sort_by([(name, "ascending") for name in FOCUS.order])


def _typed(row: dict[str, str], sums: dict[tuple[str, str], Decimal]) -> dict[str, Any]:
    """The cells in the columns' types; empty ones are null. sums: exact running totals, by team and column."""
    found: dict[str, Any] = {}
    for column in FOCUS.columns:
        text = row.get(column.name, "")
        if not text:
            continue
        if column.name in _AMOUNTS:
            at = row["SubAccountId"], column.name
            before = sums.get(at, Decimal(0))
            sums[at] = before + Decimal(text)
            found[column.name] = _rounded(sums[at]) - _rounded(before)
        elif column.type == "decimal":
            found[column.name] = _rounded(Decimal(text))
        elif column.type == "timestamptz":
            found[column.name] = datetime.fromisoformat(text)
        else:
            found[column.name] = text
    return found


def _rounded(amount: Decimal) -> Decimal:
    return amount.quantize(_QUANTUM, ROUND_HALF_EVEN)
