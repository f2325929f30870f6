"""A list kept up to date: list once, then watch from there, for as long as it goes.

The protocol of the API server's watches: go on from the last resource version after every break, bookmarks
move it while nothing happens, 410 Gone means that it is too old and everything is listed anew. Failures
back off with jitter, so that a thousand nodes do not come back at once. What was known stays known
meanwhile, and `failure` says since when it may be old.
Source: kubernetes.io, "Efficient detection of changes".
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from agent.clock import Clock
from agent.kube import apijson
from agent.kube.apiserver import ApiUnavailable
from agent.units import MS_PER_MINUTE, MS_PER_SECOND

log = logging.getLogger("agent.kube.reflector")

PAGE_ITEMS = 500
WATCH_S = 300
"""The server ends a watch after this long, give or take a fifth."""
SHORT_MS = MS_PER_SECOND
"""A watch without a word that ends within this is a failure: asked again at once it would be a busy loop."""
BACKOFF_BASE_MS = MS_PER_SECOND
BACKOFF_CAP_MS = MS_PER_MINUTE
ABSENT_MS = 10 * MS_PER_MINUTE
FORBIDDEN, NOT_FOUND, GONE = 403, 404, 410
_CHANGES = frozenset({"ADDED", "MODIFIED", "DELETED"})
_SYSTEM_RANDOM = random.SystemRandom()


class Api(Protocol):
    """Where objects come from: `agent.kube.apiserver.ApiServer`."""

    def page(self, path: str, parameters: Mapping[str, str]) -> bytes: ...
    def lines(self, path: str, parameters: Mapping[str, str], timeout_s: float) -> Iterator[bytes]: ...


class Store(Protocol):
    """What takes the objects. Items are JSON; one that cannot be read is the store's to step over."""

    def replace(self, items: Sequence[bytes]) -> None:
        """These are all of them."""
        ...

    def apply(self, change: str, item: bytes) -> None:
        """ADDED, MODIFIED or DELETED."""
        ...


class Reflector:
    """Keeps `store` like the objects at `path` that `selector` (a field selector) chooses.

    synced: whether it was listed once. failure: why the latest attempt broke off ("" = it goes on).
    took_ms: how long the last list took; what follows it comes by itself.
    optional: the cluster may not have such objects at all, which is no failure and asked again now and then."""

    def __init__(
        self,
        api: Api,
        path: str,
        selector: str,
        store: Store,
        clock: Clock,
        jitter: Callable[[], float] = _SYSTEM_RANDOM.random,
        *,
        optional: bool = False,
    ) -> None:
        self._optional = optional
        self.synced = False
        self.failure = "not listed yet"
        self.took_ms = 0
        self._api = api
        self._path = path
        self._selector = {"fieldSelector": selector}
        self._store = store
        self._clock = clock
        self._jitter = jitter
        self._version = ""
        self._failures = 0

    def run(self, stop: threading.Event) -> None:
        """`step` until `stop` is set, with pauses after failures."""
        while not stop.is_set():
            pause_ms = self.step()
            if pause_ms:
                self._clock.wait(pause_ms / MS_PER_SECOND, stop)

    def step(self) -> int:
        """List where that is needed, then watch until the watch ends. How long to wait before the next one, ms."""
        try:
            if not self._version:
                self._list()
            self._watch()
        except (ApiUnavailable, apijson.Unreadable) as error:
            return self._failed(error)
        return 0

    def _list(self) -> None:
        items: list[bytes] = []
        more, began_ms = "", self._clock.monotonic_ms()
        while True:
            # Version 0: from the server's cache, where one node's pods are found without reading all.
            page = {"limit": str(PAGE_ITEMS), "continue": more} if more else {"resourceVersion": "0"}
            found = apijson.decode(self._api.page(self._path, {**self._selector, **page}), apijson.Listing)
            items += [bytes(item) for item in found.items or ()]
            more = found.metadata.more
            if not more:
                break
        self._store.replace(items)
        self._version = found.metadata.resource_version
        self.took_ms = self._clock.monotonic_ms() - began_ms
        self.synced = True
        self.failure = ""

    def _watch(self) -> None:
        lasts_s = round(WATCH_S * (0.8 + 0.4 * self._jitter()))
        parameters = {
            **self._selector,
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(lasts_s),
        }
        began_ms, quiet = self._clock.monotonic_ms(), True
        for line in self._api.lines(self._path, parameters, lasts_s + 30):
            self._take(apijson.decode(line, apijson.Event))
            quiet = False
        if quiet and self._clock.monotonic_ms() - began_ms < SHORT_MS:
            raise ApiUnavailable("watch: ended as soon as it began")
        self._well()

    def _take(self, event: apijson.Event) -> None:
        if event.type == "ERROR":
            status = apijson.decode(event.object, apijson.Status)
            raise ApiUnavailable(f"watch: {status.message or status.reason}"[:200], status.code)
        version = apijson.resource_version(event.object)
        if event.type in _CHANGES:
            self._store.apply(event.type, bytes(event.object))
        self._version = version or self._version
        self._well()

    def _well(self) -> None:
        if self._failures:
            log.info("the API server is followed again", extra={"path": self._path})
        self._failures = 0
        self.failure = ""

    def _failed(self, error: ApiUnavailable | apijson.Unreadable) -> int:
        status = error.status if isinstance(error, ApiUnavailable) else GONE
        if status == NOT_FOUND and self._optional:
            self.failure = ""
            return ABSENT_MS
        if status == GONE:
            self._version = ""  # too old, or not to be read on from: everything anew
        if status == GONE and not self._failures:
            self._failures = 1
            return 0
        self._failures += 1
        if not self.failure or self._failures == 1:
            log.warning("the API server cannot be followed", extra={"path": self._path, "reason": str(error)})
        self.failure = str(error)
        ceiling = min(BACKOFF_CAP_MS, BACKOFF_BASE_MS << min(self._failures - 1, 16))
        if status == FORBIDDEN:
            ceiling = BACKOFF_CAP_MS  # nobody grants a right within a second
        asked_ms = error.retry_after_s * MS_PER_SECOND if isinstance(error, ApiUnavailable) else 0
        return max(ceiling // 2 + round(self._jitter() * ceiling / 2), asked_ms)
