"""Budgets of the policy against what was used this month: spent, forecast, thresholds reached, and when it is used up.

A budget is of a queue (with its descendants) or of a team, in money or GPU-hours, per calendar month. Money is
what held time costs, before shares of idle capacity; time without a price makes it unknown, never smaller. A forecast
looks at the days that the ledger was there for: those before it began are no days on which nothing was spent.
Asks the ledger; decides nothing that moves a weight: who reads it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Final, NamedTuple

from accountant.books.costs import ALLOCATED, Charge, charges, quantify, total_cost
from accountant.books.forecast import Reach, of_a_day, reach, run_rate
from accountant.ledger import Questions
from accountant.money import exact_sum
from accountant.periods import Month, days, whole_day, zone
from accountant.prices.book import PriceBook
from accountant.wire import Budget, BudgetState, Dimension, Policy
from agent.units import MS_PER_DAY

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
            exhausted = _ahead(reach(whole, float(spent), float(budget.limit)), now_ms, end_ms)
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


def _ahead(found: Reach | None, now_ms: int, end_ms: int) -> Exhaustion:
    """Of what begins anew with the next month."""

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
