"""Computes the amounts of jobs and teams from columns.

What `accountant.billing.bills` says, line for line, without an object for every pod and node. Held time is worked on as
columns of whole numbers; what only some policies do with unallocated time (guarantees, shares of it) is left to
accountant.billing.bills, and so is everything where a price needs more than a place and an instant. It asks the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from accountant.billing import bills
from accountant.billing.cost_columns import COLUMNS, UsageColumns
from accountant.billing.costs import ACCOUNTS, DETAILS, LINE_ACCOUNTS, Account, Charge, Detail, Place, merged, pieces
from accountant.billing.held_time_columns import Groups, LineKey, Whole, grouped
from accountant.ledger.protocols import Questions
from accountant.prices.price_book import Billing, Price, PriceBook
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_models import Dimension

_NOT_IDLE: tuple[Account, ...] = tuple(name for name in ACCOUNTS if name != "allocated_idle")
_UNPRICED = 0
"""The number of no price."""


class BillQuestions(Questions, Protocol):
    """accountant.storage.snapshot.Snapshot."""

    def tabled(
        self, edges: Sequence[int], cuts: Sequence[Sequence[Dimension]], timezone: str = "UTC"
    ) -> list[UsageColumns]:
        """What `usage` and `idle_phases` say by each of the cuts and PRICED_BY, in each stretch between two edges."""
        ...


@dataclass(frozen=True, slots=True)
class BilledColumns:
    """charges: of the lines alone, as coarse as a statement needs them. groups: of what they are made."""

    charges: Sequence[Charge]
    groups: Groups


def bills_by_cuts(
    ledger: BillQuestions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    cuts: Sequence[Sequence[Dimension]],
    timezone: str = "UTC",
) -> list[BilledColumns]:
    """The bills of [start_ms, end_ms) by each of the cuts, all of which begin with the team."""
    if book is not None and not book.by_place(start_ms, end_ms):
        several = (bills.bills(ledger, book, start_ms, end_ms, by, timezone) for by in cuts)
        return [BilledColumns(found, grouped(found)) for found in several]
    spans = pieces(book, start_ms, end_ms)
    billing = book.billing if book is not None else Billing()
    finer = [bills.told_by(billing, by) for by in cuts]
    found = []
    tables = ledger.tabled((start_ms, *(end for _, end in spans)), finer, timezone)
    for by, fine, tabled in zip(cuts, finer, tables, strict=True):
        rows = _ChargeColumns.of(tabled, book, [start for start, _ in spans])
        if book is not None:
            rows = _by_policy(ledger, book, rows, start_ms, end_ms, fine, timezone)
        found.append(rows.coarser(len(by)).billed())
    return found


@dataclass(frozen=True, slots=True)
class _ChargeColumns:
    """Charges as columns: numbers of key, place, account (LINE_ACCOUNTS), detail (DETAILS) and price, and µs."""

    keys: Sequence[tuple[str, ...]]
    places: Sequence[Place]
    prices: Sequence[Price | None]
    table: Whole

    @classmethod
    def of(cls, tabled: UsageColumns, book: PriceBook | None, starts: Sequence[int]) -> _ChargeColumns:
        """With what is idle told apart as start-up and the rest. starts: of the stretches."""
        prices: dict[str, tuple[int, Price | None]] = {"": (_UNPRICED, None)}
        price_of = np.zeros((len(starts), max(1, len(tabled.places))), dtype=np.int64)
        for stretch, start in enumerate(starts):
            for at, place in enumerate(tabled.places):
                price = book.unit_price(place.gpu_model, start, *place[1:]) if book is not None else None
                price_of[stretch, at] = prices.setdefault(price.id if price else "", (len(prices), price))[0]
        number = price_of[tabled.stretch, tabled.place]
        column = dict(zip(COLUMNS, tabled.gpu_us.T, strict=True))
        idle, starting = column["allocated_idle"], np.minimum(column["allocated_idle"], column["starting"])
        gang = np.minimum(idle - starting, column["gang_waiting"])
        parts: list[tuple[Account, Detail, Whole]] = [(account, "", column[account]) for account in _NOT_IDLE]
        parts += [("allocated_idle", "starting", starting), ("allocated_idle", "gang_waiting", gang)]
        parts.append(("allocated_idle", "running_idle", idle - starting - gang))
        tables = []
        for account, detail, gpu_us in parts:
            there = np.flatnonzero(gpu_us)
            billed = account not in ("unmetered", "down")
            numbers = (
                tabled.key[there], tabled.place[there], np.full(len(there), LINE_ACCOUNTS.index(account)),
                np.full(len(there), DETAILS.index(detail)), number[there] if billed else np.zeros_like(there),
            )  # fmt: skip
            tables.append(np.stack([*numbers, gpu_us[there]], axis=1))
        return cls(tabled.keys, tabled.places, [price for _, price in prices.values()], np.concatenate(tables))

    def charges(self, chosen: Whole) -> list[Charge]:
        """Of these rows."""
        return [
            Charge(
                self.keys[key], self.places[place], LINE_ACCOUNTS[account], gpu_us, self.prices[price], DETAILS[detail]
            )
            for key, place, account, detail, price, gpu_us in self.table[chosen].tolist()
        ]

    def coarser(self, dimensions: int) -> _ChargeColumns:
        """By the first of the dimensions; rows may be equal then."""
        if all(len(key) == dimensions for key in self.keys):
            return self
        return self._told_by([key[:dimensions] for key in self.keys])

    def chosen_by(self, by: Sequence[Dimension], wanted: Sequence[Dimension]) -> list[Charge]:
        """All of them by the wanted of the dimensions, equal ones as one."""
        places = [by.index(name) for name in wanted]
        rows = self._told_by([tuple([key[place] for place in places]) for key in self.keys])
        at, gpu_us = _summed(rows.table[:, :5], rows.table[:, 5])
        return replace(rows, table=np.concatenate([at, gpu_us.reshape(-1, 1)], axis=1)).charges(np.arange(len(at)))

    def _told_by(self, instead: Sequence[tuple[str, ...]]) -> _ChargeColumns:
        """instead: of each key."""
        keys = sorted(set(instead))
        number = {key: place for place, key in enumerate(keys)}
        table = self.table.copy()
        table[:, 0] = np.array([number[key] for key in instead], dtype=np.int64)[table[:, 0]]
        return replace(self, keys=keys, table=table)

    def instead(self, gone: Whole, charges: Sequence[Charge]) -> _ChargeColumns:
        """With these charges in place of those rows; their places and prices are among those that there are."""
        keys = sorted({*self.keys, *(charge.key for charge in charges)})
        number = {key: place for place, key in enumerate(keys)}
        table = np.delete(self.table, gone, axis=0)
        table[:, 0] = np.array([number[key] for key in self.keys], dtype=np.int64)[table[:, 0]]
        place_of = {place: at for at, place in enumerate(self.places)}
        price_of = {price.id if price else "": at for at, price in enumerate(self.prices)}
        more = [
            (number[c.key], place_of[c.place], LINE_ACCOUNTS.index(c.account), DETAILS.index(c.detail),
             price_of[c.row.id if c.row else ""], c.gpu_us)
            for c in charges
        ]  # fmt: skip
        added = np.array(more, dtype=np.int64).reshape(-1, 6)
        return _ChargeColumns(keys, self.places, self.prices, np.concatenate([table, added]))

    def billed(self) -> BilledColumns:
        teams, team = self._teams()
        looks = sorted({(place.gpu_model, place.capacity_type) for place in self.places})
        look_of = np.array(
            [looks.index((place.gpu_model, place.capacity_type)) for place in self.places], dtype=np.int64
        )
        key, place = self.table[:, 0], self.table[:, 1]
        told = np.stack([team[key], look_of[place], *self.table[:, 2:5].T, key], axis=1)
        at, gpu_us = _summed(told, self.table[:, 5])
        first = [0, *(np.flatnonzero((at[1:, :5] != at[:-1, :5]).any(axis=1)) + 1).tolist()] if len(at) else []
        of: dict[LineKey, tuple[Whole, Whole]] = {}
        charges = []
        for begin, end in pairwise([*first, len(at)]):
            paid_by, look, account, detail, number, _ = at[begin].tolist()
            price, (model, capacity) = self.prices[number], looks[look]
            charge = Charge(
                (teams[paid_by],), Place(model, "", "", capacity), LINE_ACCOUNTS[account],
                int(gpu_us[begin:end].sum()), price, DETAILS[detail],
            )  # fmt: skip
            charges.append(charge)
            row = price.id if price else None
            of[charge.key[0], charge.account, charge.detail, model, capacity, row] = at[begin:end, 5], gpu_us[begin:end]
        return BilledColumns(charges, Groups(self.keys, of))

    def _teams(self) -> tuple[list[str], Whole]:
        """Who pays, ascending, and by key the number."""
        teams = sorted({key[0] for key in self.keys})
        number = {team: place for place, team in enumerate(teams)}
        return teams, np.array([number[key[0]] for key in self.keys], dtype=np.int64)


def _by_policy(
    ledger: Questions,
    book: PriceBook,
    rows: _ChargeColumns,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    timezone: str,
) -> _ChargeColumns:
    """Time moved to the teams that the policy bills it to, in the order of `accountant.billing.bills`."""
    billing: Billing = book.billing
    for detail in ("starting", "gang_waiting"):
        if billing.any(detail, "cluster"):
            rows = _to_the_cluster(rows, billing, detail, by)
    guaranteed, spread = billing.any("guaranteed", "owner"), billing.any("unallocated", "spread")
    if not (guaranteed or spread):
        return rows
    free = np.flatnonzero(rows.table[:, 2] == LINE_ACCOUNTS.index("unallocated"))
    unallocated = merged(rows.charges(free))
    if guaranteed:
        unallocated = bills.bill_guarantees(ledger, book, unallocated, billing, start_ms, end_ms, by, timezone)
    if spread:
        told: tuple[Dimension, ...] = tuple(name for name in ("team", "cluster") if name in by)
        unallocated = bills.spread_idle(unallocated, billing, by, bills.weights(rows.chosen_by(by, told), told))
    return rows.instead(free, unallocated)


def _to_the_cluster(rows: _ChargeColumns, billing: Billing, detail: Detail, by: Sequence[Dimension]) -> _ChargeColumns:
    """This start-up time, of the pools whose policy says so, as unallocated."""
    chosen = [getattr(billing.of_pool(place.pool), detail) == "cluster" for place in rows.places]
    of_pool = np.array(chosen, dtype=bool)[rows.table[:, 1]]
    moved = np.flatnonzero(of_pool & (rows.table[:, 3] == DETAILS.index(detail)))
    if not len(moved):
        return rows
    touched = np.unique(rows.table[moved, 0]).tolist()
    instead = {key: bills.paid_by(IDLE, rows.keys[key], by) for key in touched}
    keys = sorted({*rows.keys, *instead.values()})
    number = {key: place for place, key in enumerate(keys)}
    now = np.array([number[key] for key in rows.keys], dtype=np.int64)
    nobody = now.copy()
    nobody[touched] = [number[instead[key]] for key in touched]
    table = rows.table.copy()
    table[:, 0] = now[rows.table[:, 0]]
    table[moved, 0] = nobody[rows.table[moved, 0]]
    return _ChargeColumns(keys, rows.places, rows.prices, table)


def _summed(told: Whole, gpu_us: Whole) -> tuple[Whole, Whole]:
    """The different rows, ascending, and the sum of each."""
    if not len(told):
        return told, gpu_us
    order = np.lexsort(told.T[::-1])
    ordered = told[order]
    first = np.flatnonzero(np.concatenate(([True], (ordered[1:] != ordered[:-1]).any(axis=1))))
    sums: Whole = np.add.reduceat(gpu_us[order], first)
    return ordered[first], sums
