"""What the agent's view of Kubernetes is tested with: a kubelet, GPUs, a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agent.core.readings import Gpu, MigInstance
from gputally.base.clock import VirtualClock
from tests.fakes.apiserver.server import TOKEN, FakeApiServer
from tests.fakes.kubelet.server import FakeKubelet, compile_messages
from tests.fakes.nvml.library import FakeNvml

T0 = 1_790_812_800_000  # 2026-10-01T00:00:00Z
MIB = 1 << 20
GPU = ["gpu GPU-a NVIDIA_H200", f"mem {1000 * MIB} {300 * MIB}", "simulate 70000 500000", f"load 10 500000 {MIB}"]
"""Busy half of the time."""


def uuid(number: int, kind: str = "GPU") -> str:
    """GPU-00000001-0000-... as NVML writes it."""
    return f"{kind}-{number:08x}-0b0d-4a1e-8f00-{number:012x}"


def gpu(number: int, *profiles: str) -> Gpu:
    """GPU `number` with an instance per profile, gi from 1 on."""
    instances = tuple(
        MigInstance(uuid(number * 16 + i, "MIG"), profile, gi=i, ci=0, compute=int(profile[0]), memory_mib=10_240)
        for i, profile in enumerate(profiles, start=1)
    )
    return Gpu(uuid(number), number, "NVIDIA H200", 143_771, mig=instances, mig_enabled=bool(instances), minor=number)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(T0)


@pytest.fixture(scope="session")
def messages(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return compile_messages(tmp_path_factory.mktemp("podresources"))


@pytest.fixture
def kubelet(messages: ModuleType, tmp_path: Path) -> Iterator[FakeKubelet]:
    with FakeKubelet(messages, tmp_path / "kubelet.sock").running() as running:
        yield running


@pytest.fixture
def nvml(fake_nvml: FakeNvml) -> FakeNvml:
    """With one GPU, which is busy."""
    fake_nvml.tell("reset", f"at {T0 * 1_000}", *GPU)
    return fake_nvml


@pytest.fixture
def api_server() -> Iterator[FakeApiServer]:
    running = FakeApiServer()
    yield running
    running.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """A file with the token that the API server takes."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path
