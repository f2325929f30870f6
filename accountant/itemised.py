"""What a figure of a statement is made of: its lines, cut by job, pod, node or day, to the last digit.

Invariants:
- The items of a line add up to it exactly: GPU-µs, hours with nine decimals, cost, and payable minor units.
- A figure is a choice of statement lines, so every figure of a page of sums can be itemised, whichever it is.
- Where the records have moved since a month was closed, what they differ by is an item of its own (`LATE`).

Pure: who asks the ledger is accountant.web.lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Literal, TypeAlias

from accountant.costs import ALLOCATED, Account, Charge, Detail
from accountant.money import HOUR_PLACES, Money, exact_product, exact_sum, gpu_hours, payable
from accountant.reports.tables import payable_lines
from accountant.statements import Statement, StatementLine
from accountant.wire import IDLE, Dimension
from agent.units import MS_PER_SECOND, US_PER_MS, apportion

Cut = Literal["team", "queue", "job", "pod", "user", "node", "gpu", "day"]
DIMENSIONS: Final[Mapping[Cut, tuple[Dimension, ...]]] = {
    "team": ("team",),
    "queue": ("team", "queue"),
    "job": ("team", "namespace", "job", "cluster"),
    "pod": ("team", "namespace", "pod", "job", "cluster"),
    "user": ("team", "user"),
    "node": ("team", "node", "cluster"),
    "gpu": ("team", "node", "gpu", "cluster"),
    "day": ("team", "day"),
}
"""What the bills are asked by, the payer first."""
LATE: Final[tuple[str, ...]] = ()
"""The key of what came, or went, after the month was closed."""

LineKey: TypeAlias = tuple[str, Account, Detail, str, str, str | None]
"""What tells one line of a statement from another."""
Groups: TypeAlias = Mapping[LineKey, Mapping[tuple[str, ...], int]]
"""GPU-µs by line and key of a cut, keys ascending."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A choice of statement lines. team, gpu_model, capacity_type, price_row None: of all. accounts: none: of all.
    payers: leave out what nobody pays for."""

    team: str | None = None
    accounts: frozenset[Account] = frozenset()
    gpu_model: str | None = None
    capacity_type: str | None = None
    price_row: str | None = None
    payers: bool = False

    def takes(self, line: StatementLine) -> bool:
        return (
            self.team in (None, line.team)
            and (not self.accounts or line.account in self.accounts)
            and self.gpu_model in (None, line.gpu_model)
            and self.capacity_type in (None, line.capacity_type)
            and self.price_row in (None, line.price_row)
            and not (self.payers and line.team == IDLE)
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A line, or an item of one. cost: exact, None: unpriced. amount: payable, in minor units; None without a price
    or a price book."""

    gpu_us: int
    gpu_hours: Decimal
    cost: Decimal | None
    amount: Decimal | None


@dataclass(frozen=True, slots=True)
class Item:
    """What one job (pod, node, day, …) has of one line. key: as DIMENSIONS of the cut, or LATE."""

    key: tuple[str, ...]
    line: StatementLine
    part: Part


@dataclass(frozen=True, slots=True)
class Row:
    """All items of one key. mean of nothing: amount None only where all of it is unpriced."""

    key: tuple[str, ...]
    part: Part
    unpriced_us: int


@dataclass(frozen=True, slots=True)
class Itemised:
    """lines: of the figure, as the statement orders them. items: by line, then key. whole: their sum."""

    lines: tuple[tuple[StatementLine, Part], ...]
    items: tuple[Item, ...]
    whole: Part

    def rows(self) -> list[Row]:
        """The items by key, the dearest first, then the longest, then by name."""
        found: dict[tuple[str, ...], list[Item]] = {}
        for item in self.items:
            found.setdefault(item.key, []).append(item)
        rows = [
            Row(
                key,
                total(item.part for item in several),
                sum(item.part.gpu_us for item in several if item.part.cost is None),
            )
            for key, several in found.items()
        ]
        return sorted(rows, key=lambda row: (-(row.part.amount or 0), -row.part.gpu_us, row.key))


def accounts_named(name: str) -> frozenset[Account]:
    """`allocated` stands for its three accounts, "" for all."""
    if name == "allocated":
        return ALLOCATED
    return frozenset((name,)) if name else frozenset()  # type: ignore[arg-type]  # checked where it is read


def grouped(charges: Iterable[Charge]) -> Groups:
    """charges: the bills of a statement's span, by the dimensions of a cut."""
    groups: dict[LineKey, dict[tuple[str, ...], int]] = {}
    for charge in charges:
        of_line = groups.setdefault(_charged(charge), {})
        of_line[charge.key] = of_line.get(charge.key, 0) + charge.gpu_us
    return {line: dict(sorted(of_line.items())) for line, of_line in groups.items()}


def itemise(stated: Statement, figure: Figure, groups: Groups) -> Itemised:
    """groups: the bills of the statement's span. What a figure does not sum up is not looked at."""
    lines: list[tuple[StatementLine, Part]] = []
    items: list[Item] = []
    for line, (_, _, amount) in payable_lines(stated):
        if not figure.takes(line):
            continue
        whole = Part(line.gpu_us, line.gpu_hours, line.cost, amount if stated.currency is not None else None)
        lines.append((line, whole))
        items += _items(line, whole, groups.get(_stated(line), {}), stated.currency)
    return Itemised(tuple(lines), tuple(items), total(part for _, part in lines))


def total(parts: Iterable[Part]) -> Part:
    """The sum; what has no price is in the time alone."""
    found = list(parts)
    costs = [part.cost for part in found if part.cost is not None]
    amounts = [part.amount for part in found if part.amount is not None]
    return Part(
        sum(part.gpu_us for part in found),
        exact_sum(part.gpu_hours for part in found),
        exact_sum(costs) if costs or not found else None,
        exact_sum(amounts) if amounts else None,
    )


def _items(line: StatementLine, whole: Part, groups: Mapping[tuple[str, ...], int], currency: str | None) -> list[Item]:
    """The line cut by key; hours by largest remainder, ties to the earlier key."""
    keys, time = [*groups], [*groups.values()]
    if keys and line.detail == "spread" and abs(sum(time) - line.gpu_us) < MS_PER_SECOND * US_PER_MS:
        # Each key's idle time is divided over the teams by itself: a microsecond here and there goes to another team.
        time = apportion(line.gpu_us, time)
    if keys and sum(time) == line.gpu_us:
        nano = apportion(int(line.gpu_hours.scaleb(HOUR_PLACES)), time)
        hours = [Decimal(each).scaleb(-HOUR_PLACES) for each in nano]
    else:  # a closed month whose records have moved since
        hours = [gpu_hours(each) for each in time]
        keys.append(LATE)
        time.append(line.gpu_us - sum(time))
        hours.append(exact_sum([line.gpu_hours, *(-each for each in hours)]))
    costs = [_cost(line, each) for each in hours]
    amounts: Sequence[Decimal | None] = [None] * len(keys)
    if currency is not None and whole.amount is not None:
        exact = {at: Money(cost or Decimal(0), currency) for at, cost in enumerate(costs)}
        amounts = [money.amount for money in payable(exact, currency, Money(whole.amount, currency)).values()]
    return [
        Item(key, line, Part(gpu_us, gpu_h, cost, amount))
        for key, gpu_us, gpu_h, cost, amount in zip(keys, time, hours, costs, amounts, strict=True)
    ]


def _cost(line: StatementLine, hours: Decimal) -> Decimal | None:
    if line.cost is None:
        return None
    return Decimal(0) if line.unit_price is None else exact_product(line.unit_price, hours)


def _charged(charge: Charge) -> LineKey:
    row = charge.row.id if charge.billed and charge.row else None
    return charge.key[0], charge.account, charge.detail, charge.place.gpu_model, charge.place.capacity_type, row


def _stated(line: StatementLine) -> LineKey:
    return line.team, line.account, line.detail, line.gpu_model, line.capacity_type, line.price_row
