"""What the accountant needs of an API server, and the few fields of its objects that it reads.

The port (`Api`) speaks bytes, so that an answer is decoded once, straight into these structs: fields that
nobody here reads are skipped, never built. No client library here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Protocol

import msgspec

from agent.units import MS_PER_SECOND

PAGE = 500
"""Objects asked for at a time."""


class Api(Protocol):
    """An API server. Every call raises accountant.errors.ClusterUnavailable or one of its kinds."""

    def get(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> bytes:
        """One answer. metadata_only: objects without spec and status."""
        ...

    def watch(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> Iterator[bytes]:
        """The lines of a watch, until the server ends it."""
        ...

    def post(self, path: str, body: Mapping[str, object]) -> bytes:
        """Create an object; the answer."""
        ...


class _Object(msgspec.Struct, frozen=True, rename="camel"):
    """Unknown fields are skipped; null stands for what is left out."""


class OwnerReference(_Object, frozen=True):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None


class ManagedFields(_Object, frozen=True):
    """Which fields somebody wrote, and when he last changed one of them."""

    time: datetime | None = None
    fields: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="fieldsV1")


class Metadata(_Object, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[OwnerReference] | None = None
    managed_fields: list[ManagedFields] | None = None


class ListMetadata(_Object, frozen=True):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class Named(_Object, frozen=True):
    """Any object, as far as its metadata go."""

    metadata: Metadata


class Condition(_Object, frozen=True):
    type: str
    status: str
    last_transition_time: datetime | None = None


class Taint(_Object, frozen=True):
    key: str
    time_added: datetime | None = None


class NodeSpec(_Object, frozen=True):
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
    containers: list[Container] = []
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
