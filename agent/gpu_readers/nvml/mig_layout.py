"""Lists the MIG instances of a GPU and notices when the layout changes.

A lookup takes 50 to 100 ms on some machines. `MigLayout.refresh` therefore looks up the list only when MIG is switched
on or off, when the driver reports a change, soon after a pod named an unknown instance, and once a minute. If a lookup
fails, the last known instances stay in use, and the next reading looks again. With an empty list, a pod that holds one
instance would count as the holder of the whole GPU. The uuid identifies an instance, because a repartitioning reuses
the numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from agent.core.readings import COMPUTE_SLICES, MigInstance
from agent.gpu_readers.nvml.nvml_library import Driver, NvmlRefused
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

RESCAN_MS = MS_PER_MINUTE
LOOK_MS = 10 * MS_PER_SECOND
"""Time until the next lookup while a pod names an unknown instance, which may not exist."""


class MigDevice(msgspec.Struct, frozen=True):
    """One MIG device with its handle.

    gi_slices: compute slices of its GPU instance.
    alone: True if it is the whole GPU instance, so that the GPU instance's activity is its own."""

    handle: Any
    facts: MigInstance
    gi_slices: int
    alone: bool


class MigLayout:
    """The MIG instances of one GPU."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._scanned_ms: int | None = None
        self.known = False
        """True once a lookup has succeeded."""
        self.enabled = False
        self.slices = COMPUTE_SLICES
        self.instances: tuple[MigDevice, ...] = ()
        self.missed = False
        """True if a pod named an unknown instance since the last lookup."""

    @property
    def facts(self) -> tuple[MigInstance, ...]:
        return tuple(instance.facts for instance in self.instances)

    def void(self) -> None:
        """Drop the handles; the next reading looks them up again."""
        self.instances = ()
        self._scanned_ms = None

    def refresh(self, handle: Any, at_ms: int, *, changed: bool = False) -> bool:
        """Look up the layout if a lookup is due. Return True if a lookup was made and succeeded.

        changed: True if the driver reported a change.

        If the driver refuses to report whether MIG is on, the GPU keeps its former layout. A GPU that does not support
        MIG has no instances."""
        try:
            enabled = int(self._driver.call("nvmlDeviceGetMigMode", handle)[0]) == 1
        except NvmlRefused as fault:
            if not (self.known or fault.unsupported):
                return False
            enabled = self.enabled
        holds_ms = LOOK_MS if self.missed and enabled else RESCAN_MS
        due = changed or self._scanned_ms is None or at_ms - self._scanned_ms >= holds_ms
        if enabled == self.enabled and not due:
            return False
        try:
            count = self._driver.call("nvmlDeviceGetMaxMigDeviceCount", handle) if enabled else 0
            instances = tuple(self._look_up(handle, count))
        except NvmlRefused:
            self._scanned_ms = None
            return False
        self._scanned_ms, self.missed = at_ms, False
        inside = Counter(instance.facts.gi for instance in instances)
        self.known, self.enabled, self.slices = True, enabled, count or COMPUTE_SLICES
        self.instances = tuple(
            MigDevice(i.handle, i.facts, i.gi_slices, inside[i.facts.gi] == 1 and i.facts.compute == i.gi_slices)
            for i in instances
        )
        return True

    def _look_up(self, parent: Any, count: int) -> Iterator[MigDevice]:
        """Yield the instances. Raises NvmlRefused if the driver does not describe an instance that exists."""
        for index in range(count):
            try:
                handle = self._driver.call("nvmlDeviceGetMigDeviceHandleByIndex", parent, index)
            except NvmlRefused as fault:
                if fault.nothing_there:  # numbers need not be consecutive
                    continue
                raise
            attributes = self._driver.call("nvmlDeviceGetAttributes", handle)
            gi = self._driver.call("nvmlDeviceGetGpuInstanceId", handle)
            profile_id, start = self._placement(parent, gi)
            instance = MigInstance(
                uuid=str(self._driver.call("nvmlDeviceGetUUID", handle)),
                profile=_profile(str(self._driver.call("nvmlDeviceGetName", handle)), attributes),
                gi=gi,
                ci=self._driver.call("nvmlDeviceGetComputeInstanceId", handle),
                compute=attributes.computeInstanceSliceCount,
                memory_mib=attributes.memorySizeMB,
                profile_id=profile_id,
                start=start,
            )
            yield MigDevice(handle, instance, attributes.gpuInstanceSliceCount, alone=False)

    def _placement(self, parent: Any, gi: int) -> tuple[int | None, int | None]:
        """Return the profile of a GPU instance and the start of its placement; None if the driver refuses them, for
        example without the privilege."""
        try:
            info = self._driver.call(
                "nvmlGpuInstanceGetInfo", self._driver.call("nvmlDeviceGetGpuInstanceById", parent, gi)
            )
        except NvmlRefused:
            return None, None
        return int(info.profileId), int(info.placement.start)


def _profile(name: str, attributes: Any) -> str:
    """Return the profile of an instance, such as `1g.10gb`, from its name, or from its sizes if the name has none."""
    named = re.search(r"\bMIG (\S+)$", name)
    if named:
        return named.group(1)
    return f"{attributes.gpuInstanceSliceCount}g.{round(attributes.memorySizeMB / 1024)}gb"
