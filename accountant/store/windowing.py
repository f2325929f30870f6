"""Answers to `window`: usage per queue, the capacity it is a share of, and how far to trust both.

Usage comes from the stretches of the window (`accountant.store.stretches`), capacity from the lives of
the GPUs. What decays and how is `accountant.windows`; nothing is rounded here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from zoneinfo import ZoneInfo

from accountant.accounts import full_us
from accountant.errors import UnsupportedQuestion
from accountant.store.assignment import NOBODY_RULES, Assignment, in_force
from accountant.store.booking import Booked
from accountant.store.database import Cursor
from accountant.store.fleet import Fleet
from accountant.store.inservice import down_in, lives_in
from accountant.store.spans import quarters
from accountant.store.state import State
from accountant.store.stretches import Figures, Found, Stretch, StretchCache, plus
from accountant.windows import bounds, factor, term, total
from accountant.wire import UNASSIGNED, Measure, UsageWindow, WindowSpec
from agent.units import BUCKET_MS

_UNITS: dict[Measure, str] = {"allocated": "gpu_us", "busy": "gpu_us", "energy": "uj"}
_FIGURES: dict[Measure, int] = {of: Figures._fields.index(of) for of in _UNITS}


@dataclass(frozen=True, slots=True)
class _Capacity:
    """Per stretch: time of GPUs in service (decayed and plain), of which node-down, and unheld rows in it."""

    life: int
    down: int
    plain_life: int
    plain_down: int
    plain_down_unheld: int


class WindowCache:
    """What is remembered between windows. Thread-safe. month_zone: of calendar windows."""

    def __init__(self, month_zone: ZoneInfo) -> None:
        self._zone = month_zone
        self._stretches = StretchCache()

    def forget(self, booked: Booked, version: int) -> None:
        """The commit that makes `version` changed what `booked` says."""
        self._stretches.forget(booked.touched, booked.pods, version)

    def forget_all(self, version: int) -> None:
        self._stretches.forget_all(version)

    def window(
        self, cursor: Cursor, state: State, spec: WindowSpec, at_ms: int, of: Measure, min_coverage: float
    ) -> UsageWindow:
        """See accountant.ledger.Ledger.window. usage: own plus descendants, by queue name. The capacity of
        measure `energy` is all energy recorded. Raises UnsupportedQuestion."""
        if of not in _UNITS:
            raise UnsupportedQuestion(
                "a window measured in cost is not available yet; ask for allocated, busy or energy"
            )
        start, end = bounds(spec, at_ms, self._zone)
        stretches, policies = _stretches(state, start, end)
        found = self._stretches.read(cursor, state.version, stretches, spec.half_life)
        capacity = self._capacity(cursor, state, stretches, spec.half_life)
        usage, unassigned = _usage(stretches, policies, found, spec, at_ms, of)
        in_force_now = policies[-1].version if policies else None
        if of == "energy":
            available = [(s.end_ms, f.all.energy) for s, f in zip(stretches, found, strict=True)]
        else:
            available = [
                (s.end_ms, max(0, c.life - c.down - f.all.lost))
                for s, c, f in zip(stretches, capacity, found, strict=True)
            ]
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
            capacity=total(available, at_ms, spec.half_life),
            watermark_ms=watermark(state.fleet, end, min_coverage),
            coverage=_coverage(plus(f.all for f in found), capacity, of),
            policy_version=in_force_now.version if in_force_now is not None else None,
        )

    def _capacity(
        self, cursor: Cursor, state: State, stretches: Sequence[Stretch], half_life_s: int | None
    ) -> list[_Capacity]:
        pieces = [(stretch.start_ms, stretch.end_ms) for stretch in stretches]
        lives, spans = lives_in(state.fleet, pieces), down_in(state.fleet, pieces)
        whole_quarter = factor(0, BUCKET_MS, BUCKET_MS, half_life_s)
        down = self._stretches.down(cursor, state.version, spans, stretches, half_life_s)
        down_us: dict[int, int] = defaultdict(int)
        plain_down_us: dict[int, int] = defaultdict(int)
        for span in spans:
            weight = factor(span.start_ms, span.end_ms, stretches[span.tag].end_ms, half_life_s)
            down_us[span.tag] += term(full_us(span.end_ms - span.start_ms), weight)
            plain_down_us[span.tag] += full_us(span.end_ms - span.start_ms)
        found = []
        for tag, stretch in enumerate(stretches):
            life = plain = 0
            for (start, end), count in lives[tag].items():
                whole = full_us(end - start)
                plain += whole * count
                weight = whole_quarter if end - start == BUCKET_MS else factor(start, end, stretch.end_ms, half_life_s)
                life += term(whole, weight) * count
            # What was held or lost in a node's down time is counted there, not twice.
            rows = down.get(tag, Figures())
            found.append(
                _Capacity(
                    life=life,
                    down=down_us[tag] - rows.allocated - rows.lost,
                    plain_life=plain,
                    plain_down=plain_down_us[tag] - rows.plain_allocated - rows.plain_lost,
                    plain_down_unheld=rows.plain_unheld,
                )
            )
        return found


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
    stretches: Sequence[Stretch],
    policies: Sequence[Assignment],
    found: Sequence[Found],
    spec: WindowSpec,
    at_ms: int,
    of: Measure,
) -> tuple[dict[str, int], int]:
    """Usage per queue, own plus descendants, and what belongs to none."""
    figure = _FIGURES[of]
    terms: dict[str, dict[int, int]] = defaultdict(dict)
    for stretch, rules, held in zip(stretches, policies, found, strict=True):
        for ref, figures in held.by_ref.items():
            own = terms[rules.queue(ref)]
            own[stretch.end_ms] = own.get(stretch.end_ms, 0) + figures[figure]
    leaves = {queue: total(sorted(own.items()), at_ms, spec.half_life) for queue, own in terms.items()}
    unassigned = leaves.pop(UNASSIGNED, 0)
    current = policies[-1] if policies else NOBODY_RULES
    usage = dict.fromkeys(current.queues, 0)
    for queue, value in leaves.items():
        # A queue that the policy no longer has keeps its usage under its own name.
        for name in current.lineage(queue) or [queue]:
            usage[name] = usage.get(name, 0) + value
    return dict(sorted(usage.items())), unassigned


def _coverage(rows: Figures, capacity: Sequence[_Capacity], of: Measure) -> float:
    """Metered share of the capacity, undecayed; what the measure cannot see is not covered."""
    working = sum(c.plain_life - c.plain_down for c in capacity) - rows.plain_lost
    if working <= 0:
        return 1.0
    metered = rows.plain_allocated + rows.plain_unheld - sum(c.plain_down_unheld for c in capacity)
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
