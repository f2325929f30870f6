"""The report's money as CSV (RFC 4180): for spreadsheets, and for programs.

The records of accountant.reports.records, with a total behind the lines, the payable and the due amounts. Unpriced
is empty, never 0. Text that a spreadsheet would take for a formula gets a leading apostrophe (CWE-1236); numbers are
plain decimals.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from decimal import Decimal
from itertools import groupby

from accountant.money import exact_sum, plain
from accountant.periods import utc
from accountant.reports.model import Report
from accountant.reports.records import Record, records
from agent.plaintext import for_cell

COLUMNS = (
    "record", "period_start", "period_end", "status", "team", "account", "gpu_model", "capacity_type", "price_row",
    "currency", "unit_price", "gpu_hours", "cost", "detail", "about", "reason",
)  # fmt: skip
_TOTALS = {"line": "total", "payable": "payable total", "due": "due total"}


def render(report: Report) -> str:
    """CRLF-terminated lines, the header first. For one team: its own."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\r\n")
    writer.writeheader()
    common = {
        "period_start": utc(report.start_ms),
        "period_end": utc(report.end_ms),
        "status": report.statement.status,
        "currency": report.currency or "",
    }
    kinds = {kind: list(several) for kind, several in groupby(records(report), key=lambda record: record.record)}
    for kind, several in {"line": kinds.pop("line", []), **kinds}.items():
        for record in several:
            writer.writerow({**common, **_cells(record)})
        if kind in _TOTALS:
            writer.writerow({**common, "record": _TOTALS[kind], **_total(several, hours=kind == "line")})
    return text.getvalue()


def _cells(record: Record) -> dict[str, str]:
    names = ("account", "team", "gpu_model", "capacity_type", "price_row", "detail", "about", "reason")
    figures = ("unit_price", "gpu_hours", "cost")
    return {
        "record": record.record,
        **{name: for_cell(getattr(record, name)) for name in names},
        **{name: _number(getattr(record, name)) for name in figures},
    }


def _total(several: Iterable[Record], *, hours: bool) -> dict[str, str]:
    found = list(several)
    cost = exact_sum(record.cost for record in found if record.cost is not None)
    time = exact_sum(record.gpu_hours for record in found if record.gpu_hours is not None)
    return {"cost": _number(cost), **({"gpu_hours": _number(time)} if hours else {})}


def _number(value: Decimal | None) -> str:
    return "" if value is None else plain(value)
