"""Checks of readings of this machine, and of missing agents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent.core.readings import Allocation, DeviceReading, Gpu, HolderReading, NodeSnapshot, Unavailable
from agent.holders.protocol import SEAM, HolderPlugin
from agent.wire import Holder
from gputally.base.plugins import usable
from gputally.doctor.__main__ import run_checks
from gputally.doctor.check_inputs import Sources
from gputally.doctor.findings import CannotCheck, CheckResult
from gputally.doctor.node_checks import DAEMON_SET, MachineGpus, driver, foreign_processes
from gputally.kubernetes.objects import POD
from tests.doctor.conftest import MemoryInspector, event, node
from tests.fairshare.builders import object_of


def device(index: int = 0, **readings: Any) -> DeviceReading:
    gpu = Gpu(f"GPU-{index}", index, "NVIDIA H100 80GB HBM3", 81_559, driver_version="580.95")
    return DeviceReading(gpu, **{"busy_us": 1, "energy_uj": 1, "memory_used_mib": 1, **readings})


def snapshot(*devices: DeviceReading, holders: tuple[Allocation, ...] = (), nvml: str = "") -> NodeSnapshot:
    return NodeSnapshot(0, devices, holders, sources=(("nvml", nvml),))


def test_lost_gpus_and_refused_readings() -> None:
    refused = Unavailable("no permission")
    devices = device(0, health="lost"), device(1, busy_us=refused), device(2, busy_us=refused)
    seen = driver(MachineGpus(snapshot(*devices), 3))
    lost, unread = seen.findings
    assert seen.seen == "driver 580.95, 3 GPUs: NVIDIA H100 80GB HBM3"
    assert (lost.severity, lost.what, lost.evidence) == ("error", "GPU 0 (NVIDIA H100 80GB HBM3) is lost", "GPU-0")
    assert (unread.what, unread.evidence) == ("busy_us cannot be read: no permission", "GPU 1, 2")
    assert "privilege process" in unread.remedy


def test_holders_outside_kubernetes() -> None:
    ours = Holder(kind="pod", uid="u", namespace="work", name="train-0")
    theirs = Holder(kind="process", uid="4711:99", namespace="alice", name="python")
    docker = Holder(kind="container", uid="c" * 64, namespace="docker", name="cccccccccccc")
    slurm = Holder(kind="slurm", uid="12", name="job 12")
    held = device(0, holders=(HolderReading(theirs, memory_mib=2_048),))
    allocations = tuple(Allocation("GPU-0", holder) for holder in (ours, theirs, docker, slurm))
    seen = foreign_processes(snapshot(held, holders=allocations))
    assert seen.seen == "4 holders, 1 of them pods"
    process, container, job = seen.findings
    assert process.what == "process python of alice holds GPU 0 outside Kubernetes"
    assert process.evidence == "GPU-0, 2.0 GiB; Kubernetes counts the GPU as free"
    assert process.remedy == "kill 4711, or run it as a pod"
    assert container.remedy == "docker stop cccccccccccc, or run it as a pod"
    assert ("slurm" in usable(SEAM, HolderPlugin)) == job.remedy.startswith("scancel 12")
    with pytest.raises(CannotCheck, match="nobody says"):
        foreign_processes(NodeSnapshot(0, (), Unavailable("nobody says")))


# --- agents -----------------------------------------------------------------------------------------

LABELS = {"app.kubernetes.io/part-of": "gputally", "app.kubernetes.io/component": "agent"}


def daemon_set(wanted: int, made: int, ready: int) -> dict[str, Any]:
    status = {"desiredNumberScheduled": wanted, "currentNumberScheduled": made, "numberReady": ready}
    return object_of(DAEMON_SET, "gputally-agent", status=status, namespace="gputally", labels=LABELS)


def agent(on: str, reason: str = "", message: str = "") -> dict[str, Any]:
    """Build an agent's pod. reason, message: why its container waits."""
    state = {"waiting": {"reason": reason, "message": message}} if reason else {"running": {}}
    spec = {"nodeName": on, "containers": [{"name": "agent", "image": "none"}]}
    status = {"containerStatuses": [{"name": "agent", "state": state}]}
    return object_of(POD, f"gputally-agent-{on}", spec, status, namespace="gputally", labels=LABELS)


def refused(note: str, at: str = "2026-11-01T11:59:00.000000Z") -> dict[str, Any]:
    """Build the controller's event on the DaemonSet."""
    return event("FailedCreate", note, at, kind="DaemonSet", namespace="gputally", name="gputally-agent")


@pytest.fixture
def checked(sources_of: Callable[..., Sources]) -> Callable[..., CheckResult]:
    """Return a function that runs the check over objects of a cluster."""

    def check(*objects: dict[str, Any]) -> CheckResult:
        (found,) = run_checks(sources_of(MemoryInspector(objects)), ["agents"])
        return found

    return check


def test_an_agent_on_every_node_is_well(checked: Callable[..., CheckResult]) -> None:
    found = checked(daemon_set(2, 2, 2), agent("a"), agent("b"), node("a"), node("b"), node("cpu", gpus=0))
    assert (found.status, found.seen) == ("ok", "2 of 2 agents ready, 2 nodes offer GPUs")


def test_nodes_with_gpus_and_without_an_agent_are_named(checked: Callable[..., CheckResult]) -> None:
    (found,) = checked(daemon_set(1, 1, 1), agent("a"), node("a"), node("b"), node("c")).findings
    assert found.severity == "error"
    assert found.evidence == "2 of 3 nodes with GPUs: b, c"
    assert "kubectl label node NODE nvidia.com/gpu.present=true" in found.remedy


def test_where_no_node_offers_gpus_the_device_plugin_is_missing(checked: Callable[..., CheckResult]) -> None:
    (found,) = checked(daemon_set(0, 0, 0), node("cpu", gpus=0)).findings
    assert (found.severity, found.what) == ("warning", "no node has an agent")
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
    checked: Callable[..., CheckResult], note: str, remedy: str
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
    checked: Callable[..., CheckResult], reason: str, message: str, remedy: str
) -> None:
    (found,) = checked(daemon_set(1, 1, 0), agent("a", reason, message), node("a")).findings
    assert found.what == f"agent gputally/gputally-agent-a does not start: {reason}"
    assert found.evidence == message
    assert remedy in found.remedy
    assert checked(daemon_set(1, 1, 0), agent("a", "ContainerCreating"), node("a")).findings == ()


def test_where_none_is_installed_nothing_is_wrong(checked: Callable[..., CheckResult]) -> None:
    assert checked(node("a")).unknown.startswith("there is no DaemonSet")
