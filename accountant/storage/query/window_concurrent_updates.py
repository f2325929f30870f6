"""Tracks commits that happen while a window is being read.

Commits follow each other faster than the tables answer, so that what was read would always be out of date. A reading
is begun before its snapshot is pinned, and told of every commit from then on; what the snapshot shows already is told
apart by the version. Not thread-safe: `accountant.storage.query.window_buckets` holds its lock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from accountant.storage.query.window_figures import View
from accountant.storage.query.window_span_cache import Grain
from accountant.storage.write.name_ids import PodKey
from gputally.base.units import BUCKET_MS


class Reading:
    """Of a window, for a view."""

    def __init__(self, view: View, start_ms: int, end_ms: int) -> None:
        self.view = view
        self._first, self._end = start_ms - start_ms % BUCKET_MS, end_ms
        self._came: dict[int, list[tuple[int, Grain | None]]] = defaultdict(list)
        self._told: list[tuple[int, PodKey, str]] = []
        self._forgotten = 0

    def wants(self, view: View, bucket: int) -> bool:
        return self.view == view and self._first <= bucket < self._end

    def take(self, version: int, bucket: int, brought: Grain | None) -> None:
        """brought: what the commit added to a quarter-hour; None: it changed it otherwise."""
        self._came[bucket].append((version, brought))

    def tell(self, version: int, pod: PodKey, queue_ref: str) -> None:
        """A fact came of a pod."""
        self._told.append((version, pod, queue_ref))

    def forget(self, version: int) -> None:
        """Nothing from before that commit holds any more."""
        self._forgotten = version

    def since(self, version: int, bucket: int) -> list[Grain] | None:
        """What came to a quarter-hour after that commit; None: what was read of it does not hold any more."""
        later = [brought for at, brought in self._came.get(bucket, ()) if at > version]
        added = [brought for brought in later if brought is not None]
        return added if len(added) == len(later) and self._forgotten <= version else None

    def contradicts(self, version: int, refs: Mapping[PodKey, str]) -> bool:
        """Whether a fact that came after that commit may have changed whose usage it is that was read."""
        return any(at > version and refs.get(pod, ref) != ref for at, pod, ref in self._told)
