"""Nodes on the fake library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from agent.holders.process_cgroups import ProcessTable
from tests.agent.holders.nvml.shown_node import NewSource, Proc, Shown
from tests.fakes.nvml.library import FakeNvml


@pytest.fixture
def new_source(fake_nvml: FakeNvml) -> Iterator[NewSource]:
    with ExitStack() as after:
        yield lambda *parts, **options: after.enter_context(closing(Shown(fake_nvml, *parts, **options)))


@pytest.fixture
def source(new_source: NewSource, proc: Proc) -> Shown:
    return new_source(ProcessTable(proc(1)))
