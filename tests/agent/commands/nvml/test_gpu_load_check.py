"""The load check on a fake CUDA driver whose process appears on the fake NVML."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.__main__ import main
from agent.commands.gpu_load_check import Cuda, CudaFault, LoadCheck, NoCuda, duration_ms, print_checks, report, size
from agent.gpu_readers.nvml.driver_lifecycle import Gpus
from agent.gpu_readers.nvml.nvml_library import Driver
from agent.holders.process_cgroups import ProcessTable
from agent.node_reader import NodeSource
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from tests.agent.readers import nvml_alone
from tests.agent.sample_values import CID, MIB, T0, UID
from tests.fakes.compiled import compiled
from tests.fakes.cuda.library import build
from tests.fakes.nvml.library import FakeNvml

UUID = "11111111-2222-3333-4444-555555555555"
MIG_UUID = "99999999-2222-3333-4444-555555555555"
SIMULATED = [f"gpu GPU-{UUID} NVIDIA_H200", f"mem {144384 * MIB} 0", "simulate 75000 600000", "at 1000000"]


class Lockstep(VirtualClock):
    """A clock that advances the fake hardware with it."""

    def __init__(self, fake: Any) -> None:
        super().__init__(T0)
        self._fake = fake

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        stopped = super().wait(seconds, stop)
        self._fake.tell(f"at {1_000_000 + (self.wall_ms() - T0) * 1_000}")
        return stopped


@pytest.fixture(scope="session")
def fake_cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(build, tmp_path_factory.mktemp("cuda"))


Smoke = Callable[..., tuple[int, str]]


@pytest.fixture
def smoke(
    fake_nvml: FakeNvml,
    fake_cuda_library: Path,
    proc: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Smoke]:
    """Return a function that runs the check on the fake hardware, as in a container, and returns exit code and
    output."""
    root = proc(os.getpid(), cgroup=f"0::/system.slice/docker-{CID}.scope")
    monkeypatch.setenv("FAKE_NVML_LIBRARY", str(tmp_path / "libnvidia-ml.so.1"))
    monkeypatch.setenv("FAKE_CUDA_UUID", UUID.replace("-", ""))
    monkeypatch.setenv("COLUMNS", "160")
    fake_nvml.show(*SIMULATED)
    sources: list[NodeSource] = []

    def run(
        holder: Holder | None = None, memory: int = 512 * MIB, busy_ms: int = 0, **environment: str
    ) -> tuple[int, str]:
        """environment: of the fake CUDA driver."""
        for name, value in environment.items():
            monkeypatch.setenv(f"FAKE_CUDA_{name}", value)
        processes = ProcessTable(root)
        sources.append(NodeSource(nvml_alone(Gpus(Driver())), processes))
        expected = holder or processes.holder(os.getpid())
        cuda = Cuda(0, str(fake_cuda_library))
        code = report(cuda, sources[-1], Lockstep(fake_nvml), expected, memory, busy_ms)
        return code, capsys.readouterr().out

    yield run
    for source in sources:
        source.close()


def test_a_load_that_is_seen_passes(smoke: Smoke) -> None:
    code, said = smoke(busy_ms=10_000)
    assert code == 0
    pid = str(os.getpid())
    lines = [line.strip().split("  ") for line in said.splitlines()]
    rows = {cells[0]: [cell.strip() for cell in cells if cell.strip()][1:] for cells in lines if len(cells) > 1}
    assert rows == {
        "check": ["expected", "seen", "result"],
        "device": [UUID, "GPU 0, NVIDIA H200", "ok"],
        "process": [pid, pid, "ok"],
        "memory": ["512 MiB more", "512 MiB more", "ok"],
        "holder": [f"container docker/{CID[:12]}", f"container docker/{CID[:12]}", "ok"],
        "busy": ["80 % or more", rows["busy"][1], "ok"],
    }
    assert lines[-1] == ["passed: 5 ok"]


def test_an_odd_size_is_rounded_up_to_a_granule(smoke: Smoke) -> None:
    assert smoke(memory=3 * MIB)[0] == 0


def test_a_load_that_nobody_sees_fails_and_says_what_was_seen(smoke: Smoke) -> None:
    code, said = smoke(busy_ms=2_000, HIDDEN="1")
    assert (code, said.splitlines()[-1]) == (1, "FAILED: 1 ok, 4 FAILED")
    assert "process not seen" in said


def test_another_device_than_nvml_lists_fails(smoke: Smoke) -> None:
    assert smoke(UUID="0" * 32)[0] == 1


def test_a_pod_is_looked_for_and_a_private_control_group_is_no_failure(smoke: Smoke, tmp_path: Path) -> None:
    pod = Holder(kind="pod", uid=UID)
    code, said = smoke(pod)
    assert (code, "FAILED" in said) == (1, True)
    (tmp_path / "proc" / str(os.getpid()) / "cgroup").write_text("0::/\n")
    code, said = smoke(pod)
    assert (code, "this container has a private cgroup namespace" in said) == (0, True)


def test_beside_others_it_is_its_own_busy_time(smoke: Smoke, fake_nvml: FakeNvml) -> None:
    fake_nvml.show(*SIMULATED, f"load 999999 500000 {64 * MIB}")
    code, said = smoke(busy_ms=5_000)
    percent = re.search(r"more than 0 % +(\d+) %", said)
    assert (code, percent is not None) == (0, True)
    assert 55 <= int(percent[1]) <= 75, "of two that want all and half of the GPU, it gets two thirds"


def test_on_a_mig_instance(smoke: Smoke, fake_nvml: FakeNvml) -> None:
    fake_nvml.show(*SIMULATED, "migmode 1", f"mig MIG-{MIG_UUID} 2 0 3 3g.71gb {71680 * MIB} 0")
    code, said = smoke(busy_ms=3_000, UUID=MIG_UUID.replace("-", ""), GI="2", CI="0")
    assert (code, "3g.71gb, GPU instance 2" in said) == (0, True)


@pytest.mark.parametrize(
    ("failure", "exception", "text"),
    [
        ("cuInit 100", NoCuda, "no GPU"),
        ("cuDeviceGet 100", NoCuda, "no GPU"),
        ("cuMemAlloc_v2 2", CudaFault, "cuMemAlloc_v2: out of memory"),
        ("cuLaunchKernel 700", CudaFault, "cuLaunchKernel: CUDA error 700"),
    ],
)
def test_what_the_driver_refuses_is_one_line(smoke: Smoke, failure: str, exception: type, text: str) -> None:
    with pytest.raises(exception, match=text):
        smoke(busy_ms=1_000, FAIL=failure)


def test_without_a_driver_the_command_says_so() -> None:
    command = [sys.executable, "-m", "agent", "smoke", "--memory", "64MiB"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 3
    assert answer.stderr.startswith("gputally agent smoke: libcuda.so.1 cannot be loaded")


@pytest.mark.parametrize(
    "arguments", [["--memory", "512"], ["--memory", "0MiB"], ["--busy", "10"], ["--busy", "-1s"], ["--memory", "1TB"]]
)
def test_a_wrong_call_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["smoke", *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert "expected" in capsys.readouterr().err


def test_checks_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    check = LoadCheck("memory", "512 MiB", "510 MiB", "ok")
    print_checks([check], "json")
    assert json.loads(capsys.readouterr().out) == [
        {"name": "memory", "expected": "512 MiB", "seen": "510 MiB", "verdict": "ok"}
    ]
    print_checks([check], "csv")
    assert capsys.readouterr().out == "name,expected,seen,verdict\nmemory,512 MiB,510 MiB,ok\n"


def test_sizes_and_times() -> None:
    assert (size("512MiB"), size("2GiB")) == (512 * MIB, 2048 * MIB)
    assert [duration_ms(text) for text in ("10s", "500ms", "2m", "0s")] == [10_000, 500, 120_000, 0]
