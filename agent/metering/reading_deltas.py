"""Computes what happened on one GPU between two readings.

`measure` turns two readings into a `ReadingDelta`. A step can be cut at instants inside it, and the pieces add up to
the step. A figure that could not be read is unknown and has a reason; it is never zero. A counter that seems to
decrease has started again. The results are deterministic integers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from agent.core.readings import DeviceReading, HolderReading, InstanceReading, Reading, Unavailable
from agent.metering.usage_attribution import DevicePart, Layout, Share, attribute_busy, reading_key
from agent.wire import Method
from gputally.base.apportionment import prorate

Holders = dict[tuple[str, str, str], HolderReading]
"""The readings of one device's holders, by `usage_attribution.reading_key`."""

_METHODS: tuple[Method, ...] = (
    "simulated", "imported", "carried", "accounting", "device", "process", "gpm", "dcgm", "allocation",
)  # fmt: skip
"""Methods of measuring busy time, the finest first."""
_RANK = {method: rank for rank, method in enumerate(_METHODS, 1)}


def method_of(rank: int) -> Method:
    """Return the method with this rank. Rank 0 means that no method read a busy time; if it is known even so, it
    follows from the device's busy time and the allocation."""
    return _METHODS[rank - 1] if rank else "allocation"


_COMPLETE = frozenset({"process", "accounting"})
"""Methods that see every process, so that a holder without a reading did nothing."""

_RESET = Unavailable("counter reset")
_MISSED = Unavailable("samples missed")
NO_HOLDER_READING = "no per-holder reading"


class ReadingDelta(msgspec.Struct, frozen=True, gc=False):
    """The differences between two readings of one device. A sequence has one entry per part or share of the layout.

    busy_known: True if the busy time of the device or of one of its parts was read.
    device, parts, holders: busy microseconds of the device, of each part and of each share's holder; 0 if unknown.
    others: busy microseconds of processes without an allocation, on each part.
    reasons: why the busy time of each share's holder is unknown; "" if it is known.
    ranks: the rank of the method that read each share's busy time; 0 if it is unknown.
    parts_rank: the highest rank of the methods that read the parts.
    energy_uj: the device's energy; None if unknown.
    sm_active_us, tensor_active_us: activity of each part, None if unknown. The whole sequence is None if it is unknown
        for all parts.
    memory_mib, device_memory_mib: memory of each share and of the device at the first reading; None if unknown.
    idle_power_mw: the device's power at the first reading if it did nothing during the step; None otherwise."""

    busy_known: bool
    device: int
    parts: tuple[int, ...]
    holders: tuple[int, ...]
    others: tuple[int, ...]
    reasons: tuple[str, ...]
    ranks: tuple[int, ...]
    parts_rank: int
    energy_uj: int | None
    sm_active_us: tuple[int | None, ...] | None
    tensor_active_us: tuple[int | None, ...] | None
    memory_mib: tuple[int | None, ...]
    device_memory_mib: int | None
    idle_power_mw: int | None

    def pieces(self, layout: Layout, instants: Sequence[int]) -> list[ReadingDelta]:
        """Cut the step at `instants`, of which the first and the last are its start and end. The pieces add up to the
        step exactly.

        The holders' readings are scaled to the device's busy time first, so that no piece exceeds its part of it."""
        holders, rest = attribute_busy(layout, self.device, self.parts, self.holders, self.others)
        start, span = instants[0], instants[-1] - instants[0]
        pieces = []
        for lo, hi in pairwise(instant - start for instant in instants):
            own = tuple([prorate(busy, span, lo, hi) for busy in holders])
            pieces.append(
                msgspec.structs.replace(
                    self,
                    device=sum(own) + prorate(rest, span, lo, hi),
                    parts=tuple([sum(own[part.first : part.first + len(part.shares)]) for part in layout.parts]),
                    holders=own,
                    others=(0,) * len(self.others),
                    energy_uj=_part(self.energy_uj, span, lo, hi),
                    sm_active_us=_of_parts(self.sm_active_us, span, lo, hi),
                    tensor_active_us=_of_parts(self.tensor_active_us, span, lo, hi),
                )
            )
        return pieces


def _part(value: int | None, span: int, lo: int, hi: int) -> int | None:
    return None if value is None else prorate(value, span, lo, hi)


def _of_parts(values: tuple[int | None, ...] | None, span: int, lo: int, hi: int) -> tuple[int | None, ...] | None:
    return None if values is None else tuple([_part(value, span, lo, hi) for value in values])


def index_holders(reading: DeviceReading) -> Holders:
    """Return the readings of one device's holders, by `reading_key`."""
    return {reading_key(r.holder, r.mig_uuid): r for r in reading.holders}


def measure(
    layout: Layout, before: DeviceReading, after: DeviceReading | Unavailable, holders: Holders, holders_after: Holders
) -> ReadingDelta:
    """Return the step from one reading of a device to the next.

    after: Unavailable, with the reason, if there is no next reading.
    holders, holders_after: the readings of the holders in `before` and `after`.

    If a counter of the device decreased or the epoch of its counters changed, the counters started again, and the
    figures of the step are unknown."""
    if isinstance(after, Unavailable):
        return _unknown(layout, before, after)
    energy = _difference(before.energy_uj, after.energy_uj)
    device = _MISSED if after.sample_gaps > before.sample_gaps else _difference(before.busy_us, after.busy_us)
    if before.counter_epoch != after.counter_epoch or device is _RESET or energy is _RESET:
        return _unknown(layout, before, _RESET)
    parts = _readings(layout, before, after)
    busy = _of_whole_gpu(layout, device, after, holders, holders_after)
    if busy is None:
        busy = _reconciled(layout, device, parts, after, holders, holders_after)
    idle = busy.device == 0 and not (isinstance(device, Unavailable) and any(busy.reasons))
    sm_active_us, tensor_active_us = _activities(parts, before)
    return ReadingDelta(
        *busy,
        _or_none(energy),
        sm_active_us,
        tensor_active_us,
        tuple([_memory(share, before, holders) for share in layout.shares]),
        _or_none(before.memory_used_mib),
        _or_none(before.power_mw) if idle else None,
    )


_PartReading = DeviceReading | InstanceReading | None
_PartReadings = list[tuple[_PartReading, _PartReading]]


class _Busy(NamedTuple):
    """The busy times of a step; see `ReadingDelta`."""

    known: bool
    device: int
    parts: tuple[int, ...]
    holders: tuple[int, ...]
    others: tuple[int, ...]
    reasons: tuple[str, ...]
    ranks: tuple[int, ...]
    parts_rank: int


def _of_whole_gpu(
    layout: Layout, device: Reading, after: DeviceReading, holders: Holders, holders_after: Holders
) -> _Busy | None:
    """Return the same as `_reconciled` where nothing has to be reconciled, as in most steps: for a GPU without MIG that
    was read with all of its holders and no other process, or that has one holder and no readings of processes. None for
    all others."""
    if isinstance(device, Unavailable) or layout.gpu.mig:
        return None
    rank = _rank(after, after)
    busy = [0] * len(layout.shares)
    ranks = [rank] * len(busy)
    if holders_after.keys() == layout.positions.keys():
        for key, position in layout.positions.items():
            first = holders.get(key)
            own = _difference(first.busy_us if first else 0, holders_after[key].busy_us)
            if isinstance(own, Unavailable):
                return None
            busy[position], ranks[position] = own, _RANK[after.method]
    elif not holders_after and len(busy) == 1 and layout.shares[0].exclusive and after.method not in _COMPLETE:
        busy[0] = device
    else:
        return None
    parts_rank = 0 if rank == _RANK["allocation"] else rank
    return _Busy(True, device, (device,), tuple(busy), (0,), ("",) * len(busy), tuple(ranks), parts_rank)


def _reconciled(
    layout: Layout,
    device: Reading,
    parts: _PartReadings,
    after: DeviceReading,
    holders: Holders,
    holders_after: Holders,
) -> _Busy:
    """Return the busy times of a step in which some may be missing, or not agree.

    device: the busy time of the whole GPU.
    parts: both readings of each part (`_readings`)."""
    others = _others(layout, holders, holders_after)
    holders_busy: list[Reading] = []
    parts_busy: list[int] = []
    ranks: list[int] = []
    parts_rank = 0
    busy_known, complete = not isinstance(device, Unavailable), after.method in _COMPLETE
    for number, (part, (first, last)) in enumerate(zip(layout.parts, parts, strict=True)):
        whole = device if last is after else _busy(part, first, last)
        own = [0 if s.holder is None else _holder_busy(s.key, holders, holders_after, complete) for s in part.shares]
        rank, own_unread = _rank(after, last), isinstance(own[0], Unavailable)
        whole, own = _reconcile(part, whole, own, others[number])
        if isinstance(whole, Unavailable):
            others[number] = 0
        elif not part.outside:
            busy_known = True
        parts_rank = max(parts_rank, 0 if rank == _RANK["allocation"] else rank)
        for share, busy in zip(part.shares, own, strict=True):
            of_part = share.holder is None or (share.exclusive and own_unread)
            ranks.append(0 if isinstance(busy, Unavailable) else rank if of_part else _RANK[after.method])
        parts_busy.append(_or_zero(whole))
        holders_busy += own
    total = sum(parts_busy) if isinstance(device, Unavailable) else device
    reasons = tuple([busy.reason if isinstance(busy, Unavailable) else "" for busy in holders_busy])
    own_busy = tuple([_or_zero(busy) for busy in holders_busy])
    return _Busy(busy_known, total, tuple(parts_busy), own_busy, tuple(others), reasons, tuple(ranks), parts_rank)


def _reconcile(part: DevicePart, whole: Reading, holders: list[Reading], others: int) -> tuple[Reading, list[Reading]]:
    """Return the busy time of a part as a whole, and of each of its holders. If one is missing, derive it from the
    other.

    A sole holder without a reading gets the part's time except that of other processes. A part without a reading is as
    busy as its holders and the other processes together if the readings of all holders are known. Otherwise the busy
    time of the part and of all its holders is unknown."""
    if not isinstance(whole, Unavailable):
        if part.shares[0].exclusive and isinstance(holders[0], Unavailable):
            return whole, holders if holders[0].refused else [max(whole - others, 0), *holders[1:]]
        return whole, holders
    known = [busy for busy in holders if not isinstance(busy, Unavailable)]
    if len(known) == len(holders) and any(share.holder for share in part.shares):
        return sum(known) + others, holders
    return whole, [whole] * len(holders)


def _unknown(layout: Layout, before: DeviceReading, why: Unavailable) -> ReadingDelta:
    reason = before.busy_us.reason if isinstance(before.busy_us, Unavailable) else why.reason
    zeros = (0,) * len(layout.parts)
    shares = len(layout.shares)
    return ReadingDelta(
        False, 0, zeros, (0,) * shares, zeros, (reason,) * shares, (0,) * shares, 0,
        None, None, None, (None,) * shares, None, None,
    )  # fmt: skip


def _difference(before: Reading, after: Reading) -> Reading:
    if isinstance(after, Unavailable):
        return before if isinstance(before, Unavailable) and not after.refused else after
    if isinstance(before, Unavailable):
        return before
    return after - before if after >= before else _RESET


def _or_none(reading: Reading) -> int | None:
    return None if isinstance(reading, Unavailable) else reading


def _or_zero(reading: Reading) -> int:
    return 0 if isinstance(reading, Unavailable) else reading


def _holder_busy(key: tuple[str, str, str], before: Holders, after: Holders, complete: bool) -> Reading:
    """Return the busy time of one holder between two readings. A holder without a first reading counts from zero.

    complete: True if the readings contain every holder that did something, so that a holder without a last reading did
        nothing."""
    first, last = before.get(key), after.get(key)
    if last is None:
        return 0 if complete else Unavailable(NO_HOLDER_READING)
    return _difference(first.busy_us if first else 0, last.busy_us)


def _others(layout: Layout, before: Holders, after: Holders) -> list[int]:
    """Return the busy microseconds of processes without an allocation, on each part. Processes whose busy time is
    unknown are left out."""
    totals = [0] * len(layout.parts)
    if not after or after.keys() <= layout.positions.keys():
        return totals
    numbers = {part.mig_uuid: i for i, part in enumerate(layout.parts)}
    for key in after.keys() - layout.positions.keys():
        number = numbers.get(key[2])
        busy = _holder_busy(key, before, after, False)
        if number is not None and not isinstance(busy, Unavailable):
            totals[number] += busy
    return totals


def _readings(layout: Layout, before: DeviceReading, after: DeviceReading) -> _PartReadings:
    """Return both readings of each part: those of the device or of the MIG instance; None if there is none."""
    first = {instance.mig_uuid: instance for instance in before.instances}
    last = {instance.mig_uuid: instance for instance in after.instances}
    return [
        (None, None) if part.outside
        else (first.get(part.mig_uuid), last.get(part.mig_uuid)) if part.mig_uuid
        else (before, after)
        for part in layout.parts
    ]  # fmt: skip


def _busy(part: DevicePart, before: _PartReading, after: _PartReading) -> Reading:
    if part.outside:  # nothing can run on slices that belong to no instance
        return 0
    if before is None or after is None:
        return Unavailable("no reading of the MIG instance")
    return _difference(before.busy_us, after.busy_us)


_Activities = tuple[int | None, ...] | None


def _activities(parts: _PartReadings, before: DeviceReading) -> tuple[_Activities, _Activities]:
    """Return the SM and the tensor activity of each part; None if it was not read of any part."""
    unread = isinstance(before.sm_active_us, Unavailable) and isinstance(before.tensor_active_us, Unavailable)
    if unread and not before.instances:
        return None, None
    sm: list[int | None] = []
    tensor: list[int | None] = []
    for first, last in parts:
        if first is None or last is None:
            sm.append(None)
            tensor.append(None)
            continue
        sm.append(_or_none(_difference(first.sm_active_us, last.sm_active_us)))
        tensor.append(_or_none(_difference(first.tensor_active_us, last.tensor_active_us)))
    return _unless_unread(sm), _unless_unread(tensor)


def _unless_unread(values: list[int | None]) -> _Activities:
    return None if all(value is None for value in values) else tuple(values)


def _rank(after: DeviceReading, part_reading: _PartReading) -> int:
    """Return the rank of the method that read the busy time of a part as a whole, or the rank of `allocation` if it was
    not read."""
    if part_reading is None or isinstance(part_reading.busy_us, Unavailable):
        return _RANK["allocation"]
    if isinstance(part_reading, InstanceReading) and part_reading.method is not None:
        return _RANK[part_reading.method]
    return _RANK["device" if after.method in _COMPLETE else after.method]


def _instance(reading: DeviceReading, mig_uuid: str) -> InstanceReading | None:
    for instance in reading.instances:
        if instance.mig_uuid == mig_uuid:
            return instance
    return None


def _memory(share: Share, reading: DeviceReading, holders: Holders) -> int | None:
    """Return the memory of a share's holder in MiB: its own reading, or the device's if it has the device alone; None
    if unknown."""
    if share.holder is None:
        return 0
    own = holders.get(share.key)
    if own is not None and not isinstance(own.memory_mib, Unavailable):
        return own.memory_mib
    if own is not None and isinstance(own.memory_mib, Unavailable) and own.memory_mib.refused:
        return None
    if own is None and reading.method in _COMPLETE:
        return 0
    if not share.exclusive:
        return None
    if share.mig_uuid:
        instance = _instance(reading, share.mig_uuid)
        return _or_none(instance.memory_mib) if instance else None
    return _or_none(reading.memory_used_mib)
