"""Workloads deactivated by a preemption are activated again, despite outages, refusals and a changed policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fairshare.controller.control_loop import Controller
from fairshare.preemption.unfinished_preemptions import PREEMPTION, PreemptionIntent, finish_all
from fairshare.targets import KINDS
from fairshare.targets.kueue import CLUSTER_QUEUES, WORKLOADS
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.volcano import JOB
from gputally.base.clock import VirtualClock
from gputally.base.errors import Refused
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Kind, Object
from tests.fairshare.builders import object_of, policy_of
from tests.fairshare.conftest import NOW_MS, Accountant
from tests.fairshare.failing_clusters import Failing

Make = Callable[..., Any]
WORKLOAD = WORKLOADS[0]
HERE = StatusObject("gputally", "gputally-fairshare")
SINCE = "2026-10-01T00:00:00Z"


def _switched_off(version: Kind = WORKLOAD) -> Object:
    """A Workload that gave way, and whose quota is free by now."""
    template = {"spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]}}
    intent = PreemptionIntent("d1", NOW_MS - 60_000)
    spec = {"active": False, "queueName": "a", "podSets": [{"name": "main", "count": 1, "template": template}]}
    status = {"conditions": [{"type": "QuotaReserved", "status": "False", "lastTransitionTime": SINCE}]}
    return object_of(version, "x", spec, status, annotations={PREEMPTION: intent.text()})


@pytest.fixture
def kueue(accountant: Accountant, clock: VirtualClock) -> Callable[..., tuple[Failing, Controller]]:
    """A controller of Kueue and the Workload that an earlier one has switched off."""

    def make(
        *, target: dict[str, str] | None = None, version: Kind = WORKLOAD, **options: Any
    ) -> tuple[Failing, Controller]:
        rules = options.pop("preemption", {"mode": "enforce"})
        kinds = [kind for kind in KINDS if kind.kind != "Workload" or kind == version]
        cluster = Failing(
            kinds, [*(object_of(CLUSTER_QUEUES[0], name, {"cohortName": "m"}) for name in "ab"), _switched_off(version)]
        )
        queues = [{"name": name, "refs": [f"kueue:{name}"]} for name in "ab"]
        policy = policy_of(queues, targets={"kueue": target or {"apply": "enforce"}}, preemption=rules)
        return cluster, Controller(policy, accountant, cluster, clock, status_object=HERE, **options)

    return make


def _active(cluster: MemoryCluster, version: Kind = WORKLOAD) -> bool:
    return bool(cluster.get(version, "x", "ns")["spec"]["active"])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({}, id="as ever"),
        pytest.param({"preemption": {"mode": "dry-run"}}, id="preemption is only tried by now"),
        pytest.param({"preemption": {"mode": "off"}}, id="preemption is off by now"),
        pytest.param({"target": {"mode": "off"}}, id="the target is off by now"),
        pytest.param({"target": {"apply": "dry-run"}}, id="weights are only tried"),
        pytest.param({"version": WORKLOADS[1]}, id="an older Kueue"),
    ],
)
@pytest.mark.parametrize("trouble", [{}, {"down": True}, {"age_ms": None}])
def test_who_was_switched_off_is_switched_on_whatever_else_is_off_or_away(
    kueue: Make, accountant: Accountant, case: dict[str, Any], trouble: dict[str, Any]
) -> None:
    vars(accountant).update(trouble)
    cluster, controller = kueue(**case)
    controller.cycle()
    found = cluster.get(case.get("version", WORKLOAD), "x", "ns")
    assert found["spec"]["active"] is True
    assert PREEMPTION not in found["metadata"]["annotations"]


@pytest.mark.parametrize("options", [{"silent": True}, {"leading": lambda: False}])
def test_who_may_not_write_ends_nothing(kueue: Make, options: dict[str, Any]) -> None:
    cluster, controller = kueue(**options)
    controller.cycle()
    assert not _active(cluster)


def test_who_cannot_be_switched_on_is_told_until_he_is(kueue: Make) -> None:
    cluster, controller = kueue(preemption={"mode": "off"})
    cluster.failing, cluster.error = frozenset({"patch Workload"}), Refused("PATCH: 403: workloads is forbidden")
    for _ in range(2):
        (target,) = controller.cycle().targets
        assert "ns/x" in target.degraded["NotResumed"]
        assert "forbidden" in target.degraded["NotResumed"]
        assert ("Resumed", "False") in {(c.type, c.status) for c in target.conditions}
    assert [event.reason for event in cluster.events].count("NotResumed") == 1
    cluster.failing = frozenset()
    (target,) = controller.cycle().targets
    assert "NotResumed" not in target.degraded
    assert _active(cluster)


def test_victims_are_not_searched_again_where_none_can_be_stopped(kueue: Make) -> None:
    cluster, controller = kueue(preemption={"mode": "off"})
    for _ in range(5):
        controller.cycle()
    # Once by the adapter in each cycle; of our own: the one that found a workload, and the one that found none.
    assert cluster.listed.count(WORKLOAD) == 5 + 2


def test_a_job_that_does_not_restart_is_given_up_and_told(accountant: Accountant, clock: VirtualClock) -> None:
    state = {"phase": "Running", "lastTransitionTime": "2026-09-30T00:00:00Z"}
    intent = PreemptionIntent("d1", NOW_MS - 3_600_000, 3).text()
    job = object_of(JOB, "x", {}, {"state": state}, annotations={PREEMPTION: intent})
    cluster = MemoryCluster(KINDS, [job])
    policy = policy_of([{"name": "a", "refs": ["volcano:a"]}], preemption={"mode": "off"})
    Controller(policy, accountant, cluster, clock, status_object=HERE).cycle()
    (told,) = [event for event in cluster.events if event.kind == JOB]
    assert (told.type, told.reason, told.name) == ("Warning", "NotRestarted", "x")
    assert PREEMPTION not in cluster.get(JOB, "x", "ns")["metadata"]["annotations"]


def test_release_lets_run_again_who_gave_way(kueue: Make) -> None:
    cluster, _ = kueue()
    holds = {**_switched_off(), "metadata": {**_switched_off()["metadata"], "name": "y"}}
    reserved = {"type": "QuotaReserved", "status": "True", "lastTransitionTime": SINCE}
    cluster.load([{**holds, "status": {"conditions": [reserved]}}])
    ended = finish_all(cluster, NOW_MS)
    assert (ended.resumed, ended.left) == (("ns/x",), ("ns/y",))
    assert ended.lines()[1] == "ns/y is still giving way: release again in a minute"
    assert _active(cluster)


def test_what_is_not_for_us_to_read_is_said(kueue: Make) -> None:
    """Without the Workloads there would seem to be no demand."""
    cluster, controller = kueue()
    cluster.failing, cluster.error = frozenset({"list Workload"}), Refused("GET: 403: workloads is forbidden")
    (target,) = controller.cycle().targets
    assert target.degraded["ReadRefused"] == "GET: 403: workloads is forbidden"
    assert "ReadRefused" in {event.reason for event in cluster.events}
    cluster.failing = frozenset()
    assert "ReadRefused" not in controller.cycle().targets[0].degraded
