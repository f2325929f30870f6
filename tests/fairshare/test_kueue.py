"""Kueue objects read into the model and weights written back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshare.controller.control_loop import Controller
from fairshare.controller.weight_writer import release_weights
from fairshare.core import scheduler_queue_objects
from fairshare.core.queues_and_weights import Issue, TargetQueue
from fairshare.preemption.preemption_controller import NotPossible, by_hand
from fairshare.preemption.preemption_types import PreemptionCall
from fairshare.targets import ADAPTERS, KINDS
from fairshare.targets.kueue import CLUSTER_QUEUES, COHORTS, LOCAL_QUEUES, WORKLOADS, KueueAdapter
from fairshare.targets.weight_plan import look_at
from gputally.base.errors import Refused
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, Kind, fixed_point, quantity
from tests.fairshare.builders import object_of, policy_of
from tests.fairshare.scheduler_objects import V1BETA1, V1BETA2, configured
from tests.fairshare.victims import node_object

Make = Callable[..., Any]
CQ, COHORT, LQ, WORKLOAD = (kinds[0] for kinds in (CLUSTER_QUEUES, COHORTS, LOCAL_QUEUES, WORKLOADS))
SINCE = "2026-10-01T00:00:00Z"
STRATEGIES = ["LessThanOrEqualToFinalShare", "LessThanInitialShare"]
CONFIGURATION = {**V1BETA2, "fairSharing": {"preemptionStrategies": STRATEGIES}}
ACTIVE = {
    "type": "Active", "status": "True", "reason": "Ready", "message": "Can admit new workloads",
    "lastTransitionTime": SINCE,
}  # fmt: skip
OFF: dict[str, Any] = {"conditions": [ACTIVE]}
"""A ClusterQueue's status while fair sharing is off."""
ON: dict[str, Any] = {**OFF, "fairSharing": {"weightedShare": 0}}


def _queue(name: str, weight: object = None, *, cohort: str = "ml", kind: Kind = CQ, **spec: Any) -> dict[str, Any]:
    sharing = {} if weight is None else {"fairSharing": {"weight": weight}}
    return object_of(kind, name, {**({"cohortName": cohort} if cohort else {}), **sharing, **spec})


def _local(name: str, cluster_queue: str, status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return object_of(LQ, name, {"clusterQueue": cluster_queue, **spec}, status)


def _quota(nominal: object, **more: object) -> dict[str, Any]:
    """A ClusterQueue's, or a Cohort's, quota of GPUs, beside CPUs."""
    resources = [{"name": "cpu", "nominalQuota": "640"}, {"name": GPU, "nominalQuota": nominal, **more}]
    flavors = [{"name": "h200", "resources": resources}]
    return {"resourceGroups": [{"coveredResources": ["cpu", GPU], "flavors": flavors}]}


def _workload(name: str, queue: str, pods: int, gpus: int, *, admitted: bool = False, **spec: Any) -> dict[str, Any]:
    containers = [{"name": "c", "resources": {"limits": {GPU: str(gpus)}}}]
    pod_set = {"name": "main", "count": pods, "template": {"spec": {"containers": containers}}}
    status: dict[str, Any] = {}
    if admitted:
        usage = [{"name": "main", "resourceUsage": {GPU: str(pods * gpus)}}]
        status = {
            "admission": {"clusterQueue": queue, "podSetAssignments": usage},
            "conditions": [{**ACTIVE, "type": "Admitted", "reason": "Admitted"}],
        }
    pod_set |= spec.pop("pod_set", {})
    wanted = {"queueName": queue, "podSets": [pod_set], **spec}
    return object_of(WORKLOAD, name, wanted, status)


@pytest.fixture
def policy() -> Any:
    return policy_of(
        [
            {"name": "dept", "refs": ["kueue-cohort:dept"]},
            {"name": "a", "parent": "dept", "refs": ["kueue:a", "kueue:ns/a"]},
            {"name": "b", "parent": "dept", "refs": ["kueue:b"]},
        ],
        targets={"kueue": {"apply": "enforce"}},
    )


def _condition(observation: Any, kind: str) -> Any:
    (found,) = [condition for condition in observation.conditions if condition.type == kind]
    return found


def _conditions(observation: Any) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in observation.conditions}


def test_queues_are_found_at_their_highest_level(seen_of: Make, policy: Any) -> None:
    objects = [
        object_of(COHORT, "dept", {"parentName": "root", "fairSharing": {"weight": "2"}}),
        _queue("a", "750m"), _queue("b"), _queue("stranger"), _local("a", "a"),
    ]  # fmt: skip
    observation = seen_of(KueueAdapter(), policy, objects)
    assert {name: (held.kind.kind, held.weight) for name, held in observation.queues.items() if held.kind} == {
        "dept": ("Cohort", 2.0),
        "a": ("ClusterQueue", 0.75),
        "b": ("ClusterQueue", None),
    }
    assert {name: standing.weight for name, standing in observation.standings.items()} == {
        "dept": 2.0, "a": 0.75, "b": 1.0,
    }  # fmt: skip
    assert observation.issues == ()


def test_demand_is_what_workloads_ask_for_and_hold_up_the_tree(seen_of: Make, policy: Any) -> None:
    finished = {"type": "Finished", "status": "True", "reason": "Done", "message": "", "lastTransitionTime": SINCE}
    objects = [
        object_of(COHORT, "dept", {"parentName": "root"}),
        _queue("a"), _queue("b"), _local("a", "a"), _local("other", "b"),
        _workload("running", "a", 2, 4, admitted=True, priority=10),
        _workload("waiting", "a", 4, 4, pod_set={"minCount": 2}),
        _workload("by-cluster-queue", "other", 1, 1),
        _workload("off", "a", 8, 8, active=False),
        _workload("cpu", "a", 8, 0),
        {**_workload("done", "a", 8, 8), "status": {"conditions": [finished]}},
    ]  # fmt: skip
    observation = seen_of(KueueAdapter(), policy, objects)
    amounts = {name: (s.requested, s.allocated) for name, s in observation.standings.items()}
    assert amounts == {"dept": (25.0, 8.0), "a": (24.0, 8.0), "b": (1.0, 0.0)}
    gangs = {gang.name: (gang.requested, gang.allocated, gang.minimum, gang.waits) for gang in observation.gangs}
    assert gangs == {
        "running": (8.0, 8.0, 8.0, 0.0),
        "waiting": (16.0, 0.0, 8.0, 8.0),
        "by-cluster-queue": (1.0, 0.0, 1.0, 1.0),
    }


def test_where_workloads_cannot_be_read_the_queues_own_status_counts(policy: Any) -> None:
    reserved = [{"name": "h200", "resources": [{"name": GPU, "total": "6"}, {"name": "cpu", "total": "64"}]}]
    seen = {COHORT: [], CQ: [{**_queue("a"), "status": {"flavorsReservation": reserved}}, _queue("b")]}
    standings = KueueAdapter().observe(policy, seen).standings
    assert (standings["a"].allocated, standings["b"].allocated) == (6.0, 0.0)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"status": ON}, ("True", "FairSharing")),
        ({}, ("Unknown", "SharesUnseen")),
        ({"status": OFF}, ("False", "FairSharingOff")),
        ({"configuration": V1BETA2}, ("False", "FairSharingOff")),
        ({"configuration": V1BETA2, "status": OFF}, ("False", "FairSharingOff")),
        ({"configuration": V1BETA2, "status": ON}, ("Unknown", "RestartPending")),
        ({"configuration": {**V1BETA2, "fairSharing": {}}}, ("False", "ConfigurationRefused")),
        ({"configuration": {**V1BETA2, "fairSharing": {}}, "status": ON}, ("Unknown", "ConfigurationRefused")),
        ({"configuration": {**V1BETA1, "fairSharing": {}}, "status": OFF}, ("False", "FairSharingOff")),
        ({"configuration": {**V1BETA1, "fairSharing": {"enable": False}}}, ("False", "FairSharingOff")),
        (
            {"configuration": {**V1BETA1, "fairSharing": {"preemptionStrategies": STRATEGIES}}},
            ("False", "FairSharingOff"),
        ),
        ({"configuration": {**V1BETA1, "fairSharing": {"enable": True}}, "status": ON}, ("True", "FairSharing")),
        ({"configuration": None}, ("Unknown", "ConfigurationUnread")),
        ({"configuration": None, "status": ON}, ("True", "FairSharing")),
        ({"configuration": None, "status": OFF}, ("False", "FairSharingOff")),
        ({"status": ON, "cohort": ""}, ("False", "NothingToShare")),
    ],
)
def test_a_weight_that_cannot_act_is_said_to_be_so(
    seen_of: Make, change: dict[str, Any], wanted: tuple[str, str]
) -> None:
    policy = policy_of([{"name": "a", "refs": ["kueue:a"]}])
    configuration = change.get("configuration", CONFIGURATION)
    queue = _queue("a", cohort=change.get("cohort", "ml")) | {"status": change.get("status", {})}
    objects = [queue, *([configured(configuration)] if configuration is not None else [])]
    assert _conditions(seen_of(KueueAdapter(), policy, objects))["Effective"] == wanted


COUNTED = {"weightedShare": 0, "admissionFairSharingStatus": {"consumedResources": {GPU: "1"}, "lastUpdate": SINCE}}
AFS = "UsageBasedAdmissionFairSharing"
ADMISSION = {"usageHalfLifeTime": "168h", "usageSamplingInterval": "5m"}


@pytest.mark.parametrize(("mode", "configuration", "counted", "value", "effective"), [
    (AFS, {"admissionFairSharing": ADMISSION}, True, 2.0, ("True", "AdmissionFairSharing")),
    (AFS, {"admissionFairSharing": ADMISSION}, False, 2.0, ("Unknown", "UsageUnseen")),
    (AFS, {"admissionFairSharing": {}}, True, 2.0, ("False", "AdmissionFairSharingOff")),
    (AFS, {}, False, 0.4, ("False", "AdmissionFairSharingOff")),
    (AFS, None, True, 2.0, ("Unknown", "ConfigurationUnread")),
    ("NoAdmissionFairSharing", {"admissionFairSharing": ADMISSION}, False, 0.4, ("False", "AdmissionFairSharingOff")),
])  # fmt: skip
def test_a_local_queue_keeps_history_out_of_its_weight_where_kueue_keeps_it(
    either_of: Make,
    accountant: Any,
    clock: Any,
    mode: str,
    configuration: dict[str, Any] | None,
    counted: bool,
    value: float,
    effective: tuple[str, str],
) -> None:
    """Inside one ClusterQueue either Kueue remembers (and gets the configured weight) or it does not read weights."""
    queues = [{"name": name, "weight": 2, "refs": [f"kueue:ns/{name}"]} for name in ("x", "y")]
    policy = policy_of(queues, targets={"kueue": {"apply": "enforce"}}, bounds={"min_multiplier": 0.2, "max_step": 9})
    queue = _queue("a", admissionScope={"admissionMode": mode})
    jobs = [_workload(f"job-{name}", name, 4, 4) for name in "xy"]
    status = {"fairSharing": COUNTED} if counted else {}
    objects = [queue, *(_local(name, "a", status=status) for name in "xy"), *jobs]
    if configuration is not None:
        objects.append(configured({**V1BETA2, **configuration}))
    cluster = either_of(objects)
    accountant.spend(x=1.0)
    report = Controller(policy, accountant, cluster, clock).cycle()
    written = quantity(cluster.get(LQ, "x", "ns")["spec"]["fairSharing"]["weight"])
    assert written == pytest.approx(value)
    assert {c.type: (c.status, c.reason) for c in report.targets[0].conditions}["Effective"] == effective


def test_weights_are_texts_and_only_our_fields_are_written() -> None:
    held = TargetQueue("a", "u", "7", None, kind=LQ, namespace="ns")
    patch = KueueAdapter().patch(held, 0.75, {scheduler_queue_objects.BASE: "unset"})
    assert patch == {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "LocalQueue",
        "metadata": {
            "name": "a",
            "namespace": "ns",
            "uid": "u",
            "annotations": {scheduler_queue_objects.BASE: "unset"},
        },
        "spec": {"fairSharing": {"weight": "0.75"}},
    }
    assert "spec" not in KueueAdapter().patch(held, None, {})


@given(st.floats(min_value=1e-6, max_value=1e4))
def test_a_published_weight_is_fixed_point_and_reads_back(value: float) -> None:
    text = fixed_point(value)
    assert set(text) <= set("0123456789.")
    assert len(text.partition(".")[2]) <= 6
    assert quantity(text) == pytest.approx(value, abs=5e-7)


def test_what_cannot_be_read_or_found_is_an_issue() -> None:
    policy = policy_of([{"name": n, "refs": [f"kueue:{n}"]} for n in ("a", "b")])
    observation = KueueAdapter().observe(policy, {CQ: [_queue("a", "heavy")]})
    assert observation.issues == (
        Issue("b", "Kueue has no queue b"),
        Issue("a", "spec.fairSharing.weight is 'heavy'"),
    )


def test_an_older_kueue_is_written_in_its_own_version(accountant: Any, clock: Any) -> None:
    old = CLUSTER_QUEUES[1]
    cluster = MemoryCluster([*(k for k in KINDS if not k.api_version.endswith("v1beta2"))], [configured(CONFIGURATION)])
    for name in "ab":
        sharing = {"cohort": "ml", "fairSharing": {"weight": "1"}}
        cluster.load([object_of(old, name, sharing)])
    policy = policy_of([{"name": n, "refs": [f"kueue:{n}"]} for n in "ab"], targets={"kueue": {"apply": "enforce"}})
    accountant.spend(a=1.0)
    report = Controller(policy, accountant, cluster, clock).cycle()
    assert [o.result for o in report.targets[0].outcomes] == ["applied", "applied"]
    weights = {obj["metadata"]["name"]: obj["spec"]["fairSharing"]["weight"] for obj in cluster.list(old)}
    assert weights == {"a": "0.5", "b": "1.5"}
    settled = Controller(policy, accountant, cluster, clock).cycle()
    assert {o.apply.name for o in settled.targets[0].outcomes} == {"a", "b"}  # still on the way, one step a cycle
    release_weights(policy, cluster)
    assert {obj["spec"]["fairSharing"]["weight"] for obj in cluster.list(old)} == {"1"}
    assert look_at(KueueAdapter(), policy, cluster).queues["a"].published is None


def test_pods_that_are_done_hold_nothing() -> None:
    """Of 10 pods of a Job 7 have completed: Kueue has given their quota to others already."""
    policy = policy_of([{"name": "a", "refs": ["kueue:a"]}])
    job = _workload("job", "a", 10, 2, admitted=True)
    job["status"]["reclaimablePods"] = [{"name": "main", "count": 7}]
    elastic = _workload("elastic", "a", 4, 1, pod_set={"minCount": 2})
    elastic["status"]["reclaimablePods"] = [{"name": "main", "count": 3}]
    done = _workload("done", "a", 4, 1, admitted=True)
    done["status"]["reclaimablePods"] = [{"name": "main", "count": 4}]
    locals_ = {"apiVersion": LQ.api_version, "kind": "LocalQueue", "metadata": {"name": "a", "namespace": "ns"},
               "spec": {"clusterQueue": "a"}}  # fmt: skip
    seen = {CQ: [_queue("a")], LQ: [locals_], WORKLOAD: [job, elastic, done]}
    observation = KueueAdapter().observe(policy, seen)
    gangs = {gang.name: (gang.requested, gang.allocated, gang.minimum) for gang in observation.gangs}
    assert gangs == {"job": (6, 6, 6), "elastic": (1, 0, 1)}
    assert observation.standings["a"].allocated == 6


def _tree(seen_of: Make, policy: Any, *objects: dict[str, Any]) -> Any:
    return seen_of(KueueAdapter(), policy, [configured(CONFIGURATION), *objects])


def test_a_root_cohort_has_no_cohort_above_and_the_queues_below_are_effective(seen_of: Make, policy: Any) -> None:
    below = [_queue(name, "1", cohort="dept") | {"status": ON} for name in "ab"]
    assert _conditions(_tree(seen_of, policy, object_of(COHORT, "dept", {}), *below))["Effective"] == (
        "True",
        "FairSharing",
    )


def test_two_roots_beside_each_other_share_nothing(seen_of: Make) -> None:
    policy = policy_of([{"name": n, "refs": [f"kueue-cohort:{n}"]} for n in "xy"])
    cohorts = [object_of(COHORT, n, {"fairSharing": {"weight": "1"}}) for n in "xy"]
    found = _tree(seen_of, policy, *cohorts, _queue("a", cohort="x") | {"status": ON})
    condition = _condition(found, "Effective")
    assert (condition.status, condition.reason) == ("False", "NothingToShare")
    assert "Cohort x is in no cohort" in condition.message
    assert "Cohort y is in no cohort" in condition.message


def test_a_manager_that_has_not_come_to_all_queues_is_not_judged(seen_of: Make) -> None:
    policy = policy_of([{"name": n, "refs": [f"kueue:{n}"]} for n in "ab"])
    found = _tree(seen_of, policy, _queue("a") | {"status": ON}, _queue("b") | {"status": OFF})
    assert _conditions(found)["Effective"] == ("Unknown", "SharesDisagree")


def test_a_configuration_that_is_not_ours_to_read_is_said(accountant: Any, clock: Any) -> None:
    """Another ConfigMap than the chart's role names: the API server answers 403, and the way out is named."""

    class Refusing(MemoryCluster):
        def get(self, kind: Kind, name: str, namespace: str = "") -> Any:
            if name == "kueue-config":
                raise Refused(f'configmaps "{name}" is forbidden')
            return super().get(kind, name, namespace)

    policy = policy_of([{"name": "a", "refs": ["kueue:a"]}], targets={"kueue": {"config": "batch/kueue-config"}})
    cluster = Refusing(KINDS, [_queue("a")])
    (target,) = Controller(policy, accountant, cluster, clock).cycle().targets
    said = {c.type: c for c in target.conditions}
    assert (said["Effective"].status, said["Effective"].reason) == ("Unknown", "ConfigurationUnread")
    assert "batch/kueue-config" in said["Effective"].message
    assert said["Readable"].message == 'configmaps "kueue-config" is forbidden'
    assert "fairshare.rbac.schedulerConfigMaps" in said["Readable"].remedy


@pytest.mark.parametrize(("document", "lines"), [
    ({**V1BETA2}, f"(v1beta2): `fairSharing: {{preemptionStrategies: [{', '.join(STRATEGIES)}]}}`"),
    ({**V1BETA1, "fairSharing": {}}, "(v1beta1): `fairSharing: {enable: true}`"),
])  # fmt: skip
def test_the_remedy_is_valid_in_the_version_that_stands_there(
    seen_of: Make, document: dict[str, Any], lines: str
) -> None:
    policy = policy_of([{"name": "a", "refs": ["kueue:a"]}])
    found = seen_of(KueueAdapter(), policy, [_queue("a") | {"status": OFF}, configured(document)])
    condition = _condition(found, "Effective")
    assert lines in condition.remedy
    assert "kubectl -n kueue-system edit configmap kueue-manager-config" in condition.remedy


def test_a_target_of_local_queues_alone_needs_no_fair_sharing(seen_of: Make) -> None:
    """Kueue reads LocalQueue weights by `admissionFairSharing`, whatever its `fairSharing` says."""
    policy = policy_of([{"name": "x", "refs": ["kueue:ns/x"]}])
    queue = _queue("a", admissionScope={"admissionMode": AFS}) | {"status": OFF}
    local = _local("x", "a", status={"fairSharing": COUNTED})
    found = seen_of(KueueAdapter(), policy, [queue, local, configured({**V1BETA2, "admissionFairSharing": ADMISSION})])
    assert _conditions(found)["Effective"] == ("True", "AdmissionFairSharing")


@pytest.fixture
def one() -> Any:
    return policy_of([{"name": "a", "deserved": 16, "refs": ["kueue:a"]}])


def _gangs_of(observation: Any) -> dict[str, tuple[float, float, float]]:
    return {gang.name: (gang.requested, gang.allocated, gang.minimum) for gang in observation.gangs}


def _admitted(workload: dict[str, Any], count: int, usage: dict[str, str]) -> dict[str, Any]:
    """As Kueue notes it: `count` pods of the set, and what they use in its own terms."""
    flavors = dict.fromkeys(usage, "h200")
    assignment = {"name": "main", "flavors": flavors, "resourceUsage": usage, "count": count}
    admitted = {**ACTIVE, "type": "Admitted", "reason": "Admitted", "message": "The workload is admitted"}
    status = {"admission": {"clusterQueue": "a", "podSetAssignments": [assignment]}, "conditions": [admitted]}
    return {**workload, "status": status}


def test_gpus_that_kueue_transforms_into_credits_are_gpus(seen_of: Make, one: Any) -> None:
    """`resources.transformations` with `Replace`: the admission speaks of credits, pods of GPUs."""
    jobs = [_admitted(_workload(f"j{n}", "a", 1, 2), 1, {"example.com/credits": "20"}) for n in range(4)]
    found = seen_of(KueueAdapter(), one, [_queue("a"), _local("a", "a"), *jobs, _workload("next", "a", 1, 2)])
    assert (found.standings["a"].requested, found.standings["a"].allocated) == (10.0, 8.0)
    assert found.capacity is None
    assert _conditions(found)["InSync"] == ("Unknown", "NotComparable")


def test_what_is_admitted_in_part_asks_for_no_more(seen_of: Make, one: Any) -> None:
    job = _admitted(_workload("part", "a", 30, 1, pod_set={"minCount": 2}), 22, {GPU: "22"})
    assert _gangs_of(seen_of(KueueAdapter(), one, [_queue("a"), _local("a", "a"), job])) == {"part": (22.0, 22.0, 2.0)}


@pytest.mark.parametrize(("admitted", "gangs"), [
    (False, {"job-1": (4.0, 4.0, 4.0), "job-2": (8.0, 0.0, 8.0)}),
    (True, {"job-2": (12.0, 12.0, 12.0)}),  # and the old one not yet finished
])  # fmt: skip
def test_an_elastic_job_asks_for_what_its_next_slice_adds(
    seen_of: Make, one: Any, admitted: bool, gangs: dict[str, tuple[float, float, float]]
) -> None:
    """Scaled from 2 to 6 pods of 2 GPUs: Kueue admits the new Workload in the old one's place."""
    old = _admitted(_workload("job-1", "a", 2, 2), 2, {GPU: "4"})
    new = _workload("job-2", "a", 6, 2)
    new["metadata"] |= {"annotations": {"kueue.x-k8s.io/workload-slice-replacement-for": "ns/job-1"}}
    slices = [old, _admitted(new, 6, {GPU: "12"}) if admitted else new]
    found = seen_of(KueueAdapter(), one, [_queue("a"), _local("a", "a"), *slices])
    assert _gangs_of(found) == gangs
    assert found.standings["a"].requested == 12.0


@pytest.mark.parametrize(("asked", "level"), [
    ({"required": "example.com/rack"}, "example.com/rack"),
    ({"preferred": "example.com/rack"}, ""),
    ({"unconstrained": True}, ""),
])  # fmt: skip
def test_a_required_topology_is_known(seen_of: Make, one: Any, asked: dict[str, Any], level: str) -> None:
    job = _workload("tight", "a", 2, 8, pod_set={"topologyRequest": asked})
    (gang,) = seen_of(KueueAdapter(), one, [_queue("a"), _local("a", "a"), job]).gangs
    assert (gang.requested, gang.allocated, gang.topology) == (16.0, 0.0, level)


def test_what_kueue_places_by_topology_holds_what_was_admitted(seen_of: Make, one: Any) -> None:
    """As its manager leaves it: two pods on two hosts of one rack."""
    job = _admitted(_workload("pair", "a", 2, 8, pod_set={"topologyRequest": {"required": "rack"}}), 2, {GPU: "16"})
    hosts = [{"individual": {"prefix": "n", "roots": ["2", "3"]}}]
    slices = [{"domainCount": 2, "podCounts": {"universal": 1}, "valuesPerLevel": hosts}]
    job["status"]["admission"]["podSetAssignments"][0]["topologyAssignment"] = {
        "levels": ["kubernetes.io/hostname"],
        "slices": slices,
    }
    (gang,) = seen_of(KueueAdapter(), one, [_queue("a"), _local("a", "a"), job]).gangs
    assert (gang.requested, gang.allocated, gang.waits) == (16.0, 16.0, 0.0)


def test_a_workload_that_multikueue_sends_away_holds_its_quota_here_and_its_gpus_there(
    seen_of: Make, accountant: Any, clock: Any, either_of: Make
) -> None:
    """As both managers leave it: each cluster counts it once, and the manager's has no node with GPUs."""
    policy = policy_of([{"name": "a", "deserved": 16, "refs": ["kueue:a"]}], targets={"kueue": {"apply": "enforce"}})
    sent = _admitted(_workload("far", "a", 2, 4), 2, {GPU: "8"})
    ready = {"lastTransitionTime": SINCE, "message": 'admitted on "w1"', "name": "mk", "state": "Ready"}
    sent["status"] |= {"admissionChecks": [ready], "clusterName": "w1"}
    checked = _queue("a", **_quota("16"), admissionChecksStrategy={"admissionChecks": [{"name": "mk"}]}) | {
        "status": ON
    }
    cluster = either_of([checked, _local("a", "a"), sent, _workload("waits", "a", 3, 4), configured(CONFIGURATION)])
    accountant.spend(a=0.5)
    (target,) = Controller(policy, accountant, cluster, clock).cycle().targets
    assert (target.standings["a"].requested, target.standings["a"].allocated, target.gpus) == (20.0, 8.0, 16.0)
    assert {c.type: c.reason for c in target.conditions}["Effective"] == "FairSharing"


def test_the_worker_clusters_copy_of_a_workload_is_a_workload(seen_of: Make, one: Any) -> None:
    copy = _admitted(_workload("far", "a", 2, 4), 2, {GPU: "8"})
    copy["metadata"]["labels"] = {"kueue.x-k8s.io/multikueue-origin": "multikueue"}
    (gang,) = seen_of(KueueAdapter(), one, [_queue("a"), _local("a", "a"), copy]).gangs
    assert (gang.requested, gang.allocated) == (8.0, 8.0)


@pytest.mark.parametrize("stop", ["Hold", "HoldAndDrain"])
@pytest.mark.parametrize("kind", ["ClusterQueue", "LocalQueue"])
def test_what_waits_in_a_stopped_queue_asks_for_nothing(seen_of: Make, one: Any, kind: str, stop: str) -> None:
    halted: dict[str, Any] = {"stopPolicy": stop}
    queue = _queue("a", **_quota("16"), **(halted if kind == "ClusterQueue" else {}))
    local = _local("a", "a", **(halted if kind == "LocalQueue" else {}))
    running = _admitted(_workload("runs", "a", 1, 4), 1, {GPU: "4"})
    found = seen_of(KueueAdapter(), one, [queue, local, running, _workload("waits", "a", 2, 4)])
    assert _gangs_of(found) == {"runs": (4.0, 4.0, 4.0)}
    condition = _condition(found, "InSync")
    assert (condition.status, condition.reason) == ("False", "QueuesStopped")
    name = "ClusterQueue a" if kind == "ClusterQueue" else "LocalQueue ns/a"
    assert condition.message == f"{name} admits nothing (stopPolicy {stop}): 8 GPUs that wait there are not counted"


def test_a_queue_that_kueue_calls_inactive_admits_nothing(seen_of: Make, one: Any) -> None:
    inactive = {
        **ACTIVE,
        "status": "False",
        "reason": "FlavorNotFound",
        "message": "references missing ResourceFlavor(s): h200",
    }
    queue = _queue("a", **_quota("16")) | {"status": {"conditions": [inactive]}}
    found = seen_of(KueueAdapter(), one, [queue, _local("a", "a"), _workload("waits", "a", 2, 4)])
    assert found.gangs == ()
    assert _conditions(found)["InSync"] == ("False", "QueuesStopped")


def test_quotas_bound_what_a_queue_can_hold(seen_of: Make) -> None:
    """Two ClusterQueues of 12 in one Cohort: 24 GPUs to divide, whatever the nodes have."""
    policy = policy_of([{"name": n, "deserved": 12, "refs": [f"kueue:{n}"]} for n in "ab"])
    queues = [_queue("a", **_quota("12", borrowingLimit="4")), _queue("b", **_quota("12", lendingLimit="2"))]
    found = seen_of(KueueAdapter(), policy, queues)
    assert found.capacity == 24.0
    # a: 12 and what b lends; b: what it keeps, and what is in the Cohort.
    assert {name: standing.most for name, standing in found.standings.items()} == {"a": 14.0, "b": 24.0}
    assert _conditions(found)["InSync"] == ("False", "PolicyDiffers")


def test_where_kueue_is_as_the_policy_says_it_is_in_sync(seen_of: Make, policy: Any) -> None:
    like = policy_of(
        [
            {"name": "dept", "deserved": 24, "refs": ["kueue-cohort:dept"]},
            {"name": "a", "parent": "dept", "deserved": 16, "limit": 20, "refs": ["kueue:a"]},
            {"name": "b", "parent": "dept", "deserved": 8, "refs": ["kueue:b"]},
        ]
    )
    objects = [
        object_of(COHORT, "dept", {}),
        _queue("a", cohort="dept", **_quota("16", borrowingLimit="4")),
        _queue("b", cohort="dept", **_quota("8")),
    ]
    assert _conditions(seen_of(KueueAdapter(), like, objects))["InSync"] == ("True", "AsPolicy")
    moved = [*objects[:2], _queue("b", cohort="other", **_quota("6"))]
    condition = _condition(seen_of(KueueAdapter(), like, moved), "InSync")
    assert (condition.status, condition.reason) == ("False", "PolicyDiffers")
    assert condition.message == (
        "a: limit 16, policy 20; b: quota 6, policy 8; b: parent other, policy dept; dept: quota 16, policy 24"
    )


def test_siblings_of_the_policy_in_different_cohorts_share_nothing(seen_of: Make) -> None:
    policy = policy_of([{"name": n, "deserved": 8, "refs": [f"kueue:{n}"]} for n in "ab"])
    queues = [_queue("a", cohort="x", **_quota("8")), _queue("b", cohort="y", **_quota("8"))]
    condition = _condition(seen_of(KueueAdapter(), policy, queues), "InSync")
    assert condition.message == "siblings in the policy share no Cohort: a in Cohort x; b in Cohort y"


def test_an_unset_weight_is_1_for_kueue(either_of: Make, accountant: Any, clock: Any) -> None:
    """A weight of 0 has to be written where the field is unset; one of 1 stands already."""
    queues = [{"name": "a", "weight": 0, "refs": ["kueue:a"]}, {"name": "b", "weight": 1, "refs": ["kueue:b"]}]
    policy = policy_of(queues, targets={"kueue": {"apply": "enforce"}})
    cluster = either_of([_queue("a"), _queue("b"), configured(CONFIGURATION)])
    report = Controller(policy, accountant, cluster, clock).cycle()
    assert {o.apply.name: (o.apply.previous, o.apply.value) for o in report.targets[0].outcomes} == {"a": (None, 0.0)}
    assert cluster.get(CQ, "a")["spec"]["fairSharing"]["weight"] == "0"
    other = policy_of([queues[1]], targets={"kueue": {"apply": "enforce"}})
    conditions = Controller(other, accountant, cluster, clock).cycle().targets[0].conditions
    (behind,) = [condition for condition in conditions if condition.type == "Mapped"]
    assert "a has the controller's weight 0 (its base: unset)" in behind.message
    release_weights(policy, cluster)
    assert "weight" not in (cluster.get(CQ, "a").get("spec") or {}).get("fairSharing", {})


def test_release_leaves_another_policys_queues_alone(either_of: Make, accountant: Any, clock: Any) -> None:
    cluster = either_of([*(_queue(name, "1") for name in "abcd"), configured(CONFIGURATION)])
    first, second = (
        policy_of([{"name": n, "refs": [f"kueue:{n}"]} for n in names], targets={"kueue": {"apply": "enforce"}})
        for names in ("ab", "cd")
    )
    accountant.spend(a=0.9, b=0.1, c=0.9, d=0.1)
    for policy in (first, second):
        Controller(policy, accountant, cluster, clock).cycle()

    def weight(name: str) -> float | None:
        return quantity(cluster.get(CQ, name)["spec"]["fairSharing"]["weight"])

    standing = weight("c")
    assert standing != 1.0
    assert {o.apply.name for o in release_weights(first, cluster)} == {"a", "b"}
    assert (weight("a"), weight("c")) == (1.0, standing)


def _owned(workload: dict[str, Any], job: str) -> dict[str, Any]:
    """Made by Kueue for a Job, under a name of its own."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": f"uid-{job}", "controller": True}
    metadata = {**workload["metadata"], "ownerReferences": [owner], "creationTimestamp": "2026-09-30T00:00:00Z"}
    return {**workload, "metadata": metadata}


def _borrowed(**more: Any) -> list[dict[str, Any]]:
    """A Cohort of 16 GPUs on nodes of 32: p1 borrows all of it, p2 holds nothing and waits."""
    running = [_admitted(_workload(f"job-big-{n}", "p1", 1, 4), 1, {GPU: "4"}) for n in range(4)]
    for each in running:
        each["status"]["admission"]["clusterQueue"] = "p1"
    return [
        configured(CONFIGURATION), node_object("n0", 16), node_object("n1", 16),
        *(_queue(name, "1", **_quota("8"), **more) | {"status": ON} for name in ("p1", "p2")),
        _local("p1", "p1"), _local("p2", "p2"),
        *running, _owned(_workload("job-wants-1a2b3", "p2", 1, 8), "wants"),
    ]  # fmt: skip


@pytest.fixture
def halves() -> Any:
    return policy_of(
        [{"name": n, "deserved": 8, "refs": [f"kueue:{n}"]} for n in ("p1", "p2")],
        targets={"kueue": {"apply": "enforce"}},
        preemption={"mode": "dry-run", "wait": 0, "min_runtime": 0},
    )


def test_room_on_nodes_is_no_room_in_the_quota(halves: Any, accountant: Any, clock: Any) -> None:
    """16 GPUs are free on nodes, none in the Cohort: p2 is within its quota, and p1 gives back what it borrows."""
    cluster = MemoryCluster(KINDS, _borrowed())
    (target,) = Controller(halves, accountant, cluster, clock).cycle().targets
    assert target.gpus == 16.0
    assert {due.queue: due.gpus for due in target.entitlements} == {"p1": 8.0, "p2": 8.0}
    assert target.preemption is not None
    (verdict,) = target.preemption.verdicts
    assert (verdict.queue, verdict.outcome, len(verdict.victims)) == ("p2", "preempts", 2)
    assert sum(victim.gpus for victim in verdict.victims) == 8.0


def test_where_the_quota_has_room_nodes_decide(halves: Any, accountant: Any, clock: Any) -> None:
    objects = [obj for obj in _borrowed() if not obj["metadata"]["name"].startswith(("job-big-2", "job-big-3"))]
    (target,) = Controller(halves, accountant, MemoryCluster(KINDS, objects), clock).cycle().targets
    assert target.preemption is not None
    assert [verdict.outcome for verdict in target.preemption.verdicts] == ["room"]


def test_a_quota_that_nothing_frees_is_named(accountant: Any, clock: Any) -> None:
    """Queues outside the policy hold the Cohort's quota: no workload can be stopped for it, and nodes do not help."""
    policy = policy_of(
        [{"name": "p2", "deserved": 8, "refs": ["kueue:p2"]}], preemption={"mode": "dry-run", "wait": 0},
        targets={"kueue": {"apply": "enforce"}},
    )  # fmt: skip
    (target,) = Controller(policy, accountant, MemoryCluster(KINDS, _borrowed()), clock).cycle().targets
    assert target.preemption is not None
    (verdict,) = target.preemption.verdicts
    assert (verdict.outcome, verdict.reason) == ("denied", "needs 8 GPUs, but no workload runs that could give way")


def test_a_job_is_meant_by_its_own_name(halves: Any, accountant: Any, clock: Any) -> None:
    cluster = MemoryCluster(KINDS, _borrowed())
    for name in ("ns/wants", "ns/job-wants-1a2b3"):
        call = PreemptionCall("", name, "asked for by hand", trigger="by hand")
        report = by_hand(halves, accountant, cluster, clock, ADAPTERS, (), call, "dry-run")
        assert [verdict.claimant for verdict in report.verdicts] == ["Workload/ns/job-wants-1a2b3"]
    unknown = PreemptionCall("", "ns/other", "", trigger="by hand")
    with pytest.raises(NotPossible):
        by_hand(halves, accountant, cluster, clock, ADAPTERS, (), unknown, "dry-run")
