"""Compares invoices with months, derives prices from them, and books approved credits and charges."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from accountant.billing.charge import Charge
from accountant.billing.cost_allocation import bills, unused_commitments
from accountant.billing.statements import Adjustment
from accountant.bookkeeping.act_contents import adjustment_act, credited_spans
from accountant.bookkeeping.corrections_and_adjustments import (
    CreditLine,
    NewAdjustment,
    NodeSpan,
    booked,
    credit_lines,
    refuse_equal,
    refuse_twice,
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
from accountant.bookkeeping.month_closing import CannotClose, ClosedMonths
from accountant.bookkeeping.price_book_versions import ComposedPriceBook, PriceBooks
from accountant.core.periods import Month, zone
from accountant.ledger.journal import NewAct, record, retry_when_books_moved
from accountant.ledger.protocols import Ledger
from accountant.prices.price_book import PriceBook
from gputally.base.clock import Clock


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
