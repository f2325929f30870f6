"""Fixtures of the agent's tests: a clock, a fake NVML, kubelet, API server, accountant, outboxes and process table."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agent.upload.spool import Outbox
from gputally.base.clock import VirtualClock
from tests.agent.agent_process import Process
from tests.agent.sample_values import MIB, T0
from tests.agent.scripted_accountant import ScriptedAccountant, Shipping, Site
from tests.fakes.apiserver.server import TOKEN, FakeApiServer
from tests.fakes.kubelet.server import FakeKubelet, compile_messages
from tests.fakes.nvml.library import FakeNvml
from tests.fakes.process_table import add_process

BUSY_GPU = ["gpu GPU-a NVIDIA_H200", f"mem {1000 * MIB} {300 * MIB}", "simulate 70000 500000", f"load 10 500000 {MIB}"]
"""A GPU that is busy half of the time."""


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
    """The fake NVML library with one busy GPU."""
    fake_nvml.tell("reset", f"at {T0 * 1_000}", *BUSY_GPU)
    return fake_nvml


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Return a function that starts an agent with arguments and an environment; all are killed after the test."""
    started: list[Process] = []

    def start_(*arguments: str, **env: str) -> Process:
        started.append(Process("--spool", str(tmp_path / "spool"), *arguments, env={**os.environ, **env}))
        return started[-1]

    yield start_
    for process in started:
        process.end(signal.SIGKILL)


@pytest.fixture
def api_server() -> Iterator[FakeApiServer]:
    running = FakeApiServer()
    yield running
    running.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """Write a file with the token that the API server accepts."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path


@pytest.fixture
def open_outbox(tmp_path: Path, clock: VirtualClock) -> Iterator[Callable[..., Outbox]]:
    """Return a function that opens an outbox in the test's folder; every outbox is closed after the test."""
    opened: list[Outbox] = []

    def open_(name: str = "outbox.sqlite", fsync: bool = False, **options: Any) -> Outbox:
        opened.append(Outbox(tmp_path / name, clock, fsync=fsync, **options))
        return opened[-1]

    yield open_
    for outbox in opened:
        outbox.close()


@pytest.fixture
def accountant() -> Iterator[ScriptedAccountant]:
    server = ScriptedAccountant()
    yield server
    server.close()


@pytest.fixture
def proc(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that adds a process to a fake process table and returns the root of the table."""
    root = tmp_path / "proc"
    root.mkdir()
    return partial(add_process, root)


@pytest.fixture
def shipping(
    open_outbox: Callable[..., Outbox], accountant: ScriptedAccountant, clock: VirtualClock
) -> Iterator[Shipping]:
    made = Shipping(open_outbox(), accountant, clock)
    yield made
    made.close()


@pytest.fixture
def site(open_outbox: Callable[..., Outbox], accountant: ScriptedAccountant, clock: VirtualClock) -> Iterator[Site]:
    made = Site(open_outbox, accountant, clock)
    yield made
    made.close()
