"""Kueue: its objects, weights written back, its configuration, and trees of quotas."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.wire.policy_models import Policy
from fairshare.controller.control_loop import by_hand
from fairshare.controller.weight_writer import release_weights
from fairshare.core import scheduler_queue_objects
from fairshare.core.admission_quota_tree import QuotaTree, total_quota
from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import UNLIMITED, Entitlement, Issue, Quota, TargetQueue
from fairshare.preemption.claims_and_placement import claims, preemption_inputs
from fairshare.preemption.preemption_controller import NotPossible
from fairshare.preemption.preemption_types import PreemptionCall
from fairshare.preemption.victim_selection import decide
from fairshare.schedulers.kueue.adapter import (
    ADMISSION_LINES,
    CONFIGURATION_KEY,
    Configuration,
    KueueAdapter,
    fair_sharing_lines,
    read_configuration,
)
from fairshare.schedulers.kueue.kinds import CLUSTER_QUEUES, COHORTS, FLAVORS, LOCAL_QUEUES, WORKLOADS
from fairshare.targets.weight_plan import look_at
from gputally.base.errors import ClusterRefused
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, GPU, Kind, fixed_point, quantity
from tests.fairshare.aliases import ALIASES
from tests.fairshare.builders import node_object, object_of, pod_object, policy_of, read_plain_pod
from tests.fairshare.conftest import NOW_MS, Accountant, Make
from tests.fairshare.kueue.objects import V1BETA1, V1BETA2, configured
from tests.fairshare.observations import condition, reasons_of
from tests.fairshare.scheduler_kinds import KINDS

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
    """Build a quota of GPUs, beside CPUs, of a ClusterQueue or Cohort."""
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


TREE = policy_of(
    [
        {"name": "dept", "refs": ["kueue-cohort:dept"]},
        {"name": "a", "parent": "dept", "refs": ["kueue:a", "kueue:ns/a"]},
        {"name": "b", "parent": "dept", "refs": ["kueue:b"]},
    ],
    targets={"kueue": {"apply": "enforce"}},
)


def _enforced(names: Sequence[str], *, ref: str = "kueue:", options: Mapping[str, Any] = {}, **fields: Any) -> Policy:
    """Build a policy that enforces these Kueue queues. options: of the policy. fields: of every queue."""
    queues = [{"name": name, "refs": [f"{ref}{name}"], **fields} for name in names]
    return policy_of(queues, **{"targets": {"kueue": {"apply": "enforce"}}, **options})


ONE = _enforced("a", deserved=16)


def test_queues_are_found_at_their_highest_level(seen_of: Make) -> None:
    objects = [
        object_of(COHORT, "dept", {"parentName": "root", "fairSharing": {"weight": "2"}}),
        _queue("a", "750m"), _queue("b"), _queue("stranger"), _local("a", "a"),
    ]  # fmt: skip
    observation = seen_of(KueueAdapter(), TREE, objects)
    assert {name: (held.kind.kind, held.weight) for name, held in observation.queues.items() if held.kind} == {
        "dept": ("Cohort", 2.0),
        "a": ("ClusterQueue", 0.75),
        "b": ("ClusterQueue", None),
    }
    assert {name: standing.weight for name, standing in observation.standings.items()} == {
        "dept": 2.0, "a": 0.75, "b": 1.0,
    }  # fmt: skip
    assert observation.issues == ()


def test_demand_is_what_workloads_ask_for_and_hold_up_the_tree(seen_of: Make) -> None:
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
    observation = seen_of(KueueAdapter(), TREE, objects)
    amounts = {name: (s.requested, s.allocated) for name, s in observation.standings.items()}
    assert amounts == {"dept": (25.0, 8.0), "a": (24.0, 8.0), "b": (1.0, 0.0)}
    gangs = {gang.name: (gang.requested, gang.allocated, gang.minimum, gang.waits) for gang in observation.gangs}
    assert gangs == {
        "running": (8.0, 8.0, 8.0, 0.0),
        "waiting": (16.0, 0.0, 8.0, 8.0),
        "by-cluster-queue": (1.0, 0.0, 1.0, 1.0),
    }


def test_where_workloads_cannot_be_read_the_queues_own_status_counts() -> None:
    reserved = [{"name": "h200", "resources": [{"name": GPU, "total": "6"}, {"name": "cpu", "total": "64"}]}]
    seen = {COHORT: [], CQ: [{**_queue("a"), "status": {"flavorsReservation": reserved}}, _queue("b")]}
    standings = KueueAdapter().observe(TREE, seen).standings
    assert (standings["a"].allocated, standings["b"].allocated) == (6.0, 0.0)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"status": OFF}, ("False", "FairSharingOff")),
        ({"configuration": V1BETA2}, ("False", "FairSharingOff")),
        ({"configuration": V1BETA2, "status": OFF}, ("False", "FairSharingOff")),
        ({"configuration": {**V1BETA2, "fairSharing": {}}}, ("False", "ConfigurationRefused")),
        ({"configuration": {**V1BETA1, "fairSharing": {}}, "status": OFF}, ("False", "FairSharingOff")),
        ({"configuration": {**V1BETA1, "fairSharing": {"enable": False}}}, ("False", "FairSharingOff")),
        (
            {"configuration": {**V1BETA1, "fairSharing": {"preemptionStrategies": STRATEGIES}}},
            ("False", "FairSharingOff"),
        ),
        ({"configuration": {**V1BETA1, "fairSharing": {"enable": True}}, "status": ON}, ("True", "FairSharing")),
        ({"configuration": None, "status": ON}, ("True", "FairSharing")),
        ({"configuration": None, "status": OFF}, ("False", "FairSharingOff")),
    ],
)
def test_a_weight_that_cannot_act_is_reported(seen_of: Make, change: dict[str, Any], wanted: tuple[str, str]) -> None:
    configuration = change.get("configuration", CONFIGURATION)
    queue = _queue("a") | {"status": change.get("status", {})}
    objects = [queue, *([configured(configuration)] if configuration is not None else [])]
    assert reasons_of(seen_of(KueueAdapter(), ONE, objects))["Effective"] == wanted


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
    mode: str,
    configuration: dict[str, Any] | None,
    counted: bool,
    value: float,
    effective: tuple[str, str],
    controller_of: Make,
) -> None:
    """Within one ClusterQueue Kueue either keeps history itself (and gets the configured weight) or ignores weights."""
    bounds = {"bounds": {"min_multiplier": 0.2}}
    policy = _enforced("xy", ref="kueue:ns/", options=bounds, weight=2)
    queue = _queue("a", admissionScope={"admissionMode": mode})
    jobs = [_workload(f"job-{name}", name, 4, 4) for name in "xy"]
    status = {"fairSharing": COUNTED} if counted else {}
    objects = [queue, *(_local(name, "a", status=status) for name in "xy"), *jobs]
    if configuration is not None:
        objects.append(configured({**V1BETA2, **configuration}))
    cluster = either_of(objects)
    accountant.spend(x=1.0)
    report = controller_of(policy, cluster).cycle()
    written = quantity(cluster.get(LQ, "x", "ns")["spec"]["fairSharing"]["weight"])
    assert written == pytest.approx(value)
    assert reasons_of(report.targets[0])["Effective"] == effective


def test_weights_are_texts_and_only_our_fields_are_written() -> None:
    held, ours = TargetQueue("a", "u", "7", None, kind=LQ, namespace="ns"), {scheduler_queue_objects.BASE: "unset"}
    assert KueueAdapter().patch(held, 0.75, ours) == object_of(
        LQ, "a", {"fairSharing": {"weight": "0.75"}}, uid="u", annotations=ours
    )
    assert "spec" not in KueueAdapter().patch(held, None, {})


@given(st.floats(min_value=1e-6, max_value=1e4))
def test_a_published_weight_is_fixed_point_and_reads_back(value: float) -> None:
    text = fixed_point(value)
    assert set(text) <= set("0123456789.")
    assert len(text.partition(".")[2]) <= 6
    assert quantity(text) == pytest.approx(value, abs=5e-7)


def test_what_cannot_be_read_or_found_is_an_issue() -> None:
    observation = KueueAdapter().observe(_enforced("ab"), {CQ: [_queue("a", "heavy")]})
    unread = Issue("a", "spec.fairSharing.weight is 'heavy'")
    assert observation.issues == (Issue("b", "Kueue has no queue b"), unread)


def test_an_older_kueue_is_written_in_its_own_version(accountant: Any, controller_of: Make) -> None:
    old = CLUSTER_QUEUES[1]
    cluster = MemoryCluster([*(k for k in KINDS if not k.api_version.endswith("v1beta2"))], [configured(CONFIGURATION)])
    cluster.load([object_of(old, name, {"cohort": "ml", "fairSharing": {"weight": "1"}}) for name in "ab"])
    policy = _enforced("ab")
    accountant.spend(a=1.0)
    report = controller_of(policy, cluster).cycle()
    assert [o.result for o in report.targets[0].outcomes] == ["applied", "applied"]
    weights = {obj["metadata"]["name"]: obj["spec"]["fairSharing"]["weight"] for obj in cluster.list(old)}
    assert weights == {"a": "0.1", "b": "1.9"}
    assert controller_of(policy, cluster).cycle().targets[0].outcomes == ()
    release_weights(policy, cluster)
    assert {obj["spec"]["fairSharing"]["weight"] for obj in cluster.list(old)} == {"1"}
    assert look_at(KueueAdapter(), policy, cluster).queues["a"].published is None


BELOW = [_queue(name, "1", cohort="dept") | {"status": ON} for name in "ab"]
APART = [_queue("a") | {"status": ON}, _queue("b") | {"status": OFF}]
SHARING = configured(CONFIGURATION)
SCOPED = [
    _queue("a", admissionScope={"admissionMode": AFS}) | {"status": OFF},
    _local("x", "a", status={"fairSharing": COUNTED}),
    configured({**V1BETA2, "admissionFairSharing": ADMISSION}),
]


@pytest.mark.parametrize(
    ("policy", "objects", "wanted"),
    [
        (TREE, [SHARING, object_of(COHORT, "dept", {}), *BELOW], ("True", "FairSharing")),
        (_enforced("ab"), [SHARING, *APART], ("Unknown", "SharesDisagree")),
        (_enforced("x", ref="kueue:ns/"), SCOPED, ("True", "AdmissionFairSharing")),
    ],
    ids=["root cohort", "a manager that has not come to all queues", "local queues alone"],
)
def test_whether_weights_act(seen_of: Make, policy: Policy, objects: list[Any], wanted: tuple[str, str]) -> None:
    """Kueue reads the weights of LocalQueues by `admissionFairSharing`, whatever `fairSharing` is."""
    assert reasons_of(seen_of(KueueAdapter(), policy, objects))["Effective"] == wanted


def test_two_roots_beside_each_other_share_nothing(seen_of: Make) -> None:
    cohorts = [object_of(COHORT, n, {"fairSharing": {"weight": "1"}}) for n in "xy"]
    objects = [configured(CONFIGURATION), *cohorts, _queue("a", cohort="x") | {"status": ON}]
    found = condition(seen_of(KueueAdapter(), _enforced("xy", ref="kueue-cohort:"), objects), "Effective")
    assert (found.status, found.reason) == ("False", "NothingToShare")
    assert "Cohort x is in no cohort" in found.message
    assert "Cohort y is in no cohort" in found.message


def test_a_configuration_that_is_not_ours_to_read_is_said(controller_of: Make) -> None:
    """A ConfigMap that the chart's role does not name: the API server answers 403, and the message names the remedy."""

    class Refusing(MemoryCluster):
        def get(self, kind: Kind, name: str, namespace: str = "") -> Any:
            if name == "kueue-config":
                raise ClusterRefused(f'configmaps "{name}" is forbidden')
            return super().get(kind, name, namespace)

    policy = policy_of([{"name": "a", "refs": ["kueue:a"]}], targets={"kueue": {"config": "batch/kueue-config"}})
    cluster = Refusing(KINDS, [_queue("a")])
    (target,) = controller_of(policy, cluster).cycle().targets
    assert reasons_of(target)["Effective"] == ("Unknown", "ConfigurationUnread")
    assert "batch/kueue-config" in condition(target, "Effective").message
    assert condition(target, "Readable").message == 'configmaps "kueue-config" is forbidden'
    assert "fairshare.rbac.schedulerConfigMaps" in condition(target, "Readable").remedy


@pytest.mark.parametrize(("document", "lines"), [
    ({**V1BETA2}, f"(v1beta2): `fairSharing: {{preemptionStrategies: [{', '.join(STRATEGIES)}]}}`"),
    ({**V1BETA1, "fairSharing": {}}, "(v1beta1): `fairSharing: {enable: true}`"),
])  # fmt: skip
def test_the_remedy_is_valid_in_the_version_that_is_there(seen_of: Make, document: dict[str, Any], lines: str) -> None:
    found = seen_of(KueueAdapter(), ONE, [_queue("a") | {"status": OFF}, configured(document)])
    remedy = condition(found, "Effective").remedy
    assert lines in remedy
    assert "kubectl -n kueue-system edit configmap kueue-manager-config" in remedy


def _gangs_of(observation: Any) -> dict[str, tuple[float, float, float]]:
    return {gang.name: (gang.requested, gang.allocated, gang.minimum) for gang in observation.gangs}


def _done(workload: dict[str, Any], pods: int) -> dict[str, Any]:
    """Complete this many pods of the workload: Kueue has given their quota to others already."""
    workload["status"]["reclaimablePods"] = [{"name": "main", "count": pods}]
    return workload


def _noted(workload: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {**workload, "metadata": workload["metadata"] | metadata}


def _placed(workload: dict[str, Any]) -> dict[str, Any]:
    """Build an admitted Workload as Kueue's manager writes it: two pods on two hosts of one rack."""
    hosts = [{"individual": {"prefix": "n", "roots": ["2", "3"]}}]
    slices = [{"domainCount": 2, "podCounts": {"universal": 1}, "valuesPerLevel": hosts}]
    found = {"levels": ["kubernetes.io/hostname"], "slices": slices}
    workload["status"]["admission"]["podSetAssignments"][0]["topologyAssignment"] = found
    return workload


def _admitted(workload: dict[str, Any], count: int, usage: dict[str, str]) -> dict[str, Any]:
    """Build an admission as Kueue writes it: `count` pods of the set, and their usage in Kueue's terms."""
    flavors = dict.fromkeys(usage, "h200")
    assignment = {"name": "main", "flavors": flavors, "resourceUsage": usage, "count": count}
    admitted = {**ACTIVE, "type": "Admitted", "reason": "Admitted", "message": "The workload is admitted"}
    status = {"admission": {"clusterQueue": "a", "podSetAssignments": [assignment]}, "conditions": [admitted]}
    return {**workload, "status": status}


# Scaled from 2 to 6 pods of 2 GPUs: Kueue admits the new Workload in the place of the old one.
OLD_SLICE = _admitted(_workload("job-1", "a", 2, 2), 2, {GPU: "4"})
NEW_SLICE = _noted(
    _workload("job-2", "a", 6, 2), annotations={"kueue.x-k8s.io/workload-slice-replacement-for": "ns/job-1"}
)
IN_PART = _workload("part", "a", 30, 1, pod_set={"minCount": 2})
IN_A_RACK = _workload("pair", "a", 2, 8, pod_set={"topologyRequest": {"required": "rack"}})
COPY = _noted(_workload("far", "a", 2, 4), labels={"kueue.x-k8s.io/multikueue-origin": "multikueue"})


@pytest.mark.parametrize(
    ("workloads", "gangs"),
    [
        ([_done(_workload("job", "a", 10, 2, admitted=True), 7)], {"job": (6, 6, 6)}),
        ([_done(_workload("elastic", "a", 4, 1, pod_set={"minCount": 2}), 3)], {"elastic": (1, 0, 1)}),
        ([_done(_workload("done", "a", 4, 1, admitted=True), 4)], {}),
        ([_admitted(IN_PART, 22, {GPU: "22"})], {"part": (22, 22, 2)}),
        ([OLD_SLICE, NEW_SLICE], {"job-1": (4, 4, 4), "job-2": (8, 0, 8)}),
        ([OLD_SLICE, _admitted(NEW_SLICE, 6, {GPU: "12"})], {"job-2": (12, 12, 12)}),  # the old one has not finished
        ([_placed(_admitted(IN_A_RACK, 2, {GPU: "16"}))], {"pair": (16, 16, 16)}),
        ([_admitted(COPY, 2, {GPU: "8"})], {"far": (8, 8, 8)}),  # of the worker cluster
    ],
    ids=["completed pods", "elastic", "all completed", "in part", "slice", "admitted slice", "placed", "copy"],
)
def test_a_workload_asks_for_and_holds_what_is_left_of_it(
    seen_of: Make, workloads: list[dict[str, Any]], gangs: dict[str, tuple[float, float, float]]
) -> None:
    found = seen_of(KueueAdapter(), ONE, [_queue("a"), _local("a", "a"), *workloads])
    assert _gangs_of(found) == gangs
    assert not any(gang.waits for gang in found.gangs if gang.allocated)
    assert found.standings["a"].requested == sum(requested for requested, _, _ in gangs.values())
    assert found.standings["a"].allocated == sum(allocated for _, allocated, _ in gangs.values())


def test_gpus_that_kueue_transforms_into_credits_are_gpus(seen_of: Make) -> None:
    """`resources.transformations` with `Replace`: the admission contains credits, the pods GPUs."""
    jobs = [_admitted(_workload(f"j{n}", "a", 1, 2), 1, {"example.com/credits": "20"}) for n in range(4)]
    found = seen_of(KueueAdapter(), ONE, [_queue("a"), _local("a", "a"), *jobs, _workload("next", "a", 1, 2)])
    assert (found.standings["a"].requested, found.standings["a"].allocated) == (10.0, 8.0)
    assert found.capacity is None
    assert reasons_of(found)["InSync"] == ("Unknown", "NotComparable")


def _claiming(
    name: str, pods: int, counted: dict[str, str] | None = None, *, gpus: int = 0, template: str = "devices"
) -> dict[str, Any]:
    """Build a Workload whose pods claim devices. counted: what Kueue counted when it last considered the Workload."""
    workload = _workload(name, "a", pods, gpus)
    spec = workload["spec"]["podSets"][0]["template"]["spec"]
    spec["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": template}]
    if not gpus:
        spec["containers"] = [{"name": "c", "resources": {"claims": [{"name": "gpu"}]}}]
    status = {"resourceRequests": [{"name": "main", "resources": counted}]} if counted else {}
    return {**workload, "status": status}


def test_gpus_that_pods_claim_are_those_that_kueue_counts_for_their_device_class(seen_of: Make) -> None:
    """Kueue's `deviceClassMappings` map a DeviceClass to the quota of a resource."""
    runs, done = (_admitted(_claiming(name, 2), 2, {"cpu": "2", GPU: "4"}) for name in ("runs", "done"))
    workloads = [
        runs, _done(done, 1), _claiming("waits", 3, {GPU: "6"}), _claiming("new", 1),
        _claiming("both", 1, {GPU: "3"}, gpus=1), _claiming("other", 1, {"example.com/nic": "1"}, template="nic"),
        _claiming("uncounted", 1, template="another"),
    ]  # fmt: skip
    found = seen_of(KueueAdapter(), ONE, [_queue("a", **_quota("16")), _local("a", "a"), *workloads])
    counted = {"runs": (4, 4, 4), "done": (2, 2, 2), "waits": (6, 0, 6), "both": (3, 0, 3)}
    assert _gangs_of(found) == {**counted, "new": (2, 0, 2)}  # as many as an equal one
    assert found.quotas["ClusterQueue a (h200)"].used == 6
    waits = next(gang for gang in found.gangs if gang.name == "waits")
    assert [choice.pool for choice in waits.choices] == ["ClusterQueue a (h200)"]


@pytest.mark.parametrize(("asked", "level"), [
    ({"required": "example.com/rack"}, "example.com/rack"),
    ({"preferred": "example.com/rack"}, ""),
    ({"unconstrained": True}, ""),
])  # fmt: skip
def test_a_required_topology_is_known(seen_of: Make, asked: dict[str, Any], level: str) -> None:
    job = _workload("tight", "a", 2, 8, pod_set={"topologyRequest": asked})
    (gang,) = seen_of(KueueAdapter(), ONE, [_queue("a"), _local("a", "a"), job]).gangs
    assert (gang.requested, gang.allocated, gang.topology) == (16.0, 0.0, level)


def test_multikueue_holds_quota_here_and_gpus_there(
    seen_of: Make, accountant: Any, either_of: Make, controller_of: Make
) -> None:
    """As both managers write it: each cluster counts the Workload once, and the manager's has no node with GPUs."""
    sent = _admitted(_workload("far", "a", 2, 4), 2, {GPU: "8"})
    ready = {"lastTransitionTime": SINCE, "message": 'admitted on "w1"', "name": "mk", "state": "Ready"}
    sent["status"] |= {"admissionChecks": [ready], "clusterName": "w1"}
    strategy = {"admissionChecksStrategy": {"admissionChecks": [{"name": "mk"}]}}
    checked = _queue("a", **_quota("16"), **strategy) | {"status": ON}
    cluster = either_of([checked, _local("a", "a"), sent, _workload("waits", "a", 3, 4), configured(CONFIGURATION)])
    accountant.spend(a=0.5)
    (target,) = controller_of(ONE, cluster).cycle().targets
    assert (target.standings["a"].requested, target.standings["a"].allocated, target.gpus) == (20.0, 8.0, 16.0)
    assert reasons_of(target)["Effective"][1] == "FairSharing"


@pytest.mark.parametrize("stop", ["Hold", "HoldAndDrain"])
@pytest.mark.parametrize("kind", ["ClusterQueue", "LocalQueue"])
def test_what_waits_in_a_stopped_queue_asks_for_nothing(seen_of: Make, kind: str, stop: str) -> None:
    halted: dict[str, Any] = {"stopPolicy": stop}
    queue = _queue("a", **_quota("16"), **(halted if kind == "ClusterQueue" else {}))
    local = _local("a", "a", **(halted if kind == "LocalQueue" else {}))
    running = _admitted(_workload("runs", "a", 1, 4), 1, {GPU: "4"})
    found = seen_of(KueueAdapter(), ONE, [queue, local, running, _workload("waits", "a", 2, 4)])
    assert _gangs_of(found) == {"runs": (4.0, 4.0, 4.0)}
    stopped = condition(found, "InSync")
    assert (stopped.status, stopped.reason) == ("False", "QueuesStopped")
    name = "ClusterQueue a" if kind == "ClusterQueue" else "LocalQueue ns/a"
    assert stopped.message == f"{name} admits nothing (stopPolicy {stop}): 8 GPUs that wait there are not counted"


def test_a_queue_that_kueue_calls_inactive_admits_nothing(seen_of: Make) -> None:
    missing = "references missing ResourceFlavor(s): h200"
    inactive = {**ACTIVE, "status": "False", "reason": "FlavorNotFound", "message": missing}
    queue = _queue("a", **_quota("16")) | {"status": {"conditions": [inactive]}}
    found = seen_of(KueueAdapter(), ONE, [queue, _local("a", "a"), _workload("waits", "a", 2, 4)])
    assert found.gangs == ()
    assert reasons_of(found)["InSync"] == ("False", "QueuesStopped")


def test_quotas_bound_what_a_queue_can_hold(seen_of: Make) -> None:
    """Two ClusterQueues of 12 in one Cohort: 24 GPUs to divide, whatever the nodes have."""
    queues = [_queue("a", **_quota("12", borrowingLimit="4")), _queue("b", **_quota("12", lendingLimit="2"))]
    found = seen_of(KueueAdapter(), _enforced("ab", deserved=12), queues)
    assert found.capacity == 24.0
    # a: 12 and what b lends; b: what it keeps, and what is in the Cohort.
    assert {name: standing.most for name, standing in found.standings.items()} == {"a": 14.0, "b": 24.0}
    assert reasons_of(found)["InSync"] == ("False", "PolicyDiffers")


def test_where_kueue_is_as_the_policy_says_it_is_in_sync(seen_of: Make) -> None:
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
    assert reasons_of(seen_of(KueueAdapter(), like, objects))["InSync"] == ("True", "AsPolicy")
    moved = [*objects[:2], _queue("b", cohort="other", **_quota("6"))]
    differs = condition(seen_of(KueueAdapter(), like, moved), "InSync")
    assert (differs.status, differs.reason) == ("False", "PolicyDiffers")
    words = "a: limit 16, policy 20; b: quota 6, policy 8; b: parent other, policy dept; dept: quota 16, policy 24"
    assert differs.message == words


def test_siblings_of_the_policy_in_different_cohorts_share_nothing(seen_of: Make) -> None:
    queues = [_queue("a", cohort="x", **_quota("8")), _queue("b", cohort="y", **_quota("8"))]
    differs = condition(seen_of(KueueAdapter(), _enforced("ab", deserved=8), queues), "InSync")
    assert differs.message == "siblings in the policy share no Cohort: a in Cohort x; b in Cohort y"


def test_an_unset_weight_is_1_for_kueue(either_of: Make, controller_of: Make) -> None:
    """A weight of 0 has to be written to the unset field; a weight of 1 is in force already."""
    queues = [{"name": "a", "weight": 0, "refs": ["kueue:a"]}, {"name": "b", "weight": 1, "refs": ["kueue:b"]}]
    policy = policy_of(queues, targets={"kueue": {"apply": "enforce"}})
    cluster = either_of([_queue("a"), _queue("b"), configured(CONFIGURATION)])
    report = controller_of(policy, cluster).cycle()
    assert {o.apply.name: (o.apply.previous, o.apply.value) for o in report.targets[0].outcomes} == {"a": (None, 0.0)}
    assert cluster.get(CQ, "a")["spec"]["fairSharing"]["weight"] == "0"
    (other,) = controller_of(_enforced("b"), cluster).cycle().targets
    assert "a has the controller's weight 0 (its base: unset)" in condition(other, "Mapped").message
    release_weights(policy, cluster)
    assert "weight" not in (cluster.get(CQ, "a").get("spec") or {}).get("fairSharing", {})


def test_release_leaves_another_policys_queues_alone(either_of: Make, accountant: Any, controller_of: Make) -> None:
    cluster = either_of([*(_queue(name, "1") for name in "abcd"), configured(CONFIGURATION)])
    first, second = _enforced("ab"), _enforced("cd")
    accountant.spend(a=0.9, b=0.1, c=0.9, d=0.1)
    for policy in (first, second):
        controller_of(policy, cluster).cycle()

    def weight(name: str) -> float | None:
        return quantity(cluster.get(CQ, name)["spec"]["fairSharing"]["weight"])

    standing = weight("c")
    assert standing != 1.0
    assert {o.apply.name for o in release_weights(first, cluster)} == {"a", "b"}
    assert (weight("a"), weight("c")) == (1.0, standing)


def _owned(workload: dict[str, Any], job: str) -> dict[str, Any]:
    """Build a Workload that Kueue created for a Job, under a name of its own."""
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


HALVES = _enforced(("p1", "p2"), deserved=8, options={"preemption": {"mode": "dry-run", "wait": 0, "min_runtime": 0}})


def test_room_on_nodes_is_no_room_in_the_quota(controller_of: Make) -> None:
    """16 GPUs are free on nodes, none in the Cohort: p2 is within its quota, and p1 gives back its borrowed GPUs."""
    cluster = MemoryCluster(KINDS, _borrowed())
    (target,) = controller_of(HALVES, cluster).cycle().targets
    assert target.gpus == 16.0
    assert {due.queue: due.gpus for due in target.entitlements} == {"p1": 8.0, "p2": 8.0}
    (verdict,) = target.preemption.verdicts
    assert (verdict.queue, verdict.outcome, len(verdict.victims)) == ("p2", "preempts", 2)
    assert sum(victim.gpus for victim in verdict.victims) == 8.0


def test_where_the_quota_has_room_nodes_decide(controller_of: Make) -> None:
    objects = [obj for obj in _borrowed() if not obj["metadata"]["name"].startswith(("job-big-2", "job-big-3"))]
    (target,) = controller_of(HALVES, MemoryCluster(KINDS, objects)).cycle().targets
    assert [verdict.outcome for verdict in target.preemption.verdicts] == ["room"]


def test_a_quota_that_nothing_frees_is_named(controller_of: Make) -> None:
    """Queues outside the policy hold the Cohort's quota: no victim would free it, and free nodes do not help."""
    policy = _enforced(("p2",), deserved=8, options={"preemption": {"mode": "dry-run", "wait": 0}})
    (target,) = controller_of(policy, MemoryCluster(KINDS, _borrowed())).cycle().targets
    (verdict,) = target.preemption.verdicts
    assert (verdict.outcome, verdict.reason) == ("denied", "needs 8 GPUs, but no workload runs that could give way")


def test_a_job_is_meant_by_its_own_name(accountant: Any, clock: Any) -> None:
    cluster = MemoryCluster(KINDS, _borrowed())
    for name in ("ns/wants", "ns/job-wants-1a2b3"):
        call = PreemptionCall("", name, "asked for by hand", trigger="by hand")
        report = by_hand(HALVES, accountant, cluster, clock, (), call, "dry-run")
        assert [verdict.claimant for verdict in report.verdicts] == ["Workload/ns/job-wants-1a2b3"]
    unknown = PreemptionCall("", "ns/other", "", trigger="by hand")
    with pytest.raises(NotPossible):
        by_hand(HALVES, accountant, cluster, clock, (), unknown, "dry-run")


_READS, _READS_NOT, _EXITS = (True, False), (False, False), (False, True)
"""(Whether weights are read, whether the manager fails to start.)"""


def _read(version: str, text: str) -> Configuration:
    document = f"apiVersion: config.kueue.x-k8s.io/{version}\nkind: Configuration\n{text}\n"
    found = read_configuration(
        [{"data": {"other.txt": "no: configuration", "controller_manager_config.yaml": document}}]
    )
    assert found is not None
    assert found.version == version
    return found


@pytest.mark.parametrize(("version", "text", "wanted"), [
    ("v1beta2", fair_sharing_lines("v1beta2"), _READS),
    ("v1beta2", "fairSharing: {}", _EXITS),
    ("v1beta2", "fairSharing: {enable: true, preemptionStrategies: [LessThanInitialShare]}", _EXITS),
    ("v1beta2", "fairSharing: {preemptionStrategies: [LessThanInitialShare, LessThanOrEqualToFinalShare]}", _EXITS),
    ("v1beta2", "fairSharing: {preemptionStrategies: [LessThanInitialShare]}", _READS),
    ("v1beta2", "fairSharing: null", _READS_NOT),
    ("v1beta2", "# fairSharing: {}", _READS_NOT),
    ("v1beta1", fair_sharing_lines("v1beta1"), _READS),
    ("v1beta1", "fairSharing: {}", _READS_NOT),
    ("v1beta1", "fairSharing: {preemptionStrategies: [LessThanInitialShare]}", _READS_NOT),
    ("v1beta1", "fairSharing: {enable: false, preemptionStrategies: [Nonsense]}", _READS_NOT),
    ("v1beta1", "fairSharing: {enable: true, preemptionStrategies: [Nonsense]}", _EXITS),
    ("v1beta1", "fairSharing: {enable: true, foo: 1}", _EXITS),
])  # fmt: skip
def test_fair_sharing_is_on_where_kueue_starts_with_it(version: str, text: str, wanted: tuple[bool, bool]) -> None:
    """The results of Kueue's own strict decoder, defaults, conversion (ff69552e79ad, apis/config) and validation."""
    found = _read(version, text)
    assert (found.fair, bool(found.fault)) == wanted
    assert not found.admission


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
@pytest.mark.parametrize(("text", "admission", "frozen"), [
    (ADMISSION_LINES, True, False),
    ("admissionFairSharing: {usageSamplingInterval: 5m}", True, True),
    ("admissionFairSharing: {usageHalfLifeTime: 0s}", True, True),
    (f"{ADMISSION_LINES}\nfeatureGates: {{AdmissionFairSharing: false}}", False, False),
    ("", False, False),
])  # fmt: skip
def test_admission_fair_sharing_is_switched_on_apart(version: str, text: str, admission: bool, frozen: bool) -> None:
    found = _read(version, text)
    assert (found.admission, found.no_half_life, found.fair) == (admission, frozen, False)


GOOD = f"apiVersion: config.kueue.x-k8s.io/v1beta2\nkind: Configuration\n{fair_sharing_lines('v1beta2')}\n"


@pytest.mark.parametrize("data", [
    {"a-copy.yaml": GOOD},
    {"a-copy.yaml": GOOD, CONFIGURATION_KEY: "- a list"},
    {CONFIGURATION_KEY: GOOD.replace("kind: Configuration", "kind: Config")},
    {CONFIGURATION_KEY: GOOD.replace("config.kueue", "kueue")},
    {CONFIGURATION_KEY: "apiVersion: config.kueue.x-k8s.io/v1beta1\nfairSharing: {enable: 'true'}"},
    {CONFIGURATION_KEY: "admissionFairSharing: {usageHalfLifeTime: 7d}"},
    {CONFIGURATION_KEY: "admissionFairSharing: {usageHalfLifeTime: 3600}"},
    {CONFIGURATION_KEY: "admissionFairSharing: {usageHalfLifeTime: -1h}"},
    {CONFIGURATION_KEY: "admissionFairSharing: on"},
    None,
])  # fmt: skip
def test_the_manager_does_not_start_without_its_own_entry_or_with_one_that_it_cannot_read(data: Any) -> None:
    found = read_configuration([{"data": data}])
    assert found is not None
    assert (found.fair, found.admission, bool(found.fault)) == (False, False, True)


@pytest.mark.parametrize(("text", "fair"), [
    ("", False),
    ("# nothing", False),
    ("---", False),
    ("{}", False),
    ("kind: Configuration", False),
    (fair_sharing_lines("v1beta2"), True),
    ("kind: Configuration\n" + fair_sharing_lines("v1beta2"), True),
    (f"---\n{GOOD}", True),
    (f"# by hand\r\n---\r\n{GOOD}", True),
    (f"{GOOD}---\nkind: Configuration", True),
    (f"kind: Configuration\n--- # older\n{GOOD}", False),
    (f"---\n---\n{GOOD}", False),
])  # fmt: skip
def test_the_first_document_counts_and_what_it_leaves_out_is_kueues_default(text: str, fair: bool) -> None:
    """As the manager of ff69552e79ad starts with these texts."""
    found = read_configuration([{"data": {CONFIGURATION_KEY: text}}])
    assert found is not None
    assert (found.version, found.fair, found.fault) == ("v1beta2", fair, "")


def test_a_version_that_is_unknown_here_is_not_judged() -> None:
    assert read_configuration([{"data": {CONFIGURATION_KEY: GOOD.replace("v1beta2", "v1")}}]) is None


@pytest.mark.parametrize("data", [{}, {CONFIGURATION_KEY: "admissionFairSharing: {usageHalfLifeTime: 7d}"}])
def test_history_is_not_counted_twice_while_kueue_runs_with_an_earlier_configuration(
    data: dict[str, str], seen_of: Make
) -> None:
    """The manager that runs counts the LocalQueue's usage until its next start, which the ConfigMap prevents."""
    usage = {"fairSharing": COUNTED}
    scope = {"admissionMode": "UsageBasedAdmissionFairSharing"}
    name, namespace = "kueue-manager-config", "kueue-system"
    objects = [
        _queue("cq", admissionScope=scope), _local("a", "cq", usage),
        {**object_of(CONFIG_MAP, name, namespace=namespace), "data": data},
    ]  # fmt: skip
    found = seen_of(KueueAdapter(), _enforced(("a",), ref="kueue:ns/"), objects)
    assert found.queues["a"].static
    assert reasons_of(found)["Effective"] == ("Unknown", "ConfigurationRefused")


def test_a_quota_of_a_devices_memory_is_no_quota_of_gpus(seen_of: Make) -> None:
    """Kueue's deviceClassMappings can count a counter or a capacity of devices under any name."""
    memory = {"name": "nvidia.com/gpu-memory", "nominalQuota": "640Gi"}
    groups = [{"coveredResources": [memory["name"]], "flavors": [{"name": "mig", "resources": [memory]}]}]
    found = seen_of(KueueAdapter(), ONE, [object_of(CQ, "a", {"cohortName": "ml", "resourceGroups": groups})])
    assert reasons_of(found)["InSync"] == ("Unknown", "NotComparable")
    assert (found.standings["a"].most, found.capacity) == (UNLIMITED, None)


def test_a_copy_beside_the_managers_entry_changes_nothing() -> None:
    off = GOOD.replace("fairSharing", "# fairSharing")
    found = read_configuration([{"data": {"a-copy.yaml": GOOD, "controller_manager_config.yaml": off}}])
    assert found is not None
    assert (found.fair, found.fault) == (False, "")
    assert read_configuration([]) is None


@pytest.mark.parametrize("text", [
    ALIASES,
    "fairSharing: " + "[" * 50_000,
    f"# {'x' * 131_072}",
    "fairSharing: !!timestamp never",
], ids=["aliases", "depth", "length", "tag"])  # fmt: skip
def test_a_configuration_that_would_cost_too_much_is_none(text: str) -> None:
    document = f"apiVersion: config.kueue.x-k8s.io/v1beta2\nkind: Configuration\n{text}\n"
    assert read_configuration([{"data": {"controller_manager_config.yaml": document}}]) is None


def test_siblings_borrow_what_is_left_of_the_cohort() -> None:
    quotas = QuotaTree({"a": Quota("ml", 8, 16), "b": Quota("ml", 8, 0)})
    assert (quotas.free("a"), quotas.free("b"), quotas.maximum("b")) == (0, 0, 16)
    quotas.add_use("a", -8)
    assert (quotas.free("a"), quotas.free("b")) == (8, 8)


def test_a_lending_limit_keeps_a_part_and_a_borrowing_limit_bounds_what_is_taken() -> None:
    quotas = QuotaTree({"a": Quota("ml", 12, borrows=4), "b": Quota("ml", 12, lends=2)})
    assert (quotas.maximum("a"), quotas.maximum("b")) == (14, 24)
    assert (quotas.free("a"), quotas.free("b"), total_quota(quotas, ["a"])) == (14, 24, 24)
    quotas.add_use("b", 11)  # one more than it keeps to itself
    assert (quotas.free("a"), quotas.free("b")) == (13, 13)


def test_a_tree_of_cohorts_and_a_root_without_quota_of_its_own() -> None:
    quotas = QuotaTree({"a": Quota("team", 4), "b": Quota("team", 4, 6), "team": Quota("all", 2), "c": Quota("all", 6)})
    assert (quotas.root("a"), quotas.subtree_quota("all"), quotas.maximum("a"), quotas.free("a")) == ("all", 16, 16, 10)
    assert total_quota(quotas, ["a", "c"]) == 16
    assert total_quota(quotas, ["a", "elsewhere"]) is None
    assert total_quota(quotas, []) is None


def test_an_unknown_quota_node_is_unbounded_and_a_cycle_is_unknown() -> None:
    quotas = QuotaTree({"a": Quota("b", 4), "b": Quota("a", 4)})
    assert "a" not in quotas
    assert (quotas.free("a"), quotas.maximum("a")) == (inf, inf)
    quotas.add_use("a", 3)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12)), max_size=8))
def test_what_is_booked_and_given_back_leaves_no_trace(acts: list[tuple[str, int]]) -> None:
    nodes = {
        "a": Quota("x", 4, lends=1),
        "b": Quota("x", 4, borrows=2),
        "c": Quota("y", 8),
        "x": Quota("y", 0, lends=5),
    }
    quotas = QuotaTree(nodes)
    before = {name: quotas.free(name) for name in "abcxy"}
    for name, gpus in acts:
        quotas.add_use(name, gpus)
    used = {name: float(sum(gpus for at, gpus in acts if at == name)) for name in "abc"}
    fresh = QuotaTree(
        {name: Quota(n.parent, n.nominal, used.get(name, 0), n.borrows, n.lends) for name, n in nodes.items()}
    )
    assert {name: quotas.free(name) for name in "abcxy"} == {name: fresh.free(name) for name in "abcxy"}
    for name, gpus in reversed(acts):
        quotas.add_use(name, -gpus)
    assert {name: quotas.free(name) for name in "abcxy"} == before


def _flavored(name: str, **quotas: int) -> dict[str, Any]:
    """Build a ClusterQueue of the Cohort `ml` with quotas by flavor."""
    flavors = [
        {"name": flavor, "resources": [{"name": GPU, "nominalQuota": str(quota)}]} for flavor, quota in quotas.items()
    ]
    groups = [{"coveredResources": [GPU], "flavors": flavors}]
    return object_of(CLUSTER_QUEUES[0], name, {"cohortName": "ml", "resourceGroups": groups}, {"conditions": [ACTIVE]})


def _held(name: str, queue: str, flavor: str, gpus: int) -> dict[str, Any]:
    workload = _admitted(_workload(name, queue, 1, gpus), 1, {GPU: str(gpus)})
    admission = workload["status"]["admission"]
    admission["clusterQueue"] = queue
    admission["podSetAssignments"][0]["flavors"] = {GPU: flavor}
    return workload


FLAVORED = policy_of(
    [
        {"name": name, "deserved": quota, "refs": [f"kueue:{name}", f"kueue:ns/{name}"]}
        for name, quota in {"a": 4, "b": 8, "c": 4}.items()
    ],
    targets={"kueue": {"apply": "enforce"}},
    preemption={"mode": "enforce", "wait": 0, "min_runtime": 0},
)
FLAVOR_OBJECTS = [
    object_of(FLAVORS[0], "h100", {"nodeLabels": {"gpu": "h100"}}),
    object_of(FLAVORS[0], "a100", {"nodeLabels": {"gpu": "a100"}}),
]
CARDS = [node_object(name, 8, labels={"gpu": name}) for name in ("h100", "a100")]


def _locals(*names: str) -> list[dict[str, Any]]:
    return [object_of(LOCAL_QUEUES[0], name, {"clusterQueue": name}) for name in names]


def _verdicts(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the verdict on each waiting Workload, with equal shares of 8 GPUs for every queue."""
    found = look_at(
        KueueAdapter(), FLAVORED, MemoryCluster(KINDS, [*objects, *FLAVOR_OBJECTS, *_locals("a", "b", "c")])
    )
    shares = [Entitlement(name, None, 8.0, 8.0, 0.0, 8.0, 0.0, 8.0) for name in "abc"]
    inputs = preemption_inputs(FLAVORED, "kueue", found.gangs, shares, CARDS, (), NOW_MS, quotas=found.quotas)
    return {verdict.claimant: verdict for verdict in decide(FLAVORED, inputs)}


def test_a_quota_of_one_flavor_serves_no_other() -> None:
    """a borrows the h100 of c. b waits for an a100 that is not free, and no h100 makes room for it."""
    queues = [_flavored("a", h100=4), _flavored("b", a100=8), _flavored("c", h100=4)]
    held = [*(_held(f"big-{i}", "a", "h100", 4) for i in range(2)), _held("own", "b", "a100", 4)]
    verdicts = _verdicts([*queues, *held, _workload("more", "b", 1, 8)])
    assert verdicts["Workload/ns/more"].outcome == "denied"
    verdicts = _verdicts([*queues, *held, _workload("back", "c", 1, 4)])
    (victim,) = verdicts["Workload/ns/back"].victims
    assert victim.gang.name.startswith("big")
    verdicts = _verdicts([*queues, *held, _workload("fits", "b", 1, 4)])
    assert verdicts["Workload/ns/fits"].outcome == "room"


def test_claimed_gpus_of_a_flavor_leave_no_room_in_it() -> None:
    holder, waits = _admitted(_claiming("holds", 1), 1, {GPU: "4"}), _claiming("waits", 1, {GPU: "4"})
    holder["status"]["admission"]["podSetAssignments"][0]["flavors"] = {GPU: "h100"}
    queues = [_flavored("a", h100=4), _flavored("c", h100=4)]
    assert _verdicts([*queues, holder, waits])["Workload/ns/waits"].outcome == "room"  # c lends
    lent = _held("lent", "c", "h100", 4)
    assert _verdicts([*queues, holder, lent, waits])["Workload/ns/waits"].outcome == "denied"


def test_a_workload_takes_the_first_flavor_that_serves_it() -> None:
    queues = [_flavored("a", h100=4, a100=4), _flavored("b", h100=4)]
    waits = _workload("waits", "a", 1, 4)
    picky = copy.deepcopy(waits)
    picky["spec"]["podSets"][0]["template"]["spec"]["nodeSelector"] = {"gpu": "a100"}
    for workload, wanted in ((waits, ["h100", "a100"]), (picky, ["a100"])):
        found = look_at(
            KueueAdapter(), FLAVORED, MemoryCluster(KINDS, [*queues, *FLAVOR_OBJECTS, *_locals("a"), workload])
        )
        (gang,) = found.gangs
        assert [choice.pool for choice in gang.choices] == [f"ClusterQueue a ({flavor})" for flavor in wanted]
        assert [dict(choice.selector)["gpu"] for choice in gang.choices] == wanted
    verdicts = _verdicts([*queues, _held("h", "a", "h100", 4), _held("o", "b", "h100", 4), waits])
    assert verdicts["Workload/ns/waits"].outcome == "room"  # in the other flavor


def test_shares_are_bounded_by_each_flavor_for_itself() -> None:
    """In one Cohort a has 8 h100 and b 8 a100: neither can borrow, and c has 2 of each beside their lent 16."""
    queues = [_flavored("a", h100=8), _flavored("b", a100=8), _flavored("c", h100=2, a100=2)]
    held = [_held("x", "a", "h100", 3), _held("y", "c", "a100", 2), _held("z", "c", "h100", 1)]
    found = look_at(KueueAdapter(), FLAVORED, MemoryCluster(KINDS, [*queues, *FLAVOR_OBJECTS, *_locals("a"), *held]))
    assert {name: standing.most for name, standing in found.standings.items()} == {"a": 10, "b": 10, "c": 20}
    assert found.capacity == 20
    used = {name: quota.used for name, quota in found.quotas.items() if quota.used}
    assert used == {"ClusterQueue a (h100)": 3, "ClusterQueue c (a100)": 2, "ClusterQueue c (h100)": 1}
    alone = look_at(KueueAdapter(), FLAVORED, MemoryCluster(KINDS, queues[:2]))
    assert {name: standing.most for name, standing in alone.standings.items()} == {"a": 8, "b": 8}


FIFO = {"queueingStrategy": "StrictFIFO"}
EARLIER, LATER = "2026-09-30T00:00:00Z", "2026-09-30T12:00:00Z"


def _waiting(name: str, *, created: str = EARLIER, queue: str = "a", gpus: int = 4, **spec: Any) -> dict[str, Any]:
    workload = _workload(name, queue, 1, gpus, **spec)
    workload["metadata"] |= {"creationTimestamp": created, "uid": f"uid-{name}"}
    return workload


def _evicted(workload: dict[str, Any], reason: str, at: str = LATER, **status: Any) -> dict[str, Any]:
    evicted = {**ACTIVE, "type": "Evicted", "reason": reason, "lastTransitionTime": at}
    return {**workload, "status": {"conditions": [evicted], **status}}


def _claimed(*objects: dict[str, Any], ours: Mapping[str, Any] = {}, **queue: Any) -> list[str]:
    """Return the names of the Workloads of ClusterQueue a for which GPUs are claimed, in their order."""
    configured_so = configured({**CONFIGURATION, **ours})
    a = _flavored("a", h100=4)
    a["spec"] |= queue
    found = look_at(
        KueueAdapter(),
        FLAVORED,
        MemoryCluster(
            KINDS, [a, *FLAVOR_OBJECTS, *_locals("a"), *objects, *(each for each in [configured_so] if each)]
        ),
    )
    shares = [Entitlement(name, None, 8.0, 8.0, 0.0, 8.0, 0.0, 8.0) for name in "abc"]
    inputs = preemption_inputs(FLAVORED, "kueue", found.gangs, shares, CARDS, (), NOW_MS, quotas=found.quotas)
    return [claim.key.rpartition("/")[2] for claim in claims(FLAVORED, inputs)]


REQUEUE_BY_CREATION = {"waitForPodsReady": {"requeuingStrategy": {"timestamp": "Creation"}}}


@pytest.mark.parametrize(("objects", "ours", "wanted"), [
    ([_waiting("young", created=LATER), _waiting("old")], {}, ["old", "young"]),
    ([_waiting("b"), _waiting("a")], {}, ["a", "b"]),  # of one second: by uid
    ([_waiting("high", created=LATER, priority=5), _waiting("old")], {}, ["high", "old"]),
    ([_evicted(_waiting("x"), "PodsReadyTimeout"), _waiting("y", created="2026-09-30T06:00:00Z")], {}, ["y", "x"]),
    (
        [_evicted(_waiting("x"), "PodsReadyTimeout"), _waiting("y", created="2026-09-30T06:00:00Z")],
        REQUEUE_BY_CREATION,
        ["x", "y"],
    ),
    ([_evicted(_waiting("x"), "AdmissionCheck"), _waiting("y", created="2026-09-30T06:00:00Z")], REQUEUE_BY_CREATION,
     ["y", "x"]),
    ([_evicted(_waiting("x"), "Preempted"), _waiting("y", created="2026-09-30T06:00:00Z")], {}, ["x", "y"]),
    ([_evicted(_waiting("x"), "PodsReadyTimeout", requeueState={"count": 1, "requeueAt": "2026-10-09T00:00:00Z"}),
      _waiting("y")], {}, ["y"]),
])  # fmt: skip
def test_of_several_that_wait_the_next_is_kueues(
    objects: list[dict[str, Any]], ours: dict[str, Any], wanted: list[str]
) -> None:
    assert _claimed(*objects, ours=ours) == wanted


@pytest.mark.parametrize(("first", "wanted"), [
    (_waiting("first", gpus=64), ["first"]),
    (_waiting("first", gpus=0), []),  # it waits for processors
    (_evicted(_waiting("first"), "Preempted"), ["first"]),
    (_evicted(_waiting("first"), "PodsReadyTimeout", requeueState={"requeueAt": "2026-10-09T00:00:00Z"}), ["second"]),
    (_waiting("first", active=False), ["second"]),
    (_workload("first", "a", 1, 4, admitted=True), ["second"]),
])  # fmt: skip
def test_a_strict_queue_makes_room_for_nobody_behind_its_first(first: dict[str, Any], wanted: list[str]) -> None:
    """Kueue admits nothing else of it before, so that victims for another would stop in vain."""
    second, third = _waiting("second", created=LATER), _waiting("third", created=LATER)
    assert _claimed(first, second, third, **FIFO) == wanted
    free = _claimed(first, second, third)
    assert [name for name in free if name != "first"] == ["second", "third"]


@pytest.mark.parametrize(("ahead", "priority", "outcome"), [
    (4, 0, "denied"),  # its queue is at its share, and Kueue gives it the room all the same
    (2, 0, "denied"),
    (6, 0, "preempts"),  # Kueue passes over what does not fit
    (4, -1, "preempts"),  # it is behind
])  # fmt: skip
def test_nothing_stops_for_room_that_kueue_gives_to_another_first(ahead: int, priority: int, outcome: str) -> None:
    """LocalQueues u and v share ClusterQueue a; o has borrowed half of it. Nothing of u is due more."""
    deserved = {"u": 4, "v": 4, "o": 0}
    refs = {name: [f"kueue:ns/{name}"] for name in deserved}
    policy = policy_of(
        [{"name": name, "deserved": gpus, "refs": refs[name]} for name, gpus in deserved.items()],
        targets={"kueue": {"apply": "enforce"}},
        preemption={"mode": "enforce", "wait": 0, "min_runtime": 0},
    )
    queues = [_flavored("a", h100=8), _flavored("b", h100=0)]
    locals_ = [object_of(LOCAL_QUEUES[0], name, {"clusterQueue": "b" if name == "o" else "a"}) for name in deserved]
    running = [_held("u0", "a", "h100", 4), _held("o0", "b", "h100", 4)]
    for each, queue in zip(running, "uo", strict=True):
        each["spec"]["queueName"] = queue
    first, second = _waiting("u1", queue="u", gpus=ahead, priority=priority), _waiting("v1", queue="v", created=LATER)
    objects = [*queues, *locals_, *running, first, second, *FLAVOR_OBJECTS]
    found = look_at(KueueAdapter(), policy, MemoryCluster(KINDS, objects))
    shares = [Entitlement(name, None, g, g, 0.0, g, 0.0, g) for name, g in {"u": 4.0, "v": 4.0, "o": 0.0}.items()]
    inputs = preemption_inputs(policy, "kueue", found.gangs, shares, CARDS, (), NOW_MS, quotas=found.quotas)
    verdicts = {verdict.claimant: verdict for verdict in decide(policy, inputs)}
    assert (verdicts["Workload/ns/u1"].outcome, verdicts["Workload/ns/v1"].outcome) == ("denied", outcome)


@pytest.mark.parametrize("held", [
    {"annotations": {"kueue.x-k8s.io/admission-gated-by": "example.com/quota"}},
    *(
        {"conditions": [{**ACTIVE, "type": "QuotaReserved", "status": "False", "reason": reason}]}
        for reason in ("OnHold", "Misconfigured")
    ),
    {"conditions": [{**ACTIVE, "type": "Requeued", "status": "False", "reason": "PodsReadyTimeout"}]},
])  # fmt: skip
def test_nothing_stops_for_a_workload_that_kueue_does_not_consider(held: dict[str, Any]) -> None:
    first, second = _waiting("first"), _waiting("second", created=LATER)
    first["metadata"]["annotations"] = held.get("annotations", {})
    first["status"] = {"conditions": held.get("conditions", [])}
    assert _claimed(first, second, **FIFO) == ["second"]
    assert _claimed(first, second) == ["second"]


@pytest.mark.parametrize("reason", ["NoMatchingFlavor", "ExceedsMaxQuota"])
def test_nothing_stops_for_a_workload_that_never_fits_and_a_strict_queue_stands_behind_it(reason: str) -> None:
    first, second = _waiting("first"), _waiting("second", created=LATER)
    first["status"] = {"conditions": [{**ACTIVE, "type": "QuotaReserved", "status": "False", "reason": reason}]}
    assert _claimed(first, second, **FIFO) == []
    assert _claimed(first, second) == ["second"]


@pytest.mark.parametrize("pods", [True, False])
def test_nobody_else_stops_while_kueue_evicts_a_workload(pods: bool) -> None:
    """Its quota is reserved until its pods have gone, which may take as long as they want to end."""
    held = [_held(f"w{i}", "a", "h100", 4) for i in range(2)]
    being = {**ACTIVE, "type": "Evicted", "reason": "Preempted", "lastTransitionTime": LATER}
    held[1]["status"]["conditions"].append(being)
    queues = [_flavored("a", h100=4), _flavored("c", h100=4)]
    objects = [*queues, *held, _workload("back", "c", 1, 4), *FLAVOR_OBJECTS, *_locals("a", "c")]
    of_workload = {"annotations": {"kueue.x-k8s.io/workload": "w1"}}
    there = [read_pod(pod_object("p", node="h100", gpus=4, **of_workload))] if pods else []
    found = look_at(KueueAdapter(), FLAVORED, MemoryCluster(KINDS, objects), there)
    shares = [Entitlement(name, None, 8.0, 8.0, 0.0, 8.0, 0.0, 8.0) for name in "abc"]
    inputs = preemption_inputs(FLAVORED, "kueue", found.gangs, shares, CARDS, (), NOW_MS, quotas=found.quotas)
    verdicts = {verdict.claimant: verdict for verdict in decide(FLAVORED, inputs)}
    assert (verdicts["Workload/ns/back"].outcome, verdicts.keys()) == ("room", {"Workload/ns/back"})
    standing = found.standings["a"]
    assert (standing.requested, standing.allocated) == (8, 4)


SCOPE = {"admissionScope": {"admissionMode": AFS}}
SAMPLED = "2026-09-30T18:00:00Z"


@pytest.mark.parametrize(("scope", "ours", "wanted"), [
    ({}, {}, ["first"]),
    (SCOPE, {}, ["first"]),  # Kueue's configuration does not switch it on
    (SCOPE, {"admissionFairSharing": ADMISSION, "featureGates": {"AdmissionFairSharing": False}}, ["first"]),
    (SCOPE, {"admissionFairSharing": ADMISSION}, ["first", "other"]),
])  # fmt: skip
def test_where_usage_decides_between_local_queues_and_is_unknown_each_has_its_own_first(
    scope: dict[str, Any], ours: dict[str, Any], wanted: list[str]
) -> None:
    local = object_of(LOCAL_QUEUES[0], "second", {"clusterQueue": "a"})
    waiting = [_waiting("first"), _waiting("behind", created=LATER), _waiting("other", created=LATER, queue="second")]
    assert _claimed(local, *waiting, ours=ours, **FIFO, **scope) == wanted


def _used(name: str, weight: str | None = None, **consumed: str) -> dict[str, Any]:
    """Build a LocalQueue of ClusterQueue a with what Kueue has sampled of its usage, by resource."""
    spec = {"clusterQueue": "a", **({"fairSharing": {"weight": weight}} if weight is not None else {})}
    resources = {GPU if resource == "gpu" else resource: amount for resource, amount in consumed.items()}
    usage = {"consumedResources": resources, "lastUpdate": SAMPLED}
    return object_of(LOCAL_QUEUES[0], name, spec, {"fairSharing": {"admissionFairSharingStatus": usage}})


def _since_sampling(at: str, gpus: int = 4) -> dict[str, Any]:
    """Build a Workload of LocalQueue a that Kueue admitted at this time."""
    workload = _workload("runs", "a", 1, gpus, admitted=True)
    workload["status"]["admission"]["podSetAssignments"] = [
        {"name": "main", "flavors": {GPU: "h100"}, "resourceUsage": {GPU: str(gpus)}, "count": 1}
    ]
    workload["status"]["conditions"] = [{**ACTIVE, "type": "Admitted", "lastTransitionTime": at}]
    return workload


@pytest.mark.parametrize(("objects", "weights", "wanted"), [
    ([_used("a", gpu="2"), _used("second", gpu="1")], {}, ["other", "high", "old"]),
    ([_used("a", gpu="1"), _used("second", gpu="2")], {}, ["high", "old", "other"]),
    ([_used("a", gpu="1"), _used("second", gpu="1")], {}, ["high", "old", "other"]),  # then by priority
    ([_used("a", "4", gpu="2"), _used("second", gpu="1")], {}, ["high", "old", "other"]),
    ([_used("a", "0", gpu="0"), _used("second", gpu="9")], {}, ["other", "high", "old"]),  # weight 0 is last
    ([_used("a", gpu="1", cpu="9"), _used("second", gpu="2", cpu="500m")], {}, ["other", "high", "old"]),
    ([_used("a", gpu="1", cpu="9"), _used("second", gpu="2", cpu="500m")], {"cpu": 0}, ["high", "old", "other"]),
    ([_used("a"), _used("second"), _since_sampling("2026-09-30T19:00:00Z")], {}, ["other", "high", "old"]),
    ([_used("a"), _used("second"), _since_sampling("2026-09-30T17:59:57Z")], {}, ["other", "high", "old"]),
    ([_used("a"), _used("second"), _since_sampling("2026-09-30T17:00:00Z")], {}, ["high", "old", "other"]),
])  # fmt: skip
def test_of_local_queues_the_one_that_used_least_is_next(
    objects: list[dict[str, Any]], weights: dict[str, float], wanted: list[str]
) -> None:
    """Before priority and age. A strict queue admits no other."""
    old, high = _waiting("old"), _waiting("high", created=LATER, priority=1)
    other = _waiting("other", created=LATER, queue="second")
    ours = {"admissionFairSharing": {**ADMISSION, "resourceWeights": weights}}
    assert _claimed(*objects, old, high, other, ours=ours, **SCOPE) == wanted
    assert _claimed(*objects, old, high, other, ours=ours, **SCOPE, **FIFO) == wanted[:1]


@pytest.mark.parametrize("weights", [{"cpu": "much"}, {"cpu": -1}, {"cpu": True}, ["cpu"]])
def test_a_weight_of_a_resource_that_is_no_number_keeps_the_manager_from_starting(weights: Any) -> None:
    read = read_configuration([configured({**CONFIGURATION, "admissionFairSharing": {"resourceWeights": weights}})])
    assert read is not None
    assert read.fault


def test_two_pools_of_one_model_are_divided_each_for_itself_if_each_is_a_cohort(
    accountant: Accountant, controller_of: Make
) -> None:
    """Reserved and spot nodes of one model: a flavor, a Cohort and a queue of the policy each, with the teams below."""

    def queue(pool: str, team: str) -> dict[str, Any]:
        quota = [{"name": GPU, "nominalQuota": "8" if pool == "reserved" else "4"}]
        groups = [{"coveredResources": [GPU], "flavors": [{"name": pool, "resources": quota}]}]
        return object_of(CQ, f"{team}-{pool}", {"cohortName": pool, "resourceGroups": groups}, {"fairSharing": {}})

    pools = {"reserved": 16, "spot": 8}
    objects = [queue(pool, team) for pool in pools for team in "ab"]
    objects += [object_of(COHORTS[0], pool, {}) for pool in pools]
    objects += [object_of(FLAVORS[0], pool, {"nodeLabels": {"pool": pool}}) for pool in pools]
    objects += [node_object(pool, gpus, labels={"pool": pool}) for pool, gpus in pools.items()]
    objects += [_local(f"{team}-{pool}", f"{team}-{pool}") for pool in pools for team in "ab"]
    objects += [_workload(f"{name}-{i}", name, 1, 4) for name in ("a-reserved", "b-spot") for i in range(9)]
    policy = policy_of(
        [
            *({"name": pool, "deserved": gpus, "refs": [f"kueue-cohort:{pool}"]} for pool, gpus in pools.items()),
            *(
                {"name": f"{team}-{pool}", "parent": pool, "deserved": gpus // 2, "refs": [f"kueue:{team}-{pool}"]}
                for pool, gpus in pools.items()
                for team in "ab"
            ),
        ],
        targets={"kueue": {"apply": "enforce"}},
    )
    accountant.spend(reserved=0.1, spot=0.9)
    (target,) = controller_of(policy, MemoryCluster(KINDS, objects)).cycle().targets
    shares = {due.queue: due.gpus for due in target.entitlements}
    assert shares == {"reserved": 16, "a-reserved": 16, "b-reserved": 0, "spot": 8, "a-spot": 0, "b-spot": 8}
    assert reasons_of(target)["InSync"] == ("True", "AsPolicy")


def test_a_label_names_the_queue_in_the_pods_own_namespace() -> None:
    assert read_plain_pod(labels={"kueue.x-k8s.io/queue-name": "lq"}).ref == "kueue:ns/lq"
