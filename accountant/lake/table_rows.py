"""Makes rows of the lake's tables: a day of `usage_hourly`, a month of `focus`, `statements` and `statement_lines`.

`usage_hourly`: the time of a day is split at local hours and where any price changes, so that every piece has one
price. Within a day and price, amounts are rounded cumulatively (as a running total), so that their sum equals the exact
cost to 10⁻⁹, also if prices depend on commitments, MIG memory or lent time.

`focus`: the cells are those of the FOCUS 1.4 export (accountant.reports.focus_charge_rows). An exact amount can have
more decimals than the column, so amounts are rounded cumulatively within each team's charges and add up to what the
team owes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_EVEN, Decimal
from itertools import islice
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa

from accountant.billing.charge import BILLED, LINE_ACCOUNTS
from accountant.billing.charge_table import numbered
from accountant.billing.statements import Statement, StatementLine, canonical
from accountant.billing.usage_pricing import PricedUsage, usage_and_charges
from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.gpu_time_accounts import sum_by_key
from accountant.core.periods import day_span, local_hours
from accountant.lake.tables import (
    ACCOUNT_COLUMNS,
    DECIMALS,
    DIMENSIONS,
    FOCUS,
    LABELS,
    MEASURE_COLUMNS,
    USAGE_HOURLY,
    column_of,
    digest,
)
from accountant.ledger.protocols import Moment
from accountant.ledger.usage import ACCOUNTS, MEASURES, PRICED_BY, START_UP, Int64Array, Usage
from accountant.prices.price_book import Price, PriceBook
from accountant.prices.unit_prices import Place
from accountant.reports import focus_charge_rows
from accountant.reports.report_builder import Report
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Dimension, LabelDimension, label_of
from gputally.base.units import US_PER_HOUR

_BILLED: Final = np.array([account in BILLED for account in LINE_ACCOUNTS])
_QUANTUM: Final = Decimal(1).scaleb(-DECIMALS)
_CHUNK: Final = 20_000
"""Number of rows of `focus` that exist as dictionaries at one time."""
_FOCUS_COSTS: Final = ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost")


@dataclass(frozen=True, slots=True)
class DayRows:
    """The rows of [start_ms, end_ms) of a local day.

    accounts: the sums of the six accounts, in the order of ACCOUNT_COLUMNS.
    cost: the sum of the known costs, in `currency`, which is None without a price book.
    unpriced_us: the billed GPU-microseconds without a price."""

    day: date
    start_ms: int
    end_ms: int
    rows: pa.Table
    accounts: tuple[int, ...]
    cost: Decimal
    unpriced_us: int
    currency: str | None

    @property
    def digest(self) -> str:
        """The digest of the rows (accountant.lake.tables.digest)."""
        return digest(self.rows)


def day_rows(
    ledger: str,
    moment: Moment,
    book: PriceBook | None,
    day: date,
    timezone: ZoneInfo,
    until_ms: int,
    changes: Sequence[int] = (),
    labels: Sequence[LabelDimension] = (),
) -> DayRows:
    """The rows of a local day; for the current day up to `until_ms`.

    ledger: the name of the ledger in the lake.
    moment: one with the rows of the day.
    book: the price book of the day's month; None: nothing has a price.
    changes: instants besides the hours at which rows end, because prices or quotas by GPU model change.
    labels: the exported labels of pods."""
    start_ms, end_ms = day_span(day, timezone)
    end_ms = max(start_ms, min(end_ms, until_ms))
    hours = local_hours(start_ms, end_ms, timezone) if start_ms < end_ms else ()
    edges = sorted(
        {start_ms, end_ms, *(hour.start_ms for hour in hours), *(at for at in changes if start_ms < at < end_ms)}
    )
    by = (*DIMENSIONS, *labels)
    usage = _Rows.of(by, *usage_and_charges(moment, book, edges, by, None, timezone.key, (*START_UP, *MEASURES)))
    prices, costs, unpriced_us = usage.amounts()
    begins, ends = np.array(edges[:-1], dtype=np.int64), np.array(edges[1:], dtype=np.int64)
    hour_starts = np.array([hour.start_ms for hour in hours], dtype=np.int64)
    hour_of = hour_starts[np.searchsorted(hour_starts, begins, side="right") - 1] if len(hours) else begins
    size = len(usage.stretch)
    names = dict(zip(by, _columns_of(usage.keys, len(by)), strict=True))
    texts = [_label_text(labels, key[len(DIMENSIONS) :]) for key in usage.keys]
    places = dict(zip(PRICED_BY, _columns_of(usage.places, len(PRICED_BY)), strict=True))
    amount = pa.decimal128(38, DECIMALS)
    columns: dict[str, object] = {
        "ledger": pa.repeat(ledger, size),
        "day": pa.repeat(pa.scalar(day, pa.date32()), size),
        "hour": pa.array(hour_of[usage.stretch] * 1_000, pa.timestamp("us", tz="UTC")),
        "start_ms": pa.array(begins[usage.stretch]),
        "end_ms": pa.array(ends[usage.stretch]),
        **{column_of(name): names[name].take(pa.array(usage.key)) for name in DIMENSIONS},
        **{name: places[name].take(pa.array(usage.place)) for name in PRICED_BY},
        LABELS: pa.array(texts, pa.string()).take(pa.array(usage.key)),
        **{name: pa.array(usage.gpu_us[:, number]) for number, name in enumerate(ACCOUNT_COLUMNS)},
        **{name: pa.array(usage.measures[:, number]) for number, name in enumerate(MEASURE_COLUMNS)},
        "currency": pa.array([book.currency if book else None] * size, pa.string()),
        "price_book": pa.array([book.version if book else None] * size, pa.string()),
        "price_row": pa.array([price.id if price else None for price in prices], pa.string()),
        "unit_price": pa.array([_rounded(price.price) if price else None for price in prices], amount),
        "cost": pa.array(costs, amount),
        "unpriced_us": pa.array(unpriced_us, pa.int64()),
    }
    rows = pa.table({column.name: columns[column.name] for column in USAGE_HOURLY.columns}).cast(USAGE_HOURLY.arrow)
    return DayRows(
        day, start_ms, end_ms, rows.combine_chunks(), tuple(usage.gpu_us[:, : len(ACCOUNTS)].sum(axis=0).tolist()),
        sum((cost for cost in costs if cost is not None), Decimal(0)), sum(unpriced_us),
        book.currency if book else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a day that have time, a measure or a charge, sorted by key, span and place.

    keys, places: sorted, unique; `key` and `place` are indices of them.
    gpu_us: the accounts and their start-up parts, shape (rows, len(ACCOUNT_COLUMNS)).
    measures: shape (rows, len(MEASURE_COLUMNS)).
    prices: None first.
    billed: the billed time of each row at each price, sorted: indices of the row and of the price, shape (parts, 2).
    billed_us: its GPU-µs, shape (parts, 1)."""

    keys: Sequence[tuple[str, ...]]
    places: Sequence[Place]
    stretch: Int64Array
    key: Int64Array
    place: Int64Array
    gpu_us: Int64Array
    measures: Int64Array
    prices: Sequence[Price | None]
    billed: Int64Array
    billed_us: Int64Array

    @classmethod
    def of(cls, by: Sequence[Dimension], usage: Usage, charged: PricedUsage) -> _Rows:
        """The rows of usage by these dimensions, with their charges. Time that pricing moved to where no row is, such
        as the memory of a GPU that no MIG instance has, gets a row without time of its own."""
        known, key = usage.keyed(by)
        named, place = usage.keyed(PRICED_BY)
        keys, key_number = numbered([*known, *charged.keys])
        places, place_number = numbered([*(Place(*names) for names in named), *charged.places])
        figures = usage.columns((*ACCOUNTS, *START_UP, *MEASURES))
        energy_uj = np.array(usage.energy_uj(), dtype=object).astype(np.int64)
        figures[:, len(ACCOUNT_COLUMNS) + MEASURES.index("energy_uj")] = energy_uj
        there = np.any(figures, axis=1)
        billed = _BILLED[charged.numbers[:, 3]] & (charged.gpu_us > 0)
        span, charged_key, charged_place, _, price = charged.numbers[billed].T
        rows, number = _numbered_rows(
            np.concatenate([
                np.column_stack([key_number[key], usage.span, place_number[place]])[there],
                np.column_stack([
                    key_number[len(known) + charged_key], span, place_number[len(named) + charged_place]
                ]),
            ])
        )  # fmt: skip
        of_rows = np.zeros((len(rows), figures.shape[1]), dtype=np.int64)
        of_rows[number[: there.sum()]] = figures[there]
        parts = np.column_stack([number[there.sum() :], price])
        return cls(
            keys, places, rows[:, 1], rows[:, 0], rows[:, 2], of_rows[:, : len(ACCOUNT_COLUMNS)],
            of_rows[:, len(ACCOUNT_COLUMNS) :], charged.prices,
            *sum_by_key(parts, charged.gpu_us[billed].reshape(-1, 1)),
        )  # fmt: skip

    def amounts(self) -> tuple[list[Price | None], list[Decimal | None], list[int]]:
        """For each row its price (None: none, or several), the cost of its time that has a price (None: it has only
        time without a price), and its billed GPU-µs without a price."""
        prices: list[Price | None] = [None] * len(self.key)
        costs: list[Decimal | None] = [Decimal(0)] * len(self.key)
        unpriced_us = [0] * len(self.key)
        totals_us = [0] * len(self.prices)
        last = -1
        for (row, number), (gpu_us,) in zip(self.billed.tolist(), self.billed_us.tolist(), strict=True):
            price, is_first, last = self.prices[number], row != last, row
            prices[row] = price if is_first else None
            if price is None:  # the first part of a row, because None is the first price
                unpriced_us[row], costs[row] = gpu_us, None
                continue
            before = totals_us[number]
            totals_us[number] = before + gpu_us
            costs[row] = (costs[row] or Decimal(0)) + _amount(price, before + gpu_us) - _amount(price, before)
        return prices, costs, unpriced_us


def _numbered_rows(rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The distinct rows, ascending, and for each row its index among them."""
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    is_new = np.concatenate([np.ones(min(1, len(rows)), dtype=bool), (ordered[1:] != ordered[:-1]).any(axis=1)])
    number = np.empty(len(rows), dtype=np.int64)
    number[order] = np.cumsum(is_new) - 1
    return ordered[is_new], number


def _label_text(labels: Sequence[LabelDimension], values: Sequence[str]) -> str | None:
    """The content of the column LABELS of a row with these values of the labels."""
    known = {label_of(name): value for name, value in zip(labels, values, strict=True) if value not in ("", IDLE)}
    return json.dumps(known, ensure_ascii=False, separators=(",", ":"), sort_keys=True) if known else None


def _columns_of(keys: Sequence[tuple[str, ...]], width: int) -> list[pa.Array]:
    columns = list(zip(*keys, strict=True)) or [()] * width
    return [pa.array(column, pa.string()) for column in columns]


def _amount(price: Price, gpu_us: int) -> Decimal:
    """The cost of GPU time, rounded down to DECIMALS."""
    numerator, denominator = price.price.as_integer_ratio()
    return Decimal(gpu_us * numerator * 10**DECIMALS // (US_PER_HOUR * denominator)).scaleb(-DECIMALS)


def focus_rows(ledger: str, month: str, report: Report) -> pa.Table:
    """The charges of a month as rows of the table `focus`. Raises CannotRender without a price book."""
    cells = focus_charge_rows.rows(report, focus_charge_rows.charges(report))
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


def instant(at_ms: int) -> datetime:
    """The instant as the lake's tables have it."""
    return datetime.fromtimestamp(at_ms // 1_000, UTC).replace(microsecond=at_ms % 1_000 * 1_000)
