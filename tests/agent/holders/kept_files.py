"""A fake of a source of holders that is a file or a folder."""

from __future__ import annotations

from pathlib import Path

from gputally.base.clock import VirtualClock
from gputally.testing.holders import GPUS, START_MS, Held

INDEX = {gpu.uuid: gpu.index for gpu in GPUS}


class Kept:
    """A fake of a file or folder, which is written anew at every change. gone: where it is while it cannot be read."""

    namespace = "vision"

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, str(path)
        self.clock = VirtualClock(START_MS)
        self.held: list[Held] = []
        self.write()

    def write(self) -> None:
        raise NotImplementedError

    def give(self, gpu_uuid: str, mig_uuid: str) -> Held:
        self.held.append((gpu_uuid, mig_uuid, f"7{INDEX[gpu_uuid]}", self.namespace))
        self.write()
        return self.held[-1]

    def take(self, held: Held) -> None:
        self.held.remove(held)
        self.write()
