"""Checks of schedulers: guarantees beyond the capacity or promised twice, publishing without a reader, and reasons of
waiting pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fairshare.core.queues_and_weights import Condition, Gang, Issue, Pod
from gputally.doctor.scheduler_checks import (
    SchedulerState,
    conflicts,
    free_gpus,
    guarantees,
    messages,
    of_models,
    own_queues,
    placement,
    targets,
    tolerates,
    weights,
)
from gputally.kubernetes.mig_parts import NO_NODES
from gputally.kubernetes.objects import POD
from gputally.kubernetes.scheduler_plugins import OwnQueue, schedulers
from gputally.testing.fake_scheduler import SCHEDULER, queue_object
from tests.doctor.conftest import NOW_MS, MemoryInspector, failed, node, pod
from tests.doctor.policies import policy
from tests.fairshare.builders import node_object
from tests.plugin_cases import plugin_cases

pytestmark = pytest.mark.usefixtures("fake_scheduler")

CASES = plugin_cases("fairshare")
OBJECT_CASES = plugin_cases("fairshare", "object_cases")

SERVED = {
    (versions[0].api_version.partition("/")[0], versions[0].plural): (versions[0].api_version.partition("/")[2],)
    for versions in SCHEDULER.kinds
}


def gang(queue: str, gpus: float) -> Gang:
    return Gang(queue, POD, "work", "big", "u", gpus, 0.0, gpus)


def test_a_scheduler_that_is_not_there_cannot_be_published_to() -> None:
    """Of those that are not there, only the one that the policy names is missed."""
    (found,) = weights(policy(), [SchedulerState(name, {}) for name, one in schedulers().items() if one.kinds]).findings
    assert (found.severity, found.remedy) == ("error", "kubectl get crd | grep queues")
    assert found.what == "the policy publishes to fake, which is not installed: no Queue is served"
    assert found.evidence == "1 queues refer to it: a"


def test_a_version_nobody_knows_is_named() -> None:
    served = {**SERVED, ("fake.gputally.dev", "podgroups"): ("v9",)}
    (found,) = weights(policy(), [SchedulerState("fake", served, "enforce")]).findings
    assert found.evidence == "served: v9; known: v1"


def test_weights_that_cannot_act_and_queues_without_a_place() -> None:
    conditions = [
        Condition(
            "Effective",
            "False",
            "HistoryCountedTwice",
            "Setup default counts past use too",
            "set spec.countsUsage to false",
        ),
        Condition("Other", "False", "No", "matter"),
    ]
    target = SchedulerState("fake", SERVED, "enforce", conditions, [Issue("a", "fake has no queue a")])
    acts, placed = weights(policy(), [target]).findings
    assert (acts.severity, placed.severity) == ("error", "warning")
    assert acts.what == "weights published to fake have no effect (HistoryCountedTwice)"
    assert acts.evidence == "Setup default counts past use too"
    assert acts.remedy == "set spec.countsUsage to false"
    assert placed.evidence == "fake has no queue a"
    assert weights(policy(), [replace(target, conditions=(), issues=())]).seen == "fake (enforce)"


def test_without_a_policy_nothing_is_published() -> None:
    seen = weights(None, [SchedulerState("fake", SERVED)])
    assert (seen.findings, seen.seen) == ((), "fake (off), no policy in force")


def test_a_queue_of_two_schedulers_is_promised_twice() -> None:
    both = policy({"name": "a", "deserved": 8, "refs": ("fake:a", "kueue:a")})
    (found,) = conflicts(both, [], []).findings
    assert found.what == "queue a is a queue of fake and kueue: each allocates the whole quota"
    assert found.evidence == "8 GPUs deserved, promised 2 times; refs fake:a, kueue:a"


def test_a_team_of_two_schedulers_takes_from_each() -> None:
    apart = policy(
        {"name": "a", "team": "vision", "deserved": 8, "refs": ("fake:a",)},
        {"name": "b", "team": "vision", "deserved": 4, "refs": ("kueue:b",)},
    )
    (found,) = conflicts(apart, [], []).findings
    assert found.what == "team vision has queues at 2 schedulers, and gets its share from each"
    assert found.evidence == "fake: a (8 GPUs deserved); kueue: b (4 GPUs deserved)"
    one = policy({"name": "a", "refs": ("kueue:a",)}, {"name": "b", "refs": ("kueue-cohort:b",)})
    assert conflicts(one, [], []).findings == ()


def test_namesakes_that_no_policy_knows() -> None:
    objects = [OwnQueue("fake", "vision", 8, refs=("fake:vision",)), OwnQueue("kueue", "vision", None)]
    (found,) = conflicts(None, objects, []).findings
    assert found.what == "fake and kueue each have a queue vision, which the policy does not name"
    assert found.evidence == "GPU quotas: fake 8, kueue none"
    known = policy({"name": "v", "refs": ("fake:vision",)})
    assert conflicts(known, objects, []).findings == ()


def test_nodes_that_two_schedulers_give_out() -> None:
    pods = [
        (Pod("1", "n", "p", 4, node="a", held=True), "fake"),
        (Pod("2", "n", "q", 2, node="a", held=True), "default-scheduler"),
        (Pod("3", "n", "r", 2, node="b", held=True), "fake"),
        (Pod("4", "n", "s", 2), "default-scheduler"),
    ]
    (found,) = conflicts(None, [], pods).findings
    assert found.what.startswith("several schedulers place pods on 1 nodes")
    assert found.evidence == "default-scheduler 2 GPUs, fake 4 GPUs on a"


def test_quotas_beyond_what_is_installed_or_up() -> None:
    given = policy(
        {"name": "a", "deserved": 12}, {"name": "b", "deserved": 8}, {"name": "c", "parent": "b", "deserved": 8}
    )
    (found,) = guarantees(given, 8, 16, [], []).findings
    assert (found.severity, found.evidence) == ("error", "20 deserved, 16 installed, 8 up: a 12, b 8")
    (found,) = guarantees(given, 16, 24, [], []).findings
    assert (found.severity, found.what) == ("warning", "deserved quotas add up to more GPUs than are up now")
    assert guarantees(given, 24, 24, [], []).findings == ()


def test_quotas_beyond_what_there_is_of_a_model() -> None:
    """12 H100 of 8 are promised, although the cluster has 40 GPUs."""
    given = policy(
        {"name": "a", "gpu_models": {"H100": {"deserved": 8}, "A10": {"deserved": 4}}},
        {"name": "b", "gpu_models": {"H100": {"deserved": 4}}},
    )
    nodes = [
        node_object("h", 8, labels={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}),
        node_object("a", 32, labels={"nvidia.com/gpu.product": "NVIDIA-A10"}),
    ]
    found = of_models(given, nodes)
    assert found == {"H100": (8, 8), "A10": (32, 32)}
    (finding,) = guarantees(given, 40, 40, [], [], found).findings
    assert (finding.severity, finding.evidence) == ("error", "12 deserved, 8 installed, 8 up: a 8, b 4")
    assert guarantees(given, 40, 40, [], []).findings == ()
    assert of_models(given, [*nodes, node_object("unlabelled", 8)]) == {}  # it may be of any model


def test_quotas_that_contradict_each_other() -> None:
    given = policy({"name": "a", "deserved": 4, "limit": 2}, {"name": "b", "parent": "a", "deserved": 6})
    texts = [each.what for each in guarantees(given, 16, 16, [], []).findings]
    assert texts == [
        "the children of 'a' deserve 6 GPUs together, and it deserves 4",
        "'a' deserves 4 GPUs, which is above its limit of 2",
    ]


def test_the_schedulers_own_quotas() -> None:
    given = [
        queue_object("root", quota=16), queue_object("leaf", quota=16, parent="root"), queue_object("free", quota=-1),
    ]  # fmt: skip
    of_others = [obj for cases in OBJECT_CASES.values() for obj in cases.QUOTAS]
    objects = own_queues(MemoryInspector([*given, *of_others]), NO_NODES)
    assert [(each.name, each.quota, each.nested) for each in objects] == [
        *(told for cases in OBJECT_CASES.values() for told in cases.QUOTAS_TOLD),
        ("free", None, False), ("leaf", 16, True), ("root", 16, False),
    ]  # fmt: skip


def test_gangs_that_never_start() -> None:
    given = policy({"name": "top", "limit": 8}, {"name": "a", "parent": "top"})
    (found,) = guarantees(given, 16, 16, [], [gang("a", 12)]).findings
    assert found.what == "work/big needs 12 GPUs at once, above the limit of queue top: it never starts"
    (found,) = guarantees(policy({"name": "a"}), 16, 16, [], [gang("a", 24)]).findings
    assert found.what == "work/big needs 24 GPUs at once, more than the cluster has up"


def test_a_gang_beyond_any_share_of_its_queue() -> None:
    even = policy({"name": "a"}, {"name": "b"}, k=0, turns={"most_queues": 0})
    (found,) = guarantees(even, 16, 16, [], [gang("a", 12)]).findings
    assert found.severity == "warning"
    assert found.remedy == "gputally fairshare check POLICY.yaml --capacity 16 --gang a=12"
    assert "never admitted" in found.evidence
    assert guarantees(even, 16, 16, [], [gang("a", 8)]).findings == ()


@pytest.mark.parametrize(
    ("mode", "wrong", "right", "reason", "lines"), [case for cases in CASES.values() for case in cases.MENDED]
)
def test_what_is_wrong_with_a_scheduler_is_found_with_the_lines_to_write(
    mode: str, wrong: dict[str, Any], right: dict[str, Any], reason: str, lines: str
) -> None:
    name, _, how = mode.partition(":")
    target = {"mode": how, **CASES[name].MENDED_TARGET} if how else {}
    given = policy({"name": "a", "deserved": 8, "refs": (f"{name}:a",)}, targets={name: target})
    queue = CASES[name].MENDED_QUEUE
    (found,) = weights(given, targets(MemoryInspector([queue, wrong]), given)).findings
    assert (found.severity, f"({reason})" in found.what) == ("error", True)
    assert lines in found.remedy
    assert weights(given, targets(MemoryInspector([queue, right]), given)).findings == (), "the lines mend it"


INFRA = {"key": "dedicated", "value": "infra", "effect": "NoSchedule"}
NOTE = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint(s)."


def test_a_taint_that_blocks_is_named_with_its_nodes_and_the_schedulers_words() -> None:
    nodes = [node("a", taints=[INFRA]), node("b")]
    pods = [pod("full", 8, on="b"), pod("train", 4), pod("eval", 2)]
    (found,) = placement(nodes, pods, [failed("train", NOTE)], NOW_MS).findings
    assert found.severity == "error"
    assert found.what == "taint dedicated=infra:NoSchedule keeps 2 pods from free GPUs: work/train, work/eval"
    assert found.evidence == f'8 GPUs free on a; requested: 6; the scheduler: "{NOTE}"'
    assert found.remedy.startswith("kubectl taint nodes a dedicated:NoSchedule-")
    assert "{key: dedicated, operator: Equal, value: infra, effect: NoSchedule}" in found.remedy


def test_a_node_that_would_take_the_pod_means_that_no_taint_is_to_blame() -> None:
    seen = placement(
        [node("a", taints=[INFRA]), node("b")], [pod("train", 4)], [failed("train", "0/2: volume")], NOW_MS
    )
    (found,) = seen.findings
    assert found.what == "work/train waits although a node has room for its 4 GPUs"
    assert '"0/2: volume"' in found.evidence
    assert found.remedy == "kubectl -n work describe pod train"


def test_a_pod_with_a_toleration_is_not_kept_by_that_taint() -> None:
    tolerations = [{"key": "dedicated", "operator": "Exists"}]
    seen = placement([node("a", taints=[INFRA])], [pod("train", 4, tolerations=tolerations)], [], NOW_MS)
    assert "waits although a node has room" in seen.findings[0].what
    assert "its scheduler has not tried the pod" in seen.findings[0].evidence


def test_other_reasons_are_told_apart() -> None:
    nodes = [node("a"), node("b")]
    running = [pod("x", 6, on="a"), pod("y", 6, on="b")]
    seen = placement(nodes, [*running, pod("wide", 4), pod("huge", 16), pod("new", 4, hours=0.01)], [], NOW_MS)
    assert [each.what for each in seen.findings] == [
        "work/wide waits: 4 GPUs are free, but not on one node",
        "work/huge waits: 16 GPUs are not free",
    ]
    assert {each.severity for each in seen.findings} == {"warning"}
    assert seen.seen == "2 pods wait; 4 of 16 GPUs are free"


def test_a_selector_a_closed_node_and_required_affinity_are_no_taints() -> None:
    closed = node("c", taints=[{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}])
    nodes = [node("a", taints=[INFRA], pool="a100"), closed]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}
    pods = [pod("chosen", 1, nodeSelector={"pool": "h100"}), pod("picky", 1, affinity=affinity)]
    assert not any("taint" in each.what for each in placement(nodes, pods, [], NOW_MS).findings)


def test_free_gpus_are_those_of_nodes_that_are_up() -> None:
    down = node("down")
    down["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    pods = [pod("x", 3, on="a"), pod("y", 2, on="full"), pod("waits", 1)]
    assert free_gpus([node("a"), node("full", 2), down], pods) == {"a": 5.0}


def test_the_newest_event_of_a_pod_counts() -> None:
    old, new = failed("p", "old", "2026-11-01T10:00:00.000000Z"), failed("p", "new", "2026-11-01T11:00:00.000000Z")
    other = {**failed("p", "scheduled", "2026-11-01T11:30:00.000000Z"), "reason": "Scheduled"}
    assert messages([new, old, other]) == {"uid-p": "new"}
    core = {
        "reason": "FailedScheduling", "message": "of core", "lastTimestamp": "2026-11-01T11:00:00Z",
        "involvedObject": {"uid": "u"},
    }  # fmt: skip
    assert messages([core]) == {"u": "of core"}


@pytest.mark.parametrize(
    ("toleration", "taken"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "dedicated", "value": "infra"}, True),
        ({"key": "dedicated", "operator": "Equal", "value": "ml"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"value": "infra"}, False),
    ],
)
def test_tolerations(toleration: dict[str, Any], taken: bool) -> None:
    assert tolerates([toleration], INFRA) is taken
