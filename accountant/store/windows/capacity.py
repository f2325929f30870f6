"""What the GPUs in service could have given inside the stretches of a window, and how much of it is known.

Down time is no capacity, whether a node's or a lost GPU's, and counts once where both are. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accountant.accounts import full_us
from accountant.overlap import Span
from accountant.store.spans import TaggedSpan
from accountant.store.windows.figures import Figures
from accountant.store.windows.inservice import in_service
from accountant.store.windows.measuring import Stretch
from accountant.windows import factor, term
from accountant.wire import Measure
from agent.units import BUCKET_MS


@dataclass(frozen=True, slots=True)
class Capacity:
    """Time of GPUs in service without what their nodes were down. available: by stretch, decayed; terms are
    rounded, so where everything is lost it may be a unit below 0. working: plain, in all. down_unheld: of the plain
    down time, rows that nobody held."""

    available: Sequence[int]
    working: int
    down_unheld: int


def capacity(
    lives: Mapping[Span, int],
    down: Sequence[TaggedSpan],
    rows_down: Mapping[int, Figures],
    lost: Sequence[int],
    stretches: Sequence[Stretch],
    half_life_s: int | None,
) -> Capacity:
    """Of GPUs with these lives. down: when nodes of theirs were, tagged with the stretch; rows_down: what rows hold
    inside that, by stretch. lost: time of lost GPUs in the rows, by stretch."""
    down_us: dict[int, int] = defaultdict(int)
    working = 0
    for span in down:
        weight = factor(span.start_ms, span.end_ms, stretches[span.tag].reference_ms(half_life_s), half_life_s)
        down_us[span.tag] += term(full_us(span.end_ms - span.start_ms), weight)
        working -= full_us(span.end_ms - span.start_ms)
    for rows in rows_down.values():
        # What was held or lost in a node's down time is counted there, not twice.
        working += rows.plain_allocated + rows.plain_lost
    here = in_service(lives, stretches)
    whole_us = full_us(BUCKET_MS)
    whole_term = term(whole_us, factor(0, BUCKET_MS, BUCKET_MS, half_life_s))
    available = [count * whole_term - gone for count, gone in zip(here.whole, lost, strict=True)]
    working += sum(here.whole) * whole_us
    cut = {tag for tag, (start, end) in enumerate(stretches) if end - start != BUCKET_MS}
    for tag in sorted(cut | here.parts.keys() | down_us.keys()):  # hardly any, of hundreds
        stretch = stretches[tag]
        reference = stretch.reference_ms(half_life_s)
        if tag in cut:
            mine_us = full_us(stretch.end_ms - stretch.start_ms)
            mine_term = term(mine_us, factor(*stretch, reference, half_life_s))
            available[tag] += here.whole[tag] * (mine_term - whole_term)
            working += here.whole[tag] * (mine_us - whole_us)
        for (start, end), count in here.parts.get(tag, {}).items():
            part_us = full_us(end - start)
            available[tag] += term(part_us, factor(start, end, reference, half_life_s)) * count
            working += part_us * count
        if tag in down_us:
            rows = rows_down.get(tag, Figures())
            available[tag] -= down_us[tag] - rows.allocated - rows.lost
    return Capacity(available, working, sum(rows.plain_unheld for rows in rows_down.values()))


def metered(rows: Figures, of_capacity: Capacity, of: Measure) -> int:
    """Plain microseconds that the measure can see; what it cannot see is not covered."""
    known = rows.plain_allocated + rows.plain_unheld - of_capacity.down_unheld
    return known - (rows.plain_unknown if of == "busy" else rows.plain_blind if of == "energy" else 0)


def coverage(metered_us: int, working_us: int) -> float:
    """Metered share of the capacity, undecayed; 1 where there is none."""
    return max(0, metered_us) / working_us if working_us > 0 else 1.0
