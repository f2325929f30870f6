"""Itemises a statement figure by job, pod, node or day, exactly.

Invariants:
- The items of a line add up to it exactly: GPU-µs, hours with nine decimals, cost, and payable minor units.
- Every figure on a statement page is the sum of some statement lines (a LineFilter), so each can be itemised.
- If the records have changed since a month was closed, the difference is an item of its own (`LATE`).
- Time, hours and amounts are integer columns: GPU-µs, billionths of a GPU-hour, minor units. If 64 bits are too few for
  an intermediate product, Python integers are used instead. Objects are created only for displayed rows.

The ledger is queried by accountant.web.statement_detail_pages, not here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final, Literal

import numpy as np

from accountant.billing.charge import ALLOCATED, Account
from accountant.billing.charge_table import Groups
from accountant.billing.displayed_amounts import by_itself, minor_units, nano_hours
from accountant.billing.statements import Statement, StatementLine, payable_lines
from accountant.ledger.usage import Int64Array
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base.apportionment import apportion
from gputally.base.money import HOUR_PLACES, exact_product, exact_sum, minor_places, nano_gpu_hours
from gputally.base.units import MS_PER_SECOND, US_PER_MS

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
"""The dimensions by which the bills are queried, the payer first."""
_IDENTITY: Final[Mapping[Cut, tuple[Dimension, ...]]] = {
    "team": ("team",),
    "queue": ("queue",),
    "job": ("cluster", "namespace", "job"),
    "pod": ("cluster", "namespace", "pod", "job"),
    "user": ("user",),
    "node": ("cluster", "node"),
    "gpu": ("cluster", "gpu"),
    "day": ("day",),
}
"""The dimensions that tell two things of a breakdown apart. The payer is not among them: a node on which three teams
held GPUs is one node."""
LATE: Final[tuple[str, ...]] = ()
"""The key of the difference that arose after the month was closed."""

_LATE: Final = -1
"""The index of the key LATE."""
_NONE: Final[Int64Array] = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LineFilter:
    """Selects statement lines.

    team, gpu_model, capacity_type, price_row: the value of the lines; None for all lines.
    accounts: the accounts of the lines; empty for all.
    payers: True leaves out the lines that no team pays for."""

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
class ItemAmount:
    """A line, or an item of one.

    cost: exact, None if unpriced.
    amount: payable, rounded to the currency's minor unit (12.34, not 1234); None without a price or a price book."""

    gpu_us: int
    gpu_hours: Decimal
    cost: Decimal | None
    amount: Decimal | None


@dataclass(frozen=True, slots=True)
class Item:
    """The part of one line that belongs to one job (pod, node, day, …). key: the values of DIMENSIONS, or LATE."""

    key: tuple[str, ...]
    line: StatementLine
    part: ItemAmount


@dataclass(frozen=True, slots=True)
class BreakdownRow:
    """All items of one thing: a node, a user, a day, …, whoever pays for it.

    key: of the first of these items. The amount of `part` is None only if the whole row is unpriced. That of a job is
        rounded by itself, as everywhere, so that jobs may miss the whole by some minor units."""

    key: tuple[str, ...]
    part: ItemAmount
    unpriced_us: int


@dataclass(frozen=True, slots=True)
class _DividedLine:
    """A line divided by key: indices of keys, µs, billionths of an hour, and payable minor units.

    key: `_LATE` for the late difference.
    amounts: None if the line has none."""

    line: StatementLine
    key: Int64Array
    gpu_us: Int64Array
    nano: Int64Array
    amounts: Int64Array | None

    def items(self, chosen: Iterable[int], keys: Sequence[tuple[str, ...]], places: int) -> Iterator[Item]:
        for at in chosen:
            number, hours = int(self.key[at]), Decimal(int(self.nano[at])).scaleb(-HOUR_PLACES)
            amount = None if self.amounts is None else Decimal(int(self.amounts[at])).scaleb(-places)
            part = ItemAmount(int(self.gpu_us[at]), hours, _cost(self.line, hours), amount)
            yield Item(LATE if number == _LATE else keys[number], self.line, part)


@dataclass(frozen=True, slots=True)
class Itemised:
    """An itemised figure.

    lines: the statement lines of the figure, in the order of the statement.
    whole: the sum of the lines.
    cuts: the lines divided by key.
    currency: None without a price book.
    places: decimals of the currency.
    by: the breakdown, whose things `rows` and `count` are about."""

    lines: tuple[tuple[StatementLine, ItemAmount], ...]
    whole: ItemAmount
    keys: Sequence[tuple[str, ...]]
    cuts: tuple[_DividedLine, ...]
    currency: str | None
    places: int
    by: Cut

    @property
    def items(self) -> Iterator[Item]:
        """The items, sorted by line and key."""
        for cut in self.cuts:
            yield from cut.items(range(len(cut.key)), self.keys, self.places)

    def rows(self) -> list[BreakdownRow]:
        """The items by thing, most expensive first, then longest time, then by name."""
        return self.dearest(None)[0]

    @property
    def count(self) -> int:
        """The number of things that have a name."""
        name = DIMENSIONS[self.by].index(self.by)
        used = np.unique(np.concatenate([_NONE, *(cut.key for cut in self.cuts)])).tolist()
        things = self._things
        return len({int(things[key]) for key in used if key != _LATE and self.keys[key][name]})

    def dearest(self, most: int | None) -> tuple[list[BreakdownRow], BreakdownRow | None, int]:
        """The first `most` of `rows`, the others as one row without a key, and the number of these others."""
        things = self._things
        of_cuts = [things[cut.key] for cut in self.cuts]
        numbers, order = self._ranked(of_cuts)
        shown = order[:most]
        place = {number: at for at, number in enumerate(numbers[shown].tolist())}
        found: list[list[Item]] = [[] for _ in place]
        for cut, thing in zip(self.cuts, of_cuts, strict=True):
            at = np.flatnonzero(np.isin(thing, list(place)))
            for item, number in zip(cut.items(at.tolist(), self.keys, self.places), thing[at].tolist(), strict=True):
                found[place[number]].append(item)
        rows = [_row(several[0].key, several) for several in found]
        more = len(order) - len(shown)
        rest = self._rest(rows, of_cuts, numbers[order[len(shown) :]]) if more else None
        if self.by == "job" and self.currency is not None:
            rows = [_of_job(row, items, self.currency) for row, items in zip(rows, found, strict=True)]
            rows.sort(key=lambda row: -(row.part.amount or 0))  # stable: equal amounts keep their order
        return rows, rest, more

    @property
    def _things(self) -> Int64Array:
        """For each key the index of its thing, in the order of the keys; at index `_LATE`, `_LATE`."""
        names = [DIMENSIONS[self.by].index(name) for name in _IDENTITY[self.by]]
        things: dict[tuple[str, ...], int] = {}
        numbers = [things.setdefault(tuple([key[name] for name in names]), len(things)) for key in self.keys]
        return np.array([*numbers, _LATE], dtype=np.int64)

    def _ranked(self, of_cuts: Sequence[Int64Array]) -> tuple[Int64Array, Int64Array]:
        """The indices of the things that have items, ascending, and their order by cost. of_cuts: the things of each
        cut."""
        if not self.cuts:
            return _NONE, _NONE
        numbers, row = np.unique(np.concatenate(of_cuts), return_inverse=True)
        sums = np.zeros((len(numbers), 2), dtype=np.int64)
        amounts = [np.zeros_like(cut.key) if cut.amounts is None else cut.amounts for cut in self.cuts]
        time = np.concatenate([cut.gpu_us for cut in self.cuts])
        np.add.at(sums, row.reshape(-1), np.stack([np.concatenate(amounts), time], axis=1))
        return numbers, np.lexsort((numbers, -sums[:, 1], -sums[:, 0]))

    def _rest(self, shown: Sequence[BreakdownRow], of_cuts: Sequence[Int64Array], others: Int64Array) -> BreakdownRow:
        """The difference between the whole and the displayed rows."""
        known = [cut for cut, thing in zip(self.cuts, of_cuts, strict=True) if np.isin(thing, others).any()]
        left = total([self.whole, *(_negative(row.part) for row in shown)])
        part = ItemAmount(
            left.gpu_us, left.gpu_hours,
            (left.cost or Decimal(0)) if any(cut.line.cost is not None for cut in known) else None,
            (left.amount or Decimal(0)) if any(cut.amounts is not None for cut in known) else None,
        )  # fmt: skip
        unpriced = sum(int(cut.gpu_us.sum()) for cut in self.cuts if cut.line.cost is None)
        return BreakdownRow(LATE, part, unpriced - sum(row.unpriced_us for row in shown))


def accounts_named(name: str) -> frozenset[Account]:
    """The accounts for a name: `allocated` stands for three accounts, "" for all."""
    if name == "allocated":
        return ALLOCATED
    return frozenset((name,)) if name else frozenset()  # type: ignore[arg-type]  # checked where it is read


def itemise(stated: Statement, figure: LineFilter, groups: Groups, by: Cut) -> Itemised:
    """Itemises the lines of a figure. groups: the bills of the statement's span, by DIMENSIONS[by]."""
    places = minor_places(stated.currency) if stated.currency is not None else 0
    lines: list[tuple[StatementLine, ItemAmount]] = []
    cuts: list[_DividedLine] = []
    for line, (_, _, amount) in payable_lines(stated):
        if not figure.takes(line):
            continue
        whole = ItemAmount(line.gpu_us, line.gpu_hours, line.cost, amount if stated.currency is not None else None)
        lines.append((line, whole))
        cuts.append(_cut(line, whole, *groups.by_line.get(line.key, (_NONE, _NONE)), places))
    whole = total(part for _, part in lines)
    if not lines and stated.metered and stated.currency is not None:
        whole = ItemAmount(0, Decimal(0), Decimal(0), Decimal(0))
    return Itemised(tuple(lines), whole, groups.keys, tuple(cuts), stated.currency, places, by)


def total(parts: Iterable[ItemAmount]) -> ItemAmount:
    """The sum. Parts without a price count only in the time."""
    found = list(parts)
    costs = [part.cost for part in found if part.cost is not None]
    amounts = [part.amount for part in found if part.amount is not None]
    return ItemAmount(
        sum(part.gpu_us for part in found),
        exact_sum(part.gpu_hours for part in found),
        exact_sum(costs) if costs or not found else None,
        exact_sum(amounts) if amounts else None,
    )


def _cut(line: StatementLine, whole: ItemAmount, key: Int64Array, gpu_us: Int64Array, places: int) -> _DividedLine:
    """Divides a line by key. Hours and amounts are divided by largest remainder, with ties to the earlier key. If the
    records have changed since the month was closed, each key has the hours of its own time instead, and LATE has the
    difference."""
    hours = int(line.gpu_hours.scaleb(HOUR_PLACES))
    off = abs(int(gpu_us.sum()) - line.gpu_us)
    if len(key) and line.detail == "spread" and 0 < off < MS_PER_SECOND * US_PER_MS:
        # The idle time of each key is divided over the teams separately. By rounding, a microsecond may go to another
        # team.
        gpu_us = np.array(apportion(line.gpu_us, gpu_us.tolist()), dtype=np.int64)
    if len(key) and int(gpu_us.sum()) == line.gpu_us:
        nano = nano_hours(hours, gpu_us)
    else:  # a closed month whose records have changed since
        nano = np.array([nano_gpu_hours(each) for each in gpu_us.tolist()], dtype=np.int64)
        key = np.append(key, _LATE)
        gpu_us = np.append(gpu_us, line.gpu_us - int(gpu_us.sum()))
        nano = np.append(nano, hours - int(nano.sum()))
    amounts = None
    if whole.amount is not None:
        price = (line.unit_price if line.cost is not None else None) or Decimal(0)
        amounts = minor_units(price, nano, int(whole.amount.scaleb(places)), places)
    return _DividedLine(line, key, gpu_us, nano, amounts)


def _row(key: tuple[str, ...], items: Sequence[Item]) -> BreakdownRow:
    unpriced = sum(item.part.gpu_us for item in items if item.part.cost is None)
    return BreakdownRow(key, total(item.part for item in items), unpriced)


def _of_job(row: BreakdownRow, items: Sequence[Item], currency: str) -> BreakdownRow:
    """The row of a job with its own amount; others as they are."""
    named = row.key != LATE and row.key[DIMENSIONS["job"].index("job")]
    if not named or row.part.amount is None:
        return row
    times = [
        (item.line.price_row, item.line.unit_price, item.part.gpu_us)
        for item in items
        if item.line.price_row is not None and item.line.unit_price is not None
    ]
    return replace(row, part=replace(row.part, amount=by_itself(times, currency)))


def _negative(part: ItemAmount) -> ItemAmount:
    return ItemAmount(
        -part.gpu_us, -part.gpu_hours, None if part.cost is None else -part.cost,
        None if part.amount is None else -part.amount,
    )  # fmt: skip


def _cost(line: StatementLine, hours: Decimal) -> Decimal | None:
    if line.cost is None:
        return None
    return Decimal(0) if line.unit_price is None else exact_product(line.unit_price, hours)
