"""What a month charges each team, and what a credit or charge that is not booked would change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from accountant.api.dependencies import Deps
from accountant.billing.statements import Adjustment
from accountant.bookkeeping.corrections_and_adjustments import NewAdjustment
from accountant.core.periods import Month
from accountant.reports.figure_formatting import records_begin
from accountant.wire.policy_models import UNASSIGNED
from gputally.base.money import exact_sum


def month_unknown(deps: Deps, month: Month) -> str:
    """Of which part of a month nothing is known, because the records begin inside it; "" for none."""
    return records_begin(*month.span(deps.settings.zone), deps.ledger.status().extent[0], deps.settings.zone)


@dataclass(frozen=True, slots=True)
class MonthsDue:
    """What a month's statement charges.

    due: by team; an amount of 0 only where all is metered and has a price.
    total: their sum, None if it is not known.
    unbilled: the amount of what no team is billed for; None if it is not known, or there is none.
    unknown: of which part of the month nothing is known, because records begin later; "" for none.
    unpriced: by team its billed time without a price, in GPU-microseconds, which is in no amount.
    recorded: whether any of its time is metered.
    coverage: the metered part of its capacity.
    unassigned_us: billed time that no team has, because nothing names one, in GPU-microseconds."""

    currency: str | None
    due: tuple[tuple[str, Decimal], ...]
    total: Decimal | None
    unpriced: Mapping[str, int]
    recorded: bool
    unbilled: Decimal | None
    unknown: str
    coverage: float = 0.0
    unassigned_us: int = 0


def months_due(deps: Deps, month: Month) -> MonthsDue:
    """What a month charges, from its stored statement or, if it is open, from the present records."""
    stated = deps.books.month(month)
    unpriced = Counter[str]()
    for line in stated.lines:
        if line.cost is None:
            unpriced[line.team] += line.gpu_us
    due = [
        (team, amount) for team, amount in stated.due.items() if amount or (stated.metered and not unpriced.get(team))
    ]
    due.sort(key=lambda each: (-each[1], each[0]))
    together = exact_sum(amount for _, amount in due)
    total = together if due or (stated.metered and not unpriced) else None
    return MonthsDue(
        stated.currency, tuple(due), total, dict(unpriced), stated.metered, stated.not_billed or None,
        month_unknown(deps, month), stated.coverage,
        sum(line.gpu_us for line in stated.lines if line.team == UNASSIGNED),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShownAdjustment:
    """A credit or charge that is not booked. before, after: what the month in which it would be booked charges the
    team; None if that is not known."""

    adjustment: Adjustment
    before: Decimal | None
    after: Decimal | None


def shown_adjustment(deps: Deps, who: str, new: NewAdjustment, due_of: Callable[[Month], MonthsDue]) -> ShownAdjustment:
    """What an adjustment would change. Raises CannotClose as booking it does."""
    adjustment = deps.books.credits.adjustment(new, who)
    found = due_of(Month.parse(adjustment.booked_in))
    before = dict(found.due).get(new.team)
    if before is None and found.recorded and not found.unpriced.get(new.team):
        before = Decimal(0)
    after = None if before is None else exact_sum([before, adjustment.amount])
    return ShownAdjustment(adjustment, before, after)
