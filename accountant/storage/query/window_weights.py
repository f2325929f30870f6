"""Weights a window's usage by price, GPU model or shard.

A lens looks at places: kinds of GPU in one surrounding. It leaves a place out, gives its time an exact weight, or
says that it has none (time without a price). A window adds up whole microseconds per place and multiplies once, by
exact fractions, so no order of arrival and no cut of time changes a digit.

A cost is that of the price book's rows as they stood at the time, per whole GPU-hour: what a statement bills before
commitments and billing policy, which depend on who came first and not on what was used. Pure.

Where a device stood, and what its node was then, is constant inside a piece of a window. What whole quarter-hours
hold by place is remembered until a commit touches them, or a node turns out to have been something else.

Whole microseconds are added up over places of equal weight and multiplied once, at the end, as fractions: what is
rounded is a weight's sum, never a place's. Pure.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import groupby
from typing import Final, NamedTuple

from accountant.billing.billing_rules import memory_to_compute
from accountant.core.window_decay import combine
from accountant.ledger.team_assignment import Assignment
from accountant.prices.gpu_model_names import GpuModel, parse_gpu_model
from accountant.prices.price_book import PriceBook
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.gpu_lifetimes import Fleet, NodeKey, changes_between
from accountant.storage.ledger_state import State
from accountant.storage.query.window_buckets import (
    Capacity,
    Stretch,
    assigned,
    by_kind,
    folded,
    hour_of,
    metered,
    origins_of,
)
from accountant.storage.query.window_figures import NOTHING, Figures, Found, plus
from accountant.storage.span_plan import TaggedSpan
from accountant.storage.write.interval_writer import Booked
from accountant.storage.write.name_ids import PodKey
from accountant.wire.policy_models import Measure
from gputally.base.units import US_PER_HOUR

COST_UNIT_PLACES: Final = 9
"""A cost is told in units of 10^-9 of its currency."""
_COST_UNITS_PER_US: Final = Fraction(10**COST_UNIT_PLACES, US_PER_HOUR)


class Place(NamedTuple):
    """A kind of GPU in one surrounding. profile: of a MIG instance where it matters, else ""."""

    gpu_model: str
    profile: str
    pool: str
    region: str
    capacity_type: str
    shard: str
    cluster: str


@dataclass(frozen=True)
class Lens:
    """book: count time at its prices. gpu_weights: by model, the most precise name first; others weigh 1. shard: look
    at the nodes of this scheduling shard alone ("": at those of none). cluster: at those of this cluster alone."""

    book: PriceBook | None = None
    gpu_weights: tuple[tuple[GpuModel, Fraction], ...] = ()
    shard: str | None = None
    cluster: str | None = None

    @classmethod
    def of(
        cls,
        *,
        book: PriceBook | None = None,
        gpu_weights: Mapping[str, Decimal] | None = None,
        shard: str | None = None,
        cluster: str | None = None,
    ) -> Lens:
        """gpu_weights: by the name of a model, as a price book writes it."""
        named = [(parse_gpu_model(name), Fraction(weight)) for name, weight in (gpu_weights or {}).items()]
        named.sort(key=lambda pair: (-_precision(pair[0]), str(pair[0])))
        return cls(book, tuple(named), shard, cluster)

    @property
    def trivial(self) -> bool:
        """It weighs everything alike, and looks at everything, be it of one cluster."""
        return self.book is None and not self.gpu_weights and self.shard is None

    @property
    def tells_profiles(self) -> bool:
        """Whether the MIG profile of an instance changes what its time counts."""
        return self.book is not None and self.book.mig_basis == "memory"

    def sees(self, place: Place) -> bool:
        return self.shard in (None, place.shard) and self.cluster in (None, place.cluster)

    def cuts(self, start_ms: int, end_ms: int) -> tuple[int, ...]:
        """Instants strictly inside the span at which weights change."""
        return self.book.cuts(start_ms, end_ms) if self.book is not None else ()

    def weight(self, place: Place, at_ms: int) -> Fraction | None:
        """What a GPU-microsecond there counts at that instant, in the window's unit; None: nobody can say."""
        if self.book is not None:
            row = self.book.unit_price(place.gpu_model, at_ms, place.pool, place.region, place.capacity_type)
            share = memory_to_compute(place.profile, place.gpu_model)
            return None if row is None or share is None else Fraction(row.price) * share * _COST_UNITS_PER_US
        model = parse_gpu_model(place.gpu_model)
        return next((weight for named, weight in self.gpu_weights if named.covers(model)), Fraction(1))


EVERYTHING: Final = Lens()


def _precision(model: GpuModel) -> int:
    return (model.memory_gb is not None) + (model.form is not None)


MOST_FIGURES = 400_000
"""Remembered at once, over all quarter-hours, places and queues; the older half goes first."""
Labels = Mapping[NodeKey, tuple[object, ...]]
Key = tuple[int | None, bool]
"""Half-life, and whether MIG profiles are told apart."""


class Placement:
    """Where everything was while nothing moved. classes: by device; places: by class; gpus: by GPU."""

    def __init__(self, devices: Sequence[tuple[int, int, str, str, str]], fleet: Fleet, at_ms: int) -> None:
        numbers: dict[Place, int] = {}
        surroundings: dict[NodeKey, tuple[str, str, str, str]] = {}

        def number(model: str, profile: str, cluster: str, node: str) -> int:
            around = surroundings.get((cluster, node))
            if around is None:
                facts = fleet.node_at((cluster, node), at_ms)
                around = ("", "", "", "")
                if facts is not None:
                    around = facts.pool, facts.region, facts.capacity_type, facts.shard
                surroundings[cluster, node] = around
            return numbers.setdefault(Place(model, profile, *around, cluster), len(numbers))

        self.classes = {
            device: number(model, profile, fleet.gpus[gpu].cluster, node)
            for device, gpu, node, model, profile in devices
        }
        of_gpus = {
            gpu: number(fleet.gpus[gpu].model, "", fleet.gpus[gpu].cluster, fleet.life(gpu).node_at(at_ms))
            for gpu in fleet.tenures
        }
        self.places = list(numbers)
        self.gpus = {gpu: self.places[of] for gpu, of in of_gpus.items()}


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a quarter-hour held by place, as of the commit `version`."""

    version: int
    found: Mapping[Place, Found]

    @property
    def figures(self) -> int:
        return sum(1 + len(found.by_ref) for found in self.found.values())


def moves(fleet: Fleet, start_ms: int, end_ms: int) -> list[int]:
    """Instants strictly inside the span at which a GPU changed its node, or a node what it was."""
    lives = (fleet.life(gpu) for gpu in fleet.tenures)
    moved = {since for life in lives if len(life.nodes) > 1 for since, _ in life.nodes if start_ms < since < end_ms}
    return sorted(moved | set(changes_between(fleet.placed.values(), start_ms, end_ms)))


def shard_of(fleet: Fleet, shard: str, end_ms: int, cluster: str | None = None) -> list[int]:
    """The GPUs that stand on nodes of a scheduling shard just before an instant. cluster: those of it alone."""
    found = []
    for gpu in fleet.tenures:
        of = fleet.gpus[gpu].cluster
        facts = fleet.node_at((of, fleet.life(gpu).node_at(end_ms - 1)), end_ms - 1)
        if (facts.shard if facts is not None else "") == shard and cluster in (None, of):
            found.append(gpu)
    return found


class PlaceCache:
    """Whole quarter-hours by place. Thread-safe. A reader uses and adds only what holds for its own snapshot."""

    def __init__(self, most_figures: int = MOST_FIGURES) -> None:
        self._most_figures = most_figures
        self._lock = threading.Lock()
        self._known: dict[Key, dict[int, _Kept]] = defaultdict(dict)
        self._refs: dict[PodKey, str] = {}
        self._touched: dict[int, int] = {}
        self._cleared = 0
        self._told = 0
        self._labels: Labels = {}

    def take(self, booked: Booked, version: int) -> None:
        """The commit that makes `version` brought this."""
        with self._lock:
            for cluster, fact in booked.pods:
                # A reader of an older snapshot must not remember what the fact may have changed.
                self._told = version
                if self._refs.get((cluster, fact.uid), fact.queue_ref) != fact.queue_ref:
                    self._clear(version)
            for bucket in booked.touched:
                self._touched[bucket] = version

    def forget_all(self, version: int) -> None:
        with self._lock:
            self._clear(version)

    def _clear(self, version: int) -> None:
        self._cleared = version
        self._known.clear()
        self._refs.clear()

    def read(
        self, cursor: Cursor, state: State, pieces: Sequence[tuple[Placement, Sequence[Stretch]]], key: Key
    ) -> list[list[Mapping[Place, Found]]]:
        """What each stretch of each piece holds by place, in the snapshot behind `cursor`, which is that of `state`."""
        with self._lock:
            labels = self._follow(state)
            known = {at: kept.found for at, kept in self._known[key].items() if self._holds(at, kept.version, state)}
        answer: list[list[Mapping[Place, Found]]] = []
        fresh: dict[int, Mapping[Place, Found]] = {}
        refs: dict[PodKey, str] = {}
        for placement, stretches in pieces:
            missing = [tag for tag, s in enumerate(stretches) if not (s.whole and s.start_ms in known)]
            filled, named = _fill(cursor, state, placement, missing, stretches, key[0]) if missing else ({}, {})
            refs |= named
            fresh |= {stretches[tag].start_ms: found for tag, found in filled.items() if stretches[tag].whole}
            answer.append([filled[tag] if tag in filled else known[s.start_ms] for tag, s in enumerate(stretches)])
        self._remember(state, labels, fresh, refs, key)
        return answer

    def _follow(self, state: State) -> Labels:
        """Forget everything where a node turns out to be, or to have been, something else."""
        fleet = state.fleet
        labels: Labels = {
            at: (node.pool, node.region, node.capacity_type, node.shard, fleet.placed.get(at))
            for at, node in fleet.nodes.items()
        }
        if labels != self._labels:
            self._labels = labels
            self._clear(state.version)
        return self._labels

    def _holds(self, bucket: int, version: int, state: State) -> bool:
        """Whether what was found as of `version` is what the snapshot of `state` shows."""
        changed = max(self._touched.get(bucket, 0), self._cleared)
        return changed <= min(version, state.version)

    def _remember(
        self,
        state: State,
        labels: Labels,
        fresh: Mapping[int, Mapping[Place, Found]],
        refs: Mapping[PodKey, str],
        key: Key,
    ) -> None:
        with self._lock:
            if self._labels is not labels or max(self._cleared, self._told) > state.version:
                return
            self._refs |= refs
            known = self._known[key]
            known |= {
                bucket: _Kept(state.version, found)
                for bucket, found in fresh.items()
                if self._touched.get(bucket, 0) <= state.version
            }
            if sum(kept.figures for of in self._known.values() for kept in of.values()) > self._most_figures:
                for of in self._known.values():
                    for old in sorted(of)[: (len(of) + 1) // 2]:
                        del of[old]


def devices(cursor: Cursor, *, profiles: bool) -> list[tuple[int, int, str, str, str]]:
    """(id, GPU, node, model, MIG profile or "") of everything that ever reported."""
    rows = cursor.run("SELECT id, gpu, node, gpu_model, if(?, profile, '') FROM device", [profiles])
    return [(device, gpu, node, model, profile) for device, gpu, node, model, profile in rows]


def in_down_time(
    cursor: Cursor,
    placement: Placement,
    spans: Sequence[TaggedSpan],
    stretches: Sequence[Stretch],
    half_life_s: int | None,
) -> dict[Place, dict[int, Figures]]:
    """What rows hold inside these spans, by place and stretch."""
    found: dict[Place, dict[int, Figures]] = defaultdict(dict)
    for tag, _, of, figures in by_kind(cursor, spans, stretches, half_life_s, placement.classes):
        here = found[placement.places[of]]
        here[tag] = plus([here[tag], figures]) if tag in here else figures
    return found


def _fill(
    cursor: Cursor,
    state: State,
    placement: Placement,
    missing: Sequence[int],
    stretches: Sequence[Stretch],
    half_life_s: int | None,
) -> tuple[Mapping[int, Mapping[Place, Found]], dict[PodKey, str]]:
    """Missing stretches by place, and the queue_ref of every pod in them."""
    by_payer: dict[tuple[int, int], dict[int, Figures]] = defaultdict(dict)
    rest, sums = list(missing), []
    if half_life_s is None:
        # Sums of folded hours are at hand; everything else is told by the rows.
        sums = [tag for tag in missing if stretches[tag].whole and hour_of(stretches[tag]) not in state.unfolded]
        rest = sorted(set(missing) - set(sums))
    sums_of = folded(cursor, [(tag, 0, stretches[tag].start_ms) for tag in sums], placement.classes)
    at_hand = ((tag, payer, of, Figures(*values)) for tag, payer, of, *values in sums_of)
    spans = [TaggedSpan(tag, stretches[tag].start_ms, stretches[tag].end_ms) for tag in rest]
    for source in (at_hand, by_kind(cursor, spans, stretches, half_life_s, placement.classes)):
        for tag, payer, of, figures in source:
            here = by_payer[tag, of]
            here[payer] = plus([here[payer], figures]) if payer in here else figures
    origins = origins_of(cursor, {payer for found in by_payer.values() for payer in found if payer})
    filled: dict[int, dict[Place, Found]] = {tag: {} for tag in missing}
    for (tag, of), found in by_payer.items():
        filled[tag][placement.places[of]] = assigned(found, origins)
    return filled, dict(origins.values())


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
