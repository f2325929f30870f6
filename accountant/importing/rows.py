"""Holds and figures, cut into rows of the ledger. Pure.

Every GPU is cut at quarter-hours, at each change of its holds, and where what is known of it begins or ends. For each
piece the rows add up to the piece exactly: parts and slots by largest remainder, what nobody holds in rows of its own
(law of conservation). A piece in which it is not known who holds a slot has no rows: it stays unmetered.

Busy time of a part goes to its only holder. Where several share it, nobody can say whose it was: theirs is unknown, and
the part's busy time stands in a row of its own that holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from accountant.importing.cells import Track
from accountant.importing.layout import GpuLayout, Hold, Part, by_slot
from accountant.overlap import Span, intersect, union
from agent.units import BUCKET_MS, MS_PER_SECOND, US_PER_MS, apportion
from agent.wire import UNATTRIBUTED, Gap, Holder, Sharing, UsageInterval

_MILLION = 1_000_000
_UNREAD = "not recorded"


@dataclass(slots=True)
class Tally:
    """GPU-microseconds of the rows made: capacity, of it held, of it held with unknown use."""

    sent_us: int = 0
    held_us: int = 0
    unknown_us: int = 0


def rows(gpu: GpuLayout, holds: Sequence[Hold], span: Span, allowed: Iterable[Span]) -> list[UsageInterval]:
    """Of one GPU inside `span`, ascending; `seq` is 0. allowed: the time that may be imported at all."""
    slots = by_slot(holds)
    edges = {span[0], span[1], *range(span[0] - span[0] % BUCKET_MS + BUCKET_MS, span[1], BUCKET_MS)}
    permitted = union(allowed)
    known = union(gpu.known)
    lost = union(gpu.lost)
    edges |= {at for spans in (permitted, known, lost) for one in spans for at in one}
    edges |= {at for hold in holds for at in (hold.start_ms, hold.end_ms)}
    instants = sorted(at for at in edges if span[0] <= at <= span[1])
    cursor = dict.fromkeys(slots, 0)
    made: list[UsageInterval] = []
    for start, end in pairwise(instants):
        if not _inside(start, end, permitted):
            continue
        holders = {key: _holder(slots[key], cursor, key, start) for key in slots}
        whole = all(
            holders.get((part, slot)) is not None for part in range(len(gpu.parts)) for slot in range(_slots(gpu, part))
        )
        if (whole and gpu.weights[-1] == 0) or _inside(start, end, known):
            made += _set(gpu, holders, start, end, lost=_inside(start, end, lost))
    return made


def tallied(found: Iterable[UsageInterval]) -> Tally:
    tally = Tally()
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


def _slots(gpu: GpuLayout, part: int) -> int:
    return gpu.parts[part].slots


def _inside(start_ms: int, end_ms: int, spans: Sequence[Span]) -> bool:
    return any(low <= start_ms and end_ms <= high for low, high in spans)


def _holder(
    ordered: Sequence[Hold], cursor: dict[tuple[int, int], int], key: tuple[int, int], at: int
) -> Holder | None:
    """Who holds a slot at an instant; instants ascend."""
    place = cursor[key]
    while place < len(ordered) and ordered[place].end_ms <= at:
        place += 1
    cursor[key] = place
    return ordered[place].holder if place < len(ordered) and ordered[place].start_ms <= at else None


def _set(
    gpu: GpuLayout, holders: dict[tuple[int, int], Holder | None], start: int, end: int, *, lost: bool
) -> list[UsageInterval]:
    """The rows of one GPU over one piece; all of them together are the piece."""
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
    part: Part | None
    holder: Holder | None
    capacity_us: int
    busy_us: int | None = None
    memory_mib_s: int | None = None
    gaps: tuple[Span, ...] = ()


def _of_part(
    part: Part,
    share_us: int,
    number: int,
    holders: dict[tuple[int, int], Holder | None],
    start: int,
    end: int,
) -> Iterator[_Draft]:
    """One row per holder, one for the slots that nobody holds, and the busy time that is nobody's."""
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


def _figure(track: Track | None, start: int, end: int) -> tuple[int | None, list[Span]]:
    """(integral, gaps); None where nothing at all is known."""
    if track is None:
        return None, []
    total, gaps = track.over(start, end)
    return (None, []) if intersect(gaps, [(start, end)]) == [(start, end)] else (total, gaps)


def _energy(power: Track | None, capacities: Sequence[int], start: int, end: int) -> list[int | None]:
    """Milliwatts times milliseconds are microjoules; divided by capacity."""
    total, gaps = _figure(power, start, end)
    if total is None or gaps:
        return [None] * len(capacities)
    return list(apportion(total, capacities))
