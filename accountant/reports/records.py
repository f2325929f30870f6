"""A report's money as records: what the files for programs are made of.

One record per statement line, per team's payable amount, per commitment not used, per correction of an earlier
month, per credit or charge, and per team's amount due. `record` tells them apart, so that nobody adds a total to its
parts. Lines carry exact figures: hours with nine decimals, cost = unit price × hours in full; what is unpriced is
None, never 0. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from accountant.books.statements import StatementLine
from accountant.reports.model import Report

Kind = Literal["line", "payable", "commitment", "correction", "adjustment", "due"]


@dataclass(frozen=True, slots=True)
class Record:
    """about: the month of a correction or adjustment, "" for the period's own. unit_price: per GPU-hour.

    cost: of a line and a commitment exact, of everything else in minor units."""

    record: Kind
    team: str
    account: str = ""
    detail: str = ""
    gpu_model: str = ""
    capacity_type: str = ""
    price_row: str = ""
    unit_price: Decimal | None = None
    gpu_hours: Decimal | None = None
    cost: Decimal | None = None
    about: str = ""
    reason: str = ""


def records(report: Report) -> Iterator[Record]:
    """In the order of the fields of `Kind`; lines and teams in the statement's own order."""
    for line in report.lines:
        yield _of_line("line", line, line.cost)
    for team, amount in report.payable.items():
        yield Record("payable", team, cost=amount)
    for line in report.commitments:
        yield _of_line("commitment", line, line.cost)
    for correction in report.corrections:
        yield _of_line("correction", correction.line, correction.amount, correction.month, correction.reason)
    for adjustment in report.adjustments:
        yield Record(
            "adjustment", adjustment.team, cost=adjustment.amount, about=adjustment.month, reason=adjustment.reason
        )
    if report.commitments or report.corrections or report.adjustments:
        for team, amount in report.due.items():
            yield Record("due", team, cost=amount)


def _of_line(kind: Kind, line: StatementLine, cost: Decimal | None, about: str = "", reason: str = "") -> Record:
    return Record(
        kind,
        line.team,
        line.account,
        line.detail,
        line.gpu_model,
        line.capacity_type,
        line.price_row or "",
        line.unit_price,
        line.gpu_hours,
        cost,
        about,
        reason,
    )
