"""Whose usage a payer's is: the pod of each holder and the queue it asked for, as the tables tell it, remembered.

A fact about any pod makes everything forgotten, so what is remembered is as the newest commit with facts left it, and
only readers of that commit or a later one may use it. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from accountant.store.database import Cursor
from accountant.store.windows.measuring import Origin, origins_of

MOST = 200_000
"""Holders."""


class Whose:
    """Of the payers that were asked for."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: dict[int, Origin] = {}
        self._since = 0

    def forget(self, version: int) -> None:
        """The commit that makes `version` brought facts about pods."""
        with self._lock:
            self._known = {}
            self._since = version

    def of(self, cursor: Cursor, version: int, payers: Collection[int]) -> Mapping[int, Origin]:
        """In the snapshot of `version`, which is that behind `cursor`; of nobody (0), nothing."""
        with self._lock:
            known = self._known if version >= self._since else {}
            found = {payer: known[payer] for payer in payers if payer in known}
        missing = {payer for payer in payers if payer and payer not in found}
        if missing:
            read = origins_of(cursor, missing)
            found |= read
            with self._lock:
                if version >= self._since:
                    if len(self._known) + len(read) > self._most:
                        self._known = {}
                    self._known |= read
        return found
