"""Tells GPUs apart by place, and says what time counts there: by price, GPU model, shard or cluster.

A lens leaves a place out, gives its time an exact weight, or says that it has none (time without a price). A window
adds up whole microseconds per place and multiplies once, by exact fractions, so no order of arrival and no cut of time
changes a digit.

A cost is that of the price book's rows as they stood at the time, per whole GPU-hour: what a statement bills before
commitments and billing policy, which depend on who came first and not on what was used. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Final, NamedTuple, Protocol

from accountant.billing.billing_rules import memory_to_compute
from accountant.core.claim_overlap import Span
from accountant.prices.gpu_model_names import GpuModel, parse_gpu_model
from accountant.prices.price_book import PriceBook
from accountant.storage.gpu_lifetimes import Fleet, NodeKey, changes_between
from gputally.base.units import US_PER_HOUR

COST_UNIT_PLACES: Final = 9
"""A cost is told in units of 10^-9 of its currency."""
_COST_UNITS_PER_US: Final = Fraction(10**COST_UNIT_PLACES, US_PER_HOUR)


class Place(NamedTuple):
    """A kind of GPU in one surrounding. profile: of a MIG instance where it matters, else "". Where only clusters are
    told apart, everything else is ""."""

    cluster: str
    gpu_model: str = ""
    profile: str = ""
    pool: str = ""
    region: str = ""
    capacity_type: str = ""
    shard: str = ""


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

    def placing(self, fleet: Fleet) -> Hashable:
        """What the places of devices depend on; None: on their clusters alone."""
        if self.trivial:
            return None
        labels = {
            (at, node.pool, node.region, node.capacity_type, node.shard, fleet.placed.get(at))
            for at, node in fleet.nodes.items()
        }
        return self.tells_profiles, frozenset(labels)

    def sees(self, place: Place) -> bool:
        return (self.trivial or self.shard in (None, place.shard)) and self.cluster in (None, place.cluster)

    def cuts(self, start_ms: int, end_ms: int) -> tuple[int, ...]:
        """Instants strictly inside the span at which weights change."""
        return self.book.cuts(start_ms, end_ms) if self.book is not None else ()

    def weight(self, place: Place, at_ms: int) -> Fraction | None:
        """What a GPU-microsecond there counts at that instant, in the window's unit; None where it is not known."""
        if self.book is not None:
            row = self.book.unit_price(place.gpu_model, at_ms, place.pool, place.region, place.capacity_type)
            share = memory_to_compute(place.profile, place.gpu_model)
            return None if row is None or share is None else Fraction(row.price) * share * _COST_UNITS_PER_US
        if not self.gpu_weights:
            return Fraction(1)
        model = parse_gpu_model(place.gpu_model)
        return next((weight for named, weight in self.gpu_weights if named.covers(model)), Fraction(1))


def _precision(model: GpuModel) -> int:
    return (model.memory_gb is not None) + (model.form is not None)


class Device(NamedTuple):
    """A row of the ledger's devices. profile: "" where it does not matter."""

    id: int
    gpu: int
    node: str
    gpu_model: str
    profile: str


class Capacity(NamedTuple):
    """The GPUs of a place. lives: how many were in service from when to when. down: their down time, by GPU."""

    lives: Mapping[Span, int]
    down: Sequence[tuple[int, Span]]


class Placement(Protocol):
    """Where everything was while nothing moved."""

    def place(self, device: Device) -> Place:
        """The place of a device that reported."""
        ...

    def capacity(self) -> Iterator[tuple[Place, Capacity]]:
        """The GPUs of every place."""
        ...


class ByCluster:
    """Tells clusters apart alone."""

    def __init__(self, fleet: Fleet, cluster: str | None) -> None:
        """cluster: the only one that is looked at; None: all of them."""
        self._fleet = fleet
        self._cluster = cluster

    def place(self, device: Device) -> Place:
        return Place(self._fleet.gpus[device.gpu].cluster)

    def capacity(self) -> Iterator[tuple[Place, Capacity]]:
        for cluster in sorted(self._fleet.clusters):
            if self._cluster in (None, cluster):
                census = self._fleet.census_of(None if len(self._fleet.clusters) == 1 else cluster)
                yield Place(cluster), Capacity(census.lives(), list(census.down()))


class BySurroundings:
    """Tells models, profiles, nodes' labels and clusters apart, as they were at an instant."""

    def __init__(self, fleet: Fleet, at_ms: int) -> None:
        self._fleet = fleet
        self._at_ms = at_ms
        self._labels: dict[NodeKey, tuple[str, str, str, str]] = {}

    def place(self, device: Device) -> Place:
        return self._place(device.gpu, device.node, device.gpu_model, device.profile)

    def capacity(self) -> Iterator[tuple[Place, Capacity]]:
        lives: dict[Place, Counter[Span]] = defaultdict(Counter)
        down: dict[Place, list[tuple[int, Span]]] = defaultdict(list)
        for gpu in sorted(self._fleet.tenures):
            life = self._fleet.life(gpu)
            place = self._place(gpu, life.node_at(self._at_ms), self._fleet.gpus[gpu].model, "")
            lives[place][life.start_ms, life.end_ms] += 1
            down[place] += [(gpu, span) for span in life.down]
        for place, counted in lives.items():
            yield place, Capacity(counted, down[place])

    def _place(self, gpu: int, node: str, gpu_model: str, profile: str) -> Place:
        cluster = self._fleet.gpus[gpu].cluster
        labels = self._labels.get((cluster, node))
        if labels is None:
            facts = self._fleet.node_at((cluster, node), self._at_ms)
            labels = ("", "", "", "")
            if facts is not None:
                labels = facts.pool, facts.region, facts.capacity_type, facts.shard
            self._labels[cluster, node] = labels
        return Place(cluster, gpu_model, profile, *labels)


def placement_changes(fleet: Fleet, start_ms: int, end_ms: int) -> list[int]:
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
