"""What a job's pods are called, and how a gang is divided into pods: the same for the machines, whose agents see the
pods that run there, and for the API server, which has them all.

A job has one pod per node and attempt, so how many GPUs each pod has is decided when the scheduler places the gang.
Names, owners and namespaces look like those of a real cluster."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from uuid import NAMESPACE_URL, uuid5

from fairshare.simulator.simulation_model import WHOLE, JobKind, SimulatedJob, Slot
from gputally.demo.cluster_and_workload import SHARED

WORKLOADS: dict[JobKind, tuple[str, str]] = {
    "training": ("kubeflow.org/v1", "PyTorchJob"),
    "notebook": ("kubeflow.org/v1", "Notebook"),
    "short": ("batch/v1", "Job"),
    "inference": ("apps/v1", "Deployment"),
}
"""API version and kind of the object that a user submits."""


@lru_cache(1_024)
def uid_of(name: str) -> str:
    """Return a deterministic uid for a name."""
    return str(uuid5(NAMESPACE_URL, name))


def pod_uid(job: SimulatedJob, attempt: int, rank: int) -> str:
    """Return the uid of a job's pod. It differs for every attempt, because a rescheduled pod is a new pod."""
    return uid_of(f"{job.id}/{attempt}/{rank}")


def pod_name(job: SimulatedJob, rank: int) -> str:
    return f"{job.id}-{'worker-' if job.kind == 'training' else ''}{rank}"


def priority_of(job: SimulatedJob) -> int:
    """Return the priority of the job's pods: 100 and more is never preempted."""
    return 50 if job.preemptible else 100


def resource_of(shape: str) -> str:
    """Return the name of the resource that a pod requests for slots of this shape."""
    if shape == WHOLE:
        return "nvidia.com/gpu"
    return "nvidia.com/gpu.shared" if shape == SHARED else f"nvidia.com/mig-{shape}"


def slots_by_rank(slots: Iterable[Slot]) -> list[tuple[str, list[Slot]]]:
    """Return the node and the slots of each pod of a gang, in the order of their ranks."""
    nodes: dict[str, list[Slot]] = {}
    for slot in slots:
        nodes.setdefault(slot.node, []).append(slot)
    return sorted(nodes.items())
