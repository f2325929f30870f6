"""Defines what a source sees at one instant: GPUs, allocations and readings; a failed reading is Unavailable with its
reason.

Frozen values only; those that are made anew for every device and sample are msgspec's, which take a tenth of the
time. A reading that failed is `Unavailable(reason)`, never 0 and never None.
Cumulative readings (busy, energy) count up from an arbitrary origin per GPU; a decrease or a
changed `counter_epoch` means the driver restarted and starts a new origin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from agent.wire import Health, Holder, Method, PodFacts, SharingMode


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A reading that could not be taken, and why, in a few words fit for a label.

    refused: the driver ought to answer and did not, so nothing coarser may stand in for the reading."""

    reason: str
    refused: bool = False


Reading = int | Unavailable


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One MIG device: GPU instance `gi`, compute instance `ci`."""

    uuid: str
    profile: str
    gi: int
    ci: int
    compute: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU. `compute_slices` is the denominator of its MIG fractions (7 on A100/H100).
    minor: N of /dev/nvidiaN. It and memory_mib are None where they were not read."""

    uuid: str
    index: int
    model: str
    memory_mib: int | None
    compute_slices: int = 7
    mig: tuple[MigInstance, ...] = ()
    mig_enabled: bool = False
    pci_bus_id: str = ""
    driver_version: str = ""
    minor: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """One holder's claim on a device: a GPU (`mig_uuid` empty) or one of its MIG instances.

    replicas: how many of the device's `sharing_replicas` equal parts it holds (time-slicing, MPS).
    fraction_ppm: declared fraction in millionths for mode `fraction` and `dra`; None = not declared.
    virtual: the kubelet gave one of HAMi's virtual devices.
    """

    gpu_uuid: str
    holder: Holder
    mig_uuid: str = ""
    sharing: SharingMode | None = None
    sharing_replicas: int = 0
    replicas: int = 1
    fraction_ppm: int | None = None
    virtual: bool = False


class HolderReading(msgspec.Struct, frozen=True, gc=False):
    """Per-holder readings on one device; counters are cumulative since the holder was first seen.

    Matched to allocations by the holder's uid and container. A holder whose reading failed is listed
    with Unavailable; one that is not listed did nothing where `DeviceReading.method` is `process` or
    `accounting`, and is unknown otherwise."""

    holder: Holder
    mig_uuid: str = ""
    busy_us: Reading = Unavailable("not read")
    memory_mib: Reading = Unavailable("not read")


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process on a GPU or on one of its MIG instances, before its holder is known.

    busy_us: physical-GPU time since the previous reading of the device, by the per-process sampler. That
    is statistics: what counts is its proportion to the others'. accounted_us: the same by the driver's
    accounting mode, which misses nothing; where it is there, it is the better one.
    running: False for one that ended since the previous reading; it is listed this once.
    mps_client: listed by the MPS server's list of clients. graphics: it draws, whether it computes or not."""

    pid: int
    mig_uuid: str = ""
    memory_mib: Reading = Unavailable("not read")
    busy_us: Reading = Unavailable("not read")
    accounted_us: Reading = Unavailable("not read")
    running: bool = True
    mps_client: bool = False
    graphics: bool = False


class InstanceReading(msgspec.Struct, frozen=True, gc=False):
    """One MIG instance as a whole, for all of its users. The times are cumulative physical-GPU time: the
    instance's own activity times compute / compute_slices. method: how its busy time was read (None: like
    the device's)."""

    mig_uuid: str
    busy_us: Reading = Unavailable("not read")
    memory_mib: Reading = Unavailable("not read")
    sm_active_us: Reading = Unavailable("not read")
    tensor_active_us: Reading = Unavailable("not read")
    method: Method | None = None


@dataclass(frozen=True, slots=True)
class XidCount:
    """How often a GPU reported one kind of error since the agent began to listen, and when last."""

    xid: int
    count: int
    last_ms: int


RecoveryAction = Literal["restart_app", "reset_gpu", "drain_node"]
"""What must be done after a hardware fault: start the program anew, reset the GPU, or drain the node and reboot it."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A hardware fault that is not mended yet. cause: "xid 48", "row remapping failed" or "driver"."""

    action: RecoveryAction
    cause: str

    @property
    def unusable(self) -> bool:
        """Whether the GPU does no reliable work until it is done: the GPU is lost until then."""
        return self.action != "restart_app"


@dataclass(frozen=True, slots=True)
class Condition:
    """How a device fares at one instant: for people and alerts, never for bills.

    ecc_corrected, ecc_uncorrected: since the driver was loaded. throttle_reasons: the bits of NVML's
    clocks event reasons. recoveries: what has to be done to the GPU. row_remap_pending: whether remapped rows of memory
    wait for the next reset of the GPU, which goes on working."""

    temperature_c: Reading = Unavailable("not read")
    sm_clock_mhz: Reading = Unavailable("not read")
    memory_clock_mhz: Reading = Unavailable("not read")
    throttle_reasons: Reading = Unavailable("not read")
    ecc_corrected: Reading = Unavailable("not read")
    ecc_uncorrected: Reading = Unavailable("not read")
    xids: tuple[XidCount, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    row_remap_pending: bool | None = None


class DeviceReading(msgspec.Struct, frozen=True, gc=False):
    """One device at one instant. Times and energy_uj are cumulative, the rest instantaneous.

    sample_gaps: how often the driver's samples of the busy time were missing; a step in which it grew has
    no known busy time. holders: by which holders the device is used, as far as `processes` could be matched.
    unlisted: (MIG uuid or "", reason) of each place whose processes could not be listed: they are unknown there."""

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
    condition: Condition = Condition()

    @property
    def silent(self) -> bool:
        """Whether it answers nothing, although it is not lost: what it does is unknown."""
        answers = (self.busy_us, self.energy_uj, self.memory_used_mib, self.power_mw)
        return self.health == "ok" and all(isinstance(answer, Unavailable) for answer in answers)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one node shows at `at_ms` (UTC, on the agent's slewed timeline).

    `allocations` is Unavailable where no source knows the holders: the meter then keeps the last known holders, marks
    the time as a gap, and books no time as unheld. `unknown_holders` names the GPUs of which that is so where others
    are known, with the reason; their allocations are the last known ones. `sources` names each source and its failure
    ("" = it answered); `took_ms` how long those took that are timed."""

    at_ms: int
    devices: tuple[DeviceReading, ...]
    allocations: tuple[Allocation, ...] | Unavailable
    facts: tuple[PodFacts, ...] = ()
    sources: tuple[tuple[str, str], ...] = field(default=())
    took_ms: tuple[tuple[str, int], ...] = field(default=())
    unknown_holders: tuple[tuple[str, str], ...] = field(default=())


PrivilegeLevel = Literal["allocation", "process", "profiling"]


KAI, HAMI = "kai", "hami"
"""The sharing systems whose parts are understood; KAI's reservation pods are Run:ai's too."""


SYSTEMS = frozenset({KAI, HAMI})


SOLE = Unavailable("sole holder")
