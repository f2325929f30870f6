"""Defines which GPU time a usage window counts, and its weight: a price, a factor of the GPU model, or 1.

GPUs of equal weight form a `GpuGroup`. A window sums the microseconds of each group as integers and multiplies the sum
once by an exact fraction, so the result does not depend on the order of arrival or on how time is split.

For a cost, GPU time has the price that bills have (accountant.prices.unit_prices.unit_price), for one hour of a
whole GPU. The cost is the amount of a statement before commitments and billing policy, which depend on the usage of
other teams too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Final, NamedTuple

from accountant.prices.price_book import PriceBook
from accountant.prices.unit_prices import Place, pieces, rate
from accountant.storage.gpu_lifetimes import GpuCensus, GpuLifetimes, NodeKey, changes_between
from accountant.storage.write.name_ids import DeviceName
from accountant.wire.policy_models import ANY_MODEL
from gputally.base.gpu_model_names import GpuModel, parse_gpu_model
from gputally.base.units import US_PER_HOUR

COST_UNIT_PLACES: Final = 9
"""Costs are integers in units of 10^-9 of their currency."""
_COST_UNITS_PER_US: Final = Fraction(10**COST_UNIT_PLACES, US_PER_HOUR)


class GpuGroup(NamedTuple):
    """GPUs with equal weight, because they have the same model and their nodes have the same labels.

    profile is the MIG profile of the instances if it affects the weight, else "". If windows distinguish clusters only,
    all other fields are ""."""

    cluster: str
    gpu_model: str = ""
    profile: str = ""
    pool: str = ""
    region: str = ""
    capacity_type: str = ""
    shard: str = ""


@dataclass(frozen=True)
class Weighting:
    """The GPU time that a window counts, and its weights.

    `book` is the price book of a cost. `gpu_weights` are factors by GPU model, the most precise name first, and None
    for any model; other models have the factor 1. `shard` limits the window to nodes of a scheduling shard ("": nodes
    without a shard), `cluster` to nodes of a cluster."""

    book: PriceBook | None = None
    gpu_weights: tuple[tuple[GpuModel | None, Fraction], ...] = ()
    shard: str | None = None
    cluster: str | None = None

    @property
    def by_cluster_only(self) -> bool:
        """Return whether every GPU-microsecond of a counted cluster has weight 1."""
        return self.book is None and not self.gpu_weights and self.shard is None

    @property
    def uses_profiles(self) -> bool:
        """Return whether the MIG profile of an instance affects its weight."""
        return self.book is not None and self.book.mig_basis == "memory"

    def grouping_key(self, fleet: GpuLifetimes) -> Hashable:
        """Return a value that is equal as long as `GpuGroups` assigns every device to the same group. It is None if
        groups are clusters."""
        if self.by_cluster_only:
            return None
        labels = {
            (at, node.pool, node.region, node.capacity_type, node.shard, fleet.placed.get(at))
            for at, node in fleet.nodes.items()
        }
        return self.uses_profiles, frozenset(labels)

    def includes(self, group: GpuGroup) -> bool:
        """Return whether the window counts the group."""
        in_shard = self.by_cluster_only or self.shard in (None, group.shard)
        return in_shard and self.cluster in (None, group.cluster)

    def price_changes(self, start_ms: int, end_ms: int) -> tuple[int, ...]:
        """Return the instants strictly inside the span at which a price changes."""
        return tuple(start for start, _ in pieces(self.book, start_ms, end_ms)[1:])

    def weight(self, group: GpuGroup, at_ms: int) -> Fraction | None:
        """Return the weight of a GPU-microsecond of the group, in the window's unit; None without a price."""
        if self.book is not None:
            place = Place(group.gpu_model, group.pool, group.region, group.capacity_type)
            price = rate(self.book, place, at_ms, group.profile)
            return None if price is None else price * _COST_UNITS_PER_US
        if not self.gpu_weights:
            return Fraction(1)
        model = parse_gpu_model(group.gpu_model)
        return next((weight for name, weight in self.gpu_weights if name is None or name.covers(model)), Fraction(1))


def model_weights(weight_of: Mapping[str, Decimal]) -> tuple[tuple[GpuModel | None, Fraction], ...]:
    """Return `Weighting.gpu_weights`. weight_of: factors by the name of a GPU model, as price books write it, and by
    ANY_MODEL for all others."""
    named = [(parse_gpu_model(name), Fraction(weight)) for name, weight in weight_of.items() if name != ANY_MODEL]
    by_precision = sorted(named, key=lambda pair: (-pair[0].precision, str(pair[0])))
    others = [(None, Fraction(weight_of[ANY_MODEL]))] if ANY_MODEL in weight_of else []
    return (*by_precision, *others)


class GpuGroups:
    """Assigns devices and GPUs to groups as they were at an instant.

    The assignment stays valid until a GPU moves or the labels of a node change (`group_changes`)."""

    def __init__(self, fleet: GpuLifetimes, weighting: Weighting, at_ms: int) -> None:
        self._fleet = fleet
        self._weighting = weighting
        self._at_ms = at_ms
        self._labels: dict[NodeKey, tuple[str, str, str, str]] = {}

    def of_device(self, device: DeviceName) -> GpuGroup:
        """Return the group of a device in the records."""
        profile = device.profile if self._weighting.uses_profiles else ""
        return self._group(device.gpu, device.node, device.gpu_model, profile)

    def in_service(self) -> dict[GpuGroup, GpuCensus]:
        """Return the census of every group that the window counts."""
        fleet, weighting = self._fleet, self._weighting
        if weighting.by_cluster_only:
            clusters = fleet.clusters if weighting.cluster is None else fleet.clusters & {weighting.cluster}
            return {GpuGroup(name): fleet.census_of(fleet.one_of_several(name)) for name in sorted(clusters)}
        members: dict[GpuGroup, list[int]] = defaultdict(list)
        for gpu in fleet.tenures:
            group = self._group(gpu, fleet.life(gpu).node_at(self._at_ms), fleet.gpus[gpu].model, "")
            if weighting.includes(group):
                members[group].append(gpu)
        return {group: GpuCensus.of(gpus, fleet.life, fleet.newest_end_ms) for group, gpus in members.items()}

    def _group(self, gpu: int, node: str, gpu_model: str, profile: str) -> GpuGroup:
        cluster = self._fleet.gpus[gpu].cluster
        if self._weighting.by_cluster_only:
            return GpuGroup(cluster)
        labels = self._labels.get((cluster, node))
        if labels is None:
            facts = self._fleet.node_at((cluster, node), self._at_ms)
            labels = ("", "", "", "")
            if facts is not None:
                labels = facts.pool, facts.region, facts.capacity_type, facts.shard
            self._labels[cluster, node] = labels
        return GpuGroup(cluster, gpu_model, profile, *labels)


def group_changes(fleet: GpuLifetimes, start_ms: int, end_ms: int) -> list[int]:
    """Return the instants strictly inside the span at which a GPU moved or the labels of a node changed, ascending."""
    lives = (fleet.life(gpu) for gpu in fleet.tenures)
    moves = {since for life in lives if len(life.nodes) > 1 for since, _ in life.nodes if start_ms < since < end_ms}
    return sorted(moves | set(changes_between(fleet.placed.values(), start_ms, end_ms)))


def gpus_of_shard(fleet: GpuLifetimes, shard: str, end_ms: int, cluster: str | None = None) -> list[int]:
    """Return the GPUs that were on nodes of a scheduling shard just before `end_ms`, in one cluster or in all."""
    gpus = []
    for gpu in fleet.tenures:
        gpu_cluster = fleet.gpus[gpu].cluster
        facts = fleet.node_at((gpu_cluster, fleet.life(gpu).node_at(end_ms - 1)), end_ms - 1)
        if (facts.shard if facts is not None else "") == shard and cluster in (None, gpu_cluster):
            gpus.append(gpu)
    return gpus
