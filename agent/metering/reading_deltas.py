"""Computes what happened on one GPU between two readings.

`measure` turns two readings into a `Step`. A step can be cut at instants inside it, and the pieces add up to the step.
A figure that could not be read is unknown and has a reason. It is never zero. A counter never decreases: if it seems
to, it has started again. The results are deterministic integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import msgspec

from agent.core.readings import DeviceReading, HolderReading, InstanceReading, Reading, Unavailable
from agent.metering.busy_time_attribution import GpuPart, Layout, Share, attribute_busy, reading_key
from agent.wire import Method
from gputally.base.units import prorate

Holders = dict[tuple[str, str, str], HolderReading]
"""The holder readings of one device, by `reading_key`."""

_METHODS: tuple[Method, ...] = (
    "simulated", "imported", "carried", "accounting", "device", "process", "gpm", "dcgm", "allocation",
)  # fmt: skip
"""Methods of measuring busy time, the finest first."""
_RANK = {method: rank for rank, method in enumerate(_METHODS)}
_COMPLETE = frozenset({"process", "accounting"})
"""Methods that see every process. A holder that they do not list did nothing."""

_RESET = Unavailable("counter reset")
_MOST_REMEMBERED = 64
_MISSED = Unavailable("samples missed")
NO_HOLDER_READING = "no per-holder reading"


@dataclass(frozen=True, slots=True, eq=False)
class Methods:
    """The method of the busy time of each share, and of each part as a whole.

    A method is given as its position in the list of methods: a higher one is coarser, and 0 means none."""

    shares: tuple[int, ...]
    parts: int


def method_of(rung: int) -> Method:
    """Return the method at a position."""
    return _METHODS[rung]


class Step(msgspec.Struct, frozen=True, gc=False):
    """Differences between two readings of one device. Sequences follow the layout's parts or shares.

    device, parts, claims, strangers: busy microseconds, 0 if unknown.
    reasons: why a share's own figure is unknown; "" if it is known.
    methods: how each busy time was read.
    energy_uj: of the device.
    sm_active_us, tensor_active_us: of each part, None if unknown. The whole sequence is None if all parts are unknown.
    memory_mib, device_memory_mib: held from the first reading on, per share and in total.
    idle_power_mw: power at its start if the device did nothing."""

    busy_known: bool
    device: int
    parts: tuple[int, ...]
    claims: tuple[int, ...]
    strangers: tuple[int, ...]
    reasons: tuple[str, ...]
    methods: Methods
    energy_uj: int | None
    sm_active_us: tuple[int | None, ...] | None
    tensor_active_us: tuple[int | None, ...] | None
    memory_mib: tuple[int | None, ...]
    device_memory_mib: int | None
    idle_power_mw: int | None

    def pieces(self, layout: Layout, instants: Sequence[int]) -> list[Step]:
        """Cut the step into len(instants) - 1 consecutive pieces, which add up to it exactly.

        The claims are scaled to the device first, so that no piece claims more than its device time."""
        claims, rest = attribute_busy(layout, self.device, self.parts, self.claims, self.strangers)
        start, span = instants[0], instants[-1] - instants[0]
        pieces = []
        for lo, hi in pairwise(instant - start for instant in instants):
            mine = tuple([prorate(claim, span, lo, hi) for claim in claims])
            pieces.append(
                msgspec.structs.replace(
                    self,
                    device=sum(mine) + prorate(rest, span, lo, hi),
                    parts=tuple([sum(mine[part.first : part.first + len(part.shares)]) for part in layout.parts]),
                    claims=mine,
                    strangers=(0,) * len(self.strangers),
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
    """Return the holder readings of one device by the holder's key."""
    return {reading_key(r.holder, r.mig_uuid): r for r in reading.holders}


def measure(
    layout: Layout, before: DeviceReading, after: DeviceReading | Unavailable, holders: Holders, holders_after: Holders
) -> Step:
    """Compute what happened on a device from one reading to the next.

    `after` is Unavailable, with the reason, if there is no next reading. A counter that decreased or changed its epoch
    has started again, and the figure of that span is unknown."""
    if isinstance(after, Unavailable):
        return _unknown(layout, before, after)
    energy = _difference(before.energy_uj, after.energy_uj)
    device = _MISSED if after.sample_gaps > before.sample_gaps else _difference(before.busy_us, after.busy_us)
    if before.counter_epoch != after.counter_epoch or device is _RESET or energy is _RESET:
        return _unknown(layout, before, _RESET)
    busy = plain(layout, device, after, holders, holders_after)
    if busy is None:
        busy = reconciled(layout, device, before, after, holders, holders_after)
    active = _reads_activity(before)
    return Step(
        busy.known,
        busy.device,
        busy.parts,
        busy.claims,
        busy.strangers,
        busy.reasons,
        busy.methods,
        _or_none(energy),
        _activities(layout, before, after, "sm_active_us") if active else None,
        _activities(layout, before, after, "tensor_active_us") if active else None,
        tuple([_memory(share, before, holders) for share in layout.shares]),
        _or_none(before.memory_used_mib),
        _or_none(before.power_mw) if busy.idle else None,
    )


class Busy(msgspec.Struct, frozen=True, gc=False):
    """The busy times of a step, with the names of `Step`.

    idle: whether nothing was done, as far as known."""

    known: bool
    device: int
    parts: tuple[int, ...]
    claims: tuple[int, ...]
    strangers: tuple[int, ...]
    reasons: tuple[str, ...]
    methods: Methods
    idle: bool


def plain(
    layout: Layout, device: Reading, after: DeviceReading, holders: Holders, holders_after: Holders
) -> Busy | None:
    """Return the same as `reconciled` if nothing has to be reconciled, and None otherwise.

    This is the case in most steps: a whole GPU that was read with all its holders and no other processes."""
    if isinstance(device, Unavailable) or not layout.whole or holders_after.keys() != layout.positions.keys():
        return None
    claims = [0] * len(layout.shares)
    for key, position in layout.positions.items():
        claim = _claim(key, holders, holders_after, False)
        if isinstance(claim, Unavailable):
            return None
        claims[position] = claim
    reasons = ("",) * len(claims)
    methods = layout.methods.get(after.method)
    if methods is None:
        methods = layout.methods[after.method] = _methods(layout, after, ((_method(after, after), False),), reasons)
    return Busy(True, device, (device,), tuple(claims), (0,), reasons, methods, device == 0)


def reconciled(
    layout: Layout,
    device: Reading,
    before: DeviceReading,
    after: DeviceReading,
    holders: Holders,
    holders_after: Holders,
) -> Busy:
    """Return the busy times of any step, also if readings are missing. `device` is the GPU's own reading."""
    complete = after.method in _COMPLETE
    strangers = _strangers(layout, holders, holders_after)
    claims: list[int] = []
    parts: list[int] = []
    reasons: list[str] = []
    ways: list[tuple[Method, bool]] = []
    known = not isinstance(device, Unavailable)
    for number, part in enumerate(layout.parts):
        first, last = _place(part, before), _place(part, after)
        whole = device if last is after else _busy(part, first, last)
        mine = [0 if s.holder is None else _claim(s.key, holders, holders_after, complete) for s in part.shares]
        ways.append((_method(after, last), isinstance(mine[0], Unavailable)))
        whole, mine = _reconcile(part, whole, mine, strangers[number])
        if isinstance(whole, Unavailable):
            strangers[number] = 0
        elif not part.outside:
            known = True
        parts.append(_or_zero(whole))
        claims += [_or_zero(claim) for claim in mine]
        reasons += [claim.reason if isinstance(claim, Unavailable) else "" for claim in mine]
    total = sum(parts) if isinstance(device, Unavailable) else device
    return Busy(
        known,
        total,
        tuple(parts),
        tuple(claims),
        tuple(strangers),
        tuple(reasons),
        _methods(layout, after, tuple(ways), tuple(reasons)),
        total == 0 and not (isinstance(device, Unavailable) and any(reasons)),
    )


def _reconcile(part: GpuPart, whole: Reading, claims: list[Reading], strangers: int) -> tuple[Reading, list[Reading]]:
    """Return the busy time of the part as a whole and of its holders.

    If one of the two is missing, it is derived from the other where possible. A sole holder without a reading gets
    everything except the time of other processes. A part without a reading is as busy as its holders, if all of them
    are known. If any of them is unknown, all holders of such a part are unknown."""
    if not isinstance(whole, Unavailable):
        if part.shares[0].exclusive and isinstance(claims[0], Unavailable):
            return whole, claims if claims[0].refused else [max(whole - strangers, 0)]
        return whole, claims
    known = [c for c in claims if not isinstance(c, Unavailable)]
    if len(known) == len(claims) and any(share.holder for share in part.shares):
        return sum(known) + strangers, claims
    return whole, [whole] * len(claims)


def _unknown(layout: Layout, before: DeviceReading, why: Unavailable) -> Step:
    reason = before.busy_us.reason if isinstance(before.busy_us, Unavailable) else why.reason
    zeros = (0,) * len(layout.parts)
    shares = len(layout.shares)
    methods = Methods((0,) * shares, 0)
    return Step(
        False, 0, zeros, (0,) * shares, zeros, (reason,) * shares, methods,
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


def _claim(key: tuple[str, str, str], before: Holders, after: Holders, complete: bool) -> Reading:
    """Return the busy time of one holder.

    A holder that is listed for the first time counts from zero. A holder that a complete list no longer contains has
    ended with its last reading."""
    first, last = before.get(key), after.get(key)
    if last is None:
        return 0 if complete else Unavailable(NO_HOLDER_READING)
    return _difference(first.busy_us if first else 0, last.busy_us)


def _strangers(layout: Layout, before: Holders, after: Holders) -> list[int]:
    """Return the busy time per part of processes without an allocation there."""
    totals = [0] * len(layout.parts)
    if not after or after.keys() <= layout.positions.keys():
        return totals
    numbers = {part.mig_uuid: i for i, part in enumerate(layout.parts)}
    for key in after.keys() - layout.positions.keys():
        number = numbers.get(key[2])
        claim = _claim(key, before, after, False)
        if number is not None and not isinstance(claim, Unavailable):
            totals[number] += claim
    return totals


def _place(part: GpuPart, reading: DeviceReading) -> DeviceReading | InstanceReading | None:
    """Return the reading of a part: the device's, its instance's, or None if there is none."""
    if part.outside:
        return None
    return _instance(reading, part.mig_uuid) if part.mig_uuid else reading


_Place = DeviceReading | InstanceReading | None


def _busy(part: GpuPart, before: _Place, after: _Place) -> Reading:
    if part.outside:  # nothing can run on slices that belong to no instance
        return 0
    if before is None or after is None:
        return Unavailable("no reading of the MIG instance")
    return _difference(before.busy_us, after.busy_us)


_Activity = Literal["sm_active_us", "tensor_active_us"]


def _reads_activity(reading: DeviceReading) -> bool:
    """Return whether the reading may contain activity. On most machines there is none, because it needs privileges."""
    if reading.instances:
        return True
    return not (isinstance(reading.sm_active_us, Unavailable) and isinstance(reading.tensor_active_us, Unavailable))


def _activities(
    layout: Layout, before: DeviceReading, after: DeviceReading, name: _Activity
) -> tuple[int | None, ...] | None:
    """Return the SM or tensor activity of each part; None if no part was read."""
    found = tuple([_activity(_place(part, before), _place(part, after), name) for part in layout.parts])
    return None if all(value is None for value in found) else found


def _activity(before: _Place, after: _Place, name: _Activity) -> int | None:
    """Return the activity of a part; None if it was not read."""
    if before is None or after is None:
        return None
    return _or_none(_difference(getattr(before, name), getattr(after, name)))


def _method(after: DeviceReading, place: _Place) -> Method:
    """Return the method of a part's busy time as a whole; `allocation` if it was not read."""
    if place is None or isinstance(place.busy_us, Unavailable):
        return "allocation"
    if isinstance(place, InstanceReading) and place.method is not None:
        return place.method
    return "device" if after.method in _COMPLETE else after.method


def _methods(
    layout: Layout, after: DeviceReading, ways: tuple[tuple[Method, bool], ...], reasons: tuple[str, ...]
) -> Methods:
    """Return the method of each share's busy time: of its own reading, or of the part that it has alone.

    ways: for each part, the method of the part as a whole, and whether its first share has no reading of its own. For
        an unheld share, it shows that nothing was busy there.

    Results are cached, because a step is computed for every device and sample."""
    key = after.method, ways, reasons
    known = layout.methods.get(key)
    if known is None:
        found: list[int] = []
        for part, (whole, unread) in zip(layout.parts, ways, strict=True):
            for position, share in enumerate(part.shares, start=part.first):
                of_part = share.holder is None or (share.exclusive and unread)
                found.append(0 if reasons[position] else _RANK[whole if of_part else after.method])
        known = Methods(tuple(found), max([0, *(_RANK[whole] for whole, _ in ways if whole != "allocation")]))
        if len(layout.methods) < _MOST_REMEMBERED:
            layout.methods[key] = known
    return known


def _instance(reading: DeviceReading, mig_uuid: str) -> InstanceReading | None:
    for instance in reading.instances:
        if instance.mig_uuid == mig_uuid:
            return instance
    return None


def _memory(share: Share, reading: DeviceReading, holders: Holders) -> int | None:
    """Return the MiB of a share's holder. This is its own reading, or all memory of a device that it has alone."""
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
