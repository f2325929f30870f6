"""Turns snapshots into closed usage intervals, and keeps its state over a restart.

A snapshot is valid until the next one. A span closes at multiples of the interval and at the end of a month in the
billing time zone. When the holders of a GPU change, all rows of this GPU close at once.

Sets of rows of one GPU never overlap. While the GPU is metered and its holders are known, their capacities add up to
the time exactly. Two kinds of time give no rows: the time before the holders were first known, and unheld time while
the holders are unknown, during a restart or in a gap without snapshots.

The meter adds up the readings of an open span, and divides the sums over its rows when it closes. The readings of
devices and processes are sampled at different instants, so the parts are made to add up to the device's figure once per
span, not at every step. A figure is unknown (None) if it was missing while other figures could be read. Time in which
nothing could be read is a gap, and the figure covers the rest of the span.

The state is stored in the same transaction as the closed sets, so it never claims more than is spooled. It is valid
only within one boot of the node, because a reboot ends every holder.

The meter is deterministic and has neither clock nor I/O. The outbox assigns the sequence numbers."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import msgspec

from agent.core.readings import Allocation, DeviceReading, Gpu, NodeSnapshot, Unavailable
from agent.metering.reading_deltas import NO_HOLDER_READING, Holders, ReadingDelta, index_holders, measure, method_of
from agent.metering.usage_attribution import (
    Layout,
    Share,
    active_energy,
    attribute_activity,
    attribute_busy,
    attribute_energy,
    lay_out,
)
from agent.wire import UNATTRIBUTED, Gap, Health, Method, UsageInterval
from gputally.base.units import BUCKET_MS, MS_PER_MINUTE, MS_PER_SECOND
from gputally.base.untrusted_text import UNDECODABLE

MAX_GAPS = 32
"""Largest number of gaps of a row, so that a row stays small. If a source fails more often within one span, the later
gaps are joined, which overstates the unknown time."""

_NONE: Set[int] = frozenset()


class SpanReadings(msgspec.Struct, frozen=True, gc=False):
    """The figures of one row over a closed span, with the names of `agent.wire.UsageInterval`; None if unknown.

    method: the coarsest method that contributed to the busy time; `allocation` if the busy time is unknown."""

    busy_us: int | None
    sm_active_us: int | None
    tensor_active_us: int | None
    memory_mib_s: int | None
    energy_uj: int | None
    gaps: tuple[Gap, ...]
    method: Method


class _Total(msgspec.Struct):
    """A sum. It is unknown if one of its values was missing while other figures could be read."""

    value: int = 0
    any_known: bool = False
    missing: bool = False

    def add(self, value: int | None, read: bool) -> None:
        """Add a value; None if it is missing. read: True if other figures could be read."""
        if value is None:
            self.missing = self.missing or read
        else:
            self.value += value
            self.any_known = True

    def get(self) -> int | None:
        return self.value if self.any_known and not self.missing else None


class _Activity:
    """The SM or tensor activity of each part of a GPU since its first reading.

    parts: the number of parts.
    missing: True if the activity was missing earlier in the span while other figures could be read."""

    def __init__(self, parts: int, missing: bool) -> None:
        self._totals = [_Total() for _ in range(parts)]
        self._missing = missing

    def add(self, values: Sequence[int | None] | None, read: bool) -> None:
        """Add the values of the parts; None if all are missing. read: True if other figures could be read."""
        if values is None:
            self._missing = self._missing or read
            return
        for total, value in zip(self._totals, values, strict=True):
            total.add(value, read)

    def get(self) -> list[int | None] | None:
        """Return the activity of each part; None if it is unknown for all parts."""
        return None if self._missing else [total.get() for total in self._totals]


class OpenSpan:
    """The open span of one GPU: the sums of its readings so far, per part (the GPU or a MIG instance) and per share (a
    holder's claim on a part)."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._device = 0
        self._parts: Sequence[int] = ()
        """Busy time of each part. Like the other sequences, it is empty until the first step."""
        self._others: Sequence[int] = ()
        """Busy time of processes without an allocation, on each part."""
        self._holders: Sequence[int] = ()
        """Busy time of each share's holder."""
        self._unread: Set[int] = _NONE
        """Positions of the shares whose busy time was unknown in every step so far."""
        self._gaps: dict[int, list[Gap]] = {}
        self._energy = _Total()
        self._energy_ms = 0
        self._known = False
        """True if busy time was read in any step of the span."""
        self._sm: _Activity | None = None
        self._tensor: _Activity | None = None
        self._ranks: tuple[int, ...] = ()
        """The highest rank of the methods that read each share's busy time."""
        self._parts_rank = 0
        self._memory: Sequence[int | None] = ()
        """MiB-milliseconds of each share; None if they were never read."""
        self._memory_unknown: Set[int] = _NONE
        """Positions of the shares whose memory was missing while other figures were read."""
        self._device_memory = _Total()

    def add(self, step: ReadingDelta, start_ms: int, end_ms: int, gap: str = "") -> None:
        """Add a step over [start_ms, end_ms), which begins where the last step ended.

        gap: why the holders were unknown in the step; "" if they were known."""
        length = end_ms - start_ms
        reasons = step.reasons
        unread = {i for i, reason in enumerate(reasons) if reason} if any(reasons) else _NONE
        for i in range(len(reasons)) if gap else unread:
            self._note(i, start_ms, end_ms, gap or reasons[i])
        memory = [None if mebibytes is None else mebibytes * length for mebibytes in step.memory_mib]
        if None in memory:
            self._memory_unknown |= {i for i, product in enumerate(memory) if product is None and i not in unread}
        if not self._parts:
            self._unread, self._memory, self._ranks = unread, memory, step.ranks
            self._parts, self._others, self._holders = step.parts, step.others, step.holders
        else:
            self._unread &= unread
            unknown = None in memory or None in self._memory
            self._memory = list(map(_plus if unknown else operator.add, self._memory, memory))
            self._parts = list(map(operator.add, self._parts, step.parts))
            self._others = list(map(operator.add, self._others, step.others))
            self._holders = list(map(operator.add, self._holders, step.holders))
            if step.ranks != self._ranks:
                self._ranks = tuple(map(max, self._ranks, step.ranks))
        self._sm = self._active(self._sm, step.sm_active_us, step.busy_known)
        self._tensor = self._active(self._tensor, step.tensor_active_us, step.busy_known)
        self._known = self._known or step.busy_known
        self._parts_rank = max(self._parts_rank, step.parts_rank)
        self._device += step.device
        self._energy.add(step.energy_uj, step.busy_known)
        if step.energy_uj is not None:
            self._energy_ms += length
        device_mib = step.device_memory_mib
        self._device_memory.add(None if device_mib is None else device_mib * length, step.busy_known)

    def _active(self, so_far: _Activity | None, values: Sequence[int | None] | None, read: bool) -> _Activity | None:
        if so_far is None:
            if values is None:
                return None
            so_far = _Activity(len(values), self._known)
        so_far.add(values, read)
        return so_far

    def _note(self, share: int, start_ms: int, end_ms: int, reason: str) -> None:
        gaps = self._gaps.setdefault(share, [])
        if gaps and (len(gaps) >= MAX_GAPS or (gaps[-1].end_ms == start_ms and gaps[-1].reason == reason)):
            gaps[-1] = Gap(gaps[-1].start_ms, end_ms, gaps[-1].reason)
        else:
            gaps.append(Gap(start_ms, end_ms, reason))

    def settle(
        self, capacities: Sequence[int], idle_power_mw: int | None
    ) -> tuple[list[SpanReadings], SpanReadings | None]:
        """Return the figures of each share, and those that belong to no share (None if there are none).

        capacities: capacity of each share over the span in GPU-microseconds.
        idle_power_mw: power of the idle device; None if unknown.

        The busy times add up to the device's busy time, and the energies to its energy. A busy time can exceed the span
        by a fraction of the sampling period, because samples arrive late. It is not cut off, because the next span has
        as much less."""
        if self._gaps:
            self._settle_idle_parts()
        busy, rest = attribute_busy(self._layout, self._device, self._parts, self._holders, self._others)
        energy = self._energy.get()
        energies: Sequence[int | None] = [None] * (len(busy) + 1)
        if energy is not None:
            alone = len(busy) == 1 and not rest  # the only share gets all energy, active and idle
            # The active energy of a share without a reading is unknown, so all energy is divided by allocation.
            active = 0 if alone or self._unread else active_energy(energy, self._energy_ms, self._device, idle_power_mw)
            if rest:
                energies = attribute_energy(energy, active, [*busy, rest], [*capacities, 0])
            else:
                energies = [*attribute_energy(energy, active, busy, capacities), 0]
        sm, sm_rest = self._activity(self._sm, busy, capacities)
        tensor, tensor_rest = self._activity(self._tensor, busy, capacities)
        figures = []
        for i, own in enumerate(busy):
            read = i not in self._unread
            figures.append(
                SpanReadings(
                    own if read else None,
                    sm[i] if read else None,
                    tensor[i] if read else None,
                    _seconds(self._memory_of(i)),
                    energies[i],
                    tuple(self._gaps.get(i, ())),
                    method_of(self._ranks[i]) if read else "allocation",
                )
            )
        if not (rest or sm_rest or tensor_rest):
            return figures, None
        method = method_of(self._parts_rank)
        return figures, SpanReadings(rest, sm_rest, tensor_rest, self._unowned_memory(), energies[-1], (), method)

    def _activity(
        self, activity: _Activity | None, busy: list[int], capacities: Sequence[int]
    ) -> tuple[list[int | None], int | None]:
        """Return the SM or tensor activity of each share, and the activity that belongs to no share; None if
        unknown."""
        parts = None if activity is None else activity.get()
        if parts is None:
            return [None] * len(busy), None
        shares: list[int | None] = []
        unowned: int | None = None
        for part, known, whole in zip(self._layout.parts, parts, self._parts, strict=True):
            if known is None:
                shares += [None] * len(part.shares)
                continue
            positions = slice(part.first, part.first + len(part.shares))
            own_busy = busy[positions]
            rest = max(whole - sum(own_busy), 0)
            *own, left = attribute_activity(part, known, own_busy, rest, capacities[positions])
            unread = sum(amount for i, amount in enumerate(own, part.first) if i in self._unread)
            shares += own
            unowned = (unowned or 0) + left + unread
        return shares, unowned

    def _settle_idle_parts(self) -> None:
        """Set the busy time of holders without a reading to 0 on parts whose own busy time is 0."""
        for part, busy in zip(self._layout.parts, self._parts, strict=True):
            positions = range(part.first, part.first + len(part.shares))
            if busy or not all(
                g.reason.startswith(NO_HOLDER_READING) for i in positions for g in self._gaps.get(i, ())
            ):
                continue
            for i in positions:
                self._gaps.pop(i, None)
                self._unread -= {i}

    def _memory_of(self, share: int) -> int | None:
        return None if share in self._memory_unknown else self._memory[share]

    def _unowned_memory(self) -> int | None:
        total, owned = self._device_memory.get(), [self._memory_of(i) for i in range(len(self._memory))]
        known = [product for product in owned if product is not None]
        if total is None or len(known) < len(owned):
            return None
        return _seconds(max(total - sum(known), 0))


def _plus(so_far: int | None, more: int | None) -> int | None:
    """Add two values; an unknown value counts as 0. Return None if both are unknown."""
    if so_far is None or more is None:
        return so_far if more is None else more
    return so_far + more


def _seconds(mebibyte_ms: int | None) -> int | None:
    return None if mebibyte_ms is None else mebibyte_ms // MS_PER_SECOND


_VERSION = 1


class GpuState(msgspec.Struct, frozen=True):
    """The state of one GPU at the end of its last closed span.

    closed_ms: the end of the span.
    idle_power_mw: power of the idle device; None if unknown."""

    closed_ms: int
    health: Health
    gpu: Gpu
    allocations: tuple[Allocation, ...]
    idle_power_mw: int | None = None

    def shifted(self, by_ms: int) -> GpuState:
        """Return the state with `closed_ms` shifted by `by_ms`."""
        return msgspec.structs.replace(self, closed_ms=self.closed_ms + by_ms)


class _State(msgspec.Struct, frozen=True):
    version: int
    boot_id: str
    gpus: tuple[GpuState, ...]


_decoder = msgspec.msgpack.Decoder(_State)


def encode(boot_id: str, gpus: Iterable[GpuState]) -> bytes:
    """Encode the meter's state. `decode` returns the same GPUs if it gets the same boot id."""
    return msgspec.msgpack.encode(_State(_VERSION, boot_id, tuple(gpus)))


def shifted_state(state: bytes, boot_id: str, by_ms: int) -> bytes:
    """Shift the times of an encoded state by `by_ms`, because a clock was set."""
    return encode(boot_id, [gpu.shifted(by_ms) for gpu in decode(state, boot_id)])


def decode(state: bytes, boot_id: str) -> tuple[GpuState, ...]:
    """Return the GPUs of an encoded state; empty if the state is of another boot or version, or cannot be decoded."""
    try:
        saved = _decoder.decode(state)
    except UNDECODABLE:
        return ()
    return saved.gpus if (saved.version, saved.boot_id) == (_VERSION, boot_id) else ()


_GONE = Unavailable("device gone")
_NOT_OBSERVED = Unavailable("not observed")


class ClosedSet(msgspec.Struct, frozen=True, gc=False):
    """The rows of one GPU over one span. Their `seq` is 0 until the outbox numbers them."""

    rows: tuple[UsageInterval, ...]


class _MeteredGpu:
    """One GPU that is being metered: its open span and the last reading.

    holders: the readings of the holders, by `reading_key`.
    layout: the layout of the allocations; None computes it.
    unsure: why it is unknown whether the shares without a holder are really unheld; "" if it is known."""

    def __init__(
        self,
        reading: DeviceReading,
        holders: Holders,
        allocations: tuple[Allocation, ...],
        start_ms: int,
        idle_power_mw: int | None,
        layout: Layout | None = None,
        unsure: str = "",
    ) -> None:
        self.reading = reading
        self.holders = holders
        self.allocations = allocations
        self.layout = layout or lay_out(reading.gpu, allocations)
        self.start_ms = start_ms
        self.span = OpenSpan(self.layout)
        self.idle_power_mw = idle_power_mw
        self.unsure = unsure

    def state(self) -> GpuState:
        """Return the state at the last closed end."""
        return GpuState(self.start_ms, self.reading.health, self.reading.gpu, self.allocations, self.idle_power_mw)

    def close(self, end_ms: int) -> ClosedSet:
        """Return the rows of the span and begin the next span.

        If it is unknown whether the shares without a holder are unheld, only the last known holders get rows, without
        readings, and the other shares stay unmetered."""
        if self.unsure:
            held = [i for i, share in enumerate(self.layout.shares) if share.holder is not None]
            closed = _rows_without_readings(self.layout, self.reading.health, held, self.start_ms, end_ms, self.unsure)
        else:
            closed = _rows(self.layout, self.reading, self.span, self.start_ms, end_ms, self.idle_power_mw)
        self.start_ms = end_ms
        self.span = OpenSpan(self.layout)
        return closed


class Meter:
    """Turns the snapshots of one node into closed sets.

    interval_ms: length of an interval, a divisor of 15 minutes.
    month_zone: time zone of the billing month.
    boot_id: the boot of the node in which an encoded state is valid.
    silence_ms: time without a snapshot after which the holders may have changed, as in a restart; None: three
        intervals, and at least five minutes."""

    def __init__(
        self, interval_ms: int, month_zone: ZoneInfo, *, boot_id: str = "", silence_ms: int | None = None
    ) -> None:
        if interval_ms <= 0 or BUCKET_MS % interval_ms:
            raise ValueError(f"the interval must divide 15 minutes; {interval_ms} ms does not")
        self._interval_ms = interval_ms
        self._zone = month_zone
        self._boot_id = boot_id
        self._silence_ms = max(3 * interval_ms, 5 * MS_PER_MINUTE) if silence_ms is None else silence_ms
        self._month_edge_ms = 0
        self._month_from_ms = 0
        self._at_ms: int | None = None
        self._open: dict[str, _MeteredGpu] = {}
        self._listed: tuple[Allocation, ...] | None = None
        self._allocations: dict[str, tuple[Allocation, ...]] | None = None
        """The present allocations by GPU uuid; None until they are first known."""
        self._unknown: dict[str, str] = {}
        """Why the holders of a GPU are unknown, by GPU uuid."""
        self._carry: dict[str, GpuState] = {}
        """The states of GPUs that are not metered now, but that may still have the same holders, by GPU uuid."""

    def observe(self, snapshot: NodeSnapshot) -> tuple[ClosedSet, ...]:
        """Meter the time up to a snapshot. Return the sets that close, at multiples of the interval or because holders
        changed.

        A snapshot that is not later than the last one is ignored."""
        at_ms = snapshot.at_ms
        if self._at_ms is not None and at_ms <= self._at_ms:
            return ()
        closed: list[ClosedSet] = []
        if self._at_ms is not None and at_ms - self._at_ms > self._silence_ms:
            closed += self.flush(self._at_ms)
        if not isinstance(snapshot.allocations, Unavailable) and snapshot.allocations != self._listed:
            self._listed, self._allocations = snapshot.allocations, _by_gpu(snapshot.allocations)
        unknown = _unknown_holders(snapshot)
        closed += self._continue(snapshot, unknown)
        closed += self._begin(snapshot, unknown)
        self._unknown = unknown
        self._at_ms = at_ms
        return tuple(closed)

    def _continue(self, snapshot: NodeSnapshot, unknown: Mapping[str, str]) -> list[ClosedSet]:
        """Meter the devices that are metered already, up to the snapshot. Return the sets that close."""
        if self._at_ms is None or not self._open or self._allocations is None:
            return []
        at_ms = snapshot.at_ms
        closed: list[ClosedSet] = []
        devices = {device.gpu.uuid: device for device in snapshot.devices}
        instants = self._instants(self._at_ms, at_ms)
        cut = self._is_cut(instants)
        for uuid, open_ in list(self._open.items()):
            after = devices.get(uuid)
            index = index_holders(after) if after else {}
            closed += self._advance(open_, after or _GONE, index, instants, cut)
            allocations = self._allocations.get(uuid, ())
            layout = _layout_now(open_, after, allocations)
            unsure = ""
            if layout is not None and len(layout.positions) < len(layout.shares):
                unsure = unknown.get(uuid, "")  # it is unknown whether these shares are still unheld
            if unsure and layout is not None and not layout.positions:
                layout = None
            if after is not None and layout is open_.layout and bool(unsure) == bool(open_.unsure):
                open_.reading, open_.holders, open_.allocations = after, index, allocations
                continue
            if open_.start_ms < at_ms:
                closed.append(open_.close(at_ms))
            if after is None or layout is None:
                del self._open[uuid]
            else:
                self._open[uuid] = _MeteredGpu(after, index, allocations, at_ms, open_.idle_power_mw, layout, unsure)
        return closed

    def _begin(self, snapshot: NodeSnapshot, unknown: Mapping[str, str]) -> list[ClosedSet]:
        """Start to meter new devices whose holders are known. Return the sets of the time since an earlier state."""
        if self._allocations is None:
            return []
        closed: list[ClosedSet] = []
        for device in snapshot.devices:
            uuid = device.gpu.uuid
            if uuid in self._open or uuid in unknown:
                continue
            earlier = self._carry.pop(uuid, None)
            allocations = self._allocations.get(uuid, ())
            power_mw = earlier.idle_power_mw if earlier else None
            self._open[uuid] = _MeteredGpu(device, index_holders(device), allocations, snapshot.at_ms, power_mw)
            if earlier is not None:
                closed += self._carried(earlier, self._open[uuid], snapshot.at_ms)
        if snapshot.devices:
            # A device that is missing from the list is gone; one with unknown holders waits.
            self._carry = {uuid: earlier for uuid, earlier in self._carry.items() if uuid in unknown}
        return closed

    def flush(self, at_ms: int) -> tuple[ClosedSet, ...]:
        """Close the open span of every GPU at `at_ms`, or at the last snapshot if that is later, and stop metering.

        The time after the last snapshot is a gap, because nothing was read in it."""
        if self._at_ms is None:
            return ()
        end_ms = max(at_ms, self._at_ms)
        closed: list[ClosedSet] = []
        instants = self._instants(self._at_ms, end_ms)
        cut = self._is_cut(instants)
        for open_ in self._open.values():
            if end_ms > self._at_ms:
                closed += self._advance(open_, _NOT_OBSERVED, {}, instants, cut)
            if open_.start_ms < end_ms:
                closed.append(open_.close(end_ms))
        self._carry.update({uuid: open_.state() for uuid, open_ in self._open.items()})
        self._open.clear()
        self._at_ms = end_ms
        return tuple(closed)

    def skip(self, by_ms: int) -> tuple[ClosedSet, ...]:
        """Handle a clock that was set ahead by `by_ms` since the last snapshot: close the open spans at that snapshot,
        and continue `by_ms` later.

        The skipped time did not pass, so nothing was held in it. The next snapshot books the time that really passed to
        the same holders, without readings (method `carried`)."""
        if self._at_ms is None:
            return ()
        closed = self.flush(self._at_ms)
        self._carry = {uuid: earlier.shifted(by_ms) for uuid, earlier in self._carry.items()}
        self._at_ms += by_ms
        return closed

    def state(self) -> bytes:
        """Return the encoded state at the end of the last closed sets. Store both in one transaction."""
        return encode(self._boot_id, [*self._carry.values(), *[open_.state() for open_ in self._open.values()]])

    def resume(self, state: bytes, snapshot: NodeSnapshot) -> tuple[ClosedSet, ...]:
        """Start from an encoded state, then observe the first snapshot after the restart. Return the sets that close.

        Holders that still hold the same device get rows from the end of their last row to the first snapshot with known
        holders (method `carried`, without readings). Unheld time gets no rows. A state of another boot or version, or
        one that cannot be decoded, is ignored."""
        gpus = decode(state, self._boot_id)
        if gpus and not self._open:
            self._carry = {earlier.gpu.uuid: earlier for earlier in gpus}
            # If the wall clock was set back meanwhile, new rows would otherwise overlap the closed ones.
            closed_ms = max(earlier.closed_ms for earlier in gpus)
            if closed_ms > snapshot.at_ms:
                self._at_ms = closed_ms
        return self.observe(snapshot)

    def _advance(
        self, open_: _MeteredGpu, after: DeviceReading | Unavailable, index: Holders, instants: Sequence[int], cut: bool
    ) -> list[ClosedSet]:
        """Meter one GPU from the first to the last of `instants`, and return the sets that close.

        after: the reading at the last instant; Unavailable if there is none.
        index: the readings of the holders in `after`.
        cut: True if a set closes at the last instant too. One always closes at each instant in between."""
        step = measure(open_.layout, open_.reading, after, open_.holders, index)
        if step.idle_power_mw is not None:
            known_mw = open_.idle_power_mw
            open_.idle_power_mw = step.idle_power_mw if known_mw is None else min(known_mw, step.idle_power_mw)
        last = instants[-1]
        gap = self._unknown.get(open_.layout.gpu.uuid, "")
        if len(instants) == 2:
            open_.span.add(step, instants[0], last, gap)
            return [open_.close(last)] if cut else []
        closed = []
        for piece, (start, end) in zip(step.pieces(open_.layout, instants), pairwise(instants), strict=True):
            open_.span.add(piece, start, end, gap)
            if cut or end != last:
                closed.append(open_.close(end))
        return closed

    def _carried(self, earlier: GpuState, now: _MeteredGpu, at_ms: int) -> list[ClosedSet]:
        """Return the sets over [earlier.closed_ms, at_ms) for the holders that are the same before and after."""
        same_device = (earlier.gpu.model, earlier.health) == (now.layout.gpu.model, now.reading.health)
        if earlier.closed_ms >= at_ms or not same_device:
            return []
        layout = lay_out(earlier.gpu, earlier.allocations)
        present = set(now.layout.shares)
        same = [i for i, share in enumerate(layout.shares) if share.holder is not None and share in present]
        if not same:
            return []
        return [
            _rows_without_readings(layout, earlier.health, same, start, end, _NOT_OBSERVED.reason)
            for start, end in pairwise(self._instants(earlier.closed_ms, at_ms))
        ]

    def _instants(self, start_ms: int, end_ms: int) -> list[int]:
        """Return the start, the instants in between at which spans close, and the end."""
        instants = [start_ms]
        while (cut := self._cut_after(instants[-1])) < end_ms:
            instants.append(cut)
        instants.append(end_ms)
        return instants

    def _is_cut(self, instants: Sequence[int]) -> bool:
        """Return True if a span closes at the last of these instants too."""
        return instants[-1] == self._cut_after(instants[-2])

    def _cut_after(self, at_ms: int) -> int:
        if not self._month_from_ms <= at_ms < self._month_edge_ms:
            self._month_from_ms, self._month_edge_ms = at_ms, next_month_ms(at_ms, self._zone)
        return min((at_ms // self._interval_ms + 1) * self._interval_ms, self._month_edge_ms)


def _unknown_holders(snapshot: NodeSnapshot) -> dict[str, str]:
    """Return why the holders of a GPU are unknown, by the uuid of each such GPU."""
    if isinstance(snapshot.allocations, Unavailable):
        return {device.gpu.uuid: snapshot.allocations.reason for device in snapshot.devices}
    return dict(snapshot.unknown_holders)


def next_month_ms(at_ms: int, zone: ZoneInfo) -> int:
    """Return when the next calendar month of `zone` begins, in UTC milliseconds."""
    local = datetime.fromtimestamp(at_ms // MS_PER_SECOND, UTC).astimezone(zone)
    year, month = (local.year + 1, 1) if local.month == 12 else (local.year, local.month + 1)
    return int(datetime(year, month, 1, tzinfo=zone).timestamp()) * MS_PER_SECOND


def _by_gpu(allocations: tuple[Allocation, ...]) -> dict[str, tuple[Allocation, ...]]:
    by_gpu: defaultdict[str, list[Allocation]] = defaultdict(list)
    for allocation in allocations:
        by_gpu[allocation.gpu_uuid].append(allocation)
    return {uuid: tuple(own) for uuid, own in by_gpu.items()}


def _layout_now(open_: _MeteredGpu, after: DeviceReading | None, allocations: tuple[Allocation, ...]) -> Layout | None:
    """Return the layout of a GPU after a reading: the same object if the rows continue unchanged, None if the GPU is
    gone. The order of the allocations does not matter."""
    if after is None:
        return None
    before = open_.reading
    same = before.health == after.health and (before.gpu is after.gpu or before.gpu == after.gpu)
    if same and allocations == open_.allocations:
        return open_.layout
    layout = lay_out(after.gpu, allocations)
    return open_.layout if same and layout == open_.layout else layout


def _rows(
    layout: Layout, reading: DeviceReading, span: OpenSpan, start_ms: int, end_ms: int, idle_power_mw: int | None
) -> ClosedSet:
    capacities = layout.capacities(end_ms - start_ms)
    figures, unattributed = span.settle(capacities, idle_power_mw)
    common = (layout.gpu, reading.health, start_ms, end_ms)
    rows = [
        _row(*common, share, capacity, figure)
        for share, capacity, figure in zip(layout.shares, capacities, figures, strict=True)
    ]
    if unattributed is not None:
        rows.append(_row(*common, _UNATTRIBUTED_SHARE, 0, unattributed))
    return ClosedSet(tuple(rows))


def _rows_without_readings(
    layout: Layout, health: Health, positions: Sequence[int], start_ms: int, end_ms: int, reason: str
) -> ClosedSet:
    """Return rows of the shares at these positions over a span without readings; other shares get no rows."""
    capacities = layout.capacities(end_ms - start_ms)
    unread = SpanReadings(None, None, None, None, None, (Gap(start_ms, end_ms, reason),), "carried")
    common = (layout.gpu, health, start_ms, end_ms)
    return ClosedSet(tuple(_row(*common, layout.shares[i], capacities[i], unread) for i in positions))


_UNATTRIBUTED_SHARE = Share(("", "", ""), UNATTRIBUTED, "", None, None, False)


def _row(
    gpu: Gpu, health: Health, start_ms: int, end_ms: int, share: Share, capacity: int, figures: SpanReadings
) -> UsageInterval:
    return UsageInterval(
        seq=0,
        start_ms=start_ms,
        end_ms=end_ms,
        gpu_uuid=gpu.uuid,
        gpu_model=gpu.model,
        slice=share.slice,
        holder=share.holder,
        sharing=share.sharing,
        health=health,
        capacity_us=capacity,
        allocated_us=0 if share.holder is None else capacity,
        **msgspec.structs.asdict(figures),
    )
