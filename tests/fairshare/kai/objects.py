"""Objects of KAI, as that program and its administrators write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from accountant.wire.policy_models import Policy
from fairshare.schedulers.kai.kinds import POD_GROUP, QUEUE, SHARD
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, GPU, NODE, Kind, Object
from tests.fairshare.builders import object_of, policy_of

KAI_QUEUE = {
    "apiVersion": "scheduling.run.ai/v2", "kind": "Queue", "metadata": {"name": "a"},
    "spec": {"resources": {"gpu": {"quota": 8, "overQuotaWeight": 1, "limit": -1}}},
}  # fmt: skip
DATABASE = {"clientType": "prometheus", "connectionString": "http://usage:9091"}
ARGUMENTS = {"plugins": {"proportion": {"arguments": {"other": "1"}}}}


def queue_object(
    name: str,
    weight: float | None = 1,
    *,
    requested: object = "100",
    allocated: object = "4",
    quota: float = 0,
    parent: str | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    """A KAI Queue."""
    gpu: dict[str, Any] = {"quota": quota, "limit": -1}
    if weight is not None:
        gpu["overQuotaWeight"] = weight
    spec = {"resources": {"gpu": gpu}, **({"parentQueue": parent} if parent else {})}
    return object_of(QUEUE, name, spec, {"requested": {GPU: requested}, "allocated": {GPU: allocated}}, **metadata)


def shard_object(**spec: Any) -> dict[str, Any]:
    """A KAI SchedulingShard."""
    return object_of(SHARD, "default", spec)


def pod_group(
    name: str = "g",
    queue: str = "a",
    *,
    requested: int | None = None,
    allocated: int | None = None,
    spec: Mapping[str, Any] = MappingProxyType({"minMember": 1}),
    **metadata: Any,
) -> dict[str, Any]:
    """Build a PodGroup as KAI's podgrouper writes it."""
    amounts = {"requested": requested, "allocated": allocated}
    listed = {key: {GPU: str(amount)} for key, amount in amounts.items() if amount is not None}
    status = {"resourcesStatus": listed} if listed else None
    metadata = {"uid": f"uid-{name}", **metadata}
    return object_of(POD_GROUP, name, {"queue": queue, **spec}, status, **metadata)


def kai_cluster(objects: Sequence[Object] = (), more: Sequence[Kind] = (), **options: Any) -> MemoryCluster:
    """Build a cluster in memory that serves what the controller reads of KAI."""
    return MemoryCluster([QUEUE, SHARD, NODE, CONFIG_MAP, *more], objects, **options)


def kai_policy(queues: Sequence[dict[str, Any]] | None = None, *, apply: str = "enforce", **options: Any) -> Policy:
    """Build a policy with three equal queues a, b, c, mapped to KAI's Queues of the same names."""
    own = [{"name": name, "refs": (f"kai:{name}",)} for name in "abc"]
    targets = options.pop("targets", {"kai": {"mode": "weight", "apply": apply}})
    return policy_of(own if queues is None else queues, targets=targets, **options)
