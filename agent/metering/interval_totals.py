"""Adds up the deltas of an open interval and divides them over its rows when it closes.

Readings are samples, so they are made to fit each other over the whole span and not step by step. A
figure is unknown (None) when it was missing from a stretch in which the rest could be read; a stretch
in which nothing could be read is a gap, and the figure covers the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set

import msgspec

from agent.metering.busy_time_attribution import (
    Layout,
    active_energy,
    attribute_activity,
    attribute_busy,
    attribute_energy,
)
from agent.metering.reading_deltas import NO_HOLDER_READING, Methods, Step, method_of
from agent.wire import Gap, Method
from gputally.base.units import MS_PER_SECOND

MAX_GAPS = 32
"""Gaps kept per row; a source that fails more often than this within one span has the later ones
joined, which overstates what is unknown and keeps the row small."""

_NONE: Set[int] = frozenset()


class SpanReadings(msgspec.Struct, frozen=True, gc=False):
    """One row's readings over a closed span; None where unknown. method: the coarsest that had a part in
    its busy time, `allocation` where that is unknown."""

    busy_us: int | None
    sm_active_us: int | None
    tensor_active_us: int | None
    memory_mib_s: int | None
    energy_uj: int | None
    gaps: tuple[Gap, ...]
    method: Method


class _Total:
    """A sum that is unknown as soon as a part of it is missing from a stretch otherwise read."""

    __slots__ = ("missing", "seen", "value")

    def __init__(self) -> None:
        self.value = 0
        self.seen = False
        self.missing = False

    def add(self, value: int | None, read: bool) -> None:
        if value is None:
            self.missing = self.missing or read
        else:
            self.value += value
            self.seen = True

    def get(self) -> int | None:
        return self.value if self.seen and not self.missing else None


class _Activity:
    """SM or tensor activity by part, from the first time on that it is read. missing: whether it was not before, in a
    stretch otherwise read."""

    __slots__ = ("_missing", "_totals")

    def __init__(self, parts: int, missing: bool) -> None:
        self._totals = [_Total() for _ in range(parts)]
        self._missing = missing

    def add(self, values: Sequence[int | None] | None, read: bool) -> None:
        if values is None:
            self._missing = self._missing or read
            return
        for total, value in zip(self._totals, values, strict=True):
            total.add(value, read)

    def get(self) -> list[int | None] | None:
        """None where it is known of no part."""
        return None if self._missing else [total.get() for total in self._totals]


class OpenSpan:
    """The open span of one GPU: what has been read on it so far, per part and per share.

    One is made for every row that is closed, so what hardly any span has (gaps, activity) is made when it comes."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._device = 0
        self._parts: Sequence[int] = ()
        """This and what else is a sequence is empty before the first step, and what that step says after it."""
        self._strangers: Sequence[int] = ()
        self._claims: Sequence[int] = ()
        self._unread: Set[int] = _NONE
        """Shares without a reading of their own so far."""
        self._gaps: dict[int, list[Gap]] = {}
        self._energy = _Total()
        self._energy_ms = 0
        self._known = False
        """Some of it could be read."""
        self._sm: _Activity | None = None
        self._tensor: _Activity | None = None
        self._methods: Methods | None = None
        self._rungs: Sequence[int] = ()
        self._way = 0
        self._memory: Sequence[int | None] = ()
        self._memoryless: Set[int] = _NONE
        """Shares whose memory is missing from a stretch otherwise read."""
        self._device_memory = _Total()

    def add(self, step: Step, start_ms: int, end_ms: int, gap: str = "") -> None:
        """Add a step that runs over [start_ms, end_ms), directly after the last one.

        gap: why the holders were not known meanwhile ("" = they were)."""
        length = end_ms - start_ms
        reasons = step.reasons
        unread = {i for i, reason in enumerate(reasons) if reason} if any(reasons) else _NONE
        for i in range(len(reasons)) if gap else unread:
            self._note(i, start_ms, end_ms, gap or reasons[i])
        memory = [None if mebibytes is None else mebibytes * length for mebibytes in step.memory_mib]
        if None in memory:
            self._memoryless |= {i for i, held in enumerate(memory) if held is None and i not in unread}
        if not self._parts:
            self._unread, self._memory = unread, memory
            self._parts, self._strangers, self._claims = step.parts, step.strangers, step.claims
        else:
            self._unread &= unread
            unknown = None in memory or None in self._memory
            self._memory = list(map(_plus if unknown else operator.add, self._memory, memory))
            self._parts = list(map(operator.add, self._parts, step.parts))
            self._strangers = list(map(operator.add, self._strangers, step.strangers))
            self._claims = list(map(operator.add, self._claims, step.claims))
        self._sm = self._active(self._sm, step.sm_active_us, step.busy_known)
        self._tensor = self._active(self._tensor, step.tensor_active_us, step.busy_known)
        self._known = self._known or step.busy_known
        methods = step.methods
        if methods is not self._methods:  # another mixture of ways than in the last step
            self._rungs = list(map(max, self._rungs, methods.shares)) if self._rungs else methods.shares
            self._way = max(self._way, methods.parts)
            self._methods = methods
        self._device += step.device
        self._energy.add(step.energy_uj, step.busy_known)
        if step.energy_uj is not None:
            self._energy_ms += length
        total = step.device_memory_mib
        self._device_memory.add(None if total is None else total * length, step.busy_known)

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
        """Figures per share, and those without an owner (None where there is nothing of it). capacities: of the
        shares over the span.

        Over all of them busy adds up to the device's busy time and energy to its energy. A sampler may
        overshoot the span by a fraction of its period: that is not cut off, it evens out."""
        layout = self._layout
        if self._gaps:
            self._forgive_idle()
        busy, rest = attribute_busy(layout, self._device, self._parts, self._claims, self._strangers)
        energy = self._energy.get()
        energies: Sequence[int | None] = [None] * (len(busy) + 1)
        if energy is not None:
            alone = len(busy) == 1 and not rest  # and has all of it, whatever it is made up of
            active = 0 if alone else active_energy(energy, self._energy_ms, self._device, idle_power_mw)
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
                    method_of(self._rungs[i]) if read else "allocation",
                )
            )
        if not (rest or sm_rest or tensor_rest):
            return figures, None
        nobody = SpanReadings(
            rest, sm_rest, tensor_rest, self._unowned_memory(), energies[-1], (), method_of(self._way)
        )
        return figures, nobody

    def _activity(
        self, of: _Activity | None, busy: list[int], capacities: Sequence[int]
    ) -> tuple[list[int | None], int | None]:
        """SM or tensor activity per share, and without a holder (None: not known of any part)."""
        parts = None if of is None else of.get()
        if parts is None:
            return [None] * len(busy), None
        shares: list[int | None] = []
        nobody: int | None = None
        for part, known, whole in zip(self._layout.parts, parts, self._parts, strict=True):
            if known is None:
                shares += [None] * len(part.shares)
                continue
            mine = slice(part.first, part.first + len(part.shares))
            claims = busy[mine]
            rest = max(whole - sum(claims), 0)
            *own, left = attribute_activity(part, known, claims, rest, capacities[mine])
            unread = sum(amount for i, amount in enumerate(own, part.first) if i in self._unread)
            shares += own
            nobody = (nobody or 0) + left + unread
        return shares, nobody

    def _forgive_idle(self) -> None:
        """Where a part was read and did nothing, none of its holders did anything either."""
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
        return None if share in self._memoryless else self._memory[share]

    def _unowned_memory(self) -> int | None:
        total, owned = self._device_memory.get(), [self._memory_of(i) for i in range(len(self._memory))]
        known = [m for m in owned if m is not None]
        if total is None or len(known) < len(owned):
            return None
        return _seconds(max(total - sum(known), 0))


def _plus(so_far: int | None, more: int | None) -> int | None:
    """None where neither is known."""
    if so_far is None or more is None:
        return so_far if more is None else more
    return so_far + more


def _seconds(mebibyte_ms: int | None) -> int | None:
    return None if mebibyte_ms is None else mebibyte_ms // MS_PER_SECOND
