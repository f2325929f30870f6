"""What a figure of a statement is made of: its lines, cut by job, pod, node or day, to the last digit.

Invariants:
- The items of a line add up to it exactly: GPU-µs, hours with nine decimals, cost, and payable minor units.
- A figure is a choice of statement lines, so every figure of a page of sums can be itemised, whichever it is.
- Where the records have moved since a month was closed, what they differ by is an item of its own (`LATE`).
- Time, hours and amounts are columns of whole numbers; objects are made of the rows that somebody looks at.

Pure: who asks the ledger is accountant.web.lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final, Literal, TypeAlias

import numpy as np

from accountant.books.costs import ALLOCATED, Account, Charge, Detail
from accountant.books.held import Whole
from accountant.books.payable import payable_lines
from accountant.books.portions import minor_units, nano_hours
from accountant.books.statements import Statement, StatementLine
from accountant.money import HOUR_PLACES, exact_product, exact_sum, minor_places, nano_gpu_hours
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
_KEY_BYTES: Final = 300
"""Of a key and the names in it that no other key has."""
_LATE: Final = -1
"""The number of the key LATE."""
_NONE: Final[Whole] = np.zeros(0, dtype=np.int64)


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
class Groups:
    """GPU-µs by line and key of a cut, as columns. keys: ascending. of: by line the numbers of keys, ascending, and the
    time of each."""

    keys: Sequence[tuple[str, ...]] = ()
    of: Mapping[LineKey, tuple[Whole, Whole]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of memory, about."""
        return _KEY_BYTES * len(self.keys) + sum(key.nbytes + gpu_us.nbytes for key, gpu_us in self.of.values())


@dataclass(frozen=True, slots=True)
class _Cut:
    """A line cut by key: numbers of keys (`_LATE` for what has none), µs, billionths of an hour, and payable minor
    units, None where the line has none."""

    line: StatementLine
    key: Whole
    gpu_us: Whole
    nano: Whole
    amounts: Whole | None

    def items(self, chosen: Iterable[int], keys: Sequence[tuple[str, ...]], places: int) -> Iterator[Item]:
        for at in chosen:
            number, hours = int(self.key[at]), Decimal(int(self.nano[at])).scaleb(-HOUR_PLACES)
            amount = None if self.amounts is None else Decimal(int(self.amounts[at])).scaleb(-places)
            part = Part(int(self.gpu_us[at]), hours, _cost(self.line, hours), amount)
            yield Item(LATE if number == _LATE else keys[number], self.line, part)


@dataclass(frozen=True, slots=True)
class Itemised:
    """lines: of the figure, as the statement orders them. whole: their sum. cuts: the lines by key, of `keys`; places:
    decimals of a minor unit."""

    lines: tuple[tuple[StatementLine, Part], ...]
    whole: Part
    keys: Sequence[tuple[str, ...]]
    cuts: tuple[_Cut, ...]
    places: int

    @property
    def items(self) -> Iterator[Item]:
        """By line, then key."""
        for cut in self.cuts:
            yield from cut.items(range(len(cut.key)), self.keys, self.places)

    def rows(self) -> list[Row]:
        """The items by key, the dearest first, then the longest, then by name."""
        return self.dearest(None)[0]

    def dearest(self, most: int | None) -> tuple[list[Row], Row | None, int]:
        """The first of `rows`; of more than `most`, all others as one row of no key, and how many they are."""
        numbers, order = self._ranked()
        shown = order[:most]
        place = {number: at for at, number in enumerate(numbers[shown].tolist())}
        found: list[list[Item]] = [[] for _ in place]
        for cut in self.cuts:
            for item, number in zip(*self._of(cut, place), strict=True):
                found[place[number]].append(item)
        rows = [_row(several[0].key, several) for several in found]
        more = len(order) - len(shown)
        return rows, self._rest(rows, numbers[order[len(shown) :]]) if more else None, more

    def _of(self, cut: _Cut, chosen: Collection[int]) -> tuple[list[Item], list[int]]:
        at = np.flatnonzero(np.isin(cut.key, list(chosen)))
        return list(cut.items(at.tolist(), self.keys, self.places)), cut.key[at].tolist()

    def _ranked(self) -> tuple[Whole, Whole]:
        """The numbers of the keys that have anything, ascending, and their order by what they cost."""
        if not self.cuts:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        numbers, row = np.unique(np.concatenate([cut.key for cut in self.cuts]), return_inverse=True)
        sums = np.zeros((len(numbers), 2), dtype=np.int64)
        amounts = [np.zeros_like(cut.key) if cut.amounts is None else cut.amounts for cut in self.cuts]
        time = np.concatenate([cut.gpu_us for cut in self.cuts])
        np.add.at(sums, row.reshape(-1), np.stack([np.concatenate(amounts), time], axis=1))
        return numbers, np.lexsort((numbers, -sums[:, 1], -sums[:, 0]))

    def _rest(self, shown: Sequence[Row], others: Whole) -> Row:
        """What the rows that are shown leave of the whole."""
        known = [cut for cut in self.cuts if np.isin(cut.key, others).any()]
        left = total([self.whole, *(_negative(row.part) for row in shown)])
        part = Part(
            left.gpu_us, left.gpu_hours,
            (left.cost or Decimal(0)) if any(cut.line.cost is not None for cut in known) else None,
            (left.amount or Decimal(0)) if any(cut.amounts is not None for cut in known) else None,
        )  # fmt: skip
        unpriced = sum(int(cut.gpu_us.sum()) for cut in self.cuts if cut.line.cost is None)
        return Row(LATE, part, unpriced - sum(row.unpriced_us for row in shown))


def accounts_named(name: str) -> frozenset[Account]:
    """`allocated` stands for its three accounts, "" for all."""
    if name == "allocated":
        return ALLOCATED
    return frozenset((name,)) if name else frozenset()  # type: ignore[arg-type]  # checked where it is read


def grouped(charges: Iterable[Charge]) -> Groups:
    """charges: the bills of a statement's span, by the dimensions of a cut."""
    found: dict[LineKey, dict[tuple[str, ...], int]] = {}
    for charge in charges:
        of_line = found.setdefault(_charged(charge), {})
        of_line[charge.key] = of_line.get(charge.key, 0) + charge.gpu_us
    keys = sorted({key for of_line in found.values() for key in of_line})
    number = {key: place for place, key in enumerate(keys)}
    of = {}
    for line, of_line in found.items():
        table = np.array(sorted((number[key], gpu_us) for key, gpu_us in of_line.items()), dtype=np.int64)
        of[line] = table[:, 0], table[:, 1]
    return Groups(keys, of)


def itemise(stated: Statement, figure: Figure, groups: Groups) -> Itemised:
    """groups: the bills of the statement's span. What a figure does not sum up is not looked at."""
    places = minor_places(stated.currency) if stated.currency is not None else 0
    lines: list[tuple[StatementLine, Part]] = []
    cuts: list[_Cut] = []
    for line, (_, _, amount) in payable_lines(stated):
        if not figure.takes(line):
            continue
        whole = Part(line.gpu_us, line.gpu_hours, line.cost, amount if stated.currency is not None else None)
        lines.append((line, whole))
        cuts.append(_cut(line, whole, *groups.of.get(_stated(line), (_NONE, _NONE)), places))
    return Itemised(tuple(lines), total(part for _, part in lines), groups.keys, tuple(cuts), places)


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


def _cut(line: StatementLine, whole: Part, key: Whole, gpu_us: Whole, places: int) -> _Cut:
    """Hours by largest remainder, ties to the earlier key; so are amounts."""
    hours = int(line.gpu_hours.scaleb(HOUR_PLACES))
    off = abs(int(gpu_us.sum()) - line.gpu_us)
    if len(key) and line.detail == "spread" and 0 < off < MS_PER_SECOND * US_PER_MS:
        # Each key's idle time is divided over the teams by itself: a microsecond here and there goes to another team.
        gpu_us = np.array(apportion(line.gpu_us, gpu_us.tolist()), dtype=np.int64)
    if len(key) and int(gpu_us.sum()) == line.gpu_us:
        nano = nano_hours(hours, gpu_us)
    else:  # a closed month whose records have moved since
        nano = np.array([nano_gpu_hours(each) for each in gpu_us.tolist()], dtype=np.int64)
        key = np.append(key, _LATE)
        gpu_us = np.append(gpu_us, line.gpu_us - int(gpu_us.sum()))
        nano = np.append(nano, hours - int(nano.sum()))
    amounts = None
    if whole.amount is not None:
        price = (line.unit_price if line.cost is not None else None) or Decimal(0)
        amounts = minor_units(price, nano, int(whole.amount.scaleb(places)), places)
    return _Cut(line, key, gpu_us, nano, amounts)


def _row(key: tuple[str, ...], items: Sequence[Item]) -> Row:
    unpriced = sum(item.part.gpu_us for item in items if item.part.cost is None)
    return Row(key, total(item.part for item in items), unpriced)


def _negative(part: Part) -> Part:
    return Part(
        -part.gpu_us, -part.gpu_hours, None if part.cost is None else -part.cost,
        None if part.amount is None else -part.amount,
    )  # fmt: skip


def _cost(line: StatementLine, hours: Decimal) -> Decimal | None:
    if line.cost is None:
        return None
    return Decimal(0) if line.unit_price is None else exact_product(line.unit_price, hours)


def _charged(charge: Charge) -> LineKey:
    row = charge.row.id if charge.billed and charge.row else None
    return charge.key[0], charge.account, charge.detail, charge.place.gpu_model, charge.place.capacity_type, row


def _stated(line: StatementLine) -> LineKey:
    return line.team, line.account, line.detail, line.gpu_model, line.capacity_type, line.price_row
