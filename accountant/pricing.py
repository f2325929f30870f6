"""Which price book is in force, and every one that ever was: the acts that took one into force.

A book comes from the file that the settings name, or from somebody who put it there (a re-pricing, a true-up).
The newest act counts. A file is taken when its content is not that of the last file taken, so a restart does not
undo what was put since. Every version stays readable for ever: statements name theirs. A version is a base, as somebody
wrote it, with the rates of the months that follow their invoices: those are known by themselves, so that a later base
gets them too (accountant.bookkeeping).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from accountant.books.reconcile import TrueUp
from accountant.journal import Act, Journal, NewAct, record
from accountant.prices.book import PriceBook

Origin = Literal["file", "put"]


@dataclass(frozen=True, slots=True)
class Made:
    """A price book, and what it is made of: the base as somebody wrote it, and the rates of months' invoices."""

    book: PriceBook
    base: PriceBook
    true_ups: tuple[TrueUp, ...] = ()

    def content(self, origin: Origin) -> str:
        """For the act."""
        found: dict[str, object] = {"origin": origin, "book": self.book.model_dump(mode="json", by_alias=True)}
        if self.true_ups:
            found["base"] = self.base.model_dump(mode="json", by_alias=True)
            found["true_ups"] = [one.model_dump(mode="json") for one in self.true_ups]
        return json.dumps(found)


@dataclass(frozen=True, slots=True)
class BookVersion(Made):
    """A price book and how it came into force. number: of its act."""

    version: str = ""
    number: int = 0
    at_ms: int = 0
    origin: Origin = "file"
    who: str = ""
    reason: str = ""


class Prices:
    """The price books of a journal. Thread-safe; reads the journal once. check: raises AccountantError for a book that
    must not come into force."""

    def __init__(self, journal: Journal, check: Callable[[PriceBook], None]) -> None:
        self._journal = journal
        self._check = check
        self._lock = threading.Lock()
        self.deciding = threading.RLock()
        """Held by whoever makes the next book of the one in force, until it is taken."""
        self._versions = [_version(act) for act in journal.acts("prices")]

    @property
    def current(self) -> PriceBook | None:
        """The book in force."""
        versions = self._versions
        return versions[-1].book if versions else None

    @property
    def versions(self) -> tuple[BookVersion, ...]:
        """Oldest first."""
        return tuple(self._versions)

    @property
    def latest(self) -> BookVersion | None:
        """How the book in force came to be."""
        return self._versions[-1] if self._versions else None

    def of(self, version: str) -> PriceBook | None:
        """The book of that version; None for one that was never in force ("" is none at all)."""
        found = self.version(version)
        return found.book if found is not None else None

    def version(self, version: str) -> BookVersion | None:
        return next((found for found in self._versions if found.version == version), None)

    def filed(self, base: PriceBook) -> bool:
        """Whether it is what the file said when it was last taken."""
        files = [found.base.version for found in self._versions if found.origin == "file"]
        return bool(files) and files[-1] == base.version

    def try_out(self, book: PriceBook, now_ms: int) -> None:
        """In force for this process alone; nothing is recorded. Raises what the check raises."""
        self._check(book)
        with self._lock:
            self._versions.append(BookVersion(book, book, (), book.version, 0, now_ms, "file", "", "tried out"))

    def take(self, book: PriceBook, origin: Origin, who: str, reason: str, now_ms: int) -> BookVersion | None:
        """`enter` for a book as it was written."""
        return self.enter([Made(book, book)], origin, who, reason, now_ms)

    def enter(
        self,
        made: Sequence[Made],
        origin: Origin,
        who: str,
        reason: str,
        now_ms: int,
        *,
        before: Sequence[NewAct] = (),
        after: Sequence[NewAct] = (),
        seen: int | None = None,
    ) -> BookVersion | None:
        """Take the last of these books into force; None where that changes nothing. Those before it can be named by
        statements from now on, and are not in force.

        before, after: acts that are recorded with it, all or none. seen: see accountant.journal.record. Raises
        accountant.errors.LedgerUnavailable, BooksMoved, and what the check raises; nothing is recorded then."""
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
