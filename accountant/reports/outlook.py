"""Budgets, and what a running month will come to.

Money here is the cost of held time, as budgets count it: before shares of idle capacity. Two forecasts stand side
by side: the straight line (what is spent, divided by the time that is over, times the month) and the run-rate of
whole days with its interval (accountant.books.forecast). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from accountant.books.budgets import of_charges
from accountant.books.costs import ALLOCATED, Charge, quantify, total_cost
from accountant.books.forecast import Forecast, of_a_day, run_rate
from accountant.periods import Month, days, whole_day, zone
from accountant.prices.book import PriceBook
from accountant.wire import BudgetState, Policy, PolicyVersion
from agent.units import MS_PER_DAY


@dataclass(frozen=True, slots=True)
class Outlook:
    """Of a month that is not over, up to the end of the report. spent: exact. days_metered: of days_over, since the
    ledger began. forecast None: days are few."""

    month: str
    spent: Decimal
    days_over: float
    days_metered: float
    days_left: float
    straight_line: float
    forecast: Forecast | None


def month_of(start_ms: int, end_ms: int, timezone: str) -> Month | None:
    """The calendar month that a span is, or is the beginning of."""
    tz = zone(timezone)
    month = Month.of(start_ms, tz)
    begin, stop = month.span(tz)
    return month if begin == start_ms and end_ms <= stop else None


def outlook(
    found: Iterable[Charge],
    team: str | None,
    month: Month,
    start_ms: int,
    end_ms: int,
    timezone: str,
    since_ms: int,
) -> Outlook | None:
    """found: by accountant.books.budgets.BY. since_ms: where the ledger begins. None where the month is over, or some
    of the time has no price."""
    tz = zone(timezone)
    left_ms = month.span(tz)[1] - end_ms
    held = [charge for charge in found if charge.account in ALLOCATED and team in (None, charge.key[0])]
    parts = {day: several for (day,), several in quantify((charge.key[2:], charge) for charge in held).items()}
    spent = total_cost([part for several in parts.values() for part in several])
    if left_ms <= 0 or spent is None or not parts:
        return None
    whole = [
        of_a_day(float(total_cost(parts.get(day.isoformat(), ())) or 0), begin, stop)
        for day, begin, stop in days(max(start_ms, since_ms), end_ms, tz)
        if whole_day(day, begin, stop, tz)
    ]
    over, left = (end_ms - start_ms) / MS_PER_DAY, left_ms / MS_PER_DAY
    metered = (end_ms - max(start_ms, since_ms)) / MS_PER_DAY
    straight = float(spent) / metered * (metered + left)
    return Outlook(str(month), spent, over, metered, left, straight, run_rate(whole, float(spent), left))


def budgets(
    found: Iterable[Charge],
    book: PriceBook | None,
    policies: Sequence[PolicyVersion],
    team: str | None,
    month: Month,
    end_ms: int,
    timezone: str,
    since_ms: int,
) -> tuple[BudgetState, ...]:
    """Those of the last policy of the span; of a team its own and those of its queues."""
    if not policies or not policies[-1].policy.budgets:
        return ()
    policy = policies[-1].policy
    states = of_charges(found, book, policy, month, end_ms, timezone, since_ms)
    return tuple(state for state in states if team is None or team in (state.team, _team_of(policy, state.queue)))


def _team_of(policy: Policy, name: str | None) -> str | None:
    by_name = {queue.name: queue for queue in policy.queues}
    queue = by_name.get(name or "")
    while queue is not None and not queue.team:
        queue = by_name.get(queue.parent or "")
    return queue.team if queue is not None else None
