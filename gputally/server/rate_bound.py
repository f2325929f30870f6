"""Limits how often one client may ask: one token bucket per client, in bounded memory."""

from __future__ import annotations

from cachetools import LRUCache

from gputally.base.clock import Clock

_BUCKETS = 16_384


class RateBound:
    """A token bucket per client; the least recently seen clients are forgotten, never the memory bound."""

    def __init__(self, clock: Clock, per_second: float, burst: int) -> None:
        self._clock = clock
        self._per_ms = per_second / 1000
        self._burst = float(burst)
        self._buckets: LRUCache[tuple[str, str], tuple[float, int]] = LRUCache(_BUCKETS)

    def admit(self, client: tuple[str, str]) -> float:
        """0 where the request may pass, else the seconds after which one may."""
        now = self._clock.monotonic_ms()
        level, since = self._buckets.pop(client, (self._burst, now))
        level = min(self._burst, level + (now - since) * self._per_ms)
        wait = 0.0 if level >= 1 else (1 - level) / self._per_ms / 1000
        self._buckets[client] = (level if wait else level - 1, now)
        return wait
