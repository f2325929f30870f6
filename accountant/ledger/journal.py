"""Defines the journal: numbered acts with who, when and why.

Everything beside the metered time is a fold over this list: which prices were in force, which months are closed,
which corrections and credits stand. An act is recorded only after the number its author has seen, so
two people cannot close one month, and no act is decided on books that have moved meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Final, Literal, ParamSpec, Protocol, TypeVar

from gputally.base.errors import AccountantError

ActKind = Literal[
    "prices", "closed", "reopened", "published", "repriced", "corrected", "refused", "adjusted", "invoiced", "policy",
    "pods",    "delivery", "imported", "retired", "redated",
    "moved",
]  # fmt: skip


P = ParamSpec("P")
T = TypeVar("T")


class BooksMoved(AccountantError):
    """Another act was recorded in between: read again, then decide again."""

    def __init__(self, seen: int, last: int) -> None:
        super().__init__(
            f"the books have moved from act {seen} to act {last} meanwhile: nothing was recorded; look and act again"
        )


@dataclass(frozen=True, slots=True)
class NewAct:
    """subject: the month, price book version or invoice it is about. content: JSON, by kind."""

    at_ms: int
    kind: ActKind
    subject: str
    who: str
    reason: str
    content: str = "{}"


@dataclass(frozen=True, slots=True)
class Act(NewAct):
    """number: 1, 2, 3, … in the order of recording. digest: SHA-256 over the previous act's digest and this
    act, so that one that is taken out or changed afterwards shows."""

    number: int = 0
    digest: str = ""


class Journal(Protocol):
    """Where acts are kept."""

    def acts(self, *kinds: ActKind, subject: str | None = None) -> list[Act]:
        """In the order of recording; without a kind, all."""
        ...

    def trail(self, after: int, limit: int) -> list[Act]:
        """At most `limit` acts with a number above `after`, in the order of recording."""
        ...

    def last_act(self) -> int:
        """The number of the newest, 0 where there is none."""
        ...

    def record(self, acts: Sequence[NewAct], seen: int) -> list[Act]:
        """All of them or none, durably. Raises BooksMoved unless `seen` is the last number, and
        accountant.core.errors.LedgerUnavailable when nothing was stored."""
        ...


BESIDE: Final[frozenset[ActKind]] = frozenset(
    {"invoiced", "pods", "delivery", "imported", "retired", "redated", "moved"}
)
"""Acts that decide nothing about the books: what was decided before they came stands."""
_TRIES = 20


def record(journal: Journal, acts: Sequence[NewAct], seen: int | None) -> list[Act]:
    """`Journal.record`, also where nothing but acts of `BESIDE` came after `seen`: an import records one a minute.
    seen None: the acts stand by themselves, whatever came. Raises BooksMoved."""
    known = journal.last_act() if seen is None else seen
    for _ in range(_TRIES):
        last = journal.last_act()
        if seen is not None and any(act.kind not in BESIDE for act in journal.trail(known, last - known)):
            raise BooksMoved(seen, last)
        known = last
        with suppress(BooksMoved):
            return journal.record(acts, known)
    raise BooksMoved(known, journal.last_act())


def retry_when_books_moved(decide: Callable[P, T]) -> Callable[P, T]:
    """Decides again where the books moved meanwhile; it looks at them itself. Raises BooksMoved where they never stand
    still."""

    @wraps(decide)
    def deciding(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(_TRIES - 1):
            with suppress(BooksMoved):
                return decide(*args, **kwargs)
        return decide(*args, **kwargs)

    return deciding


FIRST_DIGEST = "0" * 64
"""What stands before the first act."""


def numbered(acts: Iterable[NewAct], last: int, digest: str) -> list[Act]:
    """The acts after act `last` with `digest` (0 and FIRST_DIGEST: after none)."""
    found = []
    for number, act in enumerate(acts, start=last + 1):
        text = json.dumps([number, act.at_ms, act.kind, act.subject, act.who, act.reason, act.content])
        digest = hashlib.sha256((digest + text).encode()).hexdigest()
        found.append(
            Act(act.at_ms, act.kind, act.subject, act.who, act.reason, act.content, number=number, digest=digest)
        )
    return found


def broken_at(acts: Iterable[Act], last: int = 0, digest: str = FIRST_DIGEST) -> int | None:
    """The first number that is missing or not what was recorded; None where the chain is whole."""
    for act in acts:
        (expected,) = numbered([act], last, digest)
        if expected != act:
            return expected.number
        last, digest = act.number, act.digest
    return None
