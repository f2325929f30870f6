"""Divides a GPU among its holders, and splits its busy time, activity and energy among them.

There are rules for whole, time-sliced, MPS and MIG GPUs. A `Layout` says how a GPU is divided: first among its parts
(the whole GPU, or its MIG instances), then each part among its holders.

Three sums are exact, whatever the readings are:

- The capacities of a layout add up to the length of the span, times one GPU.
- The busy shares and the unattributed rest add up to the device's busy time.
- The energy shares add up to the device's energy.

All values are whole units and none is negative. The result does not depend on the order of the values. The module has
neither clock nor I/O nor state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm

import msgspec

from agent.core.readings import Allocation, Gpu, MigInstance
from agent.wire import Holder, Sharing, Slice
from gputally.base.apportionment import apportion
from gputally.base.units import US_PER_MS

_PPM = 1_000_000


class Share(msgspec.Struct, frozen=True):
    """The claim of one holder on a GPU, or the part that nothing holds. Each share becomes one row.

    key: the `reading_key` of the holder.
    holder: None for the part that nothing holds.
    mig_uuid, slice: the MIG instance; "" and None for the whole GPU.
    sharing: how several holders share the device; None if it is not shared.
    exclusive: True for the only holder of a device that is not shared. It gets all of the device's busy time if it has
        no reading of its own."""

    key: tuple[str, str, str]
    holder: Holder | None
    mig_uuid: str
    slice: Slice | None
    sharing: Sharing | None
    exclusive: bool


class DevicePart(msgspec.Struct, frozen=True):
    """A whole GPU, one MIG instance, or the compute slices outside every instance (`outside`).

    weight: the size of the part: its fraction of the device is weight / (sum of the weights of all parts).
    first: position of its first share in the layout.
    weights: the sizes of its shares: the fraction of a share is its weight / (sum of the weights)."""

    mig_uuid: str
    outside: bool
    weight: int
    first: int
    shares: tuple[Share, ...]
    weights: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True):
    """How one GPU is divided among its holders. The order of parts and shares does not depend on the order of the
    allocations.

    positions: the position of each holder's share, by `Share.key`; unheld shares have no entry."""

    gpu: Gpu
    allocations: tuple[Allocation, ...]
    parts: tuple[DevicePart, ...]
    shares: tuple[Share, ...]
    positions: dict[tuple[str, str, str], int]

    def capacities(self, span_ms: int) -> tuple[int, ...]:
        """Return the GPU-microseconds of each share over a span. They add up to span_ms * 1000 exactly.

        The time is divided among the parts first, and that of each part then among its shares, both by largest
        remainder. The rows of an instance therefore add up to the instance, however it is shared."""
        amounts = apportion(span_ms * US_PER_MS, [part.weight for part in self.parts])
        return tuple(
            amount for part, whole in zip(self.parts, amounts, strict=True) for amount in apportion(whole, part.weights)
        )


def reading_key(holder: Holder, mig_uuid: str) -> tuple[str, str, str]:
    """Return the key by which a holder's readings are joined with its allocations. It contains uids instead of names,
    because the sources of readings and allocations can give different names."""
    return holder.uid, holder.container, mig_uuid


def lay_out(gpu: Gpu, allocations: Iterable[Allocation]) -> Layout:
    """Divide a GPU among its holders.

    Without MIG the GPU is one part. With MIG every instance is a part of the size compute / compute_slices. The slices
    outside every instance are one more part. Instances that together exceed the device are scaled down to it. An
    allocation that names an unknown instance belongs to the part outside the instances."""
    ordered = tuple(sorted(allocations, key=_order))
    divided: list[tuple[MigInstance | None, int, list[Allocation]]]
    if gpu.mig_enabled or gpu.mig:
        instances = sorted(gpu.mig, key=lambda m: (m.gi, m.ci, m.uuid))
        names = {m.uuid for m in instances}
        divided = [(m, m.compute, [a for a in ordered if a.mig_uuid == m.uuid]) for m in instances]
        outside = gpu.compute_slices - sum(m.compute for m in instances)
        strays = [a for a in ordered if a.mig_uuid not in names]
        if outside > 0 or strays or not instances:
            divided.append((None, max(outside, 0) if instances else 1, strays))
    else:
        divided = [(None, 1, list(ordered))]
    parts: list[DevicePart] = []
    shares: list[Share] = []
    for instance, weight, part_allocations in divided:
        inner, weights = _part_shares(gpu, instance, part_allocations)
        mig_uuid = instance.uuid if instance else ""
        outside_mig = instance is None and bool(gpu.mig)
        parts.append(DevicePart(mig_uuid, outside_mig, weight, len(shares), tuple(inner), tuple(weights)))
        shares.extend(inner)
    positions = {share.key: i for i, share in enumerate(shares) if share.holder is not None}
    return Layout(gpu, ordered, tuple(parts), tuple(shares), positions)


def _order(allocation: Allocation) -> tuple[str, ...]:
    h = allocation.holder
    return allocation.mig_uuid, h.kind, h.namespace, h.name, h.container, h.uid


def _part_shares(
    gpu: Gpu, instance: MigInstance | None, allocations: Sequence[Allocation]
) -> tuple[list[Share], list[int]]:
    """Return the shares of one part and their weights.

    A holder declares its fraction by `fraction_ppm`, or by `replicas` of `sharing_replicas`. The fraction of a holder
    that declares none is 1 / number of holders. The rest of the part is unheld. If the fractions exceed the whole, they
    are scaled down."""
    mig_uuid = instance.uuid if instance else ""
    mig_slice = _slice(gpu, instance) if instance else None
    holders: dict[tuple[str, str, str], list[Allocation]] = {}
    for allocation in allocations:
        holders.setdefault(reading_key(allocation.holder, mig_uuid), []).append(allocation)
    fractions = [_declared_fraction(own) or (1, len(holders)) for own in holders.values()]
    whole = lcm(*(denominator for _, denominator in fractions))
    weights = [numerator * whole // denominator for numerator, denominator in fractions]
    shares = []
    for key, (first, *_) in holders.items():
        sharing = Sharing(first.sharing, first.sharing_replicas) if first.sharing else None
        shares.append(Share(key, first.holder, mig_uuid, mig_slice, sharing, sharing is None and len(holders) == 1))
    rest = whole - sum(weights)
    if rest > 0:
        shares.append(Share(("", "", mig_uuid), None, mig_uuid, mig_slice, None, False))
        weights.append(rest)
    return shares, weights


def _declared_fraction(allocations: Sequence[Allocation]) -> tuple[int, int] | None:
    """Return the fraction that one holder declares, as (numerator, denominator); None if it declares none.

    The fractions of several allocations add up, because some sources list a container with two replicas twice."""
    numerator, denominator = 0, 1
    declared = False
    for allocation in allocations:
        if allocation.fraction_ppm is not None:
            n, d = max(allocation.fraction_ppm, 0), _PPM
        elif allocation.sharing_replicas > 0:
            n, d = max(allocation.replicas, 0), allocation.sharing_replicas
        else:
            continue
        declared = True
        numerator, denominator = numerator * d + n * denominator, denominator * d
    return (numerator, denominator) if declared else None


def _slice(gpu: Gpu, instance: MigInstance) -> Slice:
    return Slice(
        profile=instance.profile,
        gi=instance.gi,
        ci=instance.ci,
        compute=instance.compute,
        compute_of=gpu.compute_slices,
        memory_mib=instance.memory_mib,
        memory_of_mib=gpu.memory_mib or 0,
    )


def attribute_busy(
    layout: Layout, device: int, parts: Sequence[int], holders: Sequence[int], others: Sequence[int]
) -> tuple[list[int], int]:
    """Return the busy time of each share, and the unattributed rest. Together they add up to `device`. All values are
    microseconds.

    device: the reading of the whole GPU.
    parts: the reading of each part.
    holders: the reading of each share's holder; 0 if the share is unheld or the reading is unknown.
    others: the reading of processes without an allocation, on each part.

    The readings of holders and other processes are scaled down together if they exceed the reading of their part, and
    so are the readings of the parts if they exceed the device's. A driver's figures per process are samples, so only
    their proportions are reliable. Time that no holder's reading contains is unattributed."""
    if sum(parts) > device:
        parts = apportion(device, parts)
    busy = list(holders)
    for part, limit, other in zip(layout.parts, parts, others, strict=True):
        end = part.first + len(part.shares)
        if sum(busy[part.first : end]) + other > limit:
            busy[part.first : end] = apportion(limit, [*busy[part.first : end], other])[:-1]
    return busy, device - sum(busy)


def attribute_activity(
    part: DevicePart, activity_us: int, busy: Sequence[int], rest_us: int, capacities: Sequence[int]
) -> list[int]:
    """Split the SM or tensor activity of one part. Return the microseconds of each share, followed by those that belong
    to no holder. They add up to `activity_us`.

    busy, capacities: busy time and capacity of each share of the part.
    rest_us: busy time on the part that belongs to no holder.

    Drivers count activity only per device or instance. On a shared part it is therefore divided in proportion to busy
    time, which is an estimate: it does not show which holder used the tensor cores. Without busy time it is divided in
    proportion to allocation."""
    weights = [*busy, rest_us]
    if not any(weights):
        weights = [c if s.holder is not None else 0 for s, c in zip(part.shares, capacities, strict=True)]
        weights.append(0 if any(weights) else 1)
    return apportion(activity_us, weights)


def attribute_energy(energy_uj: int, active_uj: int, busy: Sequence[int], capacities: Sequence[int]) -> list[int]:
    """Split the energy of a device among its rows. Return microjoules, which add up to `energy_uj`.

    active_uj: the part of the energy that the work took (`active_energy`).
    busy, capacities: busy time and capacity of each row.

    The active energy is divided in proportion to busy time. The idle energy is divided in proportion to capacity,
    because an idle GPU draws power for its holders; the unheld row gets its part too. Source: the split into active and
    idle energy of Kepler's GPU power model."""
    if len(busy) == 1:
        return [energy_uj]
    active = active_uj if any(busy) else 0
    idle_parts = apportion(energy_uj - active, capacities)
    if not active:
        return idle_parts
    return [a + b for a, b in zip(apportion(active, busy), idle_parts, strict=True)]


def active_energy(energy_uj: int, span_ms: int, busy_us: int, idle_power_mw: int | None) -> int:
    """Return the active energy of a device in microjoules: the energy above its idle power.

    idle_power_mw: the lowest power while the device did nothing, as in Kepler's power model; None if unknown. Then the
        active energy is the busy fraction of the energy."""
    if busy_us == 0 or span_ms == 0:
        return 0
    if idle_power_mw is not None:
        return max(energy_uj - idle_power_mw * span_ms, 0)
    return energy_uj * min(busy_us, span_ms * US_PER_MS) // (span_ms * US_PER_MS)
