"""Says what changed the amounts of a month since an earlier state of it, by team and cause.

The ledger keeps no earlier amounts of an open month. A *draft* keeps them: the amounts by team of the time up to a
whole hour, without what is booked beside it, and the version of the prices. The difference from a draft has causes that
add up to it: records of that time that arrived later, the use since, other prices, and the acts (corrections, credits
and charges) recorded since. Without a draft only acts and prices are known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final, Literal

from accountant.billing.statements import Adjustment, Correction, Statement
from accountant.bookkeeping.price_book_versions import BookVersion
from accountant.core.periods import Month
from accountant.ledger.journal import Act
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import IDLE
from gputally.base.money import exact_sum

ChangeCause = Literal["late records", "use since then", "records", "prices", "correction", "credit or charge"]
"""late records: of the draft's time. use since then: of the time after it. records: both, of a month that was closed
since, also with other prices. prices: the present records at the present prices instead of those of then."""


@dataclass(frozen=True, slots=True)
class DraftAmounts:
    """What a draft keeps.

    until_ms: the end of its time, a whole hour.
    charged: by team, without corrections, credits and charges."""

    until_ms: int
    price_book_version: str
    currency: str
    charged: dict[str, Decimal]


@dataclass(frozen=True, slots=True)
class MonthDraft:
    """A draft of a month. act: the number of the act that keeps it."""

    month: str
    act: int
    at_ms: int
    who: str
    reason: str
    amounts: DraftAmounts


@dataclass(frozen=True, slots=True)
class AmountChange:
    """What changed a month's amount of a team.

    amount: None if it is not known, or in two currencies.
    at_ms, act, who: of the act that did it; None and "" for records.
    reason: of the act; of records, which of them."""

    team: str
    cause: ChangeCause
    amount: Decimal | None
    at_ms: int | None = None
    act: int | None = None
    reason: str = ""
    who: str = ""


@dataclass(frozen=True, slots=True)
class AmountSinceDraft:
    """A team's amount of the month when the draft was kept, and now; both with what was booked beside it by then. The
    changes of the team add up to the difference. team: IDLE for what no team is billed for."""

    team: str
    draft: Decimal
    now: Decimal


@dataclass(frozen=True, slots=True)
class MonthChanges:
    """What changed a month's amounts, newest first.

    since_ms: the instant of the draft, or from which on acts and prices count.
    draft: None if none was kept before; the changes by records are not known then.
    teams: the amounts of the draft and of now, by team; empty if one of them is not known, or they are in two
        currencies."""

    month: str
    since_ms: int
    draft: MonthDraft | None
    currency: str | None
    changes: tuple[AmountChange, ...]
    teams: tuple[AmountSinceDraft, ...] = ()


def newest_draft(drafts: Iterable[MonthDraft], since_ms: int | None) -> MonthDraft | None:
    """The newest draft, or the newest one that was kept at an instant or before."""
    known = [draft for draft in drafts if since_ms is None or draft.at_ms <= since_ms]
    return known[-1] if known else None


def of_bookings(
    month: Month, act: Act, corrections: Iterable[Correction], adjustments: Iterable[Adjustment]
) -> Iterator[AmountChange]:
    """The corrections, credits and charges that an act booked in a month."""
    for one in corrections:
        if one.booked_in == str(month):
            reason = ": ".join(filter(None, (f"late records of {one.month}", act.reason)))
            yield AmountChange(one.line.team, "correction", one.amount, act.at_ms, act.number, reason, act.who)
    for other in adjustments:
        if other.booked_in == str(month):
            yield AmountChange(
                other.team, "credit or charge", other.amount, act.at_ms, act.number, other.reason, act.who
            )


def since_draft(
    draft: MonthDraft, booked: Iterable[AmountChange], found: Iterable[AmountChange]
) -> Iterator[AmountSinceDraft]:
    """The amounts of a draft and of now, by team. booked: in the month by then; found: the changes since."""
    before, after = defaultdict[str, Decimal](Decimal, draft.amounts.charged), defaultdict[str, Decimal](Decimal)
    changed = tuple(found)
    if any(one.amount is None for one in changed):
        return
    for sums, rows in ((before, booked), (after, changed)):
        for one in rows:
            sums[one.team] = exact_sum([sums[one.team], one.amount or Decimal(0)])
    for team in sorted({*before, *after}):
        yield AmountSinceDraft(team, before[team], exact_sum([before[team], after[team]]))


def by_payer(teams: Iterable[AmountSinceDraft]) -> tuple[list[AmountSinceDraft], list[AmountSinceDraft]]:
    """The amounts of teams, and those that no team is billed for."""
    known = tuple(teams)
    return [one for one in known if one.team != IDLE], [one for one in known if one.team == IDLE]


def together(teams: Iterable[AmountSinceDraft]) -> AmountSinceDraft:
    """The sums of amounts."""
    known = tuple(teams)
    return AmountSinceDraft("", exact_sum(one.draft for one in known), exact_sum(one.now for one in known))


def told_in(rows: Iterable[AmountChange], currency: str, now: str | None) -> Iterator[AmountChange]:
    """The changes by records, whose amounts are in the currency of the draft. They have none in a month whose amounts
    are now in another currency."""
    for row in rows:
        yield row if currency == now else replace(row, amount=None, reason=f"in {currency}, not in {now}")


def of_prices(measured: Callable[[PriceBook], Statement], then: PriceBook, now: BookVersion) -> Iterator[AmountChange]:
    """The difference of an open month's present records at other prices.

    measured: returns the statement of the records at the prices of a book. now: those in force."""
    if then.version == now.version:
        return
    if then.currency == now.book.currency:
        rows = list(changes("prices", charged(measured(then)), charged(measured(now.book))))
    else:  # amounts of two currencies have no difference
        rows = [AmountChange(team, "prices", None) for team in charged(measured(now.book))]
    told = "" if then.currency == now.book.currency else f"in {now.book.currency}, before in {then.currency}"
    for row in rows:
        yield replace(row, at_ms=now.at_ms, act=now.number, reason=told or now.reason, who=now.who)


def charged(stated: Statement) -> dict[str, Decimal]:
    """What a statement charges each team, and IDLE what is not billed, without corrections, credits and charges."""
    amounts = stated.charged
    booked = [(one.line.team, one.amount) for one in stated.corrections]
    for team, amount in (*booked, *((one.team, one.amount) for one in stated.adjustments)):
        amounts[team] = exact_sum([amounts.get(team, Decimal(0)), -amount])
    return {team: amount for team, amount in amounts.items() if amount}


_RECORDS: Final[Mapping[ChangeCause, str]] = {
    "late records": "of the draft's time; they arrived after it",
    "use since then": "of the time after the draft's",
    "records": "arrived, or priced anew, before the month was closed",
}
"""Which records changed an amount, where no act did."""


def changes(cause: ChangeCause, before: Mapping[str, Decimal], after: Mapping[str, Decimal]) -> Iterator[AmountChange]:
    """The differences of amounts by team."""
    for team in sorted({*before, *after}):
        if amount := exact_sum([after.get(team, Decimal(0)), -before.get(team, Decimal(0))]):
            yield AmountChange(team, cause, amount, reason=_RECORDS.get(cause, ""))
