"""Readers of GPUs, put together as the settings do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from agent.core.readings import DeviceReading
from agent.core.settings import AgentSettings
from agent.gpu_readers.chosen import ChosenReader, GpuReaders
from agent.gpu_readers.protocol import GpuReader, GpuReadings
from agent.holders.chosen import open_holders
from agent.holders.process_cgroups import PodLogs, ProcessTable
from agent.holders.protocol import NodeSurroundings
from agent.node_reader import NodeSource
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock, SystemClock


def nvml_alone(gpus: GpuReader, clock: Clock | None = None) -> GpuReaders:
    return GpuReaders((ChosenReader("nvml", gpus),), clock)


class Read:
    """A reader that returns what a function says."""

    def __init__(self, read: Callable[[int], GpuReadings | tuple[DeviceReading, ...]]) -> None:
        self._read = read

    def read(self, at_ms: int, before: Sequence[DeviceReading] = ()) -> GpuReadings:
        found = self._read(at_ms)
        return found if isinstance(found, GpuReadings) else GpuReadings(found)

    def close(self) -> None:
        """Hold nothing."""


def node_source(
    chosen: AgentSettings,
    readers: GpuReaders,
    spool: Path,
    clock: Clock | None = None,
    tasks: BackgroundTasks | None = None,
) -> NodeSource:
    """The source of a Kubernetes node, as the agent opens it. spool: where it keeps what it must not forget."""
    clock = clock or SystemClock()
    chosen = msgspec.structs.replace(chosen, spool=str(spool))
    node = NodeSurroundings(
        "node-1", clock, tasks or BackgroundTasks(clock), chosen, {}, readers, PodLogs(Path(chosen.pod_logs))
    )
    name, holders = open_holders(chosen.holders, node)
    processes = ProcessTable(Path(chosen.proc)) if chosen.sees_processes else None
    return NodeSource(
        readers, processes, holders, node="node-1", clock=clock, systems=chosen.sharing_systems, name=name
    )
