"""Pods that hold GPUs, their budgets, and an API server that answers evictions as a real one did."""

from __future__ import annotations

import json
from typing import Any

from fairshare.targets import KINDS
from gputally.kubernetes.api_client import error_of
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import BUDGET, NODE, POD
from tests.fairshare.builders import object_of


class Answering(MemoryCluster):
    """An API server whose eviction answers what a real one was recorded to answer."""

    answer: dict[str, Any] | None = None

    def evict(self, name: str, namespace: str, uid: str, *, grace_s: int | None = None, dry_run: bool = False) -> None:
        if self.answer is not None and self.answer["status"] >= 300:
            path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
            after = self.answer["retry_after"]
            headers = {"Retry-After": after} if after else {}
            raise error_of("POST", path, self.answer["status"], json.dumps(self.answer["body"]).encode(), headers)
        super().evict(name, namespace, uid, grace_s=grace_s, dry_run=dry_run)


def pod_object(name: str, queue: str = "a", *, node: str = "n0", gpus: int = 4, **metadata: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]}
    if node:
        spec["nodeName"] = node
    labels = {"gputally.dev/queue": queue, **metadata.pop("labels", {})}
    metadata = {"uid": f"uid-{name}", "creationTimestamp": "2026-09-30T00:00:00Z", **metadata, "labels": labels}
    status = {"phase": "Running", "startTime": "2026-09-30T12:00:00Z"} if node else {"phase": "Pending"}
    return object_of(POD, name, spec, status, **metadata)


def node_object(name: str = "n0", gpus: int = 8, *, ready: str = "True", **metadata: Any) -> dict[str, Any]:
    status = {"allocatable": {"nvidia.com/gpu": str(gpus)}, "conditions": [{"type": "Ready", "status": ready}]}
    return object_of(NODE, name, status=status, **metadata)


def budget_object(name: str, allowed: int, labels: dict[str, str]) -> dict[str, Any]:
    return object_of(BUDGET, name, {"selector": {"matchLabels": labels}}, {"disruptionsAllowed": allowed})


def cluster_with(*objects: dict[str, Any]) -> Answering:
    return Answering(KINDS, objects)
