"""Decides whether a month may be closed or reopened, hashes its statement, and verifies the stored hashes.

A month passes through these states:

- open: while it runs
- grace: for some days after its end, in which late records still count
- due: until it is closed; late records still count
- closed: its statement no longer changes
- published: it cannot be reopened

Months are closed in order, each with the hash of the previous one. Only the newest closed month can be reopened, before
it is published and with a reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from accountant.billing.statements import Adjustment, BookedItems, Correction, Statement, canonical, from_canonical
from accountant.core.periods import Month
from accountant.prices.price_book import PriceBook
from gputally.base.errors import AccountantError
from gputally.base.money import gpu_hours
from gputally.base.untrusted_text import escaped

Status = Literal["open", "grace", "due", "closed", "published"]
"""`due` means that the grace period is over: the month can be closed unless something objects."""
Objecting = Literal["grace", "unpriced", "quarantined", "coverage", "proposals"]
MIN_COVERAGE = 0.99
"""Coverage that a month needs to be closed without an acknowledgement."""


def statement_hash(statement: Statement) -> str:
    """The hash of a month: SHA-256 of its statement's canonical bytes, in hexadecimal."""
    return hashlib.sha256(canonical(statement)).hexdigest()


_STATES: Final[Mapping[Status, str]] = {
    "open": "the month is not over",
    "grace": "the month is over; late records are waited for",
    "due": "the month is over and not closed yet",
    "closed": "the month is closed and not yet published",
    "published": "the month is published",
}


def state_of(status: Status, unknown: str = "", objecting: int | None = None) -> str:
    """What a month's status means, in the one sentence of pages, commands, API and assistant.

    unknown: of which part of the month nothing is known; "" for none.
    objecting: the number of objections to closing it; None if they were not computed."""
    said = _STATES[status]
    if status == "due" and objecting is not None:
        one = "1 objection is" if objecting == 1 else f"{objecting} objections are"
        said = f"the month can be closed once {one} acknowledged" if objecting else "the month can be closed"
    known_in_part = unknown and status in ("open", "grace", "due")
    return f"{said}, and is known only in part: {unknown}" if known_in_part else said


class CannotClose(AccountantError):
    """The bookkeeping refuses an act, such as closing or pricing a month. The message says why and what to do.

    key: the key of the price book's file that is reported as the place of the fault."""

    key = "rows"


class OtherCurrency(CannotClose):
    """The price book has another currency than the booked amounts."""

    key = "currency"


@dataclass(frozen=True, slots=True)
class Objection:
    """A reason against closing that a person has to acknowledge."""

    kind: Objecting
    text: str


@dataclass(frozen=True, slots=True)
class ClosedMonth:
    """A closed month.

    content: the canonical statement.
    priced_by: the version of the price book that corrections use. This is the statement's own, or a later one by which
        the closed month was priced again."""

    month: str
    hash: str
    content: str
    priced_by: str
    at_ms: int
    who: str
    published: bool = False


@dataclass(frozen=True, slots=True)
class ClosedMonths:
    """The state after all acts: closed months in order, and the items booked besides metered time."""

    closed: tuple[ClosedMonth, ...] = ()
    corrections: tuple[Correction, ...] = ()
    adjustments: tuple[Adjustment, ...] = ()
    refused: tuple[Correction, ...] = ()
    """Late changes of closed months that were refused."""
    seen: int = field(default=0)
    """The number of the last act."""

    @property
    def latest(self) -> ClosedMonth | None:
        return self.closed[-1] if self.closed else None

    def of(self, month: str) -> ClosedMonth | None:
        return next((found for found in self.closed if found.month == month), None)

    def open_month(self) -> str | None:
        """The first month that is not closed, in which late changes are booked. None if no month was ever closed."""
        return str(Month.parse(self.latest.month).next) if self.latest else None

    def booked_in(self, month: str, first: str, current: str) -> str:
        """The month in which a credit or charge about `month` is booked: the first open month.

        If no month was ever closed, it is `month` itself, limited to the ledger's range (first to current). No
        statement would show the amount elsewhere."""
        return self.open_month() or min(max(month, first), current)


def booked_in_month(books: ClosedMonths, month: Month) -> BookedItems:
    """The items booked in that month, about any month."""
    name = str(month)
    return BookedItems(
        name,
        tuple(correction for correction in books.corrections if correction.booked_in == name),
        tuple(adjustment for adjustment in books.adjustments if adjustment.booked_in == name),
    )


def booked_later(books: ClosedMonths, month: Month) -> BookedItems:
    """The items booked in other months about that month."""
    name = str(month)
    return BookedItems(
        name,
        tuple(correction for correction in books.corrections if correction.month == name != correction.booked_in),
        tuple(adjustment for adjustment in books.adjustments if adjustment.month == name != adjustment.booked_in),
    )


_MOST_NAMED = 5
"""GPU models that an objection names at most."""


def objections(
    stated: Statement, quarantined: int, in_grace: bool, checked: int | None = None, book: PriceBook | None = None
) -> list[Objection]:
    """The objections to closing this statement.

    quarantined: number of the month's records that were not booked.
    checked: how many records of the quarantine were checked for this number; None for all.
    book: the present price book, whose rows that nearly match a GPU without a price are named."""
    found = []
    if in_grace:
        found.append(Objection("grace", "late records are still expected: the grace period is not over"))
    if stated.unpriced_gpu_us:
        hours = round(gpu_hours(stated.unpriced_gpu_us), 3)
        found.append(Objection("unpriced", f"{hours} billed GPU-hours have no price{_near_misses(stated, book)}"))
    if quarantined or checked is not None:
        limit = f"; only the newest {checked:,} records of the quarantine were checked" if checked is not None else ""
        found.append(Objection("quarantined", f"{quarantined} records of the month are in quarantine{limit}"))
    if stated.coverage < MIN_COVERAGE:
        found.append(
            Objection("coverage", f"{stated.coverage:.2%} of the capacity is metered, less than {MIN_COVERAGE:.0%}")
        )
    return found


def _near_misses(stated: Statement, book: PriceBook | None) -> str:
    """The GPU models without a price that a row nearly matches, each with this row; "" if there are none."""
    models = sorted({line.gpu_model for line in stated.lines if line.cost is None})
    rows = {model: book.near_row(model) for model in models} if book is not None else {}
    near = [f"{escaped(model)} (row {row.id!r} is for {row.model})" for model, row in rows.items() if row is not None]
    shown = ", ".join(near[:_MOST_NAMED]) + (" ..." if len(near) > _MOST_NAMED else "")
    return f": rows nearly match {shown}" if near else ""


def waiting_elsewhere(months: Sequence[str]) -> list[Objection]:
    """The objection that proposals for these closed months wait for a decision."""
    if not months:
        return []
    return [
        Objection(
            "proposals",
            f"a proposal from late records for {', '.join(months)} waits for a decision: accept or refuse it",
        )
    ]


def refuse_unless_acknowledged(standing: Sequence[Objection], acknowledged: Sequence[str], reason: str) -> None:
    """Raises CannotClose if objections were not acknowledged, or if the reason is missing. The message names the
    objections."""
    left = [objection for objection in standing if objection.kind not in acknowledged]
    if left:
        raise CannotClose(
            "; ".join(objection.text for objection in left)
            + f" (acknowledge {', '.join(objection.kind for objection in left)} with a reason)"
        )
    if standing and not reason.strip():
        raise CannotClose("an acknowledgement needs a reason")


def refuse_out_of_order(books: ClosedMonths, month: Month, end_ms: int, now_ms: int, earlier_records: bool) -> None:
    """Raises CannotClose unless the month is over, open, and the next one to close."""
    if books.of(str(month)) is not None:
        raise CannotClose(f"{month} is closed already")
    if end_ms > now_ms:
        raise CannotClose(f"{month} is not over: close it after its end")
    if books.latest is not None and str(month) != books.open_month():
        raise CannotClose(f"months are closed in order: close {books.open_month()} before {month}")
    if books.latest is None and earlier_records:
        raise CannotClose(f"{month.previous} has records and is open: close it first")


def refuse_reopening(books: ClosedMonths, month: str, reason: str) -> None:
    """Raises CannotClose unless it is the newest closed month, not published, and a reason is given."""
    found = books.of(month)
    if found is None:
        raise CannotClose(f"{month} is not closed: there is nothing to reopen")
    if found.published:
        raise CannotClose(
            f"{month} is published and cannot be reopened: accept the proposal from its late records, or book a "
            f"credit or charge (both are booked in {books.open_month()})"
        )
    assert books.latest is not None
    if books.latest.month != month:
        raise CannotClose(
            f"{month} cannot be reopened: only the newest closed month can, which is {books.latest.month}"
        )
    if not reason.strip():
        raise CannotClose("the reopening of a month needs a reason")


def refuse_other_currency(books: ClosedMonths, currency: str) -> None:
    """Raises CannotClose for a price book in another currency than the amounts booked so far.

    Later corrections, credits and amounts due would be added to these amounts."""
    closed = {str(found) for each in books.closed if (found := json.loads(each.content)["currency"]) is not None}
    booked = sorted(closed | {adjustment.currency for adjustment in books.adjustments})
    if booked and currency not in booked:
        raise OtherCurrency(
            f"{currency} is not the currency of this ledger, which has amounts in {', '.join(booked)}: set that "
            "currency, because later corrections and credits are added to these amounts (another currency needs a "
            "ledger of its own, in another data folder)"
        )


def faults(books: ClosedMonths) -> list[str]:
    """The faults of the stored months: bytes that do not match their hash, or a broken chain of hashes."""
    found = []
    before: ClosedMonth | None = None
    for closed in books.closed:
        stated = from_canonical(closed.content.encode())
        if (hashed := statement_hash(stated)) != closed.hash:
            found.append(f"{closed.month}: the stored statement has the hash {hashed}, but {closed.hash} is recorded")
        expected = before.hash if before is not None else None
        if stated.previous_hash != expected:
            found.append(
                f"{closed.month}: the statement states the hash {stated.previous_hash} for the previous closed month, "
                f"but {expected} is recorded"
            )
        before = closed
    return found
