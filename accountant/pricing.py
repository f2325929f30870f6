"""Which price book is in force, and every one that ever was: the acts that took one into force.

A book comes from the file that the settings name, or from somebody who put it there (a re-pricing, a true-up).
The newest act counts. A file is taken when its content is not that of the last file taken, so a restart does not
undo what was put since. Every version stays readable for ever: statements name theirs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from accountant.journal import Act, Journal, NewAct, record
from accountant.prices.book import PriceBook

Origin = Literal["file", "put"]


@dataclass(frozen=True, slots=True)
class BookVersion:
    """A price book and how it came into force. number: of its act."""

    version: str
    number: int
    at_ms: int
    origin: Origin
    who: str
    reason: str
    book: PriceBook


class Prices:
    """The price books of a journal. Thread-safe; reads the journal once. check: raises AccountantError for a book that
    must not come into force."""

    def __init__(self, journal: Journal, check: Callable[[PriceBook], None]) -> None:
        self._journal = journal
        self._check = check
        self._lock = threading.Lock()
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

    def of(self, version: str) -> PriceBook | None:
        """The book of that version; None for one that was never in force ("" is none at all)."""
        return next((found.book for found in self._versions if found.version == version), None)

    def try_out(self, book: PriceBook, now_ms: int) -> None:
        """In force for this process alone; nothing is recorded. Raises what the check raises."""
        self._check(book)
        with self._lock:
            self._versions.append(BookVersion(book.version, 0, now_ms, "file", "", "tried out", book))

    def take(self, book: PriceBook, origin: Origin, who: str, reason: str, now_ms: int) -> BookVersion | None:
        """Take a book into force; None where that changes nothing. Raises accountant.errors.LedgerUnavailable, and what
        the check raises."""
        with self._lock:
            if origin == "file":
                files = [found.version for found in self._versions if found.origin == "file"]
                if files and files[-1] == book.version:
                    return None
            elif self._versions and self._versions[-1].version == book.version:
                return None
            self._check(book)
            content = json.dumps({"origin": origin, "book": book.model_dump(mode="json", by_alias=True)})
            act = NewAct(now_ms, "prices", book.version, who, reason, content)
            (recorded,) = record(self._journal, [act], None)
            self._versions.append(_version(recorded))
            return self._versions[-1]


def _version(act: Act) -> BookVersion:
    content = json.loads(act.content)
    book = PriceBook.model_validate(content["book"])
    return BookVersion(act.subject, act.number, act.at_ms, content["origin"], act.who, act.reason, book)
