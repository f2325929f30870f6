"""What the agent's shell is tested with: a virtual clock, outboxes, a scripted accountant, a process table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.upload.spool import Outbox
from gputally.base.clock import VirtualClock
from tests.agent_shell.loops import Site
from tests.agent_shell.outboxes import T0
from tests.agent_shell.scripted_accountant import ScriptedAccountant
from tests.agent_shell.shipping import Shipping
from tests.fakes.process_table import add_process


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


@pytest.fixture
def proc(tmp_path: Path) -> Callable[..., Path]:
    """Adds a process to a fake process table and returns the table's root."""
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
