"""Objects of Kueue as that program and its administrators write them."""

from __future__ import annotations

from typing import Any

import yaml

from fairshare.schedulers.kueue.kinds import CLUSTER_QUEUES, LOCAL_QUEUES
from gputally.kubernetes.objects import CONFIG_MAP
from tests.fairshare.builders import object_of

KUEUE = "kueue.x-k8s.io/v1beta2"
V1BETA2 = {"apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration"}
V1BETA1 = {"apiVersion": "config.kueue.x-k8s.io/v1beta1", "kind": "Configuration"}
STRATEGIES = "[LessThanOrEqualToFinalShare, LessThanInitialShare]"
ACTIVE = {
    "type": "Active",
    "status": "True",
    "reason": "Ready",
    "message": "",
    "lastTransitionTime": "2026-11-01T00:00:00Z",
}


def cluster_queue(**more: Any) -> dict[str, Any]:
    """Build a ClusterQueue as Kueue writes it while fair sharing is off."""
    resources = [{"name": "nvidia.com/gpu", "nominalQuota": "8"}]
    groups = [{"coveredResources": ["nvidia.com/gpu"], "flavors": [{"name": "h200", "resources": resources}]}]
    spec = {"cohortName": "ml", "resourceGroups": groups, **more.pop("spec", {})}
    status = {"conditions": [ACTIVE], **more.pop("status", {})}
    return object_of(CLUSTER_QUEUES[0], "a", spec, status)


def configured(document: object) -> dict[str, Any]:
    data = {"controller_manager_config.yaml": yaml.safe_dump(document)}
    return {**object_of(CONFIG_MAP, "kueue-manager-config", namespace="kueue-system"), "data": data}


def local_queue(**spec: Any) -> dict[str, Any]:
    return object_of(LOCAL_QUEUES[0], "x", {"clusterQueue": "a", **spec})


SHOWN = {"status": {"fairSharing": {"weightedShare": 0}}}
ON = {**V1BETA2, "fairSharing": {"preemptionStrategies": ["LessThanInitialShare"]}}
SCOPED = {"spec": {"admissionScope": {"admissionMode": "UsageBasedAdmissionFairSharing"}}}
