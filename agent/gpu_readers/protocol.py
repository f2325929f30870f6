"""What a reader of GPUs is. One reader knows one source: a driver, an exporter, a file.

A reader returns its devices as `DeviceReading`, each with its parts (MIG instances), counters and gauges. A value that
it cannot read is `Unavailable(reason)`, never 0. Counters (`busy_us`, `energy_uj`, …) only go up; if they begin again,
`counter_epoch` changes. If they begin with the agent's process, the epoch has to name that process, for example by the
time of its first reading. A reader does not know pods: `holders` stays empty.

A source that adds values to the GPUs of the readers before it, such as an exporter, is a reader that `fills`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec

from agent.core.readings import DeviceReading
from agent.core.settings import SettingsError
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.untrusted_text import known_plugin_name

SEAM: Final = "gputally.gpu_readers"


class GpuReadings(msgspec.Struct, frozen=True):
    """One reading.

    devices: all devices of the source. Of a reader that fills: the devices of `before` for which it has values.
    failure: why the source did not answer; "" if it did. Devices that such a reading does not list stay listed without
        values.
    parts: parts of the source that can fail alone, with their failures; "" if a part works.
    took_ms: how long the source took, if that is not the time of the call."""

    devices: tuple[DeviceReading, ...]
    failure: str = ""
    parts: tuple[tuple[str, str], ...] = ()
    took_ms: int | None = None


class GpuReader(Protocol):
    def read(self, at_ms: int, before: Sequence[DeviceReading] = ()) -> GpuReadings:
        """Reads all devices at `at_ms` (UTC milliseconds, never decreasing), every two seconds or so.

        before: what the readers before this one read."""
        ...

    def close(self) -> None:
        """Releases what the reader holds."""
        ...


@runtime_checkable
class DriverReader(GpuReader, Protocol):
    """A reader that keeps a driver open, and closes it while somebody reconfigures the GPUs. Any thread may call
    `release` and `reacquire`."""

    def look_again(self) -> None:
        """Looks up the parts of the GPUs soon, because a pod holds one that is not known."""
        ...

    def release(self, why: str) -> None:
        """Closes the driver at the next reading, until `reacquire(why)`. The reason identifies the request."""
        ...

    def reacquire(self, why: str) -> None:
        """Withdraws a request."""
        ...


class Surroundings(msgspec.Struct, frozen=True):
    """What the agent tells a reader that it opens.

    tasks: the list of the agent's threads, in which a reader enters its own.
    sees_processes: whether the agent sees the host's processes, so that process numbers of the source mean something.
    accounting: whether the operator allows the driver's accounting mode to be switched on.
    release_file: while this file exists, a driver stays closed.
    restarted: whether this process replaced one whose driver was upgraded."""

    clock: Clock
    tasks: BackgroundTasks
    sees_processes: bool = True
    accounting: bool = False
    release_file: Path | None = None
    restarted: bool = False


class DriverCheck(msgspec.Struct, frozen=True):
    """A driver that `gputally doctor` examines on its machine.

    reader: reads it.
    count: returns the number of GPUs that the driver knows, also those that it cannot open; None if it does not answer.
    remedy: returns what to do about a failure of the reader; "" if that is not known.
    no_gpus: what to do if the driver answers and shows no GPU."""

    reader: GpuReader
    count: Callable[[], int | None]
    remedy: Callable[[str], str]
    no_gpus: str


class GpuReaderPlugin(msgspec.Struct, frozen=True):
    """The manifest of a reader.

    name: the word in the setting `gpu_readers`, also the name of the entry point and of the reader's metrics.
    place: what follows `name=` in the setting: where the source is; "" if nothing may follow.
    open: makes the reader from that text. Raises SettingsError if the text is wrong. It connects to nothing yet.
    fills: whether it only adds values to the devices of the readers before it.
    reaches: what a reading reads, writes and connects to, for the operator.
    page: the page about it.
    check: opens the driver for `gputally doctor`; None if there is nothing to examine."""

    name: str
    place: str
    open: Callable[[str, Surroundings], GpuReader]
    fills: bool
    reaches: str
    page: str
    check: Callable[[], DriverCheck] | None = None

    def __post_init__(self) -> None:
        known_plugin_name(self.name)

    def opened(self, place: str, surroundings: Surroundings) -> GpuReader:
        """Open the reader. Raises SettingsError if it needs a place and has none, or the other way round."""
        if bool(place) != bool(self.place):
            wanted = f"{self.name}=PLACE, {self.place}" if self.place else self.name
            raise SettingsError(f"gpu_readers: expected {wanted}")
        return self.open(place, surroundings)
