"""October of one H100, and what it costs."""

from __future__ import annotations

from accountant.core.errors import LedgerUnavailable
from accountant.core.periods import Month

BOOK = "id: h100, model: H100, price: '2.10', valid_from: 2026-01-01"
SEP, OCT, NOV = Month(2026, 9), Month(2026, 10), Month(2026, 11)


def october(books, **names):
    return [books.held("2026-10-01", "2026-11-01", 2, 0.5, **names)]


class Breaking:
    """A ledger of whose acts one kind cannot be recorded."""

    def __init__(self, ledger, kind):
        self._ledger, self._kind = ledger, kind

    def __getattr__(self, name):
        return getattr(self._ledger, name)

    def record(self, acts, seen):
        if any(act.kind == self._kind for act in acts):
            raise LedgerUnavailable("only 1 MiB of disk are free")
        return self._ledger.record(acts, seen)
