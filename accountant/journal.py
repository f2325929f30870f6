"""What people did to the books: numbered acts with who, when and why, appended and never changed.

Everything beside the metered time is a fold over this list: which prices were in force, which months are closed,
which corrections and credits stand. An act is recorded only after the number its author has seen, so
two people cannot close one month, and nobody decides on books that have moved meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from accountant.errors import AccountantError

ActKind = Literal["prices", "closed", "reopened", "published", "repriced", "corrected", "adjusted", "invoiced"]


class BooksMoved(AccountantError):
    """Somebody else's act came in between: look again, then decide again."""

    def __init__(self, seen: int, last: int) -> None:
        super().__init__(f"the books have moved from act {seen} to act {last} meanwhile; look again")


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
    """number: 1, 2, 3, … in the order of recording."""

    number: int = 0


class Journal(Protocol):
    """Where acts are kept."""

    def acts(self, *kinds: ActKind, subject: str | None = None) -> list[Act]:
        """In the order of recording; without a kind, all."""
        ...

    def last_act(self) -> int:
        """The number of the newest, 0 where there is none."""
        ...

    def record(self, acts: Sequence[NewAct], seen: int) -> list[Act]:
        """All of them or none, durably. Raises BooksMoved unless `seen` is the last number, and
        accountant.errors.LedgerUnavailable when nothing was stored."""
        ...
