"""Holds the charges of a span as one table of integers.

A month's bill by pod or node has some hundred thousand charges. The rows of a table can be summed and regrouped without
an object per charge. Loops over keys and rows end with CalledOff once nobody waits for the result any more.
`ChargeTable.charges` creates objects for the charges that a caller displays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

from accountant.billing.charge import DETAILS, LINE_ACCOUNTS, Charge
from accountant.billing.statements import LineKey
from accountant.core.gpu_time_accounts import sum_by_key
from accountant.ledger.usage import Int64Array
from accountant.prices.price_book import Price
from accountant.prices.unit_prices import Place
from gputally.base import called_off

T = TypeVar("T", bound=tuple[str, ...])
KEY, PLACE, ACCOUNT, DETAIL, PRICE, TIME = range(6)
"""The columns of `ChargeTable.cells`."""
_KEY_BYTES: Final = 300
"""Approximate size of a key, including the names that only it has."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The GPU time of each statement line, divided by key.

    keys: sorted.
    by_line: for each line two int64 arrays of equal length: indices into `keys`, ascending, and the GPU-µs of each of
        these keys."""

    keys: Sequence[tuple[str, ...]] = ()
    by_line: Mapping[LineKey, tuple[Int64Array, Int64Array]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes."""
        return _KEY_BYTES * len(self.keys) + sum(key.nbytes + gpu_us.nbytes for key, gpu_us in self.by_line.values())


@dataclass(frozen=True, slots=True)
class BilledLines:
    """The charges of a statement, one per line. groups: the time of each line, divided by key."""

    charges: Sequence[Charge]
    groups: Groups


@dataclass(frozen=True, slots=True)
class ChargeTable:
    """Charges of a span.

    keys, places, prices: sorted, unique values (prices by id, None first).
    cells: int64, shape (rows, 6): indices of key, place, account (in LINE_ACCOUNTS), detail (in DETAILS) and price, and
        GPU-µs. Some rows differ only in their time."""

    keys: Sequence[tuple[str, ...]]
    places: Sequence[Place]
    prices: Sequence[Price | None]
    cells: Int64Array

    def charges(self) -> list[Charge]:
        """One charge per distinct row, sorted by key, place, account, detail and price."""
        numbers, gpu_us = sum_by_key(self.cells[:, :TIME], self.cells[:, TIME:])
        return [
            Charge(
                self.keys[key], self.places[place], LINE_ACCOUNTS[account], time, self.prices[price], DETAILS[detail]
            )
            for (key, place, account, detail, price), (time,) in called_off.each(
                zip(numbers.tolist(), gpu_us.tolist(), strict=True)
            )
        ]

    def only(self, rows: Int64Array) -> ChargeTable:
        """A selection of rows. rows: their indices, or a mask."""
        return replace(self, cells=self.cells[rows])

    def regrouped(self, dimensions: Sequence[int]) -> ChargeTable:
        """The charges grouped by some of the dimensions. dimensions: their indices in the key."""
        keys, number = numbered([tuple([key[at] for at in dimensions]) for key in called_off.each(self.keys)])
        table = self.cells.copy()
        table[:, KEY] = number[table[:, KEY]]
        return replace(self, keys=keys, cells=table)

    def paid_by(self, rows: Int64Array, payers: Mapping[int, tuple[str, ...]]) -> ChargeTable:
        """The charges with other keys for these rows. payers: the new key by the index of the old one."""
        new_keys = [payers.get(number, key) for number, key in enumerate(called_off.each(self.keys))]
        keys, number = numbered([*self.keys, *new_keys])
        table = self.cells.copy()
        table[:, KEY] = number[table[:, KEY]]
        table[rows, KEY] = number[len(self.keys) + self.cells[rows, KEY]]
        return replace(self, keys=keys, cells=table)

    def replaced(self, rows: Int64Array, substitutes: Sequence[Charge]) -> ChargeTable:
        """The charges with `substitutes` in place of these rows. The places and prices of the substitutes must be
        among `places` and `prices`."""
        keys, number = numbered([*self.keys, *(charge.key for charge in substitutes)])
        others = np.delete(self.cells, rows, axis=0)
        others[:, KEY] = number[others[:, KEY]]
        place = {place: index for index, place in enumerate(self.places)}
        price = {_price_id(price): index for index, price in enumerate(self.prices)}
        added = [
            (key, place[charge.place], LINE_ACCOUNTS.index(charge.account), DETAILS.index(charge.detail),
             price[_price_id(charge.row)], charge.gpu_us)
            for key, charge in zip(number[len(self.keys) :].tolist(), substitutes, strict=True)
        ]  # fmt: skip
        new_rows = np.array(added, dtype=np.int64).reshape(-1, others.shape[1])
        return replace(self, keys=keys, cells=np.concatenate([others, new_rows]))

    def by_line(self) -> BilledLines:
        """The charges grouped by line of a statement; a key begins with the paying team."""
        teams, team = numbered([key[:1] for key in self.keys])
        kinds, kind = numbered([(place.gpu_model, place.capacity_type) for place in self.places])
        key, place, account, detail, price, _ = self.cells.T
        columns = np.stack([team[key], kind[place], account, detail, price, key], axis=1)
        rows, gpu_us = sum_by_key(columns, self.cells[:, TIME])
        first = np.flatnonzero((rows[1:, :5] != rows[:-1, :5]).any(axis=1)) + 1
        lines, groups = [], {}
        for begin, end in called_off.each(pairwise([0, *first.tolist(), len(rows)] if len(rows) else [])):
            team_index, kind_index, account_index, detail_index, price_index, _ = rows[begin].tolist()
            (model, capacity), row = kinds[kind_index], self.prices[price_index]
            charge = Charge(
                teams[team_index], Place(model, "", "", capacity), LINE_ACCOUNTS[account_index],
                int(gpu_us[begin:end].sum()), row, DETAILS[detail_index],
            )  # fmt: skip
            lines.append(charge)
            line = (*charge.key, charge.account, charge.detail, model, capacity, _price_id(row))
            groups[line] = rows[begin:end, 5], gpu_us[begin:end]
        return BilledLines(lines, Groups(self.keys, groups))


NO_CHARGES: Final = ChargeTable((), (), (), np.zeros((0, 6), dtype=np.int64))


def numbered(values: Sequence[T]) -> tuple[list[T], Int64Array]:
    """The distinct values, sorted, and for each value its index among them, shape (len(values),)."""
    distinct = sorted(set(values))
    number = {value: index for index, value in enumerate(called_off.each(distinct))}
    return distinct, np.array([number[value] for value in called_off.each(values)], dtype=np.int64)


def numbered_prices(prices: Sequence[Price | None]) -> tuple[list[Price | None], Int64Array]:
    """The distinct prices by id, None first, and for each price its index among them."""
    by_id: dict[str, Price | None] = {"": None, **{_price_id(price): price for price in prices}}
    ids, number = numbered([("",), *((_price_id(price),) for price in prices)])
    return [by_id[name] for (name,) in ids], number[1:]


def _price_id(price: Price | None) -> str:
    return price.id if price is not None else ""
