"""Compares the lake with the ledger: per cluster, day and account, to the microsecond and the cent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any, Final
from zoneinfo import ZoneInfo

from sqlglot import exp

from accountant.billing.statements import Statement
from accountant.billing.usage_pricing import charges, quantify
from accountant.lake.query_engines import Bounds, Engine
from accountant.lake.tables import ACCOUNT_COLUMNS
from accountant.lake.usage_rows import day_span
from accountant.ledger.protocols import Questions
from accountant.prices.price_book import PriceBook

_ACCOUNTS: Final = ACCOUNT_COLUMNS[:6]
_CENT: Final = Decimal("0.005")


@dataclass(frozen=True, slots=True)
class LakeComparison:
    """The result of comparing published days with the ledger.

    days: number of compared days.
    differences: one line per day, "" if there is none, in the order of the days."""

    days: int
    differences: tuple[str, ...]


def compare(
    ledger: Questions,
    engine: Engine,
    name: str,
    days: Sequence[tuple[date, PriceBook | None]],
    timezone: ZoneInfo,
) -> LakeComparison:
    """Compares the published days of a ledger with its present records. days: the days to compare, with the price book
    of each; days that begin after the last publication are skipped. Raises LakeUnavailable."""
    if not days:
        return LakeComparison(0, ())
    asked = [day for day, _ in days]
    bounds = Bounds((name,), (min(asked), max(asked)))
    until_ms = max(
        (row["until_ms"] for row in _rows(engine, exp.select("*").from_("ledgers"), name, bounds)), default=0
    )
    totals = {row["day"]: row for row in _rows(engine, exp.select("*").from_("days"), name, bounds)}
    rows: dict[tuple[date, str], dict[str, Any]] = {}
    sums = [exp.cast(exp.func("sum", exp.column(column)), "DECIMAL(38, 0)").as_(column) for column in _ACCOUNTS]
    amount = exp.cast(exp.func("sum", exp.column("cost")), "DECIMAL(38, 9)").as_("cost")
    question = exp.select("day", "cluster", *sums, amount).from_("usage_hourly").group_by("day", "cluster")
    for row in _rows(engine, question, name, bounds):
        rows[row["day"], row["cluster"]] = row
    compared, found = 0, []
    for day, book in days:
        if day not in totals:
            if day_span(day, timezone)[0] < until_ms:
                found.append(f"{day}: not in the table days, which a publication has to have written")
            continue
        compared += 1
        of_day = {cluster: row for (of, cluster), row in rows.items() if of == day}
        found += _of_day(ledger, book, day, totals[day], of_day, timezone)
    return LakeComparison(compared, tuple(found))


def compare_charges(engine: Engine, name: str, stated: Sequence[Statement]) -> list[str]:
    """Compares the table `focus` with statements of past months: what each team owes. Months without charges in the
    lake are skipped. Raises LakeUnavailable."""
    due = exp.cast(exp.func("sum", exp.column("BilledCost")), "DECIMAL(38, 9)").as_("due")
    question = exp.select("month", "SubAccountId", due).from_("focus").group_by("month", "SubAccountId")
    there: dict[str, dict[str, Decimal]] = {}
    for row in _rows(engine, question, name, Bounds((name,))):
        there.setdefault(row["month"], {})[row["SubAccountId"]] = row["due"]
    found = []
    for one in stated:
        of_month = there.get(str(one.month))
        if of_month is None or one.currency is None:
            continue
        for team in sorted({*of_month, *one.due}):
            owed, charged = one.due.get(team, Decimal(0)), of_month.get(team, Decimal(0))
            if owed != charged:
                found.append(f"{one.month} {team}: charges of {charged:f} in the lake and {owed:f} due in the ledger")
    return found


def _of_day(
    ledger: Questions,
    book: PriceBook | None,
    day: date,
    total: dict[str, Any],
    rows: dict[str, dict[str, Any]],
    timezone: ZoneInfo,
) -> list[str]:
    span = total["start_ms"], total["end_ms"]
    found = []
    lines = {line.key["cluster"]: line for line in ledger.usage(*span, ("cluster",), None, timezone.key)}
    for cluster in sorted({*lines, *rows}):
        for column in _ACCOUNTS:
            there = int(rows[cluster][column] or 0) if cluster in rows else 0
            here = getattr(lines[cluster].accounts_gpu_us, column.removesuffix("_us")) if cluster in lines else 0
            if there != here:
                found.append(f"{day} {cluster}: {column} is {there} in the lake and {here} in the ledger")
    if book is None:
        return found
    unpriced_us = 0
    priced = quantify((charge.key, charge) for charge in charges(ledger, book, *span, ("cluster",), None, timezone.key))
    for (cluster,), parts in priced.items():
        unpriced_us += sum(part.gpu_us for part in parts if part.cost is None)
        here_cost = sum((part.cost for part in parts if part.cost is not None), Decimal(0))
        there_cost = (rows[cluster]["cost"] if cluster in rows else None) or Decimal(0)
        if abs(here_cost - there_cost) >= _CENT:
            found.append(f"{day} {cluster}: costs {there_cost:.2f} in the lake and {here_cost:.2f} in the ledger")
    if unpriced_us != total["unpriced_us"]:
        there_us = total["unpriced_us"]
        found.append(f"{day}: {there_us} GPU-µs have no price in the lake, {unpriced_us} have none in the ledger")
    return found


def _rows(engine: Engine, question: exp.Select, name: str, bounds: Bounds) -> list[dict[str, Any]]:
    own = question.where(exp.column("ledger").eq(exp.Literal.string(name)))
    rows: list[dict[str, Any]] = engine.query(own, bounds).to_pylist()
    return rows
