"""Builders of policies, KAI objects and in-memory clusters for the controller's tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from accountant.wire.policy_models import Policy
from fairshare.targets.kai import QUEUE, SHARD
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, GPU, NODE, Kind, Object


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
    return {
        "apiVersion": QUEUE.api_version,
        "kind": QUEUE.kind,
        "metadata": {"name": name, **metadata},
        "spec": {"resources": {"gpu": gpu}, **({"parentQueue": parent} if parent else {})},
        "status": {"requested": {GPU: requested}, "allocated": {GPU: allocated}},
    }


def shard_object(**spec: Any) -> dict[str, Any]:
    """A KAI SchedulingShard."""
    return {"apiVersion": SHARD.api_version, "kind": SHARD.kind, "metadata": {"name": "default"}, "spec": spec}


def cluster_of(objects: Sequence[Object] = (), more: Sequence[Kind] = (), **options: Any) -> MemoryCluster:
    """A cluster that serves what the controller reads."""
    return MemoryCluster([QUEUE, SHARD, NODE, CONFIG_MAP, *more], objects, **options)


def policy_of(queues: Sequence[dict[str, Any]] | None = None, *, apply: str = "enforce", **options: Any) -> Policy:
    """Three equal queues a, b, c, mapped to KAI queues of the same names; options are the policy's."""
    defaults = [{"name": name, "refs": (f"kai:{name}",)} for name in ("a", "b", "c")]
    document = {"targets": {"kai": {"apply": apply}}, "queues": defaults if queues is None else queues, **options}
    return Policy.model_validate(json.loads(json.dumps(document)))
