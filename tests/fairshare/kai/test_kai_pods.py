"""What KAI's scheduler reads of pods: queues, gangs, and parts of GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from fairshare.core.gpu_demand import GANG_LABEL, QUEUE_LABEL, read_pod, shared_gpus
from fairshare.schedulers.kai.adapter import KaiAdapter
from fairshare.schedulers.kai.plugin import SCHEDULER
from gputally.kubernetes.objects import GPU, PRIORITY_CLASS
from gputally.kubernetes.pod_queue_labels import queue_ref
from tests.fairshare.builders import object_of, plain_pod, pod_object, read_plain_pod
from tests.fairshare.conftest import Make
from tests.fairshare.kai.objects import kai_policy, pod_group, queue_object

KAI = "kai-scheduler"
SHARES = SCHEDULER.shares
assert SHARES is not None


def test_shared_gpus_of_kai_count_by_their_fraction() -> None:
    assert shared_gpus({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "2"}, SHARES) == 1.0
    assert shared_gpus({}, SHARES) == 0
    assert shared_gpus({"gpu-fraction": "1e308"}, SHARES) == 0  # no cluster has so many, and their sum would overflow
    assert shared_gpus({"gpu-fraction": "1e300", "gpu-fraction-num-devices": "1e300"}, SHARES) == 0
    shares = {"gpu-fraction": "0.25"}
    assert read_plain_pod(gpu=None, annotations=shares, scheduler=KAI).gpus == 0.25
    assert read_plain_pod(annotations=shares).gpus == 2  # no scheduler reads it there: its whole GPUs are its own


def test_memory_that_kai_reads_for_a_container_is_a_request() -> None:
    request = {"nvidia.com/container.main.gpu-memory.request": "20Gi"}
    found = read_plain_pod(gpu=None, annotations={**request, "gpu-fraction-num-devices": "2"}, scheduler=KAI)
    assert (found.memory_mib, found.shares) == (40_960, True)
    assert read_plain_pod(gpu=None, annotations={**request, "gpu-memory": "30000"}, scheduler=KAI).memory_mib == 30_000
    assert read_pod(plain_pod(gpu=None, annotations=request)) is None  # no other scheduler reads it


@pytest.mark.parametrize(
    ("scheduler", "ref", "gang"),
    [
        ("kai-scheduler", "kai:vision", "PodGroup/ns/k"),
        ("runai-scheduler", "kai:vision", "PodGroup/ns/k"),
        ("default-scheduler", "policy:own", "Gang/ns/g"),
    ],
)
def test_a_queue_and_a_gang_count_only_where_kai_places(scheduler: str, ref: str, gang: str) -> None:
    labels = {"kai.scheduler/queue": "vision", QUEUE_LABEL: "own", GANG_LABEL: "g"}
    pod = read_plain_pod(labels=labels, annotations={"pod-group-name": "k"}, scheduler=scheduler)
    assert (pod.ref, pod.gang) == (ref, gang)


def test_kais_pod_groups_are_gangs_with_an_elastic_surplus(seen_of: Make) -> None:
    def group(name: str, queue: str, **spec: Any) -> dict[str, Any]:
        return pod_group(name, queue, spec=spec, creationTimestamp="2026-10-01T00:00:00Z")

    running = group("run", "a", minMember=1, priorityClassName="build")
    running["status"] = {"resourcesStatus": {"allocated": {GPU: "4"}, "requested": {GPU: "4"}}}
    waiting = group("wait", "a", minMember=3)
    marks = {"labels": {"kai.scheduler/queue": "a"}, "annotations": {"pod-group-name": "wait"}, "scheduler": KAI}
    pods = [read_plain_pod(f"w{i}", **marks) for i in range(4)]
    build = {**object_of(PRIORITY_CLASS, "build"), "value": 100}
    objects = [queue_object("a"), running, waiting, group("foreign", "stranger", minMember=1), build]
    observation = seen_of(KaiAdapter(), kai_policy([{"name": "a", "refs": ["kai:a"]}]), objects, pods)
    assert [(g.name, g.requested, g.allocated, g.minimum, g.preemptible) for g in observation.gangs] == [
        ("run", 4.0, 4.0, 4.0, False),
        ("wait", 8.0, 0.0, 6.0, True),
    ]


@pytest.mark.parametrize("name", ["gpu-fraction", "gpu-memory", "gpu-fraction-num-devices"])
@pytest.mark.parametrize("text", ["1ki", "1e308", "٣", "-1"])
def test_no_annotation_of_a_pod_ends_its_reading(name: str, text: str) -> None:
    pod = pod_object("p", gpus=0, annotations={"gpu-fraction": "0.5", name: text})
    pod["spec"]["schedulerName"] = KAI
    read = read_pod(pod)
    assert read is None or read.gpus <= 1


@pytest.mark.parametrize(
    ("scheduler", "labels", "ref"),
    [
        ("runai-scheduler", {"runai/queue": "vision"}, "kai:vision"),
        ("kai-scheduler", {"kai.scheduler/queue": ""}, ""),
        ("default-scheduler", {"kai.scheduler/queue": "vision"}, ""),
    ],
)
def test_a_label_counts_on_pods_of_both_names(scheduler: str, labels: dict[str, str], ref: str) -> None:
    assert queue_ref("ns", scheduler, labels, {}) == ref
