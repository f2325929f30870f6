"""Composes a message and renders it as a text file, and for mail, Slack and Microsoft Teams.

Names in a message come from users of the cluster, so no medium interprets them: the HTML of mails is escaped, Slack's
blocks are `plain_text`, and Teams' cards use text runs without Markdown. A subject is one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from html import escape
from typing import Any
from urllib.parse import quote

from accountant.bookkeeping.month_closing import MIN_COVERAGE
from accountant.core.periods import utc
from accountant.notifications.triggers import AnomalyDue, BudgetDue, DueMessage, ReportDue
from accountant.reports import figure_formatting, rendering_process
from accountant.reports.output_formats import RENDERINGS, file_name
from accountant.reports.report_breakdowns import TimeAndCost
from accountant.reports.report_builder import Report
from accountant.wire.policy_models import IDLE, UNASSIGNED
from accountant.wire.usage_cost_and_job_models import BudgetState
from gputally.base.money import exact_sum
from gputally.base.untrusted_text import escaped

_HEADER = 150
_FIELD = 2_000
_FIELDS = 10
"""Limits of Slack's header block, of a field's text and of a section's fields (Slack's Block Kit reference)."""
_STYLE = "font:15px/1.5 system-ui,sans-serif;color:#1b1f24"


@dataclass(frozen=True, slots=True)
class Attachment:
    name: str
    media_type: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Message:
    """A message in a form that each medium can render.

    key: identifies content and destination, the same for every attempt.
    at_ms: time of the first attempt.
    facts: labels and values, in order.
    link: a label and a URL."""

    key: str
    at_ms: int
    subject: str
    text: str
    facts: tuple[tuple[str, str], ...] = ()
    link: tuple[str, str] | None = None
    attachments: tuple[Attachment, ...] = ()

    @property
    def title(self) -> str:
        """The subject on one line, without control characters."""
        return one_line(self.subject)


def one_line(text: str) -> str:
    """The text on one line, without control characters."""
    return escaped(" ".join(text.split()))


def plain(message: Message) -> str:
    """The message as a text file, or as the text part of a mail."""
    width = max((len(label) for label, _ in message.facts), default=0)
    facts = [f"{label:<{width}}  {one_line(value)}" for label, value in message.facts]
    link = [f"{message.link[0]}: {message.link[1]}"] if message.link is not None else []
    parts = ("\n".join(part) for part in ([message.title], [message.text], facts, link) if part)
    return "\n\n".join(parts) + "\n"


def html(message: Message) -> str:
    """The HTML part of a mail."""
    rows = "".join(
        f'<tr><td style="padding:2px 16px 2px 0;color:#57606a">{escape(label)}</td>'
        f'<td style="padding:2px 0;text-align:right">{escape(one_line(value))}</td></tr>'
        for label, value in message.facts
    )
    link = (
        f'<p><a href="{escape(message.link[1], quote=True)}">{escape(message.link[0])}</a></p>' if message.link else ""
    )
    return (
        f'<!doctype html><html lang="en"><body style="{_STYLE}"><h1 style="font-size:18px">{escape(message.title)}</h1>'
        f"<p>{escape(message.text)}</p><table>{rows}</table>{link}</body></html>\n"
    )


def slack(message: Message) -> dict[str, Any]:
    """The body for an incoming webhook of Slack. Source: Slack's Block Kit reference."""
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": _slack_text(message.title, _HEADER)},
        {"type": "section", "text": _slack_text(message.text, _FIELD)},
    ]
    fields = [_slack_text(f"{label}\n{one_line(value)}", _FIELD) for label, value in message.facts]
    blocks += [
        {"type": "section", "fields": fields[first : first + _FIELDS]} for first in range(0, len(fields), _FIELDS)
    ]
    if message.link is not None:
        button = {"type": "button", "text": _slack_text(message.link[0], 75), "url": message.link[1]}
        blocks.append({"type": "actions", "elements": [button]})
    # `text` is shown in notifications; it is the only part in which Slack interprets markup.
    return {"text": _shortened(escape(message.title, quote=False), _FIELD), "blocks": blocks}


def msteams(message: Message) -> dict[str, Any]:
    """The body for an incoming webhook of Workflows in Teams: one Adaptive Card. Source: adaptivecards.io, 1.4."""
    body: list[dict[str, Any]] = [_run(message.title, size="large", weight="bolder"), _run(message.text)]
    for label, value in message.facts:
        columns = [
            {"type": "Column", "width": 2, "items": [_run(label, subtle=True)]},
            {"type": "Column", "width": 3, "items": [_run(one_line(value))]},
        ]
        body.append({"type": "ColumnSet", "spacing": "small", "columns": columns})
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": body,
    }
    if message.link is not None:
        card["actions"] = [{"type": "Action.OpenUrl", "title": message.link[0], "url": message.link[1]}]
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return {"type": "message", "attachments": [attachment]}


def _slack_text(text: str, most: int) -> dict[str, Any]:
    return {"type": "plain_text", "text": _shortened(text, most) or " ", "emoji": False}


def _run(text: str, *, size: str = "default", weight: str = "default", subtle: bool = False) -> dict[str, Any]:
    run = {"type": "TextRun", "text": text, "size": size, "weight": weight, "isSubtle": subtle}
    return {"type": "RichTextBlock", "inlines": [run]}


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


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
    amounts = [amount for team, amount in report.due.items() if due.team is not None or team != IDLE]
    owed = exact_sum(amounts)
    if currency and owed != head.cost:
        facts.append((f"Due with corrections and credits, {currency}", figure_formatting.money(owed, currency)))
    if report.statement.gpu_us and report.statement.coverage < MIN_COVERAGE:
        facts.append(("Metered share of the cluster's capacity", figure_formatting.percent(report.statement.coverage)))
    if due.team is None:
        facts += [
            (figure_formatting.name(row.team), _cost(row.figures, currency)) for row in report.teams[:_TEAMS_NAMED]
        ]
    attachments = tuple(
        Attachment(
            file_name(RENDERINGS[form].extension, due.period.name, due.team),
            RENDERINGS[form].media_type,
            rendering_process.render(form, report),
        )
        for form in (due.forms if files else ())
    )
    state = {"closed": "The month is closed.", "published": "The month is closed and published."}.get(
        report.period, "These figures may still change."
    )
    return Message(
        due.key, at_ms, f"GPU report {due.period.name}, {whose}", state, tuple(facts), _link(link, due), attachments
    )


def _cost(figures: TimeAndCost, currency: str | None) -> str:
    amount = figure_formatting.priced(figures.cost, figures.unpriced_us, currency)
    return f"{amount} {currency or ''}".strip() if figures.cost or not figures.unpriced_us else amount


def _budget(due: BudgetDue, at_ms: int, link: str | None) -> Message:
    budget = due.budget
    over = budget.ratio is not None and budget.ratio >= 1
    share = figure_formatting.percent(budget.ratio, 0)
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
