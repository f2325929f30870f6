"""The statement's lines as CSV (RFC 4180): for spreadsheets, and for programs.

Lines carry exact figures: hours with nine decimals, cost = unit price × hours in full. Then come the total
of the lines, and per team what is payable, in minor units, with its own total. `record` tells them apart, so
that nobody adds a total to its parts. Unpriced is empty, never 0.

Text that a spreadsheet would take for a formula gets a leading apostrophe (CWE-1236); numbers are plain decimals.
"""

from __future__ import annotations

import csv
import io
from decimal import Decimal

from accountant.money import exact_sum, plain
from accountant.reports.formats import utc
from accountant.reports.model import Report

COLUMNS = (
    "record", "period_start", "period_end", "status", "team", "account", "gpu_model", "capacity_type", "price_row",
    "currency", "unit_price", "gpu_hours", "cost",
)  # fmt: skip
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What spreadsheets take for the beginning of a formula; the last four are the full-width forms."""


def render(report: Report) -> str:
    """CRLF-terminated lines, the header first. For one team: its lines, and its payable amount."""
    stated = report.statement
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\r\n")
    writer.writeheader()
    common = {
        "period_start": utc(report.start_ms),
        "period_end": utc(report.end_ms),
        "status": stated.status,
        "currency": stated.currency or "",
    }

    def total(record: str, **figures: str) -> None:
        writer.writerow({**common, "record": record, **figures})

    for line in report.lines:
        writer.writerow(
            {
                **common,
                "record": "line",
                "team": guard(line.team),
                "account": line.account,
                "gpu_model": guard(line.gpu_model),
                "capacity_type": guard(line.capacity_type),
                "price_row": guard(line.price_row or ""),
                "unit_price": _number(line.unit_price),
                "gpu_hours": _number(line.gpu_hours),
                "cost": _number(line.cost),
            }
        )
    total(
        "total",
        gpu_hours=_number(exact_sum(line.gpu_hours for line in report.lines)),
        cost=_number(exact_sum(line.cost for line in report.lines if line.cost is not None)),
    )
    amounts = {team: amount for team, amount in stated.payable.items() if report.team in (None, team)}
    for team, amount in amounts.items():
        total("payable", team=guard(team), cost=_number(amount))
    if amounts:
        total("payable total", cost=_number(exact_sum(amounts.values())))
    return text.getvalue()


def _number(value: Decimal | None) -> str:
    return "" if value is None else plain(value)


def guard(text: str) -> str:
    """Text as a cell that no spreadsheet executes."""
    return f"'{text}" if text.startswith(_FORMULA) else text
