"""The pods of this node as the API server told them, with those that are gone for as long as they are news.

Fed by a `agent.kube.reflector.Reflector`; read from the sampling thread, which takes a snapshot and never waits.
A pod that came and went between two samples is told all the same. Bounded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import msgspec

from agent.clock import Clock
from agent.kube import podview
from agent.kube.apijson import Unreadable
from agent.kube.boundpods import BoundPods
from agent.kube.podview import PodView
from agent.units import MS_PER_MINUTE
from agent.wire import PodFacts

log = logging.getLogger("agent.kube.podwatch")

PATH = "/api/v1/pods"
TELL_GONE_MS = 5 * MS_PER_MINUTE
MAX_PODS = 5_000
Key = tuple[str, str]


class PodStore:
    """`agent.kube.reflector.Store` of one node's pods. labels: keys or patterns of what may leave the node.

    on_change: called after every change of a pod that may hold a GPU. bound: what pods declared when they were bound;
    what their owners change later counts for nothing."""

    def __init__(
        self,
        node: str,
        labels: Sequence[str],
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
        bound: BoundPods | None = None,
    ) -> None:
        self._bound = bound or BoundPods()
        self.unreadable = 0
        self._node = node
        self._labels = labels
        self._clock = clock
        self._on_change = on_change
        self._mutex = threading.Lock()
        self._views: dict[Key, PodView] = {}
        self._gone: dict[str, tuple[PodView, int]] = {}

    def replace(self, items: Sequence[bytes]) -> None:
        """These are all pods; those known before and not among them ended at a time nobody saw."""
        views = {view.key: view for item in items[:MAX_PODS] if (view := self._read(item)) is not None}
        with self._mutex:
            for key, view in self._views.items():
                if key not in views or views[key].facts.uid != view.facts.uid:
                    self._bury(view)
            self._views = views
        self._bound.keep_only(view.facts.uid for view in views.values())
        self._on_change()

    def apply(self, change: str, item: bytes) -> None:
        """See agent.kube.reflector.Store."""
        view = self._read(item)
        if view is None:
            return
        with self._mutex:
            views = dict(self._views)
            known = views.get(view.key)
            if change == "DELETED":
                if known is None or known.facts.uid == view.facts.uid:
                    views.pop(view.key, None)
                self._bound.forget(view.facts.uid)
                self._bury(view)
            elif view.key in views or len(views) < MAX_PODS:
                if known is not None and known.facts.uid != view.facts.uid:
                    self._bury(known)
                views[view.key] = view
            self._views = views
        if view.wants_gpu:
            self._on_change()

    def views(self) -> Mapping[Key, PodView]:
        """The pods there are, by namespace and name. Not to be changed."""
        return self._views

    def gone(self) -> Collection[Key]:
        """Namespace and name of the pods that were deleted lately."""
        with self._mutex:
            return {view.key for view, _ in self._gone.values()} - self._views.keys()

    def facts(self, at_ms: int, holders: Collection[str]) -> tuple[PodFacts, ...]:
        """Facts of the pods that want a GPU, and of those whose uid is among `holders`."""
        now_ms = self._clock.monotonic_ms()
        with self._mutex:
            for uid in [uid for uid, (_, until_ms) in self._gone.items() if until_ms <= now_ms]:
                del self._gone[uid]
            views = [*self._views.values(), *(view for view, _ in self._gone.values())]
        told = {v.facts.uid: v.facts for v in views if v.wants_gpu or v.facts.uid in holders}
        return tuple(msgspec.structs.replace(told[uid], observed_ms=at_ms) for uid in sorted(told))

    def _read(self, item: bytes) -> PodView | None:
        try:
            return self._bound.as_bound(podview.read(item, self._node, self._labels))
        except Unreadable as error:
            self.unreadable += 1
            log.warning("a pod that cannot be read", extra={"reason": str(error)[:200]})
            return None

    def _bury(self, view: PodView) -> None:
        if len(self._gone) >= MAX_PODS:
            del self._gone[next(iter(self._gone))]
        ended_ms = view.facts.ended_ms or self._clock.wall_ms()
        facts = msgspec.structs.replace(view.facts, ended_ms=ended_ms)
        until_ms = self._clock.monotonic_ms() + TELL_GONE_MS
        self._gone[facts.uid] = replace(view, facts=facts, over=True, running=False), until_ms
