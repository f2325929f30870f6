"""Pods that hold GPUs, their budgets, and an API server that answers evictions as a real one did."""

from __future__ import annotations

import json
from typing import Any

from fairshare.targets import KINDS
from gputally.kubernetes.api_client import error_of
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import BUDGET


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
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "labels": labels,
                     "creationTimestamp": "2026-09-30T00:00:00Z", **metadata},
        "spec": spec,
        "status": {"phase": "Running", "startTime": "2026-09-30T12:00:00Z"} if node else {"phase": "Pending"},
    }  # fmt: skip


def node_object(name: str = "n0", gpus: int = 8, *, ready: str = "True", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, **metadata},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}, "conditions": [{"type": "Ready", "status": ready}]},
    }  # fmt: skip


def budget_object(name: str, allowed: int, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": BUDGET.api_version,
        "kind": BUDGET.kind,
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"selector": {"matchLabels": labels}},
        "status": {"disruptionsAllowed": allowed},
    }


def cluster_with(*objects: dict[str, Any]) -> Answering:
    return Answering(KINDS, objects)
