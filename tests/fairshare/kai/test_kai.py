"""KAI: its objects, weights written back, its own history, and its scheduling shards."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from accountant.wire.policy_models import WindowSpec
from fairshare.controller.cycle_report import replay_weights
from fairshare.core import scheduler_queue_objects
from fairshare.core.gpu_demand import memory_mib, read_member, read_pod, shared_gpus
from fairshare.core.queues_and_weights import Issue, Pod, Shard, TargetQueue
from fairshare.preemption.claims_and_placement import preemption_inputs, to_start
from fairshare.preemption.victim_candidates import bundles, make_victim
from fairshare.schedulers.kai.adapter import POOL_LABEL, KaiAdapter, effective, read_queue, usage_read
from fairshare.schedulers.kai.kinds import CONFIG, POD_GROUP, QUEUE, SHARD
from fairshare.schedulers.kai.plugin import SCHEDULER
from fairshare.targets.weight_plan import look_at
from fairshare.usage.cluster_capacity import NothingToDivide, ServingNodes, target_capacity
from gputally.base.units import MS_PER_HOUR
from gputally.kubernetes.objects import GPU, NODE, POD, PRIORITY_CLASS, Object, duration_s, quantity
from tests.fairshare.builders import node_object, object_of, pod_object
from tests.fairshare.conftest import Make
from tests.fairshare.kai.objects import kai_cluster, kai_policy, pod_group, queue_object, shard_object
from tests.fairshare.observations import condition, pods_of, reasons_of

SHARES = SCHEDULER.shares
assert SHARES is not None


@pytest.mark.parametrize(
    ("text", "amount"),
    [(7, 7.0), ("4", 4.0), ("500m", 0.5), ("1.5", 1.5), ("2k", 2000.0), ("1e3", 1000.0), (".5", 0.5), (0, 0.0)],
)
def test_quantities(text: object, amount: float) -> None:
    assert quantity(text) == amount


@pytest.mark.parametrize("text", ["", "four", "-1", -2, True, None, "1Zi", float("inf"), [1]])
def test_no_quantities(text: object) -> None:
    assert quantity(text) is None


A = kai_policy([{"name": "a", "refs": ["kai:a"]}])


def test_a_queue_is_read_with_what_we_noted_on_it() -> None:
    noted = scheduler_queue_objects.WeightAnnotations(2.0, 3.5, 1_000, 1, "v1").annotations()
    read = read_queue(queue_object("a", 3.5, requested="12", allocated="7500m", annotations=noted, uid="u"))
    held, standing = read
    assert (held.name, held.uid, held.weight, held.published, held.base) == ("a", "u", 3.5, 3.5, 2.0)
    assert (standing.requested, standing.allocated, standing.weight) == (12.0, 7.5, 3.5)
    assert standing.direction == 1


def test_a_queue_holds_what_kai_notes_under_other_names_too() -> None:
    """MIG instances count by their slices, and GPUs of ResourceClaims by their device class."""
    obj = queue_object("a", requested="2", allocated="1")
    obj["status"]["allocated"] |= {"nvidia.com/mig-3g.40gb": "1", "gpu.nvidia.com": "2", "cpu": "8"}
    obj["status"]["requested"] |= {"nvidia.com/mig-3g.40gb": "2", "gpu.nvidia.com": "4"}
    read = read_queue(obj)
    assert (read[1].requested, read[1].allocated) == pytest.approx((6 + 6 / 7, 3 + 3 / 7))


def test_what_is_unset_reads_as_unset_or_nothing() -> None:
    read = read_queue({"metadata": {"name": "new"}})
    held, standing = read
    assert (held.weight, held.published, standing.requested, standing.allocated) == (None, None, 0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weight": -1}, "spec.resources.gpu.overQuotaWeight is -1"),
        ({"requested": "many"}, "status.requested[nvidia.com/gpu] is 'many', not a quantity"),
    ],
)
def test_what_cannot_be_read_is_an_issue(change: dict[str, Any], reason: str) -> None:
    assert read_queue(queue_object("a", **change)) == Issue("a", reason)


def test_only_the_weight_and_our_annotations_are_patched() -> None:
    ours = {scheduler_queue_objects.BASE: "1"}
    patch = KaiAdapter().patch(TargetQueue("a", "u-1", "7", 1.0, QUEUE), 2.5, ours)
    assert patch == object_of(QUEUE, "a", {"resources": {"gpu": {"overQuotaWeight": 2.5}}}, uid="u-1", annotations=ours)
    assert "spec" not in KaiAdapter().patch(TargetQueue("a", "", "7", 1.0, QUEUE), None, {})


def test_queues_find_their_objects_and_the_rest_is_left_alone(seen_of: Make) -> None:
    refs = {"a": ["kai:one"], "b": ["kai:two", "kai:three"], "c": ["kai:four"], "d": ["kueue:ns/d"]}
    policy = kai_policy([{"name": name, "refs": of} for name, of in (refs | {"e": ["kai:broken"]}).items()])
    objects = [queue_object(name) for name in ("one", "two", "three", "stranger")]
    seen = seen_of(KaiAdapter(), policy, [*objects, queue_object("broken", -2)])
    assert (set(seen.queues), set(seen.standings)) == ({"a"}, {"a"})
    assert seen.queues["a"].name == "one"
    assert [(issue.subject, issue.reason) for issue in seen.issues] == [
        ("b", "several KAI queues (three, two) for one queue of the policy: none is touched"),
        ("c", "KAI has no queue four"),
        ("broken", "spec.resources.gpu.overQuotaWeight is -2"),
    ]


def test_where_a_queue_differs_from_the_policy_is_said(seen_of: Make) -> None:
    policy = kai_policy(
        [{"name": "dept", "refs": ["kai:d"]}, {"name": "a", "parent": "dept", "deserved": 4, "refs": ["kai:a"]}]
    )
    same = seen_of(KaiAdapter(), policy, [queue_object("d"), queue_object("a", quota=4, parent="d")])
    assert condition(same, "InSync").status == "True"
    other = condition(seen_of(KaiAdapter(), policy, [queue_object("d"), queue_object("a", quota=8)]), "InSync")
    assert (other.status, other.message) == ("False", "a: quota 8, policy 4; a: parent none, policy dept")


_DATABASE = {"clientType": "prometheus", "connectionString": "http://a:9091"}


def _arguments(**given: str) -> dict[str, Any]:
    return {"plugins": {"proportion": {"arguments": given}}}


@pytest.mark.parametrize(
    ("spec", "status", "says"),
    [
        ({"kValue": 0}, "True", "weights alone"),
        ({"kValue": -3}, "True", "weights alone"),
        ({}, "True", "weights alone"),  # k is 1, but without a usage database every usage is 0
        ({"usageDBConfig": {"clientType": "prometheus"}}, "False", "kValue is unset, which means 1"),
        ({"kValue": 0, "usageDBConfig": {"clientType": "prometheus"}}, "True", "weights alone"),
        ({"kValue": 2}, "True", "weights alone"),
        (
            {"kValue": 2, "usageDBConfig": _DATABASE},
            "False",
            "kValue is 2 in SchedulingShard default: set it to 0",
        ),
        ({"kValue": 0, "usageDBConfig": _DATABASE, **_arguments(kValue="1.5")}, "False", "kValue is 1.5"),
        ({"kValue": 0, "usageDBConfig": _DATABASE, **_arguments(kValue="odd")}, "False", "kValue is 1"),
        ({"kValue": 0, "usageDBConfig": _DATABASE, **_arguments(kValue="NaN")}, "False", "kValue is nan"),
        ({"kValue": 3, "usageDBConfig": _DATABASE, **_arguments(kValue="0")}, "True", "weights alone"),
        (
            {"kValue": 0, "usageDBConfig": _DATABASE, **_arguments(relcaimerSaturationMultiplier="1.1")},
            "False",
            'which means 1 (add kValue: "0" to them)',
        ),
        ({"kValue": 0, "usageDBConfig": _DATABASE, **_arguments()}, "False", "replace all other settings"),
    ],
)
def test_history_must_not_count_twice(seen_of: Make, spec: dict[str, Any], status: str, says: str) -> None:
    seen = seen_of(KaiAdapter(), kai_policy(), [*map(queue_object, "abc"), shard_object(**spec)])
    found = condition(seen, "Effective")
    assert found.status == status
    assert says in found.message


def test_several_shards_each_ask_for_their_own_nodes() -> None:
    def reads(name: str, label: str | None, url: str) -> dict[str, Any]:
        database = {"clientType": "prometheus", "connectionString": url, "usageParams": {}}
        spec = {"kValue": 1, "usageDBConfig": database, **({"partitionLabelValue": label} if label else {})}
        return object_of(SHARD, name, spec)

    base = "http://usage:9091"
    assert usage_read([reads("default", None, base)], base).status == "True"
    right = [reads("blue", "blue", f"{base}/shards/blue"), reads("default", None, f"{base}/shards/")]
    assert usage_read(right, base).status == "True"
    wrong = usage_read([reads("blue", "blue", base), right[1]], base)
    assert wrong.status == "False"
    assert wrong.message == f"SchedulingShard blue reads usage from {base}, not from {base}/shards/blue"


def _config(**prometheus: Any) -> dict[str, Any]:
    """Build KAI's own Config, as its operator reads it."""
    spec = {"namespace": "kai", **({"prometheus": prometheus} if prometheus else {})}
    return object_of(CONFIG, "kai-config", spec)


_OURS = "http://usage:9091"
_OWN_METRIC = {**_DATABASE, "connectionString": _OURS, "usageParams": {"extraParams": {"gpuAllocationMetric": "mine"}}}


def _metric(expression: str) -> dict[str, Any]:
    return {"connectionString": _OURS, "usageParams": {"extraParams": {"gpuAllocationMetric": expression}}}


_DEFAULT_METRIC = {"usageParams": {"extraParams": {"gpuAllocationMetric": "kai_queue_allocated_gpus"}}}


@pytest.mark.parametrize(
    ("database", "config", "endpoint", "status", "says"),
    [
        ({"connectionString": _OURS}, None, _OURS, "True", "reads usage"),
        ({"connectionString": _OURS}, None, None, "Unknown", "Set targets.kai.endpoint"),
        ({"connectionStringEnvVar": "URL"}, None, _OURS, "Unknown", "environment variable URL"),
        ({"connectionString": _OURS, "connectionStringEnvVar": "URL"}, None, _OURS, "False", "URL is set too"),
        ({}, None, _OURS, "Unknown", "the Config kai-config with the default cannot be read"),
        ({}, _config(externalPrometheusUrl=_OURS + "/"), _OURS, "True", "reads usage"),
        (
            {},
            _config(enabled=True, externalPrometheusUrl=_OURS),
            _OURS,
            "False",
            "reads usage from http://usage-prometheus.kai.svc.cluster.local:9090, not from",
        ),
        ({}, _config(), _OURS, "False", "reads usage from nowhere"),
        (_OWN_METRIC, None, _OURS, "False", "extraParams.gpuAllocationMetric of SchedulingShard default is 'mine'"),
        ({"connectionString": _OURS, **_DEFAULT_METRIC}, None, _OURS, "True", "reads usage"),
        (_metric("max by (queue_name) (kai_queue_allocated_gpus)"), None, _OURS, "True", "reads usage"),
        (_metric("kai_queue_allocated_gpus * 2"), None, _OURS, "Unknown", "whether the accountant answers it"),
    ],
)
def test_where_kai_reads_usage_is_found_out_or_said_to_be_unknown(
    database: dict[str, Any], config: Any, endpoint: str | None, status: str, says: str
) -> None:
    shard = shard_object(kValue=1, usageDBConfig={"clientType": "prometheus", **database})
    found = usage_read([shard], endpoint, config)
    assert found.status == status
    assert says in found.message


def test_arguments_without_a_k_are_no_k_of_0_for_a_database_either() -> None:
    shard = shard_object(kValue=0, usageDBConfig=_DATABASE, **_arguments(other="1"))
    assert usage_read([shard], "http://a:9091").status == "True"
    named = usage_read([shard_object(kValue=5, usageDBConfig=_DATABASE, **_arguments(kValue="0"))], "http://a:9091")
    assert (named.status, named.message[:11]) == ("False", "kValue is 0")


@pytest.mark.parametrize(
    "spec",
    [
        {"usageDBConfig": _DATABASE},
        {"kValue": 2, "usageDBConfig": _DATABASE},
        {"kValue": 0, "usageDBConfig": _DATABASE, **_arguments(other="1")},
    ],
)
def test_the_printed_remedy_makes_weights_the_only_history(either_of: Make, spec: dict[str, Any]) -> None:
    cluster = either_of([shard_object(**spec)])
    found = effective(cluster.list(SHARD))
    assert found.status == "False"
    _write(cluster, found.remedy)
    assert effective(cluster.list(SHARD)).status == "True"


def _write(cluster: Any, remedy: str) -> None:
    """Carry out the `kubectl patch` lines of a remedy."""
    for line in remedy.split("; "):
        words = shlex.split(line)
        assert words[:4] == ["kubectl", "patch", "schedulingshard", "default"]
        cluster.patch(SHARD, words[3], "", json.loads(words[-1]), field_manager="kubectl-patch")


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"kValue": 0, "usageDBConfig": {**_DATABASE, "connectionString": _OURS}},
        {"usageDBConfig": {"clientType": "fake"}},
        {"usageDBConfig": _DATABASE},
        {"usageDBConfig": {"clientType": "prometheus"}},
        {"usageDBConfig": {"clientType": "prometheus", "connectionStringEnvVar": "URL"}},
        {"usageDBConfig": {**_DATABASE, "connectionString": _OURS, "usageParams": {"windowType": "tumbling"}}},
        {"usageDBConfig": _OWN_METRIC},
        {"usageDBConfig": {**_DATABASE, **_metric("kai_queue_allocated_gpus * 2")}},
        {"kValue": 3, "usageDBConfig": {**_DATABASE, "connectionString": _OURS}, **_arguments(kValue="0")},
    ],
)
def test_the_printed_remedy_makes_kai_read_our_usage(either_of: Make, spec: dict[str, Any]) -> None:
    cluster = either_of([shard_object(**spec)])
    found = usage_read(cluster.list(SHARD), _OURS)
    assert found.status != "True"
    _write(cluster, found.remedy)
    assert usage_read(cluster.list(SHARD), _OURS).status == "True"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"kValue": 0, "usageDBConfig": {"clientType": "prometheus"}}, "history counts for nothing"),
        ({}, "has no usageDBConfig"),
        ({"usageDBConfig": {"clientType": "fake"}}, "clientType"),
        (
            {"usageDBConfig": {"clientType": "prometheus", "usageParams": {"windowType": "tumbling"}}},
            "only sliding works",
        ),
    ],
)
def test_a_shard_that_reads_no_usage_is_named(spec: dict[str, Any], says: str) -> None:
    found = usage_read([shard_object(**spec)])
    assert (found.status, found.reason) == ("False", "UsageNotRead")
    assert says in found.message


def test_a_shard_is_told_how_to_read_usage() -> None:
    assert usage_read([]).status == "Unknown"
    good = {"kValue": 1, "usageDBConfig": {"clientType": "prometheus", "connectionString": "http://a:9091/"}}
    assert usage_read([shard_object(**good)], "http://a:9091").status == "True"
    elsewhere = usage_read([shard_object(**good)], "http://accountant:9091")
    assert (elsewhere.status, elsewhere.reason) == ("False", "UsageNotRead")
    assert "reads usage from http://a:9091, not from http://accountant:9091" in elsewhere.message
    usage = kai_policy(targets={"kai": {"mode": "usage"}}, k=2.0, window={"size": "7d", "half_life": "1d"})
    advised = KaiAdapter().configuration(usage, "http://accountant:8080")
    assert usage_read([shard_object(**advised)], "http://accountant:8080").status == "True"
    assert advised["usageDBConfig"]["usageParams"]["halfLifePeriod"] == "86400s"
    assert KaiAdapter().configuration(kai_policy(), "") == {"kValue": 0}


def _class(name: str, value: int, **fields: Any) -> dict[str, Any]:
    return {**object_of(PRIORITY_CLASS, name), "value": value, **fields}


def _pod_group(**spec: Any) -> dict[str, Any]:
    """Build a PodGroup as KAI's podgrouper writes it."""
    return pod_group(requested=4, allocated=4, spec=spec, creationTimestamp="2026-10-01T00:00:00Z")


@pytest.mark.parametrize(
    ("classes", "spec", "expected"),
    [
        ([_class("gold", 200)], {"priorityClassName": "gold"}, (200, False)),
        ([_class("gold", 20)], {"priorityClassName": "gold"}, (20, True)),
        ([_class("gold", 200)], {"priorityClassName": "gold", "preemptibility": "preemptible"}, (200, True)),
        ([_class("train", 120)], {"priorityClassName": "train"}, (120, False)),
        ([_class("train", 50)], {"priorityClassName": "train", "preemptibility": "non-preemptible"}, (50, False)),
        ([_class("usual", 300, globalDefault=True)], {"priorityClassName": "gone"}, (300, False)),
        ([_class("usual", 300, globalDefault=True)], {}, (300, False)),
        ([], {"priorityClassName": "gone"}, (50, True)),
    ],
)
def test_priority_is_that_of_the_class(seen_of: Make, classes: list[Any], spec: dict[str, Any], expected: Any) -> None:
    """The pods' own priority is 0: they name the class by a label, `priorityClassName: gold`."""
    pod = Pod("u", "ns", "p", 4.0, "n", "kai:a", "PodGroup/ns/g", priority=0, held=True)
    (gang,) = seen_of(KaiAdapter(), A, [queue_object("a"), _pod_group(minMember=1, **spec), *classes], [pod]).gangs
    assert (gang.priority, gang.preemptible) == expected


def test_without_the_right_to_read_classes_only_kais_own_are_known() -> None:
    for name, expected in (("train", True), ("build", False), ("gold", False)):
        cluster = kai_cluster([queue_object("a"), _pod_group(minMember=1, priorityClassName=name)], [POD_GROUP])
        seen = look_at(KaiAdapter(), A, cluster)
        assert [gang.preemptible for gang in seen.gangs] == [expected]


@pytest.mark.parametrize(("spec", "level"), [
    ({"topologyConstraint": {"topology": "dc", "requiredTopologyLevel": "example.com/rack"}}, "example.com/rack"),
    ({"topologyConstraint": {"topology": "dc", "preferredTopologyLevel": "example.com/rack"}}, ""),
    ({"subGroups": [{"name": "w", "minMember": 1,
                     "topologyConstraint": {"topology": "dc", "requiredTopologyLevel": "example.com/rack"}}]},
     "example.com/rack"),
    ({}, ""),
])  # fmt: skip
def test_a_required_topology_is_known(seen_of: Make, spec: dict[str, Any], level: str) -> None:
    objects = [queue_object("a"), _pod_group(minMember=1, **spec)]
    (gang,) = seen_of(KaiAdapter(), A, objects).gangs
    assert gang.topology == level


def _member(name: str, subgroup: str, start_ms: int) -> Pod:
    return Pod(
        name, "ns", name, 1.0, "n", "kai:a", "PodGroup/ns/g", "Job/ns/g", held=True,
        created_ms=start_ms, started_ms=start_ms, subgroup=subgroup,
    )  # fmt: skip


def _subgroup(name: str, parent: str | None = None, **minimum: int) -> dict[str, Any]:
    return {"name": name, **({"parent": parent} if parent else {}), **minimum}


LEADER, WORKERS = _subgroup("leader", minMember=1), _subgroup("worker", minMember=3)
BOTH = [_subgroup("all", minSubGroup=2), *(_subgroup(name, "all", minMember=1) for name in ("leader", "worker"))]


@pytest.mark.parametrize(
    ("spec", "minimum", "surplus"),
    [
        ({"minSubGroup": 2, "subGroups": [LEADER, WORKERS]}, 4.0, []),  # one gang, though spec.minMember is not there
        ({"subGroups": [LEADER, _subgroup("worker", minMember=2)]}, 3.0, ["w2"]),
        ({"subGroups": BOTH}, 2.0, ["w2", "w1"]),
        ({"minSubGroup": 1, "subGroups": [LEADER, WORKERS]}, 1.0, []),
        # The first by name, not the one with the fewest GPUs.
        ({"minSubGroup": 1, "subGroups": [_subgroup("zlast", minMember=0), WORKERS]}, 3.0, ["l"]),
    ],
)
def test_minima_of_subgroups_add_up(either_of: Make, spec: dict[str, Any], minimum: float, surplus: list[str]) -> None:
    pods = [*(_member(f"w{i}", "worker", 1 + i) for i in range(3)), _member("l", "leader", 9)]
    cluster = either_of([queue_object("a"), _pod_group(**spec)])
    (gang,) = look_at(KaiAdapter(), A, cluster, pods).gangs
    assert gang.minimum == minimum
    parts = bundles(gang, 10)
    assert [each.pods[0].name for each in parts if not each.whole] == surplus
    waiting = [replace(pod, node="", held=False) for pod in pods]
    (gang,) = look_at(KaiAdapter(), A, cluster, waiting).gangs
    assert (gang.minimum, gang.waits) == (minimum, minimum)


def _members(*gpus: float, held: bool = False, **fields: Any) -> list[Pod]:
    """Build the pods of a gang in the order of their creation; those with 0 GPUs are CPU-only."""
    return [
        Pod(
            f"m{i}", "ns", f"m{i}", size, "n" if held else "", "kai:a", "PodGroup/ns/g", "Job/ns/g", held=held,
            created_ms=i, started_ms=i if held else None, **fields,
        )
        for i, size in enumerate(gpus)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("least", "gpus", "minimum"),
    [
        (3, (0, 0, 1, 1, 1), 1.0),
        (3, (1, 1, 1, 0, 0), 3.0),  # in KAI's order, not those with the fewest GPUs
        (4, (2, 0, 1, 0, 4), 3.0),
        (2, (0, 0, 2, 1), 1.0),  # it starts without GPUs, and then waits for its first pod with one
        (2, (4, 1, 1), 5.0),
    ],
)
def test_members_without_gpus_count_as_members(
    seen_of: Make, least: int, gpus: tuple[float, ...], minimum: float
) -> None:
    objects = [queue_object("a"), pod_group(spec={"minMember": least})]
    (gang,) = seen_of(KaiAdapter(), A, objects, _members(*gpus)).gangs
    assert (gang.minimum, gang.waits, gang.requested) == (minimum, minimum, sum(gpus))
    assert all(pod.gpus > 0 for pod in gang.pods)
    assert sum(to_start(gang)) == minimum


def test_the_first_in_kais_order_need_not_be_the_oldest(seen_of: Make) -> None:
    made = [
        ("w0", 8, {}), ("w1", 4, {}), ("l", 0, {"training.kubeflow.org/job-role": "launcher"}),
        ("p", 1, {"kai.scheduler/task-priority": "7"}),
    ]  # fmt: skip
    pods = []
    for second, (name, gpus, labels) in enumerate(made):
        obj = pod_object(
            name, node="", gpus=gpus, labels={"kai.scheduler/queue": "a", **labels},
            annotations={"pod-group-name": "g"}, creationTimestamp=f"2026-10-01T00:00:0{second}Z",
        )  # fmt: skip
        obj["spec"]["schedulerName"] = "kai-scheduler"
        assert (read_pod(obj) is None) == (gpus == 0)
        pods.append(read_member(obj))
    objects = [queue_object("a"), pod_group(spec={"minMember": 3})]
    (gang,) = seen_of(KaiAdapter(), A, objects, pods).gangs
    assert gang.minimum == 9.0  # the launcher, the one with a task priority, and then the oldest


def test_what_runs_without_gpus_goes_with_its_gang_alone(seen_of: Make) -> None:
    members = _members(0, 0, 1, 1, 1, held=True)
    (gang,) = seen_of(KaiAdapter(), A, [queue_object("a"), pod_group(spec={"minMember": 3})], members).gangs
    assert (gang.minimum, gang.waits) == (1.0, 0.0)
    stopped = [
        (part.whole, {pod.uid for pod in make_victim(part, "within quota", "", "").pods}) for part in bundles(gang, 10)
    ]
    assert stopped == [(False, {"m4"}), (False, {"m3"}), (True, {"m2", "m0", "m1"})]


def test_a_gang_whose_pods_with_gpus_end_is_none(seen_of: Make) -> None:
    members = [replace(pod, held=pod.gpus == 0) for pod in _members(0, 1, held=True)]
    assert not seen_of(
        KaiAdapter(), A, [queue_object("a"), pod_group(requested=1, spec={"minMember": 2})], members
    ).gangs
    objects = [queue_object("a"), pod_group(spec={"minMember": 1})]
    assert not look_at(KaiAdapter(), A, kai_cluster(objects, [POD_GROUP]), members[:1]).gangs


def test_members_of_subgroups_without_gpus_count(seen_of: Make) -> None:
    spec = {"subGroups": [LEADER, _subgroup("worker", minMember=2)]}
    pods = [replace(pod, subgroup="leader" if i == 0 else "worker") for i, pod in enumerate(_members(0, 0, 1, 1))]
    (gang,) = seen_of(KaiAdapter(), A, [queue_object("a"), pod_group(spec=spec)], pods).gangs
    assert (gang.minimum, to_start(gang)) == (1.0, (1.0,))


def test_subgroups_of_one_name_count_once() -> None:
    names = ["", *(f"level-{i}" for i in range(60))]
    nested = [_subgroup(name, parent) for parent, name in pairwise(names) for _ in range(2)]
    spec = {"subGroups": [*nested, _subgroup("worker", names[-1], minMember=1)]}
    cluster = kai_cluster([queue_object("a"), _pod_group(**spec)], [POD_GROUP])
    (gang,) = look_at(KaiAdapter(), A, cluster, [_member("w", "worker", 1)]).gangs
    assert gang.minimum == 1.0


def test_gpu_memory_is_a_part_of_the_smallest_gpu_while_it_waits(seen_of: Make) -> None:
    def node(name: str, label: str) -> dict[str, Any]:
        return object_of(NODE, name, labels={"nvidia.com/gpu.memory": label})

    def pod(name: str, on: str = "", **annotations: str) -> Any:
        spec = {"schedulerName": "kai-scheduler", "containers": [{"name": "c"}], **({"nodeName": on} if on else {})}
        metadata = {
            "name": name, "namespace": "ns", "uid": name, "labels": {"kai.scheduler/queue": "a"},
            "annotations": {"pod-group-name": f"g-{name}", "gpu-memory": "40000", **annotations},
        }  # fmt: skip
        return read_pod({"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})

    groups = [pod_group(f"g-{name}") for name in ("waits", "runs", "two")]
    pods = [pod("waits"), pod("runs", "large"), pod("two", **{"gpu-fraction-num-devices": "2"})]
    nodes = [node("small", "80099"), node("large", str(160000 * 2**20))]
    seen = seen_of(KaiAdapter(), A, [queue_object("a"), *groups, *nodes], pods)
    assert {gang.name: (gang.requested, gang.allocated) for gang in seen.gangs} == {
        "g-waits": (0.5, 0.0), "g-runs": (0.25, 0.25), "g-two": (1.0, 0.0),
    }  # fmt: skip
    assert seen.standings["a"].requested == 100 + 0.5 + 1.0


def test_gpu_memory_is_of_unknown_size_where_no_node_says_how_large_its_gpus_are(seen_of: Make) -> None:
    pod = Pod("u", "ns", "p", 0.0, ref="kai:a", gang="PodGroup/ns/g", memory_mib=40_000.0)
    group = {**_pod_group(minMember=1), "status": {}}
    seen = seen_of(KaiAdapter(), A, [queue_object("a"), group], [pod])
    assert (seen.gangs, seen.standings["a"].requested) == ((), 100.0)


def test_modes() -> None:
    assert KaiAdapter().mode(kai_policy()) == "enforce"
    assert KaiAdapter().mode(kai_policy(apply="dry-run")) == "dry-run"
    assert KaiAdapter().mode(kai_policy(targets={"kai": {"mode": False}})) == "off"


def test_unreadable_weight_annotations_are_none() -> None:
    notes = scheduler_queue_objects
    whole = notes.WeightAnnotations(None, 1.5, 1_790_812_800_123, -1, "v")
    texts = whole.annotations()
    assert notes.read(texts) == whole
    for broken in ({notes.PUBLISHED: "x"}, {notes.BASE: ""}, {notes.PUBLISHED: "nan"}):
        assert notes.read(texts | broken) is None
    lenient = notes.read(texts | {notes.CHANGED: "yesterday", notes.DIRECTION: "sideways"})
    assert lenient == notes.WeightAnnotations(None, 1.5, None, 0, "v")
    assert notes.read({}) is None


def _node(name: str, gpus: int = 8, pool: str = "") -> dict[str, Any]:
    labels = {"labels": {POOL_LABEL: pool}} if pool else {}
    return node_object(name, gpus, **labels)


def _shard(value: str = "") -> dict[str, Any]:
    return object_of(SHARD, value or "default", {"kValue": 0, **({"partitionLabelValue": value} if value else {})})


BLUE = {"labels": {POOL_LABEL: "blue"}}


def _queues(blue: str = "") -> list[dict[str, Any]]:
    """Build queues a, b and c. blue: those in that node pool."""
    return [queue_object(name, **(BLUE if name in blue else {})) for name in "abc"]


@pytest.fixture
def due(either_of: Make, accountant: Any, controller_of: Make) -> Make:
    """Return a function that runs a cycle and returns its report on KAI with each queue's due share."""

    def make(objects: Sequence[Object], pods: Sequence[Object] = (), **policy: Any) -> Any:
        accountant.nodes = {"n1", "n2"}
        read = tuple(pod for obj in pods if (pod := read_pod(obj)) is not None)
        wanted = kai_policy(**{"k": 0, **policy})
        (target,) = controller_of(wanted, either_of(objects), pods=lambda: read).cycle().targets
        return target, {each.queue: each.gpus for each in target.entitlements}

    return make


TWO_POOLS = [_node("n1"), _node("n2", pool="blue"), _shard(), _shard("blue")]


def test_every_shard_is_divided_by_itself(due: Make) -> None:
    """As two real schedulers divide: 4 and 4 of the nodes without a label, 8 of the pool blue."""
    target, gpus = due([*_queues("c"), *TWO_POOLS])
    assert gpus == {"a": 4.0, "b": 4.0, "c": 8.0}
    assert target.gpus == 16.0


def test_the_label_of_node_pools_is_the_one_that_kais_config_names(due: Make) -> None:
    labelled = {"labels": {"corp/pool": "blue"}}
    config = object_of(CONFIG, "kai-config", {"global": {"nodePoolLabelKey": "corp/pool"}})
    queues = [queue_object("a"), queue_object("b"), queue_object("c", **labelled)]
    _, gpus = due([*queues, _node("n1"), node_object("n2", **labelled), _shard(), _shard("blue"), config])
    assert gpus == {"a": 4.0, "b": 4.0, "c": 8.0}


def test_a_division_by_shards_is_computed_again_from_its_record(due: Make, accountant: Any) -> None:
    """Usage is a share of the shard's own capacity: a used 0.3 of the cluster, 0.6 of its shard."""
    accountant.spend(a=0.3, b=0.1, c=0.5)
    target, gpus = due([*_queues("c"), *TWO_POOLS], k=1)
    assert gpus == {"a": 3.0, "b": 5.0, "c": 8.0}
    assert {each.queue: each.usage_ratio for each in target.entitlements} == {"a": 0.6, "b": 0.2, "c": 1.0}
    inputs = next(each for each in accountant.decisions if each.subject == "*")
    computed = replay_weights(kai_policy(k=1), inputs)
    assert computed.entitlements == target.entitlements
    assert computed.weights == target.weights


def test_a_parent_of_queues_in_several_shards_gets_what_they_get(due: Make) -> None:
    queues = [{"name": name, "parent": "dept", "refs": [f"kai:{name}"]} for name in "ab"]
    queues += [{"name": "dept"}, {"name": "c", "refs": ["kai:c"]}]
    _, gpus = due([*_queues("bc"), *TWO_POOLS], queues=queues)
    assert gpus == {"a": 8.0, "b": 4.0, "c": 4.0, "dept": 12.0}


def test_a_queue_of_a_pool_without_a_shard_gets_nothing_and_is_named(due: Make) -> None:
    target, gpus = due([*_queues("c"), _node("n1"), _node("n2", pool="blue"), _shard()])
    assert gpus == {"a": 4.0, "b": 4.0, "c": 0.0}
    assert reasons_of(target)["Mapped"] == ("False", "QueuesLeftOut")
    words = "kai.scheduler/node-pool: blue, a node pool that no SchedulingShard schedules"
    assert words in condition(target, "Mapped").message


def test_an_unlabelled_queue_does_not_exist_in_a_labelled_shard(due: Make) -> None:
    nodes = [_node(name, pool="blue") for name in ("n1", "n2")]
    target, gpus = due([*_queues("bc"), *nodes, _shard("blue")])
    assert gpus == {"a": 0.0, "b": 8.0, "c": 8.0}
    assert "(none)" in condition(target, "Mapped").message


def test_what_pods_of_other_schedulers_hold_is_not_kais_to_divide(due: Make) -> None:
    """KAI has 12 of 16: 4 for each queue. Its own pods, and the reservation pods of its shared GPUs, count as its
    own."""
    theirs = pod_object("other", node="n1", gpus=4)
    own = pod_object("own", node="n2", gpus=4)
    own["spec"]["schedulerName"] = "kai-scheduler"
    keeper = pod_object("keeper", node="n2", gpus=1)
    keeper["metadata"]["namespace"] = "kai-resource-reservation"
    target, gpus = due([*_queues(), _node("n1"), _node("n2"), _shard()], [theirs, own, keeper])
    assert gpus == {"a": 4.0, "b": 4.0, "c": 4.0}
    assert target.gpus == 12.0


def test_all_of_it_held_by_others_leaves_nothing_to_divide(due: Make) -> None:
    theirs = [pod_object(f"other{i}", node="n1", gpus=4) for i in range(2)]
    target, _ = due([*_queues(), _node("n1"), _shard()], theirs)
    assert "pods of other schedulers hold them all" in target.degraded["NoCapacity"]


def test_a_gang_finds_room_on_nodes_of_its_own_pool_alone(due: Make) -> None:
    waiting = []
    for queue in "ac":
        pod = pod_object(f"w{queue}", node="", annotations={"pod-group-name": f"g{queue}"})
        pod["spec"]["schedulerName"] = "kai-scheduler"
        pod["metadata"]["labels"] = {"kai.scheduler/queue": queue}
        waiting.append(pod)
    target, _ = due([*_queues("c"), *(pod_group(f"g{queue}", queue) for queue in "ac"), *TWO_POOLS], waiting)
    here = preemption_inputs(kai_policy(k=0), "kai", target.gangs, target.entitlements, TWO_POOLS[:2], (), 0)
    assert here.usable == {"PodGroup/ns/ga": ("n1",), "PodGroup/ns/gc": ("n2",)}


@pytest.mark.parametrize(
    ("gpus", "quota", "shards", "reason"),
    [
        (0, None, (), "no node lists a GPU"),
        (8, 0.0, (), "the quotas of its queues contain no GPU"),
        (8, None, (Shard(("a",), None, 8.0),), "the nodes of its shards have no GPU"),
    ],
)
def test_a_target_without_gpus_says_why(
    accountant: Any, gpus: int, quota: float | None, shards: tuple[Shard, ...], reason: str
) -> None:
    accountant.capacity = 0
    window = accountant.window(WindowSpec(), "allocated", MS_PER_HOUR, 0.0)
    with pytest.raises(NothingToDivide, match=reason):
        target_capacity(ServingNodes((_node("n0", gpus),)), window, quota, shards)


@pytest.mark.parametrize(("annotations", "gpus", "memory"), [
    ({"gpu-fraction": "0.5"}, 0.5, 0), ({"gpu-fraction": "1"}, 1.0, 0), ({"gpu-fraction": "5e-1"}, 0.5, 0),
    ({"gpu-fraction": "500m"}, 0, 0), ({"gpu-fraction": "2"}, 0, 0), ({"gpu-fraction": "1ki"}, 0, 0),
    ({"gpu-memory": "2Gi"}, 0, 0), ({"gpu-memory": "2000"}, 0, 2000), ({"gpu-memory": "1.5"}, 0, 0),
    ({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "2"}, 1.0, 0),
    ({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "1.5"}, 0.5, 0),  # KAI ignores it
    ({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "0"}, 0, 0),
])  # fmt: skip
def test_annotations_are_read_as_kai_reads_them(annotations: dict[str, str], gpus: float, memory: float) -> None:
    assert (shared_gpus(annotations, SHARES), memory_mib(annotations, SHARES)) == (gpus, memory)


def test_queues_without_their_parent_are_dropped_as_kai_drops_them() -> None:
    names = ("a", "b", "c", "d")
    policy = kai_policy([{"name": name, "refs": [f"kai:{name}"]} for name in names])
    pools = {"labels": {POOL_LABEL: "p"}}
    queues = [
        queue_object("a", parent="org"), queue_object("org"), queue_object("b", parent="gone"),
        queue_object("c", parent="mid"), queue_object("mid", parent="gone"), queue_object("d", parent="org", **pools),
    ]  # fmt: skip
    shards = [shard_object(), object_of(SHARD, "p", {"partitionLabelValue": "p"})]
    seen = KaiAdapter().observe(policy, {QUEUE: queues, SHARD: shards, POD_GROUP: [pod_group("g", "b", requested=1)]})
    assert (seen.queues.keys(), seen.standings.keys(), seen.gangs) == ({"a"}, {"a"}, ())
    assert {issue.subject for issue in seen.issues} == {"b", "c", "d"}


@pytest.mark.parametrize(("shard", "own", "wanted"), [
    ({}, {}, None),
    ({"minRuntime": {"reclaimMinRuntime": "10m", "preemptMinRuntime": "1h"}}, {}, ((600, 600), 3600)),
    ({"minRuntime": {"reclaimMinRuntime": "10m"}}, {"reclaimMinRuntime": "1h30m"}, ((600, 5400), 0)),
    ({"plugins": {"minruntime": {"arguments": {"defaultReclaimMinRuntime": "30s"}}},
      "minRuntime": {"reclaimMinRuntime": "10m"}}, {}, ((30, 30), 0)),
    ({"plugins": {"minruntime": {"arguments": {"reclaimResolveMethod": "queue"}}}}, {"reclaimMinRuntime": "1m"},
     ((60, 60), 0)),
    ({"plugins": {"minruntime": {"enabled": False}}}, {"reclaimMinRuntime": "1h"}, None),
])  # fmt: skip
def test_the_runtimes_that_kai_protects(shard: dict[str, Any], own: dict[str, str], wanted: Any) -> None:
    queue = queue_object("a", parent="org")
    queue["spec"] |= own
    delayed = pod_group("g", requested=1, spec={"minMember": 1, "preemptionDelay": "5m"},
                        creationTimestamp="2026-10-01T00:00:00Z")  # fmt: skip
    seen = {QUEUE: [queue, queue_object("org")], SHARD: [shard_object(**shard)], POD_GROUP: [delayed]}
    (gang,) = KaiAdapter().observe(A, seen).gangs
    found = gang.protection
    assert (None if found is None else (found.reclaim_s, found.preempt_s)) == wanted
    assert gang.may_claim_ms == gang.created_ms + 300_000


@pytest.mark.parametrize(("protecting", "stopped"), [
    ("a", False), ("root", False), ("b", True), ("", True),
])  # fmt: skip
def test_what_kai_protects_is_no_victim_of_a_queue_that_protects_nothing(
    controller_of: Make, accountant: Any, protecting: str, stopped: bool
) -> None:
    """Under one root, a holds all 8 GPUs since 10 minutes, and b waits for its quota."""
    queues = [
        queue_object("root", requested="12", allocated="8"),
        queue_object("a", parent="root", quota=4, requested="8", allocated="8"),
        queue_object("b", parent="root", quota=4, requested="4", allocated="0"),
    ]
    for queue in queues:
        if queue["metadata"]["name"] == protecting:
            queue["spec"]["reclaimMinRuntime"] = "1h"
    alike = {"minMember": 1, "preemptibility": "preemptible"}
    groups = [pod_group(name, name[0], spec=alike) for name in ("a1", "a2", "b1")]

    def pod(name: str, node: str) -> dict[str, Any]:
        container = {"name": "c", "resources": {"limits": {GPU: "4"}}}
        spec = {"schedulerName": "kai-scheduler", "containers": [container], **({"nodeName": node} if node else {})}
        status = {"phase": "Running", "startTime": "2026-09-30T23:50:00Z"} if node else {"phase": "Pending"}
        labels, notes = {"kai.scheduler/queue": name[0]}, {"pod-group-name": name}
        return object_of(POD, name, spec, status, uid=f"p-{name}", labels=labels, annotations=notes)

    pods = [pod("a1", "n0"), pod("a2", "n0"), pod("b1", "")]
    cluster = kai_cluster([*queues, *groups, shard_object(kValue=0), node_object(gpus=8), *pods], [POD_GROUP, POD])
    names = [{"name": name, "deserved": 4, "parent": "root", "refs": [f"kai:{name}"]} for name in "ab"]
    rules = {"mode": "dry-run", "wait": 0, "min_runtime": 0}
    policy = kai_policy([{"name": "root", "refs": ["kai:root"]}, *names], preemption=rules)
    accountant.spend(a=0.5, b=0.1)
    (target,) = controller_of(policy, cluster, pods=lambda: pods_of(cluster)).cycle().targets
    (verdict,) = target.preemption.verdicts
    assert (verdict.outcome, len(verdict.victims)) == (("preempts", 1) if stopped else ("denied", 0))


@pytest.mark.parametrize(("preemptibility", "outcomes"), [
    ("non-preemptible", {"PodGroup/ns/b1": "denied", "PodGroup/ns/a1": "room"}),
    ("semi-preemptible", {"PodGroup/ns/b1": "denied", "PodGroup/ns/a1": "room"}),
    ("preemptible", {"PodGroup/ns/b1": "room", "PodGroup/ns/a1": "denied"}),
])  # fmt: skip
def test_work_that_kai_starts_only_within_the_quotas_takes_no_room_beyond_them(
    controller_of: Make, accountant: Any, preemptibility: str, outcomes: dict[str, str]
) -> None:
    """All 8 GPUs are free. b has a quota of 8, its parent none."""
    queues = [
        queue_object("root", requested="12", allocated="0"),
        queue_object("a", parent="root", requested="4", allocated="0"),
        queue_object("b", parent="root", quota=8, requested="8", allocated="0"),
    ]
    groups = [
        pod_group("a1", "a", requested=4, spec={"minMember": 1, "preemptibility": "preemptible"}),
        pod_group("b1", "b", requested=8, spec={"minMember": 1, "preemptibility": preemptibility}),
    ]
    cluster = kai_cluster([*queues, *groups, shard_object(kValue=0), node_object(gpus=8)], [POD_GROUP, POD])
    names = [{"name": n, "deserved": d, "parent": "root", "refs": [f"kai:{n}"]} for n, d in (("a", 0), ("b", 8))]
    rules = {"mode": "dry-run", "wait": 0, "min_runtime": 0}
    policy = kai_policy([{"name": "root", "refs": ["kai:root"]}, *names], preemption=rules)
    (target,) = controller_of(policy, cluster).cycle().targets
    assert {verdict.claimant: verdict.outcome for verdict in target.preemption.verdicts} == outcomes


@pytest.mark.parametrize(("text", "seconds"), [
    ("1h30m", 5400), ("0", 0), ("500ms", 0.5), (".5s", 0.5), ("5", None), ("-1s", None), ("1d", None), (None, None),
    ("9" * 60 + "h", None), ("٣s", None),
])  # fmt: skip
def test_durations_of_the_kubernetes_api(text: object, seconds: float | None) -> None:
    assert duration_s(text) == seconds


def test_shares_in_mode_usage_follow_the_shards_own_k_and_window(accountant: Any, controller_of: Make) -> None:
    """Two queues of weight 1 on 16 GPUs; a used 13/16 of the window, so its part is 0.5 + 1 x (0.5 - 0.8125)."""
    queues = [{"name": name, "refs": [f"kai:{name}"]} for name in "ab"]
    policy = kai_policy(queues, k=0, targets={"kai": {"mode": "usage", "apply": "enforce"}})
    params = {"windowSize": "1d12h", "halfLifePeriod": "12h"}
    database = {"clientType": "prometheus", "connectionString": "http://usage", "usageParams": params}
    shard = shard_object(kValue=1, usageDBConfig=database)
    windows: list[WindowSpec] = []
    answer = accountant.window
    accountant.window = lambda spec, *more: (windows.append(spec), answer(spec, *more))[1]
    accountant.spend(a=13 / 16, b=3 / 16)
    cluster = kai_cluster([queue_object("a"), queue_object("b"), shard, node_object(gpus=16)])
    (target,) = controller_of(policy, cluster).cycle().targets
    assert [each.gpus for each in target.entitlements] == [3, 13]
    assert windows[-1] == WindowSpec(size=129_600, half_life=43_200)
    cluster.load([shard_object(kValue=0, usageDBConfig=database)])
    (target,) = controller_of(policy, cluster).cycle().targets
    assert [each.gpus for each in target.entitlements] == [8, 8]


@pytest.mark.parametrize(("params", "wanted"), [
    ({"fetchInterval": "10m"}, ("False", "UsageTooOld")),
    ({"fetchInterval": "5m", "stalenessPeriod": "1s"}, ("True", "UsageOnly")),  # KAI goes on with what it has
    ({}, ("True", "UsageOnly")),
])  # fmt: skip
def test_usage_that_is_too_old_before_it_is_fetched_again_is_named(
    params: dict[str, str], wanted: tuple[str, str]
) -> None:
    database = {"clientType": "prometheus", "connectionString": "http://usage", "usageParams": params}
    found = usage_read([shard_object(usageDBConfig=database)], "http://usage", max_staleness_s=300)
    assert (found.status, found.reason) == wanted
    assert ("fetchInterval" in found.remedy) == (wanted[0] == "False")


def _tried(pool: str = "default", number: str = "1") -> dict[str, Any]:
    return {"type": "UnschedulableOnNodePool", "nodePool": pool, "transitionID": number, "status": "True"}


@pytest.mark.parametrize(("spec", "conditions", "waits_in_vain"), [
    ({}, [_tried()], False),
    ({"schedulingBackoff": -1}, [_tried()], False),
    ({"schedulingBackoff": 1}, [], False),
    ({"schedulingBackoff": 1}, [_tried()], True),
    ({"schedulingBackoff": 1}, [_tried("gold")], False),
    ({"schedulingBackoff": 1}, [_tried(number="2"), _tried("gold", "10")], False),
    ({"schedulingBackoff": 1}, [_tried("gold", "2"), _tried(number="10")], True),
    ({"schedulingBackoff": 1}, [_tried("gold", "x"), _tried(number="0")], True),
    ({"queue": "org"}, [], True),  # it has queues below it
])  # fmt: skip
def test_what_kai_does_not_start_claims_nothing(
    spec: dict[str, Any], conditions: list[dict[str, Any]], waits_in_vain: bool
) -> None:
    policy = kai_policy([{"name": "org", "refs": ["kai:org"]}, {"name": "a", "parent": "org", "refs": ["kai:a"]}])
    group = pod_group("g", requested=1, spec={"minMember": 1, "queue": "a", **spec})
    group["status"]["schedulingConditions"] = conditions
    seen = {QUEUE: [queue_object("a", parent="org"), queue_object("org")], POD_GROUP: [group]}
    (gang,) = KaiAdapter().observe(policy, seen).gangs
    assert bool(gang.held_back) == waits_in_vain
