"""Limits the number of open connections, in total and per address, and the rate of each client's requests.

A connection counts from the moment it is accepted, before TLS, until it is closed. The limit of all connections leaves
file descriptors for the rest of the process. A token bucket limits the rate of a client's requests."""

from __future__ import annotations

import resource
import threading
from collections import Counter
from dataclasses import dataclass

from cachetools import LRUCache

from gputally.base.clock import Clock

RESERVED_DESCRIPTORS = 128
"""Descriptors reserved for the ledger, the spool, the log and outgoing connections."""
FEWEST_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a server.

    connections: open connections of all clients.
    connections_by_address: open connections of one address.
    header_seconds: time for the TLS handshake, and for a request's line and headers together.
    header_bytes: size of a request's line and headers together.
    stalled_seconds: time that an answer waits for a client that does not read."""

    connections: int = 16_384
    connections_by_address: int = 1_024
    header_seconds: float = 5.0
    header_bytes: int = 64 * 1024
    stalled_seconds: float = 120.0


class Connections:
    """Counts open connections. Thread-safe."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._most = min(limits.connections, most_descriptors())
        self._most_by_address = min(limits.connections_by_address, max(1, self._most // 2))
        self._lock = threading.Lock()
        self._by_address: Counter[str] = Counter()
        self._open = 0
        self.refused = 0
        """Number of connections that exceeded a limit."""

    def enter(self, address: str) -> bool:
        """Count a new connection. Return False, and do not count it, if it exceeds a limit."""
        with self._lock:
            if self._open >= self._most or self._by_address[address] >= self._most_by_address:
                self.refused += 1
                return False
            self._open += 1
            self._by_address[address] += 1
            return True

    def leave(self, address: str) -> None:
        """Record that a connection ended."""
        with self._lock:
            self._open -= 1
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    @property
    def open(self) -> int:
        """The number of open connections."""
        return self._open


def most_descriptors() -> int:
    """Return the number of connections that leave this process enough file descriptors. Set the process's soft limit of
    descriptors to its hard limit before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        return 2**31
    return max(FEWEST_CONNECTIONS, soft - max(RESERVED_DESCRIPTORS, soft // 4))


_BUCKETS = 16_384
"""Number of clients that a `RateLimit` remembers."""


class RateLimit:
    """Limits the rate of requests with a token bucket for each client. Thread-safe. To bound memory, it forgets the
    client that has sent no request for the longest time.

    per_second: requests that a client may send per second on average.
    burst: requests that it may send at once."""

    def __init__(self, clock: Clock, per_second: float, burst: int) -> None:
        self._clock = clock
        self._per_ms = per_second / 1000
        self._burst = float(burst)
        self._lock = threading.Lock()
        self._buckets: LRUCache[tuple[str, str], tuple[float, int]] = LRUCache(_BUCKETS)

    def admit(self, client: tuple[str, str], amount: int = 1) -> float:
        """Return 0 if a request may pass, or else the seconds after which the client's next one may.

        amount: what the request counts as, at most `burst`."""
        now = self._clock.monotonic_ms()
        with self._lock:
            level, since = self._buckets.pop(client, (self._burst, now))
            level = min(self._burst, level + (now - since) * self._per_ms)
            wait = 0.0 if level >= amount else (amount - level) / self._per_ms / 1000
            self._buckets[client] = (level if wait else level - amount, now)
        return wait

    def charge(self, client: tuple[str, str], amount: int) -> None:
        """Count what an admitted request turned out to be beyond what it was admitted for, however much is left."""
        with self._lock:
            level, since = self._buckets.pop(client, (self._burst, self._clock.monotonic_ms()))
            self._buckets[client] = (level - amount, since)
