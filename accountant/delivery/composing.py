"""From an occasion to the letter about it: the figures in words, the report's files, a link to the page."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from urllib.parse import quote

from accountant.books.closing import MIN_COVERAGE
from accountant.delivery.letters import Attachment, Letter
from accountant.delivery.occasions import AnomalyDue, BudgetDue, Occasion, ReportDue
from accountant.money import exact_sum
from accountant.periods import utc
from accountant.reports import formats
from accountant.reports.model import Report
from accountant.reports.names import file_name
from accountant.reports.renderings import RENDERINGS
from accountant.reports.tables import Figures
from accountant.wire import IDLE, UNASSIGNED, BudgetState

Reporting = Callable[[ReportDue], Report]
_TEAMS_NAMED = 5


def compose(occasion: Occasion, at_ms: int, report: Reporting, link: str | None, *, files: bool) -> Letter:
    """report: makes it. link: where the pages are. files: whether the medium takes any.

    Raises accountant.errors.CannotRender where this machine cannot make a form."""
    if isinstance(occasion, ReportDue):
        return _report(occasion, at_ms, report(occasion), link, files=files)
    if isinstance(occasion, BudgetDue):
        return _budget(occasion, at_ms, link)
    return _anomaly(occasion, at_ms, link)


def _report(due: ReportDue, at_ms: int, report: Report, link: str | None, *, files: bool) -> Letter:
    head, currency = report.headline, report.currency
    whose = f"team {due.team}" if due.team is not None else "all teams"
    facts = [
        ("GPU-hours held", formats.hours(head.figures.accounts.allocated)),
        ("Utilisation", formats.percent(head.figures.utilisation)),
        ("Held and left idle, GPU-hours", formats.hours(head.figures.accounts.allocated_idle)),
        ("Jobs", f"{head.jobs:,}"),
        (f"Cost, {currency}" if currency else "Cost", formats.priced(head.cost, head.unpriced_us, currency)),
    ]
    mine = [amount for team, amount in report.due.items() if due.team is not None or team != IDLE]
    owed = exact_sum(mine)
    if currency and owed != head.cost:
        facts.append((f"Due with corrections and credits, {currency}", formats.money(owed, currency)))
    if report.statement.gpu_us and report.statement.coverage < MIN_COVERAGE:
        facts.append(("Metered, of the cluster's capacity", formats.percent(report.statement.coverage)))
    if due.team is None:
        facts += [(formats.name(row.team), _cost(row.figures, currency)) for row in report.teams[:_TEAMS_NAMED]]
    attachments = tuple(
        Attachment(
            file_name(RENDERINGS[form].extension, due.name, due.team),
            RENDERINGS[form].media_type,
            RENDERINGS[form].render(report),
        )
        for form in (due.forms if files else ())
    )
    state = {"closed": "The month is closed.", "published": "The month is closed and published."}.get(
        report.period, "These figures may still change."
    )
    return Letter(due.key, at_ms, f"GPU report {due.name}, {whose}", state, tuple(facts), _link(link, due), attachments)


def _cost(figures: Figures, currency: str | None) -> str:
    amount = formats.priced(figures.cost, figures.unpriced_us, currency)
    return f"{amount} {currency or ''}".strip() if figures.cost or not figures.unpriced_us else amount


def _budget(due: BudgetDue, at_ms: int, link: str | None) -> Letter:
    budget = due.budget
    over = budget.ratio is not None and budget.ratio >= 1
    share = formats.percent(budget.ratio, 0)
    facts = [
        ("Spent", _amount(budget.spent, budget)),
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
    return Letter(
        due.key,
        at_ms,
        f"Budget {budget.name}: {share} of {budget.month} used",
        text,
        tuple(facts),
        _page(link, page or f"month/{budget.month}"),
    )


def _anomaly(due: AnomalyDue, at_ms: int, link: str | None) -> Letter:
    found = due.anomaly
    what = "held" if found.what == "held" else "left idle"
    who = "Pods of no team" if found.team == UNASSIGNED else f"Team {found.team}"
    return Letter(
        due.key,
        at_ms,
        f"{who} {what} {formats.hours(found.value_us)} GPU-hours on {found.day}",
        f"Usually it is {formats.hours(found.usual_us)} a day (the middle of the four weeks before).",
        (
            (f"GPU-hours {what}", formats.hours(found.value_us)),
            ("Usual", formats.hours(found.usual_us)),
        ),
        _page(link, f"team/{quote(found.team, safe='')}?month={found.day:%Y-%m}"),
    )


def _amount(amount: Decimal | float | None, budget: BudgetState) -> str:
    return f"{formats.budgeted(amount, budget.unit)} {budget.unit}"


def _link(link: str | None, due: ReportDue) -> tuple[str, str] | None:
    if due.month is None:
        return _page(link, "" if due.team is None else f"team/{quote(due.team, safe='')}")
    page = f"month/{due.month}" if due.team is None else f"team/{quote(due.team, safe='')}?month={due.month}"
    return _page(link, page)


def _page(link: str | None, page: str) -> tuple[str, str] | None:
    return None if link is None else ("Open in gputally", f"{link.rstrip('/')}/{page}")
