"""A month's statement: lines that add up, and the bytes that prove it.

Invariants:
- Every GPU-microsecond of the month's capacity stands on exactly one line, under its team and account.
- Hours have nine decimals and add up; a line's cost is its unit price times its hours, exactly; only what is
  payable is rounded, to the currency's minor unit, so that the teams' amounts add up to the total.
- Equal records, price book and policies give equal bytes, in whatever order the records came.

Closing a month and carrying corrections of closed months come with the periods table; until then a
statement is open and has no corrections. `build` is pure; `statement` only asks the ledger and builds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any, Literal, TypedDict

from accountant.costs import ACCOUNTS, Account, Charge, charges, coverage, quantify
from accountant.ledger import Ledger
from accountant.money import Money, exact_sum, payable, plain
from accountant.periods import Month, zone
from accountant.prices import PriceBook
from accountant.wire import PolicyVersion

SCHEMA = 1
Status = Literal["open", "closed"]


@dataclass(frozen=True, slots=True)
class StatementLine:
    """GPU time of one team in one account on one kind of GPU at one price.

    gpu_hours: nine decimals. unit_price and price_row None: not billed (down, unmetered), or unpriced;
    cost tells which: 0 where the account is not billed, None where a price is missing."""

    team: str
    account: Account
    gpu_model: str
    capacity_type: str
    price_row: str | None
    unit_price: Decimal | None
    gpu_us: int
    gpu_hours: Decimal
    cost: Decimal | None


@dataclass(frozen=True, slots=True)
class Correction:
    """A later fact about a closed month, booked in this one: the reversal and the new amount as one line."""

    month: str
    reason: str
    line: StatementLine


@dataclass(frozen=True, slots=True)
class Statement:
    """Lines of one span, with what is needed to compute them again. month: its name where it is a whole one.

    cost: exact sum of the priced lines. payable: per team, in minor units, adding up to payable_total (None
    without a price book). unpriced_gpu_us: billed time that has no price, and is in no amount."""

    start_ms: int
    end_ms: int
    timezone: str
    month: str | None
    status: Status
    currency: str | None
    price_book_version: str
    policy_versions: tuple[str, ...]
    coverage: float
    lines: tuple[StatementLine, ...]
    gpu_us: int
    gpu_hours: Decimal
    cost: Decimal
    unpriced_gpu_us: int
    payable: dict[str, Decimal]
    payable_total: Decimal | None
    corrections: tuple[Correction, ...] = ()

    @property
    def hash(self) -> str:
        """SHA-256 of `canonical`."""
        return hashlib.sha256(canonical(self)).hexdigest()


def build(
    items: Collection[Charge],
    book: PriceBook | None,
    policies: Iterable[PolicyVersion],
    start_ms: int,
    end_ms: int,
    timezone: str,
) -> Statement:
    """The open statement of a span from all its charges, of whatever grouping that begins with the team.

    Lines are ordered by team, account (as in ACCOUNTS), model, capacity type and price row. Raises
    ValueError for an unknown time zone."""
    lines = _lines(items)
    month = Month.spanning(start_ms, end_ms, zone(timezone))
    currency = book.currency if book else None
    owed = {line.team: Decimal(0) for line in lines if line.cost is not None}
    for line in lines:
        if line.cost is not None:
            owed[line.team] = exact_sum([owed[line.team], line.cost])
    amounts = {} if currency is None else payable({t: Money(a, currency) for t, a in owed.items()}, currency)
    return Statement(
        start_ms=start_ms,
        end_ms=end_ms,
        timezone=timezone,
        month=str(month) if month else None,
        status="open",
        currency=currency,
        price_book_version=book.version if book else "",
        policy_versions=tuple(version.version for version in policies),
        coverage=coverage(items),
        lines=lines,
        **_totals(lines, {team: money.amount for team, money in amounts.items()}, currency),
    )


def for_teams(whole: Statement, teams: Collection[str]) -> Statement:
    """The part of a cluster's statement that concerns these teams: the very lines and amounts of the whole, so
    that no two readers see figures that differ by a cent."""
    lines = tuple(line for line in whole.lines if line.team in teams)
    amounts = {team: amount for team, amount in whole.payable.items() if team in teams}
    corrections = tuple(correction for correction in whole.corrections if correction.line.team in teams)
    return replace(whole, lines=lines, corrections=corrections, **_totals(lines, amounts, whole.currency))


def _lines(items: Iterable[Charge]) -> tuple[StatementLine, ...]:
    rows = [
        (
            (
                charge.key[0],
                str(ACCOUNTS.index(charge.account)),
                charge.place.gpu_model,
                charge.place.capacity_type,
                charge.row.id if charge.billed and charge.row else "",
            ),
            charge,
        )
        for charge in items
    ]
    return tuple(
        StatementLine(
            team=team,
            account=ACCOUNTS[int(account)],
            gpu_model=gpu_model,
            capacity_type=capacity_type,
            price_row=row_id or None,
            unit_price=part.unit_price,
            gpu_us=part.gpu_us,
            gpu_hours=part.gpu_hours,
            cost=part.cost,
        )
        for (team, account, gpu_model, capacity_type, row_id), (part,) in quantify(rows).items()
    )


class _Totals(TypedDict):
    gpu_us: int
    gpu_hours: Decimal
    cost: Decimal
    unpriced_gpu_us: int
    payable: dict[str, Decimal]
    payable_total: Decimal | None


def _totals(lines: Collection[StatementLine], amounts: dict[str, Decimal], currency: str | None) -> _Totals:
    return _Totals(
        gpu_us=sum(line.gpu_us for line in lines),
        gpu_hours=exact_sum(line.gpu_hours for line in lines),
        cost=exact_sum(line.cost for line in lines if line.cost is not None),
        unpriced_gpu_us=sum(line.gpu_us for line in lines if line.cost is None),
        payable=amounts,
        payable_total=exact_sum(amounts.values()) if currency is not None else None,
    )


def statement(
    ledger: Ledger,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    timezone: str = "UTC",
    *,
    teams: Collection[str] | None = None,
) -> Statement:
    """The statement of a span as the ledger stands now; teams None: of the whole cluster.

    The coverage is always that of the cluster."""
    found = charges(ledger, book, start_ms, end_ms, ("team",), None, timezone)
    whole = build(found, book, ledger.policies(start_ms, end_ms), start_ms, end_ms, timezone)
    return whole if teams is None else for_teams(whole, teams)


def canonical(statement: Statement) -> bytes:
    """The statement as JSON with sorted keys, no spaces, and decimals as plain text: one line of UTF-8."""
    content = {"schema": SCHEMA, **asdict(statement)}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_text).encode()


def _text(value: Any) -> str:
    if isinstance(value, Decimal):
        return plain(value)
    raise TypeError(f"no canonical form for {type(value).__name__}")
