"""A pod as the API server describes it, cut down to what metering needs.

Which queue it names is `agent.queues`' to say.
Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase

from agent.kube.apijson import OwnerReference, PodStatus, Resources, Spec, decode_pod
from agent.queues import RESERVATION_NAMESPACES, placed_by, queue_ref
from agent.wire import Owner, PodFacts

MAX_LABELS = 64
MAX_LABEL_CHARS = 256
GPU_FRACTION, GPU_MEMORY, GPU_GROUP = "gpu-fraction", "gpu-memory", "runai-gpu-group"
CONFIG_HASH = "kubernetes.io/config.hash"
_GPU_RESOURCES = ("nvidia.com/", "gpu.nvidia.com/")
_TEMPLATE_HASH = "pod-template-hash"
_OVER = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class PodView:
    """facts: what is told to the accountant. over: it holds nothing any more. containers: in the order of
    the spec; container_ids: their names by what the runtime calls them, as far as they ran. config_hash: what
    the control group of a static pod is called by. fraction, memory_mib: the
    part of a GPU a fraction scheduler gave it (None: not declared); groups: the shared GPUs it is on.
    limits: GPU resources by container, as its limits say. by_kai: KAI or Run:ai places it. bound: it has its node.
    wants_gpu: whether its facts are worth telling."""

    facts: PodFacts
    over: bool
    running: bool
    containers: tuple[str, ...]
    container_ids: Mapping[str, str] = field(default_factory=dict)
    config_hash: str = ""
    fraction: str = ""
    memory_mib: str = ""
    groups: tuple[str, ...] = ()
    limits: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    by_kai: bool = False
    bound: bool = False
    wants_gpu: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, name)."""
        return self.facts.namespace, self.facts.name

    @property
    def reserves(self) -> bool:
        """Whether it only keeps a GPU for the pods that share it."""
        return self.facts.namespace in RESERVATION_NAMESPACES


def read(pod: bytes, node: str, allowed_labels: Sequence[str]) -> PodView:
    """From the JSON of a v1 Pod. allowed_labels: keys, or patterns with `*`, that leave the node.

    Raises agent.kube.apijson.Unreadable."""
    found = decode_pod(pod)
    meta, spec, status = found.metadata, found.spec, found.status or PodStatus()
    labels, annotations = meta.labels or {}, meta.annotations or {}
    phase = status.phase or ""
    requests = _requests(spec, annotations)
    containers = tuple(container.name for container in spec.containers or ())
    groups = _groups(labels)
    over = phase in _OVER
    facts = PodFacts(
        seq=0,
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        node=node,
        labels=_allowed(labels, allowed_labels),
        owners=_owners(meta.owner_references or ()),
        workload=_workload(meta.owner_references or (), labels),
        queue_ref=queue_ref(meta.namespace, spec.scheduler_name, labels, annotations),
        priority=spec.priority,
        requests=requests,
        created_ms=_ms(meta.creation_timestamp),
        scheduled_ms=_scheduled_ms(status),
        started_ms=_first_start_ms(status),
        ended_ms=_last_end_ms(status) if over else None,
        observed_ms=0,
    )
    return PodView(
        facts=facts,
        over=over,
        running=phase == "Running" and meta.deletion_timestamp is None,
        containers=containers,
        container_ids=_container_ids(status),
        config_hash=annotations.get(CONFIG_HASH, ""),
        fraction=requests.get(GPU_FRACTION, ""),
        memory_mib=requests.get(GPU_MEMORY, ""),
        groups=groups,
        limits=_limits(spec),
        by_kai=placed_by(spec.scheduler_name) == "kai",
        bound=bool(spec.node_name),
        wants_gpu=bool(requests or groups or spec.resource_claims),
    )


def _allowed(labels: Mapping[str, str], allowed: Sequence[str]) -> dict[str, str]:
    kept = sorted(key for key in labels if any(fnmatchcase(key, pattern) for pattern in allowed))
    return {key: labels[key][:MAX_LABEL_CHARS] for key in kept[:MAX_LABELS]}


def _owners(references: Sequence[OwnerReference]) -> tuple[Owner, ...]:
    """The controller first: it is the nearest of the chain, and of more the pod does not know."""
    ordered = sorted(references, key=lambda owner: not owner.controller)
    return tuple(Owner(kind=o.kind, name=o.name, uid=o.uid) for o in ordered[:1])


def _workload(references: Sequence[OwnerReference], labels: Mapping[str, str]) -> str:
    """A Deployment gives its name and a hash to its ReplicaSet, and the hash to the pods as a label."""
    for owner in _owners(references):
        template = labels.get(_TEMPLATE_HASH, "")
        if owner.kind == "ReplicaSet" and template and owner.name.endswith(f"-{template}"):
            return f"Deployment/{owner.name.removesuffix(f'-{template}')}"
        return f"{owner.kind}/{owner.name}"
    return ""


def _requests(spec: Spec, annotations: Mapping[str, str]) -> dict[str, str]:
    """GPU resources as the scheduler counts them: what runs together added up, or the largest init container.

    Source: kubernetes.io, "Sidecar Containers", resource sharing within containers."""
    together: dict[str, int] = {}
    before: dict[str, int] = {}
    odd: dict[str, str] = {}
    init = [c for c in spec.init_containers or () if c.restart_policy != "Always"]
    sidecars = [c for c in spec.init_containers or () if c.restart_policy == "Always"]
    for container in [*(spec.containers or ()), *sidecars, *init]:
        resources = container.resources or Resources()
        for name, quantity in {**(resources.limits or {}), **(resources.requests or {})}.items():
            text = str(quantity)
            if not name.startswith(_GPU_RESOURCES):
                continue
            if not (text.isascii() and text.isdigit() and len(text) < 10):
                odd[name] = text[:64]
            elif container in init:
                before[name] = max(before.get(name, 0), int(text))
            else:
                together[name] = together.get(name, 0) + int(text)
    found = {name: str(max(together.get(name, 0), before.get(name, 0))) for name in together.keys() | before.keys()}
    declared = {key: annotations[key][:64] for key in (GPU_FRACTION, GPU_MEMORY) if annotations.get(key)}
    return dict(sorted({**{k: v for k, v in found.items() if v != "0"}, **odd, **declared}.items()))


def _limits(spec: Spec) -> dict[str, dict[str, str]]:
    """Extended resources are not overcommitted, so a request without a limit is one; neither can be changed later."""
    found: dict[str, dict[str, str]] = {}
    for container in (*(spec.init_containers or ()), *(spec.containers or ())):
        resources = container.resources or Resources()
        asked = {**(resources.requests or {}), **(resources.limits or {})}
        found[container.name] = {key: str(value)[:64] for key, value in asked.items() if key.startswith(_GPU_RESOURCES)}
    return found


def _groups(labels: Mapping[str, str]) -> tuple[str, ...]:
    """One group per shared GPU; a pod on several has one label for each."""
    several = sorted(value for key, value in labels.items() if key.startswith(f"{GPU_GROUP}/"))
    return tuple(several) or ((labels[GPU_GROUP],) if labels.get(GPU_GROUP) else ())


def _container_ids(status: PodStatus) -> dict[str, str]:
    """`containerd://9b30...` is told from others by what comes behind the runtime."""
    statuses = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
    return {s.container_id.rpartition("//")[2]: s.name for s in statuses if s.container_id}


def _scheduled_ms(status: PodStatus) -> int | None:
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "True":
            return _ms(condition.last_transition_time)
    return None


def _first_start_ms(status: PodStatus) -> int | None:
    """When its first container ran; one that restarted keeps its last start but one in last_state."""
    states = [state for c in status.container_statuses or () for state in (c.state, c.last_state) if state]
    instants = [instant for state in states for instant in (state.running, state.terminated) if instant]
    return min((ms for instant in instants if (ms := _ms(instant.started_at)) is not None), default=None)


def _last_end_ms(status: PodStatus) -> int | None:
    ends = [c.state.terminated for c in status.container_statuses or () if c.state and c.state.terminated]
    return max((ms for end in ends if (ms := _ms(end.finished_at)) is not None), default=None)


def _ms(at: datetime | None) -> int | None:
    """None also for the zero time Go writes for "never"."""
    if at is None or at.tzinfo is None or at.year < 1971:
        return None
    return round(at.timestamp() * 1000)
