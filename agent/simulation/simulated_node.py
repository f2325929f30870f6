"""Simulates a node with exact counters: GPUs, holders and faults.

Only the hardware is simulated: the agent meters a `SimulatedSource` like the driver. The node knows the holders and
their use at every moment, so tests and the demo compare the ledger with `allocated_us`, `busy_us` and similar figures.
A device's counter is the sum of its holders' counters. There is no clock: every change has a time, which is never
before the previous change.

A rate is stored as an integer number of small units (1/`per`), so its integral over time is exact. A counter shows this
integral rounded down, so no rounding errors add up over any number of spans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from zlib import crc32

import msgspec

from agent.core.readings import (
    Allocation,
    DeviceCondition,
    DeviceReading,
    Gpu,
    HolderReading,
    InstanceReading,
    MigInstance,
    NodeSnapshot,
    Recovery,
    Unavailable,
    XidCount,
)
from agent.wire import Holder, PodFacts
from gputally.base.apportionment import apportion
from gputally.base.errors import AgentError
from gputally.base.units import US_PER_MS

PPM = 1_000_000
_TENSOR_LEVELS = 16
"""From none of the busy time to three quarters of it."""
_DRIVER = "580.105.08"


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model of GPU: its name, memory, and power when idle and when fully busy."""

    name: str
    memory_mib: int
    idle_mw: int
    active_mw: int


H100 = SimulatedModel("NVIDIA H100 80GB HBM3", 81_559, 70_000, 700_000)
A100 = SimulatedModel("NVIDIA A100-SXM4-80GB", 81_920, 55_000, 400_000)
MODELS = {"H100": H100, "A100": A100}

# Compute sevenths and memory eighths. Source: NVIDIA MIG user guide, supported profiles of 80 GB GPUs.
MIG_PROFILES = {
    "1g.10gb": (1, 1),
    "1g.20gb": (1, 2),
    "2g.20gb": (2, 2),
    "3g.40gb": (3, 4),
    "4g.40gb": (4, 4),
    "7g.80gb": (7, 8),
}


def make_gpu(uuid: str, index: int, model: SimulatedModel, mig: Sequence[str] = ()) -> Gpu:
    """Return a GPU, divided into MIG instances of these profiles.

    Raises ValueError for an unknown profile, and for more instances than fit on the GPU."""
    unknown = [profile for profile in mig if profile not in MIG_PROFILES]
    if unknown:
        raise ValueError(f"unknown MIG profile {unknown[0]!r} (known: {', '.join(MIG_PROFILES)})")
    if sum(MIG_PROFILES[p][0] for p in mig) > 7 or sum(MIG_PROFILES[p][1] for p in mig) > 8:
        raise ValueError(f"the MIG instances {', '.join(mig)} do not fit on one GPU")
    instances = tuple(
        MigInstance(
            uuid=f"MIG-{uuid.removeprefix('GPU-')}-{gi}-{profile}",
            profile=profile,
            gi=gi,
            ci=0,
            compute=MIG_PROFILES[profile][0],
            memory_mib=model.memory_mib * MIG_PROFILES[profile][1] // 8,
        )
        for gi, profile in enumerate(mig, start=1)
    )
    return Gpu(
        uuid=uuid,
        index=index,
        model=model.name,
        memory_mib=model.memory_mib,
        mig=instances,
        mig_enabled=bool(mig),
        pci_bus_id=f"00000000:{0x10 + index:02X}:00.0",
        driver_version=_DRIVER,
    )


class Integral:
    """A rate per millisecond that is constant between changes, and its integral over time. Both are in units of
    1/`per`."""

    __slots__ = ("per", "rates", "times", "totals")

    def __init__(self, per: int = 1) -> None:
        self.per = per
        self.times: list[int] = []
        self.rates: list[int] = []
        self.totals: list[int] = []

    def set(self, at_ms: int, rate: int) -> None:
        if self.times and self.rates[-1] == rate:
            return
        total = self.raw(at_ms)
        if self.times and self.times[-1] == at_ms:
            self.rates[-1] = rate
        else:
            self.times.append(at_ms)
            self.rates.append(rate)
            self.totals.append(total)

    def raw(self, at_ms: int) -> int:
        """Return the integral up to `at_ms`, in units of 1/`per`."""
        times = self.times
        if not times or at_ms <= times[0]:
            return 0
        i = -1 if at_ms >= times[-1] else bisect_right(times, at_ms) - 1
        return self.totals[i] + self.rates[i] * (at_ms - times[i])

    def upto(self, at_ms: int) -> int:
        """Return the integral up to `at_ms` as a whole number, rounded down."""
        return self.raw(at_ms) // self.per

    @property
    def rate(self) -> int:
        return self.rates[-1] if self.rates else 0


def _tensor_ppm(holder: Holder) -> int:
    """Return the part of its busy time in which a holder uses the tensor cores: the same for all workers of a job, and
    none for some jobs."""
    return crc32(holder.name.partition("-worker-")[0].encode()) % _TENSOR_LEVELS * PPM // 20


class Placement:
    """One present or former holder on one device.

    scale: (compute slices of the device, compute slices of the GPU).
    shares: (time, share of the GPU from then on) of each change.
    origin_us: the holder's busy time at the last reset of the driver's counters."""

    def __init__(self, allocation: Allocation, utilisation_ppm: int, memory_mib: int, scale: tuple[int, int]) -> None:
        self.allocation = allocation
        self.utilisation_ppm = utilisation_ppm
        self.memory_mib = memory_mib
        self.compute, compute_of = scale
        self.busy = Integral(per=US_PER_MS * compute_of)
        self.shares: list[tuple[int, Fraction]] = []
        self.origin_us = 0
        self.tensor_ppm = _tensor_ppm(allocation.holder)

    def tensor_us(self, at_ms: int) -> int:
        """Return the tensor activity from the beginning up to `at_ms`."""
        return self.busy.upto(at_ms) * self.tensor_ppm // PPM

    def set_share(self, at_ms: int, share: Fraction) -> None:
        if not self.shares or self.shares[-1][1] != share:
            self.shares.append((at_ms, share))

    def allocated_ms(self, start_ms: int, end_ms: int) -> Fraction:
        total = Fraction(0)
        for i, (since, share) in enumerate(self.shares):
            until = self.shares[i + 1][0] if i + 1 < len(self.shares) else end_ms
            total += share * max(min(until, end_ms) - max(since, start_ms), 0)
        return total


_FINE = DeviceCondition(throttle_reasons=0, ecc_uncorrected=0, xids_unread="")
_OFF_THE_BUS = 79


class SimulatedGpu:
    """One simulated GPU."""

    def __init__(self, gpu: Gpu, model: SimulatedModel, start_ms: int) -> None:
        self.gpu = gpu
        self.idle_mw = model.idle_mw
        self.extra_mw = model.active_mw - model.idle_mw
        self.start_ms = start_ms
        self.lost = Integral()
        self.condition = _FINE
        self.epoch = 1
        self.origin_ms = start_ms
        self.present: list[Placement] = []
        self.past: list[Placement] = []
        self.left: list[Placement] = []
        """Holders that left since the last snapshot. The next snapshot contains their final counters."""
        self.past_us: Counter[str] = Counter()
        """Busy time of the holders that left, by uuid of the MIG instance ("" for the GPU)."""
        self.past_tensor_us: Counter[str] = Counter()
        """Their tensor activity."""
        self.origins_tensor_us: dict[str, int] = {}
        self.origins_us: dict[str, int] = {}
        """Busy time at the last reset of the counters, by uuid of the MIG instance."""
        self.memory_mib = 0
        """Memory in use now."""
        self.power_mw = self.idle_mw
        """Power drawn now, in proportion to the load."""

    def busy_us(self, at_ms: int) -> int:
        """Return the busy time from the beginning up to `at_ms`."""
        return sum(p.busy.upto(at_ms) for p in (*self.past, *self.present))

    def instance_us(self, at_ms: int, mig_uuid: str) -> int:
        """Return the busy time of a MIG instance from the beginning up to `at_ms`, which is not before the last
        change."""
        present = sum(p.busy.upto(at_ms) for p in self.present if p.allocation.mig_uuid == mig_uuid)
        return self.past_us[mig_uuid] + present

    def tensor_us(self, at_ms: int, mig_uuid: str) -> int:
        """Return the tensor activity of a MIG instance, or of a GPU without any, since the last reset, up to `at_ms`,
        which is not before the last change."""
        present = sum([p.tensor_us(at_ms) for p in self.present if p.allocation.mig_uuid == mig_uuid])
        return self.past_tensor_us[mig_uuid] + present - self.origins_tensor_us.get(mig_uuid, 0)

    def energy_uj(self, span_ms: int, busy_us: int) -> int:
        """Return the energy in microjoules (mW x ms) of a span with this busy time."""
        return self.idle_mw * span_ms + self.extra_mw * busy_us // US_PER_MS

    def evict(self, at_ms: int, placements: Sequence[Placement]) -> None:
        for placement in placements:
            placement.busy.set(at_ms, 0)
            placement.set_share(at_ms, Fraction(0))
            self.past_us[placement.allocation.mig_uuid] += placement.busy.upto(at_ms)
            self.past_tensor_us[placement.allocation.mig_uuid] += placement.tensor_us(at_ms)
            self.present.remove(placement)
            self.past.append(placement)
            self.left.append(placement)
        self.settle(at_ms)

    def settle(self, at_ms: int) -> None:
        """Compute the rates and shares of the holders, and the GPU's memory and power, again after a change."""
        for mig_uuid in {p.allocation.mig_uuid for p in self.present}:
            present = [p for p in self.present if p.allocation.mig_uuid == mig_uuid]
            wanted = [p.utilisation_ppm for p in present]
            rates = wanted if sum(wanted) <= PPM else apportion(PPM, wanted)
            for placement, rate in zip(present, rates, strict=True):
                placement.busy.set(at_ms, 0 if self.lost.rate else rate * placement.compute)
            holders = [p for p in present if p.allocation.replicas]
            shares = [_fraction(p.allocation, len(holders)) for p in holders]
            excess = max(sum(shares, Fraction(0)), Fraction(1))
            for placement, share in zip(holders, shares, strict=True):
                compute = Fraction(placement.compute, placement.busy.per // US_PER_MS)
                placement.set_share(at_ms, share / excess * compute)
        self.memory_mib = sum(p.memory_mib for p in self.present)
        self.power_mw = self.idle_mw + sum(
            self.extra_mw * p.busy.rate // (p.busy.per * US_PER_MS) for p in self.present
        )

    def reset(self, at_ms: int) -> None:
        self.epoch += 1
        self.origin_ms = at_ms
        for placement in (*self.left, *self.present):
            placement.origin_us = placement.busy.upto(at_ms)
        parts = {*self.past_us, *(p.allocation.mig_uuid for p in self.present)}
        self.origins_us = {part: self.instance_us(at_ms, part) for part in parts}
        self.origins_tensor_us = {}
        self.origins_tensor_us = {part: self.tensor_us(at_ms, part) for part in parts}


def _fraction(allocation: Allocation, holders: int) -> Fraction:
    if allocation.fraction_ppm is not None:
        return Fraction(allocation.fraction_ppm, PPM)
    if allocation.sharing_replicas:
        return Fraction(allocation.replicas, allocation.sharing_replicas)
    return Fraction(1, holders)


_LOST = Unavailable("gpu is lost")
_OF_INSTANCES = Unavailable("not read on a MIG device")


class NodeOffline(AgentError):
    """The simulated node is down, so nothing can be read."""


class SimulatedNode:
    """The GPUs of one node, their holders and their faults.

    per_holder: True if the busy time and memory of each holder can be read. Otherwise only those of the device (or of
        the MIG instance) can be.

    `utilisation_ppm` in the methods is the part of the device (or of the MIG instance) that a holder uses, in
    millionths. If the parts of the holders exceed the whole, they are scaled down in proportion."""

    def __init__(self, name: str, gpus: Iterable[Gpu], *, start_ms: int, per_holder: bool = True) -> None:
        self.name = name
        self._at_ms = start_ms
        self._per_holder = per_holder
        known = {model.name: model for model in MODELS.values()}
        self._devices = {gpu.uuid: SimulatedGpu(gpu, known.get(gpu.model, H100), start_ms) for gpu in gpus}
        self._facts: dict[str, PodFacts] = {}
        self._ended: dict[str, int] = {}
        self._offline = False
        self._holders_unavailable = ""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(device.gpu for device in self._devices.values())

    @property
    def at_ms(self) -> int:
        """The time of the last change or snapshot."""
        return self._at_ms

    # --- events -----------------------------------------------------------------------------

    def place(
        self,
        at_ms: int,
        allocation: Allocation,
        utilisation_ppm: int,
        memory_mib: int,
        facts: PodFacts | None = None,
    ) -> None:
        """Allocate a device to a holder. Raises ValueError if the device does not exist or the holder has it
        already."""
        device = self._device(allocation.gpu_uuid)
        instance = self._instance(device, allocation.mig_uuid)
        _check_utilisation(utilisation_ppm)
        key = (allocation.holder, allocation.mig_uuid)
        if any((p.allocation.holder, p.allocation.mig_uuid) == key for p in device.present):
            raise ValueError(f"{allocation.holder.name or allocation.holder.uid} is on {allocation.gpu_uuid} already")
        self._advance(at_ms)
        scale = (instance.compute, device.gpu.compute_slices) if instance else (1, 1)
        device.present.append(Placement(allocation, utilisation_ppm, memory_mib, scale))
        if facts is not None:
            self._facts[facts.uid] = msgspec.structs.replace(
                facts, started_ms=facts.started_ms or at_ms, observed_ms=at_ms
            )
            self._ended.pop(facts.uid, None)
        device.settle(at_ms)

    def remove(self, at_ms: int, holder_uid: str) -> None:
        """Remove a holder from all its devices. Raises ValueError if it holds none."""
        holding = [d for d in self._devices.values() if any(p.allocation.holder.uid == holder_uid for p in d.present)]
        if not holding:
            raise ValueError(f"{holder_uid} holds no device of this node")
        self._advance(at_ms)
        for device in holding:
            device.evict(at_ms, [p for p in device.present if p.allocation.holder.uid == holder_uid])
        if holder_uid in self._facts:
            self._facts[holder_uid] = msgspec.structs.replace(
                self._facts[holder_uid], ended_ms=at_ms, observed_ms=at_ms
            )
            self._ended[holder_uid] = 0

    def set_utilisation(self, at_ms: int, holder_uid: str, utilisation_ppm: int) -> None:
        """Change how busy a holder is, on every device that it holds."""
        _check_utilisation(utilisation_ppm)
        self._advance(at_ms)
        for device in self._devices.values():
            mine = [p for p in device.present if p.allocation.holder.uid == holder_uid]
            for placement in mine:
                placement.utilisation_ppm = utilisation_ppm
            if mine:
                device.settle(at_ms)

    def set_stray(self, at_ms: int, gpu_uuid: str, utilisation_ppm: int) -> None:
        """Let a process without an allocation use a GPU. A utilisation of 0 ends the process."""
        device = self._device(gpu_uuid)
        self._instance(device, "")
        _check_utilisation(utilisation_ppm)
        self._advance(at_ms)
        strays = [p for p in device.present if p.allocation.replicas == 0]
        if utilisation_ppm and not strays:
            holder = Holder(kind="process", uid=f"stray-{gpu_uuid}", name="stray")
            device.present.append(Placement(Allocation(gpu_uuid, holder, replicas=0), utilisation_ppm, 0, (1, 1)))
        elif utilisation_ppm:
            strays[0].utilisation_ppm = utilisation_ppm
        else:
            device.evict(at_ms, strays)
        device.settle(at_ms)

    def lose(self, at_ms: int, gpu_uuid: str) -> None:
        """Let the GPU fall off the bus, with the error that the driver reports then. It stays listed and held, but no
        process runs and no reading succeeds."""
        device = self._device(gpu_uuid)
        self._advance(at_ms)
        device.lost.set(at_ms, 1)
        number = sum(error.count for error in device.condition.xids) + 1
        device.condition = msgspec.structs.replace(
            device.condition, xids=(XidCount(_OFF_THE_BUS, number, at_ms),),
            recoveries=(Recovery("drain_node", f"xid {_OFF_THE_BUS}"),),
        )  # fmt: skip
        device.settle(at_ms)

    def recover(self, at_ms: int, gpu_uuid: str) -> None:
        """Let a lost GPU work again. Its counters start from zero, as after a restart of the driver."""
        device = self._device(gpu_uuid)
        self._advance(at_ms)
        device.lost.set(at_ms, 0)
        device.condition = msgspec.structs.replace(device.condition, recoveries=())
        device.settle(at_ms)
        device.reset(at_ms)

    def reset_counters(self, at_ms: int, gpu_uuid: str) -> None:
        """Let the GPU's counters start from zero, as after a restart of the driver."""
        device = self._device(gpu_uuid)
        self._advance(at_ms)
        device.reset(at_ms)

    def repartition(self, at_ms: int, gpu_uuid: str, mig: Sequence[str]) -> None:
        """Divide the GPU into MIG instances of these profiles; an empty `mig` switches MIG off. Raises ValueError while
        the GPU is held."""
        device = self._device(gpu_uuid)
        if device.present:
            raise ValueError(f"{gpu_uuid} is in use and cannot be repartitioned")
        model = next((m for m in MODELS.values() if m.name == device.gpu.model), H100)
        gpu = make_gpu(gpu_uuid, device.gpu.index, model, mig)
        self._advance(at_ms)
        device.gpu = gpu

    def set_offline(self, at_ms: int, offline: bool) -> None:
        """Switch the node off or on. Its holders keep their devices."""
        self._advance(at_ms)
        self._offline = offline

    def set_holders_unavailable(self, at_ms: int, reason: str) -> None:
        """Make the holders unknown, as if the kubelet did not answer. reason: "" makes them known again."""
        self._advance(at_ms)
        self._holders_unavailable = reason

    # --- readings ---------------------------------------------------------------------------

    def snapshot(self, at_ms: int) -> NodeSnapshot:
        """Read the node at `at_ms`, which is not before the last change. Raises NodeOffline while the node is down.

        The facts of a pod that ended are in the next two snapshots."""
        self._advance(at_ms)
        if self._offline:
            raise NodeOffline(f"node {self.name} is offline")
        devices = tuple(self._read(device, at_ms) for device in self._devices.values())
        allocations: tuple[Allocation, ...] | Unavailable
        if self._holders_unavailable:
            allocations = Unavailable(self._holders_unavailable)
        else:
            allocations = tuple(
                p.allocation for device in self._devices.values() for p in device.present if p.allocation.replicas
            )
        facts = tuple(self._facts.values())
        for uid, shown in list(self._ended.items()):
            if shown:
                del self._ended[uid], self._facts[uid]
            else:
                self._ended[uid] = 1
        return NodeSnapshot(at_ms, devices, allocations, facts, (("simulated", ""),))

    def _read(self, device: SimulatedGpu, at_ms: int) -> DeviceReading:
        epoch = str(device.epoch)
        if device.lost.rate:
            device.left.clear()
            return DeviceReading(
                device.gpu,
                "lost",
                epoch,
                _LOST,
                _LOST,
                _LOST,
                _LOST,
                _LOST,
                _LOST,
                method="simulated",
                condition=device.condition,
            )
        busy = [p.busy.upto(at_ms) for p in device.present]
        busy_us = sum(device.past_us.values()) - sum(device.origins_us.values()) + sum(busy)
        holders: tuple[HolderReading, ...] = ()
        if self._per_holder:
            shown = [*zip(device.present, busy, strict=True)]
            if device.left:
                shown = [*((p, p.busy.upto(at_ms)) for p in device.left), *shown]
                device.left.clear()
            holders = tuple(
                [
                    HolderReading(p.allocation.holder, p.allocation.mig_uuid, upto - p.origin_us, p.memory_mib)
                    for p, upto in shown
                ]
            )
        return DeviceReading(
            device.gpu,
            "ok",
            epoch,
            _OF_INSTANCES if device.gpu.mig_enabled else busy_us,
            device.energy_uj(at_ms - device.origin_ms, busy_us),
            device.memory_mib,
            device.power_mw,
            _OF_INSTANCES if device.gpu.mig_enabled else busy_us * 9 // 10,
            _OF_INSTANCES if device.gpu.mig_enabled else device.tensor_us(at_ms, ""),
            holders=holders,
            instances=self._read_instances(device, at_ms) if device.gpu.mig else (),
            method="simulated",
            condition=device.condition,
        )

    def _read_instances(self, device: SimulatedGpu, at_ms: int) -> tuple[InstanceReading, ...]:
        return tuple(
            [
                InstanceReading(
                    instance.uuid,
                    busy_us,
                    sum([p.memory_mib for p in device.present if p.allocation.mig_uuid == instance.uuid]),
                    busy_us * 9 // 10,
                    device.tensor_us(at_ms, instance.uuid),
                )
                for instance in device.gpu.mig
                for busy_us in (device.instance_us(at_ms, instance.uuid) - device.origins_us.get(instance.uuid, 0),)
            ]
        )

    # --- ground truth: any span that lies before the last change or snapshot ----------------

    def allocated(self, holder_uid: str, start_ms: int, end_ms: int) -> Fraction:
        """Return the exact GPU-microseconds that were allocated to a holder. The rows of the meter are whole
        microseconds, so a row can differ by less than one (sevenths, thirds)."""
        shares = (p.allocated_ms(start_ms, end_ms) for p in self._placements(holder_uid))
        return sum(shares, Fraction(0)) * US_PER_MS

    def allocated_us(self, holder_uid: str, start_ms: int, end_ms: int) -> int:
        """Return the GPU-microseconds that were allocated to a holder, rounded down."""
        return int(self.allocated(holder_uid, start_ms, end_ms))

    def busy_us(self, holder_uid: str, start_ms: int, end_ms: int) -> int:
        """Return the physical-GPU microseconds for which a holder was busy."""
        return sum(p.busy.upto(end_ms) - p.busy.upto(start_ms) for p in self._placements(holder_uid))

    def device_busy_us(self, gpu_uuid: str, start_ms: int, end_ms: int) -> int:
        """Return the microseconds for which a GPU was busy, with or without a holder."""
        device = self._device(gpu_uuid)
        return device.busy_us(end_ms) - device.busy_us(start_ms)

    def lost_ms(self, gpu_uuid: str, start_ms: int, end_ms: int) -> int:
        """Return the milliseconds for which a GPU was lost."""
        lost = self._device(gpu_uuid).lost
        return lost.upto(end_ms) - lost.upto(start_ms)

    def holders(self) -> tuple[str, ...]:
        """Return the uids of all present and former holders, sorted. Processes without an allocation are left out."""
        return tuple(sorted({p.allocation.holder.uid for p in self._placements() if p.allocation.replicas}))

    def _placements(self, holder_uid: str | None = None) -> list[Placement]:
        return [
            p
            for device in self._devices.values()
            for p in (*device.past, *device.present)
            if holder_uid is None or p.allocation.holder.uid == holder_uid
        ]

    # --- internal ----------------------------------------------------------------------------

    def _device(self, gpu_uuid: str) -> SimulatedGpu:
        if gpu_uuid not in self._devices:
            raise ValueError(f"no GPU {gpu_uuid} on node {self.name}")
        return self._devices[gpu_uuid]

    @staticmethod
    def _instance(device: SimulatedGpu, mig_uuid: str) -> MigInstance | None:
        if not mig_uuid:
            if device.gpu.mig_enabled:
                raise ValueError(f"{device.gpu.uuid} is in MIG mode: name one of its instances")
            return None
        for instance in device.gpu.mig:
            if instance.uuid == mig_uuid:
                return instance
        raise ValueError(f"no MIG instance {mig_uuid} on {device.gpu.uuid}")

    def _advance(self, at_ms: int) -> None:
        if at_ms < self._at_ms:
            raise ValueError(f"time does not run backwards: {at_ms} ms is before {self._at_ms} ms")
        self._at_ms = at_ms


def _check_utilisation(utilisation_ppm: int) -> None:
    if not 0 <= utilisation_ppm <= PPM:
        raise ValueError(f"the utilisation must be between 0 and {PPM} ppm, not {utilisation_ppm}")


@dataclass(frozen=True, slots=True)
class SimulatedEvent:
    """A change of a node at `at_ms`."""

    at_ms: int
    apply: Callable[[SimulatedNode], None]


class SimulatedSource:
    """An `agent.core.readings.Source` over a simulated node: it applies due events, then reads the node."""

    def __init__(self, node: SimulatedNode, events: Sequence[SimulatedEvent] = ()) -> None:
        self.node = node
        self._events = sorted(events, key=lambda event: event.at_ms)
        self._next = 0

    def snapshot(self, at_ms: int) -> NodeSnapshot:
        """Apply the events that are due, and read the node. Raises NodeOffline while the node is down."""
        while self._next < len(self._events) and self._events[self._next].at_ms <= at_ms:
            event = self._events[self._next]
            self._next += 1
            event.apply(self.node)
        return self.node.snapshot(at_ms)

    def close(self) -> None:
        """Do nothing, because a simulated node holds no resources."""
