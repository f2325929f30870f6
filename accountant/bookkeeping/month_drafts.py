"""Keeps drafts of a month, and says what changed its amounts since one (`month_changes`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Final

from accountant.billing.cost_allocation import statement
from accountant.billing.statements import Statement, as_text
from accountant.bookkeeping.act_contents import booked_by, draft_of
from accountant.bookkeeping.month_changes import (
    AmountChange,
    DraftAmounts,
    MonthChanges,
    MonthDraft,
    changes,
    charged,
    newest_draft,
    of_bookings,
    of_prices,
    since_draft,
    told_in,
)
from accountant.bookkeeping.month_closing import CannotClose
from accountant.bookkeeping.price_book_versions import PriceBooks
from accountant.core.periods import Month, zone
from accountant.ledger.journal import NewAct, record
from accountant.ledger.protocols import Ledger
from accountant.prices.price_book import PriceBook
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_HOUR

MOST_DRAFTS: Final = 1_000
"""Drafts of one month; more than one an hour."""


class Drafts:
    """The drafts of months.

    timezone: the time zone of the months.
    kept: returns the statement of a closed month, None of an open one."""

    def __init__(
        self,
        ledger: Ledger,
        prices: PriceBooks,
        clock: Clock,
        timezone: str,
        kept: Callable[[Month], Statement | None],
    ) -> None:
        self._ledger, self._prices, self._clock, self._kept = ledger, prices, clock, kept
        self._timezone, self._zone = timezone, zone(timezone)

    def of(self, month: Month) -> list[MonthDraft]:
        """The drafts of a month, oldest first."""
        with self._ledger.moment() as moment:
            return [draft_of(act) for act in moment.acts("drafted", subject=str(month))]

    def keep(self, month: Month, who: str, reason: str = "") -> MonthDraft:
        """Keeps what an open month charges for its time up to the last whole hour. Raises CannotClose."""
        if self._kept(month) is not None:
            raise CannotClose(f"{month} is closed: its amounts do not change any more")
        start, end = month.span(self._zone)
        now, book = self._clock.wall_ms(), self._prices.current
        until = min(end, now - now % MS_PER_HOUR)
        if until <= start:
            raise CannotClose(f"{month} has no whole hour yet that a draft could keep")
        if book is None:
            raise CannotClose("there is no price book, so the month has no amounts: set `prices: FILE`")
        if len(self.of(month)) >= MOST_DRAFTS:
            raise CannotClose(
                f"{month} has {MOST_DRAFTS:,} drafts already, and more are not kept: compare with one of them"
            )
        amounts = DraftAmounts(until, book.version, book.currency, charged(self._measured(month, book, until)))
        content = json.dumps(asdict(amounts), default=as_text)
        (act,) = record(self._ledger, [NewAct(now, "drafted", str(month), who, reason, content)], None)
        return draft_of(act)

    def changes(self, month: Month, since_ms: int | None = None) -> MonthChanges:
        """What changed the amounts of a month since the newest draft.

        since_ms: the newest draft at this instant or before counts; without one only acts from this instant on, or the
        month's start, and prices are known."""
        draft = newest_draft(self.of(month), since_ms)
        since = draft.at_ms if draft is not None else month.span(self._zone)[0] if since_ms is None else since_ms
        with self._ledger.moment() as moment:
            acts = moment.acts("corrected", "adjusted")
        found, booked = list[AmountChange](), list[AmountChange]()
        for act in acts:
            later = act.at_ms >= since if draft is None else act.number > draft.act
            (found if later else booked).extend(of_bookings(month, act, *booked_by(act)))
        kept, latest, then = self._kept(month), self._prices.latest, self._prices_at(draft, since)
        current = self._prices.current
        currency = kept.currency if kept is not None else current.currency if current else None
        if draft is not None:
            by_records = (
                self._of_records(month, draft, then)
                if kept is None
                else changes("records", draft.amounts.charged, charged(kept))
            )
            found += told_in(by_records, draft.amounts.currency, currency)
        if kept is None and then is not None and latest is not None:
            found += of_prices(lambda book: self._measured(month, book), then, latest)
        found.sort(key=lambda one: (-(one.at_ms or 0), -(one.act or 0), one.cause, one.team))
        known = draft is not None and draft.amounts.currency == currency and (kept is not None or then is not None)
        return MonthChanges(
            month=str(month), since_ms=since, draft=draft, currency=currency, changes=tuple(found),
            teams=tuple(since_draft(draft, booked, found)) if draft is not None and known else (),
        )  # fmt: skip

    def _of_records(self, month: Month, draft: MonthDraft, then: PriceBook | None) -> Iterator[AmountChange]:
        """The changes of an open month since a draft by its records. then: the price book of the draft."""
        past, whole = self._measured(month, then, draft.amounts.until_ms), self._measured(month, then)
        yield from changes("late records", draft.amounts.charged, charged(past))
        yield from changes("use since then", charged(past), charged(whole))

    def _prices_at(self, draft: MonthDraft | None, since_ms: int) -> PriceBook | None:
        """The prices of a draft, or those in force at an instant."""
        if draft is not None:
            return self._prices.of(draft.amounts.price_book_version)
        before = [one for one in self._prices.versions if one.at_ms < since_ms]
        return before[-1].book if before else None

    def _measured(self, month: Month, book: PriceBook | None, until_ms: int | None = None) -> Statement:
        """The statement of a month's present records at the prices of `book`, without the items booked in it.

        until_ms: the end of its time; None: now, or the month's end."""
        start, end = month.span(self._zone)
        end = max(start, min(end, self._clock.wall_ms() if until_ms is None else until_ms))
        with self._ledger.moment(start, end) as moment:
            return statement(moment, book, start, end, self._timezone)
