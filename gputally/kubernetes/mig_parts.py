"""Which part of a GPU a MIG instance is, for pods, queues and workloads of a cluster.

Two GPUs can have a profile of one name and different numbers of compute slices: `1g.24gb` is a seventh of an H100 NVL
and a quarter of an RTX PRO 6000. The product of a node decides what counts there. What names no node, such as a pod
that waits, a quota or a workload, counts by the GPU model that its node selector states. Without one it counts by the
nodes that offer the profile, and by those of them with the fewest slices if they differ, so that no request seems
smaller than it can become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

import msgspec

from gputally.base.gpu_model_names import gpu_model_of_node
from gputally.base.mig_profiles import compute_slices, parse_mig_profile
from gputally.kubernetes.objects import MIG, MigSlices, Object, quantity, value_at


class MigParts(msgspec.Struct, frozen=True):
    """The compute slices of the cluster's GPUs, as one look at its nodes shows them.

    products: by node, its GPU model; "" if its labels state none.
    offered: by profile, without its suffix, the fewest compute slices of the GPUs that offer it."""

    products: Mapping[str, str] = msgspec.field(default_factory=dict)
    offered: Mapping[str, int] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Iterable[Object]) -> MigParts:
        """nodes: all nodes of the cluster, in service or not."""
        products: dict[str, str] = {}
        offered: dict[str, int] = {}
        for node in nodes:
            product = gpu_model_of_node(value_at(node, ("metadata", "labels")) or {})
            products[str(value_at(node, ("metadata", "name")))] = product
            for key in ("allocatable", "capacity"):
                for name, amount in (value_at(node, ("status", key)) or {}).items():
                    if not name.startswith(MIG):
                        continue
                    profile = name.removeprefix(MIG)
                    mig = parse_mig_profile(profile)
                    if mig is not None and quantity(amount):
                        slices = compute_slices(product, profile)
                        offered[mig.size] = min(slices, offered.get(mig.size, slices))
        return cls(products, offered)

    def on(self, node: str) -> MigSlices:
        """Return what counts on a node; for an unknown node, and for "", what counts without one."""
        product = self.products.get(node)
        if product is None:
            return self.anywhere
        return partial(compute_slices, product)

    def selected(self, labels: Mapping[str, str]) -> MigSlices:
        """Return what counts on nodes with these labels, if they state a GPU model, or else without a node."""
        product = gpu_model_of_node(labels)
        return partial(compute_slices, product) if product else self.anywhere

    def anywhere(self, profile: str) -> int:
        """Return the compute slices that count for a profile where no node is named."""
        mig = parse_mig_profile(profile)
        slices = self.offered.get(mig.size) if mig is not None else None
        return compute_slices(profile=profile) if slices is None else slices


NO_NODES: Final = MigParts()
"""What counts if the cluster's nodes are unknown: the profile alone decides."""
