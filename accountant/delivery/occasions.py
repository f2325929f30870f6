"""What is due by the orders: reports of months and weeks that ended, budgets that reached a threshold, odd days. Pure.

Every occasion has a key that is the same whenever it is asked for: it is by the key that nothing is sent twice. What
ended long ago is nobody's surprise any more, so a new order does not send the past.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeAlias
from zoneinfo import ZoneInfo

from accountant.books.closing import ClosedMonth
from accountant.delivery.anomalies import Anomaly
from accountant.delivery.orders import Orders, ReportOrder
from accountant.money import plain
from accountant.periods import Month, local_date, midnight_ms
from accountant.reports.renderings import Form
from accountant.wire import BudgetState
from agent.units import MS_PER_DAY, MS_PER_HOUR

NEWS_MS: Final = 31 * MS_PER_DAY
"""How long after it was closed, or ended, a month's report is still sent."""
SETTLED_MS: Final = 6 * MS_PER_HOUR
"""How long after its end a week or a day waits for late records."""


@dataclass(frozen=True, slots=True)
class ReportDue:
    """name: of the span, as `2026-10` or `2026-W43`. edition: of a closed month; closed anew, it is sent anew."""

    destination: str
    name: str
    start_ms: int
    end_ms: int
    month: Month | None
    team: str | None
    forms: tuple[Form, ...]
    edition: str = ""

    @property
    def key(self) -> str:
        team = "*" if self.team is None else self.team
        return "/".join(("report", self.name, "+".join(self.forms), self.destination, self.edition, team))


@dataclass(frozen=True, slots=True)
class BudgetDue:
    destination: str
    budget: BudgetState

    @property
    def key(self) -> str:
        # A budget that was raised reaches its thresholds anew.
        limit = plain(self.budget.limit.normalize())
        what = self.budget.month, f"{self.budget.threshold}", limit, self.destination, self.budget.name
        return "/".join(("budget", *what))


@dataclass(frozen=True, slots=True)
class AnomalyDue:
    destination: str
    anomaly: Anomaly

    @property
    def key(self) -> str:
        found = self.anomaly
        return "/".join(("anomaly", found.day.isoformat(), found.what, self.destination, found.team))


Occasion: TypeAlias = ReportDue | BudgetDue | AnomalyDue


@dataclass(frozen=True, slots=True)
class Ended:
    """A span whose report is due. edition: see ReportDue."""

    name: str
    start_ms: int
    end_ms: int
    month: Month | None = None
    edition: str = ""


def reports(
    orders: Orders,
    closed: Sequence[ClosedMonth],
    now_ms: int,
    tz: ZoneInfo,
    grace_ms: int,
    teams: Callable[[int, int], Collection[str]],
) -> list[ReportDue]:
    """In the order of the file. closed: months, oldest first. teams: those that had GPU time in a span."""
    found: list[ReportDue] = []
    for order in orders.reports:
        for ended in _ended(order, closed, now_ms, tz, grace_ms):
            named = sorted(teams(ended.start_ms, ended.end_ms)) if order.each_team else [order.team]
            found += [
                ReportDue(
                    destination, ended.name, ended.start_ms, ended.end_ms, ended.month, team, order.forms, ended.edition
                )
                for destination in order.to
                for team in named
            ]
    return found


def budgets(orders: Orders, states: Iterable[BudgetState]) -> list[BudgetDue]:
    """The highest threshold that each budget has reached."""
    reached = [state for state in states if state.threshold is not None]
    return [
        BudgetDue(destination, state)
        for order in orders.notices
        if "budgets" in order.about
        for state in reached
        if order.teams is None or state.team in order.teams
        for destination in order.to
    ]


def anomalies(orders: Orders, found: Iterable[Anomaly]) -> list[AnomalyDue]:
    listed = list(found)
    return [
        AnomalyDue(destination, one)
        for order in orders.notices
        if "anomalies" in order.about
        for one in listed
        if order.teams is None or one.team in order.teams
        for destination in order.to
    ]


def _ended(
    order: ReportOrder, closed: Sequence[ClosedMonth], now_ms: int, tz: ZoneInfo, grace_ms: int
) -> Iterable[Ended]:
    if order.of == "week":
        today = local_date(now_ms - SETTLED_MS, tz)
        monday = today - timedelta(days=today.weekday())
        first = monday - timedelta(days=7)
        year, week, _ = first.isocalendar()
        yield Ended(f"{year}-W{week:02}", midnight_ms(first, tz), midnight_ms(monday, tz))
    elif order.when == "closed":
        for one in closed:
            if now_ms - one.at_ms < NEWS_MS:
                month = Month.parse(one.month)
                yield Ended(one.month, *month.span(tz), month, one.hash[:12])
    else:
        month = Month.of(now_ms - grace_ms, tz).previous
        start, end = month.span(tz)
        if now_ms - grace_ms - end < NEWS_MS:
            yield Ended(str(month), start, end, month)
