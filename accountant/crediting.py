"""Credits and charges that somebody approved: booked in the open month, and what one for a node would be.

A shell around accountant.books.adjustments and credits: it asks the ledger, lets them decide, and records the acts. No
line of a statement changes by them.
"""

from __future__ import annotations

from collections.abc import Callable

from accountant.books.adjustments import NewAdjustment, booked
from accountant.books.closing import Books, CannotClose
from accountant.books.credits import CreditLine, NodeSpan, credit_lines, refuse_twice
from accountant.books.entries import adjusting, credited
from accountant.books.statements import Adjustment
from accountant.invoicing import Journalled
from accountant.journal import anew
from accountant.periods import Month, zone
from accountant.pricing import Prices
from agent.clock import Clock


class Credits:
    """timezone: of the months. books: all acts folded, as of now."""

    def __init__(
        self, ledger: Journalled, prices: Prices, clock: Clock, timezone: str, books: Callable[[], Books]
    ) -> None:
        self._ledger = ledger
        self._prices = prices
        self._clock = clock
        self._timezone = timezone
        self._zone = zone(timezone)
        self._books = books

    @anew
    def adjust(self, new: NewAdjustment, who: str) -> Adjustment:
        """Book an approved credit or charge in the open month. Raises CannotClose."""
        book = self._prices.current
        if book is None:
            raise CannotClose("without a price book there is no currency to adjust in")
        books = self._books()
        now, booked_in = self._clock.wall_ms(), self._booked_in(books, new.month)
        adjustment = _booked(new, books.seen + 1, booked_in, book.currency, who, now)
        self._ledger.record([adjusting(adjustment)], books.seen)
        return adjustment

    def preview(self, span: NodeSpan) -> list[CreditLine]:
        """What a credit for a node would be, by team. Raises CannotClose."""
        month = Month.of(span.start_ms, self._zone)
        if span.end_ms > month.span(self._zone)[1]:
            raise CannotClose(f"a credit is about one month: end it with {month}, and book the rest by itself")
        closed = self._books().of(str(month))
        book = self._prices.of(closed.priced_by) if closed is not None else self._prices.current
        if book is None:
            raise CannotClose("without a price book nothing was billed")
        try:
            refuse_twice(span, credited(self._ledger.acts("adjusted")))
            return credit_lines(self._ledger, book, span, self._timezone)
        except ValueError as error:
            raise CannotClose(str(error)) from error

    @anew
    def credit(self, span: NodeSpan, who: str, reason: str, approved_by: str) -> list[Adjustment]:
        """Book the credit for a node: one per team that was billed for it, all or none. Raises CannotClose."""
        books = self._books()
        lines = [line for line in self.preview(span) if line.amount]
        book, month = self._prices.current, str(Month.of(span.start_ms, self._zone))
        if book is None or not lines:
            raise CannotClose(f"nobody was billed for {span.text}")
        now, booked_in = self._clock.wall_ms(), self._booked_in(books, month)
        found = []
        for number, line in enumerate(lines, books.seen + 1):
            try:
                new = NewAdjustment(
                    month=month, team=line.team, amount=line.amount, reason=f"{reason} ({span.text})",
                    approved_by=approved_by,
                )  # fmt: skip
            except ValueError as error:
                raise CannotClose(str(error)) from error
            found.append(_booked(new, number, booked_in, book.currency, who, now))
        self._ledger.record([adjusting(adjustment, span) for adjustment in found], books.seen)
        return found

    def _booked_in(self, books: Books, month: str) -> str:
        first, current = (str(Month.of(at, self._zone)) for at in (self._ledger.extent()[0], self._clock.wall_ms()))
        return books.booked_in(month, first, current)


def _booked(new: NewAdjustment, number: int, booked_in: str, currency: str, who: str, at_ms: int) -> Adjustment:
    """accountant.books.adjustments.booked. Raises CannotClose."""
    try:
        return booked(new, number=number, booked_in=booked_in, currency=currency, who=who, at_ms=at_ms)
    except ValueError as error:
        raise CannotClose(str(error)) from error
