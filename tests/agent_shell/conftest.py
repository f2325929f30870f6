"""What the agent's shell is tested with: a virtual clock, outboxes, a scripted accountant, a fake NVML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.upload.spool import Outbox
from gputally.base.clock import VirtualClock
from tests.agent_shell.loops import Site
from tests.agent_shell.outboxes import T0
from tests.agent_shell.scripted_accountant import ScriptedAccountant
from tests.agent_shell.shipping import Shipping
from tests.fakes.compiled import compiled
from tests.fakes.nvml.library import FakeNvml, build, loaded


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(T0)


@pytest.fixture
def open_outbox(tmp_path: Path, clock: VirtualClock) -> Iterator[Callable[..., Outbox]]:
    """Opens the test's outbox; everything opened is closed at the end."""
    opened: list[Outbox] = []

    def open_(name: str = "outbox.sqlite", **options: Any) -> Outbox:
        opened.append(Outbox(tmp_path / name, clock, fsync=False, **options))
        return opened[-1]

    yield open_
    for outbox in opened:
        outbox.close()


@pytest.fixture
def accountant() -> Iterator[ScriptedAccountant]:
    server = ScriptedAccountant()
    yield server
    server.close()


@pytest.fixture(scope="session")
def fake_nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(build, tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake_nvml(fake_nvml_library: Path, tmp_path: Path) -> Iterator[FakeNvml]:
    """The real binding on the fake library."""
    with loaded(fake_nvml_library, tmp_path) as fake:
        yield fake


@pytest.fixture
def proc(tmp_path: Path) -> Callable[..., Path]:
    """Adds a process to a fake process table and returns the table's root."""
    root = tmp_path / "proc"
    root.mkdir()

    def add(pid: int, cgroup: str = "0::/user.slice", comm: str = "python", start: int = 1000, uid: int = 4242) -> Path:
        folder = root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = ["S", *["0"] * 18, str(start), *["0"] * 10]  # field 3 on; field 22 is the start time
        (folder / "stat").write_text(f"{pid} (odd) name ({comm})) {' '.join(fields)}\n")
        (folder / "cgroup").write_text(cgroup + "\n")
        (folder / "comm").write_text(comm + "\n")
        (folder / "status").write_text(f"Name:\t{comm}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        return root

    return add


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
