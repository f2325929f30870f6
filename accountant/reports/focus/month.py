"""All charges of a month's report: of its lines, its unused commitments, its corrections and its credits. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from accountant.books.issuer import Issuer
from accountant.errors import CannotRender
from accountant.periods import Month
from accountant.reports.focus.charges import Details, FocusCharge, Kind, beside_key, of_lines, rounding
from accountant.reports.model import Report


def month_of(report: Report) -> Month:
    """The calendar month that the report is, or is the beginning of. Raises CannotRender for any other span."""
    month = Month.of(report.start_ms, report.tz)
    begin, stop = month.span(report.tz)
    if begin != report.start_ms or report.end_ms > stop:
        raise CannotRender("FOCUS files are of a calendar month: a billing period has no parts")
    return month


def details_of(report: Report) -> Details:
    """Raises CannotRender where the report was made without them."""
    if report.details is None:
        raise CannotRender("FOCUS files need the report's charges by day and pod, and it was made without them")
    return report.details


def issuer_of(report: Report) -> Issuer:
    return details_of(report).issuer


def currency_of(report: Report) -> str:
    """Raises CannotRender where there is no price book."""
    if report.currency is None:
        raise CannotRender("FOCUS files are of money, and there is no price book (prices: FILE)")
    return report.currency


def charges(report: Report) -> list[FocusCharge]:
    """They add up, team by team, to what the statement says is due. In the statement's order."""
    month, details = month_of(report), details_of(report)
    found = [*of_lines(month, report.tz, (*report.lines, *report.commitments), details), *_beside(month, report)]
    return [*found, *rounding(month, report.tz, report.due, found)]


def _beside(month: Month, report: Report) -> Iterator[FocusCharge]:
    start_ms, end_ms = month.span(report.tz)
    seen: dict[Hashable, int] = {}

    def key(kind: Kind, *names: str) -> str:
        seen[names] = seen.get(names, 0) + 1
        return beside_key(month, kind, seen[names], *names)

    for correction in report.corrections:
        line = correction.line
        then_ms, until_ms = Month.parse(correction.month).span(report.tz)
        names = line.team, line.account, line.detail, line.gpu_model, line.capacity_type, line.price_row or ""
        yield FocusCharge(
            key=key("correction", correction.month, *names),
            kind="correction",
            team=line.team,
            start_ms=then_ms,
            end_ms=until_ms,
            billed=correction.amount,
            line=line,
            about=correction.month,
            reason=correction.reason,
        )
    for adjustment in report.adjustments:
        yield FocusCharge(
            key=key("credit", adjustment.id),
            kind="credit",
            team=adjustment.team,
            start_ms=start_ms,
            end_ms=end_ms,
            billed=adjustment.amount,
            about=adjustment.month,
            reason=adjustment.reason,
        )
