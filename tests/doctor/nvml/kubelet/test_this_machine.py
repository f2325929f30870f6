"""Checks of this machine on real interfaces: the driver's binding over the fake library, and gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from gputally.base.clock import VirtualClock
from gputally.doctor.__main__ import run_and_print, run_checks
from gputally.doctor.check_inputs import DoctorOptions, real_sources
from gputally.doctor.findings import CheckResult
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
    assert "2.0 GiB" in outsider.evidence
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
