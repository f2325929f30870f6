"""Composes the message about a due report or notice. A channel renders it for its medium."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from urllib.parse import quote

from accountant.bookkeeping.month_closing import MIN_COVERAGE
from accountant.channels.protocol import Attachment, Message
from accountant.core.periods import utc
from accountant.exports import rendering_process
from accountant.exports.protocol import exports, file_name
from accountant.notifications.triggers import AnomalyDue, BudgetDue, DueMessage, ReportDue
from accountant.reports import figure_formatting
from accountant.reports.report_breakdowns import TimeAndCost
from accountant.reports.report_builder import Report
from accountant.wire.policy_models import UNASSIGNED
from accountant.wire.usage_cost_and_job_models import BudgetState
from gputally.base.money import exact_sum

Reporting = Callable[[ReportDue], Report]
_TEAMS_NAMED = 5


def compose(due_message: DueMessage, at_ms: int, report: Reporting, link: str | None, *, files: bool) -> Message:
    """Composes the message about a due report or notice.

    at_ms: time of the first attempt.
    report: makes the report of a `ReportDue`.
    link: URL of the pages; None: the message has no link.
    files: whether the medium accepts files.

    Raises accountant.core.errors.CannotRender if a format is not available here."""
    if isinstance(due_message, ReportDue):
        return _report(due_message, at_ms, report(due_message), link, files=files)
    if isinstance(due_message, BudgetDue):
        return _budget(due_message, at_ms, link)
    return _anomaly(due_message, at_ms, link)


def _report(due: ReportDue, at_ms: int, report: Report, link: str | None, *, files: bool) -> Message:
    head, currency = report.headline, report.currency
    whose = f"team {due.team}" if due.team is not None else "all teams"
    recorded = report.statement.metered
    cost = figure_formatting.priced(head.cost, head.unpriced_us, currency)
    figures = {
        "GPU-hours held": figure_formatting.hours(head.figures.accounts.allocated),
        "Utilisation": figure_formatting.percent(head.figures.utilisation),
        "Held and left idle, GPU-hours": figure_formatting.hours(head.figures.accounts.allocated_idle),
        "Jobs": f"{head.jobs:,}",
        f"Cost, {currency}" if currency else "Cost": cost,
    }
    facts = [(label, figure if recorded else figure_formatting.NOTHING) for label, figure in figures.items()]
    owed = exact_sum(report.due.values())
    if currency and owed != head.cost:
        facts.append((f"Due with corrections and credits, {currency}", figure_formatting.money(owed, currency)))
    if report.statement.gpu_us and report.statement.coverage < MIN_COVERAGE:
        facts.append(("Metered share of the cluster's capacity", figure_formatting.percent(report.statement.coverage)))
    if due.team is None:
        facts += [
            (figure_formatting.name(row.team), _cost(row.figures, currency)) for row in report.teams[:_TEAMS_NAMED]
        ]
    attachments = tuple(_attachment(form, report, due) for form in (due.forms if files else ()))
    state = {"closed": "The month is closed.", "published": "The month is closed and published."}.get(
        report.period, "These figures may still change."
    )
    return Message(
        due.key, at_ms, f"GPU report {due.period.name}, {whose}", state, tuple(facts), _link(link, due), attachments
    )


def _attachment(form: str, report: Report, due: ReportDue) -> Attachment:
    body = rendering_process.render(form, report)  # raises what says why a format cannot be used
    export = exports()[form]
    return Attachment(file_name(export.suffix, due.period.name, due.team), export.media_type, body)


def _cost(figures: TimeAndCost, currency: str | None) -> str:
    amount = figure_formatting.priced(figures.cost, figures.unpriced_us, currency)
    return f"{amount} {currency or ''}".strip() if figures.cost or not figures.unpriced_us else amount


def _budget(due: BudgetDue, at_ms: int, link: str | None) -> Message:
    budget = due.budget
    over = budget.ratio is not None and budget.ratio >= 1
    share = figure_formatting.percent(budget.ratio, 0)
    facts = [
        ("Spent", _amount(budget.shown, budget)),
        ("Budget", _amount(budget.limit, budget)),
        ("Share", share),
    ]
    if budget.forecast is not None:
        facts.append(("Expected for the month", _amount(budget.forecast, budget)))
    text = (
        f"The budget {budget.name!r} of {budget.month} is "
        + ("used up." if over else f"used to {share}.")
        + f" As of {utc(budget.as_of_ms)}."
    )
    page = None if budget.team is None else f"team/{quote(budget.team, safe='')}?month={budget.month}"
    return Message(
        due.key,
        at_ms,
        f"Budget {budget.name}: {share} of {budget.month} used",
        text,
        tuple(facts),
        _page(link, page or f"month/{budget.month}"),
    )


def _anomaly(due: AnomalyDue, at_ms: int, link: str | None) -> Message:
    anomaly = due.anomaly
    what = "held" if anomaly.what == "held" else "left idle"
    who = "Pods of no team" if anomaly.team == UNASSIGNED else f"Team {anomaly.team}"
    return Message(
        due.key,
        at_ms,
        f"{who} {what} {figure_formatting.hours(anomaly.value_us)} GPU-hours on {anomaly.day}",
        f"The usual value is {figure_formatting.hours(anomaly.usual_us)} GPU-hours a day, the median of the days with "
        "use in the four weeks before.",
        (
            (f"GPU-hours {what}", figure_formatting.hours(anomaly.value_us)),
            ("Usual", figure_formatting.hours(anomaly.usual_us)),
        ),
        _page(link, f"team/{quote(anomaly.team, safe='')}?month={anomaly.day:%Y-%m}"),
    )


def _amount(amount: Decimal | float | None, budget: BudgetState) -> str:
    return f"{figure_formatting.budgeted(amount, budget.unit)} {budget.unit}"


def _link(link: str | None, due: ReportDue) -> tuple[str, str] | None:
    month = due.period.month
    if due.team is None:
        return _page(link, "" if month is None else f"month/{month}")
    return _page(link, f"team/{quote(due.team, safe='')}" + ("" if month is None else f"?month={month}"))


def _page(link: str | None, page: str) -> tuple[str, str] | None:
    return None if link is None else ("Open in gputally", f"{link.rstrip('/')}/{page}")
