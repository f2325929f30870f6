"""Stores every version of the price book, and compares two of them for a month.

A book comes from the file that the settings name, or from an administrator's act (re-pricing, true-up). The book that
was recorded last is in force. The file is put in force only if its content differs from that of the file before, so a
restart does not undo a later act. Every version stays readable, because statements refer to them.

A version consists of the price book as written (its base) and the rates that true-ups derived from the invoices of past
months. The rates are stored separately, so that a later price book keeps them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from accountant.billing.statements import Statement, StatementLine
from accountant.bookkeeping.invoice_reconciliation import TrueUp
from accountant.ledger.journal import Act, Journal, NewAct, record
from accountant.prices.price_book import PriceBook
from gputally.base.money import exact_sum
from gputally.server.config_loading import Model

Origin = Literal["file", "put"]


@dataclass(frozen=True, slots=True)
class ComposedPriceBook:
    """A price book with its parts: the base as written, and the invoice rates of months."""

    book: PriceBook
    base: PriceBook
    true_ups: tuple[TrueUp, ...] = ()

    def content(self, origin: Origin) -> str:
        """The content of the act that records it."""
        found: dict[str, object] = {"origin": origin, "book": self.book.model_dump(mode="json", by_alias=True)}
        if self.true_ups:
            found["base"] = self.base.model_dump(mode="json", by_alias=True)
            found["true_ups"] = [one.model_dump(mode="json") for one in self.true_ups]
        return json.dumps(found)


@dataclass(frozen=True, slots=True)
class BookVersion(ComposedPriceBook):
    """A price book and how it came into force. number: the number of the act that recorded it."""

    version: str = ""
    number: int = 0
    at_ms: int = 0
    origin: Origin = "file"
    who: str = ""
    reason: str = ""


class PriceBooks:
    """The price books in a journal, which is read once. Thread-safe.

    check: raises AccountantError for a book that must not come into force."""

    def __init__(self, journal: Journal, check: Callable[[PriceBook], None]) -> None:
        self._journal = journal
        self._check = check
        self._lock = threading.Lock()
        self.deciding = threading.RLock()
        """Held while the next book is computed from the one in force, until it is recorded."""
        with journal.moment() as moment:
            self._versions = [_version(act) for act in moment.acts("prices")]

    @property
    def current(self) -> PriceBook | None:
        """The book in force."""
        versions = self._versions
        return versions[-1].book if versions else None

    def after(self, act: int) -> PriceBook | None:
        """The book that was in force when the act of this number was the last."""
        return next((found.book for found in reversed(self._versions) if found.number <= act), None)

    @property
    def versions(self) -> tuple[BookVersion, ...]:
        """All versions, oldest first."""
        return tuple(self._versions)

    @property
    def latest(self) -> BookVersion | None:
        """The version in force, with its origin."""
        return self._versions[-1] if self._versions else None

    def of(self, version: str) -> PriceBook | None:
        """The book of that version; None if it was never recorded."""
        found = self.version(version)
        return found.book if found is not None else None

    def version(self, version: str) -> BookVersion | None:
        return next((found for found in self._versions if found.version == version), None)

    def filed(self, base: PriceBook) -> bool:
        """Whether the file that was last put in force has this content."""
        files = [found.base.version for found in self._versions if found.origin == "file"]
        return bool(files) and files[-1] == base.version

    def try_out(self, book: PriceBook, now_ms: int) -> None:
        """Puts a book in force for this process only, without recording it. Raises what the check raises."""
        self._check(book)
        with self._lock:
            self._versions.append(BookVersion(book, book, (), book.version, 0, now_ms, "file", "", "tried out"))

    def take(self, book: PriceBook, origin: Origin, who: str, reason: str, now_ms: int) -> BookVersion | None:
        """Puts a book without invoice rates in force, see `enter`."""
        return self.enter([ComposedPriceBook(book, book)], origin, who, reason, now_ms)

    def enter(
        self,
        made: Sequence[ComposedPriceBook],
        origin: Origin,
        who: str,
        reason: str,
        now_ms: int,
        *,
        before: Sequence[NewAct] = (),
        after: Sequence[NewAct] = (),
        seen: int | None = None,
    ) -> BookVersion | None:
        """Puts the last of these books in force. Returns None if it already is.

        The earlier books are only recorded, so that statements can refer to them.

        before, after: acts that are recorded together with it, all or none.
        seen: the number of the last act that the caller has read, see `record` of the journal.

        Raises LedgerUnavailable, BooksMoved, and what the check raises. Nothing is recorded then."""
        last = made[-1]
        with self._lock:
            if origin == "file" and self.filed(last.base):
                return None
            known = {last.book.version, *(found.version for found in self._versions)}
            new = [one for one in made[:-1] if one.book.version not in known]
            stays = origin == "put" and self.latest is not None and self.latest.version == last.book.version
            entering = [] if stays and not new else [*new, last]
            for one in entering:
                self._check(one.book)
            acts = [NewAct(now_ms, "prices", one.book.version, who, reason, one.content(origin)) for one in entering]
            if not (acts or before or after):
                return None
            recorded = record(self._journal, [*before, *acts, *after], seen)
            self._versions += [_version(act) for act in recorded[len(before) : len(before) + len(acts)]]
            return None if stays else self._versions[-1]


def _version(act: Act) -> BookVersion:
    content = json.loads(act.content)
    book = PriceBook.model_validate(content["book"])
    base = PriceBook.model_validate(content["base"]) if "base" in content else book
    true_ups = tuple(TrueUp.model_validate(one) for one in content.get("true_ups", ()))
    return BookVersion(book, base, true_ups, act.subject, act.number, act.at_ms, content["origin"], act.who, act.reason)


_Key = tuple[str, str, str]


class PriceChange(Model):
    """The cost of one group under two books, exact; None if some of the time has no price."""

    team: str
    gpu_model: str
    capacity_type: str
    gpu_us: int
    before: Decimal | None
    after: Decimal | None


class PriceDiff(Model):
    """The groups whose cost changes. The totals include everything with a price, also unused commitments."""

    month: str
    currency_before: str | None
    currency_after: str | None
    version_before: str
    version_after: str
    changes: tuple[PriceChange, ...]
    total_before: Decimal
    total_after: Decimal
    unpriced_before_us: int
    unpriced_after_us: int


def difference(month: str, before: Statement, after: Statement) -> PriceDiff:
    """Compares two statements of the same span under two price books."""
    old, new = _costs(before.every_line), _costs(after.every_line)
    time: dict[_Key, int] = {}
    for line in after.every_line:
        time[_key(line)] = time.get(_key(line), 0) + line.gpu_us
    zero = Decimal(0)
    return PriceDiff(
        month=month,
        currency_before=before.currency,
        currency_after=after.currency,
        version_before=before.price_book_version,
        version_after=after.price_book_version,
        changes=tuple(
            PriceChange(
                team=key[0],
                gpu_model=key[1],
                capacity_type=key[2],
                gpu_us=time.get(key, 0),
                before=old.get(key, zero),
                after=new.get(key, zero),
            )
            for key in sorted({*old, *new})
            if old.get(key, zero) != new.get(key, zero)
        ),
        total_before=_total(before),
        total_after=_total(after),
        unpriced_before_us=before.unpriced_gpu_us,
        unpriced_after_us=after.unpriced_gpu_us,
    )


def _total(stated: Statement) -> Decimal:
    return exact_sum(line.cost for line in stated.every_line if line.cost is not None)


def _key(line: StatementLine) -> _Key:
    return line.team, line.gpu_model, line.capacity_type


def _costs(lines: Iterable[StatementLine]) -> dict[_Key, Decimal | None]:
    found: dict[_Key, Decimal | None] = {}
    for line in lines:
        before = found.get(_key(line), Decimal(0))
        unknown = before is None or line.cost is None
        found[_key(line)] = None if unknown else exact_sum([before or Decimal(0), line.cost or Decimal(0)])
    return found
