"""Keeps the provider's invoices, and puts a price book with their true-up rates into force.

A true-up is kept as the rates of one month. The price book in force is always made anew of its base (the file, or what
was put in its place) and of the true-ups of the months that are not published: so a later base undoes none of them, and
none of them brings back an earlier base. What a published month was priced with stands in its own version.

A shell around accountant.bookkeeping.invoice_reconciliation: it asks the ledger. Who takes books into force is
accountant.bookkeeping.bookkeeper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from accountant.billing.bills import bills, unused_commitments
from accountant.billing.costs import Charge
from accountant.bookkeeping.invoice_reconciliation import (
    CannotTrueUp,
    Invoice,
    KeptInvoice,
    Reconciliation,
    TrueUp,
    reconcile,
    true_up,
    trued_up,
)
from accountant.bookkeeping.month_closing import CannotClose, ClosedMonths
from accountant.bookkeeping.price_book_versions import ComposedPriceBook, Prices
from accountant.core.periods import Month, zone
from accountant.ledger.journal import Journal, NewAct, record
from accountant.ledger.protocols import Ledger
from accountant.prices.price_book import PriceBook
from gputally.base.clock import Clock


class Journalled(Ledger, Journal, Protocol):
    """A ledger with its journal."""


class Invoices:
    """timezone: of the months. books: all acts folded, as of now."""

    def __init__(
        self, ledger: Journalled, prices: Prices, clock: Clock, timezone: str, books: Callable[[], ClosedMonths]
    ) -> None:
        self._ledger = ledger
        self._prices = prices
        self._clock = clock
        self._timezone = timezone
        self._zone = zone(timezone)
        self._books = books

    def reconcile(self, month: Month, invoice: Invoice) -> Reconciliation:
        """The invoice against the month's bills as the ledger stands. Raises CannotClose."""
        book = self._of(month).book
        try:
            return reconcile(str(month), invoice, self._bills(month, book), book.currency)
        except ValueError as error:
            raise CannotClose(str(error)) from error

    def newest(self, month: Month) -> KeptInvoice | None:
        """The newest invoice that was kept for that month."""
        acts = self._ledger.acts("invoiced", subject=str(month))
        if not acts:
            return None
        return KeptInvoice(act=acts[-1].number, invoice=Invoice.model_validate_json(acts[-1].content))

    def keep(self, month: Month, invoice: Invoice, who: str, reason: str) -> None:
        """For readers of the books; the same invoice again is kept once. Raises CannotClose."""
        self.reconcile(month, invoice)
        known = self.newest(month)
        if known is None or known.invoice != invoice:
            record(self._ledger, [self.act(month, invoice, who, reason)], None)

    def act(self, month: Month, invoice: Invoice, who: str, reason: str) -> NewAct:
        """That keeps the invoice."""
        return NewAct(self._clock.wall_ms(), "invoiced", str(month), who, reason, invoice.model_dump_json())

    def true_up(self, month: Month, invoice: Invoice) -> tuple[ComposedPriceBook, ComposedPriceBook]:
        """The book that the month is priced by then, and the one in force then; the same one for an open month.
        Raises CannotClose."""
        self.reconcile(month, invoice)  # for its refusals
        own = self._of(month)
        try:
            found = true_up(invoice, self._bills(month, own.book), str(month))
        except CannotTrueUp as error:
            raise CannotClose(str(error)) from error
        now = self._prices.latest
        assert now is not None, "the month has a book"
        in_force = self.made(now.base, _with(self.standing(), found))
        if self._books().of(str(month)) is None:
            return in_force, in_force
        return self.made(own.base, _with(own.true_ups, found)), in_force

    def standing(self, without: Month | None = None) -> list[TrueUp]:
        """The true-ups that a book in force is made with: those of months that are not published."""
        latest, books = self._prices.latest, self._books()
        found = []
        for one in latest.true_ups if latest is not None else ():
            closed = books.of(one.month)
            if one.month != str(without) and (closed is None or not closed.published):
                found.append(one)
        return found

    def made(self, base: PriceBook, true_ups: Iterable[TrueUp]) -> ComposedPriceBook:
        """The base with these true-ups. Raises CannotClose for one that cannot be kept."""
        book, ordered = base, tuple(sorted(true_ups, key=lambda one: one.month))
        for one in ordered:
            month = Month.parse(one.month)
            try:
                book = trued_up(book, one, self._bills(month, book), month.span(self._zone))
            except ValueError as error:
                raise CannotClose(f"{month} by its invoice: {error}") from error
        return ComposedPriceBook(book, base, ordered)

    def _of(self, month: Month) -> ComposedPriceBook:
        """What the month is priced by. Raises CannotClose."""
        closed = self._books().of(str(month))
        found = self._prices.version(closed.priced_by) if closed is not None else self._prices.latest
        if found is None:
            raise CannotClose("without a price book there is nothing to compare an invoice with")
        return found

    def _bills(self, month: Month, book: PriceBook) -> list[Charge]:
        start, end = month.span(self._zone)
        end = max(start, min(end, self._clock.wall_ms()))
        found = bills(self._ledger, book, start, end, ("team",), self._timezone)
        return [*found, *unused_commitments(self._ledger, book, start, end, self._timezone)]


def _with(true_ups: Iterable[TrueUp], new: TrueUp) -> list[TrueUp]:
    """With the rates of one more invoice."""
    of_month = {one.month: one for one in true_ups}
    return list((of_month | {new.month: new.after(of_month.get(new.month))}).values())
