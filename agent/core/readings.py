"""Defines `Source`, which reads a node, and the values that it reads at one moment: GPUs, allocations and readings.

All values are frozen. Values that a source creates for every device and sample are msgspec structs, which take a tenth
of the time of dataclasses. A failed reading is `Unavailable(reason)`, never 0 and never None. Cumulative readings
(busy, energy) count up from an arbitrary start per GPU. A decrease or a changed `counter_epoch` means that the driver
restarted the counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from agent.wire import Health, Holder, Method, PodFacts, SharingMode
from gputally.base.errors import AgentError


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A failed reading. reason: why it failed, in a few words that can be a label.

    refused: True if the driver refused a reading that it supports; then no coarser method may replace the reading."""

    reason: str
    refused: bool = False


Reading = int | Unavailable


def sum_readings(readings: Iterable[Reading]) -> Reading:
    """Return the sum of the readings, or the first one that is Unavailable."""
    total = 0
    for reading in readings:
        if isinstance(reading, Unavailable):
            return reading
        total += reading
    return total


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One MIG device: the compute instance `ci` of the GPU instance `gi`.

    compute: its number of compute slices.
    profile_id, start: the profile of the GPU instance and the first memory slice of its placement; None if the driver
        did not give them."""

    uuid: str
    profile: str
    gi: int
    ci: int
    compute: int
    memory_mib: int
    profile_id: int | None = None
    start: int | None = None


COMPUTE_SLICES = 7
"""Compute slices of a GPU until the driver says how many MIG devices it can have."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU.

    memory_mib: None if the driver did not give it.
    compute_slices: the number of compute slices of the whole GPU, 7 on A100 and H100. A MIG instance is a fraction of
        them.
    minor: N of /dev/nvidiaN; None if the driver did not give it."""

    uuid: str
    index: int
    model: str
    memory_mib: int | None
    compute_slices: int = COMPUTE_SLICES
    mig: tuple[MigInstance, ...] = ()
    mig_enabled: bool = False
    pci_bus_id: str = ""
    driver_version: str = ""
    minor: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation of a device to one holder. The device is a GPU (`mig_uuid` is "") or one of its MIG instances.

    sharing: how several holders share the device; None if the holder has it alone.
    replicas: how many of the device's `sharing_replicas` equal parts the holder has (time-slicing, MPS).
    fraction_ppm: declared fraction in millionths in the modes `fraction` and `dra`; None if it declares none.
    virtual: the separator in the name of a virtual device that the kubelet allocated; "" for other devices."""

    gpu_uuid: str
    holder: Holder
    mig_uuid: str = ""
    sharing: SharingMode | None = None
    sharing_replicas: int = 0
    replicas: int = 1
    fraction_ppm: int | None = None
    virtual: str = ""


class HolderReading(msgspec.Struct, frozen=True, gc=False):
    """Readings of one holder on one device. The busy time is cumulative since the holder was first seen.

    The holder's uid and container identify its allocation. A holder whose reading failed is listed with Unavailable.
    A holder that is not listed did nothing if `DeviceReading.method` is `process` or `accounting`; otherwise its busy
    time is unknown."""

    holder: Holder
    mig_uuid: str = ""
    busy_us: Reading = Unavailable("not read")
    memory_mib: Reading = Unavailable("not read")


class ProcessReading(msgspec.Struct, frozen=True, gc=False):
    """One process on a GPU or on one of its MIG instances.

    busy_us: physical-GPU time since the previous reading of the device, from the per-process sampler. It is an
        estimate: if the times of all processes exceed that of the GPU or MIG instance, they are scaled down in
        proportion.
    accounted_us: the same time from the driver's accounting mode, which misses nothing and takes precedence.
    running: False for a process that ended since the previous reading. The next reading does not list it.
    mps_client: True if the process is in the MPS server's list of clients.
    graphics: True if the process uses the GPU for graphics, and possibly for computing too."""

    pid: int
    mig_uuid: str = ""
    memory_mib: Reading = Unavailable("not read")
    busy_us: Reading = Unavailable("not read")
    accounted_us: Reading = Unavailable("not read")
    running: bool = True
    mps_client: bool = False
    graphics: bool = False


class InstanceReading(msgspec.Struct, frozen=True, gc=False):
    """One MIG instance as a whole, for all of its holders.

    Times are cumulative and count as time of the whole physical GPU: the instance's own activity times compute /
    compute_slices.

    method: how the busy time was read; None for the method of the device."""

    mig_uuid: str
    busy_us: Reading = Unavailable("not read")
    memory_mib: Reading = Unavailable("not read")
    sm_active_us: Reading = Unavailable("not read")
    tensor_active_us: Reading = Unavailable("not read")
    method: Method | None = None


@dataclass(frozen=True, slots=True)
class XidCount:
    """The number of errors of one kind (XID) that a GPU reported since the agent started.

    last_ms: time of the last one, in UTC milliseconds."""

    xid: int
    count: int
    last_ms: int


RecoveryAction = Literal["restart_app", "reset_gpu", "drain_node"]
"""Action after a hardware fault: restart the program, reset the GPU, or drain the node and reboot it."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """The action that a hardware fault requires.

    cause: the fault: an XID error such as `xid 48`, or `row remapping failed`; `driver` if the driver itself requires
        the action."""

    action: RecoveryAction
    cause: str

    @property
    def unusable(self) -> bool:
        """True if the GPU counts as lost until the action is done, because it does no reliable work."""
        return self.action != "restart_app"


class DeviceCondition(msgspec.Struct, frozen=True, gc=False):
    """The condition of a device at one moment, for people and alerts, never for bills.

    throttle_reasons: the bits of NVML's clocks event reasons.
    ecc_corrected, ecc_uncorrected: numbers of memory errors since the driver was loaded.
    xids_unread: why XID errors may be missing in `xids`; "" if they are complete.
    recoveries: the required actions.
    row_remap_pending: True if remapped memory rows wait for the next reset of the GPU, which continues to work; None if
        unknown."""

    temperature_c: Reading = Unavailable("not read")
    sm_clock_mhz: Reading = Unavailable("not read")
    memory_clock_mhz: Reading = Unavailable("not read")
    throttle_reasons: Reading = Unavailable("not read")
    ecc_corrected: Reading = Unavailable("not read")
    ecc_uncorrected: Reading = Unavailable("not read")
    xids: tuple[XidCount, ...] = ()
    xids_unread: str = "the reader does not read them"
    recoveries: tuple[Recovery, ...] = ()
    row_remap_pending: bool | None = None


class DeviceReading(msgspec.Struct, frozen=True, gc=False):
    """One device at one moment. Times and energy_uj are cumulative, the other values instantaneous.

    counter_epoch: identifies the start of the counters; counters of different epochs cannot be compared.
    sample_gaps: number of gaps in the driver's samples of the busy time; the busy time is unknown between two readings
        with different numbers.
    holders: the holders that use the device, as far as the holders of `processes` are known.
    instances: the readings of the MIG instances.
    unlisted: (MIG uuid or "", reason) of each device whose processes could not be listed."""

    gpu: Gpu
    health: Health = "ok"
    counter_epoch: str = ""
    busy_us: Reading = Unavailable("not read")
    energy_uj: Reading = Unavailable("not read")
    memory_used_mib: Reading = Unavailable("not read")
    power_mw: Reading = Unavailable("not read")
    sm_active_us: Reading = Unavailable("not read")
    tensor_active_us: Reading = Unavailable("not read")
    sample_gaps: int = 0
    holders: tuple[HolderReading, ...] = ()
    instances: tuple[InstanceReading, ...] = ()
    method: Method = "device"
    processes: tuple[ProcessReading, ...] = ()
    unlisted: tuple[tuple[str, str], ...] = ()
    condition: DeviceCondition = DeviceCondition()

    @property
    def unanswered(self) -> bool:
        """True if no reading succeeds."""
        answers = (self.busy_us, self.energy_uj, self.memory_used_mib, self.power_mw)
        return all(isinstance(answer, Unavailable) for answer in answers)

    @property
    def silent(self) -> bool:
        """True if the device is not lost and no reading succeeds, so that its use is unknown."""
        return self.health == "ok" and self.unanswered


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """Everything that one node reports at `at_ms` (UTC, on the agent's slewed timeline).

    allocations: Unavailable if the holders are unknown. The meter then continues with the last known holders, marks the
        time as a gap, and books no time as unheld.
    unknown_holders: (GPU uuid, reason) of each GPU whose holders are unknown while others are known; its allocations
        are the last known ones.
    sources: each source and its failure; "" if it answered.
    took_ms: durations in milliseconds of the timed sources."""

    at_ms: int
    devices: tuple[DeviceReading, ...]
    allocations: tuple[Allocation, ...] | Unavailable
    facts: tuple[PodFacts, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    took_ms: tuple[tuple[str, int], ...] = ()
    unknown_holders: tuple[tuple[str, str], ...] = ()


class DriverReplaced(AgentError):
    """The kernel driver was replaced while its library was loaded, so only a new process can use the new driver
    (agent.core.process_restart)."""


class Source(Protocol):
    """Reads a node: the real machine or a simulated one."""

    def snapshot(self, at_ms: int) -> NodeSnapshot:
        """Read everything at `at_ms` (UTC milliseconds, never decreasing). A failed reading is Unavailable. Raises
        DriverReplaced."""
        ...

    def close(self) -> None:
        """Release the source's resources, such as the driver."""
        ...


PrivilegeLevel = Literal["allocation", "process", "profiling"]

SOLE = Unavailable("sole holder")
"""Busy time of a holder that has a device alone. It is not read, because it follows from the device's busy time."""
