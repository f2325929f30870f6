"""Checks of this machine on real interfaces (NVIDIA's binding over the fake driver, gRPC), and of missing agents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent.core.readings import Allocation, DeviceReading, Gpu, HolderReading, NodeSnapshot, Unavailable
from agent.holders.protocol import SEAM, HolderPlugin
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from gputally.base.plugins import usable
from gputally.doctor.__main__ import run_and_print, run_checks
from gputally.doctor.check_inputs import DoctorOptions, Sources, real_sources
from gputally.doctor.findings import CannotCheck, CheckResult
from gputally.doctor.node_checks import DAEMON_SET, MachineGpus, driver, foreign_processes
from gputally.kubernetes.objects import POD
from tests.doctor.conftest import MemoryInspector, event, node
from tests.fairshare.builders import object_of
from tests.fakes.kubelet.server import FakeKubelet, compile_messages
from tests.fakes.nvml.library import FakeNvml
from tests.fakes.process_table import add_process

GPU = "gpu GPU-{0} NVIDIA_H200\nmem 150754820096 4294967296\nutil 0 0\npower 90000 5"
ONLY = ("driver", "kubelet", "processes")


@pytest.fixture(scope="module")
def kubelet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeKubelet]:
    folder = tmp_path_factory.mktemp("kubelet")
    with FakeKubelet(compile_messages(folder), folder / "kubelet.sock").running() as running:
        yield running


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A process table with process 4711, which belongs to no pod."""
    return add_process(tmp_path / "proc", 4711)


def looked(socket: Path, proc: Path) -> dict[str, CheckResult]:
    """Run the three checks as `gputally doctor` does, on the test's clock."""
    sources = real_sources(DoctorOptions(kubelet_socket=socket, proc=proc), VirtualClock(0))
    return {result.check: result for result in run_checks(sources, ONLY)}


def test_a_healthy_node(fake_nvml: FakeNvml, kubelet: FakeKubelet, proc: Path) -> None:
    fake_nvml.show(GPU.format(0), GPU.format(1))
    kubelet.give("work", "train-0", {"c": {"nvidia.com/gpu": ["GPU-0"]}})
    found = looked(kubelet.path, proc)
    assert {name: result.status for name, result in found.items()} == dict.fromkeys(ONLY, "ok")
    assert found["driver"].seen == "driver 580.00-fake, 2 GPUs: NVIDIA H200"
    assert found["kubelet"].seen.startswith("1 pods, answered in ")


def test_a_lost_gpu_and_a_refused_reading(fake_nvml: FakeNvml, kubelet: FakeKubelet, proc: Path) -> None:
    fake_nvml.show(GPU.format(0), GPU.format(1), "lost", GPU.format(2), "fail nvmlDeviceGetTotalEnergyConsumption 4")
    findings = looked(kubelet.path, proc)["driver"].findings
    assert [(each.severity, each.what) for each in findings] == [
        ("error", "the driver does not open 1 of its GPUs"),
        ("warning", "energy_uj cannot be read: no permission (nvmlDeviceGetTotalEnergyConsumption, 4)"),
    ]


def test_a_process_that_no_pod_is_behind(fake_nvml: FakeNvml, kubelet: FakeKubelet, proc: Path) -> None:
    fake_nvml.show(GPU.format(0), "proc 4711 2147483648")
    (outsider,) = looked(kubelet.path, proc)["processes"].findings
    assert outsider.what.startswith("process python")
    assert outsider.what.endswith("holds GPU 0 outside Kubernetes")
    assert "2,048 MiB" in outsider.evidence
    assert outsider.remedy == "kill 4711, or run it as a pod"


def test_a_kubelet_that_refuses_and_one_that_is_not_there(
    fake_nvml: FakeNvml, kubelet: FakeKubelet, proc: Path, tmp_path: Path
) -> None:
    fake_nvml.show(GPU.format(0))
    kubelet.fail = grpc.StatusCode.RESOURCE_EXHAUSTED
    try:
        (refused,) = looked(kubelet.path, proc)["kubelet"].findings
    finally:
        kubelet.fail = None
    assert (refused.severity, refused.what) == ("error", "the kubelet does not report which pods hold GPUs")
    assert "rejected by rate limit" in refused.evidence
    absent = looked(tmp_path / "no.sock", proc)
    assert absent["driver"].status == "ok"
    for name in ("kubelet", "processes"):
        assert (
            absent[name].unknown
            == f"this machine has no kubelet ({tmp_path}/no.sock); run the check on a node of the cluster"
        )


def test_a_driver_that_does_not_start(
    fake_nvml: FakeNvml, kubelet: FakeKubelet, proc: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nvml.show("initerr 9")
    sources = real_sources(DoctorOptions(kubelet_socket=kubelet.path, proc=proc), VirtualClock(0))
    assert run_and_print(sources, ["driver"], "json") == 0
    (told,) = json.loads(capsys.readouterr().out)["checks"]
    assert "no NVIDIA driver answers on this machine (driver not loaded (nvmlInit, 9))" in told["unknown"]


@pytest.mark.parametrize(
    ("state", "what", "evidence", "remedy"),
    [
        (("initerr 9",), "no NVIDIA driver answers", "driver not loaded (nvmlInit, 9)", "GPU Operator"),
        (("initerr 12",), "no NVIDIA driver answers", "libnvidia-ml.so.1 not found", "agent.runtimeClassName"),
        (("initerr 4",), "no NVIDIA driver answers", "no permission", "agent.privileged"),
        ((), "the driver answers and shows no GPU", "0 GPUs", "Bottlerocket"),
    ],
)
def test_in_an_agents_pod_it_is_said_why_it_sees_no_gpu(
    fake_nvml: FakeNvml, kubelet: FakeKubelet, proc: Path, monkeypatch: pytest.MonkeyPatch, state: tuple[str, ...],
    what: str, evidence: str, remedy: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    fake_nvml.show(*state)
    (found,) = looked(kubelet.path, proc)["driver"].findings
    assert found.severity == "error"
    assert what in found.what
    assert evidence in found.evidence
    assert remedy in found.remedy


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
    assert process.evidence == "GPU-0, 2,048 MiB; Kubernetes counts the GPU as free"
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
