"""KAI objects read into the model and weights written back."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fairshare.core import scheduler_queue_objects
from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import Issue, Pod, TargetQueue
from fairshare.preemption.victim_candidates import bundles
from fairshare.targets.kai import CONFIG, POD_GROUP, QUEUE, SHARD, KaiAdapter, effective, read_queue, usage_read
from fairshare.targets.weight_plan import look_at
from gputally.kubernetes.objects import NODE, PRIORITY_CLASS, quantity
from tests.fairshare.builders import cluster_of, object_of, pod_group, policy_of, queue_object, shard_object

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("text", "amount"),
    [(7, 7.0), ("4", 4.0), ("500m", 0.5), ("1.5", 1.5), ("2k", 2000.0), ("1e3", 1000.0), (".5", 0.5), (0, 0.0)],
)
def test_quantities(text: object, amount: float) -> None:
    assert quantity(text) == amount


@pytest.mark.parametrize("text", ["", "four", "-1", -2, True, None, "1Zi", float("inf"), [1]])
def test_no_quantities(text: object) -> None:
    assert quantity(text) is None


def test_a_queue_is_read_with_what_we_noted_on_it() -> None:
    noted = scheduler_queue_objects.WeightAnnotations(2.0, 3.5, 1_000, 1, "v1").annotations()
    read = read_queue(queue_object("a", 3.5, requested="12", allocated="7500m", annotations=noted, uid="u"))
    assert not isinstance(read, Issue)
    held, standing = read
    assert (held.name, held.uid, held.weight, held.published, held.base) == ("a", "u", 3.5, 3.5, 2.0)
    assert (standing.requested, standing.allocated, standing.weight) == (12.0, 7.5, 3.5)
    assert (standing.changed_ms, standing.direction) == (1_000, 1)


def test_a_queue_holds_what_kai_notes_under_other_names_too() -> None:
    """MIG instances by their slices, GPUs of ResourceClaims under their class."""
    obj = queue_object("a", requested="2", allocated="1")
    obj["status"]["allocated"] |= {"nvidia.com/mig-3g.40gb": "1", "gpu.nvidia.com": "2", "cpu": "8"}
    obj["status"]["requested"] |= {"nvidia.com/mig-3g.40gb": "2", "gpu.nvidia.com": "4"}
    read = read_queue(obj)
    assert not isinstance(read, Issue)
    assert (read[1].requested, read[1].allocated) == pytest.approx((6 + 6 / 7, 3 + 3 / 7))


def test_what_is_unset_reads_as_unset_or_nothing() -> None:
    read = read_queue({"metadata": {"name": "new"}})
    assert not isinstance(read, Issue)
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
    patch = KaiAdapter().patch(TargetQueue("a", "u-1", "7", 1.0, QUEUE), 2.5, {scheduler_queue_objects.BASE: "1"})
    assert patch == {
        "apiVersion": "scheduling.run.ai/v2",
        "kind": "Queue",
        "metadata": {"name": "a", "uid": "u-1", "annotations": {scheduler_queue_objects.BASE: "1"}},
        "spec": {"resources": {"gpu": {"overQuotaWeight": 2.5}}},
    }
    assert "spec" not in KaiAdapter().patch(TargetQueue("a", "", "7", 1.0, QUEUE), None, {})


def test_queues_find_their_objects_and_the_rest_is_left_alone(seen_of: Make) -> None:
    policy = policy_of(
        [
            {"name": "a", "refs": ["kai:one"]},
            {"name": "b", "refs": ["kai:two", "kai:three"]},
            {"name": "c", "refs": ["kai:four"]},
            {"name": "d", "refs": ["kueue:ns/d"]},
            {"name": "e", "refs": ["kai:broken"]},
        ]
    )
    objects = [queue_object(name) for name in ("one", "two", "three", "stranger")]
    objects.append(queue_object("broken", -2))
    seen = seen_of(KaiAdapter(), policy, objects)
    assert (set(seen.queues), set(seen.standings)) == ({"a"}, {"a"})
    assert seen.queues["a"].name == "one"
    assert [(issue.subject, issue.reason) for issue in seen.issues] == [
        ("b", "several KAI queues (three, two) for one queue of the policy: none is touched"),
        ("c", "KAI has no queue four"),
        ("broken", "spec.resources.gpu.overQuotaWeight is -2"),
    ]


def test_where_a_queue_differs_from_the_policy_is_said(seen_of: Make) -> None:
    policy = policy_of(
        [{"name": "dept", "refs": ["kai:d"]}, {"name": "a", "parent": "dept", "deserved": 4, "refs": ["kai:a"]}]
    )
    adapter = KaiAdapter()
    same = seen_of(adapter, policy, [queue_object("d"), queue_object("a", quota=4, parent="d")])
    assert {c.type: c.status for c in same.conditions}["InSync"] == "True"
    changed = [queue_object("d"), queue_object("a", quota=8)]
    other = seen_of(adapter, policy, changed)
    (condition,) = [c for c in other.conditions if c.type == "InSync"]
    assert (condition.status, condition.message) == ("False", "a: quota 8, policy 4; a: parent none, policy dept")


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
    seen = seen_of(KaiAdapter(), policy_of(), [*map(queue_object, "abc"), shard_object(**spec)])
    (condition,) = [each for each in seen.conditions if each.type == "Effective"]
    assert condition.status == status
    assert says in condition.message


def test_several_shards_each_ask_for_their_own_nodes() -> None:
    def reads(name: str, label: str | None, url: str) -> dict[str, Any]:
        database = {"clientType": "prometheus", "connectionString": url, "usageParams": {}}
        spec = {"kValue": 1, "usageDBConfig": database, **({"partitionLabelValue": label} if label else {})}
        found: dict[str, Any] = shard_object(**spec)
        return {**found, "metadata": {**found["metadata"], "name": name}}

    base = "http://usage:9091"
    assert usage_read([reads("default", None, base)], base).status == "True"
    right = [reads("blue", "blue", f"{base}/shards/blue"), reads("default", None, f"{base}/shards/")]
    assert usage_read(right, base).status == "True"
    wrong = usage_read([reads("blue", "blue", base), right[1]], base)
    assert (wrong.status, wrong.message) == (
        "False", f"SchedulingShard blue reads usage from {base}, not from {base}/shards/blue",
    )  # fmt: skip


def _config(**prometheus: Any) -> dict[str, Any]:
    """KAI's own Config, as its operator reads it."""
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
    condition = usage_read([shard], endpoint, config)
    assert condition.status == status
    assert says in condition.message


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
    condition = effective(cluster.list(SHARD))
    assert condition.status == "False"
    _write(cluster, condition.remedy)
    assert effective(cluster.list(SHARD)).status == "True"


def _write(cluster: Any, remedy: str) -> None:
    """What the lines of `kubectl patch` do."""
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
    condition = usage_read(cluster.list(SHARD), _OURS)
    assert condition.status != "True"
    _write(cluster, condition.remedy)
    assert usage_read(cluster.list(SHARD), _OURS).status == "True"


def _class(name: str, value: int, **fields: Any) -> dict[str, Any]:
    return {**object_of(PRIORITY_CLASS, name), "value": value, **fields}


def _pod_group(**spec: Any) -> dict[str, Any]:
    """As KAI's podgrouper writes it."""
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
def test_priority_is_that_of_the_pod_groups_class(
    seen_of: Make, classes: list[Any], spec: dict[str, Any], expected: Any
) -> None:
    """The pods' own priority is 0: they name the class by label, `priorityClassName: gold`."""
    policy = policy_of([{"name": "a", "refs": ["kai:a"]}])
    pod = Pod("u", "ns", "p", 4.0, "n", "kai:a", "PodGroup/ns/g", priority=0, held=True)
    (gang,) = seen_of(KaiAdapter(), policy, [queue_object("a"), _pod_group(minMember=1, **spec), *classes], [pod]).gangs
    assert (gang.priority, gang.preemptible) == expected


def test_without_the_right_to_read_classes_only_kais_own_are_known() -> None:
    for name, expected in (("train", True), ("build", False), ("gold", False)):
        cluster = cluster_of([queue_object("a"), _pod_group(minMember=1, priorityClassName=name)], [POD_GROUP])
        seen = look_at(KaiAdapter(), policy_of([{"name": "a", "refs": ["kai:a"]}]), cluster)
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
    (gang,) = seen_of(KaiAdapter(), policy_of([{"name": "a", "refs": ["kai:a"]}]), objects).gangs
    assert gang.topology == level


def _member(name: str, subgroup: str, start_ms: int, *, held: bool = True) -> Pod:
    return Pod(
        name, "ns", name, 1.0, "n" if held else "", "kai:a", "PodGroup/ns/g", "Job/ns/g", held=held,
        created_ms=start_ms, started_ms=start_ms, subgroup=subgroup,
    )  # fmt: skip


def _subgroup(name: str, parent: str | None = None, **minimum: int) -> dict[str, Any]:
    return {"name": name, **({"parent": parent} if parent else {}), **minimum}


@pytest.mark.parametrize(
    ("spec", "minimum", "surplus"),
    [
        (  # all four are one gang, though spec.minMember is not there
            {"minSubGroup": 2, "subGroups": [_subgroup("leader", minMember=1), _subgroup("worker", minMember=3)]},
            4.0,
            [],
        ),
        ({"subGroups": [_subgroup("leader", minMember=1), _subgroup("worker", minMember=2)]}, 3.0, ["w2"]),
        (
            {
                "subGroups": [
                    _subgroup("all", minSubGroup=2),
                    _subgroup("leader", "all", minMember=1),
                    _subgroup("worker", "all", minMember=1),
                ]
            },
            2.0,
            ["w2", "w1"],
        ),
        (
            {"minSubGroup": 1, "subGroups": [_subgroup("leader", minMember=1), _subgroup("worker", minMember=3)]},
            1.0,
            [],
        ),
    ],
)
def test_minima_are_summed_over_subgroups(
    either_of: Make, spec: dict[str, Any], minimum: float, surplus: list[str]
) -> None:
    policy = policy_of([{"name": "a", "refs": ["kai:a"]}])
    pods = [
        _member("w0", "worker", 1),
        _member("w1", "worker", 2),
        _member("w2", "worker", 3),
        _member("l", "leader", 9),
    ]
    cluster = either_of([queue_object("a"), _pod_group(**spec)])
    (gang,) = look_at(KaiAdapter(), policy, cluster, pods).gangs
    assert gang.minimum == minimum
    parts = bundles(gang, 10)
    assert [each.pods[0].name for each in parts if not each.whole] == surplus
    waiting = [replace(pod, node="", held=False) for pod in pods]
    (gang,) = look_at(KaiAdapter(), policy, cluster, waiting).gangs
    assert (gang.minimum, gang.waits) == (minimum, minimum)


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
    policy = policy_of([{"name": "a", "refs": ["kai:a"]}])
    seen = seen_of(KaiAdapter(), policy, [queue_object("a"), *groups, *nodes], pods)
    assert {gang.name: (gang.requested, gang.allocated) for gang in seen.gangs} == {
        "g-waits": (0.5, 0.0), "g-runs": (0.25, 0.25), "g-two": (1.0, 0.0),
    }  # fmt: skip
    assert seen.standings["a"].requested == 100 + 0.5 + 1.0


def test_gpu_memory_is_of_unknown_size_where_no_node_says_how_large_its_gpus_are(seen_of: Make) -> None:
    pod = Pod("u", "ns", "p", 0.0, ref="kai:a", gang="PodGroup/ns/g", memory_mib=40_000.0)
    group = {**_pod_group(minMember=1), "status": {}}
    seen = seen_of(KaiAdapter(), policy_of([{"name": "a", "refs": ["kai:a"]}]), [queue_object("a"), group], [pod])
    assert (seen.gangs, seen.standings["a"].requested) == ((), 100.0)


def test_without_shards_it_is_unknown_whether_weights_are_effective() -> None:
    assert effective([]).status == "Unknown"


def test_modes() -> None:
    assert KaiAdapter().mode(policy_of()) == "enforce"
    assert KaiAdapter().mode(policy_of(apply="dry-run")) == "dry-run"
    assert KaiAdapter().mode(policy_of(targets={"kai": {"mode": False}})) == "off"


def test_unreadable_weight_annotations_are_none() -> None:
    whole = scheduler_queue_objects.WeightAnnotations(None, 1.5, 1_790_812_800_123, -1, "v").annotations()
    assert scheduler_queue_objects.read(whole) == scheduler_queue_objects.WeightAnnotations(
        None, 1.5, 1_790_812_800_123, -1, "v"
    )
    for broken in (
        {scheduler_queue_objects.PUBLISHED: "x"},
        {scheduler_queue_objects.BASE: ""},
        {scheduler_queue_objects.PUBLISHED: "nan"},
    ):
        assert scheduler_queue_objects.read(whole | broken) is None
    lenient = scheduler_queue_objects.read(
        whole | {scheduler_queue_objects.CHANGED: "yesterday", scheduler_queue_objects.DIRECTION: "sideways"}
    )
    assert lenient == scheduler_queue_objects.WeightAnnotations(None, 1.5, None, 0, "v")
    assert scheduler_queue_objects.read({}) is None
