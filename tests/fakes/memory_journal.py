"""A journal in memory that implements the ledger's protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accountant.ledger.journal import FIRST_DIGEST, Act, ActKind, BooksMoved, NewAct, numbered
from tests.fakes.fixed_status import FixedStatus


class MemoryJournal:
    """A journal of its own, or a base class of a ledger in memory."""

    def __init__(self) -> None:
        self._acts: list[Act] = []

    @contextmanager
    def moment(self) -> Iterator[Any]:
        yield self

    def acts(self, *kinds: ActKind, subject: str | None = None, after: int = 0, limit: int | None = None) -> list[Act]:
        return [
            act
            for act in self._acts[after:]
            if (not kinds or act.kind in kinds) and (subject is None or act.subject == subject)
        ][:limit]

    def status(self) -> FixedStatus:
        return FixedStatus(last_act=len(self._acts))

    def record(self, acts: Sequence[NewAct], seen: int) -> list[Act]:
        if seen != len(self._acts):
            raise BooksMoved(seen, len(self._acts))
        new = numbered(acts, seen, self._acts[-1].digest if self._acts else FIRST_DIGEST)
        self._acts += new
        return new
