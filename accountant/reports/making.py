"""The report of a span as the books have it: what a page, a download and a letter all show."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from accountant.bookkeeping import Bookkeeper
from accountant.books.issuer import Issuer
from accountant.books.statements import NOTHING_BESIDE, Statement
from accountant.importing.record import of_acts, said_of
from accountant.journal import Act, ActKind
from accountant.periods import Month, zone
from accountant.prices.book import PriceBook
from accountant.reports.model import Report, build, made_of
from accountant.reports.readings import Asked, Readings, read, span_before


class Momentary(Protocol):
    def acts(self, *kinds: ActKind, subject: str | None = None) -> list[Act]:
        """See accountant.journal.Journal."""
        ...

    def moment(self, start_ms: int = 0, end_ms: int = 0) -> AbstractContextManager[Asked]:
        """Questions that are all answered from the same commit. start_ms, end_ms: of which rows may be asked for."""
        ...


def report(
    ledger: Momentary,
    books: Bookkeeper,
    start_ms: int,
    end_ms: int,
    timezone: str,
    *,
    month: Month | None = None,
    team: str | None = None,
    issuer: Issuer | None = None,
) -> Report:
    """month: the accountant's own month that the span is, or begins; closed, it says what its statement said.
    issuer: for forms that list every charge."""
    kept, kept_before = _kept(books, month)
    # The report compares with the span before: rows of both may be asked for.
    with ledger.moment(span_before(start_ms, end_ms, zone(timezone))[0], end_ms) as moment:
        return build(
            moment,
            books.priced_by(kept),
            start_ms,
            end_ms,
            timezone,
            team=team,
            kept=kept,
            kept_before=kept_before,
            book_before=_book_before(books, kept_before),
            beside=books.beside(month) if month is not None else NOTHING_BESIDE,
            later=books.later(month) if month is not None else NOTHING_BESIDE,
            period=books.status(month) if month is not None else "",
            issuer=issuer,
            imports=said_of(of_acts(ledger.acts("imported")), start_ms, end_ms),
        )


def readings(ledger: Momentary, books: Bookkeeper, start_ms: int, end_ms: int, timezone: str, month: Month) -> Readings:
    """What the reports of the cluster and of every team are made of. month: as in `report`."""
    kept, kept_before = _kept(books, month)
    book, book_before = books.priced_by(kept), _book_before(books, kept_before)
    with ledger.moment(span_before(start_ms, end_ms, zone(timezone))[0], end_ms) as moment:
        return read(moment, book, start_ms, end_ms, timezone, book_before=book_before)


def report_of(ledger: Momentary, books: Bookkeeper, found: Readings, month: Month, team: str | None) -> Report:
    """What `report` makes, of readings of that month."""
    kept, kept_before = _kept(books, month)
    with ledger.moment(found.start_ms, found.end_ms) as moment:
        return made_of(
            found,
            moment,
            team=team,
            kept=kept,
            kept_before=kept_before,
            beside=books.beside(month),
            later=books.later(month),
            period=books.status(month),
            imports=said_of(of_acts(ledger.acts("imported")), found.start_ms, found.end_ms),
        )


def _kept(books: Bookkeeper, month: Month | None) -> tuple[Statement | None, Statement | None]:
    """The statements of a month and of the one before, as far as they are closed."""
    return (None, None) if month is None else (books.kept(month), books.kept(month.previous))


def _book_before(books: Bookkeeper, kept_before: Statement | None) -> PriceBook | None:
    return None if kept_before is None else books.priced_by(kept_before)
