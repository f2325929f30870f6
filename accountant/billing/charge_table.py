"""Holds the charges of a span as one table of integers. Prices usage, and separates start-up time from other idle time.

A month's bill by pod or node has some hundred thousand charges. The rows of a table can be summed and regrouped without
an object per charge. `ChargeTable.charges` creates objects for the charges that a caller displays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

from accountant.billing.statements import LineKey
from accountant.billing.usage_pricing import (
    ACCOUNTS,
    BILLED,
    DETAILS,
    LINE_ACCOUNTS,
    Charge,
    Detail,
    charges,
    pieces,
)
from accountant.core.gpu_time_accounts import sum_by_key
from accountant.ledger.protocols import Questions
from accountant.ledger.usage import OF_TIME, PRICED_BY, START_UP, Int64Array, Place, Usage
from accountant.prices.price_book import Price, PriceBook
from accountant.wire.usage_cost_and_job_models import Dimension

T = TypeVar("T", bound=tuple[str, ...])
KEY, PLACE, ACCOUNT, DETAIL, PRICE, TIME = range(6)
"""The columns of `ChargeTable.cells`."""
_IDLE_DETAILS: Final[tuple[Detail, ...]] = ("starting", "gang_waiting", "running_idle")
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
            for (key, place, account, detail, price), (time,) in zip(numbers.tolist(), gpu_us.tolist(), strict=True)
        ]

    def only(self, rows: Int64Array) -> ChargeTable:
        """A selection of rows. rows: their indices, or a mask."""
        return replace(self, cells=self.cells[rows])

    def regrouped(self, dimensions: Sequence[int]) -> ChargeTable:
        """The charges grouped by some of the dimensions. dimensions: their indices in the key."""
        keys, number = numbered([tuple([key[at] for at in dimensions]) for key in self.keys])
        table = self.cells.copy()
        table[:, KEY] = number[table[:, KEY]]
        return replace(self, keys=keys, cells=table)

    def paid_by(self, rows: Int64Array, payers: Mapping[int, tuple[str, ...]]) -> ChargeTable:
        """The charges with other keys for these rows. payers: the new key by the index of the old one."""
        new_keys = [payers.get(number, key) for number, key in enumerate(self.keys)]
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
        for begin, end in pairwise([0, *first.tolist(), len(rows)] if len(rows) else []):
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


def charges_by_grouping(
    ledger: Questions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    groupings: Sequence[Sequence[Dimension]],
    timezone: str = "UTC",
    where: Mapping[Dimension, Collection[str]] | None = None,
) -> list[ChargeTable]:
    """The charges of [start_ms, end_ms) by each of the groupings, with allocated_idle divided into its details.

    Each span without a price change is priced separately, so start-up time has the price of its own hours.

    where: a filter by dimensions that every grouping has."""
    spans = pieces(book, start_ms, end_ms)
    edges = (start_ms, *(end for _, end in spans))
    usage: dict[int, Usage] = {}
    # Start-up time is read once if those by day or hour are the first.
    for number in sorted(range(len(groupings)), key=lambda number: not OF_TIME & set(groupings[number])):
        usage[number] = ledger.usage(edges, (*groupings[number], *PRICED_BY), None, timezone, START_UP)
    priced = []
    for number, by in enumerate(groupings):
        if book is None or book.by_place(start_ms, end_ms):
            priced.append(_priced_by_place(usage.pop(number), by, book, [start for start, _ in spans]))
        else:
            by_stretch = [charges(ledger, book, *span, by, where, timezone) for span in spans]
            priced.append(_of_charges(by_stretch, usage.pop(number), by))
    return [_filtered(columns, by, where) for by, columns in zip(groupings, priced, strict=True)] if where else priced


def _filtered(columns: ChargeTable, by: Sequence[Dimension], where: Mapping[Dimension, Collection[str]]) -> ChargeTable:
    conditions = [(by.index(name), frozenset(values)) for name, values in where.items()]
    matches = [all(key[index] in values for index, values in conditions) for key in columns.keys]
    return columns.only(np.array(matches, dtype=bool)[columns.cells[:, KEY]])


def _priced_by_place(
    usage: Usage, by: Sequence[Dimension], book: PriceBook | None, starts: Sequence[int]
) -> ChargeTable:
    """Prices usage by place. starts: the start of each span, in ms."""
    keys, key = usage.keyed(by)
    places, place = _places(usage)
    of_place = [
        [book.unit_price(one.gpu_model, start, *one[1:]) if book is not None else None for one in places]
        for start in starts
    ]
    prices, price = _numbered_prices([price for stretch in of_place for price in stretch])
    unit_price = price.reshape(len(starts), len(places))[usage.span, place]
    gpu_us = usage.columns(ACCOUNTS)
    rows, accounts = np.nonzero(gpu_us)
    billed = np.array([account in BILLED for account in ACCOUNTS])[accounts]
    numbers = np.stack([key[rows], place[rows], accounts, np.where(billed, unit_price[rows], 0)], axis=1)
    table = _with_details(numbers, gpu_us[rows, accounts], usage.columns(START_UP)[rows], rows)
    return ChargeTable(keys, places, prices, table)


def _places(usage: Usage) -> tuple[list[Place], Int64Array]:
    """The places of a relation, sorted, and for each row the index of its place."""
    places, place = usage.keyed(PRICED_BY)
    return [Place(*names) for names in places], place


def _of_charges(by_stretch: Sequence[Sequence[Charge]], usage: Usage, by: Sequence[Dimension]) -> ChargeTable:
    """Converts charges to columns, for prices that depend on more than place and instant.

    by_stretch: the charges of each span.
    usage: the relation that contains the start-up time."""
    numbered_charges = [(stretch, charge) for stretch, several in enumerate(by_stretch) for charge in several]
    keys, key = numbered([charge.key for _, charge in numbered_charges])
    places, place = numbered([charge.place for _, charge in numbered_charges])
    prices, price = _numbered_prices([charge.row for _, charge in numbered_charges])
    keys_of_usage, key_of_row = usage.keyed(by)
    places_of_usage, place_of_row = _places(usage)
    row_of = {
        (stretch, keys_of_usage[key], places_of_usage[place]): row
        for row, (stretch, key, place) in enumerate(
            zip(usage.span.tolist(), key_of_row.tolist(), place_of_row.tolist(), strict=True)
        )
    }
    start_up = np.concatenate([usage.columns(START_UP), np.zeros((1, len(START_UP)), dtype=np.int64)])
    none = len(start_up) - 1
    groups = [row_of.get((stretch, charge.key, charge.place), none) for stretch, charge in numbered_charges]
    group = np.array(groups, dtype=np.int64)
    accounts = np.array([LINE_ACCOUNTS.index(charge.account) for _, charge in numbered_charges], dtype=np.int64)
    gpu_us = np.array([charge.gpu_us for _, charge in numbered_charges], dtype=np.int64)
    numbers = np.stack([key, place, accounts, price], axis=1)
    return ChargeTable(keys, places, prices, _with_details(numbers, gpu_us, start_up[group], group))


def _with_details(numbers: Int64Array, gpu_us: Int64Array, start_up_us: Int64Array, group: Int64Array) -> Int64Array:
    """`ChargeTable.cells` with allocated_idle divided into details.

    numbers: key, place, account and price, shape (rows, 4).
    gpu_us, group: shape (rows,). The idle rows of a group are adjacent.
    start_up_us: starting and gang_waiting of the row's whole group, shape (rows, 2)."""
    is_idle = numbers[:, 2] == LINE_ACCOUNTS.index("allocated_idle")
    rest, idle = np.flatnonzero(~is_idle), np.flatnonzero(is_idle)
    parts = split_in_order(group[idle], gpu_us[idle], start_up_us[idle])
    rows = np.concatenate([rest, np.repeat(idle, len(_IDLE_DETAILS))])
    details = np.array([DETAILS.index(name) for name in _IDLE_DETAILS], dtype=np.int64)
    detail = np.concatenate([np.zeros_like(rest), np.tile(details, len(idle))])
    time = np.concatenate([gpu_us[rest], parts.reshape(-1)])
    key, place, account, price = numbers[rows].T
    table = np.stack([key, place, account, detail, price, time], axis=1)
    return table[time > 0]


def split_in_order(group: Int64Array, gpu_us: Int64Array, limits: Int64Array) -> Int64Array:
    """Divides each group's time into parts and a rest. The first rows of a group fill the first part up to its limit,
    the next rows the second part, and so on.

    group, gpu_us: shape (rows,). Adjacent equal values of `group` form one group.
    limits: of a row's whole group, shape (rows, parts).

    Returns shape (rows, parts + 1). Each row adds up to its gpu_us."""
    if not len(group):
        return np.zeros((0, limits.shape[1] + 1), dtype=np.int64)
    until = np.cumsum(gpu_us)
    first = np.flatnonzero(np.concatenate(([True], group[1:] != group[:-1])))
    until -= np.repeat((until - gpu_us)[first], np.diff([*first, len(group)]))
    edges = np.cumsum(limits, axis=1)
    before_edge = np.minimum(until[:, None], edges) - np.minimum((until - gpu_us)[:, None], edges)
    return np.diff(np.column_stack([np.zeros_like(gpu_us), before_edge, gpu_us]), axis=1)


def numbered(values: Sequence[T]) -> tuple[list[T], Int64Array]:
    """The distinct values, sorted, and for each value its index among them, shape (len(values),)."""
    distinct = sorted(set(values))
    number = {value: index for index, value in enumerate(distinct)}
    return distinct, np.array([number[value] for value in values], dtype=np.int64)


def _numbered_prices(prices: Sequence[Price | None]) -> tuple[list[Price | None], Int64Array]:
    """The distinct prices by id, None first, and for each price its index among them."""
    by_id: dict[str, Price | None] = {"": None, **{_price_id(price): price for price in prices}}
    ids, number = numbered([("",), *((_price_id(price),) for price in prices)])
    return [by_id[name] for (name,) in ids], number[1:]


def _price_id(price: Price | None) -> str:
    return price.id if price is not None else ""
