"""Compares budgets with spend, and forecasts the month-end cost.

A budget is of a queue (with its descendants) or of a team, in money or GPU-hours, per calendar month. Money is
what held time costs, before shares of idle capacity; time without a price makes it unknown, never smaller. A forecast
looks at the days that the ledger was there for: those before it began are no days on which nothing was spent.
Asks the ledger; decides nothing that moves a weight: who reads it does.

The days that are over are taken as draws of one daily amount. Their mean, times the days that are left, is added
to what is spent; the interval covers 80 % if days are alike and independent, and is wide while days are few. With
less than MIN_DAYS whole days there is no forecast. Sums are taken in a fixed order (math.fsum), so equal days give
equal forecasts. Pure. Source: prediction interval of a sum of n further draws, normal approximation:
mean·n ± z·s·sqrt(n + n²/k) after k days.

Money here is the cost of held time, as budgets count it: before shares of idle capacity. Two forecasts stand side
by side: the straight line (what is spent, divided by the time that is over, times the month) and the run-rate of
whole days with its interval (accountant.billing.budget_forecast). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, NamedTuple

from accountant.billing.costs import ALLOCATED, Charge, charges, quantify, total_cost
from accountant.core.periods import Month, days, whole_day, zone
from accountant.ledger.protocols import Questions
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import Budget, Policy, PolicyVersion
from accountant.wire.usage_models import BudgetState, Dimension
from gputally.base.money import exact_sum
from gputally.base.units import MS_PER_DAY

MIN_DAYS = 3
_Z80 = 1.2815515655446004
"""Upper 10 % of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """In the unit of the days; low and high bound the middle 80 %, and never undo what is spent."""

    expected: float
    low: float
    high: float


def of_a_day(amount: float, start_ms: int, end_ms: int) -> float:
    """What a local day [start_ms, end_ms) came to, as of one of 24 hours: the days that are left are counted in those,
    and one in which the clocks change says no less, or more, of them."""
    return amount * (MS_PER_DAY / (end_ms - start_ms))


def run_rate(days: Sequence[float], spent: float, left_days: float) -> Forecast | None:
    """days: amounts of whole days so far (`of_a_day`); spent: all so far, today's part included; left_days: until the
    end."""
    if len(days) < MIN_DAYS:
        return None
    count = len(days)
    mean = math.fsum(days) / count
    variance = math.fsum((day - mean) ** 2 for day in days) / (count - 1)
    expected = spent + mean * left_days
    margin = _Z80 * math.sqrt(variance * (left_days + left_days * left_days / count))
    return Forecast(expected, max(spent, expected - margin), expected + margin)


@dataclass(frozen=True, slots=True)
class LimitForecast:
    """In how many days from now a limit is reached: expected, and the bounds of the middle 80 %. latest None: it
    may never be, at these rates."""

    expected: float
    earliest: float
    latest: float | None


def limit_forecast(days: Sequence[float], spent: float, limit: float) -> LimitForecast | None:
    """When `limit` is spent, at the rate of `days`; None while days are few, or nothing is spent in them.

    The bounds are where run_rate's own bounds meet the limit: the roots of (m² − z²s²/k)·n² − (2·m·r + z²s²)·n + r²
    for what is left, r. Of a limit that is reached already: now."""
    if len(days) < MIN_DAYS:
        return None
    left = max(0.0, limit - spent)
    count = len(days)
    mean = math.fsum(days) / count
    if mean <= 0:
        return None
    doubt = _Z80 * _Z80 * math.fsum((day - mean) ** 2 for day in days) / (count - 1)
    square, linear = mean * mean - doubt / count, 2 * mean * left + doubt
    root = math.sqrt(max(0.0, linear * linear - 4 * square * left * left))
    expected = left / mean
    # 2r²/(b + root), not (b − root)/2a: nothing is lost by subtraction, and a may be 0.
    earliest = 2 * left * left / (linear + root) if left else 0.0
    latest = (linear + root) / (2 * square) if square > 0 else None
    return LimitForecast(expected, min(earliest, expected), None if latest is None else max(latest, expected))


BY: tuple[Dimension, ...] = ("team", "queue", "day")


class Exhaustion(NamedTuple):
    """When a budget is used up, within its month; None: not in it."""

    expected_ms: int | None = None
    earliest_ms: int | None = None
    latest_ms: int | None = None


NEVER: Final = Exhaustion()


def states(
    ledger: Questions, book: PriceBook | None, policy: Policy, month: Month, now_ms: int, timezone: str
) -> list[BudgetState]:
    """Every budget of the policy, in its order, over the month up to now.

    A money budget in another currency than the price book's has no known spend."""
    tz = zone(timezone)
    start, end = month.span(tz)
    now = max(start, min(now_ms, end))
    found = charges(ledger, book, start, now, BY, None, timezone) if policy.budgets and now > start else []
    return of_charges(found, book, policy, month, now, timezone, ledger.extent()[0])


def of_charges(
    found: Iterable[Charge],
    book: PriceBook | None,
    policy: Policy,
    month: Month,
    now_ms: int,
    timezone: str,
    since_ms: int,
) -> list[BudgetState]:
    """The same from the month's charges up to now_ms by BY, for who has them already. since_ms: where the ledger
    begins."""
    start, end = month.span(zone(timezone))
    start = max(start, since_ms)
    held = [charge for charge in found if charge.account in ALLOCATED]
    return [_state(budget, policy, book, held, str(month), start, now_ms, end, timezone) for budget in policy.budgets]


def _state(
    budget: Budget,
    policy: Policy,
    book: PriceBook | None,
    held: Iterable[Charge],
    month: str,
    start_ms: int,
    now_ms: int,
    end_ms: int,
    timezone: str,
) -> BudgetState:
    ours = [charge for charge in held if _concerns(budget, policy, charge)]
    spent = _spent(budget, book, ours)
    by_day: dict[str, Decimal | None] = {}
    for day in sorted({charge.key[2] for charge in ours}):
        by_day[day] = _spent(budget, book, [charge for charge in ours if charge.key[2] == day])
    forecast, exhausted = None, NEVER
    if spent is not None:
        tz = zone(timezone)
        stretches = list(days(start_ms, now_ms, tz))
        past = [(float(by_day.get(day.isoformat()) or 0), begin, stop) for day, begin, stop in stretches]
        whole = [
            of_a_day(amount, begin, stop)
            for (amount, begin, stop), piece in zip(past, stretches, strict=True)
            if whole_day(*piece, tz)
        ]
        forecast = run_rate(whole, float(spent), (end_ms - now_ms) / MS_PER_DAY)
        if spent >= budget.limit:
            exhausted = Exhaustion(*[_used_up(past, float(budget.limit), now_ms)] * 3)
        else:
            exhausted = _exhaustion(limit_forecast(whole, float(spent), float(budget.limit)), now_ms, end_ms)
    ratio = float(spent / budget.limit) if spent is not None else None
    reached = [threshold for threshold in budget.thresholds if ratio is not None and ratio >= threshold]
    return BudgetState(
        name=budget.name,
        queue=budget.queue,
        team=budget.team,
        month=month,
        unit=budget.currency or "GPU-hours",
        limit=budget.limit,
        spent=spent,
        ratio=ratio,
        threshold=max(reached, default=None),
        forecast=forecast.expected if forecast else None,
        forecast_low=forecast.low if forecast else None,
        forecast_high=forecast.high if forecast else None,
        exhausted_ms=exhausted.expected_ms,
        exhausted_earliest_ms=exhausted.earliest_ms,
        exhausted_latest_ms=exhausted.latest_ms,
        as_of_ms=now_ms,
    )


def _used_up(past: Iterable[tuple[float, int, int]], limit: float, now_ms: int) -> int:
    """When the days (amount, start, end) came to the limit, each as if it had been spent evenly."""
    left = limit
    for amount, begin, stop in past:
        if 0 < amount >= left:
            return begin + int((stop - begin) * left / amount)
        left -= amount
    return now_ms


def _exhaustion(found: LimitForecast | None, now_ms: int, end_ms: int) -> Exhaustion:
    """When a budget that begins anew each month is used up."""

    def within(left_days: float | None) -> int | None:
        if left_days is None or left_days * MS_PER_DAY >= end_ms - now_ms:
            return None
        return now_ms + int(left_days * MS_PER_DAY)

    return NEVER if found is None else Exhaustion(within(found.expected), within(found.earliest), within(found.latest))


def _concerns(budget: Budget, policy: Policy, charge: Charge) -> bool:
    if budget.team is not None:
        return charge.key[0] == budget.team
    parents = {queue.name: queue.parent for queue in policy.queues}
    queue: str | None = charge.key[1]
    while queue is not None:
        if queue == budget.queue:
            return True
        queue = parents.get(queue)
    return False


def _spent(budget: Budget, book: PriceBook | None, ours: Iterable[Charge]) -> Decimal | None:
    parts = [part for several in quantify((charge.key[:1], charge) for charge in ours).values() for part in several]
    if budget.currency is None:
        return exact_sum(part.gpu_hours for part in parts)
    if book is None or book.currency != budget.currency:
        return None
    return total_cost(parts)


@dataclass(frozen=True, slots=True)
class Outlook:
    """The forecast of a month that is not over, made at the end of the report. spent: exact. days_metered: of
    days_over, since the ledger began. forecast None: days are few."""

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
    """found: by accountant.billing.budget_forecast.BY. since_ms: where the ledger begins. None where the month is
    over, or some of the time has no price."""
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
