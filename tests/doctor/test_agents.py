"""Nodes with GPUs that have no agent, and agents that do not start: the cluster's own words, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gputally.doctor.__main__ import run_checks
from gputally.doctor.check_inputs import Sources
from gputally.doctor.findings import Result
from gputally.doctor.node_checks import DAEMON_SET
from gputally.kubernetes.objects import POD
from tests.doctor.conftest import MemoryInspector, event, node
from tests.fairshare.builders import object_of

LABELS = {"app.kubernetes.io/part-of": "gputally", "app.kubernetes.io/component": "agent"}


def daemon_set(wanted: int, made: int, ready: int) -> dict[str, Any]:
    status = {"desiredNumberScheduled": wanted, "currentNumberScheduled": made, "numberReady": ready}
    return object_of(DAEMON_SET, "gputally-agent", status=status, namespace="gputally", labels=LABELS)


def agent(on: str, reason: str = "", message: str = "") -> dict[str, Any]:
    """An agent's pod; reason, message: why its container waits."""
    state = {"waiting": {"reason": reason, "message": message}} if reason else {"running": {}}
    spec = {"nodeName": on, "containers": [{"name": "agent", "image": "none"}]}
    status = {"containerStatuses": [{"name": "agent", "state": state}]}
    return object_of(POD, f"gputally-agent-{on}", spec, status, namespace="gputally", labels=LABELS)


def refused(note: str, at: str = "2026-11-01T11:59:00.000000Z") -> dict[str, Any]:
    """The controller's event on the DaemonSet."""
    return event("FailedCreate", note, at, kind="DaemonSet", namespace="gputally", name="gputally-agent")


@pytest.fixture
def checked(sources_of: Callable[..., Sources]) -> Callable[..., Result]:
    """The check over objects of a cluster."""

    def check(*objects: dict[str, Any]) -> Result:
        (found,) = run_checks(sources_of(MemoryInspector(objects)), ["agents"])
        return found

    return check


def test_an_agent_on_every_node_is_well(checked: Callable[..., Result]) -> None:
    found = checked(daemon_set(2, 2, 2), agent("a"), agent("b"), node("a"), node("b"), node("cpu", gpus=0))
    assert (found.status, found.seen) == ("ok", "2 of 2 agents ready, 2 nodes offer GPUs")


def test_nodes_with_gpus_and_without_an_agent_are_named(checked: Callable[..., Result]) -> None:
    (found,) = checked(daemon_set(1, 1, 1), agent("a"), node("a"), node("b"), node("c")).findings
    assert found.severity == "error"
    assert found.evidence == "2 of 3 nodes with GPUs: b, c"
    assert "kubectl label node NODE nvidia.com/gpu.present=true" in found.remedy


def test_where_no_node_offers_gpus_the_device_plugin_is_missing(checked: Callable[..., Result]) -> None:
    (found,) = checked(daemon_set(0, 0, 0), node("cpu", gpus=0)).findings
    assert (found.severity, found.what) == ("warning", "no node gets an agent")
    assert "device plugin" in found.remedy


@pytest.mark.parametrize(
    ("note", "remedy"),
    [
        ('pods "x" is forbidden: pod rejected: RuntimeClass "nvidia" not found', "agent.runtimeClassName"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest"', "agent.namespace.create"),
        (
            "insufficient quota to match these scopes: [{PriorityClass In [system-node-critical]}]",
            "agent.resourceQuota",
        ),
        ("something else", "fix the cause that the message names"),
    ],
)
def test_pods_that_cannot_be_made_have_the_servers_reason_and_a_remedy(
    checked: Callable[..., Result], note: str, remedy: str
) -> None:
    older = refused("an older word", "2026-11-01T11:00:00.000000Z")
    (found,) = checked(daemon_set(2, 0, 0), node("a"), node("b"), refused(note), older).findings
    assert found.what == "DaemonSet gputally/gputally-agent cannot create 2 of 2 agents"
    assert found.evidence == note
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("reason", "message", "remedy"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "ghcr.io/x"', "image.registry"),
        ("CreateContainerError", "path /var/lib/x is not a directory", "agent.podResourcesHostPath"),
        ("CrashLoopBackOff", "back-off 5m0s", "kubectl -n gputally logs gputally-agent-a --previous"),
    ],
)
def test_an_agent_that_does_not_start_has_the_kubelets_reason(
    checked: Callable[..., Result], reason: str, message: str, remedy: str
) -> None:
    (found,) = checked(daemon_set(1, 1, 0), agent("a", reason, message), node("a")).findings
    assert found.what == f"agent gputally/gputally-agent-a does not start: {reason}"
    assert found.evidence == message
    assert remedy in found.remedy
    assert checked(daemon_set(1, 1, 0), agent("a", "ContainerCreating"), node("a")).findings == ()


def test_where_none_is_installed_nothing_is_wrong(checked: Callable[..., Result]) -> None:
    assert checked(node("a")).unknown.startswith("there is no DaemonSet")
