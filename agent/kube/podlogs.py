"""What the pods of this node are called, without asking anybody: the kubelet's folders of container logs.

`/var/log/pods/NAMESPACE_NAME_UID/` exists for every pod the kubelet runs, static ones under the uid
that their control group shows. Read-only, bounded, and absent outside Kubernetes, which is no fault.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from agent.units import MS_PER_SECOND

RESCAN_MS = 10 * MS_PER_SECOND
MAX_PODS = 10_000


class PodName(NamedTuple):
    namespace: str
    name: str


class PodLogs:
    """Names by pod uid. root: usually /var/log/pods."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[str, PodName] = {}
        self._next_ms = 0

    def names(self, at_ms: int) -> dict[str, PodName]:
        """Every pod with a folder, at most ten seconds old."""
        if at_ms >= self._next_ms:
            self._next_ms = at_ms + RESCAN_MS
            self._names = self._scan()
        return self._names

    def _scan(self) -> dict[str, PodName]:
        found: dict[str, PodName] = {}
        try:
            with os.scandir(self._root) as entries:
                for entry in entries:
                    parts = entry.name.split("_")  # none of the three may contain one
                    if len(parts) == 3 and all(parts) and len(found) < MAX_PODS:
                        found[parts[2]] = PodName(parts[0], parts[1])
        except OSError:
            return {}
        return found
