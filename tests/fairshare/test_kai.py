"""KAI's objects as our model, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fairshare.adapters.kai import KaiAdapter, effective, read_queue, usage_read
from fairshare.kube import marks
from fairshare.kube.quantities import quantity
from fairshare.model import Held, Issue

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


def test_a_queue_is_read_with_what_we_noted_on_it(queue_object: Make) -> None:
    noted = marks.Marks(2.0, 3.5, 1_000, 1, "v1").annotations()
    read = read_queue(queue_object("a", 3.5, requested="12", allocated="7500m", annotations=noted, uid="u"))
    assert not isinstance(read, Issue)
    held, standing = read
    assert (held.name, held.uid, held.weight, held.published, held.base) == ("a", "u", 3.5, 3.5, 2.0)
    assert (standing.requested, standing.allocated, standing.weight) == (12.0, 7.5, 3.5)
    assert (standing.changed_ms, standing.direction) == (1_000, 1)


def test_a_queue_holds_what_kai_notes_under_other_names_too(queue_object: Make) -> None:
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
def test_what_cannot_be_read_is_an_issue(queue_object: Make, change: dict[str, Any], reason: str) -> None:
    assert read_queue(queue_object("a", **change)) == Issue("a", reason)


def test_only_the_weight_and_our_annotations_are_patched() -> None:
    patch = KaiAdapter().patch(Held("a", "u-1", "7", 1.0), 2.5, {marks.BASE: "1"})
    assert patch == {
        "apiVersion": "scheduling.run.ai/v2",
        "kind": "Queue",
        "metadata": {"name": "a", "uid": "u-1", "annotations": {marks.BASE: "1"}},
        "spec": {"resources": {"gpu": {"overQuotaWeight": 2.5}}},
    }
    assert "spec" not in KaiAdapter().patch(Held("a", "", "7", 1.0), None, {})


def test_queues_find_their_objects_and_the_rest_is_left_alone(
    seen_of: Make, policy_of: Make, queue_object: Make
) -> None:
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
    assert (set(seen.held), set(seen.standings)) == ({"a"}, {"a"})
    assert seen.held["a"].name == "one"
    assert [(issue.subject, issue.reason) for issue in seen.issues] == [
        ("b", "several KAI queues (three, two) for one queue of the policy: none is touched"),
        ("c", "KAI has no queue four"),
        ("broken", "spec.resources.gpu.overQuotaWeight is -2"),
    ]


def test_where_a_queue_differs_from_the_policy_is_said(seen_of: Make, policy_of: Make, queue_object: Make) -> None:
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


@pytest.mark.parametrize(
    ("spec", "status", "says"),
    [
        ({"kValue": 0}, "True", "weights alone"),
        ({"kValue": -3}, "True", "weights alone"),
        ({}, "True", "weights alone"),  # k is 1, but without a usage database every usage is 0
        ({"usageDBConfig": {"clientType": "prometheus"}}, "False", "kValue is unset, which means 1"),
        ({"kValue": 0, "usageDBConfig": {"clientType": "prometheus"}}, "True", "weights alone"),
        ({"kValue": 2}, "False", "kValue is 2 in SchedulingShard default: set it to 0"),
        ({"kValue": 0, "plugins": {"proportion": {"arguments": {"kValue": "1.5"}}}}, "False", "kValue is 1.5"),
        ({"kValue": 0, "plugins": {"proportion": {"arguments": {"kValue": "odd"}}}}, "False", "kValue is 1"),
    ],
)
def test_history_must_not_count_twice(
    seen_of: Make, policy_of: Make, queue_object: Make, shard_object: Make, spec: dict[str, Any], status: str, says: str
) -> None:
    seen = seen_of(KaiAdapter(), policy_of(), [*map(queue_object, "abc"), shard_object(**spec)])
    (condition,) = [each for each in seen.conditions if each.type == "Effective"]
    assert condition.status == status
    assert says in condition.message


def test_several_shards_each_ask_for_their_own_nodes(shard_object: Make) -> None:
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


def test_without_shards_nobody_knows() -> None:
    assert effective([]).status == "Unknown"


def test_modes(policy_of: Make) -> None:
    assert KaiAdapter().mode(policy_of()) == "enforce"
    assert KaiAdapter().mode(policy_of(apply="dry-run")) == "dry-run"
    assert KaiAdapter().mode(policy_of(targets={"kai": {"mode": False}})) == "off"


def test_marks_that_are_not_ours_are_none() -> None:
    whole = marks.Marks(None, 1.5, 1_790_812_800_123, -1, "v").annotations()
    assert marks.read(whole) == marks.Marks(None, 1.5, 1_790_812_800_123, -1, "v")
    for broken in ({marks.PUBLISHED: "x"}, {marks.BASE: ""}, {marks.PUBLISHED: "nan"}):
        assert marks.read(whole | broken) is None
    lenient = marks.read(whole | {marks.CHANGED: "yesterday", marks.DIRECTION: "sideways"})
    assert lenient == marks.Marks(None, 1.5, None, 0, "v")
    assert marks.read({}) is None
