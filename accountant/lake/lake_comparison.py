"""Compares what is published in the lake with the ledger: per cluster, day and account, exact to the microsecond and
the cent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any, Final
from zoneinfo import ZoneInfo

from sqlglot import exp

from accountant.billing.charge import quantify
from accountant.billing.statements import Statement
from accountant.billing.usage_pricing import charge_table
from accountant.core.periods import day_span, local_date
from accountant.lake import tables
from accountant.lake.engines.protocol import Engine
from accountant.lake.iceberg_catalog import namespace_of
from accountant.lake.lake_ledger import every_column
from accountant.ledger.protocols import Moment, ReadableLedger
from accountant.prices.price_book import PriceBook

_ACCOUNTS: Final = tables.ACCOUNT_COLUMNS[:6]
_CENT: Final = Decimal("0.005")
"""Half a cent. Costs that differ by less count as equal, because the lake's amounts are rounded."""


@dataclass(frozen=True, slots=True)
class LakeComparison:
    """The result of comparing published days with the ledger.

    days: number of compared days.
    differences: one line of text per difference, in the order of the days."""

    days: int
    differences: tuple[str, ...]


def compare_days(
    ledger: ReadableLedger,
    engine: Engine,
    name: str,
    days: Sequence[tuple[date, PriceBook | None]],
    timezone: ZoneInfo,
) -> LakeComparison:
    """Compares the published days of a ledger with its present records.

    days: the days to compare, with the price book of each. Days that begin after the last publication are skipped.

    Raises LakeUnavailable."""
    if not days:
        return LakeComparison(0, ())
    dates = [day for day, _ in days]
    span = min(dates), max(dates)
    until_ms = max((row["until_ms"] for row in _rows(engine, every_column(tables.LEDGERS), name)), default=0)
    totals = {row["day"]: row for row in _rows(engine, every_column(tables.DAYS), name)}
    rows: dict[tuple[date, str], dict[str, Any]] = {}
    sums = [exp.cast(exp.func("sum", exp.column(column)), "DECIMAL(38, 0)").as_(column) for column in _ACCOUNTS]
    amount = exp.cast(exp.func("sum", exp.column("cost")), "DECIMAL(38, 9)").as_("cost")
    query = exp.select("day", "cluster", *sums, amount).from_("usage_hourly").group_by("day", "cluster")
    for row in _rows(engine, query, name, span):
        rows[row["day"], row["cluster"]] = row
    compared, differences = 0, []
    for day, book in days:
        if day not in totals:
            if day_span(day, timezone)[0] < until_ms:
                differences.append(f"{day}: the table days has no row of this published day")
            continue
        compared += 1
        of_day = {cluster: row for (row_day, cluster), row in rows.items() if row_day == day}
        with ledger.moment(totals[day]["start_ms"], totals[day]["end_ms"]) as moment:
            differences += _day_differences(moment, book, day, totals[day], of_day, timezone)
    return LakeComparison(compared, tuple(differences))


def compare_charges(engine: Engine, name: str, stated: Sequence[Statement]) -> list[str]:
    """Compares the amounts that teams owe by the table `focus` with those of the statements, and returns a line of text
    per difference. Months without charges in the lake are skipped. Raises LakeUnavailable."""
    due = exp.cast(exp.func("sum", exp.column("BilledCost")), "DECIMAL(38, 9)").as_("due")
    query = exp.select("month", "SubAccountId", due).from_("focus").group_by("month", "SubAccountId")
    in_lake: dict[str, dict[str, Decimal]] = {}
    for row in _rows(engine, query, name):
        in_lake.setdefault(row["month"], {})[row["SubAccountId"]] = row["due"]
    differences = []
    for one in stated:
        of_month = in_lake.get(str(one.month))
        if of_month is None or one.currency is None:
            continue
        for team in sorted({*of_month, *one.charged}):
            owed, charged = one.charged.get(team, Decimal(0)), of_month.get(team, Decimal(0))
            if owed != charged:
                differences.append(f"{one.month} {team}: {charged:f} is due in the lake and {owed:f} in the ledger")
    return differences


def hours_are_stated(engine: Engine, name: str, stated: Statement, timezone: ZoneInfo, *, by_team: bool = True) -> bool:
    """Whether the rows of `usage_hourly` have the capacity, the unmetered and down time, the unpriced time and, to the
    cent, the cost of a month's statement. Raises LakeUnavailable.

    by_team: whether the busy time of each team and GPU model is compared, too. A statement bills it as it is recorded,
        unless the price book moves it."""
    days = local_date(stated.start_ms, timezone), local_date(stated.end_ms - 1, timezone)
    columns = ("unmetered_us", "down_us", "unpriced_us")
    sums = {"gpu_us": " + ".join(_ACCOUNTS), **dict(zip(columns, columns, strict=True))}
    first, last = (exp.cast(exp.Literal.string(day.isoformat()), "DATE") for day in days)
    of_month = exp.select().from_("usage_hourly").where(exp.column("day") >= first, exp.column("day") <= last)
    query = of_month.select(
        *(exp.cast(exp.func("sum", exp.maybe_parse(of)), "DECIMAL(38, 0)").as_(to) for to, of in sums.items()),
        exp.cast(exp.func("sum", exp.column("cost")), "DECIMAL(38, 9)").as_("cost"),
    )
    (row,) = _rows(engine, query, name, days)
    unmetered, down = (
        sum(line.gpu_us for line in stated.lines if line.account == account) for account in ("unmetered", "down")
    )
    # Pricing moves no time from or to these two accounts, and all other time is billed.
    time_us = stated.gpu_us, unmetered, down, stated.unpriced_gpu_us
    in_lake = tuple(int(row[name] or 0) for name in sums)
    if in_lake != time_us or abs((row["cost"] or Decimal(0)) - stated.cost) >= _CENT:
        return False
    if not by_team:
        return True
    busy: Counter[tuple[str, str]] = Counter()
    for line in stated.lines:
        if line.account == "busy":
            busy[line.team, line.gpu_model] += line.gpu_us
    time = exp.cast(exp.func("sum", exp.column("busy_us")), "DECIMAL(38, 0)").as_("busy_us")
    query = of_month.select("team", "gpu_model", time).group_by("team", "gpu_model")
    hours = {(row["team"], row["gpu_model"]): int(row["busy_us"]) for row in _rows(engine, query, name, days)}
    return +Counter(hours) == +busy


def _day_differences(
    ledger: Moment,
    book: PriceBook | None,
    day: date,
    total: dict[str, Any],
    rows: dict[str, dict[str, Any]],
    timezone: ZoneInfo,
) -> list[str]:
    span = total["start_ms"], total["end_ms"]
    differences = []
    lines = {line.key["cluster"]: line for line in ledger.usage(span, ("cluster",), None, timezone.key).lines()}
    for cluster in sorted({*lines, *rows}):
        for column in _ACCOUNTS:
            in_lake = int(rows[cluster][column] or 0) if cluster in rows else 0
            in_ledger = getattr(lines[cluster].accounts_gpu_us, column.removesuffix("_us")) if cluster in lines else 0
            if in_lake != in_ledger:
                differences.append(f"{day} {cluster}: {column} is {in_lake} in the lake and {in_ledger} in the ledger")
    if book is None:
        return differences
    unpriced_us = 0
    priced = quantify(
        (charge.key, charge) for charge in charge_table(ledger, book, *span, ("cluster",), None, timezone.key).charges()
    )
    for (cluster,), parts in priced.items():
        unpriced_us += sum(part.gpu_us for part in parts if part.cost is None)
        cost = sum((part.cost for part in parts if part.cost is not None), Decimal(0))
        lake_cost = (rows[cluster]["cost"] if cluster in rows else None) or Decimal(0)
        if abs(cost - lake_cost) >= _CENT:
            differences.append(f"{day} {cluster}: cost is {lake_cost:.2f} in the lake and {cost:.2f} in the ledger")
    if unpriced_us != total["unpriced_us"]:
        differences.append(
            f"{day}: {total['unpriced_us']} GPU-µs are unpriced in the lake and {unpriced_us} in the ledger"
        )
    return differences


def _rows(engine: Engine, query: exp.Select, name: str, days: tuple[date, date] | None = None) -> list[dict[str, Any]]:
    own = query.where(exp.column("ledger").eq(exp.Literal.string(name)))
    rows: list[dict[str, Any]] = engine.query(own, namespace_of(name), days).to_pylist()
    return rows
