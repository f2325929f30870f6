"""Rigs on the fake library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.gpu_readers.nvml.rig import Rig
from tests.fakes.nvml.library import FakeNvml


@pytest.fixture
def new_rig(fake_nvml: FakeNvml, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that creates a rig of the given class; every rig is closed after the test."""
    made: list[Rig] = []

    def make(kind: Callable[..., Rig] = Rig, **options: Any) -> Rig:
        made.append(kind(fake_nvml, tmp_path / f"proc-{len(made)}", **options))
        return made[-1]

    yield make
    for rig in made:
        rig.source.close()
