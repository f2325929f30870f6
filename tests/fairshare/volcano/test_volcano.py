"""Volcano: its queues, the value that each mode writes for its plugin, and the condition if no plugin reads it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from fairshare.controller.control_loop import Controller
from fairshare.controller.weight_writer import adopt, advice, release_weights, write_weights
from fairshare.core import scheduler_queue_objects
from fairshare.core.gpu_demand import read_member, read_pod
from fairshare.core.queues_and_weights import ALWAYS_S, DivisionProblem, QueueClaim, TargetQueue
from fairshare.laws.division import divide_above
from fairshare.schedulers.volcano.adapter import COOLDOWN, HIERARCHY, HIERARCHY_WEIGHTS, VolcanoAdapter
from fairshare.schedulers.volcano.kinds import COMMAND, JOB, POD_GROUP, QUEUE
from fairshare.targets.weight_plan import Apply, look_at, write_order
from fairshare.targets.whole_stop import PREEMPTION
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, GPU, POD, Cluster
from tests.fairshare.aliases import ALIASES
from tests.fairshare.builders import node_object, object_of, pod_object, policy_of
from tests.fairshare.conftest import NOW_MS, Make
from tests.fairshare.observations import condition
from tests.fairshare.scheduler_kinds import KINDS
from tests.fairshare.volcano.objects import volcano

LATER_MS, BEFORE = 1_893_456_000_000, "2029-12-31T12:00:00Z"
"""Later than any creation time of a real API server."""


def _queue(
    name: str, *, annotations: dict[str, str] | None = None, allocated: str = "0", **spec: Any
) -> dict[str, Any]:
    more = {"annotations": annotations} if annotations else {}
    return object_of(QUEUE, name, spec, {"allocated": {GPU: allocated}}, **more)


def _group(name: str, queue: str, *, least: int, member: int = 1, **metadata: Any) -> dict[str, Any]:
    spec = {"queue": queue, "minMember": member, "minResources": {GPU: str(least)}}
    return object_of(POD_GROUP, name, spec, **metadata)


def _policy(mode: str, **options: Any) -> Any:
    shares = {"eng": {"deserved": 4, "weight": 1}, "sci": {"deserved": 0, "weight": 3}}
    queues = [{"name": name, "refs": [f"volcano:{name}"], **fields} for name, fields in shares.items()]
    return policy_of(queues, targets={"volcano": {"mode": mode, "apply": "enforce"}}, k=0, **options)


@pytest.fixture
def cycle(either_of: Make, accountant: Any, controller_of: Make) -> Make:
    """Return a function that runs a cycle over a cluster with these objects, and returns the cluster and the report."""

    def run(policy: Any, objects: list[dict[str, Any]]) -> tuple[Cluster, Any]:
        cluster = either_of(objects)
        accountant.spend(eng=0.5)
        return cluster, controller_of(policy, cluster).cycle()

    return run


def test_weights_are_parts_of_the_whole_cluster_in_integers(cycle: Make, controller_of: Make) -> None:
    """Quota 4 of 16, the other 12 as 1 : 3 -> 7 and 9 of 16."""
    policy = _policy("weight")
    queues = [_queue(name, weight=1) for name in ("eng", "sci", "default")]
    cluster, report = cycle(policy, [*queues, volcano("proportion"), node_object("n", 16)])
    weights = {obj["metadata"]["name"]: obj["spec"]["weight"] for obj in cluster.list(QUEUE)}
    assert weights == {"default": 1, "eng": 4375, "sci": 5625}
    (target,) = report.targets
    kinds = ("Effective", "InSync", "Mapped", "Available", "Preemption")
    assert {c.type: c.status for c in target.conditions} == dict.fromkeys(kinds, "True")
    noted = cluster.get(QUEUE, "eng")["metadata"]["annotations"]
    keys = (scheduler_queue_objects.BASE, scheduler_queue_objects.PUBLISHED, scheduler_queue_objects.WEIGHT)
    assert [noted[key] for key in keys] == ["1", "4375", "1"]
    again = controller_of(policy, cluster).cycle()
    assert again.targets[0].outcomes == ()
    assert again.targets[0].standings["eng"].weight == 1.0
    release_weights(policy, cluster)
    assert cluster.get(QUEUE, "eng")["spec"]["weight"] == 1


def test_under_the_capacity_plugin_gpus_are_deserved(cycle: Make) -> None:
    theirs = {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {"f:deserved": {"f:cpu": {}}}}}
    eng = _queue("eng", deserved={"cpu": "8"})
    eng["metadata"]["managedFields"] = [theirs]
    objects = [eng, _queue("sci"), volcano("capacity"), node_object("n", 16)]
    cluster, report = cycle(_policy("deserved"), objects)
    assert cluster.get(QUEUE, "eng")["spec"]["deserved"] == {"cpu": "8", GPU: "7"}
    assert cluster.get(QUEUE, "sci")["spec"]["deserved"] == {GPU: "9"}
    assert [o.result for o in report.targets[0].outcomes] == ["applied", "applied"]
    release_weights(_policy("deserved"), cluster)
    assert cluster.get(QUEUE, "eng")["spec"]["deserved"] == {"cpu": "8"}


def test_along_a_hierarchy_only_the_numbers_we_answer_for_change(cycle: Make) -> None:
    path = {HIERARCHY: "root/other/sci", HIERARCHY_WEIGHTS: "1/2/8"}
    objects = [
        _queue("eng", annotations={HIERARCHY: "root/eng"}), _queue("sci", annotations=path),
        volcano({"name": "drf", "enableHierarchy": True}), node_object("n", 16),
    ]  # fmt: skip
    policy = _policy("hierarchy")
    cluster, report = cycle(policy, objects)
    written = [obj["metadata"]["annotations"][HIERARCHY_WEIGHTS] for obj in cluster.list(QUEUE)]
    assert written == ["1/1", "1/2/3"]
    assert condition(report.targets[0], "Effective").status == "True"
    release_weights(policy, cluster)
    assert cluster.get(QUEUE, "sci")["metadata"]["annotations"] == path


def test_work_above_a_capability_takes_no_room(controller_of: Make) -> None:
    """eng holds its capability of 2 of 4 GPUs, and sci waits for the others."""
    queues = [_queue("eng", capability={GPU: "2"}), _queue("sci")]
    groups = [
        object_of(POD_GROUP, name, {"queue": queue, "minMember": 1, "minResources": {GPU: "2"}}, {"phase": "Inqueue"})
        for name, queue in (("held", "eng"), ("more", "eng"), ("next", "sci"))
    ]
    container = {"name": "c", "resources": {"limits": {GPU: "2"}}}
    notes = {"scheduling.k8s.io/group-name": "held"}
    spec = {"schedulerName": "volcano", "nodeName": "n0", "containers": [container]}
    held = object_of(POD, "held-0", spec, {"phase": "Running"}, uid="u", annotations=notes)
    cluster = MemoryCluster(KINDS, [*queues, *groups, held, node_object("n0", 4), volcano("proportion")])
    policy = _policy("weight", preemption={"mode": "dry-run", "wait": 0, "min_runtime": 0})
    pods = [pod for pod in [read_member(held)] if pod is not None]
    (target,) = controller_of(policy, cluster, pods=lambda: pods).cycle().targets
    outcomes = {verdict.claimant: verdict.outcome for verdict in target.preemption.verdicts}
    assert outcomes == {"PodGroup/ns/more": "denied", "PodGroup/ns/next": "room"}


def _fairshare(**arguments: object) -> dict[str, Any]:
    return {"name": "fairshare", "arguments": {f"fairshare.{key}": value for key, value in arguments.items()}}


@pytest.mark.parametrize(
    ("plugin", "twice"),
    [
        (_fairshare(), "eng; sci"),
        (_fairshare(targetQueues="sci, batch"), "sci"),
        (_fairshare(targetQueues="batch"), ""),
        (_fairshare(resourceKey="cpu"), ""),
        (_fairshare(targetQueues="eng,sci", resourceKey="cpu", **{"resourceKey.sci": "nvidia.com/gpu"}), "sci"),
        (_fairshare(targetQueues="eng,sci", **{"resourceKey.sci": "cpu"}), "eng"),
        ({"name": "fairshare", "arguments": ["unreadable"]}, "eng; sci"),
    ],
)
def test_volcanos_own_history_counts_twice_where_it_is_of_these_queues_and_of_gpus(
    seen_of: Make, plugin: dict[str, Any], twice: str
) -> None:
    seen = seen_of(VolcanoAdapter(), _policy("weight"), [_queue("eng"), _queue("sci"), volcano("proportion", plugin)])
    found = condition(seen, "Effective")
    assert (found.status, found.reason) == (("False", "HistoryCountedTwice") if twice else ("True", "PluginActive"))
    assert twice in found.message


@pytest.mark.parametrize(
    ("mode", "plugins", "reason", "says"),
    [
        ("weight", ["capacity"], "PluginNotActive", "set targets.volcano.mode to deserved"),
        ("deserved", ["proportion"], "PluginNotActive", "set targets.volcano.mode to weight"),
        ("hierarchy", ["drf"], "HierarchyOff", "has no enableHierarchy: true"),
        ("hierarchy", [{"name": "drf", "enableHierarchy": False}], "HierarchyOff", "has no enableHierarchy: true"),
        ("hierarchy", [{"name": "drf", "enabledHierarchy": True}], "HierarchyOff", "unknown key enabledHierarchy"),
        ("hierarchy", [{"name": "drf", "enableHierarchy": True}, "proportion"], "ConfigurationRefused", "proportion"),
        ("hierarchy", [{"name": "drf", "enableHierarchy": "true"}], "ConfigurationRefused", "not true or false"),
        ("weight", ["proportion", "fairshare"], "HistoryCountedTwice", "counts history too"),
        ("weight", ["gang"], "PluginNotActive", "proportion is not active"),
    ],
)
def test_a_plugin_without_effect_is_named(seen_of: Make, mode: str, plugins: list[str], reason: str, says: str) -> None:
    seen = seen_of(VolcanoAdapter(), _policy(mode), [_queue("eng"), _queue("sci"), volcano(*plugins)])
    found = condition(seen, "Effective")
    assert (found.status, found.reason) == ("False", reason)
    assert says in found.message
    if reason == "HistoryCountedTwice":
        assert "take `- name: fairshare` out" in found.remedy
        return
    (line,) = re.findall(r"write `- (\{.*?\})`", found.remedy)  # the line that it tells to write is what helps
    mended = {CONFIG_MAP: [volcano("gang", yaml.safe_load(line))]}
    after = VolcanoAdapter().observe(_policy(mode), mended)
    assert after.conditions[0].reason == "PluginActive"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "does not exist"),
        ({"volcano-scheduler.conf": "actions: ["}, "invalid YAML"),
        ({"volcano-scheduler.conf": f"tiers: []\n# {'x' * 131_072}"}, "longer than 131072 characters"),
        ({"volcano-scheduler.conf": ALIASES}, "more than 250000 values"),
        ({"volcano-scheduler.conf": "tiers: " + "[" * 50_000}, "recursion"),
        ({"volcano-scheduler.conf": "tiers: !!int what"}, "not a tag:yaml.org,2002:int"),
        ({"other.conf": "tiers: [{plugins: [{name: drf}]}]", "ci.conf": "tiers: []"}, "ci.conf, other.conf"),
        ({"volcano-scheduler.conf": "actions: allocate"}, "no entry has tiers"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_unknown(seen_of: Make, data: dict[str, str] | None, says: str) -> None:
    there = [] if data is None else [{**volcano(), "data": data}]
    seen = seen_of(VolcanoAdapter(), _policy("weight"), [_queue("eng"), _queue("sci"), *there])
    found = condition(seen, "Effective")
    assert (found.status, found.reason) == ("Unknown", "ConfigurationUnread")
    assert says in found.message


def test_volcanos_own_file_rules_where_the_map_has_others_beside_it(seen_of: Make) -> None:
    both = volcano("proportion")
    both["data"]["volcano-scheduler-ci.conf"] = "tiers: [{plugins: [{name: capacity}]}]"
    seen = seen_of(VolcanoAdapter(), _policy("weight"), [_queue("eng"), _queue("sci"), both])
    assert seen.conditions[0].reason == "PluginActive"


def _sums_checked(cluster: MemoryCluster) -> Callable[[Any], str | None]:
    """Check writes as Volcano's webhook does: below the root, a Queue's children may not deserve more than the Queue.

    Source: volcano pkg/webhooks/admission/queues/validate/validate_queue.go, ed72c7c815a9."""

    def gpus_of(obj: Any) -> float:
        return float((obj["spec"].get("deserved") or {}).get(GPU, 0))

    def admit(obj: Any) -> str | None:
        queues = {each["metadata"]["name"]: each for each in cluster.list(QUEUE)} | {obj["metadata"]["name"]: obj}
        for name in (obj["spec"].get("parent"), obj["metadata"]["name"]):
            if name in queues and name != "root":
                children = sum(gpus_of(each) for each in queues.values() if each["spec"].get("parent") == name)
                if children > gpus_of(queues[name]):
                    return f"sum of children's deserved ({children:g}) exceeds parent {name}'s deserved limit"
        return None

    return admit


def test_a_tree_is_written_so_that_every_step_keeps_children_within_their_parent(controller_of: Make) -> None:
    """x grows and y shrinks by 6 GPUs; within x the second child grows at the first one's cost."""
    tree = {"x": ("", 4), "x1": ("x", 3), "x2": ("x", 1), "y": ("", 12), "y1": ("y", 9), "y2": ("y", 3)}
    objects = [_queue(name, parent=above or "root", deserved={GPU: str(n)}) for name, (above, n) in tree.items()]
    objects += [volcano("capacity"), node_object("n", 16)]
    weights = {"x": 10, "y": 6, "x1": 1, "x2": 4, "y1": 1, "y2": 1}
    queues = [
        {"name": name, "weight": weights[name], "refs": [f"volcano:{name}"], **({"parent": above} if above else {})}
        for name, (above, _) in tree.items()
    ]
    policy = policy_of(queues, targets={"volcano": {"mode": "deserved", "apply": "enforce"}}, k=0)
    admitted: list[Callable[[Any], str | None]] = []
    cluster = MemoryCluster(KINDS, objects, admit=lambda obj: admitted[0](obj) if admitted else None)
    admitted.append(_sums_checked(cluster))
    (target,) = controller_of(policy, cluster).cycle().targets
    applied = {o.apply.name: (o.result, o.detail) for o in target.outcomes}
    assert applied == dict.fromkeys({*tree} - {"y2"}, ("applied", ""))
    deserved = {obj["metadata"]["name"]: obj["spec"]["deserved"][GPU] for obj in cluster.list(QUEUE)}
    assert deserved == {"x": "10", "x1": "2", "x2": "8", "y": "6", "y1": "3", "y2": "3"}
    assert {outcome.result for outcome in release_weights(policy, cluster)} == {"applied"}
    assert [obj["spec"]["deserved"][GPU] for obj in cluster.list(QUEUE)] == ["4", "3", "1", "12", "9", "3"]


def test_what_is_deferred_is_what_others_do_not_build_on() -> None:
    grown = TargetQueue("p", "", "", 1.0, kind=QUEUE, field="deserved", path="root/p")
    child = TargetQueue("c", "", "", 1.0, kind=QUEUE, field="deserved", path="root/p/c")
    applies = [
        Apply("volcano", held.name, held.name, held.weight, value, "", {}, order=write_order(held, value))
        for held, value in ((grown, 2.0), (child, 9.0))
    ]
    results = [each.result for each in write_weights(MemoryCluster(KINDS), applies, dry_run=True, most=1)]
    assert results[1] == "deferred" != results[0]


def test_a_weight_that_the_crd_filled_in_is_said_to_be_so_and_adopted(cycle: Make, controller_of: Make) -> None:
    """After `kubectl create` of a Queue without a weight, the API server sets 1 with the creator as its manager."""
    theirs = {"manager": "kubectl-create", "operation": "Update", "fieldsV1": {"f:spec": {"f:weight": {}}}}
    objects = [_queue("eng", weight=1), _queue("sci", weight=1), volcano("proportion"), node_object("n", 16)]
    for obj in objects[:2]:
        obj["metadata"]["managedFields"] = [theirs]
    policy = _policy("weight")
    cluster, report = cycle(policy, objects)
    found = condition(report.targets[0], "Available")
    assert (found.status, found.reason) == ("False", "Contested")
    assert "1 is the default of the CRD" in found.message
    assert "gputally fairshare adopt" in found.message
    assert "leave the weight out" not in found.message
    taken = adopt(policy, cluster)
    assert [each.result for each in taken] == ["applied", "applied"]
    assert "has the CRD's default" in advice(taken[0])[0]
    again = controller_of(policy, cluster).cycle()
    assert [outcome.result for outcome in again.targets[0].outcomes] == ["applied", "applied"]


def test_a_weight_that_its_owner_stated_is_to_be_left_out_by_him(cycle: Make) -> None:
    theirs = {"manager": "argocd-controller", "operation": "Apply", "fieldsV1": {"f:spec": {"f:weight": {}}}}
    objects = [_queue("eng", weight=5), _queue("sci", weight=1), volcano("proportion"), node_object("n", 16)]
    objects[0]["metadata"]["managedFields"] = [theirs]
    _, report = cycle(_policy("weight"), objects)
    message = condition(report.targets[0], "Available").message
    assert "leave the weight out of that manager's manifest" in message


@pytest.mark.real
def test_the_api_server_books_the_default_weight_to_the_creator(server: Any) -> None:
    path = "/apis/scheduling.volcano.sh/v1beta1/queues"
    body = {"apiVersion": QUEUE.api_version, "kind": "Queue", "metadata": {"name": "made-without"}, "spec": {}}
    made = server.request("POST", f"{path}?fieldManager=kubectl-create", body)
    try:
        (entry,) = made["metadata"]["managedFields"]
        assert (made["spec"]["weight"], entry["manager"]) == (1, "kubectl-create")
        assert "f:weight" in entry["fieldsV1"]["f:spec"]
    finally:
        server.request("DELETE", f"{path}/made-without")


def test_queues_the_policy_does_not_know_dilute_and_are_named(seen_of: Make) -> None:
    objects = [_queue("eng"), _queue("default", allocated="3"), volcano("proportion")]
    found = condition(seen_of(VolcanoAdapter(), _policy("weight"), objects), "Effective")
    assert (found.status, found.reason, found.message[-7:]) == ("False", "StrangersCompete", "default")


def test_gangs_are_jobs_sized_by_their_tasks_then_by_their_pods(either_of: Make) -> None:
    container = {"name": "c", "resources": {"limits": {GPU: "4"}}}
    job = object_of(JOB, "train", {"tasks": [{"replicas": 3, "template": {"spec": {"containers": [container]}}}]})
    group = _group("train-pg", "eng", least=8, member=2, annotations={"volcano.sh/preemptable": "false"})
    done = {**_group("done", "eng", least=8), "status": {"phase": "Completed"}}
    cluster = either_of(
        [_queue("eng"), _queue("sci"), volcano("proportion"), job, group, done, _group("small", "sci", least=1)]
    )
    uid = cluster.get(JOB, "train", "ns")["metadata"]["uid"]
    owned = {"metadata": {"ownerReferences": [_owner("train", uid)]}}
    cluster.patch(POD_GROUP, "train-pg", "ns", owned, field_manager="vc-controller-manager")
    spec = {"schedulerName": "volcano", "containers": [container], "priority": 7}
    mark = {"annotations": {"scheduling.k8s.io/group-name": "train-pg"}}
    uids = {"0": "", "1": "n", "2": "n"}
    placed = [object_of(POD, f"train-{i}", {**spec, "nodeName": node}, uid=i, **mark) for i, node in uids.items()]
    pods = [read_pod(obj) for obj in placed]
    policy = _policy("weight")
    without = look_at(VolcanoAdapter(), policy, cluster)
    assert {(g.name, g.requested, g.allocated, g.minimum) for g in without.gangs} == {
        ("train", 12.0, 0.0, 8.0),
        ("small", 1.0, 0.0, 1.0),
    }
    observation = look_at(VolcanoAdapter(), policy, cluster, [pod for pod in pods if pod])
    gang = next(gang for gang in observation.gangs if gang.name == "train")
    assert (gang.kind, gang.uid, gang.requested, gang.allocated, gang.minimum) == (JOB, uid, 12.0, 8.0, 8.0)
    assert (gang.priority, gang.preemptible, len(gang.pods)) == (7, False, 3)
    assert observation.standings["eng"].requested == 12.0
    left = look_at(VolcanoAdapter(), policy, cluster, [pods[2]] if pods[2] else [])  # the others have completed
    (last,) = (gang for gang in left.gangs if gang.name == "train")
    assert (last.requested, last.allocated, last.minimum) == (4.0, 4.0, 4.0)


def _job(name: str, queue: str, replicas: int, gpus: int, phase: str) -> dict[str, Any]:
    """Build a Volcano Job with the status that its controllers write."""
    container = {"name": "c", "image": "c", "resources": {"limits": {GPU: str(gpus)}}}
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    tasks = [{"name": "t", "replicas": replicas, "template": template}]
    spec = {"queue": queue, "minAvailable": replicas, "schedulerName": "volcano", "tasks": tasks}
    status = {"state": {"phase": phase, "lastTransitionTime": BEFORE}}
    return object_of(JOB, name, spec, status, uid=f"uid-{name}")


def _owner(job: str, uid: str) -> dict[str, Any]:
    return {"apiVersion": JOB.api_version, "kind": "Job", "name": job, "uid": uid, "controller": True}


def _pod_of(job: str, queue: str, i: int, gpus: int, node: str = "n") -> dict[str, Any]:
    containers = [{"name": "c", "image": "c", "resources": {"limits": {GPU: str(gpus)}}}]
    spec = {"schedulerName": "volcano", "nodeName": node, "containers": containers}
    notes = {"scheduling.k8s.io/group-name": f"{job}-1", "scheduling.volcano.sh/queue-name": queue}
    metadata = {"creationTimestamp": BEFORE, "annotations": notes, "ownerReferences": [_owner(job, f"uid-{job}")]}
    status = {"phase": "Running", "startTime": BEFORE}
    return object_of(POD, f"{job}-t-{i}", spec, status, uid=f"uid-{job}-{i}", **metadata)


def _group_of(job: dict[str, Any], queue: str, gpus: int) -> dict[str, Any]:
    name = job["metadata"]["name"]
    owners = [_owner(name, f"uid-{name}")]
    return _group(f"{name}-1", queue, least=gpus, member=job["spec"]["minAvailable"], ownerReferences=owners)


def test_a_claim_restarts_no_other_job_while_a_command_waits_for_volcano(accountant: Any) -> None:
    clock, accountant.nodes = VirtualClock(LATER_MS), {"n"}
    holds = [_job(f"holds-{i}", "sci", 1, 4, "Running") for i in range(4)]
    jobs = [*holds, _job("waits", "eng", 1, 4, "Pending")]
    groups = [*(_group_of(job, "sci", 4) for job in holds), _group_of(jobs[-1], "eng", 4)]
    queues = [_queue("eng"), _queue("sci", allocated="16")]
    cluster = MemoryCluster(KINDS, [*queues, *jobs, *groups, volcano("proportion"), node_object("n", 16)])
    policy = _policy("weight", preemption={"mode": "enforce", "min_runtime": 0, "wait": 0})
    pods = tuple(read_pod(_pod_of(job["metadata"]["name"], "sci", 0, 4)) for job in holds)
    controller = Controller(policy, accountant, cluster, clock, pods=lambda: pods)
    for _ in range(3):
        (target,) = controller.cycle().targets
        clock.advance(60_000)
    assert len(cluster.list(COMMAND)) == 1
    assert condition(target, "Preemption").reason == "Stopping"


def test_a_volcano_job_is_restarted_with_the_kinds_the_service_connects_with(either_of: Make, accountant: Any) -> None:
    clock, accountant.nodes = VirtualClock(LATER_MS), {"n"}
    holds, waits = _job("holds", "sci", 2, 8, "Running"), _job("waits", "eng", 1, 4, "Pending")
    groups = [_group_of(holds, "sci", 16), _group_of(waits, "eng", 4)]
    queues = [_queue("eng"), _queue("sci", allocated="16")]
    cluster = either_of([*queues, holds, waits, *groups, volcano("proportion"), node_object("n", 16)])
    policy = _policy("weight", preemption={"mode": "enforce", "min_runtime": 0, "wait": 0})
    pods = [read_pod(_pod_of("holds", "sci", i, 8)) for i in range(2)]
    uid = cluster.get(JOB, "holds", "ns")["metadata"]["uid"]

    controller = Controller(policy, accountant, cluster, clock, pods=lambda: tuple(pods))
    (target,) = controller.cycle().targets
    assert [stop.effect.result for stop in target.preemption.stops] == ["stopped"]
    (order,) = cluster.list(COMMAND)
    assert (order["action"], order["target"]["name"], order["target"]["uid"]) == ("RestartJob", "holds", uid)
    assert PREEMPTION in cluster.get(JOB, "holds", "ns")["metadata"]["annotations"]
    clock.advance(60_000)
    (target,) = controller.cycle().targets  # the Command waits for Volcano
    assert target.preemption.stops == ()
    assert [each["metadata"]["name"] for each in cluster.list(COMMAND)] == [order["metadata"]["name"]]


@pytest.mark.parametrize("tiers", ["[{plugins: 5}]", "[{plugins: drf}]", "[5, null]", "[{plugins: {name: drf}}]"])
def test_tiers_of_another_shape_have_no_plugin(seen_of: Make, tiers: str) -> None:
    there = {**volcano(), "data": {"volcano-scheduler.conf": f"tiers: {tiers}"}}
    seen = seen_of(VolcanoAdapter(), _policy("weight"), [_queue("eng"), _queue("sci"), there])
    assert condition(seen, "Effective").reason == "PluginNotActive"


def _task(name: str, replicas: int | None, gpus: int) -> dict[str, Any]:
    limits = {"resources": {"limits": {GPU: str(gpus)}}} if gpus else {}
    counted = {} if replicas is None else {"replicas": replicas}
    return {"name": name, **counted, "template": {"spec": {"containers": [{"name": "c", **limits}]}}}


LAUNCHER, WORKERS = _task("launcher", 1, 0), _task("worker", 3, 8)


@pytest.mark.parametrize(("tasks", "spec", "amounts"), [
    ([LAUNCHER, WORKERS], {"minMember": 2, "minTaskMember": {"launcher": 1, "worker": 3}}, (24, 8)),
    ([LAUNCHER, WORKERS], {"minMember": 4, "minTaskMember": {"launcher": 1, "worker": 3}}, (24, 24)),
    ([LAUNCHER, WORKERS], {"minMember": 3, "minTaskMember": {"launcher": 1, "worker": 1}}, (24, 16)),
    ([WORKERS], {"minMember": 1, "minTaskMember": {"worker": 2}}, (24, 8)),  # more than minMember: ignored
    ([WORKERS], {"minMember": 2, "minTaskMember": {"worker": 2}}, (24, 16)),
    ([_task("ps", 2, 1), WORKERS], {"minMember": 2}, (26, 2)),
    ([_task("off", 0, 8), _task("one", None, 4)], {"minMember": 1}, (4, 4)),
    ([WORKERS], {"minMember": 1, "minResources": {GPU: "16"}}, (24, 16)),
    ([WORKERS], {}, (24, 8)),
])  # fmt: skip
@pytest.mark.parametrize("phase", ["Pending", "Inqueue"])
def test_a_gang_starts_with_the_members_with_which_volcano_starts_it(
    tasks: list[Any], spec: dict[str, Any], amounts: tuple[float, float], phase: str
) -> None:
    job = object_of(JOB, "j", {"tasks": tasks}, uid="uid-j")
    owner = [{"kind": "Job", "name": "j", "uid": "uid-j", "apiVersion": "batch.volcano.sh/v1alpha1"}]
    group = object_of(POD_GROUP, "j-1", {"queue": "eng", **spec}, {"phase": phase}, ownerReferences=owner)
    seen = {QUEUE: [_queue("eng"), _queue("sci")], JOB: [job], POD_GROUP: [group]}
    (gang,) = VolcanoAdapter().observe(_policy("weight"), seen).gangs
    least = (
        8 if phase == "Inqueue" and "minResources" in spec else amounts[1]
    )  # they count only before a gang is in line
    assert (gang.requested, gang.minimum) == (amounts[0], least)


@pytest.mark.parametrize(("launcher", "reserved"), [(False, 16), (True, 16), (True, 0), (True, 24)])
def test_a_gang_without_a_job_starts_with_its_members(launcher: bool, reserved: int) -> None:
    """Its launcher has no GPU: of its three members two have 8 GPUs. While it has no pod, what is reserved counts."""
    group = _group("g", "eng", least=reserved, member=3)
    group["status"] = {"phase": "Inqueue"}
    made = [
        pod_object(f"w{i}", gpus=8 if i < 3 else 0, annotations={"scheduling.k8s.io/group-name": "g"})
        for i in range(3 + launcher)
    ]
    pods = [read_member({**obj, "spec": {**obj["spec"], "schedulerName": "volcano"}}) for obj in made]
    held = [pod for pod in pods if pod is not None]
    (gang,) = VolcanoAdapter().observe(_policy("weight"), {QUEUE: [_queue("eng")], POD_GROUP: [group]}, held).gangs
    assert (gang.requested, gang.minimum) == (24, 16)


def test_an_older_checkpoint_on_a_group_hides_no_newer_one_of_its_pods() -> None:
    noted = {"gputally.dev/last-checkpoint": "2026-01-01T00:00:00Z"}
    group = _group("g", "eng", least=8, annotations=noted)
    pod = replace(read_pod(pod_object("w", gpus=8)), gang="PodGroup/ns/g", checkpoint_ms=NOW_MS)  # type: ignore[type-var]
    (gang,) = VolcanoAdapter().observe(_policy("weight"), {QUEUE: [_queue("eng")], POD_GROUP: [group]}, [pod]).gangs
    assert gang.checkpoint_ms == NOW_MS


def _halves(mode: str = "weight") -> Any:
    queues = [{"name": name, "refs": [f"volcano:{name}"]} for name in ("a", "b")]
    return policy_of(queues, targets={"volcano": {"mode": mode, "apply": "enforce"}}, k=0)


@pytest.mark.parametrize(("a", "b", "shares"), [
    ({"guarantee": {"resource": {GPU: "20"}}}, {}, (20, 12)),
    ({}, {"capability": {GPU: "12"}}, (20, 12)),
    ({}, {"parent": "org"}, (26, 6)),
    ({"guarantee": {"resource": {GPU: "4"}}}, {"capability": {GPU: "30"}}, (16, 16)),
])  # fmt: skip
@pytest.mark.parametrize("mode", ["weight", "deserved"])
def test_shares_and_writes_stay_within_what_volcano_reserves_and_allows(
    accountant: Any, controller_of: Make, mode: str, a: dict[str, Any], b: dict[str, Any], shares: tuple[int, int]
) -> None:
    """Two queues of weight 1 on 32 GPUs, as Volcano's plugins proportion and capacity divide them."""
    accountant.spend(a=1.0)
    queues = [_queue("a", allocated="0", **a), _queue("b", **b), _queue("org", capability={GPU: "6"})]
    groups = [_group(name, name, least=32) for name in "ab"]
    cluster = MemoryCluster(KINDS, [*queues, *groups, volcano("proportion"), node_object("n", 32)])
    (target,) = controller_of(_halves(mode), cluster).cycle().targets
    assert tuple(each.gpus for each in target.entitlements) == shares
    written = {obj["metadata"]["name"]: obj["spec"] for obj in cluster.list(QUEUE)}
    if mode == "deserved":
        assert tuple(float(written[name]["deserved"][GPU]) for name in "ab") == shares
    else:
        assert tuple(written[name]["weight"] for name in "ab") == tuple(round(share / 32 * 10_000) for share in shares)


def test_a_reserved_part_is_the_queues_own_even_if_it_requests_nothing() -> None:
    claims = (QueueClaim("a", 0.0), QueueClaim("b", 32.0), QueueClaim("c", 32.0))
    shares = divide_above(DivisionProblem("", 32, 0.0, claims), {"a": 20.0})
    assert shares == {"a": 20.0, "b": 6.0, "c": 6.0}


@pytest.mark.parametrize(("plugins", "queue", "note", "stopped"), [
    (["proportion"], {}, {}, 1),
    (["proportion"], {"reclaimable": True}, {}, 1),
    (["proportion"], {"reclaimable": False}, {}, 0),
    (["proportion", "cdp"], {}, {"annotations": {COOLDOWN: "10h"}}, 0),
    (["proportion", "cdp"], {}, {"labels": {COOLDOWN: "10h"}}, 0),
    (["proportion", "cdp"], {}, {"labels": {COOLDOWN: "10m"}}, 1),  # its time is over
    (["proportion", "cdp"], {}, {"labels": {COOLDOWN: "for ever"}}, 1),
    (["proportion"], {}, {"labels": {COOLDOWN: "10h"}}, 1),  # no plugin reads it
])  # fmt: skip
def test_what_volcano_protects_is_no_victim(
    accountant: Any, plugins: list[str], queue: dict[str, Any], note: dict[str, Any], stopped: int
) -> None:
    """sci's job has held 16 GPUs for two hours, of which eng waits for 4."""
    clock, accountant.nodes = VirtualClock(LATER_MS), {"n"}
    holds, waits = _job("holds", "sci", 1, 16, "Running"), _job("waits", "eng", 1, 4, "Pending")
    groups = [_group_of(holds, "sci", 16), _group_of(waits, "eng", 4)]
    groups[0]["metadata"] |= note
    queues = [_queue("eng"), _queue("sci", allocated="16", **queue)]
    cluster = MemoryCluster(KINDS, [*queues, holds, waits, *groups, volcano(*plugins), node_object("n", 16)])
    running = _pod_of("holds", "sci", 0, 16)
    running["status"]["startTime"] = "2029-12-31T22:00:00Z"
    policy = _policy("weight", preemption={"mode": "enforce", "min_runtime": 0, "wait": 0})
    controller = Controller(policy, accountant, cluster, clock, pods=lambda: (read_pod(running),))
    (target,) = controller.cycle().targets
    assert len(cluster.list(COMMAND)) == stopped
    assert [verdict.outcome for verdict in target.preemption.verdicts] == ["preempts" if stopped else "denied"]


def test_a_queue_keeps_nothing_from_its_own_work(accountant: Any) -> None:
    protection = look_at(
        VolcanoAdapter(),
        _policy("weight"),
        MemoryCluster(KINDS, [_queue("sci", reclaimable=False), _group("g", "sci", least=4)]),
    ).gangs[0].protection  # fmt: skip
    assert (protection.seconds(("sci",)), protection.seconds(()), protection.seconds(("eng",))) == (
        0.0,
        ALWAYS_S,
        ALWAYS_S,
    )


@pytest.mark.parametrize("state", ["Open", "Closing", "Closed", "Unknown", None])
def test_what_waits_in_a_closed_queue_asks_for_nothing(state: str | None) -> None:
    queue = _queue("sci", allocated="4")
    if state is not None:
        queue["status"]["state"] = state
    runs, waits = _group("runs", "sci", least=4), _group("waits", "sci", least=8)
    runs["status"] = {"phase": "Running"}
    pod = read_pod(_pod_of("runs", "sci", 0, 4))
    cluster = MemoryCluster(KINDS, [_queue("eng"), queue, runs, waits, volcano("proportion")])
    found = look_at(VolcanoAdapter(), _policy("weight"), cluster, [replace(pod, gang="PodGroup/ns/runs")])
    is_open = state in ("Open", None)
    assert found.standings["sci"].requested == (12 if is_open else 4)
    assert [gang.name for gang in found.gangs] == (["runs", "waits"] if is_open else ["runs"])
    assert (condition(found, "InSync").reason == "QueuesStopped") == (not is_open)


@pytest.mark.parametrize(("tiers", "protected"), [
    ([["gang"], ["proportion", "cdp"]], (3600.0, 3600.0)),
    ([["gang"], ["proportion"], ["cdp"]], (3600.0, 3600.0)),
    ([["gang", "cdp"], ["proportion"]], (0.0, 3600.0)),  # proportion alone decides what other queues take
    ([["cdp"], ["drf"]], None),
    ([["cdp"], ["priority", "proportion"]], None),
    ([["cdp"], ["nodeorder"]], (3600.0, 3600.0)),
])  # fmt: skip
def test_a_later_tier_overrules_the_cool_down(tiers: list[list[str]], protected: tuple[float, float] | None) -> None:
    """On a real Volcano, a queue took a pod in its cool-down where proportion was in a later tier than cdp."""
    configured = volcano()
    listed = [{"plugins": [{"name": name} for name in tier]} for tier in tiers]
    configured["data"]["volcano-scheduler.conf"] = yaml.safe_dump({"tiers": listed})
    group = _group("g", "sci", least=4, labels={COOLDOWN: "1h"})
    (gang,) = look_at(
        VolcanoAdapter(), _policy("weight"), MemoryCluster(KINDS, [_queue("sci"), group, configured])
    ).gangs
    found = gang.protection
    assert (None if found is None else (found.seconds(()), found.seconds(("sci",)))) == protected


def test_work_without_a_cool_down_is_work_of_its_own_queue() -> None:
    """The tier after cdp's chooses victims for other queues, so only work of the own queue must wait."""
    configured = volcano()
    listed = [{"plugins": [{"name": name} for name in tier]} for tier in (["cdp"], ["proportion"])]
    configured["data"]["volcano-scheduler.conf"] = yaml.safe_dump({"tiers": listed})
    groups = _group("old", "sci", least=4, labels={COOLDOWN: "1h"}), _group("new", "sci", least=4)
    found = look_at(VolcanoAdapter(), _policy("weight"), MemoryCluster(KINDS, [_queue("sci"), *groups, configured]))
    new, old = sorted(found.gangs, key=lambda gang: gang.name)
    assert new.protection is not None
    assert old.protection is not None
    own, others = old.protection.seconds(new.protection.path), old.protection.seconds(())
    assert (own, others) == (3600.0, 0.0)
