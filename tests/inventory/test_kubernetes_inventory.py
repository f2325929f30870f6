"""The inventory over an API server: trimmed, paged, resumable, with the schedulers' queues and cohorts."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from accountant.inventory.kubernetes_inventory import ClusterInventory
from accountant.inventory.pod_owners import MANY
from accountant.ledger.protocols import Down, JobKey, NamespaceFacts, NodeFacts
from accountant.runtime.job_and_task_metrics import FunctionCollector, inventory_metrics
from agent.wire import Owner, PodFacts
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterUnavailable, VersionGone
from gputally.base.pod_stop import LONGEST_MESSAGE, PodStop, bounded
from gputally.kubernetes.list_watch import PAGE, PAUSE_SECONDS, NamedObject, Reflector
from gputally.kubernetes.scheduler_plugins import schedulers
from tests.inventory.memory_api_server import UNREACHABLE, FakeApi, node, owner, pod, refs, thing
from tests.plugin_cases import plugin_cases

CREATED = 1_790_812_800_000  # 2026-10-01T00:00:00Z


def pods(inventory: ClusterInventory, clock: VirtualClock, *, taken: bool = True) -> dict[str, PodFacts]:
    facts = inventory.read(clock.wall_ms())
    if taken:
        inventory.taken()
    return {fact.name: fact for _, fact in facts.pods}


def test_a_gpu_pod_with_its_whole_chain(api, inventory, clock):
    api.put("CronJob", owner("CronJob", "train"))
    api.put("Job", owner("Job", "train-1", above=("batch/v1", "CronJob", "train")))
    state = {
        "phase": "Running",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-10-01T00:05:00Z"}],
        "containerStatuses": [{"name": "main", "state": {"running": {"startedAt": "2026-10-01T00:06:00Z"}}}],
    }
    owners = [("batch/v1", "Job", "train-1")]
    api.put("Pod", pod("train-1-x", owners=owners, gpus=4, labels={"secret": "s"}, status=state))
    api.put("Pod", pod("web", gpus=0))
    inventory.sync()
    found = pods(inventory, clock)
    assert found == {
        "train-1-x": PodFacts(
            seq=0, uid="uid-vision-train-1-x", namespace="vision", name="train-1-x", node="n1",
            owners=(Owner("Job", "train-1", "Job-vision-train-1"), Owner("CronJob", "train", "CronJob-vision-train")),
            workload="CronJob/train", requests={"nvidia.com/gpu": "4"}, created_ms=CREATED,
            scheduled_ms=CREATED + 300_000, started_ms=CREATED + 360_000, observed_ms=clock.wall_ms(),
        )
    }  # fmt: skip
    assert pods(inventory, clock) == {}


TWO_GPUS = {"nvidia.com/gpu": "2"}


@pytest.mark.parametrize(
    "asked",
    [
        {"spec": {"containers": [{"name": "a", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}]}},
        {"spec": {"containers": [{"name": "a", "resources": {"requests": {"amd.com/gpu": "1"}}}]}},
        {"spec": {"containers": [{"name": "a"}], "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}]}},
        *({"gpus": 0, "annotations": {one.shares.fraction: "0.5"}} for one in schedulers().values() if one.shares),
        {"gpus": 0, "annotations": {"nvidia.com/container.a.gpu-memory.request": "20Gi"}},
        {"spec": {"containers": [], "initContainers": [{"name": "i", "resources": {"limits": TWO_GPUS}}]}},
    ],
)
def test_every_way_of_asking_for_a_gpu(api, inventory, clock, asked):
    api.put("Pod", pod("p", **asked))
    inventory.sync()
    assert set(pods(inventory, clock)) == {"p"}


def test_changes_come_by_the_watch_and_a_deleted_pod_has_ended(api, inventory, clock):
    inventory.sync()
    api.put("Pod", pod("a"))
    api.put("Pod", pod("b"))
    inventory.follow()
    assert set(pods(inventory, clock)) == {"a", "b"}
    clock.advance(5_000)
    api.drop("Pod", "a")
    inventory.follow()
    ended = pods(inventory, clock)
    assert {name: fact.ended_ms for name, fact in ended.items()} == {"a": clock.wall_ms()}
    assert sum(request.startswith("GET /api/v1/pods") for request in api.requests) == 1


ONE, LATER = "2026-10-01T01:00:00Z", "2026-10-01T01:00:30Z"
ONE_MS = CREATED + 3_600_000


def condition(kind: str, reason: str, message: str = "", status: str = "True") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": ONE}


def exited(code: int, reason: str, name: str = "main", at: str = LATER) -> dict[str, Any]:
    return {"name": name, "state": {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at}}}


FOR_OTHERS = "default-scheduler: preempting to accommodate a higher priority pod"
STOPS: dict[str, tuple[dict[str, Any], dict[str, Any], PodStop | None]] = {
    "by its scheduler": (
        {"conditions": [condition("DisruptionTarget", "PreemptionByScheduler", "for nlp/eval")]}, {},
        PodStop("preempted", "kai-scheduler", "PreemptionByScheduler", "for nlp/eval", ONE_MS),
    ),
    "by its scheduler, and it obeyed": (
        {"phase": "Failed", "conditions": [condition("DisruptionTarget", "PreemptionByScheduler")],
         "containerStatuses": [exited(143, "Error")]},
        {"deletionTimestamp": LATER, "deletionGracePeriodSeconds": 30},
        PodStop("preempted", "kai-scheduler", "PreemptionByScheduler", "", ONE_MS),
    ),
    "by its scheduler, and it saved its work and ended well": (
        {"phase": "Succeeded", "conditions": [condition("DisruptionTarget", "PreemptionByScheduler")],
         "containerStatuses": [exited(0, "Completed")]},
        {"deletionTimestamp": LATER, "deletionGracePeriodSeconds": 30},
        PodStop("preempted", "kai-scheduler", "PreemptionByScheduler", "", ONE_MS),
    ),
    "deleted, and it saved its work and ended well": (
        {"phase": "Succeeded", "containerStatuses": [exited(0, "Completed")]},
        {"deletionTimestamp": LATER, "deletionGracePeriodSeconds": 30}, PodStop("deleted", at_ms=ONE_MS),
    ),
    "not at all: it ended well, and was deleted with its node later": (
        {"phase": "Succeeded", "conditions": [condition("DisruptionTarget", "DeletionByTaintManager")],
         "containerStatuses": [exited(0, "Completed", at="2026-10-01T00:59:59Z")]}, {"deletionTimestamp": ONE}, None,
    ),
    "not at all: the eviction was called off, and it ended well": (
        {"phase": "Succeeded", "conditions": [condition("DisruptionTarget", "PreemptionByScheduler")],
         "containerStatuses": [exited(0, "Completed")]}, {}, None,
    ),
    "by another scheduler than its own": (
        {"conditions": [condition("DisruptionTarget", "PreemptionByScheduler", FOR_OTHERS)]}, {},
        PodStop("preempted", "default-scheduler", "PreemptionByScheduler", FOR_OTHERS, ONE_MS),
    ),
    "called off": (
        {"conditions": [condition("DisruptionTarget", "PreemptionByScheduler", status="False")]}, {}, None,
    ),
    "by the eviction API": (
        {"conditions": [condition("DisruptionTarget", "EvictionByEvictionAPI", "Eviction API: evicting")]}, {},
        PodStop("evicted", "eviction API", "EvictionByEvictionAPI", "Eviction API: evicting", ONE_MS),
    ),
    "because its node is gone": (
        {"conditions": [condition("DisruptionTarget", "DeletionByTaintManager")]}, {},
        PodStop("evicted", "taint manager", "DeletionByTaintManager", "", ONE_MS),
    ),
    "for a reason of a newer Kubernetes": (
        {"conditions": [condition("DisruptionTarget", "ByTheMoon")]}, {},
        PodStop("evicted", "", "ByTheMoon", "", ONE_MS),
    ),
    "by another condition": ({"conditions": [condition("example.com/Sad", "Rain")]}, {}, None),
    "by the kubelet": (
        {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}, {},
        PodStop("evicted", "kubelet", "Evicted", "The node was low on resource: memory."),
    ),
    "by an error of its own": (
        {"phase": "Failed", "containerStatuses": [exited(0, "Completed", "side", ONE), exited(137, "OOMKilled")]}, {},
        PodStop("failed", "", "OOMKilled", "container main ended with exit code 137", ONE_MS + 30_000),
    ),
    "by an error of its own, and its node went later": (
        {"phase": "Failed", "conditions": [condition("DisruptionTarget", "DeletionByTaintManager")],
         "containerStatuses": [exited(1, "Error", at="2026-10-01T00:50:00Z")]}, {"deletionTimestamp": ONE},
        PodStop("failed", "", "Error", "container main ended with exit code 1", ONE_MS - 600_000),
    ),
    "deleted": (
        {"phase": "Failed", "containerStatuses": [exited(143, "Error")]},
        {"deletionTimestamp": LATER, "deletionGracePeriodSeconds": 30}, PodStop("deleted", at_ms=ONE_MS),
    ),
    "deleted, with a grace period longer than time itself": (
        {"phase": "Failed", "containerStatuses": [exited(143, "Error")]},
        {"deletionTimestamp": "1734-05-01T00:00:00Z", "deletionGracePeriodSeconds": 2**63 - 1}, PodStop("deleted"),
    ),
    "by itself, and well": (
        {"phase": "Succeeded", "containerStatuses": [exited(0, "Completed")]}, {"deletionTimestamp": LATER}, None,
    ),
    "restarted in place": (
        {"phase": "Running", "containerStatuses": [{"name": "main", "lastState": {"terminated": {"exitCode": 1}}}]},
        {}, None,
    ),
    "with texts of any length and content": (
        {"conditions": [condition("DisruptionTarget", "R" * 9_000, "<b>" * 9_000 + "\u202e\n")]}, {},
        bounded(PodStop("evicted", "", "R" * 9_000, "<b>" * 9_000 + "\u202e\n", ONE_MS)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", STOPS)
def test_a_pods_status_says_by_whom_it_was_stopped_also_after_it_is_gone(api, inventory, clock, how):
    status, metadata, stop = STOPS[how]
    inventory.sync()
    stopped = pod("a", scheduler="kai-scheduler", status={"phase": "Running", **status})
    stopped["metadata"] |= metadata
    api.put("Pod", stopped)
    inventory.follow()
    assert pods(inventory, clock)["a"].stop == stop
    api.drop("Pod", "a")
    inventory.follow()
    assert pods(inventory, clock)["a"].stop == stop
    assert stop is None or len(stop.reason) + len(stop.message) <= 253 + LONGEST_MESSAGE


def test_an_author_of_a_pod_does_not_say_by_whom_it_was_stopped(api, inventory, clock):
    claimed = {"DisruptionTarget": "True", "reason": "PreemptionByScheduler"}
    api.put("Pod", pod("a", labels=claimed, annotations=claimed, spec={"conditions": [claimed]}))
    inventory.sync()
    assert pods(inventory, clock)["a"].stop is None


def test_what_was_not_taken_is_told_again(api, inventory, clock):
    api.put("Pod", pod("a"))
    inventory.sync()
    assert set(pods(inventory, clock, taken=False)) == {"a"}
    api.put("Pod", pod("b"))
    inventory.follow()
    assert set(pods(inventory, clock)) == {"a", "b"}
    assert pods(inventory, clock) == {}


def test_a_list_that_breaks_off_goes_on_at_its_page(api, inventory, clock):
    for number in range(3 * PAGE):
        api.put("Pod", pod(f"p-{number:04}"))
    api.trouble = [None, None, None, None, UNREACHABLE]  # namespaces, nodes, two pages of pods
    with pytest.raises(ClusterUnavailable):
        inventory.sync()
    assert not inventory.synced
    assert pods(inventory, clock) == {}
    before = len(api.requests)
    inventory.sync()
    assert sum(request.startswith("GET /api/v1/") for request in api.requests[before:]) == 1
    assert len(pods(inventory, clock)) == 3 * PAGE


def test_a_list_whose_token_is_gone_begins_again(api, inventory, clock):
    for number in range(2 * PAGE):
        api.put("Pod", pod(f"p-{number:04}"))
    api.trouble = [None, None, None, UNREACHABLE]
    with pytest.raises(ClusterUnavailable):
        inventory.sync()
    api.drop("Pod", "p-0003")
    api.forget()
    inventory.sync()
    assert len(pods(inventory, clock)) == 2 * PAGE - 1


def test_after_410_what_is_missing_has_ended_and_nothing_else_is_told_again(api, inventory, clock):
    api.put("Pod", pod("a"))
    api.put("Pod", pod("b"))
    inventory.sync()
    pods(inventory, clock)
    api.drop("Pod", "a")
    api.put("Pod", pod("c"))
    api.forget()
    clock.advance(60_000)
    with pytest.raises(VersionGone):
        inventory.follow()
    inventory.sync()
    for reflector in (inventory._nodes, inventory._pods):
        with pytest.raises(VersionGone):
            reflector.follow()
    inventory.sync()
    told = pods(inventory, clock)
    assert {name: fact.ended_ms is not None for name, fact in told.items()} == {"a": True, "c": False}


def test_owners_that_cannot_be_asked_now_are_asked_again(api, inventory, clock):
    api.put("Job", owner("Job", "j", above=("acme.io/v1", "Fleet", "f")))
    api.put("Fleet", owner("Fleet", "f"))
    api.put("Pod", pod("p", owners=[("batch/v1", "Job", "j")]))
    inventory.sync()
    api.trouble = [UNREACHABLE]
    assert pods(inventory, clock)["p"].workload == "Job/j"
    assert pods(inventory, clock)["p"].workload == "Fleet/f"  # of a kind that only discovery knows
    assert pods(inventory, clock) == {}


@pytest.mark.parametrize("kind", [("secret.io/v1", "Vault"), ("batch/v1", "Job")])
def test_an_owner_nobody_may_read_ends_the_chain(api, inventory, clock, kind):
    api.put("Pod", pod("p", owners=[(*kind, "x")]))
    inventory.sync()
    assert pods(inventory, clock)["p"].workload == f"{kind[1]}/x"


@pytest.mark.parametrize("listed", [True, False])
def test_owners_that_a_whole_list_does_not_name_are_gone_and_not_asked_for_one_by_one(api, inventory, clock, listed):
    """If the list is refused, each owner may still be requested by name."""
    api.put("CronJob", owner("CronJob", "nightly"))
    for number in range(3):
        api.put("Job", owner("Job", f"j-{number}", above=("batch/v1", "CronJob", "nightly")))
    for number in range(MANY + 5):
        api.put("Pod", pod(f"p-{number}", owners=[("batch/v1", "Job", f"j-{number}")]))
    if not listed:
        api.served.remove("Job")
    inventory.sync()
    before = len(api.requests)
    found = pods(inventory, clock)
    asked = [request for request in api.requests[before:] if "/apis/batch/v1/" in request and "/jobs" in request]
    assert len(asked) == (1 if listed else 1 + MANY + 5)
    named = {f"p-{number}": "CronJob/nightly" if number < 3 else f"Job/j-{number}" for number in range(MANY + 5)}
    assert {name: fact.workload for name, fact in found.items()} == named


def test_owners_in_a_circle_end(api, inventory, clock):
    api.put("Job", owner("Job", "a", above=("batch/v1", "Job", "b")))
    api.put("Job", owner("Job", "b", above=("batch/v1", "Job", "a")))
    api.put("Pod", pod("p", owners=[("batch/v1", "Job", "a")]))
    inventory.sync()
    assert pods(inventory, clock)["p"].workload in ("Job/a", "Job/b")


def test_namespaces_say_who_pays_and_which_label_is_kept(api, inventory, clock):
    api.put("Namespace", {"metadata": {"name": "vision", "labels": {"team": "vision"}}})
    rule = {"gputally.dev/team-label": "who", "gputally.dev/teams": "nlp"}
    api.put("Namespace", {"metadata": {"name": "shared", "annotations": rule}})
    api.put("Pod", pod("p", labels={"who": "nlp", "private": "x"}))
    inventory.sync()
    facts = inventory.read(clock.wall_ms())
    assert facts.namespaces == (
        NamespaceFacts("prod", "shared", "", "who", ("nlp",)),
        NamespaceFacts("prod", "vision", "vision"),
    )
    assert facts.pods[0][1].labels == {"who": "nlp"}


def test_nodes_and_when_they_were_down(api, clock):
    known = NodeFacts("prod", "n3", pool="old", down=(Down(5, 9, "firmware"), Down(CREATED, None, "NotReady")))
    elsewhere = NodeFacts("edge", "n9")
    inventory = ClusterInventory(api, clock, "prod", [known, elsewhere])
    assert inventory.read(clock.wall_ms()).nodes == (NodeFacts("prod", "n3", pool="old", down=known.down[1:]),)
    api.put("Node", node("n1", ready=False))
    taint = {"key": "node.kubernetes.io/unschedulable", "timeAdded": "2026-10-01T00:20:00Z"}
    api.put("Node", node("n2", spec={"unschedulable": True, "taints": [taint]}))
    api.put("Node", node("cpu-only", labels={}, capacity={"cpu": "8"}))
    inventory.sync()
    n1, n2, n3 = inventory.read(clock.wall_ms()).nodes
    assert (n1.name, n1.pool, n1.capacity_type) == ("n1", "a3", "on-demand")
    assert n1.down == (Down(CREATED + 600_000, None, "NotReady"),)
    assert (n2.name, n2.down) == ("n2", (Down(CREATED + 1_200_000, None, "cordoned"),))
    # Gone while nobody looked.
    assert (n3.deleted_ms, n3.down) == (clock.wall_ms(), (Down(CREATED, clock.wall_ms(), "NotReady"),))


def test_a_node_of_the_same_name_is_another_machine(api, inventory, clock):
    first = node("n1")
    first["metadata"] |= {"uid": "u1", "creationTimestamp": "2026-10-01T00:00:00Z"}
    first["status"]["nodeInfo"] = {"bootID": "b1"}
    api.put("Node", first)
    inventory.sync()
    assert inventory.read(clock.wall_ms()).nodes[0].renewed_ms == ()
    clock.advance(3_600_000)
    second = node("n1")
    second["metadata"] |= {"uid": "u2", "creationTimestamp": "2026-10-01T00:30:00Z"}
    second["status"]["nodeInfo"] = {"bootID": "b2"}
    api.put("Node", second)
    inventory.follow()
    found = inventory.read(clock.wall_ms()).nodes[0]
    assert (found.uid, found.boot_id, len(found.renewed_ms)) == ("u2", "b2", 1)


@pytest.mark.parametrize("answer", [b"", b"<html>", b'{"items": 3}', b"[]"])
def test_an_answer_that_is_none_is_a_failure_not_a_defect(api, inventory, monkeypatch, answer):
    monkeypatch.setattr(api, "get", lambda *args, **kwargs: answer)
    with pytest.raises(ClusterUnavailable, match="unexpected answer of the API server"):
        inventory.sync()


@dataclass
class Crowd(FakeApi):
    """50,000 pods, of which a tenth use GPUs, in 500 jobs; encoded only when they are requested."""

    total: int = 50_000

    def _page(self, kind: str, query: Mapping[str, str], metadata_only: bool) -> bytes:
        if kind != "Pod":
            return super()._page(kind, query, metadata_only)
        begin = int(query.get("continue", "0"))
        items = [self._text(number) for number in range(begin, begin + PAGE)]
        more = f', "continue": "{begin + PAGE}"' if begin + PAGE < self.total else ""
        return f'{{"metadata": {{"resourceVersion": "7"{more}}}, "items": [{",".join(items)}]}}'.encode()

    def _text(self, number: int) -> str:
        text = _WITH_GPU if number % 10 == 0 else _WITHOUT
        return text.replace("NUMBER", str(number)).replace("JOB", str(number // 100))


def _written(gpus: int) -> str:
    one = pod("p-NUMBER", gpus=gpus, owners=[("batch/v1", "Job", "j-JOB")])
    one["metadata"]["managedFields"] = [{"manager": "m", "fieldsV1": {f"f:{n}": {} for n in range(30)}}]
    return json.dumps(one)


_WITH_GPU, _WITHOUT = _written(1), _written(0)


@pytest.mark.real  # of that size too dear for `make test`
def test_fifty_thousand_pods_cost_few_requests_and_little_memory(clock):
    api = Crowd()
    for number in range(500):
        api.put("Job", owner("Job", f"j-{number}"))
    inventory = ClusterInventory(api, clock, "prod")
    tracemalloc.start()
    inventory.sync()
    facts = inventory.read(clock.wall_ms())
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(facts.pods) == 5_000
    assert {fact.workload for _, fact in facts.pods} == {f"Job/j-{number}" for number in range(500)}
    # Pages, two other kinds, the jobs as one list; the schedulers' six kinds are not there, Kueue's four in two
    # versions.
    assert len(api.requests) == 50_000 / PAGE + 2 + 1 + 2 + 4 * 2
    assert held < 30 * 2**20
    assert peak < 40 * 2**20


def test_an_epoch_annotated_during_an_outage_is_dated_by_who_wrote_it(api, inventory, clock):
    """By its writer's managedFields entry, not by the restart an hour later; later writes of other managers do not
    count."""
    train = pod("train-0", gpus=4, annotations={"gputally.dev/epoch": "7"})
    train["metadata"]["managedFields"] = [
        {"manager": "kubelet", "operation": "Update", "time": "2026-10-01T00:50:00Z", "fieldsV1": {"f:status": {}}},
        {
            "manager": "train.py", "operation": "Update", "time": "2026-10-01T00:20:00Z", "fieldsType": "FieldsV1",
            "fieldsV1": {"f:metadata": {"f:annotations": {"f:gputally.dev/epoch": {}}}},
        },
    ]  # fmt: skip
    ahead = pod("ahead-0", gpus=4, annotations={"gputally.dev/epoch": "8"})
    ahead["metadata"]["managedFields"] = [{**train["metadata"]["managedFields"][1], "time": "2999-01-01T00:00:00Z"}]
    api.put("Pod", train)
    api.put("Pod", ahead)
    clock.advance(max(0, CREATED + 3_600_000 - clock.wall_ms()))
    inventory.sync()
    told = {one.epoch: one.at_ms for one in inventory.read(clock.wall_ms()).epochs}
    assert told == {7: CREATED + 1_200_000, 8: clock.wall_ms()}


def test_epochs_that_pods_annotate_are_told_once_under_the_name_of_their_job(api, inventory, clock):
    def annotated(epoch: str) -> None:
        owners = [("batch/v1", "Job", "train-1")]
        api.put("Pod", pod("train-1-x", owners=owners, gpus=4, annotations={"gputally.dev/epoch": epoch}))

    api.put("CronJob", owner("CronJob", "train"))
    api.put("Job", owner("Job", "train-1", above=("batch/v1", "CronJob", "train")))
    job = JobKey("prod", "vision", "CronJob/train")
    annotated("3")
    inventory.sync()
    first = clock.wall_ms()
    clock.advance(60_000)
    annotated("4@2026-10-01T00:30:00Z")
    api.trouble = [None, None, None]
    inventory.follow()
    told = inventory.read(clock.wall_ms()).epochs
    assert inventory.read(clock.wall_ms()).epochs == told, "told again until it is taken"
    inventory.taken()
    assert {(one.key, one.epoch, one.at_ms, one.who) for one in told} == {
        (job, 3, first, "pod vision/train-1-x"),
        (job, 4, CREATED + 1_800_000, "pod vision/train-1-x"),
    }
    assert inventory.read(clock.wall_ms()).epochs == ()
    for nonsense in ("-1", "3.5", "five", "9" * 40, "7@soon", "7@2999-01-01T00:00:00Z", ""):
        annotated(nonsense)
        inventory.follow()
        assert inventory.read(clock.wall_ms()).epochs == (), nonsense
        inventory.taken()


GROUPING = [(cases.PLACES[0], *cases.GROUP) for cases in plugin_cases("fairshare").values()]
"""A scheduler's name, and the kind, name, annotations of pods and reference of a group that names their queue."""


@pytest.mark.parametrize(("scheduler", "kind", "group", "annotations", "ref"), GROUPING)
def test_a_pod_group_says_more_than_a_label(api, inventory, clock, scheduler, kind, group, annotations, ref):
    """The scheduler uses it; on a pod of another scheduler it means nothing."""
    api.put(kind, thing(group, {"queue": "batch"}))
    label = {next(iter(pod_queue_keys(scheduler))): "mine"}
    api.put("Pod", pod("a", scheduler=scheduler, annotations=annotations))
    api.put("Pod", pod("b", scheduler=scheduler, annotations=annotations, labels=label))
    api.put("Pod", pod("c", annotations=annotations))
    api.put("Pod", pod("e", "other", scheduler=scheduler, annotations=annotations))
    inventory.sync()
    assert refs(inventory, clock) == {"a": ref, "b": ref, "c": "", "e": ""}


def pod_queue_keys(scheduler):
    """The labels in which a pod of this scheduler names its queue."""
    return next(
        one.pods.keys for one in schedulers().values() if one.pods and scheduler in (one.pods.scheduler_names or ())
    )


@pytest.mark.parametrize(("scheduler", "kind", "group", "annotations", "ref"), GROUPING)
def test_a_group_made_after_its_pod(api, inventory, clock, scheduler, kind, group, annotations, ref):
    prefix = ref.partition(":")[0]
    api.put("Pod", pod("a", scheduler=scheduler, annotations=annotations))
    api.put("Pod", pod("b"))
    inventory.sync()
    assert refs(inventory, clock) == {"a": "", "b": ""}
    api.put(kind, thing(group, {"queue": "batch"}))
    inventory.follow()
    assert refs(inventory, clock) == {"a": ref}
    api.put(kind, thing(group, {"queue": "moved"}))
    api.drop("Pod", "b")
    inventory.follow()
    assert refs(inventory, clock) == {"a": f"{prefix}:moved", "b": ""}
    api.drop(kind, group)
    api.drop("Pod", "a")
    inventory.follow()
    assert refs(inventory, clock).keys() == {"a"}


def test_how_old_what_is_known_is(api, inventory, clock):
    registry = CollectorRegistry()
    registry.register(FunctionCollector(partial(inventory_metrics, inventory, clock)))
    assert b"gputally_inventory_age_seconds{" not in generate_latest(registry)
    inventory.sync()
    clock.advance(90_000)
    api.trouble = [None, UNREACHABLE]
    with pytest.raises(type(UNREACHABLE)):
        inventory.follow()
    text = generate_latest(registry).decode()
    assert 'gputally_inventory_age_seconds{kind="namespaces"} 0.0' in text
    assert 'gputally_inventory_age_seconds{kind="pods"} 90.0' in text
    assert 'gputally_inventory_failures_total{kind="namespaces"} 0.0' in text


ONE_PAGE = json.dumps(
    {"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "n", "uid": "u", "resourceVersion": "7"}}]}
)


class Instantly(threading.Event):
    """Waits without passing time."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_objects_that_are_not_understood_are_counted_and_the_watch_goes_on(inventory, clock):
    stop, task = Instantly(), BackgroundTasks(VirtualClock(0)).add("watch")
    items = [{"metadata": {"name": name, "uid": name, "resourceVersion": "7"}} for name in ("n", "read", "changed")]

    class Api:
        def get(self, *_: object, **__: object) -> bytes:
            return json.dumps({"metadata": {"resourceVersion": "7"}, "items": items}).encode()

        def watch(self, _path: str, _query: Mapping[str, str], **_more: object) -> Iterator[bytes]:
            stop.set()
            return iter(())

    def keep(found: NamedObject) -> str:
        if found.metadata.name == "read":
            raise AttributeError("no spec")
        return found.metadata.name

    def changed(uid: str, _value: str | None) -> None:
        if uid == "changed":
            raise KeyError(uid)

    reflector = Reflector(Api(), "/api/v1/nodes", NamedObject, keep, changed)  # type: ignore[arg-type]
    reflector.run(stop, task)
    assert dict(reflector.values()) == {"n": "n", "changed": "changed"}
    assert reflector.unreadable().keys() == {"read", "changed"}
    assert (task.state().fault, reflector.failures) == (None, 0)
    inventory.sync()
    registry = CollectorRegistry()
    registry.register(FunctionCollector(partial(inventory_metrics, inventory, clock)))
    assert 'gputally_inventory_unreadable_objects{kind="pods"} 0.0' in generate_latest(registry).decode()


def test_a_watch_that_ends_at_once_is_not_begun_again_without_a_pause():
    waited: list[float | None] = []

    class Waiting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            if len(waited) == 3:
                self.set()
            return self.is_set()

    class Api:
        def get(self, *_: object, **__: object) -> bytes:
            return ONE_PAGE.encode()

        def watch(self, _path: str, _query: Mapping[str, str], **_more: object) -> Iterator[bytes]:
            return iter(())

    now_ms = [0]
    reflector = Reflector(Api(), "/api/v1/nodes", NamedObject, lambda one: one, now_ms=lambda: now_ms[0])  # type: ignore[arg-type]
    assert reflector.behind() == "nodes have not been read yet"
    reflector.run(Waiting())
    assert waited == [PAUSE_SECONDS] * 3
    assert reflector.behind() is None
    now_ms[0] = 601_000
    assert reflector.behind() == "nodes were last read 601 s ago"


class Pauses(threading.Event):
    """A stop event that is set after some waits, and does not wait."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._most = most

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0)
        if len(self.seconds) == self._most:
            self.set()
        return self.is_set()


@pytest.mark.parametrize("what", ["page", "watch"])
def test_a_list_that_is_never_whole_backs_off_is_named_and_counted_and_its_values_grow_old(api, clock, what):
    """The second page of each list, or each watch, is answered with 410."""

    class Gone:
        requests = 0

        def get(self, path, query, *, metadata_only=False):
            self.requests += 1
            if "continue" in query:
                raise VersionGone(f"GET {path}: 410")
            more = {"continue": "more"} if what == "page" and ready else {}
            return json.dumps({"metadata": {"resourceVersion": "1", **more}, "items": []}).encode()

        def watch(self, path, query, *, metadata_only=False):
            raise VersionGone(f"WATCH {path}: 410")

    gone, ready = Gone(), False
    reflector = Reflector(gone, "/api/v1/pods", NamedObject, lambda obj: obj, now_ms=clock.monotonic_ms)
    reflector.prime()
    assert reflector.behind() is None
    reflector._version, ready = "", True
    stop = Pauses(6)
    reflector.run(stop)
    assert stop.seconds == [1, 2, 4, 8, 16, 30]
    assert reflector.failures == 6
    assert "410" in (reflector.fault or "")
    assert gone.requests < 40
    clock.advance(11 * 60_000)
    if what == "page":
        assert "410" in (reflector.behind() or ""), "a first page does not make the values current"


def test_a_list_that_names_its_own_page_as_the_next_one_ends():
    class Endless:
        def get(self, path, query, *, metadata_only=False):
            return b'{"metadata": {"resourceVersion": "1", "continue": "more"}, "items": []}'

    reflector = Reflector(Endless(), "/api/v1/pods", NamedObject, lambda obj: obj)
    with pytest.raises(ClusterUnavailable):
        reflector.sync()
    with pytest.raises(ClusterUnavailable):
        reflector.sync()
