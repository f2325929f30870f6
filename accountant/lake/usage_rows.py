"""Makes the rows of one day of `usage_hourly` from the ledger.

The time of a day is split at local hours and where any price changes, so that every piece has one price. Within a day
and price, amounts are rounded cumulatively (running total), so that their sum equals the exact cost to 10⁻⁹."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Protocol
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa

from accountant.billing.usage_pricing import ACCOUNTS, BILLED, charges, quantify, total_cost
from accountant.core.periods import midnight_ms
from accountant.lake.tables import (
    ACCOUNT_COLUMNS,
    COLUMN_OF,
    DECIMALS,
    DIMENSIONS,
    MEMO_COLUMNS,
    USAGE_HOURLY,
    digest,
)
from accountant.ledger.protocols import Questions
from accountant.ledger.usage_columns import PRICED_BY, Place, UsageColumns, Whole
from accountant.prices.price_book import Price, PriceBook
from accountant.storage.span_splitting import local_hours
from accountant.wire.usage_models import Dimension
from gputally.base.units import MS_PER_HOUR, US_PER_MS

_US_PER_HOUR = MS_PER_HOUR * US_PER_MS
_BILLED = [account in BILLED for account in ACCOUNTS]


class DayQuestions(Questions, Protocol):
    """The part of accountant.storage.read_snapshot.Snapshot that is needed to build a day's rows."""

    def usage_columns(
        self, edges: Sequence[int], cuts: Sequence[Sequence[Dimension]], timezone: str = "UTC", *, memos: bool = False
    ) -> list[UsageColumns]: ...


@dataclass(frozen=True, slots=True)
class DayRows:
    """The rows of [start_ms, end_ms) of a local day. accounts: their sums, in the order of costs.ACCOUNTS."""

    day: date
    start_ms: int
    end_ms: int
    rows: pa.Table
    accounts: tuple[int, ...]
    cost: Decimal
    unpriced_us: int

    @property
    def digest(self) -> str:
        """accountant.lake.tables.digest of the rows."""
        return digest(self.rows)


def day_span(day: date, tz: ZoneInfo) -> tuple[int, int]:
    """[start_ms, end_ms) of a local day."""
    return midnight_ms(day, tz), midnight_ms(day + timedelta(days=1), tz)


def day_rows(
    ledger: str,
    moment: DayQuestions,
    book: PriceBook | None,
    day: date,
    timezone: ZoneInfo,
    until_ms: int,
    price_changes: Sequence[int] = (),
) -> DayRows:
    """The rows of a local day; for the current day up to `until_ms`. price_changes: instants at which a price of any
    price book of the ledger changes."""
    start_ms, end_ms = day_span(day, timezone)
    end_ms = max(start_ms, min(end_ms, until_ms))
    hours = local_hours(start_ms, end_ms, timezone) if start_ms < end_ms else ()
    edges = sorted(
        {start_ms, end_ms, *(hour.start_ms for hour in hours), *(at for at in price_changes if start_ms < at < end_ms)}
    )
    (usage,) = moment.usage_columns(edges, (DIMENSIONS,), timezone.key, memos=True)
    assert usage.memos is not None
    order = np.lexsort((usage.place, usage.stretch, usage.key))
    stretch, key, place = usage.stretch[order], usage.key[order], usage.place[order]
    gpu_us, memos = usage.gpu_us[order], usage.memos[order]
    billed_us = gpu_us[:, : len(ACCOUNTS)][:, _BILLED].sum(axis=1)
    priced = _Priced.of(moment, book, edges, usage, stretch, key, place, billed_us, timezone.key)
    begins, ends = np.array(edges[:-1], dtype=np.int64), np.array(edges[1:], dtype=np.int64)
    hour_starts = np.array([hour.start_ms for hour in hours], dtype=np.int64)
    hour_of = hour_starts[np.searchsorted(hour_starts, begins, side="right") - 1] if len(hours) else begins
    size = len(stretch)
    names = dict(zip(DIMENSIONS, _columns_of(usage.keys, len(DIMENSIONS)), strict=True))
    places = dict(zip(PRICED_BY, _columns_of(usage.places, len(PRICED_BY)), strict=True))
    columns: dict[str, object] = {
        "ledger": pa.repeat(ledger, size),
        "day": pa.repeat(pa.scalar(day, pa.date32()), size),
        "hour": pa.array(hour_of[stretch] * 1_000, pa.timestamp("us", tz="UTC")),
        "start_ms": pa.array(begins[stretch]),
        "end_ms": pa.array(ends[stretch]),
        **{COLUMN_OF.get(name, name): names[name].take(pa.array(key)) for name in DIMENSIONS},
        **{name: places[name].take(pa.array(place)) for name in PRICED_BY},
        **{name: pa.array(gpu_us[:, at]) for at, name in enumerate(ACCOUNT_COLUMNS)},
        **{name: pa.array(memos[:, at]) for at, name in enumerate(MEMO_COLUMNS)},
        "currency": pa.array([book.currency if book else None] * size, pa.string()),
        "price_book": pa.array([book.version if book else None] * size, pa.string()),
        **priced.columns(),
    }
    rows = pa.table({column.name: columns[column.name] for column in USAGE_HOURLY.columns}).cast(USAGE_HOURLY.arrow)
    return DayRows(
        day, start_ms, end_ms, rows.combine_chunks(), tuple(gpu_us[:, : len(ACCOUNTS)].sum(axis=0).tolist()),
        sum((cost for cost in priced.costs if cost is not None), Decimal(0)),
        int(sum(us for us, cost in zip(billed_us.tolist(), priced.costs, strict=True) if cost is None)),
    )  # fmt: skip


def _columns_of(keys: Sequence[tuple[str, ...]], width: int) -> list[pa.Array]:
    columns = list(zip(*keys, strict=True)) or [()] * width
    return [pa.array(column, pa.string()) for column in columns]


@dataclass(frozen=True, slots=True)
class _Priced:
    """For each row its price (None: none, or several) and its cost (None: unknown)."""

    prices: Sequence[Price | None]
    costs: Sequence[Decimal | None]

    @classmethod
    def of(
        cls,
        moment: Questions,
        book: PriceBook | None,
        edges: Sequence[int],
        usage: UsageColumns,
        stretch: Whole,
        key: Whole,
        place: Whole,
        billed_us: Whole,
        timezone: str,
    ) -> _Priced:
        if book is not None and not book.by_place(edges[0], edges[-1]):
            return cls._of_charges(moment, book, edges, usage, stretch, key, place, timezone)
        of_place = [
            [None if book is None else book.unit_price(one.gpu_model, begin, *one[1:]) for one in usage.places]
            for begin in edges[:-1]
        ]
        rows = list(zip(stretch.tolist(), place.tolist(), billed_us.tolist(), strict=True))
        until: dict[str, int] = {}
        prices: list[Price | None] = []
        costs: list[Decimal | None] = []
        for at, standing, gpu_us in rows:
            price = of_place[at][standing]
            prices.append(price if gpu_us else None)
            if price is None or not gpu_us:
                costs.append(None if gpu_us else Decimal(0))
                continue
            before = until.get(price.id, 0)
            until[price.id] = before + gpu_us
            costs.append(_amount(price, before + gpu_us) - _amount(price, before))
        return cls(prices, costs)

    @classmethod
    def _of_charges(
        cls,
        moment: Questions,
        book: PriceBook,
        edges: Sequence[int],
        usage: UsageColumns,
        stretch: Whole,
        key: Whole,
        place: Whole,
        timezone: str,
    ) -> _Priced:
        """Prices that depend on more than place and instant: commitments, parts of a MIG GPU, lent time."""
        prices: dict[tuple[int, tuple[str, ...], Place], Price | None] = {}
        costs: dict[tuple[int, tuple[str, ...], Place], Decimal | None] = {}
        for number, (begin, end) in enumerate(pairwise(edges)):
            found = charges(moment, book, begin, end, DIMENSIONS, None, timezone)
            for group, parts in quantify(((*charge.key, *charge.place), charge) for charge in found).items():
                at = number, group[: len(DIMENSIONS)], Place(*group[len(DIMENSIONS) :])
                costs[at] = total_cost(parts)
            for charge in found:
                if charge.billed:
                    at = number, charge.key, charge.place
                    prices[at] = charge.row if prices.get(at, charge.row) == charge.row else None
        rows = [
            (at, usage.keys[named], usage.places[standing])
            for at, named, standing in zip(stretch.tolist(), key.tolist(), place.tolist(), strict=True)
        ]
        quantum = Decimal(1).scaleb(-DECIMALS)
        return cls(
            [prices.get(row) for row in rows],
            [None if (cost := costs.get(row, Decimal(0))) is None else cost.quantize(quantum) for row in rows],
        )

    def columns(self) -> dict[str, pa.Array]:
        amount = pa.decimal128(38, DECIMALS)
        return {
            "price_row": pa.array([price.id if price else None for price in self.prices], pa.string()),
            "unit_price": pa.array([price.price if price else None for price in self.prices], amount),
            "cost": pa.array(self.costs, amount),
        }


def _amount(price: Price, gpu_us: int) -> Decimal:
    """The cost of an amount of time, rounded down to DECIMALS."""
    numerator, denominator = price.price.as_integer_ratio()
    return Decimal(gpu_us * numerator * 10**DECIMALS // (_US_PER_HOUR * denominator)).scaleb(-DECIMALS)
