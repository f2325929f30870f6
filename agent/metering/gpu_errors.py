"""What the agent tells the accountant of the errors of its GPUs: XID errors, uncorrected memory errors, slowdowns of
the hardware, and the actions that faults require.

It reads nothing: the readers read the condition of each device anyway, some of it every ten seconds. Counts begin with
the process, except that of memory errors, which the driver counts since it was loaded. The accountant adds up what
agents counted one after the other, and knows by `since_ms` whether a count began again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from agent.core.readings import DeviceCondition, DeviceReading, Unavailable
from agent.wire import GpuError, GpuReport

ECC: Final = "ecc uncorrected"
MOST_GPUS: Final = 64
MOST_KINDS: Final = 16
"""The kinds of errors of one GPU that are told, the newest ones."""
# Bits of `throttle_reasons`: those by which the hardware protects itself. Limits by software are normal.
_SLOWDOWNS: Final = ((0x40, "hardware thermal slowdown"), (0x80, "hardware power brake"))


@dataclass(slots=True)
class _Counts:
    """What is counted of one GPU. slowdowns: by kind, how often it began, and when last."""

    condition: DeviceCondition | None = None
    ecc: int | None = None
    ecc_ms: int | None = None
    reasons: int = 0
    slowdowns: dict[str, tuple[int, int]] = field(default_factory=dict)


class GpuErrorLog:
    """Counts the errors of the GPUs of this node, of one process of the agent.

    gpus: the report of each GPU. Another thread may read it."""

    def __init__(self) -> None:
        self.gpus: tuple[GpuReport, ...] = ()
        self._since_ms: int | None = None
        self._counts: dict[str, _Counts] = {}

    def observe(self, at_ms: int, devices: Iterable[DeviceReading]) -> None:
        """Take the condition of each device at `at_ms`."""
        listed = list(devices)[:MOST_GPUS]
        if self._since_ms is None:
            self._since_ms = at_ms
        changed = False
        for device in listed:
            counts = self._counts.setdefault(device.gpu.uuid, _Counts())
            if counts.condition != device.condition:
                changed = True
                _count(counts, device.condition, at_ms)
        uuids = [device.gpu.uuid for device in listed]
        if changed or uuids != [gpu.gpu_uuid for gpu in self.gpus]:
            self._counts = {uuid: self._counts[uuid] for uuid in uuids}
            self.gpus = tuple(_report(uuid, of, self._since_ms) for uuid, of in self._counts.items())


def _count(counts: _Counts, condition: DeviceCondition, at_ms: int) -> None:
    counts.condition = condition
    if not isinstance(condition.ecc_uncorrected, Unavailable):
        if counts.ecc is not None and condition.ecc_uncorrected > counts.ecc:
            counts.ecc_ms = at_ms
        counts.ecc = condition.ecc_uncorrected
    if not isinstance(condition.throttle_reasons, Unavailable):
        for bit, kind in _SLOWDOWNS:
            if condition.throttle_reasons & bit and not counts.reasons & bit:
                number, _ = counts.slowdowns.get(kind, (0, 0))
                counts.slowdowns[kind] = number + 1, at_ms
        counts.reasons = condition.throttle_reasons


def _report(uuid: str, counts: _Counts, since_ms: int) -> GpuReport:
    condition = counts.condition or DeviceCondition()
    found = [GpuError(f"xid {one.xid}", one.count, since_ms, one.last_ms) for one in condition.xids]
    found += [GpuError(kind, number, since_ms, last_ms) for kind, (number, last_ms) in counts.slowdowns.items()]
    if counts.ecc:
        found.append(GpuError(ECC, counts.ecc, None, counts.ecc_ms))
    found.sort(key=lambda one: (-(one.last_ms or 0), one.kind))
    needs = [f"{one.action}: {one.cause}" for one in condition.recoveries]
    if condition.row_remap_pending:
        needs.append("reset_gpu: remapped memory rows wait for it")
    unread = {"xid": condition.xids_unread} if condition.xids_unread else {}
    for kind, reading in ((ECC, condition.ecc_uncorrected), ("slowdowns", condition.throttle_reasons)):
        if isinstance(reading, Unavailable):
            unread[kind] = reading.reason
    return GpuReport(uuid, tuple(found[:MOST_KINDS]), tuple(needs[:MOST_KINDS]), unread)
