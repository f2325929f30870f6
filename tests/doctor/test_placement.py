"""Why pods wait: by which taint, for want of room on one node, or for what only the scheduler's event names."""

from __future__ import annotations

from typing import Any

import pytest

from gputally.doctor.scheduler_checks import free_gpus, messages, placement, tolerates
from tests.doctor.conftest import NOW_MS, failed, node, pod

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
