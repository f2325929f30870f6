"""Where the usage of a holder comes from, remembered: the scheduler's queue its pod asked for."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from accountant.store import columns
from accountant.store.database import Cursor
from agent.wire import PodFacts


@dataclass(frozen=True, slots=True)
class Origin:
    cluster: str
    uid: str
    queue_ref: str


class OriginCache:
    """Origins by holder id. Thread-safe; facts that contradict what is remembered clear it."""

    def __init__(self, keep: int = 200_000) -> None:
        self._lock = threading.Lock()
        self._keep = keep
        self._known: dict[int, Origin] = {}
        self._refs: dict[tuple[str, str], str] = {}
        self._touched = 0

    def forget(self, facts: Iterable[tuple[str, PodFacts]], version: int) -> None:
        """The commit that makes `version` brought facts of pods."""
        with self._lock:
            for cluster, fact in facts:
                if self._refs.get((cluster, fact.uid), fact.queue_ref) != fact.queue_ref:
                    self._clear(version)
                    return
            # A reader of an older snapshot must not remember what these facts may have changed.
            self._touched = version

    def forget_all(self, version: int) -> None:
        with self._lock:
            self._clear(version)

    def read(self, cursor: Cursor, version: int, ids: Collection[int]) -> Mapping[int, Origin]:
        """Origins as of the snapshot behind `cursor`, which is that of `version`."""
        with self._lock:
            current = self._touched <= version
            found = {i: self._known[i] for i in ids if i in self._known} if current else {}
        missing = sorted(set(ids) - set(found))
        if missing:
            rows = cursor.rows("holder_origins", incoming=columns.table(columns.ID, [(i,) for i in missing]))
            fresh = {row[0]: Origin(*row[1:]) for row in rows}
            found |= fresh
            with self._lock:
                if self._touched <= version:
                    if len(self._known) + len(fresh) > self._keep:
                        self._clear(self._touched)
                    self._known |= fresh
                    self._refs |= {(o.cluster, o.uid): o.queue_ref for o in fresh.values()}
        return found

    def _clear(self, version: int) -> None:
        self._touched = version
        self._known.clear()
        self._refs.clear()
