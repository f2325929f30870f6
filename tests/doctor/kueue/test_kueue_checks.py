"""What the doctor finds of Kueue."""

from __future__ import annotations

from typing import Any

import pytest

from fairshare.schedulers.kueue.kinds import WORKLOADS
from gputally.doctor.rbac_checks import AccessRight, named_rights, needed_rights
from gputally.doctor.scheduler_checks import (
    guarantees,
    own_queues,
    targets,
    weights,
)
from gputally.kubernetes.mig_parts import NO_NODES
from tests.doctor.conftest import MemoryInspector
from tests.doctor.policies import policy
from tests.fairshare.builders import object_of
from tests.fairshare.kueue.object_cases import QUOTAS
from tests.fairshare.kueue.objects import (
    ON,
    SCOPED,
    SHOWN,
    STRATEGIES,
    V1BETA1,
    V1BETA2,
    cluster_queue,
    configured,
    local_queue,
)


@pytest.mark.parametrize(("objects", "ref", "reason", "lines"), [
    ([cluster_queue(), configured(V1BETA2)], "kueue:a", "FairSharingOff",
     f"`fairSharing: {{preemptionStrategies: {STRATEGIES}}}`"),
    ([cluster_queue(), configured({**V1BETA2, "fairSharing": {}})], "kueue:a", "ConfigurationRefused",
     f"`fairSharing: {{preemptionStrategies: {STRATEGIES}}}`"),
    ([cluster_queue(), configured({**V1BETA1, "fairSharing": {}})], "kueue:a", "FairSharingOff",
     "`fairSharing: {enable: true}`"),
    ([cluster_queue(**SHOWN), configured(V1BETA2)], "kueue:a", "RestartPending", "kubectl -n kueue-system"),
    ([cluster_queue(**SCOPED), local_queue(), configured(ON)], "kueue:ns/x", "AdmissionFairSharingOff",
     "`admissionFairSharing: {usageHalfLifeTime: 168h, usageSamplingInterval: 5m}`"),
    ([cluster_queue(), local_queue(), configured(ON)], "kueue:ns/x", "AdmissionFairSharingOff",
     "`admissionScope: {admissionMode: UsageBasedAdmissionFairSharing}`"),
])  # fmt: skip
def test_what_is_wrong_with_kueue_is_found_with_the_lines_to_write(
    objects: list[dict[str, Any]], ref: str, reason: str, lines: str
) -> None:
    given = policy({"name": "a", "deserved": 8, "refs": (ref,)})
    (found,) = weights(given, targets(MemoryInspector(objects), given)).findings
    assert f"({reason})" in found.what
    assert lines in found.remedy


def test_a_stopped_queue_and_a_quota_that_differs_are_warnings() -> None:
    given = policy({"name": "a", "deserved": 16, "refs": ("kueue:a",)})
    container = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    sets = [{"name": "main", "count": 2, "template": {"spec": {"containers": [container]}}}]
    waits = object_of(WORKLOADS[0], "w", {"queueName": "x", "podSets": sets})
    stopped = cluster_queue(**SHOWN, spec={"stopPolicy": "Hold"})
    objects = [stopped, local_queue(), waits, configured(ON)]
    (found,) = weights(given, targets(MemoryInspector(objects), given)).findings
    assert (found.severity, found.what) == ("warning", "kueue is not set up as the policy says (PolicyDiffers)")
    assert found.evidence == (
        "ClusterQueue a admits nothing (stopPolicy Hold): 8 GPUs that wait there are not counted; a: quota 8, policy 16"
    )


def test_its_own_quotas_are_more_than_the_cluster_has() -> None:
    (found,) = guarantees(None, 16, 16, own_queues(MemoryInspector(QUOTAS), NO_NODES), []).findings
    assert found.what == "kueue's own queues are guaranteed more GPUs than the cluster has"
    assert found.evidence == "32 guaranteed, 16 installed: cq 32"


def test_the_rights_asked_for_follow_the_policys_own_configmaps() -> None:
    named = policy({"name": "a", "refs": ("kueue:a",)}, targets={"kueue": {"config": "batch/kueue-config"}})
    right = AccessRight("", "configmaps", "get", "kueue-config")
    assert named_rights(named) == (right,)
    assert right in needed_rights("fairshare", {("", "configmaps")}, named=named_rights(named))
    assert named_rights(policy({"name": "a", "refs": ("kueue:a",)})) == (), "its own name for it needs no other right"
