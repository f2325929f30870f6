"""Compares budgets with spend, and forecasts the month-end cost and when a budget will be used up.

A budget belongs to a queue (with its descendants) or to a team. It is in money or GPU-hours, per calendar month. Money
is the cost of held time, before shares of idle capacity. If some of that time has no price, the spend is unknown. Days
before the ledger's first record are left out of a forecast, not counted as days without spend.

`run_rate` treats the days so far as samples of one daily amount. It multiplies their mean by the number of days left
and adds the spend so far. For example, 10 days of about 100 EUR each and 20 days left give 1,000 + 20 · 100 = 3,000
EUR.

The interval of the forecast contains the total with a probability of 80 % if the days' amounts are independent and have
one distribution. After few days it is wide, and with fewer than MIN_DAYS whole days there is no forecast. After k days
with mean m and standard deviation s, the next n days add up to

    m · n ± z · s · sqrt(n + n² / k)

Source: prediction interval of a sum of n further draws, normal approximation. Sums are `math.fsum`, so equal days give
equal forecasts.

A report (`outlook`) shows two forecasts: a straight line (the spend so far, continued at its mean rate since the start
of the month or of the ledger's records) and the run rate with its interval. Forecasts of money begin with the amount
that pages show as spent, so that the two agree once the month is over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, NamedTuple

from accountant.billing.charge import ALLOCATED, Charge, quantify, quantify_together, total_cost
from accountant.billing.displayed_amounts import Part, parts
from accountant.billing.usage_pricing import charge_table
from accountant.core.periods import Month, day_span, days, zone
from accountant.ledger.protocols import Moment
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import Budget, Policy, PolicyVersion
from accountant.wire.usage_cost_and_job_models import BudgetState, Dimension
from gputally.base.gpu_model_names import most_precise
from gputally.base.money import exact_sum
from gputally.base.units import MS_PER_DAY

MIN_DAYS = 3
_Z80 = 1.2815515655446004
"""The standard normal distribution exceeds this value with a probability of 10 %."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected total of a month, in the unit of the daily amounts.

    low, high: the ends of the 80 % interval; neither is below the spend so far."""

    expected: float
    low: float
    high: float


def _per_24_hours(amount: float, start_ms: int, end_ms: int) -> float:
    """Scales the amount of a local day [start_ms, end_ms) to 24 hours, because a day on which the clocks change has 23
    or 25."""
    return amount * (MS_PER_DAY / (end_ms - start_ms))


def run_rate(days: Sequence[float], spent: float, left_days: float) -> Forecast | None:
    """Forecasts the total of the month. None with fewer than MIN_DAYS days.

    days: amounts of the whole days so far, each scaled to 24 hours.
    spent: the amount so far, including today.
    left_days: days until the end of the month."""
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
    """Number of days until a limit is reached: the expected number, and the ends of its 80 % interval.

    latest: None if the interval has no upper end."""

    expected: float
    earliest: float
    latest: float | None


def limit_forecast(days: Sequence[float], spent: float, limit: float) -> LimitForecast | None:
    """Forecasts in how many days `limit` is reached at the rate of `days`; 0 if it is reached already. None with fewer
    than MIN_DAYS days, or if the days have no spend.

    The ends of the interval are the days on which the ends of `run_rate`'s interval reach the limit. With r for the
    rest of the limit, and the other symbols as at the top of this module, they are the roots in n of

        (m² − z²s²/k) · n² − (2·m·r + z²s²) · n + r²"""
    if len(days) < MIN_DAYS:
        return None
    left = max(0.0, limit - spent)
    count = len(days)
    mean = math.fsum(days) / count
    if mean <= 0:
        return None
    variance = _Z80 * _Z80 * math.fsum((day - mean) ** 2 for day in days) / (count - 1)
    square, linear = mean * mean - variance / count, 2 * mean * left + variance
    root = math.sqrt(max(0.0, linear * linear - 4 * square * left * left))
    expected = left / mean
    # 2r²/(b + root) instead of (b − root)/2a avoids cancellation and division by a, which is 0 for some inputs.
    earliest = 2 * left * left / (linear + root) if left else 0.0
    latest = (linear + root) / (2 * square) if square > 0 else None
    return LimitForecast(expected, min(earliest, expected), None if latest is None else max(latest, expected))


BY: tuple[Dimension, ...] = ("team", "queue", "day")
"""The dimensions by which forecasts need the charges of a month."""


def grouping(policies: Iterable[Policy]) -> tuple[Dimension, ...]:
    """Return the dimensions by which budgets of these policies need charges: BY, and the GPU model if a budget has
    limits by model."""
    by_model = any(budget.gpu_models for policy in policies for budget in policy.budgets)
    return (*BY, "gpu_model") if by_model else BY


class Exhaustion(NamedTuple):
    """When a budget is used up within its month; None if not in this month."""

    expected_ms: int | None = None
    earliest_ms: int | None = None
    latest_ms: int | None = None


NEVER: Final = Exhaustion()


def states(
    ledger: Moment, book: PriceBook | None, policy: Policy, month: Month, now_ms: int, timezone: str
) -> list[BudgetState]:
    """The state of every budget of the policy, in the policy's order and each followed by those of its limits by GPU
    model, for the month up to now.

    A budget has unknown spend if nothing of the month is metered, or if it is in another currency than the price
    book."""
    start, end = month.span(zone(timezone))
    now = max(start, min(now_ms, end))
    by = grouping([policy])
    spend = (
        charge_table(ledger, book, start, now, by, None, timezone).charges() if policy.budgets and now > start else []
    )
    return of_charges(spend, book, policy, month, now, timezone, ledger.status().extent[0])


def of_charges(
    spend: Iterable[Charge],
    book: PriceBook | None,
    policy: Policy,
    month: Month,
    now_ms: int,
    timezone: str,
    since_ms: int,
) -> list[BudgetState]:
    """Like `states`, but with given charges.

    spend: the charges of the month up to now_ms, by the dimensions that `grouping` returns for the policy.
    since_ms: start of the ledger's first record."""
    start, end = month.span(zone(timezone))
    spend = list(spend)
    amounts = _amounts(spend, book) if book is not None and any(one.currency for one in policy.budgets) else ()
    metered = now_ms <= start or any(charge.account not in ("unmetered", "down") for charge in spend)
    start = max(start, since_ms)
    held = [charge for charge in spend if charge.account in ALLOCATED] if metered else None
    return [
        _state(
            part,
            model,
            policy,
            book,
            _of_model(budget, model, held),
            str(month),
            start,
            now_ms,
            end,
            timezone,
            [one for one in amounts if _is_of_model(budget, model, one.gpu_model)],
        )
        for budget in policy.budgets
        for model, part in budget.parts()
    ]


def _state(
    budget: Budget,
    gpu_model: str,
    policy: Policy,
    book: PriceBook | None,
    held: Sequence[Charge] | None,
    month: str,
    start_ms: int,
    now_ms: int,
    end_ms: int,
    timezone: str,
    amounts: Iterable[Part],
) -> BudgetState:
    own = [charge for charge in held or () if _concerns(budget, policy, *charge.key[:2])]
    spent = None if held is None else _spent(budget, book, own)
    shown = exact_sum(one.amount for one in amounts if _concerns(budget, policy, one.team, one.key[0]))
    spent_amount = None if spent is None or budget.currency is None else shown
    forecast, exhausted = None, NEVER
    if spent is not None:
        tz = zone(timezone)
        past: list[tuple[float, int, int]] = []
        whole_days: list[float] = []
        for day, begin, stop in days(start_ms, now_ms, tz):
            of_day = [charge for charge in own if charge.key[2] == day.isoformat()]
            amount = float(_spent(budget, book, of_day) or 0)
            past.append((amount, begin, stop))
            if (begin, stop) == day_span(day, tz):
                whole_days.append(_per_24_hours(amount, begin, stop))
        so_far = spent if spent_amount is None else spent_amount
        if now_ms < end_ms:
            forecast = run_rate(whole_days, float(so_far), (end_ms - now_ms) / MS_PER_DAY)
        if spent >= budget.limit:
            exhausted = Exhaustion(*[_used_up(past, float(budget.limit), now_ms)] * 3)
        else:
            exhausted = _exhaustion(limit_forecast(whole_days, float(spent), float(budget.limit)), now_ms, end_ms)
    ratio = float(spent / budget.limit) if spent is not None else None
    reached = [threshold for threshold in budget.thresholds if ratio is not None and ratio >= threshold]
    return BudgetState(
        name=budget.name,
        queue=budget.queue,
        team=budget.team,
        gpu_model=gpu_model,
        month=month,
        unit=budget.currency or "GPU-hours",
        limit=budget.limit,
        spent=spent,
        spent_amount=spent_amount,
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
    """The instant at which the days (amount, start, end) reached the limit, if each day's amount is spread evenly over
    the day."""
    left = limit
    for amount, begin, stop in past:
        if 0 < amount >= left:
            return begin + int((stop - begin) * left / amount)
        left -= amount
    return now_ms


def _exhaustion(forecast: LimitForecast | None, now_ms: int, end_ms: int) -> Exhaustion:
    """The forecast as instants; those at or after the end of the month are None, because the budget then starts
    again."""

    def instant(left_days: float | None) -> int | None:
        if left_days is None or left_days * MS_PER_DAY >= end_ms - now_ms:
            return None
        return now_ms + int(left_days * MS_PER_DAY)

    if forecast is None:
        return NEVER
    return Exhaustion(instant(forecast.expected), instant(forecast.earliest), instant(forecast.latest))


def _amounts(spend: Iterable[Charge], book: PriceBook) -> list[Part]:
    """The amounts of held time by queue, as pages show them. spend: the charges of a span by at least team and
    queue."""
    by_queue = [(charge.key[:2], charge) for charge in spend]
    return [one for one in parts(by_queue, by_queue, 1, book.currency) if one.account in ALLOCATED]


def _concerns(budget: Budget, policy: Policy, team: str, queue: str) -> bool:
    if budget.team is not None:
        return team == budget.team
    return any(each.name == budget.queue for each in policy.lineage(queue))


def _of_model(budget: Budget, gpu_model: str, held: Sequence[Charge] | None) -> Sequence[Charge] | None:
    """Return the charges for which a limit of this model is the most precise of the budget; all of them for ""."""
    if not gpu_model or held is None:
        return held
    return [charge for charge in held if _is_of_model(budget, gpu_model, charge.key[3])]


def _is_of_model(budget: Budget, limit: str, gpu_model: str) -> bool:
    return not limit or most_precise(gpu_model, budget.gpu_models) == limit


def _spent(budget: Budget, book: PriceBook | None, held: Iterable[Charge]) -> Decimal | None:
    parts = quantify_together(held)
    if budget.currency is None:
        return exact_sum(part.gpu_hours for part in parts)
    if book is None or book.currency != budget.currency:
        return None
    return total_cost(parts)


@dataclass(frozen=True, slots=True)
class Outlook:
    """The forecast of a month in progress, as of the end of the report.

    spent: the exact cost so far. amount: what pages show for it.
    days_over: days from the start of the month to the end of the report.
    days_metered: the part of these days after the ledger's first record.
    forecast: None with fewer than MIN_DAYS whole days."""

    month: str
    spent: Decimal
    amount: Decimal
    days_over: float
    days_metered: float
    days_left: float
    straight_line: float
    forecast: Forecast | None


def month_of(start_ms: int, end_ms: int, timezone: str) -> Month | None:
    """The calendar month that begins at the span's start and contains the span; None if there is none."""
    tz = zone(timezone)
    month = Month.of(start_ms, tz)
    begin, stop = month.span(tz)
    return month if begin == start_ms and end_ms <= stop else None


def outlook(
    spend: Iterable[Charge],
    book: PriceBook,
    team: str | None,
    month: Month,
    start_ms: int,
    end_ms: int,
    timezone: str,
    since_ms: int,
) -> Outlook | None:
    """Forecasts the month. None if the month is over, no time was held, or some of the held time has no price.

    spend: the charges of [start_ms, end_ms), grouped by BY, and by more dimensions behind these.
    team: the team whose charges count; None for all teams.
    since_ms: start of the ledger's first record."""
    tz = zone(timezone)
    left_ms = month.span(tz)[1] - end_ms
    spend = list(spend)
    held = [charge for charge in spend if charge.account in ALLOCATED and team in (None, charge.key[0])]
    parts = {day: several for (day,), several in quantify((charge.key[2:3], charge) for charge in held).items()}
    spent = total_cost([part for several in parts.values() for part in several])
    if left_ms <= 0 or spent is None or not parts:
        return None
    whole = [
        _per_24_hours(float(total_cost(parts.get(day.isoformat(), ())) or 0), begin, stop)
        for day, begin, stop in days(max(start_ms, since_ms), end_ms, tz)
        if (begin, stop) == day_span(day, tz)
    ]
    over, left = (end_ms - start_ms) / MS_PER_DAY, left_ms / MS_PER_DAY
    metered = (end_ms - max(start_ms, since_ms)) / MS_PER_DAY
    amount = exact_sum(one.amount for one in _amounts(spend, book) if team in (None, one.team))
    straight = float(amount) / metered * (metered + left)
    return Outlook(str(month), spent, amount, over, metered, left, straight, run_rate(whole, float(amount), left))


def budgets(
    spend: Iterable[Charge],
    book: PriceBook | None,
    policies: Sequence[PolicyVersion],
    team: str | None,
    month: Month,
    end_ms: int,
    timezone: str,
    since_ms: int,
) -> tuple[BudgetState, ...]:
    """The states of the budgets of the last policy. With `team`, only the budgets of this team and of its queues."""
    if not policies or not policies[-1].policy.budgets:
        return ()
    policy = policies[-1].policy
    states = of_charges(spend, book, policy, month, end_ms, timezone, since_ms)
    return tuple(state for state in states if team is None or team in (state.team, policy.team_of(state.queue)))
