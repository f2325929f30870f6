"""Jobs as pods: what the kubelet of each node would have to say about a gang that starts there.

One pod per node and attempt. Names, owners and namespaces are as an operator would see them; the queue
stands in `queue_ref`, so a pod is billed to its team even when it lived while nobody listened. Pure.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache
from uuid import NAMESPACE_URL, uuid5

from agent.model import Allocation
from agent.wire import Holder, Owner, PodFacts
from fairshare.simulator.cluster import WHOLE, Slot
from fairshare.simulator.events import Started, Stopped
from fairshare.simulator.jobs import Job, JobKind
from gputally.demo.cluster import REPLICAS, SHARED

_WORKLOAD: dict[JobKind, str] = {
    "training": "PyTorchJob",
    "notebook": "Notebook",
    "short": "Job",
    "inference": "Deployment",
}


_MEMORY_MIB = 80_000
"""About what a GPU has; a pod uses a third of it, more if it is busy."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One device of a pod. utilisation_ppm: of the GPU, or of its MIG instance."""

    allocation: Allocation
    utilisation_ppm: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Pod:
    node: str
    facts: PodFacts
    claims: tuple[Claim, ...]


def pod_uid(job: Job, attempt: int, node: str) -> str:
    """Deterministic, and another one for every attempt: a rescheduled pod is a new pod."""
    return _uid(f"{job.id}/{attempt}/{node}")


@lru_cache(1_024)
def _uid(name: str) -> str:
    """Asked for again when the pod stops, and for every pod of its owner."""
    return str(uuid5(NAMESPACE_URL, name))


def namespace_of(job: Job) -> str:
    """Every team has one namespace of its name."""
    return job.queue


def pods_of(
    start: Started, mig_uuids: dict[Slot, str], queued: frozenset[str], here: Container[str]
) -> tuple[Pod, ...]:
    """The pods of a gang on the nodes that are `here`, by node. mig_uuids: the instance behind a slot; queued: queues
    that exist."""
    nodes: dict[str, list[Slot]] = {}
    for slot in start.slots:
        nodes.setdefault(slot.node, []).append(slot)
    return tuple(
        _pod(start, rank, node, slots, mig_uuids, queued)
        for rank, (node, slots) in enumerate(sorted(nodes.items()))
        if node in here
    )


def pod_nodes(stop: Stopped) -> tuple[str, ...]:
    """The nodes a gang held something on."""
    return tuple(sorted({slot.node for slot in stop.slots}))


def _pod(
    start: Started, rank: int, node: str, slots: list[Slot], mig_uuids: dict[Slot, str], queued: frozenset[str]
) -> Pod:
    job = start.job
    uid = pod_uid(job, start.attempt, node)
    kind = _WORKLOAD[job.kind]
    name = f"{job.id}-{'worker-' if job.kind == 'training' else ''}{rank}"
    namespace = namespace_of(job)
    facts = PodFacts(
        seq=0,
        uid=uid,
        namespace=namespace,
        name=name,
        node=node,
        labels={"app.kubernetes.io/name": job.id},
        owners=(Owner(kind, job.id, _uid(job.id)),),
        workload=f"{kind}/{job.id}",
        queue_ref=f"kai:{job.queue}" if job.queue in queued else "",
        priority=50 if job.preemptible else 100,
        requests={_resource(slots[0].flavour.shape): str(len(slots))},
        created_ms=job.submit_ms,
        scheduled_ms=start.at_ms,
        started_ms=start.at_ms,
        observed_ms=start.at_ms,
    )
    holder = Holder("pod", uid, namespace, name, "main")
    return Pod(node, facts, tuple(_claim(holder, slot, job, mig_uuids.get(slot, "")) for slot in slots))


def _claim(holder: Holder, slot: Slot, job: Job, mig_uuid: str) -> Claim:
    ppm = job.utilisation_permille * 1_000
    memory = _MEMORY_MIB // 3 + job.utilisation_permille * _MEMORY_MIB // 2_000
    if slot.flavour.shape == SHARED:
        allocation = Allocation(slot.gpu, holder, sharing="time-slicing", sharing_replicas=REPLICAS)
        return Claim(allocation, ppm // REPLICAS, memory // REPLICAS)
    return Claim(Allocation(slot.gpu, holder, mig_uuid=mig_uuid), ppm, memory // 8 if mig_uuid else memory)


def _resource(shape: str) -> str:
    if shape == WHOLE:
        return "nvidia.com/gpu"
    return "nvidia.com/gpu.shared" if shape == SHARED else f"nvidia.com/mig-{shape}"
