"""Kueue's kinds."""

from __future__ import annotations

from gputally.kubernetes.objects import Kind

_GROUP = "kueue.x-k8s.io"
CLUSTER_QUEUES = tuple(Kind(f"{_GROUP}/{v}", "ClusterQueue", "clusterqueues") for v in ("v1beta2", "v1beta1"))
COHORTS = tuple(Kind(f"{_GROUP}/{v}", "Cohort", "cohorts") for v in ("v1beta2", "v1beta1"))
LOCAL_QUEUES = tuple(
    Kind(f"{_GROUP}/{v}", "LocalQueue", "localqueues", namespaced=True) for v in ("v1beta2", "v1beta1")
)
WORKLOADS = tuple(Kind(f"{_GROUP}/{v}", "Workload", "workloads", namespaced=True) for v in ("v1beta2", "v1beta1"))
FLAVORS = tuple(Kind(f"{_GROUP}/{v}", "ResourceFlavor", "resourceflavors") for v in ("v1beta2", "v1beta1"))
KINDS = (*CLUSTER_QUEUES, *COHORTS, *LOCAL_QUEUES, *WORKLOADS, *FLAVORS)
