"""Answers to `window`: usage per queue, the capacity it is a share of, and how far to trust both.

Usage comes from the stretches of the window (`accountant.store.stretches`), capacity from the lives of
the GPUs. What decays and how is `accountant.windows`; nothing is rounded here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from zoneinfo import ZoneInfo

from accountant.accounts import full_us
from accountant.errors import UnsupportedQuestion
from accountant.store.assignment import NOBODY_RULES, Assignment, in_force
from accountant.store.booking import Booked
from accountant.store.database import Cursor
from accountant.store.figures import Figures, Found, plus
from accountant.store.fleet import Fleet
from accountant.store.inservice import down_in, in_service
from accountant.store.spans import quarters
from accountant.store.state import State
from accountant.store.stretches import Stretch, StretchCache
from accountant.windows import age_weights, bounds, combine, factor, term
from accountant.wire import UNASSIGNED, Measure, UsageWindow, WindowSpec
from agent.units import BUCKET_MS

_UNITS: dict[Measure, str] = {"allocated": "gpu_us", "busy": "gpu_us", "energy": "uj"}
_FIGURES: dict[Measure, int] = {of: Figures._fields.index(of) for of in _UNITS}


@dataclass(frozen=True, slots=True)
class _Capacity:
    """Time of GPUs in service without what their nodes were down. available: by stretch, decayed. working:
    plain, in all. down_unheld: of the plain down time, rows that nobody held."""

    available: Sequence[int]
    working: int
    down_unheld: int


class WindowCache:
    """What is remembered between windows. Thread-safe. month_zone: of calendar windows."""

    def __init__(self, month_zone: ZoneInfo) -> None:
        self._zone = month_zone
        self._stretches = StretchCache()

    def take(self, booked: Booked, version: int) -> None:
        """The commit that makes `version` changed what `booked` says."""
        self._stretches.take(booked, version)

    def forget_all(self, version: int) -> None:
        self._stretches.forget_all(version)

    def bounds(self, spec: WindowSpec, at_ms: int) -> tuple[int, int]:
        """The window's [start_ms, end_ms)."""
        return bounds(spec, at_ms, self._zone)

    def window(
        self, cursor: Cursor | None, state: State, spec: WindowSpec, at_ms: int, of: Measure, min_coverage: float
    ) -> UsageWindow | None:
        """See accountant.ledger.Ledger.window. usage: own plus descendants, by queue name. The capacity of
        measure `energy` is all energy recorded. cursor None: answer from memory alone, or None where that
        does not do. Raises UnsupportedQuestion."""
        if of not in _UNITS:
            raise UnsupportedQuestion(
                "a window measured in cost is not available yet; ask for allocated, busy or energy"
            )
        start, end = self.bounds(spec, at_ms)
        stretches, policies = _stretches(state, start, end)
        found = self._stretches.read(cursor, state, stretches, spec.half_life)
        if found is None:
            return None
        capacity = self._capacity(cursor, state, stretches, found, spec.half_life)
        if capacity is None:
            return None
        ages = age_weights([stretch.reference_ms(spec.half_life) for stretch in stretches], at_ms, spec.half_life)
        usage, unassigned = _usage(policies, found, ages, of)
        in_force_now = policies[-1].version if policies else None
        available = [f.all.energy for f in found] if of == "energy" else capacity.available
        return UsageWindow(
            kind=spec.kind,
            start_ms=start,
            end_ms=end,
            half_life_s=spec.half_life,
            measure=of,
            unit=_UNITS[of],
            by="queue",
            usage=usage,
            unassigned=unassigned,
            capacity=combine(enumerate(available), ages),
            watermark_ms=watermark(state.fleet, end, min_coverage),
            coverage=_coverage(plus(f.all for f in found), capacity, of),
            policy_version=in_force_now.version if in_force_now is not None else None,
        )

    def _capacity(
        self,
        cursor: Cursor | None,
        state: State,
        stretches: Sequence[Stretch],
        found: Sequence[Found],
        half_life_s: int | None,
    ) -> _Capacity | None:
        spans = down_in(state.fleet, stretches)
        rows_down = self._stretches.down(cursor, state.version, spans, stretches, half_life_s)
        if rows_down is None:
            return None
        down_us: dict[int, int] = defaultdict(int)
        working = 0
        for span in spans:
            weight = factor(span.start_ms, span.end_ms, stretches[span.tag].reference_ms(half_life_s), half_life_s)
            down_us[span.tag] += term(full_us(span.end_ms - span.start_ms), weight)
            working -= full_us(span.end_ms - span.start_ms)
        for rows in rows_down.values():
            # What was held or lost in a node's down time is counted there, not twice.
            working += rows.plain_allocated + rows.plain_lost
        whole_us = full_us(BUCKET_MS)
        whole_term = term(whole_us, factor(0, BUCKET_MS, BUCKET_MS, half_life_s))
        available = []
        for tag, (stretch, here) in enumerate(zip(stretches, in_service(state.fleet, stretches), strict=True)):
            reference = stretch.reference_ms(half_life_s)
            life, plain = here.whole * whole_term, here.whole * whole_us
            whole = stretch.whole
            if whole and not here.parts and tag not in down_us:  # hardly any other, of hundreds
                working += plain
                available.append(max(0, life - found[tag].all.lost))
                continue
            if not whole:
                plain = here.whole * full_us(stretch.end_ms - stretch.start_ms)
                weight = factor(*stretch, reference, half_life_s)
                life = here.whole * term(full_us(stretch.end_ms - stretch.start_ms), weight)
            for (start, end), count in here.parts.items():
                part_us = full_us(end - start)
                life += term(part_us, factor(start, end, reference, half_life_s)) * count
                plain += part_us * count
            if tag in down_us:
                rows = rows_down.get(tag, Figures())
                life -= down_us[tag] - rows.allocated - rows.lost
            working += plain
            available.append(max(0, life - found[tag].all.lost))
        return _Capacity(available, working, sum(rows.plain_unheld for rows in rows_down.values()))


def _stretches(state: State, start_ms: int, end_ms: int) -> tuple[list[Stretch], list[Assignment]]:
    """The window cut at quarter-hours and where the mapping of queues changes; per stretch its policy."""
    stretches: list[Stretch] = []
    policies: list[Assignment] = []
    for begin, end, rules in in_force(state.policies, start_ms, end_ms):
        found = [Stretch(*span) for span in quarters(begin, end)]
        stretches += found
        policies += [rules] * len(found)
    return stretches, policies


def _usage(
    policies: Sequence[Assignment], found: Sequence[Found], ages: Sequence[float] | None, of: Measure
) -> tuple[dict[str, int], int]:
    """Usage per queue, own plus descendants, and what belongs to none."""
    figure = _FIGURES[of]
    terms: dict[str, dict[int, int]] = defaultdict(dict)
    for rules, numbered in groupby(enumerate(found), lambda pair: policies[pair[0]]):
        of_ref: dict[str, dict[int, int]] = defaultdict(dict)
        for number, held in numbered:
            for ref, figures in held.by_ref.items():
                of_ref[ref][number] = figures[figure]
        for ref, values in of_ref.items():
            own = terms[rules.queue(ref)]
            if not own:
                terms[rules.queue(ref)] = values
                continue
            for number, value in values.items():
                own[number] = own.get(number, 0) + value
    leaves = {queue: combine(sorted(own.items()), ages) for queue, own in terms.items()}
    unassigned = leaves.pop(UNASSIGNED, 0)
    current = policies[-1] if policies else NOBODY_RULES
    usage = dict.fromkeys(current.queues, 0)
    for queue, value in leaves.items():
        # A queue that the policy no longer has keeps its usage under its own name.
        for name in current.lineage(queue) or [queue]:
            usage[name] = usage.get(name, 0) + value
    return dict(sorted(usage.items())), unassigned


def _coverage(rows: Figures, capacity: _Capacity, of: Measure) -> float:
    """Metered share of the capacity, undecayed; what the measure cannot see is not covered."""
    working = capacity.working - rows.plain_lost
    if working <= 0:
        return 1.0
    metered = rows.plain_allocated + rows.plain_unheld - capacity.down_unheld
    if of == "busy":
        metered -= rows.plain_unknown
    elif of == "energy":
        metered -= rows.plain_blind
    return max(0, metered) / working


def watermark(fleet: Fleet, end_ms: int, min_coverage: float) -> int | None:
    """The latest instant, at most end_ms, up to which the records of at least `min_coverage` of the GPUs
    in service at end_ms reach; None where nothing is in service.

    Holes further back do not move it (they lower `coverage`): it says how old the news are."""
    reached = []
    for gpu in fleet.tenures:
        life = fleet.life(gpu)
        if life.start_ms < end_ms <= life.end_ms and not any(s < end_ms <= e for s, e in life.down):
            reached.append(min(life.last_ms, end_ms))
    if not reached:
        return None
    reached.sort()
    needed = math.ceil(min_coverage * len(reached))
    return reached[min(len(reached) - needed, len(reached) - 1)]
