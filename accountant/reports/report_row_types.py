"""Sums report rows and compares them with the period before.

Sums are of integers and exact costs; shares and utilisation are computed from the sums, and are None if the divisor is
0."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import TypeVar, cast

from accountant.billing.statements import Entry
from accountant.billing.usage_pricing import Account, PricedTime
from accountant.wire.usage_models import Accounts
from gputally.base.money import exact_sum

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TimeAndCost:
    """GPU time and cost of a team, a job, a kind of GPU or another group.

    cost: the cost of all billed time with a price; rounded to the currency's minor unit for sums of statement lines,
        exact for jobs.
    idle_cost: the part of `cost` for allocated-idle time.
    unpriced_us: billed time without a price.
    idle_unpriced_us: the allocated-idle part of `unpriced_us`."""

    accounts: Accounts
    cost: Decimal
    idle_cost: Decimal
    unpriced_us: int
    idle_unpriced_us: int

    @property
    def utilisation(self) -> float | None:
        """Busy share of the allocated time whose use is known."""
        return share(self.accounts.busy, self.accounts.busy + self.accounts.allocated_idle)


@dataclass(frozen=True, slots=True)
class Difference:
    """The change from the span before. relative: None if the earlier value was 0."""

    absolute: Decimal
    relative: float | None


@dataclass(frozen=True, slots=True)
class TeamRow:
    """One team's row in a report.

    rank: by allocated GPU time, 1 is the most.
    share: the team's part of the cluster's allocated GPU time.
    change: the change of the cost from the span before; None if there is none, or if some time of either span
        has no price."""

    team: str
    figures: TimeAndCost
    share: float | None
    rank: int
    change: Difference | None


@dataclass(frozen=True, slots=True)
class AccountRow:
    """One account of the capacity. unpriced_us: billed time that is not in the cost."""

    account: Account
    gpu_us: int
    share: float | None
    cost: Decimal
    unpriced_us: int = 0


@dataclass(frozen=True, slots=True)
class KindRow:
    """One GPU model of one capacity type. unit_prices: the prices that applied, by row id; empty if nothing was billed,
    or nothing has a price."""

    gpu_model: str
    capacity_type: str
    figures: TimeAndCost
    unit_prices: tuple[Decimal, ...]


@dataclass(frozen=True, slots=True)
class JobRow:
    """One workload of one team in one cluster."""

    team: str
    namespace: str
    job: str
    figures: TimeAndCost
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class UserRow:
    """A user who ran jobs, as named by the jobs; "" for jobs without a user."""

    user: str
    jobs: int
    figures: TimeAndCost


@dataclass(frozen=True, slots=True)
class DayRow:
    """One local day (cut to the span): allocated GPU-µs by team, and the capacity without down time."""

    day: date
    start_ms: int
    end_ms: int
    allocated_us: Mapping[str, int]
    capacity_us: int


@dataclass(frozen=True, slots=True)
class UnpricedRow:
    """GPUs that match no row of the price book."""

    gpu_model: str
    pool: str
    region: str
    capacity_type: str
    gpu_us: int


def share(part: int, whole: int) -> float | None:
    """part / whole; None if whole is 0."""
    return part / whole if whole else None


def change(now: Decimal, before: Decimal) -> Difference:
    return Difference(exact_sum([now, -before]), float((now - before) / before) if before else None)


def part_entries(parts: Mapping[tuple[str, ...], Iterable[PricedTime]]) -> list[tuple[tuple[str, ...], Entry]]:
    """Returns (group, entry) pairs. The last element of each key in `parts` is the account; it moves from the key into
    the entry."""
    return [
        (group[:-1], (cast(Account, group[-1]), part.gpu_us, part.cost))
        for group, several in parts.items()
        for part in several
    ]


def add_up(entries: Iterable[Entry]) -> TimeAndCost:
    """The sum of all entries."""
    sums: dict[str, int] = {}
    costs: list[Decimal] = []
    idle: list[Decimal] = []
    unpriced = idle_unpriced = 0
    for account, gpu_us, cost in entries:
        sums[account] = sums.get(account, 0) + gpu_us
        if cost is None:
            unpriced += gpu_us
            idle_unpriced += gpu_us if account == "allocated_idle" else 0
            continue
        costs.append(cost)
        if account == "allocated_idle":
            idle.append(cost)
    return TimeAndCost(Accounts(**sums), exact_sum(costs), exact_sum(idle), unpriced, idle_unpriced)


def group_by(entries: Iterable[tuple[K, Entry]]) -> dict[K, TimeAndCost]:
    """The sum per group, in order of first appearance."""
    groups: dict[K, list[Entry]] = {}
    for group, entry in entries:
        groups.setdefault(group, []).append(entry)
    return {group: add_up(several) for group, several in groups.items()}
