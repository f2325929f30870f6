"""Groups GPUs into places and weights their time by price, GPU model, shard or cluster.

A `Lens` decides what a window counts. It leaves a place out, gives the time there a weight (a price, or a factor of the
GPU model), or says that the weight is unknown (no price). A window sums microseconds per place and multiplies once by
an exact fraction. The result therefore does not depend on the order of arrival or on how time is split.

A cost uses the price book's rows at the time, per whole GPU-hour. This is the amount of a statement before commitments
and billing policy. Those depend on other users too, not only on the usage of the queue."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Final, NamedTuple

from accountant.billing.unallocated_borrowed_and_mig_time import memory_to_compute
from accountant.core.claim_overlap import Span
from accountant.prices.gpu_model_names import GpuModel, parse_gpu_model
from accountant.prices.price_book import PriceBook
from accountant.storage.gpu_lifetimes import Fleet, NodeKey, changes_between
from accountant.storage.write.name_ids import DeviceName
from gputally.base.units import US_PER_HOUR

COST_UNIT_PLACES: Final = 9
"""Costs are integers in units of 10^-9 of their currency."""
_COST_UNITS_PER_US: Final = Fraction(10**COST_UNIT_PLACES, US_PER_HOUR)


class Place(NamedTuple):
    """GPUs that count alike, because they have the same model and labels.

    profile: of a MIG instance if it matters, else "". If only clusters are distinguished, all other fields are ""."""

    cluster: str
    gpu_model: str = ""
    profile: str = ""
    pool: str = ""
    region: str = ""
    capacity_type: str = ""
    shard: str = ""


@dataclass(frozen=True)
class Lens:
    """The GPU time that a window counts, and its weights.

    book: count time at its prices.
    gpu_weights: by model, the most precise name first. Other models weigh 1.
    shard: only nodes of this scheduling shard; "" for nodes without a shard.
    cluster: only nodes of this cluster."""

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
        """Create a lens. gpu_weights: by model name, as in a price book."""
        named = [(parse_gpu_model(name), Fraction(weight)) for name, weight in (gpu_weights or {}).items()]
        named.sort(key=lambda pair: (-_precision(pair[0]), str(pair[0])))
        return cls(book, tuple(named), shard, cluster)

    @property
    def trivial(self) -> bool:
        """Whether every GPU-microsecond has weight 1, and the only possible filter is one cluster."""
        return self.book is None and not self.gpu_weights and self.shard is None

    @property
    def tells_profiles(self) -> bool:
        """Whether the MIG profile of an instance affects its weight."""
        return self.book is not None and self.book.mig_basis == "memory"

    def placing(self, fleet: Fleet) -> Hashable:
        """Return a key of a cache: while it is equal, `Placement` gives every device the same place. None: places
        differ only by cluster."""
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
        """Return the instants strictly inside the span at which weights change."""
        return self.book.cuts(start_ms, end_ms) if self.book is not None else ()

    def weight(self, place: Place, at_ms: int) -> Fraction | None:
        """Return the weight of a GPU-microsecond at that place and instant, in the window's unit; None if unknown."""
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


class GpusInService(NamedTuple):
    """The GPUs of a place.

    lives: number in service, by span.
    down: their down time, by GPU."""

    lives: Mapping[Span, int]
    down: Sequence[tuple[int, Span]]


class Placement:
    """Maps each device and GPU to its `Place`. Valid for a span in which no GPU moves and no node label changes
    (`placement_changes`).

    The lens determines how places differ: by cluster only, or by model, profile, node labels and cluster."""

    def __init__(self, fleet: Fleet, lens: Lens, at_ms: int) -> None:
        self._fleet = fleet
        self._lens = lens
        self._at_ms = at_ms
        self._labels: dict[NodeKey, tuple[str, str, str, str]] = {}

    def place(self, device: DeviceName) -> Place:
        """Return the place of a device in the records."""
        profile = device.profile if self._lens.tells_profiles else ""
        return self._place(device.gpu, device.node, device.gpu_model, profile)

    def gpus(self) -> dict[Place, GpusInService]:
        """Return every place that the lens includes, with its GPUs."""
        fleet, lens = self._fleet, self._lens
        if lens.trivial:
            clusters = fleet.clusters if lens.cluster is None else fleet.clusters & {lens.cluster}
            censuses = {cluster: fleet.census_of(fleet.one_of_several(cluster)) for cluster in sorted(clusters)}
            return {Place(name): GpusInService(one.lives(), list(one.down())) for name, one in censuses.items()}
        lives: dict[Place, Counter[Span]] = defaultdict(Counter)
        down: dict[Place, list[tuple[int, Span]]] = defaultdict(list)
        for gpu in sorted(fleet.tenures):
            life = fleet.life(gpu)
            place = self._place(gpu, life.node_at(self._at_ms), fleet.gpus[gpu].model, "")
            lives[place][life.start_ms, life.end_ms] += 1
            down[place] += [(gpu, span) for span in life.down]
        return {place: GpusInService(counted, down[place]) for place, counted in lives.items() if lens.sees(place)}

    def _place(self, gpu: int, node: str, gpu_model: str, profile: str) -> Place:
        cluster = self._fleet.gpus[gpu].cluster
        if self._lens.trivial:
            return Place(cluster)
        labels = self._labels.get((cluster, node))
        if labels is None:
            facts = self._fleet.node_at((cluster, node), self._at_ms)
            labels = ("", "", "", "")
            if facts is not None:
                labels = facts.pool, facts.region, facts.capacity_type, facts.shard
            self._labels[cluster, node] = labels
        return Place(cluster, gpu_model, profile, *labels)


def placement_changes(fleet: Fleet, start_ms: int, end_ms: int) -> list[int]:
    """Return the instants strictly inside the span at which a GPU moved or a node's labels changed."""
    lives = (fleet.life(gpu) for gpu in fleet.tenures)
    moved = {since for life in lives if len(life.nodes) > 1 for since, _ in life.nodes if start_ms < since < end_ms}
    return sorted(moved | set(changes_between(fleet.placed.values(), start_ms, end_ms)))


def shard_of(fleet: Fleet, shard: str, end_ms: int, cluster: str | None = None) -> list[int]:
    """Return the GPUs on nodes of a scheduling shard just before an instant. cluster: only those of this cluster."""
    found = []
    for gpu in fleet.tenures:
        of = fleet.gpus[gpu].cluster
        facts = fleet.node_at((of, fleet.life(gpu).node_at(end_ms - 1)), end_ms - 1)
        if (facts.shard if facts is not None else "") == shard and cluster in (None, of):
            found.append(gpu)
    return found
