"""A node whose GPUs are those of the fake library, read through the driver's real binding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.core.readings import NodeSnapshot, Unavailable
from agent.gpu_readers.nvml.driver_lifecycle import Gpus
from agent.gpu_readers.nvml.nvml_library import Driver
from agent.node_reader import NodeSource
from tests.agent.readers import nvml_alone
from tests.agent.sample_values import MIB, T0
from tests.fakes.nvml.library import FakeNvml

GPU = ["gpu GPU-a NVIDIA_H200", f"mem {1000 * MIB} {300 * MIB}", "util 50 0", "power 350000 1000"]
Proc = Callable[..., Path]


NewSource = Callable[..., "Shown"]


class Shown(NodeSource):
    """A node with the fake library's GPUs."""

    def __init__(self, fake: FakeNvml, *parts: Any, **options: Any) -> None:
        super().__init__(nvml_alone(Gpus(Driver()), options.get("clock")), *parts, **options)
        self.fake = fake

    def look(self, after_ms: int, *lines: str) -> NodeSnapshot:
        """Take a snapshot. lines: commands for the fake library."""
        if lines:
            self.fake.show(*lines)
        return self.snapshot(T0 + after_ms)


def holders(snapshot: NodeSnapshot) -> list[tuple[str, str, str | None]]:
    assert not isinstance(snapshot.allocations, Unavailable)
    return [(a.holder.kind, a.holder.uid, a.sharing) for a in snapshot.allocations]
