"""Writes a report's amounts as CSV.

It has the records of accountant.reports.report_tables, with a total row after the lines, one after the payable amounts
and one after the amounts due. The cost of time without a price is empty, never 0. Text that a spreadsheet would
interpret as a formula gets a leading apostrophe."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from decimal import Decimal
from itertools import groupby

from accountant.core.periods import utc
from accountant.reports import report_tables
from accountant.reports.report_builder import Report
from accountant.reports.report_tables import DECIMALS, TEXTS, ReportRecord, records, sum_of
from gputally.base.money import plain
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
            total = _total(report, of_kind) if kind == "line" else {"cost": plain(sum_of(of_kind, "cost"))}
            writer.writerow({**common, "record": _TOTALS[kind], **total})
    return text.getvalue()


def _cells(record: ReportRecord) -> dict[str, str]:
    return {
        **{name: for_cell(getattr(record, name)) for name in TEXTS},
        **{name: _number(getattr(record, name)) for name in DECIMALS},
    }


def _total(report: Report, lines: Sequence[ReportRecord]) -> dict[str, str]:
    cost = report_tables.sum_of_lines(report, lines)
    time = sum_of(lines, "gpu_hours") if lines else None
    if not report.statement.metered:
        reason = "nothing of this time is metered"
    elif any(record.cost is None for record in lines):
        reason = "some of the time has no price"
    else:
        reason = ""
    return {"cost": _number(cost), "gpu_hours": _number(time), "reason": reason}


def _number(value: Decimal | None) -> str:
    return "" if value is None else plain(value)
