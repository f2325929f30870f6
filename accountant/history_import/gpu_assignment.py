"""Assigns requests to GPUs without double use, and divides the holds into ledger rows.

A GPU has parts: itself, or its MIG instances. A part has slots: one, or as many as it is time-sliced into. A hold is
one holder's time on one slot. The holds of one slot never overlap. `place` ensures this, and `rows` relies on it.

The kube-scheduler's records say how many GPUs of a node a pod held, but not which. The exporter's labels say which, but
may be missing or late. `place` therefore assigns slots in this order: slots of the devices that were labelled with the
pod, then free ones without another label, then any. A hold that reaches into the next one on its slot by no more than
the tolerance is cut at the start of the next. A request without a free slot is counted as unplaced, so no GPU has more
than its time.

A value that was scraped at an instant t describes (t - step, t]. Here a cell is [t - step, t). A figure is an integer
per cell (parts per million, MiB, milliwatts). It is None if nothing was recorded, because unknown is not zero.

`rows` splits every GPU at quarter-hours, at each change of its holds, and where its recorded time begins or ends. For
each piece the rows add up to the piece exactly. Parts and slots are divided by largest remainder, and unheld time has
rows of its own. A piece in which the holder of some slot is unknown has no rows and stays unmetered.

Busy time of a part belongs to its only holder. If several share the part, their busy time is unknown, and the part's
busy time is in a separate row without a holder."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from accountant.core.claim_overlap import Span, intersect, union
from agent.wire import UNATTRIBUTED, Gap, Holder, PodFacts, Sharing, Slice, UsageInterval
from gputally.base.apportionment import apportion
from gputally.base.gpu_model_names import parse_gpu_model
from gputally.base.mig_profiles import compute_slices, parse_mig_profile, usual_memory_gb
from gputally.base.units import BUCKET_MS, MS_PER_SECOND, US_PER_MS


@dataclass(frozen=True, slots=True)
class TimeGrid:
    """Cells of `step_ms` from start_ms to end_ms; the span is a whole number of cells."""

    start_ms: int
    end_ms: int
    step_ms: int

    def __post_init__(self) -> None:
        if self.step_ms <= 0 or self.end_ms <= self.start_ms or (self.end_ms - self.start_ms) % self.step_ms:
            raise ValueError(f"[{self.start_ms}, {self.end_ms}) is not a whole number of steps of {self.step_ms} ms")

    @property
    def count(self) -> int:
        return (self.end_ms - self.start_ms) // self.step_ms

    def span(self, first: int, last: int) -> Span:
        """From the start of cell `first` to the end of cell `last`."""
        return self.start_ms + first * self.step_ms, self.start_ms + (last + 1) * self.step_ms

    def spans(self, cells: Iterable[int]) -> tuple[Span, ...]:
        """Runs of consecutive cells as spans."""
        return tuple(self.span(first, last) for first, last in runs(cells))


def runs(cells: Iterable[int]) -> list[tuple[int, int]]:
    """(first, last) of every run of consecutive numbers, ascending."""
    found: list[tuple[int, int]] = []
    for cell in sorted(set(cells)):
        if found and cell == found[-1][1] + 1:
            found[-1] = (found[-1][0], cell)
        else:
            found.append((cell, cell))
    return found


def bridge_gaps(cells: Collection[int], silent: Collection[int]) -> set[int]:
    """The cells, and the gaps between them that consist only of silent cells, in which no source was scraped."""
    found = set(cells)
    for (_, last), (first, _) in pairwise(runs(found)):
        between = range(last + 1, first)
        if all(cell in silent for cell in between):
            found.update(between)
    return found


@dataclass(frozen=True, slots=True)
class FigureSeries:
    """The values of one figure in the cells of a grid, not negative. A cell without a value was not recorded."""

    grid: TimeGrid
    values: Mapping[int, int]

    def over(self, start_ms: int, end_ms: int) -> tuple[int, list[Span]]:
        """The integral over time (figure x ms), and the parts of [start, end) without a value."""
        grid, step = self.grid, self.grid.step_ms
        total, gaps = 0, list[Span]()
        at = start_ms
        while at < end_ms:
            cell = (at - grid.start_ms) // step
            until = min(end_ms, grid.start_ms + (cell + 1) * step)
            value = self.values.get(cell)
            if value is not None:
                total += value * (until - at)
            elif gaps and gaps[-1][1] == at:
                gaps[-1] = (gaps[-1][0], until)
            else:
                gaps.append((at, until))
            at = until
        return total, gaps


_MIB_PER_GIB = 1024


@dataclass(frozen=True, slots=True)
class GpuPart:
    """A part of a GPU that pods can hold.

    slice: its MIG instance, None for the whole GPU.
    slots: number of equal parts that it is time-sliced into, otherwise 1.
    busy: its busy share, in parts per million.
    memory: its used memory, in MiB."""

    slice: Slice | None = None
    slots: int = 1
    busy: FigureSeries | None = None
    memory: FigureSeries | None = None


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """The history of one GPU.

    known: time in which the holder of every slot is known.
    lost: time in which its node could not be used.
    power: milliwatts of the whole GPU."""

    uuid: str
    model: str
    parts: tuple[GpuPart, ...]
    known: tuple[Span, ...]
    lost: tuple[Span, ...] = ()
    power: FigureSeries | None = None

    @property
    def weights(self) -> list[int]:
        """The weights of the parts, and of the rest of the GPU outside all parts (0 if the GPU is one part)."""
        slices = [part.slice for part in self.parts if part.slice is not None]
        if not slices:
            return [1, 0]
        compute = [one.compute for one in slices]
        return [*compute, max(0, slices[0].compute_of - sum(compute))]


@dataclass(frozen=True, slots=True)
class SlotHold:
    """A hold of one slot. part, slot: indices in the layout of the GPU."""

    gpu: str
    part: int
    slot: int
    holder: Holder
    start_ms: int
    end_ms: int


def mig_slice(profile: str, gi: int, gpu_model: str) -> Slice | None:
    """The instance of a profile such as `1g.10gb` or `1c.3g.40gb+me`; None if the name cannot be parsed."""
    mig = parse_mig_profile(profile)
    if mig is None:
        return None
    return Slice(
        profile=profile,
        gi=gi,
        ci=0,
        compute=mig.compute_instance,
        compute_of=compute_slices(gpu_model, profile),
        memory_mib=mig.memory_gb * _MIB_PER_GIB,
        memory_of_mib=(parse_gpu_model(gpu_model).memory_gb or usual_memory_gb(gpu_model) or 0) * _MIB_PER_GIB,
    )


def pack_instances(instances: Iterable[Slice]) -> list[list[Slice]]:
    """Places MIG instances on GPUs, the largest first, each on the first GPU with enough free compute slices."""
    gpus: list[list[Slice]] = []
    for one in sorted(instances, key=lambda part: (-part.compute, part.gi)):
        room = next((gpu for gpu in gpus if sum(x.compute for x in gpu) + one.compute <= one.compute_of), None)
        if room is None:
            gpus.append([one])
        else:
            room.append(one)
    return gpus


def by_slot(holds: Sequence[SlotHold]) -> dict[tuple[int, int], list[SlotHold]]:
    """The holds in order of time, by (part, slot)."""
    found: dict[tuple[int, int], list[SlotHold]] = {}
    for hold in sorted(holds, key=lambda one: (one.part, one.slot, one.start_ms)):
        found.setdefault((hold.part, hold.slot), []).append(hold)
    return found


Device = tuple[str, int]
"""(GPU uuid, index of the part)."""
Slot = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Demand:
    """A holder's time on `count` slots of a pool. on: devices that were labelled with the holder."""

    holder: Holder
    pool: str
    count: int
    start_ms: int
    end_ms: int
    on: frozenset[Device] = frozenset()


@dataclass(slots=True)
class PlacedHolds:
    """Holds that were assigned to slots of GPUs. unplaced_us: time for which the records name more slots than exist."""

    holds: list[SlotHold] = field(default_factory=list)
    unplaced_us: int = 0


def place(demands: Sequence[Demand], pools: Mapping[str, Sequence[Slot]], tolerance_ms: int) -> PlacedHolds:
    """The holds of one node. Those of one slot do not overlap, and none is longer than its demand.

    pools: the slots of each pool, those to be taken first in front.
    tolerance_ms: how much of a hold's end the start of the next holder may cut off."""
    taken: dict[Slot, list[SlotHold]] = {}
    labelled: dict[Device, list[Demand]] = {}
    for demand in demands:
        for device in demand.on:
            labelled.setdefault(device, []).append(demand)
    placed = PlacedHolds()
    for demand in sorted(demands, key=lambda one: (one.start_ms, one.holder.uid, one.holder.container, one.pool)):
        chosen = _choose(demand, pools.get(demand.pool, ()), taken, labelled, tolerance_ms)
        for slot in chosen:
            before = taken.setdefault(slot, [])
            if before and before[-1].end_ms > demand.start_ms:
                before[-1] = replace(before[-1], end_ms=demand.start_ms)
            before.append(SlotHold(*slot, demand.holder, demand.start_ms, demand.end_ms))
        placed.unplaced_us += (demand.count - len(chosen)) * (demand.end_ms - demand.start_ms) * US_PER_MS
    placed.holds = sorted(
        (hold for holds in taken.values() for hold in holds if hold.start_ms < hold.end_ms),
        key=lambda one: (one.gpu, one.part, one.slot, one.start_ms),
    )
    return placed


def _choose(
    demand: Demand,
    slots: Sequence[Slot],
    taken: Mapping[Slot, Sequence[SlotHold]],
    labelled: Mapping[Device, Collection[Demand]],
    tolerance_ms: int,
) -> list[Slot]:
    ranked: list[tuple[tuple[bool, bool, bool, int], Slot]] = []
    for position, slot in enumerate(slots):
        held = taken.get(slot)
        over = held[-1].end_ms - demand.start_ms if held else 0
        if held and over > 0 and (over > tolerance_ms or held[-1].start_ms >= demand.start_ms):
            continue
        device = slot[:2]
        others = any(_meet(one, demand) for one in labelled.get(device, ()) if one.holder != demand.holder)
        ranked.append(((device not in demand.on, others, over > 0, position), slot))
    return [slot for _, slot in sorted(ranked)[: demand.count]]


def _meet(one: Demand, other: Demand) -> bool:
    return one.start_ms < other.end_ms and other.start_ms < one.end_ms


@dataclass(frozen=True, slots=True)
class NodeHistory:
    """One node in one chunk.

    blind: by GPU, the time without records.
    unplaced_us: see PlacedHolds."""

    node: str
    gpus: tuple[GpuLayout, ...]
    holds: Mapping[str, Sequence[SlotHold]]
    facts: tuple[PodFacts, ...] = ()
    blind: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    unplaced_us: int = 0


_MILLION = 1_000_000
_UNREAD = "not recorded"


@dataclass(slots=True)
class ImportedTime:
    """GPU-microseconds of the rows: capacity, held time, held time with unknown use."""

    sent_us: int = 0
    held_us: int = 0
    unknown_us: int = 0


def rows(gpu: GpuLayout, holds: Sequence[SlotHold], span: Span, allowed: Iterable[Span]) -> list[UsageInterval]:
    """The rows of one GPU inside `span`, ascending; `seq` is 0. allowed: the time that may be imported."""
    slots = by_slot(holds)
    edges = {span[0], span[1], *range(span[0] - span[0] % BUCKET_MS + BUCKET_MS, span[1], BUCKET_MS)}
    permitted = union(allowed)
    known = union(gpu.known)
    lost = union(gpu.lost)
    edges |= {at for spans in (permitted, known, lost) for one in spans for at in one}
    edges |= {at for hold in holds for at in (hold.start_ms, hold.end_ms)}
    instants = sorted(at for at in edges if span[0] <= at <= span[1])
    made: list[UsageInterval] = []
    for start, end in pairwise(instants):
        if not _inside(start, end, permitted):
            continue
        holders = {key: _holder(ordered, start) for key, ordered in slots.items()}
        whole = all(
            holders.get((number, slot)) is not None
            for number, part in enumerate(gpu.parts)
            for slot in range(part.slots)
        )
        if (whole and gpu.weights[-1] == 0) or _inside(start, end, known):
            made += _set(gpu, holders, start, end, lost=_inside(start, end, lost))
    return made


def imported_time(found: Iterable[UsageInterval]) -> ImportedTime:
    tally = ImportedTime()
    for row in found:
        tally.sent_us += row.capacity_us
        if row.health == "ok":
            tally.held_us += row.allocated_us
            if row.busy_us is None:
                tally.unknown_us += row.allocated_us
            elif row.gaps:
                blind = sum(gap.end_ms - gap.start_ms for gap in row.gaps)
                tally.unknown_us += row.allocated_us * blind // (row.end_ms - row.start_ms)
    return tally


def _inside(start_ms: int, end_ms: int, spans: Sequence[Span]) -> bool:
    return any(low <= start_ms and end_ms <= high for low, high in spans)


def _holder(ordered: Sequence[SlotHold], at: int) -> Holder | None:
    """The holder of a slot at an instant; None if the slot is free. ordered: the slot's holds in order of time."""
    place = bisect_right(ordered, at, key=lambda hold: hold.start_ms) - 1
    return ordered[place].holder if place >= 0 and at < ordered[place].end_ms else None


def _set(
    gpu: GpuLayout, holders: dict[tuple[int, int], Holder | None], start: int, end: int, *, lost: bool
) -> list[UsageInterval]:
    """The rows of one GPU over one piece; they add up to the piece."""
    weights = gpu.weights
    shares = apportion((end - start) * US_PER_MS, weights)
    drafts: list[_Draft] = []
    for number, part in enumerate(gpu.parts):
        drafts += _of_part(part, shares[number], number, holders, start, end)
    if shares[-1]:
        drafts.append(_Draft(None, None, shares[-1]))
    energy = _energy(gpu.power, [draft.capacity_us for draft in drafts], start, end)
    return [
        UsageInterval(
            seq=0,
            start_ms=start,
            end_ms=end,
            gpu_uuid=gpu.uuid,
            gpu_model=gpu.model,
            slice=None if draft.part is None else draft.part.slice,
            holder=draft.holder,
            sharing=Sharing("time-slicing", draft.part.slots)
            if draft.part is not None and draft.part.slots > 1
            else None,
            health="lost" if lost else "ok",
            capacity_us=draft.capacity_us,
            allocated_us=draft.capacity_us if draft.holder is not None else 0,
            busy_us=draft.busy_us,
            memory_mib_s=draft.memory_mib_s,
            energy_uj=uj,
            method="imported",
            gaps=tuple(Gap(low, high, _UNREAD) for low, high in draft.gaps),
        )
        for draft, uj in zip(drafts, energy, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Draft:
    part: GpuPart | None
    holder: Holder | None
    capacity_us: int
    busy_us: int | None = None
    memory_mib_s: int | None = None
    gaps: tuple[Span, ...] = ()


def _of_part(
    part: GpuPart,
    share_us: int,
    number: int,
    holders: dict[tuple[int, int], Holder | None],
    start: int,
    end: int,
) -> Iterator[_Draft]:
    """One row per holder, one for the slots without a holder, and one for unattributed busy time."""
    held: dict[Holder | None, int] = {}
    for slot, us in enumerate(apportion(share_us, [1] * part.slots)):
        holder = holders.get((number, slot))
        held[holder] = held.get(holder, 0) + us
    who = [holder for holder in held if holder is not None]
    busy, gaps = _figure(part.busy, start, end)
    alone = len(who) == 1
    for holder in sorted(who, key=lambda one: (one.uid, one.container)):
        if alone and busy is not None:
            used = share_us * busy // (_MILLION * (end - start))
            mib_ms, unread = _figure(part.memory, start, end)
            memory = None if mib_ms is None or unread else mib_ms // MS_PER_SECOND
            yield _Draft(part, holder, held[holder], used, memory, tuple(gaps))
        else:
            yield _Draft(part, holder, held[holder])
    if len(who) > 1 and busy:
        yield _Draft(part, UNATTRIBUTED, 0, share_us * busy // (_MILLION * (end - start)))
    if held.get(None):
        yield _Draft(part, None, held[None])


def _figure(track: FigureSeries | None, start: int, end: int) -> tuple[int | None, list[Span]]:
    """The integral and the gaps; the integral is None if nothing is known."""
    if track is None:
        return None, []
    total, gaps = track.over(start, end)
    return (None, []) if intersect(gaps, [(start, end)]) == [(start, end)] else (total, gaps)


def _energy(power: FigureSeries | None, capacities: Sequence[int], start: int, end: int) -> list[int | None]:
    """Energy in microjoules (milliwatts times milliseconds), divided by capacity."""
    total, gaps = _figure(power, start, end)
    if total is None or gaps:
        return [None] * len(capacities)
    return list(apportion(total, capacities))
