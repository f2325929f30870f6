"""Two small schedulers for tests that need one and do not care which: their manifests and builders of objects and pods.
Nobody runs them, and no package registers them. `fake` has queues and workloads of its own; `fake-pods` has no objects,
and its pods name the queue by a label (`labelled`).

Its queues (`Queue`) divide GPUs by `spec.weight`, below a `spec.parent` if they name one. Its workloads (`PodGroup`)
start with `spec.minMember` pods or not at all; their pods name the queue by a label and the workload by an annotation.
A `Setup` says whether the scheduler divides by weights, and whether it counts past use itself; with `usage: true` in
its section of the policy it should, and weights stay as they are. Its API has one version, v1, and it passes
`gputally.testing.schedulers.SchedulerSuite`.

    cluster = MemoryCluster(kinds(), [queue_object("a"), queue_object("b"), setup_object()])
    policy = Policy.model_validate({"queues": [{"name": name, "refs": [f"fake:{name}"]} for name in "ab"]})

To install them, put a distribution with `ENTRY_POINTS` on the path, as an installer does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import GPU, Kind, Object, value_at
from gputally.kubernetes.rights import Rights
from gputally.kubernetes.scheduler_plugins import (
    SEAM,
    OwnQueue,
    PodGangKeys,
    PodQueueLabels,
    SchedulerPlugin,
    SharedGpuKeys,
)

NAME: Final = "fake"
GROUP: Final = "fake.gputally.dev"
SCHEDULER_NAME: Final = "fake-scheduler"
"""The `schedulerName` of its pods."""
QUEUE_KEY, GROUP_KEY = f"{GROUP}/queue", f"{GROUP}/pod-group"
"""The label with a pod's queue, and the annotation with its PodGroup."""
FRACTION_KEY, MEMORY_KEY, DEVICES_KEY = f"{GROUP}/fraction", f"{GROUP}/memory", f"{GROUP}/devices"
"""Annotations with which a pod requests parts of GPUs."""
SHARED_KEY: Final = f"{GROUP}/gpu-group"
"""The label that joins a reservation with the pods that share its GPU."""
RESERVATIONS, OLD_RESERVATIONS = "fake-reservations", "fake-old-reservations"
"""The namespaces of the pods that hold GPUs for those that share them, of two versions."""
QUEUE = Kind(f"{GROUP}/v1", "Queue", "queues")
SETUP = Kind(f"{GROUP}/v1", "Setup", "setups")
POD_GROUP = Kind(f"{GROUP}/v1", "PodGroup", "podgroups", namespaced=True)
PODS: Final = "fake-pods"
"""The name of the scheduler without objects. Its section of a policy is `fake_pods`."""
PODS_SCHEDULER_NAME: Final = "fake-pods-scheduler"
LABEL: Final = f"pods.{GROUP}/queue"
"""The label with the queue of its pods."""
ENTRY_POINTS: Final[Mapping[str, Mapping[str, str]]] = {
    SEAM: {NAME: f"{__name__}:SCHEDULER", PODS: f"{__name__}:POD_SCHEDULER"}
}


def _own_queue(obj: Object, _parts: MigParts) -> OwnQueue:
    name, quota = obj["metadata"]["name"], value_at(obj, ("spec", "quota"))
    stated = float(quota) if isinstance(quota, int | float) and quota >= 0 else None
    return OwnQueue(NAME, name, stated, bool(value_at(obj, ("spec", "parent"))), (f"{NAME}:{name}",))


SCHEDULER = SchedulerPlugin(
    name=NAME,
    prefixes=(NAME,),
    adapter="gputally.testing.fake_scheduler_adapter:FakeAdapter",
    kinds=((QUEUE,), (SETUP,), (POD_GROUP,)),
    reaches="lists Queues, Setups and PodGroups; writes spec.weight of Queues",
    page="docs/plugins/scheduler.md",
    pods=PodQueueLabels((QUEUE_KEY,), frozenset({SCHEDULER_NAME})),
    gangs=PodGangKeys(POD_GROUP.kind, GROUP_KEY),
    shares=SharedGpuKeys(
        FRACTION_KEY, MEMORY_KEY, DEVICES_KEY, frozenset({RESERVATIONS, OLD_RESERVATIONS}), SHARED_KEY
    ),
    own_queue=_own_queue,
    player="gputally.testing.fake_scheduler_player:FakePlayer",
    rights=(
        Rights(GROUP, "queues", "list patch", "to read demand and write weights"),
        Rights(GROUP, "podgroups", "list", "to read gangs"),
        Rights(GROUP, "setups", "list", "to see whether weights act"),
    ),
)

POD_SCHEDULER = SchedulerPlugin(
    name=PODS,
    prefixes=(PODS,),
    adapter="gputally.testing.fake_scheduler_adapter:FakePodsAdapter",
    kinds=(),
    reaches="reads labels of pods; writes no object",
    page="docs/plugins/scheduler.md",
    pods=PodQueueLabels((LABEL,), frozenset({PODS_SCHEDULER_NAME})),
)


def _object(kind: Kind, name: str, spec: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    where = {"namespace": "ns"} if kind.namespaced else {}
    metadata = {"name": name, **where, **more.pop("metadata", {})}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": dict(spec), **more}


def _amounts(**listed: object) -> dict[str, Any]:
    return {key: {GPU: str(amount)} for key, amount in listed.items() if amount is not None}


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
    """Build a Queue. weight: None leaves it unset. requested, allocated: GPUs, with those of the queues below."""
    spec = {"quota": quota, "limit": -1, "weight": weight, "parent": parent}
    status = _amounts(requested=requested, allocated=allocated)
    return _object(QUEUE, name, {k: v for k, v in spec.items() if v is not None}, status=status, metadata=metadata)


def setup_object(*, divides: bool = True, counts_usage: bool = False) -> dict[str, Any]:
    """Build the Setup. divides: by weights. counts_usage: the scheduler counts past use itself."""
    return _object(SETUP, "default", {"divides": divides, "countsUsage": counts_usage})


def pod_group(
    name: str = "g",
    queue: str = "a",
    *,
    requested: object = None,
    allocated: object = None,
    least: object = 1,
    preemptible: bool = True,
    **metadata: Any,
) -> dict[str, Any]:
    """Build a PodGroup. requested, allocated: GPUs. least: the number of pods with which it starts. preemptible:
    whether it may be stopped for others."""
    status = _amounts(requested=requested, allocated=allocated)
    metadata = {"uid": f"uid-{name}", **metadata}
    spec = {"queue": queue, "minMember": least, "preemptible": preemptible}
    return _object(POD_GROUP, name, spec, status=status, metadata=metadata)


_NUMBER, _TEXT, _FLAG = {"type": "number"}, {"type": "string"}, {"type": "boolean"}
_SPECS: Final[Mapping[Kind, Mapping[str, Any]]] = {
    QUEUE: {"weight": _NUMBER, "quota": _NUMBER, "limit": _NUMBER, "priority": _NUMBER, "parent": _TEXT},
    SETUP: {"divides": _FLAG, "countsUsage": _FLAG},
    POD_GROUP: {"queue": _TEXT, "minMember": _NUMBER, "preemptible": _FLAG},
}


def definition(kind: Kind) -> dict[str, Any]:
    """Return the CustomResourceDefinition of one of its kinds, for an API server."""
    group, _, version = kind.api_version.partition("/")
    amounts = {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}}
    status = {"type": "object", "properties": {"requested": amounts, "allocated": amounts}}
    spec = {"type": "object", "properties": dict(_SPECS[kind])}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": status}}}
    served = {"name": version, "served": True, "storage": True, "schema": schema, "subresources": {"status": {}}}
    names = {"plural": kind.plural, "kind": kind.kind, "listKind": f"{kind.kind}List", "singular": kind.kind.lower()}
    scope = "Namespaced" if kind.namespaced else "Cluster"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{group}"},
        "spec": {"group": group, "names": names, "scope": scope, "versions": [served]},
    }


def labelled(pod: Object, queue: str) -> dict[str, Any]:
    """Return a pod as one of `fake-pods`. queue: its name in references."""
    metadata = pod["metadata"]
    labels = {**(metadata.get("labels") or {}), LABEL: queue}
    spec = {**pod["spec"], "schedulerName": PODS_SCHEDULER_NAME}
    return {**pod, "metadata": {**metadata, "labels": labels}, "spec": spec}


def placed(pod: Object, queue: str, group: str = "") -> dict[str, Any]:
    """Return a pod as one of this scheduler's. queue: the name of its Queue. group: that of its PodGroup; "": it has
    none."""
    metadata = pod["metadata"]
    labels = {**(metadata.get("labels") or {}), QUEUE_KEY: queue}
    annotations = {**(metadata.get("annotations") or {}), **({GROUP_KEY: group} if group else {})}
    marks = {"labels": labels, "annotations": annotations}
    return {**pod, "metadata": {**metadata, **marks}, "spec": {**pod["spec"], "schedulerName": SCHEDULER_NAME}}
