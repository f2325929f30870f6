"""Closes, corrects and prices months: queries the ledger, applies the rules, records acts in the journal.

An act is an entry of the journal, such as a close. The rules are in `month_closing` and `corrections_and_adjustments`.
`Bookkeeper` passes them the ledger's data and records the resulting acts. The statement of a closed month comes from
its stored bytes, never from the ledger again. Corrections, adjustments and credits do not change statement lines. An
act that changes a month or books an amount is recorded only if no act that matters to it was recorded since its author
read the journal. Invoices, and price books for open months, can be recorded at any time.

`act_contents` derives the state from the acts."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

from accountant.billing.cost_allocation import statement
from accountant.billing.statements import BookedItems, Closing, Correction, Statement, for_teams
from accountant.bookkeeping.act_contents import (
    ENTRIES,
    closed_statement,
    closing_act,
    corrections_act,
    fold_acts,
)
from accountant.bookkeeping.corrections_and_adjustments import (
    Proposal,
    chosen_proposal,
    differences,
    of_month,
    proposal,
    repriced_refusals,
)
from accountant.bookkeeping.invoice_reconciliation import Invoice
from accountant.bookkeeping.invoices_and_credits import Credits, Invoices
from accountant.bookkeeping.known_teams import KnownTeams
from accountant.bookkeeping.month_closing import (
    CannotClose,
    ClosedMonth,
    ClosedMonths,
    Objection,
    Status,
    booked_in_month,
    objections,
    refuse_other_currency,
    refuse_out_of_order,
    refuse_reopening,
    refuse_unless_acknowledged,
    waiting_elsewhere,
)
from accountant.bookkeeping.month_drafts import Drafts
from accountant.bookkeeping.price_book_versions import BookVersion, ComposedPriceBook, PriceBooks
from accountant.core.periods import Month, zone
from accountant.ledger.journal import NewAct, record
from accountant.ledger.protocols import MOST_QUARANTINED, Ledger, Moment, Quarantined
from accountant.prices.price_book import PriceBook
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_DAY


class Bookkeeper:
    """Closes, reopens, publishes, corrects and prices months.

    These belong together: a close looks for late changes of earlier months, a price corrects a closed month, and each
    is recorded against the one state of the journal that its rules have seen. What can be understood without a close
    has a class of its own: `prices`, `invoices`, `credits`, `drafts` and `teams`.

    timezone: the time zone of the months.
    grace_days: how long after its end a month waits for late records.
    look_back: number of recent closed months that are always checked for late records."""

    def __init__(
        self, ledger: Ledger, clock: Clock, timezone: str = "UTC", grace_days: int = 5, look_back: int = 12
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._timezone = timezone
        self._zone = zone(timezone)
        self._look_back, self._turn = look_back, 0
        self._grace_ms = grace_days * MS_PER_DAY
        self.prices = PriceBooks(ledger, lambda book: refuse_other_currency(self.books(), book.currency))
        self.invoices = Invoices(ledger, self.prices, clock, timezone, self.books)
        self.credits = Credits(ledger, self.prices, clock, timezone, self.books)
        self.drafts = Drafts(ledger, self.prices, clock, timezone, self.kept)
        self.teams = KnownTeams(ledger, clock, timezone, self.books)
        self._books: ClosedMonths | None = None
        self.waiting: tuple[Proposal, ...] = ()
        """The proposals found at the last check."""
        self._checked: dict[str, Hashable] = {}
        """By closed month, the mark of what the last check has seen."""

    def books(self, moment: Moment | None = None) -> ClosedMonths:
        """The state after all acts of a moment; None: the present one."""
        known = self._books
        if known is not None and known.seen == (moment or self._ledger).status().last_act:
            return known
        with self._ledger.moment() if moment is None else nullcontext(moment) as state:
            found = fold_acts(state.acts(*ENTRIES), state.status().last_act)
        if known is None or known.seen < found.seen:
            self._books = found
        return found

    def closed_ms(self) -> int:
        """The end of the newest closed month, 0 if there is none. Labels of time before it do not change."""
        latest = self.books().latest
        return Month.parse(latest.month).span(self._zone)[1] if latest else 0

    def status(self, month: Month, books: ClosedMonths | None = None) -> Status:
        """The present status of a month."""
        found = (books or self.books()).of(str(month))
        if found is not None:
            return "published" if found.published else "closed"
        end = month.span(self._zone)[1]
        now = self._clock.wall_ms()
        return "open" if now < end else "grace" if now < end + self._grace_ms else "due"

    def month(self, month: Month, teams: Collection[str] | None = None) -> Statement:
        """The statement of a month.

        For a closed month it is decoded from the stored bytes. For an open month it is computed from the present
        records, up to now.

        teams: None for the whole cluster."""
        whole = self.kept(month)
        if whole is None:
            whole = self._open(month, self.books(), self.prices.current)
        return whole if teams is None else for_teams(whole, teams)

    def kept(self, month: Month, books: ClosedMonths | None = None) -> Statement | None:
        """The statement of a closed month, from its stored bytes; None if it is open."""
        closed = (books or self.books()).of(str(month))
        return None if closed is None else closed_statement(closed)

    def beside(self, month: Month) -> BookedItems:
        """The items booked in that month besides its metered time."""
        return booked_in_month(self.books(), month)

    def priced_by(self, kept: Statement | None, books: ClosedMonths | None = None) -> PriceBook | None:
        """The price book of a stored statement. For None, the one in force, after the acts of `books` if given."""
        if kept is not None:
            return self.prices.of(kept.price_book_version)
        return self.prices.current if books is None else self.prices.after(books.seen)

    def standing(self, month: Month, proposals: Sequence[Proposal] | None = None) -> list[Objection]:
        """The objections that have to be acknowledged to close this month.

        proposals: those that wait for a decision. None: they are looked for, which bills every recent closed month."""
        books = self.books()
        if books.of(str(month)) is not None:
            return []
        return self._draft(month, books, proposals)[1]

    def preview(self, month: Month, book: PriceBook) -> tuple[Statement, Statement]:
        """The month's statement at the present prices, and at the prices of `book`.

        For a closed month both are computed from the present records, with all corrections."""
        books = self.books()
        closed = books.of(str(month))
        if closed is not None:
            return self._open(month, books, self.prices.of(closed.priced_by)), self._open(month, books, book)
        composed = self.invoices.composed(book, self.invoices.standing(without=month)).book
        return self._open(month, books, self.prices.current), self._open(month, books, composed)

    def close(self, month: Month, who: str, reason: str = "", acknowledged: Sequence[str] = ()) -> ClosedMonth:
        """Closes the month and stores its statement. Raises CannotClose.

        Open proposals for earlier months have to be acknowledged."""
        end = month.span(self._zone)[1]
        now = self._clock.wall_ms()
        books = self.books()
        before = month.previous.span(self._zone)
        with self._ledger.moment(*before) as moment:
            earlier = moment.usage(before, ()).sum_of_accounts().total > 0
        refuse_out_of_order(books, month, end, now, earlier)
        draft, standing = self._draft(month, books)
        refuse_unless_acknowledged(standing, acknowledged, reason)
        final = replace(
            draft,
            status="closed",
            closing=Closing(now, who, reason, tuple(objection.text for objection in standing)),
            previous_hash=books.latest.hash if books.latest is not None else None,
        )
        record(self._ledger, [closing_act(final)], books.seen)
        return self._closed(month)

    def reopen(self, month: Month, who: str, reason: str) -> None:
        """Reopens the newest closed month. Raises CannotClose."""
        books = self.books()
        refuse_reopening(books, str(month), reason)
        record(self._ledger, [NewAct(self._clock.wall_ms(), "reopened", str(month), who, reason)], books.seen)

    def publish(self, month: Month, who: str, reason: str = "") -> ClosedMonth:
        """Publishes the closed month. It can then not be reopened. Raises CannotClose."""
        books = self.books()
        found = books.of(str(month))
        if found is None:
            raise CannotClose(f"{month} is not closed: close it before you publish it")
        if not found.published:
            record(self._ledger, [NewAct(self._clock.wall_ms(), "published", str(month), who, reason)], books.seen)
        return self._closed(month)

    def correct(self, who: str) -> list[Correction]:
        """Accepts all proposals for all closed months. Returns the new corrections. who: the administrator."""
        books = self.books()
        after, acts = self._corrected(books, who, books.closed)
        if acts:
            record(self._ledger, acts, books.seen)
            self._remember(books.closed, [])
        return list(after.corrections[len(books.corrections) :])

    def proposals(self, month: Month | None = None) -> list[Proposal]:
        """The late changes that wait for a decision.

        With `month` these are the changes of this closed month. Without it they are those of the newest closed months,
        and of the months with a proposal at the last check."""
        books = self.books()
        known = {one.month for one in self.waiting} | {one.month for one in books.closed[-self._look_back :]}
        checked = [one for one in books.closed if one.month == str(month) or (month is None and one.month in known)]
        proposals = self._proposals(books, checked)
        self._remember(checked, proposals)
        return proposals

    def new_proposals(self) -> list[Proposal]:
        """Checks the newest closed months, and one older month in rotation; returns the proposals that the last check
        did not have.

        The check is exact, and its cost does not grow with the number of closed months. A month of which neither
        records nor acts have changed since its last check is not billed again."""
        books = self.books()
        older, newest = books.closed[: -self._look_back], books.closed[-self._look_back :]
        self._turn += 1
        turn = (*older[self._turn % len(older) :][:1], *newest) if older else newest
        marks = {one.month: self._mark(one, books) for one in turn}  # before the check: what comes beside it counts
        checked = [one for one in turn if self._checked.get(one.month) != marks[one.month]]
        known = {one.id for one in self.waiting}
        proposals = self._proposals(books, checked)
        self._remember(checked, proposals)
        self._checked.update(marks)
        return [one for one in proposals if one.id not in known]

    def _mark(self, closed: ClosedMonth, books: ClosedMonths) -> Hashable:
        """A version of all that a closed month's proposal depends on: its records and facts, its own acts, and where
        late changes are booked."""
        month = Month.parse(closed.month)
        decided = tuple(of_month((*books.corrections, *books.refused), closed.month))
        booked = decided, booked_in_month(books, month), books.open_month()
        return closed, booked, self._ledger.status().mark(*month.span(self._zone))

    def accept(self, month: Month, proposal_id: str, who: str, reason: str = "") -> list[Correction]:
        """Accepts a proposal: books it as corrections in the first open month. Raises CannotClose."""
        return list(self._decide("corrected", month, proposal_id, who, reason or "late facts").lines)

    def refuse(self, month: Month, proposal_id: str, who: str, reason: str) -> Proposal:
        """Refuses a proposal: the month stays as stated. Raises CannotClose."""
        if not reason.strip():
            raise CannotClose("the refusal of a proposal needs a reason")
        return self._decide("refused", month, proposal_id, who, reason)

    def _decide(
        self, kind: Literal["corrected", "refused"], month: Month, proposal_id: str, who: str, reason: str
    ) -> Proposal:
        """Records the decision on a proposal. Raises CannotClose."""
        books = self.books()
        closed = books.of(str(month))
        if closed is None:
            raise CannotClose(f"{month} is not closed: its late records count without a decision")
        proposals = self._proposals(books, [closed])
        chosen = chosen_proposal(proposals[0] if proposals else None, str(month), proposal_id)
        act = corrections_act(kind, chosen.month, chosen.lines, who, reason, self._clock.wall_ms())
        record(self._ledger, [act], books.seen)
        self._remember([closed], [])
        return chosen

    def _proposals(
        self, books: ClosedMonths, months: Sequence[ClosedMonth], moment: Moment | None = None
    ) -> list[Proposal]:
        before = len(books.corrections)
        proposals = []
        for closed in months:
            lines = self._corrected(books, "", [closed], moment=moment)[0].corrections[before:]
            if lines:
                proposals.append(proposal(closed.month, lines[0].booked_in, lines))
        return proposals

    def _remember(self, checked: Sequence[ClosedMonth], proposals: Sequence[Proposal]) -> None:
        """Replaces the proposals of these months in `waiting`."""
        months = {one.month for one in checked}
        others = [one for one in self.waiting if one.month not in months]
        self.waiting = tuple(sorted([*others, *proposals], key=lambda one: one.month))

    def take_file(self, book: PriceBook, who: str) -> BookVersion | None:
        """Puts the price book's file in force; returns None if its content has not changed. Months with invoice rates
        keep these. who: names the file. Raises CannotClose."""
        with self.prices.deciding:
            if self.prices.filed(book):
                return None
            return self.prices.enter([self.composed(book)], "file", who, "", self._clock.wall_ms())

    def composed(self, book: PriceBook) -> ComposedPriceBook:
        """The book with the invoice rates of past months. Raises CannotClose."""
        return self.invoices.composed(book, self.invoices.standing())

    def reprice(self, month: Month, book: PriceBook, who: str, reason: str) -> list[Correction]:
        """Puts a book in force and returns the new corrections. Raises CannotClose.

        If the month is closed, it is corrected by this book and no longer uses invoice rates."""
        if not reason.strip():
            raise CannotClose("a re-pricing needs a reason")
        with self.prices.deciding:
            in_force = self.invoices.composed(book, self.invoices.standing(without=month))
            return self._priced(month, ComposedPriceBook(book, book), in_force, who, reason)

    def true_up(self, month: Month, invoice: Invoice, who: str, reason: str) -> tuple[PriceBook, list[Correction]]:
        """Prices the month by the invoice's rates. Raises CannotClose.

        Returns the month's new book, and the corrections if the month is closed."""
        if not reason.strip():
            raise CannotClose("a true-up needs a reason")
        with self.prices.deciding:
            own, in_force = self.invoices.true_up(month, invoice)
            invoice_act = self.invoices.act(month, invoice, who, reason)
            return own.book, self._priced(month, own, in_force, who, reason, [invoice_act])

    def _priced(
        self,
        month: Month,
        own: ComposedPriceBook,
        in_force: ComposedPriceBook,
        who: str,
        reason: str,
        before: Sequence[NewAct] = (),
    ) -> list[Correction]:
        """Puts a book in force, and corrects a closed month by its own book. All acts are recorded together."""
        now = self._clock.wall_ms()
        books = self.books()
        closed = books.of(str(month))
        if closed is None:
            self.prices.enter([in_force], "put", who, reason, now, before=before)
            return []
        if self._proposals(books, [closed]):
            raise CannotClose(
                f"{month} has a proposal from late records: accept or refuse it, then price the month again"
            )
        repriced = replace(closed, priced_by=own.book.version)
        months = tuple(repriced if one.month == closed.month else one for one in books.closed)
        after, corrected = self._corrected(replace(books, closed=months), who, [repriced], own.book)
        repricing = NewAct(now, "repriced", closed.month, who, reason, json.dumps({"priced_by": own.book.version}))
        acts = [repricing, *corrected]
        self.prices.enter([own, in_force], "put", who, reason, now, before=before, after=acts, seen=books.seen)
        return list(after.corrections[len(books.corrections) :])

    def _draft(
        self, month: Month, books: ClosedMonths, proposals: Sequence[Proposal] | None = None
    ) -> tuple[Statement, list[Objection]]:
        """The statement of an open month and the objections to closing it, all from one state of the ledger.

        proposals: those that wait for a decision; None: they are looked for."""
        start, end = month.span(self._zone)
        recent = books.closed[-self._look_back :] if proposals is None else ()
        since = min([start, *(Month.parse(closed.month).span(self._zone)[0] for closed in recent)])
        in_grace = self._clock.wall_ms() < end + self._grace_ms
        with self._ledger.moment(since, end) as moment:
            draft = self._open(month, books, self.prices.current, moment)
            waiting = proposals if proposals is not None else self._proposals(books, recent, moment)
            records = moment.quarantined(MOST_QUARANTINED)
        inside = sum(1 for first, last in map(_span, records) if first < end and last >= start)
        checked = len(records) if len(records) >= MOST_QUARANTINED else None
        found = objections(draft, inside, in_grace, checked, self.prices.current)
        return draft, [*found, *waiting_elsewhere([one.month for one in waiting])]

    def _open(
        self, month: Month, books: ClosedMonths, book: PriceBook | None, moment: Moment | None = None
    ) -> Statement:
        """The statement of a month from the present records, with the items booked in it. The current month
        counts up to now.

        moment: the state of the ledger that is read; None: the present one."""
        start, end = month.span(self._zone)
        end = max(start, min(end, self._clock.wall_ms()))
        # A hash signs one state of the ledger.
        with self._ledger.moment(start, end) if moment is None else nullcontext(moment) as state:
            return statement(state, book, start, end, self._timezone, beside=booked_in_month(books, month))

    def _corrected(
        self,
        books: ClosedMonths,
        who: str,
        months: Sequence[ClosedMonth],
        new: PriceBook | None = None,
        moment: Moment | None = None,
    ) -> tuple[ClosedMonths, list[NewAct]]:
        """The state with late changes of closed months, and the acts that book them.

        new: a book that is not recorded yet and that a month may name.
        moment: as in `_open`."""
        acts: list[NewAct] = []
        corrections = list(books.corrections)
        booked_in = books.open_month()
        for closed in months:
            assert booked_in is not None
            entering = new is not None and closed.priced_by == new.version
            book = new if entering else self.prices.of(closed.priced_by)
            kept = closed_statement(closed)
            reason = "priced again" if closed.priced_by != kept.price_book_version else "late facts"
            present = self._open(Month.parse(closed.month), books, book, moment).every_line
            refused = of_month(books.refused, closed.month)
            elsewhere = repriced_refusals(refused, present) if entering else []
            if elsewhere:
                acts.append(corrections_act("refused", closed.month, elsewhere, who, reason, self._clock.wall_ms()))
            new_corrections = differences(
                kept.every_line,
                [*of_month(corrections, closed.month), *refused, *elsewhere],
                present,
                month=closed.month,
                booked_in=booked_in,
                reason=reason,
                currency=book.currency if book else None,
            )
            if new_corrections:
                corrections += new_corrections
                acts.append(
                    corrections_act("corrected", closed.month, new_corrections, who, reason, self._clock.wall_ms())
                )
        return replace(books, corrections=tuple(corrections)), acts

    def _closed(self, month: Month) -> ClosedMonth:
        found = self.books().of(str(month))
        assert found is not None
        return found


def _span(record: Quarantined) -> tuple[int, int]:
    """The first and last millisecond of a record that was not booked.

    For an interval this is its span. For a pod's facts these are the first and last of their instants, or the time of
    arrival if they have none."""
    content = json.loads(record.content)
    if "start_ms" in content and "end_ms" in content:
        instants = [content["start_ms"], content["end_ms"] - 1]
    else:
        named = [content.get(f"{name}_ms") for name in ("created", "scheduled", "started", "ended")]
        instants = [at for at in named if at is not None] or [content.get("observed_ms", record.received_ms)]
    return min(instants), max(instants)
