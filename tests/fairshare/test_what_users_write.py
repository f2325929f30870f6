"""What a user writes into an object speaks of that object alone, as in the table of docs/security.md."""

from __future__ import annotations

from fairshare.core.gpu_demand import GANG_LABEL, QUEUE_LABEL, SPOT_LABEL, read_pod
from fairshare.core.queues_and_weights import Gang
from fairshare.preemption.eviction import OPT_OUT, EvictionCheck
from fairshare.preemption.preemption_types import Victim
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import POD, Object
from tests.fairshare.builders import pod_object
from tests.fairshare.read_pods import pod_of
from tests.fairshare.scheduler_kinds import KINDS
from tests.plugin_cases import plugin_cases

SCHEDULERS = tuple(plugin_cases("fairshare").values())
OTHERS = "other-namespace"


def test_a_gang_of_another_namespace_is_joined_by_no_label_and_no_annotation() -> None:
    group = {"scheduling.k8s.io/group-name": f"{OTHERS}/g", "fake.gputally.dev/pod-group": f"{OTHERS}/g"}
    for scheduler in ("default-scheduler", "fake-scheduler", *(cases.PLACES[0] for cases in SCHEDULERS)):
        for metadata in (
            {"labels": {GANG_LABEL: f"{OTHERS}/g"}},
            {"annotations": group | {"kueue.x-k8s.io/workload": f"{OTHERS}/w"}},
            {"ownerReferences": [{"kind": "Job", "name": "j", "uid": "theirs", "controller": True}]},
        ):
            pod = pod_of(scheduler, **metadata)
            assert pod.gang == "" or pod.gang.split("/")[1] == "ns"
            assert pod.owner == "" or pod.owner.split("/")[1] == "ns"
    obj = pod_object("p")
    obj["spec"]["schedulingGroup"] = {"podGroupName": f"{OTHERS}/g"}
    pod = read_pod(obj)
    assert pod is not None
    assert pod.gang.split("/")[1] == "ns"


def test_a_label_chooses_the_queue_only_where_the_scheduler_has_none() -> None:
    labels = {QUEUE_LABEL: "b", "fake.gputally.dev/queue": "a"}
    assert pod_of("fake-scheduler", labels=labels).ref == "fake:a"
    assert pod_of(labels=labels).ref == "policy:b"


def test_hints_about_preemption_concern_the_pod_that_has_them() -> None:
    assert pod_of(labels={SPOT_LABEL: "true"}).spot
    for cases in (each for each in SCHEDULERS if each.PROTECTED):
        assert pod_of("fake-scheduler", annotations=cases.PROTECTED).disruptable
        assert not pod_of(cases.PLACES[0], annotations=cases.PROTECTED).disruptable
    never, other = pod_object("never", annotations={OPT_OUT: "never"}), pod_object("other")
    check = EvictionCheck(MemoryCluster(KINDS, [never, other]))
    refusals = {name: check.refusal(_victim(obj)) for name, obj in (("never", never), ("other", other))}
    assert refusals["never"] is not None
    assert refusals["other"] is None


def _victim(obj: Object) -> Victim:
    pod = read_pod(obj)
    assert pod is not None
    gang = Gang("a", POD, "ns", pod.name, pod.uid, 4.0, 4.0, 4.0, pods=(pod,))
    return Victim(gang, (pod,), 4.0, 0.0, True, "within quota", "a", "")
