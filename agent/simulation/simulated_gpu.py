"""The hardware of a simulated node: known GPU models, and one GPU as an exact counter.

Rates are rationals with integer parts and counters are floors of their integrals, so the sum over
any spans is the truth and not an approximation of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from agent.model import Allocation, Gpu, MigInstance
from agent.units import US_PER_MS, apportion

PPM = 1_000_000
_DRIVER = "580.105.08"


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A kind of GPU: what it is called, how much memory and power it has."""

    name: str
    memory_mib: int
    idle_mw: int
    active_mw: int


H100 = GpuModel("NVIDIA H100 80GB HBM3", 81_559, 70_000, 700_000)
A100 = GpuModel("NVIDIA A100-SXM4-80GB", 81_920, 55_000, 400_000)
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


def make_gpu(uuid: str, index: int, model: GpuModel, mig: Sequence[str] = ()) -> Gpu:
    """A GPU of a known model, cut into MIG instances of the named profiles.

    Raises ValueError for an unknown profile or more than the device has."""
    unknown = [profile for profile in mig if profile not in MIG_PROFILES]
    if unknown:
        raise ValueError(f"unknown MIG profile {unknown[0]!r} (known: {', '.join(MIG_PROFILES)})")
    if sum(MIG_PROFILES[p][0] for p in mig) > 7 or sum(MIG_PROFILES[p][1] for p in mig) > 8:
        raise ValueError(f"{', '.join(mig)} is more than one GPU")
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
    """A piecewise constant rate per millisecond and its integral, in units of 1/`per`."""

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
        times = self.times
        if not times or at_ms <= times[0]:
            return 0
        i = -1 if at_ms >= times[-1] else bisect_right(times, at_ms) - 1
        return self.totals[i] + self.rates[i] * (at_ms - times[i])

    def upto(self, at_ms: int) -> int:
        return self.raw(at_ms) // self.per

    @property
    def rate(self) -> int:
        return self.rates[-1] if self.rates else 0


class Placement:
    """One holder on one device, present or past."""

    def __init__(self, allocation: Allocation, utilisation_ppm: int, memory_mib: int, scale: tuple[int, int]) -> None:
        self.allocation = allocation
        self.utilisation_ppm = utilisation_ppm
        self.memory_mib = memory_mib
        self.compute, compute_of = scale
        self.busy = Integral(per=US_PER_MS * compute_of)
        self.shares: list[tuple[int, Fraction]] = []
        self.origin_us = 0

    def set_share(self, at_ms: int, share: Fraction) -> None:
        if not self.shares or self.shares[-1][1] != share:
            self.shares.append((at_ms, share))

    def allocated_ms(self, start_ms: int, end_ms: int) -> Fraction:
        total = Fraction(0)
        for i, (since, share) in enumerate(self.shares):
            until = self.shares[i + 1][0] if i + 1 < len(self.shares) else end_ms
            total += share * max(min(until, end_ms) - max(since, start_ms), 0)
        return total


class SimulatedGpu:
    """One simulated GPU."""

    def __init__(self, gpu: Gpu, model: GpuModel, start_ms: int) -> None:
        self.gpu = gpu
        self.idle_mw = model.idle_mw
        self.extra_mw = model.active_mw - model.idle_mw
        self.start_ms = start_ms
        self.lost = Integral()
        self.epoch = 1
        self.origin_ms = start_ms
        self.present: list[Placement] = []
        self.past: list[Placement] = []
        self.left: list[Placement] = []
        """Those who left since the last snapshot: their final counters are shown once more."""
        self.past_us: Counter[str] = Counter()
        """Busy time of those who left, per MIG instance ("" = the GPU)."""
        self.origins_us: dict[str, int] = {}
        """Where the counters began after the last reset, likewise."""
        self.gone_us = 0
        """The one less the other, over the whole GPU."""
        self.memory_mib = 0
        """In use now."""
        self.power_mw = self.idle_mw
        """Drawn now, in proportion to the load."""

    def busy_us(self, at_ms: int) -> int:
        """Since the beginning, at any instant."""
        return sum(p.busy.upto(at_ms) for p in (*self.past, *self.present))

    def counter_us(self, at_ms: int, mig_uuid: str) -> int:
        """What the driver has counted of an instance at an instant not before the last change."""
        return self.raw_us(at_ms, mig_uuid) - self.origins_us.get(mig_uuid, 0)

    def raw_us(self, at_ms: int, mig_uuid: str) -> int:
        present = sum(p.busy.upto(at_ms) for p in self.present if p.allocation.mig_uuid == mig_uuid)
        return self.past_us[mig_uuid] + present

    def energy_uj(self, span_ms: int, busy_us: int) -> int:
        """mW x ms = uJ; the active part follows the busy time."""
        return self.idle_mw * span_ms + self.extra_mw * busy_us // US_PER_MS

    def evict(self, at_ms: int, placements: Sequence[Placement]) -> None:
        for placement in placements:
            placement.busy.set(at_ms, 0)
            placement.set_share(at_ms, Fraction(0))
            busy_us = placement.busy.upto(at_ms)
            self.past_us[placement.allocation.mig_uuid] += busy_us
            self.gone_us += busy_us
            self.present.remove(placement)
            self.past.append(placement)
            self.left.append(placement)
        self.settle(at_ms)

    def settle(self, at_ms: int) -> None:
        """Rates and shares of those present, and what they add up to, after a change."""
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
        self.origins_us = {part: self.raw_us(at_ms, part) for part in parts}
        self.gone_us = sum(self.past_us.values()) - sum(self.origins_us.values())


def _fraction(allocation: Allocation, holders: int) -> Fraction:
    if allocation.fraction_ppm is not None:
        return Fraction(allocation.fraction_ppm, PPM)
    if allocation.sharing_replicas:
        return Fraction(allocation.replicas, allocation.sharing_replicas)
    return Fraction(1, holders)
