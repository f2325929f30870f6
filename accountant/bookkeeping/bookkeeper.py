"""Closes and prices months, compares them with invoices and books amounts: queries the ledger, applies the rules,
records acts in the journal.

An act is an entry of the journal, such as a close. The rules are in `month_closing` and `corrections_and_adjustments`.
The classes here pass them the ledger's data and record the resulting acts. The statement of a closed month comes from
its stored bytes, never from the ledger again. Corrections, adjustments and credits do not change statement lines. An
act that changes a month or books an amount is recorded only if no act that matters to it was recorded since its author
read the journal. Invoices, and price books for open months, can be recorded at any time.

`fold_acts` derives the state from the acts. The content of these acts is encoded and decoded only in this module.
Content that was recorded stays readable in later releases."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Final, Literal

import structlog
from pydantic import TypeAdapter

from accountant.billing.charge import Charge
from accountant.billing.cost_allocation import bills, statement, unused_commitments
from accountant.billing.statements import (
    Adjustment,
    BookedItems,
    Closing,
    Correction,
    Statement,
    as_text,
    canonical,
    for_teams,
    from_canonical,
)
from accountant.bookkeeping.corrections_and_adjustments import (
    CreditLine,
    NewAdjustment,
    NodeSpan,
    Proposal,
    booked,
    chosen_proposal,
    credit_lines,
    differences,
    of_month,
    proposal,
    refuse_equal,
    refuse_twice,
    repriced_refusals,
)
from accountant.bookkeeping.invoice_reconciliation import (
    Invoice,
    KeptInvoice,
    Reconciliation,
    TrueUp,
    reconcile,
    true_up,
    trued_up,
)
from accountant.bookkeeping.month_changes import (
    DraftAmounts,
    MonthChanges,
    MonthDraft,
    changes,
    charged,
    newest_draft,
    of_bookings,
    of_prices,
    of_records,
    told_in,
)
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
    statement_hash,
    waiting_elsewhere,
)
from accountant.bookkeeping.price_book_versions import BookVersion, ComposedPriceBook, PriceBooks
from accountant.core.periods import Month, local_date, zone
from accountant.ledger.journal import Act, ActKind, NewAct, record, retry_when_books_moved
from accountant.ledger.protocols import MOST_QUARANTINED, Ledger, Moment, Quarantined
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import IDLE, UNASSIGNED
from gputally.base.clock import Clock
from gputally.base.instants import midnight_ms
from gputally.base.near_names import nearest, shown
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR


class _Books:
    """What `Invoices` and `Credits` have in common.

    timezone: the time zone of the months.
    books: returns the state after all acts."""

    def __init__(
        self, ledger: Ledger, prices: PriceBooks, clock: Clock, timezone: str, books: Callable[[], ClosedMonths]
    ) -> None:
        self._ledger = ledger
        self._prices = prices
        self._clock = clock
        self._timezone = timezone
        self._zone = zone(timezone)
        self._books = books


class Invoices(_Books):
    """Compares invoices with months, stores them, and derives prices from them."""

    def reconcile(self, month: Month, invoice: Invoice) -> Reconciliation:
        """Compares the invoice with the month's bills from the present records.

        Raises CannotClose without a price book, if the invoice is in another currency, or if nothing of the month is
        metered: what its bills were is unknown then, not 0."""
        book = self._of(month).book
        billed = self._bills(month, book)
        if all(charge.account in ("unmetered", "unused_commitment") for charge in billed):
            raise CannotClose(
                f"nothing of {month} is metered, so its bills are unknown and cannot be compared with an invoice: "
                "choose a month with records"
            )
        return reconcile(str(month), invoice, billed, book.currency)

    def newest(self, month: Month) -> KeptInvoice | None:
        """The newest stored invoice of that month; None if there is none."""
        with self._ledger.moment() as moment:
            acts = moment.acts("invoiced", subject=str(month))
        if not acts:
            return None
        return KeptInvoice(act=acts[-1].number, invoice=Invoice.model_validate_json(acts[-1].content))

    def keep(self, month: Month, invoice: Invoice, who: str, reason: str) -> None:
        """Stores the invoice, unless it equals the newest stored one. Raises CannotClose as `reconcile` does."""
        self.reconcile(month, invoice)
        known = self.newest(month)
        if known is None or known.invoice != invoice:
            record(self._ledger, [self.act(month, invoice, who, reason)], None)

    def act(self, month: Month, invoice: Invoice, who: str, reason: str) -> NewAct:
        """The act that stores the invoice."""
        return NewAct(self._clock.wall_ms(), "invoiced", str(month), who, reason, invoice.model_dump_json())

    def true_up(self, month: Month, invoice: Invoice) -> tuple[ComposedPriceBook, ComposedPriceBook]:
        """The price book of the month and the price book in force after a true-up with the invoice. Raises
        CannotClose.

        For an open month, both are the same."""
        self.reconcile(month, invoice)  # raises if the invoice is refused
        own = self._of(month)
        new = true_up(invoice, self._bills(month, own.book), str(month))
        latest = self._prices.latest
        assert latest is not None, "the month has a book"
        in_force = self.composed(latest.base, _with(self.standing(), new))
        if self._books().of(str(month)) is None:
            return in_force, in_force
        return self.composed(own.base, _with(own.true_ups, new)), in_force

    def standing(self, without: Month | None = None) -> list[TrueUp]:
        """The true-ups that apply to the price book in force: those of months that are not published. without: a month
        whose true-up is left out."""
        latest, books = self._prices.latest, self._books()
        applying = []
        for one in latest.true_ups if latest is not None else ():
            closed = books.of(one.month)
            if one.month != str(without) and (closed is None or not closed.published):
                applying.append(one)
        return applying

    def composed(self, base: PriceBook, true_ups: Iterable[TrueUp]) -> ComposedPriceBook:
        """The price book with these true-ups. Raises CannotClose if one cannot be applied."""
        book, ordered = base, tuple(sorted(true_ups, key=lambda one: one.month))
        for one in ordered:
            month = Month.parse(one.month)
            try:
                book = trued_up(book, one, self._bills(month, book), month.span(self._zone))
            except (ValueError, CannotClose) as error:
                raise CannotClose(f"the invoice of {month}: {error}") from error
        return ComposedPriceBook(book, base, ordered)

    def _of(self, month: Month) -> ComposedPriceBook:
        """The price book of the month. Raises CannotClose."""
        closed = self._books().of(str(month))
        version = self._prices.version(closed.priced_by) if closed is not None else self._prices.latest
        if version is None:
            raise CannotClose(
                "there is no price book, so the month has no costs to compare with an invoice: set `prices: FILE`"
            )
        return version

    def _bills(self, month: Month, book: PriceBook) -> list[Charge]:
        start, end = month.span(self._zone)
        end = max(start, min(end, self._clock.wall_ms()))
        with self._ledger.moment(start, end) as moment:
            billed = bills(moment, book, start, end, ("team",), self._timezone)
            return [*billed, *unused_commitments(moment, book, start, end, self._timezone)]


def _with(true_ups: Iterable[TrueUp], new: TrueUp) -> list[TrueUp]:
    """The true-ups with the rates of one more invoice."""
    of_month = {one.month: one for one in true_ups}
    return list((of_month | {new.month: new.after(of_month.get(new.month))}).values())


ENTRIES: Final[tuple[ActKind, ...]] = (
    "closed", "reopened", "published", "repriced", "corrected", "refused", "adjusted",
)  # fmt: skip
"""The kinds of acts that `fold_acts` uses."""
_CREDITED = "credited"
"""Key in an adjustment's content: the node and span that it is for."""
_CORRECTIONS = TypeAdapter(tuple[Correction, ...])
_ADJUSTMENT = TypeAdapter(Adjustment)
_DRAFT = TypeAdapter(DraftAmounts)


def fold_acts(acts: Iterable[Act], seen: int) -> ClosedMonths:
    """The state after acts of the kinds in `ENTRIES`, in the order of recording.

    seen: the number of the last act of any kind."""
    closed: dict[str, ClosedMonth] = {}
    corrections: list[Correction] = []
    adjustments: list[Adjustment] = []
    refused: list[Correction] = []
    for act in acts:
        match act.kind:
            case "closed":
                content = json.loads(act.content)
                closed[act.subject] = ClosedMonth(
                    act.subject, content["hash"], content["statement"], content["priced_by"], act.at_ms, act.who
                )
            case "reopened":
                closed.pop(act.subject, None)
                # Corrections of a reopened month are part of the month again.
                corrections = [correction for correction in corrections if correction.month != act.subject]
                refused = [one for one in refused if one.month != act.subject]
            case "published":
                closed[act.subject] = replace(closed[act.subject], published=True)
            case "repriced":
                closed[act.subject] = replace(closed[act.subject], priced_by=json.loads(act.content)["priced_by"])
            case "corrected":
                corrections += _CORRECTIONS.validate_json(act.content)
            case "refused":
                refused += _CORRECTIONS.validate_json(act.content)
            case "adjusted":
                adjustments.append(_ADJUSTMENT.validate_json(act.content))
    return ClosedMonths(
        tuple(closed[name] for name in sorted(closed)), tuple(corrections), tuple(adjustments), tuple(refused), seen
    )


def closed_statement(closed: ClosedMonth) -> Statement:
    """The statement of a closed month, from its stored bytes."""
    return from_canonical(closed.content.encode())


def credited_spans(acts: Iterable[Act]) -> list[NodeSpan]:
    """The spans of nodes for which these acts book credits."""
    contents = [json.loads(act.content) for act in acts if act.kind == "adjusted"]
    return [NodeSpan.model_validate(content[_CREDITED]) for content in contents if _CREDITED in content]


def closing_act(final: Statement) -> NewAct:
    """The act that closes a month with this statement."""
    assert final.month is not None
    assert final.closing is not None
    content = {
        "statement": canonical(final).decode(),
        "hash": statement_hash(final),
        "priced_by": final.price_book_version,
    }
    by = final.closing
    return NewAct(by.at_ms, "closed", final.month, by.who, by.reason, json.dumps(content))


def corrections_act(
    kind: Literal["corrected", "refused"], month: str, lines: Sequence[Correction], who: str, reason: str, at_ms: int
) -> NewAct:
    """The act that books or refuses corrections of one closed month."""
    return NewAct(at_ms, kind, month, who, reason, json.dumps([asdict(line) for line in lines], default=as_text))


def adjustment_act(adjustment: Adjustment, span: NodeSpan | None = None) -> NewAct:
    """The act that books an adjustment. span: the node and time of a node's credit."""
    content = asdict(adjustment)
    if span is not None:
        content[_CREDITED] = span.model_dump(mode="json")
    return NewAct(
        adjustment.at_ms, "adjusted", adjustment.month, adjustment.who, adjustment.reason,
        json.dumps(content, default=as_text),
    )  # fmt: skip


def booked_by(act: Act) -> tuple[tuple[Correction, ...], tuple[Adjustment, ...]]:
    """The corrections and adjustments that an act booked."""
    if act.kind == "corrected":
        return _CORRECTIONS.validate_json(act.content), ()
    return (), (_ADJUSTMENT.validate_json(act.content),) if act.kind == "adjusted" else ()


def _draft_of(act: Act) -> MonthDraft:
    return MonthDraft(act.subject, act.number, act.at_ms, act.who, act.reason, _DRAFT.validate_json(act.content))


class Credits(_Books):
    """Books approved credits and charges."""

    @retry_when_books_moved
    def adjust(self, new: NewAdjustment, who: str) -> Adjustment:
        """Books an approved credit or charge in the first open month, or in its own month if none was ever closed.

        Raises CannotClose, also for one that is booked already: a caller whose answer was lost sends it again."""
        books = self._books()
        adjustment = self._adjustment(books, new, who)
        self._ledger.record([adjustment_act(adjustment)], books.seen)
        return adjustment

    def adjustment(self, new: NewAdjustment, who: str) -> Adjustment:
        """The credit or charge that `adjust` would book. Raises CannotClose as it does."""
        return self._adjustment(self._books(), new, who)

    def _adjustment(self, books: ClosedMonths, new: NewAdjustment, who: str) -> Adjustment:
        book = self._prices.current
        if book is None:
            raise CannotClose(
                "there is no price book, so the currency of the adjustment is unknown: set `prices: FILE`"
            )
        now, booked_in = self._clock.wall_ms(), self._booked_in(books, new.month)
        adjustment = booked(new, number=books.seen + 1, booked_in=booked_in, currency=book.currency, who=who, at_ms=now)
        refuse_equal(adjustment, books.adjustments)
        return adjustment

    def preview(self, span: NodeSpan) -> list[CreditLine]:
        """The credit for a node, by team, without booking it. Raises CannotClose."""
        month = Month.of(span.start_ms, self._zone)
        if span.end_ms > month.span(self._zone)[1]:
            raise CannotClose(f"a credit is about one month: end it with {month}, and book the rest separately")
        closed = self._books().of(str(month))
        book = self._prices.of(closed.priced_by) if closed is not None else self._prices.current
        if book is None:
            raise CannotClose("there is no price book, so no time was billed and there is nothing to credit")
        with self._ledger.moment(span.start_ms, span.end_ms) as moment:
            refuse_twice(span, credited_spans(moment.acts("adjusted")))
            return credit_lines(moment, book, span, self._timezone)

    @retry_when_books_moved
    def credit(self, span: NodeSpan, who: str, reason: str, approved_by: str) -> list[Adjustment]:
        """Books the credit for a node: one adjustment per team that was billed for the node, all or none. Raises
        CannotClose."""
        books = self._books()
        lines = [line for line in self.preview(span) if line.amount]
        book, month = self._prices.current, str(Month.of(span.start_ms, self._zone))
        if book is None or not lines:
            raise CannotClose(f"no team was billed for {span.text}: there is nothing to credit")
        now, booked_in = self._clock.wall_ms(), self._booked_in(books, month)
        adjustments = []
        for number, line in enumerate(lines, books.seen + 1):
            try:
                new = NewAdjustment(
                    month=month, team=line.team, amount=line.amount, reason=f"{reason} ({span.text})",
                    approved_by=approved_by,
                )  # fmt: skip
            except ValueError as error:
                raise CannotClose(str(error)) from error
            adjustments.append(
                booked(new, number=number, booked_in=booked_in, currency=book.currency, who=who, at_ms=now)
            )
        self._ledger.record([adjustment_act(adjustment, span) for adjustment in adjustments], books.seen)
        return adjustments

    def _booked_in(self, books: ClosedMonths, month: str) -> str:
        first, current = (
            str(Month.of(at, self._zone)) for at in (self._ledger.status().extent[0], self._clock.wall_ms())
        )
        return books.booked_in(month, first, current)


MOST_DRAFTS: Final = 1_000
"""Drafts of one month; more than one an hour."""


class Bookkeeper:
    """Closes, reopens, publishes, corrects and prices months.

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

    def known_teams(self) -> frozenset[str]:
        """Every team that a record, a policy, an adjustment, a queue or a namespace names, now or in the past."""
        now, status = self._clock.wall_ms(), self._ledger.status()
        first, newest = status.extent
        # A lake accepts only spans that begin at a whole hour, as midnight does.
        start = midnight_ms(local_date(first, self._zone), self._zone)
        in_records: set[str] = set()
        if newest:
            with self._ledger.moment(start, now) as moment:
                in_records = {team for (team,) in moment.usage((start, now), ("team",)).row_keys()}
        in_policies = {
            queue.team for version in status.policies(0, now + 1) for queue in version.policy.queues if queue.team
        }
        adjusted = {adjustment.team for adjustment in self.books().adjustments}
        return frozenset(in_records | in_policies | adjusted | status.teams) - {IDLE, UNASSIGNED, ""}

    def unknown_teams(self, teams: Iterable[str]) -> dict[str, str]:
        """What to tell about each of these teams that nothing names (`known_teams`)."""
        unchecked = {*teams} - {IDLE, UNASSIGNED} - self._ledger.status().teams
        known = self.known_teams() if unchecked else frozenset()
        return {team: f"no team {shown(team)} is known{nearest(team, known)}" for team in sorted(unchecked - known)}

    def warn_of_unknown_teams(self, what: str, teams: Iterable[str | None]) -> None:
        """Log teams that nothing names, unless no team is known at all, as in a new ledger. what: names them."""
        unknown = self.unknown_teams(team for team in teams if team is not None)
        if unknown and self.known_teams():
            structlog.get_logger("accountant.teams").warning(
                "unknown_teams_named", what=what, teams=sorted(unknown), reasons=[*unknown.values()]
            )

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

    def measured(self, month: Month, book: PriceBook | None, until_ms: int | None = None) -> Statement:
        """The statement of a month's present records at the prices of `book`, without the items booked in it.

        until_ms: the end of its time; None: now, or the month's end."""
        start, end = month.span(self._zone)
        end = max(start, min(end, self._clock.wall_ms() if until_ms is None else until_ms))
        with self._ledger.moment(start, end) as moment:
            return statement(moment, book, start, end, self._timezone)

    def draft(self, month: Month, who: str, reason: str = "") -> MonthDraft:
        """Keeps what an open month charges for its time up to the last whole hour. Raises CannotClose."""
        if self.kept(month) is not None:
            raise CannotClose(f"{month} is closed: its amounts do not change any more")
        start, end = month.span(self._zone)
        now, book = self._clock.wall_ms(), self.prices.current
        until = min(end, now - now % MS_PER_HOUR)
        if until <= start:
            raise CannotClose(f"{month} has no whole hour yet that a draft could keep")
        if book is None:
            raise CannotClose("there is no price book, so the month has no amounts: set `prices: FILE`")
        if len(self.drafts(month)) >= MOST_DRAFTS:
            raise CannotClose(
                f"{month} has {MOST_DRAFTS:,} drafts already, and more are not kept: compare with one of them"
            )
        amounts = DraftAmounts(until, book.version, book.currency, charged(self.measured(month, book, until)))
        content = json.dumps(asdict(amounts), default=as_text)
        (act,) = record(self._ledger, [NewAct(now, "drafted", str(month), who, reason, content)], None)
        return _draft_of(act)

    def drafts(self, month: Month) -> list[MonthDraft]:
        """The drafts of a month, oldest first."""
        with self._ledger.moment() as moment:
            return [_draft_of(act) for act in moment.acts("drafted", subject=str(month))]

    def changed(self, month: Month, since_ms: int | None = None) -> MonthChanges:
        """What changed the amounts of a month since the newest draft.

        since_ms: the newest draft at this instant or before counts; without one only acts from this instant on, or the
        month's start, and prices are known."""
        draft = newest_draft(self.drafts(month), since_ms)
        since = draft.at_ms if draft is not None else month.span(self._zone)[0] if since_ms is None else since_ms
        with self._ledger.moment() as moment:
            acts = moment.acts("corrected", "adjusted", after=0 if draft is None else draft.act)
        found = [
            change for act in acts if draft is not None or act.at_ms >= since
            for change in of_bookings(month, act, *booked_by(act))
        ]  # fmt: skip
        kept, latest, then = self.kept(month), self.prices.latest, self._prices_at(draft, since)
        currency = kept.currency if kept is not None else self.prices.current.currency if self.prices.current else None
        if draft is not None:
            by_records = (
                of_records(self, month, draft, then)
                if kept is None
                else changes("records", draft.amounts.charged, charged(kept))
            )
            found += told_in(by_records, draft.amounts.currency, currency)
        if kept is None and then is not None and latest is not None:
            found += of_prices(self, month, then, latest)
        found.sort(key=lambda one: (-(one.at_ms or 0), -(one.act or 0), one.cause, one.team))
        return MonthChanges(month=str(month), since_ms=since, draft=draft, currency=currency, changes=tuple(found))

    def _prices_at(self, draft: MonthDraft | None, since_ms: int) -> PriceBook | None:
        """The prices of a draft, or those in force at an instant."""
        if draft is not None:
            return self.prices.of(draft.amounts.price_book_version)
        before = [one for one in self.prices.versions if one.at_ms < since_ms]
        return before[-1].book if before else None

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

    def take_file(self, book: PriceBook, path: str) -> BookVersion | None:
        """Puts the price book's file in force; returns None if its content has not changed. Months with invoice rates
        keep these. Raises CannotClose."""
        with self.prices.deciding:
            if self.prices.filed(book):
                return None
            return self.prices.enter([self.composed(book)], "file", path, "", self._clock.wall_ms())

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
