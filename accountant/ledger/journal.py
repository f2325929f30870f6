"""Defines the journal of acts. An act is something that a person or the accountant decided or did besides metering,
such as closing a month, changing prices or sending a report. Acts are numbered and have a time, an author and a reason.

The prices that were in force, the closed months, and the corrections and credits that apply are all derived from the
journal. To record an act, the caller passes the number of the last act that it has seen. If another act was recorded
since then, the call fails. Two people therefore cannot close the same month, and no act is based on an outdated state.
The function `record` tolerates acts that invalidate no decision (`BESIDE`), such as the progress of an import."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Final, Literal, ParamSpec, Protocol, TypeVar

from gputally.base.errors import AccountantError

ActKind = Literal[
    "prices", "closed", "reopened", "published", "repriced", "corrected", "refused", "adjusted", "invoiced", "policy",
    "pods", "delivery", "imported", "withdrawn", "retired", "redated", "moved", "lake", "drafted",
]  # fmt: skip


P = ParamSpec("P")
T = TypeVar("T")


class BooksMoved(AccountantError):
    """Another act was recorded after the last one that the caller had seen. Read the journal again, decide again and
    retry."""

    def __init__(self, seen: int, last: int) -> None:
        super().__init__(
            f"nothing was recorded, because act {last} was recorded meanwhile (the last act seen was {seen}): read the "
            "journal again and retry"
        )


@dataclass(frozen=True, slots=True)
class NewAct:
    """An act that is not recorded yet.

    subject: what it concerns, such as a month, a price book version, a node or a delivery.
    content: JSON, whose fields depend on `kind`."""

    at_ms: int
    kind: ActKind
    subject: str
    who: str
    reason: str
    content: str = "{}"


@dataclass(frozen=True, slots=True)
class Act(NewAct):
    """A recorded act.

    number: 1, 2, 3, … in the order of recording.
    digest: SHA-256 over the digest of the previous act and the content of this one, so that a later removal or change
        is detected."""

    number: int = 0
    digest: str = ""


class Acts(Protocol):
    """The acts as of one commit."""

    def acts(self, *kinds: ActKind, subject: str | None = None, after: int = 0, limit: int | None = None) -> list[Act]:
        """The acts in the order of recording.

        kinds: only these; all if none are given.
        subject: only those that concern it.
        after: only those with a higher number.
        limit: at most this many, the first ones."""
        ...


class JournalStatus(Protocol):
    @property
    def last_act(self) -> int:
        """The number of the newest act, or 0 if there is none."""
        ...


class Journal(Protocol):
    """Stores acts. A moment of it reads them."""

    def moment(self) -> AbstractContextManager[Acts]: ...

    def status(self) -> JournalStatus: ...

    def record(self, acts: Sequence[NewAct], seen: int) -> list[Act]:
        """Records all acts durably, or none. Raises BooksMoved unless `seen` is the last number, and
        accountant.core.errors.LedgerUnavailable if nothing was stored."""
        ...


BESIDE: Final[frozenset[ActKind]] = frozenset(
    {"invoiced", "pods", "delivery", "imported", "retired", "redated", "moved", "lake", "drafted"}
)
"""Kinds of acts that never invalidate a decision made before them, such as the progress of an import."""
_TRIES = 20


def record(journal: Journal, acts: Sequence[NewAct], seen: int | None) -> list[Act]:
    """Like `Journal.record`, but also succeeds if only acts of the kinds in `BESIDE` were recorded after `seen` (an
    import, for example, records an act every minute). seen: None if the acts do not depend on earlier ones. Raises
    BooksMoved."""
    known = journal.status().last_act if seen is None else seen
    for _ in range(_TRIES):
        last = journal.status().last_act
        if seen is not None and last > known:
            with journal.moment() as moment:
                between = moment.acts(after=known, limit=last - known)
            if any(act.kind not in BESIDE for act in between):
                raise BooksMoved(seen, last)
        known = last
        with suppress(BooksMoved):
            return journal.record(acts, known)
    raise BooksMoved(known, journal.status().last_act)


def retry_when_books_moved(decide: Callable[P, T]) -> Callable[P, T]:
    """Decorator: calls the function again if it raises BooksMoved. The function must read the journal itself. Raises
    BooksMoved after 20 attempts."""

    @wraps(decide)
    def deciding(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(_TRIES - 1):
            with suppress(BooksMoved):
                return decide(*args, **kwargs)
        return decide(*args, **kwargs)

    return deciding


FIRST_DIGEST = "0" * 64
"""The digest that precedes the first act."""


def numbered(acts: Iterable[NewAct], last: int, digest: str) -> list[Act]:
    """Turns new acts into recorded ones that follow act number `last` with `digest` (0 and FIRST_DIGEST: no act
    precedes them)."""
    found = []
    for number, act in enumerate(acts, start=last + 1):
        text = json.dumps([number, act.at_ms, act.kind, act.subject, act.who, act.reason, act.content])
        digest = hashlib.sha256((digest + text).encode()).hexdigest()
        found.append(
            Act(act.at_ms, act.kind, act.subject, act.who, act.reason, act.content, number=number, digest=digest)
        )
    return found


def broken_at(acts: Iterable[Act], last: int = 0, digest: str = FIRST_DIGEST) -> int | None:
    """The first number that is missing or whose act was changed after recording; None if the chain is
    intact."""
    for act in acts:
        (expected,) = numbered([act], last, digest)
        if expected != act:
            return expected.number
        last, digest = act.number, act.digest
    return None
