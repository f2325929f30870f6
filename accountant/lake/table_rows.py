"""Makes rows of the lake's tables: a day of `usage_hourly`, a month of `focus`, `statements` and `statement_lines`.

`usage_hourly`: the time of a day is split at local hours and where any price changes, so that every piece has one
price. Within a day and price, amounts are rounded cumulatively (as a running total), so that their sum equals the exact
cost to 10⁻⁹, also if prices depend on commitments, MIG memory or lent time.

`focus`: the cells are those of the FOCUS 1.4 export (accountant.reports.focus_export). An exact amount can have more
decimals than the column, so amounts are rounded cumulatively within each team's charges and add up to what the team
owes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction
from itertools import islice, pairwise
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa

from accountant.billing.charge import BILLED
from accountant.billing.statements import Statement, StatementLine, canonical
from accountant.billing.usage_pricing import charges
from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.periods import day_span
from accountant.lake.tables import (
    ACCOUNT_COLUMNS,
    COLUMN_OF,
    DECIMALS,
    DIMENSIONS,
    FOCUS,
    MEASURE_COLUMNS,
    USAGE_HOURLY,
    digest,
)
from accountant.ledger.protocols import Questions
from accountant.ledger.usage import ACCOUNTS, MEASURES, PRICED_BY, START_UP, Int64Array, Place, Usage
from accountant.prices.price_book import Price, PriceBook
from accountant.reports import focus_export
from accountant.reports.report_builder import Report
from accountant.storage.read_snapshot import Snapshot
from accountant.storage.span_splitting import local_hours
from gputally.base.units import US_PER_HOUR

_BILLED: Final = [account in BILLED for account in ACCOUNTS]
_QUANTUM: Final = Decimal(1).scaleb(-DECIMALS)
_CHUNK: Final = 20_000
"""Number of rows of `focus` that exist as dictionaries at one time."""
_FOCUS_COSTS: Final = ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost")


@dataclass(frozen=True, slots=True)
class DayRows:
    """The rows of [start_ms, end_ms) of a local day.

    accounts: the sums of the six accounts, in the order of ACCOUNT_COLUMNS.
    cost: the sum of the known costs.
    unpriced_us: the billed GPU-microseconds without a price."""

    day: date
    start_ms: int
    end_ms: int
    rows: pa.Table
    accounts: tuple[int, ...]
    cost: Decimal
    unpriced_us: int

    @property
    def digest(self) -> str:
        """The digest of the rows (accountant.lake.tables.digest)."""
        return digest(self.rows)


def day_rows(
    ledger: str,
    moment: Snapshot,
    book: PriceBook | None,
    day: date,
    timezone: ZoneInfo,
    until_ms: int,
    price_changes: Sequence[int] = (),
) -> DayRows:
    """The rows of a local day; for the current day up to `until_ms`.

    ledger: the name of the ledger in the lake.
    moment: a snapshot with the rows of the day.
    book: the price book of the day's month; None: nothing has a price.
    price_changes: instants at which a price of any price book of the ledger changes."""
    start_ms, end_ms = day_span(day, timezone)
    end_ms = max(start_ms, min(end_ms, until_ms))
    hours = local_hours(start_ms, end_ms, timezone) if start_ms < end_ms else ()
    edges = sorted(
        {start_ms, end_ms, *(hour.start_ms for hour in hours), *(at for at in price_changes if start_ms < at < end_ms)}
    )
    found = moment.usage(edges, (*DIMENSIONS, *PRICED_BY), None, timezone.key, (*START_UP, *MEASURES))
    usage = _Rows.of(found)
    billed_us = usage.gpu_us[:, : len(ACCOUNTS)][:, _BILLED].sum(axis=1).tolist()
    if book is None or book.by_place(edges[0], edges[-1]):
        prices, costs = _priced_by_place(book, edges, usage, billed_us)
    else:
        prices, costs = _priced_by_charges(moment, book, edges, usage, timezone.key)
    begins, ends = np.array(edges[:-1], dtype=np.int64), np.array(edges[1:], dtype=np.int64)
    hour_starts = np.array([hour.start_ms for hour in hours], dtype=np.int64)
    hour_of = hour_starts[np.searchsorted(hour_starts, begins, side="right") - 1] if len(hours) else begins
    size = len(usage.stretch)
    names = dict(zip(DIMENSIONS, _columns_of(usage.keys, len(DIMENSIONS)), strict=True))
    places = dict(zip(PRICED_BY, _columns_of(usage.places, len(PRICED_BY)), strict=True))
    amount = pa.decimal128(38, DECIMALS)
    columns: dict[str, object] = {
        "ledger": pa.repeat(ledger, size),
        "day": pa.repeat(pa.scalar(day, pa.date32()), size),
        "hour": pa.array(hour_of[usage.stretch] * 1_000, pa.timestamp("us", tz="UTC")),
        "start_ms": pa.array(begins[usage.stretch]),
        "end_ms": pa.array(ends[usage.stretch]),
        **{COLUMN_OF.get(name, name): names[name].take(pa.array(usage.key)) for name in DIMENSIONS},
        **{name: places[name].take(pa.array(usage.place)) for name in PRICED_BY},
        **{name: pa.array(usage.gpu_us[:, number]) for number, name in enumerate(ACCOUNT_COLUMNS)},
        **{name: pa.array(usage.measures[:, number]) for number, name in enumerate(MEASURE_COLUMNS)},
        "currency": pa.array([book.currency if book else None] * size, pa.string()),
        "price_book": pa.array([book.version if book else None] * size, pa.string()),
        "price_row": pa.array([price.id if price else None for price in prices], pa.string()),
        "unit_price": pa.array([_rounded(price.price) if price else None for price in prices], amount),
        "cost": pa.array(costs, amount),
    }
    rows = pa.table({column.name: columns[column.name] for column in USAGE_HOURLY.columns}).cast(USAGE_HOURLY.arrow)
    return DayRows(
        day, start_ms, end_ms, rows.combine_chunks(), tuple(usage.gpu_us[:, : len(ACCOUNTS)].sum(axis=0).tolist()),
        sum((cost for cost in costs if cost is not None), Decimal(0)),
        sum(gpu_us for gpu_us, cost in zip(billed_us, costs, strict=True) if cost is None),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a relation of usage that have time, by key, span and place.

    keys, places: sorted, unique; `key` and `place` are indices of them.
    gpu_us: the accounts and their start-up parts, shape (rows, len(ACCOUNT_COLUMNS)).
    measures: shape (rows, len(MEASURE_COLUMNS))."""

    keys: Sequence[tuple[str, ...]]
    places: Sequence[Place]
    stretch: Int64Array
    key: Int64Array
    place: Int64Array
    gpu_us: Int64Array
    measures: Int64Array

    @classmethod
    def of(cls, usage: Usage) -> _Rows:
        keys, key = usage.keyed(DIMENSIONS)
        places, place = usage.keyed(PRICED_BY)
        gpu_us, measures = usage.columns((*ACCOUNTS, *START_UP)), usage.columns(MEASURES)
        measures[:, MEASURES.index("energy_uj")] = np.array(usage.energy_uj(), dtype=object).astype(np.int64)
        order = np.lexsort((place, usage.span, key))
        order = order[np.any(np.column_stack([gpu_us, measures]), axis=1)[order]]
        return cls(
            keys, [Place(*names) for names in places], usage.span[order], key[order], place[order], gpu_us[order],
            measures[order],
        )  # fmt: skip


def _columns_of(keys: Sequence[tuple[str, ...]], width: int) -> list[pa.Array]:
    columns = list(zip(*keys, strict=True)) or [()] * width
    return [pa.array(column, pa.string()) for column in columns]


_PricesAndCosts = tuple[list[Price | None], list[Decimal | None]]
"""For each row its price (None: none, or several) and its cost (None: unknown)."""


def _priced_by_place(
    book: PriceBook | None, edges: Sequence[int], usage: _Rows, billed_us: Sequence[int]
) -> _PricesAndCosts:
    of_place = [
        [None if book is None else book.unit_price(one.gpu_model, begin, *one[1:]) for one in usage.places]
        for begin in edges[:-1]
    ]
    totals_us: dict[str, int] = {}
    prices: list[Price | None] = []
    costs: list[Decimal | None] = []
    for stretch, place, gpu_us in zip(usage.stretch.tolist(), usage.place.tolist(), billed_us, strict=True):
        price = of_place[stretch][place]
        prices.append(price if gpu_us else None)
        if price is None or not gpu_us:
            costs.append(None if gpu_us else Decimal(0))
            continue
        before = totals_us.get(price.id, 0)
        totals_us[price.id] = before + gpu_us
        costs.append(_amount(price, before + gpu_us) - _amount(price, before))
    return prices, costs


def _priced_by_charges(
    moment: Questions, book: PriceBook, edges: Sequence[int], usage: _Rows, timezone: str
) -> _PricesAndCosts:
    """The prices and costs of all rows, for a price book whose prices depend on more than place and instant
    (commitments, parts of a MIG GPU, lent time)."""
    prices: dict[tuple[int, tuple[str, ...], Place], Price | None] = {}
    exact: dict[tuple[int, tuple[str, ...], Place], Fraction | None] = {}
    for stretch, (begin, end) in enumerate(pairwise(edges)):
        for charge in charges(moment, book, begin, end, DIMENSIONS, None, timezone):
            if charge.billed:
                row = stretch, charge.key, charge.place
                prices[row] = charge.row if prices.get(row, charge.row) == charge.row else None
                before = exact.get(row, Fraction(0))
                exact[row] = (
                    before + Fraction(charge.row.price) * charge.gpu_us / US_PER_HOUR
                    if charge.row is not None and before is not None
                    else None
                )
    rows = [
        (stretch, usage.keys[key], usage.places[place])
        for stretch, key, place in zip(usage.stretch.tolist(), usage.key.tolist(), usage.place.tolist(), strict=True)
    ]
    of_rows = [prices.get(row) for row in rows]
    costs: list[Decimal | None] = []
    totals: dict[str, Fraction] = {}
    for row, price in zip(rows, of_rows, strict=True):
        cost, name = exact.get(row, Fraction(0)), "" if price is None else price.id
        if cost is None:
            costs.append(None)
            continue
        before = totals.get(name, Fraction(0))
        totals[name] = before + cost
        costs.append(_rounded_down(before + cost) - _rounded_down(before))
    return of_rows, costs


def _amount(price: Price, gpu_us: int) -> Decimal:
    """The cost of GPU time, rounded down to DECIMALS."""
    numerator, denominator = price.price.as_integer_ratio()
    return Decimal(gpu_us * numerator * 10**DECIMALS // (US_PER_HOUR * denominator)).scaleb(-DECIMALS)


def _rounded_down(amount: Fraction) -> Decimal:
    return Decimal(amount.numerator * 10**DECIMALS // amount.denominator).scaleb(-DECIMALS)


def focus_rows(ledger: str, month: str, report: Report) -> pa.Table:
    """The charges of a month as rows of the table `focus`. Raises CannotRender without a price book."""
    cells = focus_export.rows(report, focus_export.charges(report))
    totals: dict[tuple[str, str], Decimal] = {}
    chunks = []
    while chunk := list(islice(cells, _CHUNK)):
        rows = [_focus_row(row, totals) | {"ledger": ledger, "month": month} for row in chunk]
        chunks.append(pa.Table.from_pylist(rows, schema=FOCUS.arrow))
    if not chunks:
        return FOCUS.arrow.empty_table()
    return pa.concat_tables(chunks).sort_by([(name, "ascending") for name in FOCUS.order])


def _focus_row(cells: dict[str, str], totals: dict[tuple[str, str], Decimal]) -> dict[str, Any]:
    """The cells in the types of the columns; empty cells are left out. totals: the exact running totals by team and
    column, to which the row's amounts are added."""
    row: dict[str, Any] = {}
    for column in FOCUS.columns:
        text = cells.get(column.name, "")
        if not text:
            continue
        if column.name in _FOCUS_COSTS:
            team_and_column = cells["SubAccountId"], column.name
            before = totals.get(team_and_column, Decimal(0))
            totals[team_and_column] = before + Decimal(text)
            row[column.name] = _rounded(totals[team_and_column]) - _rounded(before)
        elif column.type == "decimal":
            row[column.name] = _rounded(Decimal(text))
        elif column.type == "timestamptz":
            row[column.name] = datetime.fromisoformat(text)
        else:
            row[column.name] = text
    return row


def _rounded(amount: Decimal) -> Decimal:
    return amount.quantize(_QUANTUM, ROUND_HALF_EVEN)


def statement_row(ledger: str, month: str, status: str, stated: Statement) -> dict[str, Any]:
    """The row of a month in the table `statements`."""
    return {
        "ledger": ledger, "month": month, "status": status, "timezone": stated.timezone, "currency": stated.currency,
        "price_book": stated.price_book_version or None, "gpu_us": stated.gpu_us, "cost": stated.cost,
        "payable": stated.payable_total, "due": stated.due_total, "unpriced_gpu_us": stated.unpriced_gpu_us,
        "hash": statement_hash(stated), "canonical": canonical(stated).decode(),
    }  # fmt: skip


def line_rows(ledger: str, month: str, stated: Statement) -> list[dict[str, Any]]:
    """The rows of a month in the table `statement_lines`."""
    kinds = [("usage", line) for line in stated.lines] + [("commitment", line) for line in stated.commitments]
    rows = [_line(kind, line, None) for kind, line in kinds]
    rows += [_line("correction", one.line, one.amount, one.month, one.reason) for one in stated.corrections]
    rows += [
        {
            "kind": "adjustment", "team": one.team, "cost": one.amount, "currency": one.currency,
            "about_month": one.month, "reason": one.reason,
        }
        for one in stated.adjustments
    ]  # fmt: skip
    return [
        {"currency": stated.currency, **row, "ledger": ledger, "month": month, "line": number}
        for number, row in enumerate(rows, 1)
    ]


def _line(
    kind: str, line: StatementLine, amount: Any, about: str | None = None, reason: str | None = None
) -> dict[str, Any]:
    names = (
        "team", "account", "detail", "gpu_model", "capacity_type", "price_row", "unit_price", "gpu_us", "gpu_hours",
    )  # fmt: skip
    return {
        **{name: getattr(line, name) for name in names},
        "kind": kind,
        "cost": amount if kind == "correction" else line.cost,
        "about_month": about,
        "reason": reason,
    }
