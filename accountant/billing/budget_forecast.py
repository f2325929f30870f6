"""Compares budgets with spend, and forecasts the month-end cost.

A budget belongs to a queue (with its descendants) or to a team. It is in money or GPU-hours, per calendar month. Money
is the cost of held time, before shares of idle capacity. If some of that time has no price, the spend is unknown. Days
before the ledger's first record are left out of a forecast, not counted as days without spend. This module only
computes. The weights that budgets affect are set elsewhere.

`run_rate` takes the days so far as samples of one daily amount. It multiplies their mean by the number of days left and
adds the spend so far. For example, 10 days of about 100 EUR each and 20 days left give 1,000 + 20 · 100 = 3,000 EUR.

The interval covers 80 % if days are independent and alike. After few days it is wide, and with fewer than MIN_DAYS
whole days there is no forecast. After k days with mean m and standard deviation s, the next n days add up to

    m · n ± z · s · sqrt(n + n² / k)

Source: prediction interval of a sum of n further draws, normal approximation. Sums are `math.fsum`, so equal days give
equal forecasts.

A report (`outlook`) shows two forecasts: a straight line (the spend divided by the elapsed part of the month) and the
run rate with its interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, NamedTuple

from accountant.billing.usage_pricing import ALLOCATED, Charge, charges, quantify, total_cost
from accountant.core.periods import Month, days, whole_day, zone
from accountant.ledger.protocols import Questions
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import Budget, Policy, PolicyVersion
from accountant.wire.usage_models import BudgetState, Dimension
from gputally.base.money import exact_sum
from gputally.base.units import MS_PER_DAY

MIN_DAYS = 3
_Z80 = 1.2815515655446004
"""The standard normal distribution exceeds this value with a probability of 10 %."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected total in the unit of the days.

    low, high: bound the middle 80 %, and are never below the spend so far."""

    expected: float
    low: float
    high: float


def of_a_day(amount: float, start_ms: int, end_ms: int) -> float:
    """Return the amount of a local day [start_ms, end_ms), scaled to 24 hours.

    A day on which the clocks change then counts like the others."""
    return amount * (MS_PER_DAY / (end_ms - start_ms))


def run_rate(days: Sequence[float], spent: float, left_days: float) -> Forecast | None:
    """Forecast the total; None with too few days.

    days: amounts of whole days so far (`of_a_day`).
    spent: everything so far, including today.
    left_days: days until the end."""
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
    """Number of days until a limit is reached: expected, and the bounds of the middle 80 %.

    latest: None if the limit may never be reached at these rates."""

    expected: float
    earliest: float
    latest: float | None


def limit_forecast(days: Sequence[float], spent: float, limit: float) -> LimitForecast | None:
    """Return when `limit` is reached at the rate of `days`; None with too few days, or if nothing was spent.

    With r for the rest of the limit, and the other symbols as at the top of this module, the bounds are where those of
    `run_rate` reach the limit. These are the roots in n of

        (m² − z²s²/k) · n² − (2·m·r + z²s²) · n + r²

    If the limit is already reached, the answer is now."""
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
    # 2r²/(b + root) instead of (b − root)/2a avoids cancellation, and a may be 0.
    earliest = 2 * left * left / (linear + root) if left else 0.0
    latest = (linear + root) / (2 * square) if square > 0 else None
    return LimitForecast(expected, min(earliest, expected), None if latest is None else max(latest, expected))


BY: tuple[Dimension, ...] = ("team", "queue", "day")


class Exhaustion(NamedTuple):
    """When a budget is used up within its month; None if not in this month."""

    expected_ms: int | None = None
    earliest_ms: int | None = None
    latest_ms: int | None = None


NEVER: Final = Exhaustion()


def states(
    ledger: Questions, book: PriceBook | None, policy: Policy, month: Month, now_ms: int, timezone: str
) -> list[BudgetState]:
    """Return the state of every budget of the policy, in its order, for the month up to now.

    A money budget in another currency than the price book's has unknown spend."""
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
    """Return the same as `states`, from charges that the caller already has.

    found: the charges of the month up to now_ms, grouped by BY.
    since_ms: the ledger's first record."""
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
    """Return the instant at which the days (amount, start, end) reached the limit if each day's amount is spread
    evenly."""
    left = limit
    for amount, begin, stop in past:
        if 0 < amount >= left:
            return begin + int((stop - begin) * left / amount)
        left -= amount
    return now_ms


def _exhaustion(found: LimitForecast | None, now_ms: int, end_ms: int) -> Exhaustion:
    """Return when a budget that starts again each month is used up."""

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
    """The forecast of a month in progress, as of the end of the report.

    spent: exact.
    days_metered: the days among `days_over` since the ledger's first record.
    forecast: None after too few days."""

    month: str
    spent: Decimal
    days_over: float
    days_metered: float
    days_left: float
    straight_line: float
    forecast: Forecast | None


def month_of(start_ms: int, end_ms: int, timezone: str) -> Month | None:
    """Return the calendar month that begins with the span and contains it; None if there is none."""
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
    """Forecast the month. None if the month is over, or some of the time has no price.

    found: charges by BY.
    since_ms: the ledger's first record."""
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
    """Return the budgets of the span's last policy; for a team, its own and those of its queues."""
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
