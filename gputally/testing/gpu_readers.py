"""The contract of readers of GPUs, as tests. Derive a class from `GpuReaderSuite` and say how its source is faked:

    class TestJsonLines(GpuReaderSuite):
        plugin = READER

        @pytest.fixture
        def machine(self, tmp_path):
            return File(tmp_path / "gpus.jsonl")

`GpuMachine` says what the fake offers. Time is the fake's: no test waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import pytest

from agent.core.readings import DeviceReading, Unavailable
from agent.core.settings import SettingsError
from agent.gpu_readers.guard import checked
from agent.gpu_readers.protocol import SEAM, GpuReader, GpuReaderPlugin, GpuReadings, Surroundings
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock, VirtualClock
from gputally.base.plugins import usable
from gputally.base.units import US_PER_MS

START_MS = 1_790_812_800_000
SECOND_MS = 1_000
PATIENCE_MS = 600_000
"""How long a reader may take to notice that its source answers again."""
COUNTERS = ("busy_us", "energy_uj", "sm_active_us", "tensor_active_us")
TIMES = ("busy_us", "sm_active_us", "tensor_active_us")
"""Counters that rise by no more than the time that passes."""
VALUES = (*COUNTERS, "memory_used_mib", "power_mw")


class GpuMachine(Protocol):
    """The fake of a source: at least one device, busy for more than a hundredth of the time.

    place: what follows `name=` in the setting, so that the reader finds the fake; "" if the reader takes no place.
    uuids: the devices of which the source tells values.
    before: what readers before this one found. Of a reader that fills, they are the devices that it fills.
    clock: the time of the fake; the agent's too."""

    place: str
    uuids: frozenset[str]
    before: Sequence[DeviceReading]
    clock: VirtualClock

    def advance(self, milliseconds: int) -> None:
        """Lets time pass, in which the devices work, if the source answers."""
        ...

    def fail(self) -> None:
        """From now on, the source does not answer."""
        ...

    def mend(self) -> None:
        """From now on, the source answers again."""
        ...

    def withhold(self) -> frozenset[str]:
        """From now on, the source answers that it does not have some of the values ("N/A") that it had of a device.
        Returns their names in `DeviceReading`."""
        ...

    def restart(self, kept: float) -> None:
        """The source starts again, and answers. Its counters go on from this part of their values: 0 if they begin
        anew, more if it had saved them. Nothing happens to a source without counters."""
        ...


def values(device: DeviceReading) -> dict[tuple[str, str], int]:
    """The values of a device and of its parts that are known."""
    told = [("", device), *((part.mig_uuid, part) for part in device.instances)]
    found = [((uuid, name), getattr(one, name, Unavailable(""))) for uuid, one in told for name in VALUES]
    return {key: value for key, value in found if not isinstance(value, Unavailable)}


class GpuReaderSuite:
    """The tests that every reader of GPUs passes."""

    plugin: ClassVar[GpuReaderPlugin]

    @pytest.fixture
    def machine(self) -> GpuMachine:
        """The fake of the source, which works."""
        raise NotImplementedError("define the fixture `machine` in your class")

    @pytest.fixture
    def reader(self, machine: GpuMachine) -> Iterator[GpuReader]:
        """The reader of the fake."""
        reader = self.open(machine)
        yield reader
        reader.close()

    def open(self, machine: GpuMachine) -> GpuReader:
        return self.plugin.opened(machine.place, self.surroundings(machine.clock))

    def surroundings(self, clock: Clock) -> Surroundings:
        return Surroundings(clock, BackgroundTasks(clock))

    def read(self, reader: GpuReader, machine: GpuMachine, after_ms: int = 0) -> dict[str, DeviceReading]:
        """The devices after some time, by uuid. The source answers."""
        found = self.told(reader, machine, after_ms)
        assert found.failure == ""
        return {device.gpu.uuid: device for device in found.devices}

    def told(self, reader: GpuReader, machine: GpuMachine, after_ms: int = 0) -> GpuReadings:
        machine.advance(after_ms)
        return checked(reader.read(machine.clock.wall_ms(), tuple(machine.before)))

    def test_its_manifest_is_complete(self) -> None:
        plugin = self.plugin
        assert plugin.reaches, "say what a reading reads, writes and connects to"
        assert plugin.page, "name the page about it"

    def test_it_is_found_by_its_name(self) -> None:
        found = usable(SEAM, GpuReaderPlugin).get(self.plugin.name)
        assert found is self.plugin, "register the entry point, and install"

    def test_a_place_is_given_if_the_reader_takes_one(self, machine: GpuMachine) -> None:
        wrong = "" if self.plugin.place else "somewhere"
        with pytest.raises(SettingsError):
            self.plugin.opened(wrong, self.surroundings(machine.clock))

    def test_its_devices_are_listed_and_have_values(self, reader: GpuReader, machine: GpuMachine) -> None:
        self.read(reader, machine)
        found = self.read(reader, machine, 2 * SECOND_MS)
        assert found.keys() == machine.uuids
        assert all(values(device) for device in found.values())

    def test_it_says_nothing_about_holders(self, reader: GpuReader, machine: GpuMachine) -> None:
        assert all(device.holders == () for device in reader.read(machine.clock.wall_ms(), machine.before).devices)

    def test_counters_only_go_up_and_a_device_that_works_counts(self, reader: GpuReader, machine: GpuMachine) -> None:
        first = before = self.read(reader, machine)
        began_ms = machine.clock.wall_ms()
        rose: set[str] = set()
        for _ in range(5):
            now = self.read(reader, machine, 2 * SECOND_MS)
            for uuid, device in now.items():
                assert device.counter_epoch == before[uuid].counter_epoch, "the counters did not begin again"
                for key, value in values(device).items():
                    earlier = values(before[uuid]).get(key, 0)
                    if key[1] in COUNTERS:
                        assert value >= earlier, f"{uuid}: {key} fell"
                        rose |= {uuid} if value > earlier else set()
            before = now
        assert rose == machine.uuids
        took_us = (machine.clock.wall_ms() - began_ms) * US_PER_MS
        for uuid, device in before.items():
            for (part, name), value in values(device).items():
                if name in TIMES and (part, name) in values(first[uuid]):
                    rise_us = value - values(first[uuid])[part, name]
                    assert rise_us <= took_us + 2 * SECOND_MS * US_PER_MS, f"{uuid}: {name} rises by more than the time"
                    assert name != "busy_us" or rise_us > took_us // 100, f"{uuid}: {name} is in microseconds"

    def test_a_source_that_does_not_answer_is_named_and_no_value_is_invented(
        self, reader: GpuReader, machine: GpuMachine
    ) -> None:
        self.read(reader, machine)
        machine.fail()
        found = self.told(reader, machine, PATIENCE_MS)
        assert found.failure, "say why: a value that is not known is not 0"
        assert [values(device) for device in found.devices if values(device)] == []

    def test_it_reads_on_when_the_source_answers_again(self, reader: GpuReader, machine: GpuMachine) -> None:
        self.read(reader, machine)
        before = self.read(reader, machine, 2 * SECOND_MS)
        machine.fail()
        self.told(reader, machine, PATIENCE_MS)
        machine.mend()
        self.told(reader, machine, PATIENCE_MS)
        after = self.read(reader, machine, 2 * SECOND_MS)
        assert after.keys() == before.keys()
        for uuid, device in after.items():
            known = values(before[uuid])
            fell = [key for key, value in values(device).items() if key[1] in COUNTERS and value < known.get(key, 0)]
            began_again = device.counter_epoch != before[uuid].counter_epoch
            assert began_again or not fell, "counters that begin again have another counter_epoch"

    def test_a_value_that_the_source_does_not_have_is_unknown(self, reader: GpuReader, machine: GpuMachine) -> None:
        self.read(reader, machine)
        before = self.read(reader, machine, 2 * SECOND_MS)
        missing = machine.withhold()
        had = {(uuid, key) for uuid, device in before.items() for key in values(device) if key[1] in missing}
        assert had, "withhold a value that the source had"
        self.told(reader, machine, PATIENCE_MS)
        found = self.told(reader, machine, 2 * SECOND_MS)
        told = {(device.gpu.uuid, key) for device in found.devices for key in values(device)}
        assert had - told, "what the source does not have is Unavailable, and neither 0 nor an earlier value"

    @pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
    def test_counters_that_begin_again_take_no_time_away_and_add_none(
        self, reader: GpuReader, machine: GpuMachine, kept: float
    ) -> None:
        self.read(reader, machine)
        before = self.read(reader, machine, PATIENCE_MS)
        machine.restart(kept)
        epochs = []
        for _ in range(3):
            began_ms = machine.clock.wall_ms()
            while (found := self.told(reader, machine, 2 * SECOND_MS)).failure:
                assert machine.clock.wall_ms() - began_ms < PATIENCE_MS, "the source answers"
            most_us = (machine.clock.wall_ms() - began_ms + 2 * SECOND_MS) * US_PER_MS
            now = {device.gpu.uuid: device for device in found.devices}
            for uuid, device in now.items():
                earlier = values(before[uuid]) if device.counter_epoch == before[uuid].counter_epoch else {}
                for key, value in values(device).items():
                    if key[1] in COUNTERS and key in earlier:
                        rise = value - earlier[key]
                        assert rise >= 0, f"{uuid}: {key} fell, and has the same counter_epoch"
                        assert key[1] not in TIMES or rise <= most_us, f"{uuid}: {key} counts twice"
            epochs.append({uuid: device.counter_epoch for uuid, device in now.items()})
            before = now
        assert epochs[1] == epochs[2], "the counter_epoch changes when the counters begin again, and stays then"

    def test_a_source_may_be_missing_at_the_start(self, machine: GpuMachine) -> None:
        machine.fail()
        reader = self.open(machine)
        assert self.told(reader, machine, PATIENCE_MS).failure
        machine.mend()
        self.told(reader, machine, PATIENCE_MS)
        assert self.read(reader, machine, 2 * SECOND_MS).keys() == machine.uuids
        reader.close()

    def test_a_reader_that_fills_lists_nothing_of_its_own(self, reader: GpuReader, machine: GpuMachine) -> None:
        if self.plugin.fills:
            self.read(reader, machine)
            alone = reader.read(machine.clock.wall_ms(), ())
            assert alone.devices == ()
