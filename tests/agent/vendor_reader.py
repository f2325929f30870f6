"""A reader of GPUs of another author, for tests that need one and do not care which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agent.core.readings import DeviceReading, Gpu
from agent.gpu_readers.protocol import SEAM, GpuReaderPlugin, GpuReadings, Surroundings
from tests.plugins.installed import install

ENTRY_POINTS: Final[Mapping[str, Mapping[str, str]]] = {SEAM: {"vendor": f"{__name__}:READER"}}


class Vendor:
    """One GPU, which is busy for half of the time."""

    def read(self, at_ms: int, before: Sequence[DeviceReading] = ()) -> GpuReadings:
        return GpuReadings((DeviceReading(Gpu("V0", 0, "X", 1_000), counter_epoch="e", busy_us=at_ms * 500),))

    def close(self) -> None:
        """Holds nothing."""


def _open(place: str, surroundings: Surroundings) -> Vendor:
    return Vendor()


READER = GpuReaderPlugin(name="vendor", place="", open=_open, fills=False, reaches="nothing", page="none")


def install_vendor(site: Path) -> None:
    """Install it into a folder of the path."""
    install(site, "vendor-package", ENTRY_POINTS)
