"""Reads the driver's NVML events: counts XID errors, notes changed MIG layouts, and names the recovery actions that
some XID errors require.

`Events.poll` empties one event set for all GPUs at every reading without waiting, so no second thread uses the driver.
The counts stay when NVML is closed and opened again. A GPU or a driver without events is not a fault. If the driver
supports events and does not deliver them, `failure` has the reason."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, Final

from agent.core.readings import DriverReplaced, RecoveryAction, XidCount
from agent.gpu_readers.nvml.nvml_library import Driver, NvmlFault, NvmlRefused

log = logging.getLogger("agent.gpu_readers.nvml.nvml_events")

MAX_AT_ONCE = 64
MAX_KINDS = 64
_XID, _MIG_CHANGED = "nvmlEventTypeXidCriticalError", "nvmlEventMigConfigChange"
_TIMEOUT = 10

RECOVERY: Final[dict[int, RecoveryAction]] = {
    48: "reset_gpu",
    64: "reset_gpu",
    79: "drain_node",
    94: "restart_app",
    95: "reset_gpu",
    119: "reset_gpu",
    120: "reset_gpu",
}
"""Actions that the XID catalogue requires at once: 48 double-bit ECC error, 64 failed row remapping, 79 GPU off the
bus, 94 contained and 95 uncontained memory error, 119 and 120 no answer of the GPU's system processor."""


class Events:
    """The NVML events of all GPUs of the node."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._set: Any = None
        self._uuids: dict[int, str] = {}
        self._xids: dict[str, dict[int, XidCount]] = {}
        self._unmended: dict[str, set[int]] = {}
        self._changed: set[str] = set()
        self._unavailable: dict[str, str] = {}
        """Why the events of a GPU are not available, by the GPU's uuid."""
        self._poll_failure = ""
        self._heard: set[str] = set()
        """The GPUs whose XID errors the driver reports."""

    @property
    def failure(self) -> str:
        """Why events may be missing; "" if the events are complete."""
        return self._poll_failure or next(iter(self._unavailable.values()), "")

    def unread(self, uuid: str) -> str:
        """Return why XID errors of a GPU may be missing; "" if they are complete."""
        known = "" if uuid in self._heard else "the driver does not report the XID errors of this GPU"
        return self._poll_failure or self._unavailable.get(uuid, known)

    def listen(self, uuid: str, handle: Any) -> None:
        """Register a GPU for events. If the driver refuses, `failure` has the reason."""
        self._uuids[self._driver.address(handle)] = uuid
        self._unavailable.pop(uuid, None)
        self._heard.discard(uuid)
        wanted = self._driver.constant(_XID) | self._driver.constant(_MIG_CHANGED)
        try:
            if self._set is None:
                self._set = self._driver.call("nvmlEventSetCreate")
            supported = self._driver.call("nvmlDeviceGetSupportedEventTypes", handle)
            if supported & wanted:
                self._driver.call("nvmlDeviceRegisterEvents", handle, supported & wanted, self._set)
            if supported & self._driver.constant(_XID):
                self._heard.add(uuid)
        except NvmlFault as fault:  # a fault that concerns more than events shows in the next reading
            if not (isinstance(fault, NvmlRefused) and fault.unsupported):
                log.warning(
                    "the driver does not report the events of a GPU", extra={"uuid": uuid, "reason": str(fault)}
                )
                self._unavailable[uuid] = str(fault)

    def poll(self, at_ms: int) -> None:
        """Read the events since the last call, at most `MAX_AT_ONCE`. at_ms: the time of these events."""
        if self._set is None:
            return
        failure = ""
        for _ in range(MAX_AT_ONCE):
            try:
                event = self._driver.call("nvmlEventSetWait_v2", self._set, 0)
            except NvmlRefused as fault:
                if fault.code == _TIMEOUT:
                    break
                failure = str(fault)
                continue
            uuid = self._uuid(event.device)
            if not uuid:
                failure = "an event of an unknown GPU"
                log.warning(
                    "the driver reported an event of an unknown GPU",
                    extra={"type": event.eventType, "data": event.eventData},
                )
                continue
            if event.eventType & self._driver.constant(_XID):
                self._count(uuid, int(event.eventData), at_ms)
            if event.eventType & self._driver.constant(_MIG_CHANGED):
                self._changed.add(uuid)
        if failure and failure != self._poll_failure:
            log.warning("events of the driver may be missing", extra={"reason": failure})
        self._poll_failure = failure

    def unmended(self, uuid: str) -> tuple[int, ...]:
        """Return the XID errors of a GPU whose required action was not taken yet."""
        return tuple(sorted(self._unmended.get(uuid, ())))

    def mend(self, uuid: str, *xids: int) -> None:
        """Record that the actions for these XID errors of a GPU were taken; without `xids`, for all of them."""
        if not xids:
            self._unmended.pop(uuid, None)
        self._unmended.get(uuid, set()).difference_update(xids)

    def xids(self, uuid: str) -> tuple[XidCount, ...]:
        """Return the XID errors of one GPU, sorted by number."""
        return tuple(count for _, count in sorted(self._xids.get(uuid, {}).items()))

    def mig_changed(self, uuid: str) -> bool:
        """Return True if the driver reported a change of the GPU's MIG layout since the last call."""
        changed = uuid in self._changed
        self._changed.discard(uuid)
        return changed

    def close(self) -> None:
        """Release the event set while the library is still loaded."""
        if self._set is not None:
            with suppress(NvmlFault, DriverReplaced):  # the library may be closed already, and the set with it
                self._driver.call("nvmlEventSetFree", self._set)
        self._set = None
        self._uuids.clear()

    def _uuid(self, handle: Any) -> str:
        """Return the uuid of the GPU with this handle; "" if the driver does not give it."""
        address = self._driver.address(handle)
        if address not in self._uuids:
            try:
                self._uuids[address] = str(self._driver.call("nvmlDeviceGetUUID", handle))
            except NvmlRefused:
                return ""
        return self._uuids[address]

    def _count(self, uuid: str, xid: int, at_ms: int) -> None:
        if xid in RECOVERY:
            self._unmended.setdefault(uuid, set()).add(xid)
        known = self._xids.setdefault(uuid, {})
        if xid in known or len(known) < MAX_KINDS:
            known[xid] = XidCount(xid, known[xid].count + 1 if xid in known else 1, at_ms)
