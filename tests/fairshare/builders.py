"""Builders of policies, KAI objects and in-memory clusters for the controller's tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from accountant.wire.policy_models import Policy
from fairshare.targets.kai import POD_GROUP, QUEUE, SHARD
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, GPU, NODE, Kind, Object


def object_of(
    kind: Kind, name: str, spec: object = None, status: Mapping[str, Any] | None = None, **metadata: Any
) -> dict[str, Any]:
    """An object as an API server lists it: of the namespace `ns`, where its kind has namespaces and none is given."""
    where = {"namespace": "ns"} if kind.namespaced else {}
    parts = {"spec": spec, "status": status}
    head = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name, **where, **metadata}}
    return head | {key: part for key, part in parts.items() if part is not None}


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
    """A PodGroup as KAI's podgrouper writes it."""
    amounts = {"requested": requested, "allocated": allocated}
    listed = {key: {GPU: str(amount)} for key, amount in amounts.items() if amount is not None}
    status = {"resourcesStatus": listed} if listed else None
    metadata = {"uid": f"uid-{name}", **metadata}
    return object_of(POD_GROUP, name, {"queue": queue, **spec}, status, **metadata)


def cluster_of(objects: Sequence[Object] = (), more: Sequence[Kind] = (), **options: Any) -> MemoryCluster:
    """A cluster that serves what the controller reads."""
    return MemoryCluster([QUEUE, SHARD, NODE, CONFIG_MAP, *more], objects, **options)


def policy_of(queues: Sequence[dict[str, Any]] | None = None, *, apply: str = "enforce", **options: Any) -> Policy:
    """Three equal queues a, b, c, mapped to KAI queues of the same names; options are the policy's."""
    defaults = [{"name": name, "refs": (f"kai:{name}",)} for name in ("a", "b", "c")]
    document = {"targets": {"kai": {"apply": apply}}, "queues": defaults if queues is None else queues, **options}
    return Policy.model_validate(json.loads(json.dumps(document)))
