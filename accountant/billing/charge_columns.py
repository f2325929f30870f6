"""Holds the charges of a span as integer columns: prices usage, and separates start-up time from other idle time.

A month's bill by pod or node has some hundred thousand charges. Columns can be summed and regrouped without an object
per charge. `ChargeColumns.charges` creates objects for the charges that a caller displays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, TypeAlias, TypeVar

import numpy as np

from accountant.billing.usage_pricing import (
    ACCOUNTS,
    BILLED,
    DETAILS,
    LINE_ACCOUNTS,
    Account,
    Charge,
    Detail,
    charges,
    pieces,
)
from accountant.core.gpu_time_accounts import merged
from accountant.ledger.protocols import Questions
from accountant.ledger.usage_columns import Place, UsageColumns, Whole
from accountant.prices.price_book import Price, PriceBook
from accountant.wire.usage_models import Dimension

T = TypeVar("T", bound=tuple[str, ...])
LineKey: TypeAlias = tuple[str, Account, Detail, str, str, str | None]
"""Identifies a line of a statement: team, account, detail, GPU model, capacity type, price id."""
KEY, PLACE, ACCOUNT, DETAIL, PRICE, TIME = range(6)
"""The columns of `ChargeColumns.table`."""
_IDLE_DETAILS: Final[tuple[Detail, ...]] = ("starting", "gang_waiting", "running_idle")
_KEY_BYTES: Final = 300
"""Approximate size of a key, including the names that only it has."""


@dataclass(frozen=True, slots=True)
class Groups:
    """GPU-µs by line and key.

    keys: sorted.
    of: for each line two int64 arrays of equal length: indices into `keys`, ascending, and the GPU-µs of each of these
        keys."""

    keys: Sequence[tuple[str, ...]] = ()
    of: Mapping[LineKey, tuple[Whole, Whole]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes."""
        return _KEY_BYTES * len(self.keys) + sum(key.nbytes + gpu_us.nbytes for key, gpu_us in self.of.values())


@dataclass(frozen=True, slots=True)
class BilledLines:
    """The charges of a statement, one per line. groups: the time of each line, divided by key."""

    charges: Sequence[Charge]
    groups: Groups


@dataclass(frozen=True, slots=True)
class ChargeColumns:
    """Charges of a span. keys, places and prices: sorted, unique values (prices by id, None first).

    table: int64, shape (rows, 6): indices of key, place, account (in LINE_ACCOUNTS), detail (in DETAILS) and price, and
    GPU-µs. Several rows may differ only in their time."""

    keys: Sequence[tuple[str, ...]]
    places: Sequence[Place]
    prices: Sequence[Price | None]
    table: Whole

    def charges(self) -> list[Charge]:
        """One charge per distinct row, sorted by key, place, account, detail and price."""
        numbers, gpu_us = merged(self.table[:, :TIME], self.table[:, TIME:])
        return [
            Charge(
                self.keys[key], self.places[place], LINE_ACCOUNTS[account], time, self.prices[price], DETAILS[detail]
            )
            for (key, place, account, detail, price), (time,) in zip(numbers.tolist(), gpu_us.tolist(), strict=True)
        ]

    def only(self, rows: Whole) -> ChargeColumns:
        """A selection of rows. rows: their indices, or a mask."""
        return replace(self, table=self.table[rows])

    def regrouped(self, dimensions: Sequence[int]) -> ChargeColumns:
        """Return the charges grouped by some dimensions of the keys only. dimensions: their indices in the key."""
        keys, number = numbered([tuple([key[at] for at in dimensions]) for key in self.keys])
        table = self.table.copy()
        table[:, KEY] = number[table[:, KEY]]
        return replace(self, keys=keys, table=table)

    def paid_by(self, rows: Whole, payers: Mapping[int, tuple[str, ...]]) -> ChargeColumns:
        """Return the charges with other keys for these rows. payers: the new key by the index of the old one."""
        given = [payers.get(number, key) for number, key in enumerate(self.keys)]
        keys, number = numbered([*self.keys, *given])
        table = self.table.copy()
        table[:, KEY] = number[table[:, KEY]]
        table[rows, KEY] = number[len(self.keys) + self.table[rows, KEY]]
        return replace(self, keys=keys, table=table)

    def replaced(self, rows: Whole, instead: Sequence[Charge]) -> ChargeColumns:
        """Return the charges with `instead` in place of these rows. Its places and prices must already be in the
        lists."""
        keys, number = numbered([*self.keys, *(charge.key for charge in instead)])
        kept = np.delete(self.table, rows, axis=0)
        kept[:, KEY] = number[kept[:, KEY]]
        place = {place: at for at, place in enumerate(self.places)}
        price = {_price_id(price): at for at, price in enumerate(self.prices)}
        added = [
            (at, place[charge.place], LINE_ACCOUNTS.index(charge.account), DETAILS.index(charge.detail),
             price[_price_id(charge.row)], charge.gpu_us)
            for at, charge in zip(number[len(self.keys) :].tolist(), instead, strict=True)
        ]  # fmt: skip
        return replace(self, keys=keys, table=np.concatenate([kept, _rows(added, 6)]))

    def by_line(self) -> BilledLines:
        """The charges grouped by line of a statement; a key begins with the paying team."""
        teams, team = numbered([key[:1] for key in self.keys])
        kinds, kind = numbered([(place.gpu_model, place.capacity_type) for place in self.places])
        key, place, account, detail, price, _ = self.table.T
        columns = np.stack([team[key], kind[place], account, detail, price, key], axis=1)
        rows, gpu_us = merged(columns, self.table[:, TIME])
        first = np.flatnonzero((rows[1:, :5] != rows[:-1, :5]).any(axis=1)) + 1
        found, groups = [], {}
        for begin, end in pairwise([0, *first.tolist(), len(rows)] if len(rows) else []):
            of_team, of_kind, of_account, of_detail, of_price, _ = rows[begin].tolist()
            (model, capacity), row = kinds[of_kind], self.prices[of_price]
            charge = Charge(
                teams[of_team], Place(model, "", "", capacity), LINE_ACCOUNTS[of_account],
                int(gpu_us[begin:end].sum()), row, DETAILS[of_detail],
            )  # fmt: skip
            found.append(charge)
            line = (*charge.key, charge.account, charge.detail, model, capacity, row.id if row else None)
            groups[line] = rows[begin:end, 5], gpu_us[begin:end]
        return BilledLines(found, Groups(self.keys, groups))


def charges_by_cuts(
    ledger: Questions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    cuts: Sequence[Sequence[Dimension]],
    timezone: str = "UTC",
    where: Mapping[Dimension, Collection[str]] | None = None,
) -> list[ChargeColumns]:
    """Return the charges of [start_ms, end_ms) by each of the groupings, with allocated_idle divided into its details.

    Each span without a price change is priced separately, so start-up time has the price of its own hours.

    where: a filter by dimensions that every grouping has."""
    spans = pieces(book, start_ms, end_ms)
    usage = ledger.usage_columns((start_ms, *(end for _, end in spans)), cuts, timezone)
    if book is None or book.by_place(start_ms, end_ms):
        found = [_priced_by_place(columns, book, [start for start, _ in spans]) for columns in usage]
    else:
        found = [
            _of_charges([charges(ledger, book, *span, by, where, timezone) for span in spans], columns)
            for by, columns in zip(cuts, usage, strict=True)
        ]
    return [_chosen(columns, by, where) for by, columns in zip(cuts, found, strict=True)] if where else found


def _chosen(
    columns: ChargeColumns, by: Sequence[Dimension], where: Mapping[Dimension, Collection[str]]
) -> ChargeColumns:
    wanted = [(by.index(name), frozenset(values)) for name, values in where.items()]
    keys = [all(key[at] in values for at, values in wanted) for key in columns.keys]
    return columns.only(np.array(keys, dtype=bool)[columns.table[:, KEY]])


def _priced_by_place(usage: UsageColumns, book: PriceBook | None, starts: Sequence[int]) -> ChargeColumns:
    """Prices usage by place. starts: of the spans, in ms."""
    of_place = [
        [book.unit_price(place.gpu_model, start, *place[1:]) if book is not None else None for place in usage.places]
        for start in starts
    ]
    prices, price = _numbered_prices([price for stretch in of_place for price in stretch])
    unit_price = price.reshape(len(starts), len(usage.places))[usage.stretch, usage.place]
    rows, accounts = np.nonzero(usage.gpu_us[:, : len(ACCOUNTS)])
    billed = np.array([account in BILLED for account in ACCOUNTS])[accounts]
    numbers = np.stack([usage.key[rows], usage.place[rows], accounts, np.where(billed, unit_price[rows], 0)], axis=1)
    table = _with_details(numbers, usage.gpu_us[rows, accounts], usage.gpu_us[rows, len(ACCOUNTS) :], rows)
    return ChargeColumns(usage.keys, usage.places, prices, table)


def _of_charges(by_stretch: Sequence[Sequence[Charge]], usage: UsageColumns) -> ChargeColumns:
    """Return charges for prices that depend on more than place and instant.

    by_stretch: charges of each span.
    usage: provides their start-up time."""
    found = [(stretch, charge) for stretch, several in enumerate(by_stretch) for charge in several]
    keys, key = numbered([charge.key for _, charge in found])
    places, place = numbered([charge.place for _, charge in found])
    prices, price = _numbered_prices([charge.row for _, charge in found])
    row_of = {
        (stretch, usage.keys[key], usage.places[place]): row
        for row, (stretch, key, place) in enumerate(
            zip(usage.stretch.tolist(), usage.key.tolist(), usage.place.tolist(), strict=True)
        )
    }
    start_up = np.concatenate([usage.gpu_us[:, len(ACCOUNTS) :], np.zeros((1, 2), dtype=np.int64)])
    none = len(start_up) - 1
    group = np.array([row_of.get((at, charge.key, charge.place), none) for at, charge in found], dtype=np.int64)
    accounts = np.array([LINE_ACCOUNTS.index(charge.account) for _, charge in found], dtype=np.int64)
    gpu_us = np.array([charge.gpu_us for _, charge in found], dtype=np.int64)
    numbers = np.stack([key, place, accounts, price], axis=1)
    return ChargeColumns(keys, places, prices, _with_details(numbers, gpu_us, start_up[group], group))


def _with_details(numbers: Whole, gpu_us: Whole, start_up_us: Whole, group: Whole) -> Whole:
    """Return `ChargeColumns.table` with allocated_idle divided into details.

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


def split_in_order(group: Whole, gpu_us: Whole, limits: Whole) -> Whole:
    """Cut the time of each group, row after row, into consecutive parts: the first `limits[0]` are the first part, the
    next `limits[1]` the second, and the remainder the last.

    group, gpu_us: shape (rows,). Adjacent equal values form one group.
    limits: the limits of a row's whole group, shape (rows, parts).

    Returns shape (rows, parts + 1). Each row adds up to its gpu_us."""
    if not len(group):
        return np.zeros((0, limits.shape[1] + 1), dtype=np.int64)
    until = np.cumsum(gpu_us)
    first = np.flatnonzero(np.concatenate(([True], group[1:] != group[:-1])))
    until -= np.repeat((until - gpu_us)[first], np.diff([*first, len(group)]))
    edges = np.cumsum(limits, axis=1)
    before_edge = np.minimum(until[:, None], edges) - np.minimum((until - gpu_us)[:, None], edges)
    return np.diff(np.column_stack([np.zeros_like(gpu_us), before_edge, gpu_us]), axis=1)


def numbered(values: Sequence[T]) -> tuple[list[T], Whole]:
    """The distinct values, sorted, and for each value its index among them, shape (len(values),)."""
    listed = sorted(set(values))
    number = {value: at for at, value in enumerate(listed)}
    return listed, np.array([number[value] for value in values], dtype=np.int64)


def _numbered_prices(prices: Sequence[Price | None]) -> tuple[list[Price | None], Whole]:
    """The distinct prices by id, None first, and for each price its index among them."""
    by_id: dict[str, Price | None] = {"": None, **{_price_id(price): price for price in prices}}
    ids, number = numbered([("",), *((_price_id(price),) for price in prices)])
    return [by_id[name] for (name,) in ids], number[1:]


def _price_id(price: Price | None) -> str:
    return price.id if price is not None else ""


def _rows(rows: Sequence[tuple[int, ...]], columns: int) -> Whole:
    return np.array(rows, dtype=np.int64).reshape(-1, columns)
