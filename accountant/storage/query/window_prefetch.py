"""Reads the quarter-hours that the next window will need ahead of time.

A key is told once, until its quarter-hour is touched again: where more is asked for than can be remembered, what was
read is soon forgotten, and would else be read for ever. Bounded. Not thread-safe: who owns it holds a lock.
"""

from __future__ import annotations

from collections import OrderedDict

from accountant.storage.query.window_span_cache import Key

MOST = 64
"""Keys that wait, and keys that were told; the oldest go first."""


class Soon:
    """Quarter-hours by view."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Key, int] = OrderedDict()
        self._told: OrderedDict[Key, int] = OrderedDict()

    def expect(self, key: Key, touched: int) -> None:
        """touched: the last commit that changed anything of the quarter-hour."""
        if self._told.get(key) != touched:
            _put(self._waiting, key, touched)

    def tell(self) -> list[Key]:
        """What was expected since the last time."""
        found, self._waiting = self._waiting, OrderedDict()
        for key, touched in found.items():
            _put(self._told, key, touched)
        return list(found)

    def clear(self) -> None:
        self._waiting.clear()
        self._told.clear()


def _put(keys: OrderedDict[Key, int], key: Key, touched: int) -> None:
    keys[key] = touched
    if len(keys) > MOST:
        keys.popitem(last=False)
