"""What the driver reports by itself: errors (XID) and changes of the MIG layout.

One event set for all GPUs, emptied at every reading without waiting, so no second thread holds the
driver. Counts belong to the GPU's uuid and outlive the library. A GPU that reports nothing, or a driver
without events, is no fault.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from agent.errors import DriverReplaced
from agent.model import XidCount
from agent.nvml import Driver, Fault, Refused

MAX_AT_ONCE = 64
MAX_KINDS = 64
_XID, _MIG_CHANGED = "nvmlEventTypeXidCriticalError", "nvmlEventMigConfigChange"


class Events:
    """The node's events."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._set: Any = None
        self._uuids: dict[int, str] = {}
        self._xids: dict[str, dict[int, XidCount]] = {}
        self._changed: set[str] = set()

    def listen(self, uuid: str, handle: Any) -> None:
        """Register a GPU. Without events it is metered all the same."""
        wanted = self._driver.constant(_XID) | self._driver.constant(_MIG_CHANGED)
        try:
            if self._set is None:
                self._set = self._driver.call("nvmlEventSetCreate")
            supported = self._driver.call("nvmlDeviceGetSupportedEventTypes", handle)
            if supported & wanted:
                self._driver.call("nvmlDeviceRegisterEvents", handle, supported & wanted, self._set)
        except Fault:  # what concerns more than events is told by the next reading
            return
        self._uuids[self._driver.address(handle)] = uuid

    def poll(self, at_ms: int) -> None:
        """Take what has been reported since the last call."""
        if self._set is None:
            return
        for _ in range(MAX_AT_ONCE):
            try:
                event = self._driver.call("nvmlEventSetWait_v2", self._set, 0)
            except Refused:  # nothing more; or one of them is lost, as its own reading says
                return
            uuid = self._uuids.get(self._driver.address(event.device), "")
            if event.eventType & self._driver.constant(_XID):
                self._count(uuid, int(event.eventData), at_ms)
            if event.eventType & self._driver.constant(_MIG_CHANGED):
                self._changed.add(uuid)

    def xids(self, uuid: str) -> tuple[XidCount, ...]:
        """The errors of one GPU, by number."""
        return tuple(count for _, count in sorted(self._xids.get(uuid, {}).items()))

    def mig_changed(self, uuid: str) -> bool:
        """Whether the GPU's MIG layout changed since this was last asked."""
        changed = uuid in self._changed
        self._changed.discard(uuid)
        return changed

    def close(self) -> None:
        """Give the set back, while the library is still there."""
        if self._set is not None:
            with suppress(Fault, DriverReplaced):  # the library may be gone, and the set with it
                self._driver.call("nvmlEventSetFree", self._set)
        self._set = None
        self._uuids.clear()

    def _count(self, uuid: str, xid: int, at_ms: int) -> None:
        known = self._xids.setdefault(uuid, {})
        if xid in known or len(known) < MAX_KINDS:
            known[xid] = XidCount(xid, known[xid].count + 1 if xid in known else 1, at_ms)
