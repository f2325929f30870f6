"""Defines the few fields of Kubernetes objects that the accountant reads.

The port (`Api`) speaks bytes, so that an answer is decoded once, straight into these structs: fields that are not read
are skipped, never built. No client library here.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.list_watch import Metadata, _Object


class Condition(_Object, frozen=True):
    type: str
    status: str
    last_transition_time: datetime | None = None


class Taint(_Object, frozen=True):
    key: str
    time_added: datetime | None = None


class NodeSpec(_Object, frozen=True):
    provider_id: str = msgspec.field(name="providerID", default="")
    unschedulable: bool | None = None
    taints: list[Taint] | None = None


class NodeStatus(_Object, frozen=True):
    capacity: dict[str, str] | None = None
    conditions: list[Condition] | None = None


class Node(_Object, frozen=True):
    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Resources(_Object, frozen=True):
    requests: dict[str, str] | None = None
    limits: dict[str, str] | None = None


class Container(_Object, frozen=True):
    name: str
    resources: Resources = Resources()


class PodSpec(_Object, frozen=True):
    node_name: str = ""
    scheduler_name: str = ""
    priority: int | None = None
    containers: list[Container] = []  # noqa: RUF012 - msgspec copies a default
    init_containers: list[Container] | None = None
    resource_claims: list[msgspec.Raw] | None = None


class Terminated(_Object, frozen=True):
    started_at: datetime | None = None
    finished_at: datetime | None = None


class Running(_Object, frozen=True):
    started_at: datetime | None = None


class ContainerState(_Object, frozen=True):
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Object, frozen=True):
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodStatus(_Object, frozen=True):
    phase: str = ""
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None


class Pod(_Object, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class GroupSpec(_Object, frozen=True):
    queue: str = ""


class GroupQueue(_Object, frozen=True):
    """A PodGroup of KAI or Volcano."""

    metadata: Metadata
    spec: GroupSpec = GroupSpec()


class LocalQueueSpec(_Object, frozen=True):
    cluster_queue: str = ""


class LocalQueue(_Object, frozen=True):
    metadata: Metadata
    spec: LocalQueueSpec = LocalQueueSpec()


class ClusterQueueSpec(_Object, frozen=True):
    """cohort: as v1beta1 calls it."""

    cohort_name: str = ""
    cohort: str = ""


class ClusterQueue(_Object, frozen=True):
    metadata: Metadata
    spec: ClusterQueueSpec = ClusterQueueSpec()


class CohortSpec(_Object, frozen=True):
    parent_name: str = ""


class Cohort(_Object, frozen=True):
    """A Cohort of Kueue; one that is only a name in its ClusterQueues has no object."""

    metadata: Metadata
    spec: CohortSpec = CohortSpec()


class WorkloadSpec(_Object, frozen=True):
    queue_name: str = ""


class Admission(_Object, frozen=True):
    cluster_queue: str = ""


class WorkloadStatus(_Object, frozen=True):
    admission: Admission | None = None


class QueueWorkload(_Object, frozen=True):
    """A Workload of Kueue."""

    metadata: Metadata
    spec: WorkloadSpec = WorkloadSpec()
    status: WorkloadStatus = WorkloadStatus()


def milliseconds(at: datetime | None) -> int | None:
    """UTC milliseconds; None stays None."""
    return None if at is None else round(at.timestamp() * MS_PER_SECOND)
