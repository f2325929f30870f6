"""Pods as the API server writes them."""

from __future__ import annotations

import json
from typing import Any

from agent.holders.kubernetes_api_objects import PodView, read
from agent.wire import PodFacts

UID = "5f0ce1b2-7a41-4c0e-9d55-0123456789ab"


def pod_object(
    namespace: str = "vision",
    name: str = "train-0",
    uid: str = UID,
    phase: str = "Running",
    gpus: int = 1,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """more: members of metadata (owners, deletionTimestamp) or `spec` and `status` to be merged in."""
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    spec = {
        "nodeName": "node-1",
        "schedulerName": "kai-scheduler",
        "priority": 100,
        "containers": [{"name": "main", "image": "i", "resources": {"limits": limits, "requests": limits}}],
        **more.pop("spec", {}),
    }
    status = {
        "phase": phase,
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-10-01T08:00:01Z"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-10-01T08:00:09Z"},
        ],
        "containerStatuses": [{"name": "main", "state": {"running": {"startedAt": "2026-10-01T08:00:05Z"}}}],
        **more.pop("status", {}),
    }
    meta = {
        "namespace": namespace,
        "name": name,
        "uid": uid,
        "labels": labels or {},
        "annotations": annotations or {},
        "creationTimestamp": "2026-10-01T08:00:00Z",
        "resourceVersion": "7",
        **more,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": status}


def view(*allowed: str, **pod: Any) -> PodView:
    return read(json.dumps(pod_object(**pod)).encode(), "node-1", allowed)


def facts(**pod: Any) -> PodFacts:
    return view(**pod).facts
