"""Builds the statement of a month or of another span: lines that add up, payable amounts, canonical bytes.

Invariants:
- Every GPU-microsecond of the span's capacity is on exactly one line. A line is for one paying team and one account.
- Hours have nine decimals and add up. A line's cost is exactly its unit price times its hours. Only payable amounts are
  rounded, to the currency's minor unit, so that the teams' amounts add up to the total.
- The amount due is the payable amount, plus unused commitments, corrections of closed months, and credits and charges
  booked in this one. Only what somebody is billed for is due: the price of time that nothing holds, and of commitments
  without an owner, is `not_billed`.
- Equal records, price book and policies give equal bytes, for any order of arrival. The bytes of a closed month are
  stored and contain the hash of the previous closed month."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from operator import attrgetter, itemgetter
from typing import Literal, TypeAlias, TypedDict, TypeVar

from pydantic import TypeAdapter

from accountant.billing.charge import DETAILS, LINE_ACCOUNTS, Account, Charge, Detail, coverage
from accountant.billing.displayed_amounts import KindKey, divided, kind_of, kinds, of_kinds, of_teams
from accountant.core.periods import Month, zone
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import IDLE, UNASSIGNED, PolicyVersion
from gputally.base.apportionment import apportion
from gputally.base.money import HOUR_PLACES, Money, exact_sum, payable, plain, sum_if_known

SCHEMA = 2
"""Of the canonical bytes. In those of schema 1, `due` and `due_total` include what is not billed, as the team IDLE."""
Status = Literal["open", "closed"]
LineKey: TypeAlias = tuple[str, Account, Detail, str, str, str]
"""Identifies a line of a statement: team, account, detail, GPU model, capacity type, id of the price row or ""."""
K = TypeVar("K", str, LineKey)


@dataclass(frozen=True, slots=True)
class StatementLine:
    """GPU time that one team pays for, in one account, on one kind of GPU at one price.

    detail: see `charge.Detail`.
    gpu_hours: nine decimals.
    unit_price, price_row: None if the time is not billed (down, unmetered) or unpriced.
    cost: 0 if the account is not billed, None if a price is missing.

    In a correction all figures are differences and may be negative. Unpriced time counts as 0 there."""

    team: str
    account: Account
    detail: Detail
    gpu_model: str
    capacity_type: str
    price_row: str | None
    unit_price: Decimal | None
    gpu_us: int
    gpu_hours: Decimal
    cost: Decimal | None

    @property
    def key(self) -> LineKey:
        return self.team, self.account, self.detail, self.gpu_model, self.capacity_type, self.price_row or ""


@dataclass(frozen=True, slots=True)
class Correction:
    """A change of a closed month that is booked in a later month.

    month: the closed month.
    line: the difference from what the month states and its earlier corrections.
    amount: the difference of the cost, rounded to the currency's minor unit (12.34, not 1234)."""

    month: str
    booked_in: str
    reason: str
    line: StatementLine
    amount: Decimal


@dataclass(frozen=True, slots=True)
class Adjustment:
    """An approved credit (negative) or charge. month: the month that it is about."""

    id: str
    month: str
    booked_in: str
    team: str
    amount: Decimal
    currency: str
    reason: str
    who: str
    approved_by: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class Closing:
    """Who closed the month and when. acknowledged: the objections that existed at that time, as text."""

    at_ms: int
    who: str
    reason: str
    acknowledged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BookedItems:
    """What was booked in a month besides metered time. month: the statement's month; None if its span is no calendar
    month."""

    month: str | None = None
    corrections: tuple[Correction, ...] = ()
    adjustments: tuple[Adjustment, ...] = ()


NOTHING_BESIDE = BookedItems()


@dataclass(frozen=True, slots=True)
class Statement:
    """The lines of one span, with the inputs needed to compute them again.

    month: the month of the span, also if it is in progress.
    cost: exact sum of the priced lines.
    unpriced_gpu_us: billed time without a price, which is in no amount.
    payable: per team, rounded to the currency's minor unit (12.34, not 1234). It adds up to payable_total (None without
        a price book).
    commitments: lines of GPU time that was paid for in advance and not used. Of all totals only `due` includes them.
    due: payable plus these commitments (rounded likewise), corrections and adjustments, of everybody who is billed. It
        adds up to due_total.
    not_billed: the same of what nobody is billed for (IDLE); None if there is none, or no price book.
    schema: that of the canonical bytes; a closed month keeps the one that it was closed with.
    previous_hash: hash of the previous closed month."""

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
    due: dict[str, Decimal]
    due_total: Decimal | None
    not_billed: Decimal | None = None
    corrections: tuple[Correction, ...] = ()
    adjustments: tuple[Adjustment, ...] = ()
    commitments: tuple[StatementLine, ...] = ()
    previous_hash: str | None = None
    closing: Closing | None = None
    schema: int = SCHEMA

    @property
    def charged(self) -> dict[str, Decimal]:
        """`due`, and as the team IDLE what is not billed: the sums of all charges."""
        beside = {} if self.not_billed is None else {IDLE: self.not_billed}
        return dict(sorted({**self.due, **beside}.items()))

    @property
    def every_line(self) -> tuple[StatementLine, ...]:
        """The lines of the capacity, and the unused commitments."""
        return (*self.lines, *self.commitments)

    @property
    def metered(self) -> bool:
        """Whether any time of the span is metered."""
        return self.gpu_us > 0 and self.coverage > 0


def invoice_number(month: Month, team: str) -> str:
    """The number of the invoice of a team for a month, the same on pages and in files; that of held time without a team
    is no team's."""
    return f"INV-{month}.no-team" if team == UNASSIGNED else f"INV-{month}-{team}"


def build(
    items: Collection[Charge],
    book: PriceBook | None,
    policies: Iterable[PolicyVersion],
    start_ms: int,
    end_ms: int,
    timezone: str,
    beside: BookedItems = NOTHING_BESIDE,
    unused: Iterable[Charge] = (),
) -> Statement:
    """The open statement of a span, from all its charges with any grouping that begins with the team.

    unused: unused commitments, by owner.

    Lines are ordered by team, account (as in LINE_ACCOUNTS), detail, model, capacity type and price row. Raises
    ValueError for an unknown time zone."""
    lines, commitments = _lines(items), _lines(unused)
    month = Month.spanning(start_ms, end_ms, zone(timezone))
    currency = book.currency if book else None
    amounts = {} if currency is None else of_teams(_costs(lines), currency)
    return Statement(
        start_ms=start_ms,
        end_ms=end_ms,
        timezone=timezone,
        month=beside.month or (str(month) if month else None),
        status="open",
        currency=currency,
        price_book_version=book.version if book else "",
        policy_versions=tuple(version.version for version in policies),
        coverage=coverage(items),
        lines=lines,
        corrections=beside.corrections,
        adjustments=beside.adjustments,
        commitments=commitments,
        **_totals(
            lines,
            commitments,
            amounts,
            currency,
            beside.corrections,
            beside.adjustments,
        ),
    )


def for_teams(whole: Statement, teams: Collection[str]) -> Statement:
    """The part of a cluster's statement that concerns these teams.

    Its lines and amounts are those of the whole statement, so that all readers see equal figures. Only the totals are
    computed again, for these teams."""
    lines = tuple(line for line in whole.lines if line.team in teams)
    commitments = tuple(line for line in whole.commitments if line.team in teams)
    amounts = {team: amount for team, amount in whole.payable.items() if team in teams}
    corrections = tuple(correction for correction in whole.corrections if correction.line.team in teams)
    adjustments = tuple(adjustment for adjustment in whole.adjustments if adjustment.team in teams)
    return replace(
        whole,
        lines=lines,
        corrections=corrections,
        adjustments=adjustments,
        commitments=commitments,
        **_totals(lines, commitments, amounts, whole.currency, corrections, adjustments),
    )


def _lines(items: Iterable[Charge]) -> tuple[StatementLine, ...]:
    """The lines: each kind of time, divided into its details."""
    items = list(items)
    details: dict[KindKey, Counter[int]] = defaultdict(Counter)
    for charge in items:
        details[kind_of(charge.key[0], charge)][DETAILS.index(charge.detail)] += charge.gpu_us
    rows = []
    for kind, part in kinds(items).items():
        team, account, gpu_model, capacity_type, row_id = kind
        numbers = sorted(details[kind])
        nano = apportion(int(part.gpu_hours.scaleb(HOUR_PLACES)), [details[kind][number] for number in numbers])
        for number, units in zip(numbers, nano, strict=True):
            one = replace(part, gpu_us=details[kind][number], gpu_hours=Decimal(units).scaleb(-HOUR_PLACES))
            rows.append(((team, account, number, gpu_model, capacity_type, row_id), one))
    return tuple(
        StatementLine(
            team=team,
            account=LINE_ACCOUNTS[account],
            detail=DETAILS[detail],
            gpu_model=gpu_model,
            capacity_type=capacity_type,
            price_row=row_id or None,
            unit_price=part.unit_price,
            gpu_us=part.gpu_us,
            gpu_hours=part.gpu_hours,
            cost=part.cost,
        )
        for (team, account, detail, gpu_model, capacity_type, row_id), part in sorted(rows, key=itemgetter(0))
    )


def _kind(line: StatementLine) -> KindKey:
    return line.team, LINE_ACCOUNTS.index(line.account), line.gpu_model, line.capacity_type, line.price_row or ""


def _costs(lines: Iterable[StatementLine]) -> dict[KindKey, Decimal | None]:
    """The cost of each kind of time, in order; None if it has no price."""
    costs: dict[KindKey, list[Decimal | None]] = {}
    for line in lines:
        costs.setdefault(_kind(line), []).append(line.cost)
    return {kind: sum_if_known(costs[kind]) for kind in sorted(costs)}


class _Totals(TypedDict):
    gpu_us: int
    gpu_hours: Decimal
    cost: Decimal
    unpriced_gpu_us: int
    payable: dict[str, Decimal]
    payable_total: Decimal | None
    due: dict[str, Decimal]
    due_total: Decimal | None
    not_billed: Decimal | None


def _totals(
    lines: Collection[StatementLine],
    commitments: Collection[StatementLine],
    amounts: dict[str, Decimal],
    currency: str | None,
    corrections: Iterable[Correction],
    adjustments: Iterable[Adjustment],
) -> _Totals:
    owed = dict(amounts)
    for team, amount in (
        *_by_owner(commitments, currency).items(),
        *((correction.line.team, correction.amount) for correction in corrections),
        *((adjustment.team, adjustment.amount) for adjustment in adjustments),
    ):
        owed[team] = exact_sum([owed.get(team, Decimal(0)), amount])
    not_billed = owed.pop(IDLE, None)
    return _Totals(
        gpu_us=sum(line.gpu_us for line in lines),
        gpu_hours=exact_sum(line.gpu_hours for line in lines),
        cost=exact_sum(line.cost for line in lines if line.cost is not None),
        unpriced_gpu_us=sum(line.gpu_us for line in lines if line.cost is None),
        payable=amounts,
        payable_total=exact_sum(amounts.values()) if currency is not None else None,
        due=dict(sorted(owed.items())),
        due_total=exact_sum(owed.values()) if currency is not None else None,
        not_billed=not_billed,
    )


def _by_owner(commitments: Iterable[StatementLine], currency: str | None) -> dict[str, Decimal]:
    """The amount of each owner, rounded to the minor unit separately, so that a team sees the same amount as the
    whole cluster."""
    owed: dict[str, Decimal] = {}
    for line in commitments:
        owed[line.team] = exact_sum([owed.get(line.team, Decimal(0)), line.cost or Decimal(0)])
    if currency is None:
        return {}
    return {
        team: payable({team: Money(amount, currency)}, currency)[team].amount for team, amount in sorted(owed.items())
    }


def canonical(statement: Statement) -> bytes:
    """The statement as JSON with sorted keys, no spaces, and decimals as plain text: one line of UTF-8. A statement
    without commitments has no `commitments`."""
    content = asdict(statement)
    if not statement.commitments:
        del content["commitments"]
    if statement.schema == 1:
        del content["not_billed"]
        content["due"] = statement.charged
        content["due_total"] = None if statement.due_total is None else exact_sum(statement.charged.values())
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=as_text).encode()


_STATEMENT = TypeAdapter(Statement)


def from_canonical(content: bytes) -> Statement:
    """The statement with these `canonical` bytes. Raises ValueError for any other bytes."""
    found = _STATEMENT.validate_json(content)
    if found.schema == 1:
        due = dict(found.due)
        not_billed = due.pop(IDLE, None)
        total = None if found.due_total is None else exact_sum(due.values())
        found = replace(found, due=due, not_billed=not_billed, due_total=total)
    if canonical(found) != content:
        raise ValueError("the bytes are not the canonical form of a statement")
    return found


def as_text(value: object) -> str:
    """An amount as JSON text. Raises TypeError for any other type."""
    if isinstance(value, Decimal):
        return plain(value)
    raise TypeError(f"no canonical form for {type(value).__name__}")


Entry: TypeAlias = tuple[Account, int, Decimal | None]
"""One account's GPU-µs and its cost (None: unpriced)."""


def of_months(whole: Statement, parts: Sequence[Statement]) -> Statement:
    """The statement of a span with the sums of the amounts of its parts, each in one calendar month: a month is charged
    by itself. Quantities and exact costs stay those of the whole span. parts: none for a span in one month."""
    if not parts:
        return whole
    owed, due = (_added(amounts(part) for part in parts) for amounts in (attrgetter("payable"), attrgetter("charged")))
    not_billed = due.pop(IDLE, None)
    return replace(
        whole,
        payable=owed,
        payable_total=None if whole.payable_total is None else exact_sum(owed.values()),
        due=due,
        due_total=None if whole.due_total is None else exact_sum(due.values()),
        not_billed=not_billed,
    )


def _added(several: Iterable[Mapping[K, Decimal]]) -> dict[K, Decimal]:
    """The sums of amounts with the same key, in the order of the keys."""
    found: dict[K, list[Decimal]] = defaultdict(list)
    for amounts in several:
        for key, amount in amounts.items():
            found[key].append(amount)
    return {key: exact_sum(found[key]) for key in sorted(found)}


def payable_lines(stated: Statement, parts: Sequence[Statement] = ()) -> list[tuple[StatementLine, Entry]]:
    """The statement's lines with the amounts that are shown for them (None: unpriced), which add up to its payable
    amounts; see `displayed_amounts`. parts: as of `of_months`."""
    if parts:
        shown = _added(
            {line.key: amount for line, (_, _, amount) in payable_lines(part) if amount is not None} for part in parts
        )
        return [
            (line, (line.account, line.gpu_us, None if line.cost is None else shown.get(line.key, Decimal(0))))
            for line in stated.lines
        ]
    amounts: dict[int, Decimal] = {}
    if stated.currency is not None:
        of_kind: dict[KindKey, dict[int, Decimal]] = defaultdict(dict)
        for i, line in enumerate(stated.lines):
            if line.cost is not None:
                of_kind[_kind(line)][i] = line.cost
        for kind, amount in of_kinds(_costs(stated.lines), stated.currency, stated.payable).items():
            amounts.update(divided(of_kind[kind], stated.currency, amount))
    return [
        (line, (line.account, line.gpu_us, None if line.cost is None else amounts.get(i, line.cost)))
        for i, line in enumerate(stated.lines)
    ]
