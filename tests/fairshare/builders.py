"""Builders of policies, of schedulers' and Kubernetes' objects, and of clusters in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from accountant.wire.policy_models import Policy
from accountant.wire.usage_cost_and_job_models import BudgetState
from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import Pod
from gputally.base.errors import ClusterRefused, ClusterUnavailable
from gputally.kubernetes.api_client import error_of
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import BUDGET, CONFIG_MAP, GPU, NODE, POD, Event, Kind, Object
from gputally.testing.fake_scheduler import NAME, QUEUE, SETUP, labelled
from tests.fairshare.scheduler_kinds import KINDS


def object_of(
    kind: Kind, name: str, spec: object = None, status: Mapping[str, Any] | None = None, **metadata: Any
) -> dict[str, Any]:
    """Build an object as an API server lists it. An object of a namespaced kind is in `ns` unless a namespace is
    given."""
    where = {"namespace": "ns"} if kind.namespaced else {}
    parts = {"spec": spec, "status": status}
    head = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name, **where, **metadata}}
    return head | {key: part for key, part in parts.items() if part is not None}


def cluster_of(objects: Sequence[Object] = (), more: Sequence[Kind] = (), **options: Any) -> MemoryCluster:
    """Build a cluster in memory that serves everything that the controller reads."""
    return MemoryCluster([QUEUE, SETUP, NODE, CONFIG_MAP, *more], objects, **options)


def policy_of(queues: Sequence[dict[str, Any]] | None = None, *, apply: str = "enforce", **options: Any) -> Policy:
    """Build a policy with three equal queues a, b, c, mapped to queues of the fake scheduler with the same names.
    weights follow the law at every cycle. options: further keys of the policy."""
    defaults = [{"name": name, "refs": (f"{NAME}:{name}",)} for name in ("a", "b", "c")]
    document = {
        "targets": {NAME: {"mode": "weight", "apply": apply}, "fake_pods": {"apply": apply}},
        "bounds": {"interval": 0},
        "queues": defaults if queues is None else queues,
        **options,
    }
    return Policy.model_validate(json.loads(json.dumps(document)))


class Answering(MemoryCluster):
    """A cluster in memory whose evictions get an answer recorded from a real API server."""

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


def fake_pod(name: str, queue: str = "a", *, node: str = "n0", gpus: int = 4, **metadata: Any) -> dict[str, Any]:
    """Build a pod whose label names its queue, of the fake scheduler without objects."""
    return labelled(pod_object(name, queue, node=node, gpus=gpus, **metadata), queue)


def plain_pod(
    name: str = "p",
    gpu: object = "2",
    *,
    node: str = "",
    phase: str = "Pending",
    scheduler: str = "default-scheduler",
    **metadata: Any,
) -> dict[str, Any]:
    """Build a pod that no queue names. gpu: the GPUs that it requests; None: none."""
    limits = {} if gpu is None else {"limits": {GPU: gpu}}
    placed = {"schedulerName": scheduler, **({"nodeName": node} if node else {})}
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": f"u-{name}"} | metadata,
        "spec": {"containers": [{"name": "c", "resources": limits}], **placed},
        "status": {"phase": phase},
    }


def read_plain_pod(name: str = "p", gpu: object = "2", **fields: Any) -> Pod:
    """Return what the controller reads of a `plain_pod`."""
    pod = read_pod(plain_pod(name, gpu, **fields))
    assert pod is not None
    return pod


def node_object(name: str = "n0", gpus: int = 8, *, ready: str = "True", **metadata: Any) -> dict[str, Any]:
    status = {"allocatable": {"nvidia.com/gpu": str(gpus)}, "conditions": [{"type": "Ready", "status": ready}]}
    return object_of(NODE, name, status=status, **metadata)


def budget_object(name: str, allowed: int, labels: dict[str, str]) -> dict[str, Any]:
    return object_of(BUDGET, name, {"selector": {"matchLabels": labels}}, {"disruptionsAllowed": allowed})


def cluster_with(*objects: dict[str, Any]) -> Answering:
    return Answering(KINDS, objects)


class Failing(MemoryCluster):
    """A cluster in which the verbs in `failing` fail: a verb (`get`), or a verb on a kind (`get ConfigMap`)."""

    failing: frozenset[str] = frozenset()
    error: Exception = ClusterUnavailable("GET: 503: the server is currently unable to handle the request")

    def _fail(self, *what: str) -> None:
        if self.failing & set(what):
            raise self.error

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        self._fail("get", f"get {kind.kind}")
        return super().get(kind, name, namespace)

    listed: tuple[Kind, ...] = ()

    def list(self, kind: Kind, *, fields: str = "") -> list[Object]:
        self.listed += (kind,)
        self._fail("list", f"list {kind.kind}")
        return super().list(kind, fields=fields)

    def patch(
        self, kind: Kind, name: str, namespace: str, change: Object, *, field_manager: str, dry_run: bool = False
    ) -> Object:
        self._fail("patch", f"patch {kind.kind}")
        return super().patch(kind, name, namespace, change, field_manager=field_manager, dry_run=dry_run)

    admit_config_maps = True

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        if obj["kind"] == "ConfigMap" and not self.admit_config_maps:
            raise ClusterRefused("PATCH: 403: exceeded quota: objects")
        self._fail(f"apply {obj['kind']}")
        return super().apply(obj, field_manager=field_manager, dry_run=dry_run, subresource=subresource)

    def event(self, event: Event) -> None:
        self._fail("event", f"event {event.kind.kind}")
        super().event(event)


def budget_state(name: str, queue: str, **fields: Any) -> BudgetState:
    """Build the state of a budget of 100 GPU-hours; values that are not given are unknown."""
    unknown = dict.fromkeys(("team", "spent", "ratio", "threshold", "forecast", "forecast_low", "forecast_high"))
    known = {"name": name, "queue": queue, "month": "2026-10", "unit": "GPU-hours", "limit": "100", "as_of_ms": 0}
    return BudgetState.model_validate({**unknown, **known, **fields})
