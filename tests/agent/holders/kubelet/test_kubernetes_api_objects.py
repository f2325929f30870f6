"""A pod of the API server, reduced to what is metered and billed by."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.holders.kubelet import kubernetes_api_objects
from agent.holders.kubelet.kubernetes_api_objects import UnreadableObject
from agent.wire import Owner
from gputally.base.pod_stop import PodStop
from tests.agent.holders.kubelet.pods import UID, facts, pod_object, view
from tests.hypothesis_examples import examples

EIGHT = 1_790_841_600_000  # 2026-10-01T08:00:00Z


def test_the_facts_of_a_running_pod() -> None:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "7c1d", "controller": True}
    found = facts(labels={"fake.gputally.dev/queue": "vision"}, ownerReferences=[owner])
    assert (found.uid, found.namespace, found.name, found.node) == (UID, "vision", "train-0", "node-1")
    assert (found.owners, found.workload) == ((Owner("Job", "train", "7c1d"),), "Job/train")
    assert (found.queue_ref, found.priority, found.requests) == ("fake:vision", 100, {"nvidia.com/gpu": "1"})
    times = (found.created_ms, found.scheduled_ms, found.started_ms, found.ended_ms)
    assert times == (EIGHT, EIGHT + 1_000, EIGHT + 5_000, None)


def test_only_the_allowed_labels_leave_the_node() -> None:
    labels = {"team": "vision", "app.kubernetes.io/name": "train", "secret": "x", "app.kubernetes.io/part-of": "y"}
    assert view("team", "app.kubernetes.io/*", labels=labels).facts.labels == {
        "app.kubernetes.io/name": "train",
        "app.kubernetes.io/part-of": "y",
        "team": "vision",
    }
    assert view(labels=labels).facts.labels == {}


def test_a_deployment_is_told_from_its_replica_set() -> None:
    owner = {"kind": "ReplicaSet", "name": "api-7d9c", "uid": "1", "controller": True}
    other = {"kind": "Thing", "name": "t", "uid": "2"}
    found = facts(labels={"pod-template-hash": "7d9c"}, ownerReferences=[other, owner])
    assert (found.workload, found.owners) == ("Deployment/api", (Owner("ReplicaSet", "api-7d9c", "1"),))
    assert facts(ownerReferences=[owner]).workload == "ReplicaSet/api-7d9c"


def container(name: str, quantity: Any, resource: str = "nvidia.com/gpu", **more: Any) -> dict[str, Any]:
    return {"name": name, "resources": {"limits": {resource: quantity, "cpu": "2"}}, **more}


def test_gpus_are_counted_as_the_scheduler_counts_them() -> None:
    spec = {
        "containers": [container("a", "2"), container("b", "1"), container("c", "1", "nvidia.com/mig-1g.10gb")],
        "initContainers": [container("before", "4"), container("side", 1, restartPolicy="Always")],
    }
    assert facts(spec=spec).requests == {"nvidia.com/gpu": "4", "nvidia.com/mig-1g.10gb": "1"}
    spec["initContainers"] = [container("before", "5")]
    assert facts(spec=spec).requests["nvidia.com/gpu"] == "5"


def test_a_part_of_a_gpu_is_a_request_too() -> None:
    found = view(
        gpus=0, annotations={"fake.gputally.dev/fraction": "0.5"}, labels={"fake.gputally.dev/gpu-group": "g1"}
    )
    assert (found.facts.requests, found.fraction, found.groups) == (
        {"fake.gputally.dev/fraction": "0.5"},
        "0.5",
        ("g1",),
    )
    several = view(gpus=0, labels={"fake.gputally.dev/gpu-group/b": "b", "fake.gputally.dev/gpu-group/a": "a"})
    assert (several.groups, several.wants_gpu) == (("a", "b"), True)


def test_who_is_worth_telling() -> None:
    assert view().wants_gpu
    assert not view(gpus=0).wants_gpu
    assert view(gpus=0, spec={"resourceClaims": [{"name": "gpu"}]}).wants_gpu


def test_a_pod_that_ended_holds_nothing_and_says_when() -> None:
    ended = {"terminated": {"startedAt": "2026-10-01T08:00:05Z", "finishedAt": "2026-10-01T09:00:00Z"}}
    found = view(phase="Succeeded", status={"containerStatuses": [{"name": "main", "state": ended}]})
    assert (found.over, found.running) == (True, False)
    assert (found.facts.started_ms, found.facts.ended_ms) == (EIGHT + 5_000, EIGHT + 3_600_000)
    assert not view(deletionTimestamp="2026-10-01T09:00:00Z").running


def test_the_status_says_by_whom_a_pod_was_stopped_and_why() -> None:
    at = "2026-10-01T08:00:30Z"
    taken = {
        "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "for nlp/eval",
        "lastTransitionTime": at,
    }  # fmt: skip
    found = facts(status={"conditions": [taken]}, deletionTimestamp=at, deletionGracePeriodSeconds=30)
    assert found.stop == PodStop("preempted", "fake-scheduler", "PreemptionByScheduler", "for nlp/eval", EIGHT + 30_000)
    failed = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": at}
    found = facts(phase="Failed", status={"containerStatuses": [{"name": "main", "state": {"terminated": failed}}]})
    assert found.stop == PodStop("failed", "", "OOMKilled", "container main ended with exit code 137", EIGHT + 30_000)
    found = facts(deletionTimestamp=at, deletionGracePeriodSeconds=30)
    assert found.stop == PodStop("deleted", at_ms=EIGHT)
    assert facts().stop is None


@pytest.mark.parametrize("until", ["2026-10-01T08:00:30Z", "1734-05-01T00:00:00Z"])
def test_a_grace_period_of_any_length_leaves_the_facts_of_the_pod_and_when_it_was_deleted_is_unknown(
    until: str,
) -> None:
    """Its author chooses the period. A time out of range would have the accountant refuse all of the pod's facts."""
    assert facts(deletionTimestamp=until, deletionGracePeriodSeconds=2**63 - 1).stop == PodStop("deleted")


def test_a_container_that_restarted_began_with_its_first_run() -> None:
    statuses = [{
        "state": {"running": {"startedAt": "2026-10-01T08:30:00Z"}},
        "lastState": {"terminated": {"startedAt": "2026-10-01T08:00:05Z", "finishedAt": None}},
    }]  # fmt: skip
    assert facts(status={"containerStatuses": statuses}).started_ms == EIGHT + 5_000


def test_a_pending_pod_has_neither_start_nor_end() -> None:
    found = facts(phase="Pending", status={"containerStatuses": None, "conditions": []})
    assert (found.scheduled_ms, found.started_ms, found.ended_ms) == (None, None, None)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"metadata": {}}', b'{"metadata": {"uid": 1}}', b"\xff"])
def test_what_is_no_pod_is_unreadable(text: bytes) -> None:
    with pytest.raises(UnreadableObject):
        kubernetes_api_objects.read(text, "n", ())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda v: st.lists(v, max_size=2), max_leaves=4
)
places = st.lists(st.sampled_from(
    ["metadata", "spec", "status", "labels", "annotations", "containers", "resources", "limits", "uid", "phase",
     "conditions", "containerStatuses", "state", "creationTimestamp", "ownerReferences", "initContainers"]
), min_size=1, max_size=4)  # fmt: skip


@settings(max_examples=examples(50, 300))
@given(places, json_values)
def test_a_pod_with_anything_in_it_is_read_or_unreadable(path: list[str], value: Any) -> None:
    pod: Any = pod_object()
    here: Any = pod
    for key in path[:-1]:
        here = here.get(key) if isinstance(here, dict) else here[0] if isinstance(here, list) and here else None
    if isinstance(here, dict):
        here[path[-1]] = value
    with contextlib.suppress(UnreadableObject):
        kubernetes_api_objects.read(json.dumps(pod).encode(), "n", ("*",))


@settings(max_examples=examples(33, 200))
@given(st.binary(max_size=100))
def test_no_bytes_make_it_fail_in_another_way(data: bytes) -> None:
    with contextlib.suppress(UnreadableObject):
        kubernetes_api_objects.read(data, "n", ("*",))
