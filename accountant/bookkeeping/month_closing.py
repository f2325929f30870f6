"""Decides when a month may be closed or reopened, and computes and verifies the hash of a closed month.

A month is open while it runs, in grace for some days after (late records are expected, and count), then due to be
closed (they still count); closed it keeps its bytes, and published it stays closed. Months close in their order, each
naming the hash of the one before. Only the newest closed month can be opened again, before it is published, with a
reason. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from accountant.billing.statements import Adjustment, Correction, Statement, UnmeteredItems, from_canonical
from accountant.core.periods import Month
from gputally.base.errors import AccountantError
from gputally.base.money import gpu_hours

Status = Literal["open", "grace", "due", "closed", "published"]
"""due: its grace is over, and it waits to be closed."""
Objecting = Literal["grace", "unpriced", "quarantined", "coverage", "proposals"]
MIN_COVERAGE = 0.99
"""Coverage that a month needs to close without an acknowledgement."""


class CannotClose(AccountantError):
    """The month cannot be closed, reopened, published or priced now: why, and what would help. key: where in a price
    book the reason stands, where it is about one."""

    key = "rows"


class OtherCurrency(CannotClose):
    """The price book has another currency than the amounts that are booked."""

    key = "currency"


@dataclass(frozen=True, slots=True)
class Objection:
    """Something that a person has to acknowledge before the month closes."""

    kind: Objecting
    text: str


@dataclass(frozen=True, slots=True)
class ClosedMonth:
    """content: the canonical statement. priced_by: the price book version that corrections are made with: the
    statement's own, or a later one by which the closed month was priced again."""

    month: str
    hash: str
    content: str
    priced_by: str
    at_ms: int
    who: str
    published: bool = False


@dataclass(frozen=True, slots=True)
class ClosedMonths:
    """All acts folded: closed months in order, and what is booked beside the metered time."""

    closed: tuple[ClosedMonth, ...] = ()
    corrections: tuple[Correction, ...] = ()
    adjustments: tuple[Adjustment, ...] = ()
    refused: tuple[Correction, ...] = ()
    """What arrived late for closed months and was not taken up."""
    seen: int = field(default=0)
    """The number of the last act."""

    @property
    def latest(self) -> ClosedMonth | None:
        return self.closed[-1] if self.closed else None

    def of(self, month: str) -> ClosedMonth | None:
        return next((found for found in self.closed if found.month == month), None)

    def open_month(self) -> str | None:
        """The first month that is not closed: where late facts are booked. None before any month was closed."""
        return str(Month.parse(self.latest.month).next) if self.latest else None

    def booked_in(self, month: str, first: str, current: str) -> str:
        """Where a credit or charge about a month is booked: in the first open one; before any was closed in its own, as
        far as the ledger has it (first to current): no statement would ever show it elsewhere."""
        return self.open_month() or min(max(month, first), current)


def booked_in_month(books: ClosedMonths, month: Month) -> UnmeteredItems:
    """What is booked in that month, whichever it is about."""
    name = str(month)
    return UnmeteredItems(
        name,
        tuple(correction for correction in books.corrections if correction.booked_in == name),
        tuple(adjustment for adjustment in books.adjustments if adjustment.booked_in == name),
    )


def booked_later(books: ClosedMonths, month: Month) -> UnmeteredItems:
    """What is booked in other months about that one."""
    name = str(month)
    return UnmeteredItems(
        name,
        tuple(correction for correction in books.corrections if correction.month == name != correction.booked_in),
        tuple(adjustment for adjustment in books.adjustments if adjustment.month == name != adjustment.booked_in),
    )


def objections(stated: Statement, quarantined: int, in_grace: bool) -> list[Objection]:
    """What stands against closing this statement; quarantined: records of the month that were not booked."""
    found = []
    if in_grace:
        found.append(Objection("grace", "late records are still expected: the grace period is not over"))
    if stated.unpriced_gpu_us:
        hours = round(gpu_hours(stated.unpriced_gpu_us), 3)
        found.append(Objection("unpriced", f"{hours} billed GPU-hours have no price"))
    if quarantined:
        found.append(Objection("quarantined", f"{quarantined} records of the month are in quarantine"))
    if stated.coverage < MIN_COVERAGE:
        found.append(
            Objection("coverage", f"{stated.coverage:.2%} of the capacity is metered, less than {MIN_COVERAGE:.0%}")
        )
    return found


def waiting_elsewhere(months: Sequence[str]) -> list[Objection]:
    """months: closed ones for which something waits to be taken up or refused."""
    if not months:
        return []
    return [Objection("proposals", f"what arrived late for {', '.join(months)} waits to be taken up or refused")]


def refuse_unless_acknowledged(standing: Sequence[Objection], acknowledged: Sequence[str], reason: str) -> None:
    """Raises CannotClose naming every objection that was not acknowledged, or a missing reason."""
    left = [objection for objection in standing if objection.kind not in acknowledged]
    if left:
        raise CannotClose(
            "; ".join(objection.text for objection in left)
            + f" (acknowledge {', '.join(objection.kind for objection in left)} with a reason)"
        )
    if standing and not reason.strip():
        raise CannotClose("an acknowledgement needs a reason")


def refuse_out_of_order(books: ClosedMonths, month: Month, end_ms: int, now_ms: int, earlier_records: bool) -> None:
    """Raises CannotClose unless the month is over, open, and the next in the chain."""
    if books.of(str(month)) is not None:
        raise CannotClose(f"{month} is closed already")
    if end_ms > now_ms:
        raise CannotClose(f"{month} is not over")
    if books.latest is not None and str(month) != books.open_month():
        raise CannotClose(f"months close in their order: the next is {books.open_month()}")
    if books.latest is None and earlier_records:
        raise CannotClose(f"{month.previous} has records and is open: close it first")


def refuse_reopening(books: ClosedMonths, month: str, reason: str) -> None:
    """Raises CannotClose unless it is the newest closed month, not published, and a reason is given."""
    found = books.of(month)
    if found is None:
        raise CannotClose(f"{month} is not closed")
    if found.published:
        raise CannotClose(f"{month} is published: what arrives later waits as a proposal for {books.open_month()}")
    assert books.latest is not None
    if books.latest.month != month:
        raise CannotClose(f"{books.latest.month} was closed after {month}: only the newest can be opened again")
    if not reason.strip():
        raise CannotClose("opening a closed month needs a reason")


def refuse_other_currency(books: ClosedMonths, currency: str) -> None:
    """Raises CannotClose for a price book in a currency that no amount is booked in, once some are: they would be
    added up with what is corrected, credited and due from then on."""
    closed = {str(found) for each in books.closed if (found := json.loads(each.content)["currency"]) is not None}
    booked = sorted(closed | {adjustment.currency for adjustment in books.adjustments})
    if booked and currency not in booked:
        raise OtherCurrency(
            f"{currency} is not the currency of these books, which have amounts in {', '.join(booked)}: what is "
            "corrected and credited later would be added up with them (another currency needs a ledger of its own, in "
            "another data folder)"
        )


def faults(books: ClosedMonths) -> list[str]:
    """What is wrong with the kept months themselves: bytes that are not their hash, a chain that does not hold."""
    found = []
    before: ClosedMonth | None = None
    for closed in books.closed:
        stated = from_canonical(closed.content.encode())
        if stated.hash != closed.hash:
            found.append(f"{closed.month}: its bytes have the hash {stated.hash}, not {closed.hash}")
        expected = before.hash if before is not None else None
        if stated.previous_hash != expected:
            found.append(f"{closed.month}: names {stated.previous_hash} as the month before, which has {expected}")
        before = closed
    return found
