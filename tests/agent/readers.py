"""Readers of GPUs, put together as the settings do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent.core.readings import DeviceReading
from agent.gpu_readers.chosen import ChosenReader, GpuReaders
from agent.gpu_readers.protocol import GpuReader, GpuReadings
from gputally.base.clock import Clock


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
