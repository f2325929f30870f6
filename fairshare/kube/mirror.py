"""A kind's objects kept in memory by list and watch, each reduced at once to what is needed of it.

Twenty thousand pods are a hundred megabytes as objects and five as values; a cycle must not fetch them
again. The copy is level-triggered: whatever breaks (the watch ends, a version is too old, the API server is
away), the next list makes it whole, and meanwhile it keeps what it had. `age_s` says how far behind it may be.

Runs in a thread of its own; `values` may be called from any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from agent.clock import Clock
from agent.units import MS_PER_SECOND
from fairshare.errors import ClusterError, Gone
from fairshare.kube.kinds import Kind, Object
from fairshare.kube.ports import Cluster

T = TypeVar("T")
WATCH_S = 240.0
"""How long one watch stays open."""
PAUSE_S = 1.0
"""Least time between two requests; after failures it doubles up to `MOST_PAUSE_S`."""
MOST_PAUSE_S = 30.0
MOST_BEHIND_S = 600.0
"""A server that is there is heard of once in a watch at least; after twice that nobody may rely on what was seen."""


class Mirror(Generic[T]):
    """Everything of one kind for which `reduce` has a value."""

    def __init__(self, cluster: Cluster, kind: Kind, reduce: Callable[[Object], T | None], clock: Clock) -> None:
        self._cluster = cluster
        self._kind = kind
        self._reduce = reduce
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], T] = {}
        self._version = ""
        self._heard_ms: int | None = None
        self._fault: str | None = None
        self._progress: Callable[[], None] = lambda: None

    def values(self) -> tuple[T, ...]:
        """As last heard, by (namespace, name)."""
        with self._lock:
            return tuple(value for _, value in sorted(self._held.items(), key=lambda item: item[0]))

    @property
    def synced(self) -> bool:
        """Whether a list has ever been read to its end."""
        return self._heard_ms is not None

    @property
    def fault(self) -> str | None:
        """What the last attempt failed of; None while all is well."""
        return self._fault

    def age_s(self) -> float | None:
        """Seconds since the server last answered; None before it ever has."""
        heard = self._heard_ms
        return None if heard is None else (self._clock.monotonic_ms() - heard) / MS_PER_SECOND

    def behind(self) -> str | None:
        """Why nothing may be decided by what it holds; None: it may."""
        age_s = self.age_s()
        why = f": {self._fault}" if self._fault else ""
        if age_s is None:
            return f"{self._kind.plural} have not been read yet{why}"
        if age_s > MOST_BEHIND_S:
            return f"{self._kind.plural} are as they were {age_s:.0f} s ago{why}"
        return None

    def prime(self) -> None:
        """The first list, so that the first cycle knows what is there; what fails now is tried again by `run`."""
        try:
            self.step()
        except ClusterError as error:
            self._fault = str(error)

    def run(self, stop: threading.Event, progress: Callable[[], None] = lambda: None) -> None:
        """Keep up until `stop` is set. progress: called before each request and at each change."""
        self._progress = progress
        pause_s = PAUSE_S
        while not stop.is_set():
            progress()
            try:
                self.step(stop)
            except ClusterError as error:
                self._fault = str(error)
                pause_s = min(MOST_PAUSE_S, pause_s * 2)
            else:
                pause_s = PAUSE_S
            if self._clock.wait(pause_s, stop):
                return

    def step(self, stop: threading.Event | None = None) -> None:
        """List where there is no version to go on from, else watch once. Raises ClusterError."""
        if not self._version:
            self._list()
            self._fault = None
            return
        try:
            for change in self._cluster.watch(self._kind, self._version, WATCH_S):
                self._take(change.type, change.obj)
                if stop is not None and stop.is_set():
                    return
        except Gone:
            self._version = ""
        except ClusterError:
            self._version = ""
            raise
        self._heard_ms, self._fault = self._clock.monotonic_ms(), None

    def _list(self) -> None:
        found: dict[tuple[str, str], T] = {}

        def take(obj: Object) -> None:
            value = self._reduce(obj)
            if value is not None:
                found[_key(obj)] = value

        version = self._cluster.scan(self._kind, take)
        with self._lock:
            self._held = found
        self._version, self._heard_ms = version, self._clock.monotonic_ms()

    def _take(self, change: str, obj: Object) -> None:
        self._progress()
        if change != "BOOKMARK":
            value = None if change == "DELETED" else self._reduce(obj)
            with self._lock:
                if value is None:
                    self._held.pop(_key(obj), None)
                else:
                    self._held[_key(obj)] = value
        self._version = obj["metadata"].get("resourceVersion") or self._version
        self._heard_ms = self._clock.monotonic_ms()


def _key(obj: Object) -> tuple[str, str]:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
