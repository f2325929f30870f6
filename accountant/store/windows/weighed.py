"""Usage and capacity place by place, each multiplied by what its time counts: price, weight of a model, or one.

Whole microseconds are added up over places of equal weight and multiplied once, at the end, as fractions: what is
rounded is a weight's sum, never a place's. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import groupby

from accountant.store.windows.capacity import Capacity, metered
from accountant.store.windows.figures import NOTHING, Figures, Found, plus
from accountant.store.writing.assignment import Assignment
from accountant.windows import combine
from accountant.wire import Measure

FIGURE: dict[Measure, int] = {
    "allocated": Figures._fields.index("allocated"),
    "busy": Figures._fields.index("busy"),
    "energy": Figures._fields.index("energy"),
    "cost": Figures._fields.index("allocated"),
}
"""What a measure adds up, as its place in `Figures`; a cost is that of allocated time, or hoarding would be free."""


class Weighed:
    """Sums of whole microseconds over places of equal weight, by stretch; multiplied at the end, exactly."""

    def __init__(self, stretches: int) -> None:
        self._found: dict[Fraction, list[Found]] = defaultdict(lambda: [NOTHING] * stretches)
        self._available: dict[Fraction, list[int]] = defaultdict(lambda: [0] * stretches)
        self.working = 0
        self.metered = 0

    def add(self, first: int, weight: Fraction | None, found: Sequence[Found], of_gpus: Capacity, of: Measure) -> None:
        """A place, from the stretch with number `first` on. weight None: time that nobody can weigh is neither usage
        nor capacity, and not covered."""
        rows = plus(f.all for f in found)
        self.working += of_gpus.working - rows.plain_lost
        if weight is None:
            return
        self.metered += metered(rows, of_gpus, of)
        here, available = self._found[weight], self._available[weight]
        for number, (held, more) in enumerate(zip(found, _available(found, of_gpus, of), strict=True), first):
            here[number] = held if here[number] is NOTHING else here[number].plus(held)
            available[number] += more

    def leaves(self, policies: Sequence[Assignment], ages: Sequence[float] | None, of: Measure) -> dict[str, int]:
        """Usage of each queue itself, in the window's unit."""
        sums: dict[str, Fraction] = defaultdict(Fraction)
        for weight, found in self._found.items():
            for queue, value in _leaves(policies, found, ages, of).items():
                sums[queue] += weight * value
        return {queue: round(value) for queue, value in sums.items()}

    def capacity(self, ages: Sequence[float] | None) -> int:
        parts = (weight * combine(not_below_zero(values), ages) for weight, values in self._available.items())
        return round(sum(parts, Fraction(0)))


def _available(found: Sequence[Found], of_gpus: Capacity, of: Measure) -> Iterable[int]:
    return [f.all.energy for f in found] if of == "energy" else of_gpus.available


def not_below_zero(values: Iterable[int]) -> Iterable[tuple[int, int]]:
    """By stretch, after everything that weighs alike was added up: a unit of rounding is no negative capacity."""
    return enumerate(max(0, value) for value in values)


def _leaves(
    policies: Sequence[Assignment], found: Sequence[Found], ages: Sequence[float] | None, of: Measure
) -> dict[str, int]:
    """Usage of each queue itself, what belongs to none as UNASSIGNED."""
    figure = FIGURE[of]
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
    if ages is None:
        return {queue: sum(own.values()) for queue, own in terms.items()}
    return {queue: combine(sorted(own.items()), ages) for queue, own in terms.items()}
