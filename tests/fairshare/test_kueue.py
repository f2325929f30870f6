"""Kueue's objects as our model, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fairshare.adapters.kueue import CLUSTER_QUEUES, COHORTS, LOCAL_QUEUES, WORKLOADS, KueueAdapter
from fairshare.kube import marks
from fairshare.kube.kinds import Kind
from fairshare.kube.memory import MemoryCluster
from fairshare.kube.quantities import GPU, fixed, quantity
from fairshare.loop import Controller, look_at
from fairshare.model import Held, Issue
from fairshare.publishing.releasing import release_weights
from fairshare.targets import KINDS

Make = Callable[..., Any]
CQ, COHORT, LQ, WORKLOAD = (kinds[0] for kinds in (CLUSTER_QUEUES, COHORTS, LOCAL_QUEUES, WORKLOADS))
SINCE = "2026-10-01T00:00:00Z"
CONFIGURATION = {"apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration", "fairSharing": {}}


def _object(kind: Kind, name: str, spec: dict[str, Any], *, namespace: str = "", **rest: Any) -> dict[str, Any]:
    metadata = {"name": name, **({"namespace": namespace} if namespace else {}), **rest.pop("metadata", {})}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec, **rest}


def _queue(name: str, weight: object = None, *, cohort: str = "ml", kind: Kind = CQ, **spec: Any) -> dict[str, Any]:
    sharing = {} if weight is None else {"fairSharing": {"weight": weight}}
    return _object(kind, name, {**({"cohortName": cohort} if cohort else {}), **sharing, **spec})


def _local(name: str, cluster_queue: str, namespace: str = "ns") -> dict[str, Any]:
    return _object(LQ, name, {"clusterQueue": cluster_queue}, namespace=namespace)


def _workload(name: str, queue: str, pods: int, gpus: int, *, admitted: bool = False, **spec: Any) -> dict[str, Any]:
    containers = [{"name": "c", "resources": {"limits": {GPU: str(gpus)}}}]
    pod_set = {"name": "main", "count": pods, "template": {"spec": {"containers": containers}}}
    status: dict[str, Any] = {}
    if admitted:
        usage = [{"name": "main", "resourceUsage": {GPU: str(pods * gpus)}}]
        status = {
            "admission": {"clusterQueue": queue, "podSetAssignments": usage},
            "conditions": [
                {
                    "type": "Admitted",
                    "status": "True",
                    "reason": "Admitted",
                    "message": "",
                    "lastTransitionTime": SINCE,
                }
            ],
        }
    pod_set |= spec.pop("pod_set", {})
    wanted = {"queueName": queue, "podSets": [pod_set], **spec}
    return _object(WORKLOAD, name, wanted, namespace="ns", status=status)


def _config(document: object = CONFIGURATION) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "kueue-manager-config", "namespace": "kueue-system"},
        "data": {"controller_manager_config.yaml": yaml.safe_dump(document)},
    }


@pytest.fixture
def policy(policy_of: Make) -> Any:
    return policy_of(
        [
            {"name": "dept", "refs": ["kueue-cohort:dept"]},
            {"name": "a", "parent": "dept", "refs": ["kueue:a", "kueue:ns/a"]},
            {"name": "b", "parent": "dept", "refs": ["kueue:b"]},
        ],
        targets={"kueue": {"apply": "enforce"}},
    )


def _conditions(observation: Any) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in observation.conditions}


def test_queues_are_found_at_their_highest_level(seen_of: Make, policy: Any) -> None:
    objects = [
        _object(COHORT, "dept", {"parentName": "root", "fairSharing": {"weight": "2"}}),
        _queue("a", "750m"), _queue("b"), _queue("stranger"), _local("a", "a"),
    ]  # fmt: skip
    observation = seen_of(KueueAdapter(), policy, objects)
    assert {name: (held.kind.kind, held.weight) for name, held in observation.held.items() if held.kind} == {
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
        _object(COHORT, "dept", {"parentName": "root"}),
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
        ({}, ("True", "FairSharing")),
        ({"configuration": {"kind": "Configuration"}}, ("False", "FairSharingOff")),
        ({"configuration": {"kind": "Configuration", "fairSharing": {"enable": False}}}, ("False", "FairSharingOff")),
        ({"configuration": None}, ("Unknown", "ConfigurationUnread")),
        ({"configuration": None, "status": {"fairSharing": {"weightedShare": 0}}}, ("True", "FairSharing")),
        ({"cohort": ""}, ("False", "NothingToShare")),
    ],
)
def test_a_weight_that_cannot_act_is_said_to_be_so(
    seen_of: Make, policy_of: Make, change: dict[str, Any], wanted: tuple[str, str]
) -> None:
    policy = policy_of([{"name": "a", "refs": ["kueue:a"]}])
    configuration = change.get("configuration", CONFIGURATION)
    queue = _queue("a", cohort=change.get("cohort", "ml")) | {"status": change.get("status", {})}
    objects = [queue, *([_config(configuration)] if configuration is not None else [])]
    assert _conditions(seen_of(KueueAdapter(), policy, objects))["Effective"] == wanted


@pytest.mark.parametrize(("mode", "value", "effective"), [
    ("UsageBasedAdmissionFairSharing", 2.0, ("True", "FairSharing")),
    ("NoAdmissionFairSharing", 0.4, ("False", "AdmissionFairSharingOff")),
])  # fmt: skip
def test_a_local_queue_keeps_history_out_of_its_weight_where_kueue_keeps_it(
    either_of: Make,
    policy_of: Make,
    accountant: Any,
    clock: Any,
    mode: str,
    value: float,
    effective: tuple[str, str],
) -> None:
    """Inside one ClusterQueue either Kueue remembers (and gets the configured weight) or it does not read weights."""
    queues = [{"name": name, "weight": 2, "refs": [f"kueue:ns/{name}"]} for name in ("x", "y")]
    policy = policy_of(queues, targets={"kueue": {"apply": "enforce"}}, bounds={"min_multiplier": 0.2, "max_step": 9})
    queue = _queue("a", admissionScope={"admissionMode": mode})
    jobs = [_workload(f"job-{name}", name, 4, 4) for name in "xy"]
    cluster = either_of([queue, _config(), _local("x", "a"), _local("y", "a"), *jobs])
    accountant.spend(x=1.0)
    report = Controller(policy, accountant, cluster, clock).cycle()
    written = quantity(cluster.get(LQ, "x", "ns")["spec"]["fairSharing"]["weight"])
    assert written == pytest.approx(value)
    assert {c.type: (c.status, c.reason) for c in report.targets[0].conditions}["Effective"] == effective


def test_weights_are_texts_and_only_our_fields_are_written() -> None:
    held = Held("a", "u", "7", None, kind=LQ, namespace="ns")
    patch = KueueAdapter().patch(held, 0.75, {marks.BASE: "unset"})
    assert patch == {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "LocalQueue",
        "metadata": {"name": "a", "namespace": "ns", "uid": "u", "annotations": {marks.BASE: "unset"}},
        "spec": {"fairSharing": {"weight": "0.75"}},
    }
    assert "spec" not in KueueAdapter().patch(held, None, {})


@given(st.floats(min_value=1e-6, max_value=1e4))
def test_a_published_weight_is_fixed_point_and_reads_back(value: float) -> None:
    text = fixed(value)
    assert set(text) <= set("0123456789.")
    assert len(text.partition(".")[2]) <= 6
    assert quantity(text) == pytest.approx(value, abs=5e-7)


def test_what_cannot_be_read_or_found_is_an_issue(policy_of: Make) -> None:
    policy = policy_of([{"name": n, "refs": [f"kueue:{n}"]} for n in ("a", "b")])
    observation = KueueAdapter().observe(policy, {CQ: [_queue("a", "heavy")]})
    assert observation.issues == (
        Issue("b", "Kueue has no queue b"),
        Issue("a", "spec.fairSharing.weight is 'heavy'"),
    )


def test_an_older_kueue_is_written_in_its_own_version(policy_of: Make, accountant: Any, clock: Any) -> None:
    old = CLUSTER_QUEUES[1]
    cluster = MemoryCluster([*(k for k in KINDS if not k.api_version.endswith("v1beta2"))], [_config()])
    for name in "ab":
        sharing = {"cohort": "ml", "fairSharing": {"weight": "1"}}
        cluster.load([_object(old, name, sharing)])
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
    assert look_at(KueueAdapter(), policy, cluster).held["a"].published is None


def test_pods_that_are_done_hold_nothing(policy_of: Make) -> None:
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
