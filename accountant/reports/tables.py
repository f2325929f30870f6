"""The rows of a report: what was used, by whom, on what, and what it cost.

Everything is a sum of integers and of exact costs; shares and utilisation are ratios taken at the very end, and
None where there is nothing to divide by. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import TypeAlias, TypeVar, cast

from accountant.costs import Account, Part
from accountant.money import Money, exact_sum, payable
from accountant.statements import StatementLine
from accountant.wire import Accounts

K = TypeVar("K", bound=Hashable)

Entry: TypeAlias = tuple[Account, int, Decimal | None]
"""One account's GPU-µs and its cost (None: unpriced)."""


@dataclass(frozen=True, slots=True)
class Figures:
    """GPU time and exact cost of anything: a team, a job, a kind of GPU.

    cost: of all that is billed and has a price; idle_cost: the allocated-idle part of it. unpriced_us: billed
    time that has no price, and is in no cost."""

    accounts: Accounts
    cost: Decimal
    idle_cost: Decimal
    unpriced_us: int

    @property
    def utilisation(self) -> float | None:
        """Busy share of the allocated time whose use is known."""
        return share(self.accounts.busy, self.accounts.busy + self.accounts.allocated_idle)


@dataclass(frozen=True, slots=True)
class Change:
    """Against the span before; relative None where there was nothing."""

    absolute: Decimal
    relative: float | None


@dataclass(frozen=True, slots=True)
class TeamRow:
    """cost: payable, in minor units; None without a price book. rank: by allocated GPU time, 1 is the most.
    share: of the cluster's allocated GPU time. change: of the cost against the span before, None without one."""

    team: str
    figures: Figures
    cost: Decimal | None
    idle_cost: Decimal
    share: float | None
    rank: int
    change: Change | None


@dataclass(frozen=True, slots=True)
class AccountRow:
    """One account of the capacity; cost payable (0 where never billed)."""

    account: Account
    gpu_us: int
    share: float | None
    cost: Decimal | None


@dataclass(frozen=True, slots=True)
class KindRow:
    """One GPU model in one capacity type; unit_prices: those that applied, oldest first by row id."""

    gpu_model: str
    capacity_type: str
    figures: Figures
    cost: Decimal | None
    unit_prices: tuple[Decimal, ...]


@dataclass(frozen=True, slots=True)
class JobRow:
    """One workload of one team."""

    team: str
    namespace: str
    job: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class DayRow:
    """One local day (clipped to the span): allocated GPU-µs by team, and what the capacity was, without down."""

    day: date
    start_ms: int
    end_ms: int
    allocated_us: Mapping[str, int]
    capacity_us: int


@dataclass(frozen=True, slots=True)
class UnpricedRow:
    """GPUs that no row of the price book matches."""

    gpu_model: str
    pool: str
    region: str
    capacity_type: str
    gpu_us: int


def share(part: int, whole: int) -> float | None:
    """part / whole; None of nothing."""
    return part / whole if whole else None


def change(now: Decimal, before: Decimal) -> Change:
    return Change(exact_sum([now, -before]), float((now - before) / before) if before else None)


def line_entries(lines: Iterable[StatementLine]) -> list[Entry]:
    return [(line.account, line.gpu_us, line.cost) for line in lines]


def part_entries(parts: Mapping[tuple[str, ...], Iterable[Part]]) -> list[tuple[tuple[str, ...], Entry]]:
    """Groups whose last element is the account -> (group without it, entry)."""
    return [
        (group[:-1], (cast(Account, group[-1]), part.gpu_us, part.cost))
        for group, several in parts.items()
        for part in several
    ]


def add_up(entries: Iterable[Entry]) -> Figures:
    """The sum."""
    sums: dict[str, int] = {}
    costs: list[Decimal] = []
    idle: list[Decimal] = []
    unpriced = 0
    for account, gpu_us, cost in entries:
        sums[account] = sums.get(account, 0) + gpu_us
        if cost is None:
            unpriced += gpu_us
            continue
        costs.append(cost)
        if account == "allocated_idle":
            idle.append(cost)
    return Figures(Accounts(**sums), exact_sum(costs), exact_sum(idle), unpriced)


def group_by(entries: Iterable[tuple[K, Entry]]) -> dict[K, Figures]:
    """Figures per group, in order of first appearance."""
    groups: dict[K, list[Entry]] = {}
    for group, entry in entries:
        groups.setdefault(group, []).append(entry)
    return {group: add_up(several) for group, several in groups.items()}


def shown_costs(costs: Mapping[K, Decimal], currency: str | None, total: Decimal | None) -> dict[K, Decimal | None]:
    """Exact costs as the amounts a table shows, adding up to the total it shows."""
    if currency is None or total is None:
        return dict.fromkeys(costs)
    exact = {key: Money(cost, currency) for key, cost in costs.items()}
    return {key: money.amount for key, money in payable(exact, currency, Money(total, currency)).items()}
