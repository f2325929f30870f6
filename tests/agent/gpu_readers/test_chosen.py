"""Several readers as one: who owns a GPU, who fills what, and that a reader of another package can stop nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.__main__ import main
from agent.core.guarded_calls import RETRY_MS
from agent.core.readings import (
    DeviceCondition,
    DeviceReading,
    DriverReplaced,
    Gpu,
    HolderReading,
    InstanceReading,
    MigInstance,
    ProcessReading,
    Unavailable,
    XidCount,
)
from agent.core.settings import SettingsError
from agent.gpu_readers.chosen import ChosenReader, GpuReaders, open_readers
from agent.gpu_readers.guard import MOST_DEVICES, GuardedReader, WrongReading, checked
from agent.gpu_readers.protocol import GpuReader, GpuReadings, Surroundings
from agent.wire import Holder
from gputally.base import plugins as registry
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from tests.agent.readers import Read
from tests.agent.sample_values import T0
from tests.agent.vendor_reader import install_vendor
from tests.hypothesis_examples import examples
from tests.plugins.installed import install

NO = Unavailable("not read")


def device(name: str, busy: Any = 5, **values: Any) -> DeviceReading:
    return DeviceReading(Gpu(name, 0, "X", 1_000), counter_epoch="e", busy_us=busy, **values)


def readers(*each: tuple[str, Callable[[int], Any]] | ChosenReader) -> GpuReaders:
    return GpuReaders([one if isinstance(one, ChosenReader) else ChosenReader(one[0], Read(one[1])) for one in each])


def surroundings() -> Surroundings:
    clock = VirtualClock(T0)
    return Surroundings(clock, BackgroundTasks(clock))


# --- who owns what --------------------------------------------------------------------------------


def test_the_first_reader_owns_a_gpu_and_a_later_one_adds_what_it_lacks() -> None:
    both = readers(
        ("a", lambda at_ms: (device("G0", 5, power_mw=NO),)),
        ("b", lambda at_ms: (device("G0", 900, power_mw=70), device("G1", 7))),
    )
    first, second = both.read(T0).devices
    assert (first.busy_us, first.power_mw, second.busy_us) == (5, 70, 7)
    assert first.counter_epoch == "e/e"


def test_one_failing_reader_leaves_the_gpus_of_the_others_known() -> None:
    def fails(at_ms: int) -> GpuReadings:
        return GpuReadings((device("G0", Unavailable("gone")),), "gone")

    found = readers(("a", fails), ("b", lambda at_ms: (device("G1"),))).read(T0)
    assert (found.failure, found.sources) == ("", (("a", "gone"), ("b", "")))
    assert [one.unlisted for one in found.devices] == [(("", "gone"),), ()]
    assert readers(("a", fails)).read(T0).failure == "gone"


# --- a reader of another package ------------------------------------------------------------------


class Third:
    """A reader of which each call does what the test says."""

    def __init__(self) -> None:
        self.does: Callable[[], Any] = lambda: GpuReadings((device("T0"),))

    def read(self, at_ms: int, before: object = ()) -> GpuReadings:
        found: GpuReadings = self.does()
        return found

    def close(self) -> None:
        self.does()


def guarded(third: Third, most_s: float = 60.0) -> GpuReaders:
    guard = GuardedReader("third", lambda: third, fills=False, most_s=most_s)
    guard.open()
    return readers(("own", lambda at_ms: (device("G0"),)), ChosenReader("third", guard))


def fall(error: BaseException) -> Callable[[], Any]:
    def does() -> None:
        raise error

    return does


FALLS: dict[str, Callable[[], Any]] = {
    "raises": fall(ValueError("defect")),
    "ends": fall(SystemExit(3)),
    "times out": fall(TimeoutError()),
    "recurses": fall(RecursionError()),
    "wants a restart": fall(DriverReplaced("now")),
    "blames the settings": fall(SettingsError("x")),
    "talks much": fall(ValueError("x" * 10_000 + "\n")),
    "returns nothing": lambda: None,
    "returns a tuple": lambda: (),
    "lists a number": lambda: GpuReadings((1,)),  # type: ignore[arg-type]
    "lists None": lambda: GpuReadings(None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("does", FALLS.values(), ids=FALLS.keys())
def test_a_reader_that_falls_is_named_and_its_gpus_are_unknown(does: Callable[[], Any]) -> None:
    third = Third()
    both = guarded(third)
    assert [one.busy_us for one in both.read(T0).devices] == [5, 5]
    third.does = does
    found = both.read(T0 + 2_000)
    own, other = found.devices
    reason = dict(found.sources)["third"]
    assert 0 < len(reason) <= 253
    assert reason.isprintable()
    assert own == device("G0")
    assert (other.gpu.uuid, other.unanswered, other.busy_us) == ("T0", True, Unavailable(reason))
    assert other.unlisted == (("", reason),)
    third.does = lambda: GpuReadings((device("T0", 9),))
    again = both.read(T0 + 4_000)
    assert (dict(again.sources)["third"], again.devices[1].busy_us) == ("", 9)
    third.does = does
    both.close()


def test_a_reader_that_says_that_it_fails_keeps_its_gpus() -> None:
    third = Third()
    both = guarded(third)
    both.read(T0)
    third.does = lambda: GpuReadings((), "no file")
    for second in (2, 4):
        found = both.read(T0 + second * 1_000)
        assert [(one.gpu.uuid, one.busy_us) for one in found.devices] == [("G0", 5), ("T0", Unavailable("no file"))]


def test_a_reader_that_hangs_is_asked_again_when_it_has_ended() -> None:
    third, go, calls = Third(), threading.Event(), []
    both = guarded(third, most_s=0.05)
    both.read(T0)

    def hang() -> GpuReadings:
        calls.append(1)
        go.wait(60)
        return GpuReadings((device("T0", 9),))

    third.does = hang
    for second in (2, 4, 6):
        found = both.read(T0 + second * 1_000)
        assert [one.unanswered for one in found.devices] == [False, True]
        assert dict(found.sources)["third"]
    assert len(calls) == 1
    go.set()
    third.does = lambda: GpuReadings((device("T0", 9),))
    while both.read(T0 + 8_000).devices[1].busy_us != 9:
        """Until the thread that hung has ended."""
    both.close()


def test_a_reader_that_does_not_open_is_tried_again() -> None:
    third, tries = Third(), []

    def opens() -> GpuReader:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")
        return third

    guard = GuardedReader("third", opens, fills=False)
    guard.open()
    seen = [guard.read(T0 + after_ms).failure for after_ms in (0, 2_000, RETRY_MS - 1, RETRY_MS)]
    assert [bool(failure) for failure in seen] == [True, True, True, False]
    assert len(tries) == 3


def part(uuid: str, compute: int = 3) -> MigInstance:
    return MigInstance(uuid, "3g.40gb", 1, 0, compute, 40_000)


def wrong(**values: Any) -> GpuReadings:
    return GpuReadings((msgspec.structs.replace(device("T0"), **values),))


@pytest.mark.parametrize(
    "found",
    [
        wrong(busy_us=-1), wrong(busy_us=True), wrong(busy_us=1.5), wrong(busy_us="7"), wrong(power_mw=2**70),
        wrong(health="fine"), wrong(method="guess"), wrong(counter_epoch=None), wrong(counter_epoch="x" * 300),
        wrong(busy_us=Unavailable("x" * 300)), wrong(busy_us=Unavailable("a\nb")), wrong(gpu=None),
        wrong(gpu=Gpu("", 0, "X", 1)), wrong(gpu=Gpu("a\x1b", 0, "X", 1)), wrong(gpu=Gpu("a" * 300, 0, "X", 1)),
        wrong(gpu=Gpu("a", -1, "X", 1)), wrong(gpu=Gpu("a", 0, "X", 0)),
        wrong(gpu=Gpu("a", 0, "X", 1, 2, (part("m"),))),
        wrong(instances=(InstanceReading("m", 5),)), wrong(processes=(ProcessReading(-1),)),
        wrong(condition=DeviceCondition(xids=(XidCount(1, -3, 0),))),
        GpuReadings((device("T0"), device("T0"))),
        GpuReadings(tuple(device(f"T{number}") for number in range(MOST_DEVICES + 1))),
    ],
)  # fmt: skip
def test_what_is_no_reading_is_refused(found: GpuReadings) -> None:
    with pytest.raises(WrongReading) as caught:
        checked(found)
    assert str(caught.value).isprintable() or "\n" in str(caught.value)


def test_a_reader_does_not_say_who_holds_a_gpu() -> None:
    (seen,) = checked(wrong(holders=(HolderReading(Holder("pod", "victim"), busy_us=5),))).devices
    assert seen == device("T0")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=examples(50, 1_000))
@given(st.sampled_from(sorted(set(DeviceReading.__struct_fields__) - {"holders"})), anything)
def test_whatever_is_in_a_field_it_is_a_reading_or_refused(field: str, value: Any) -> None:
    try:
        (seen,) = checked(wrong(**{field: value})).devices
    except WrongReading:
        return
    assert seen == msgspec.convert(msgspec.to_builtins(seen), DeviceReading)


# --- the setting ----------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the path with the reader `vendor`, in which a test installs packages."""
    install_vendor(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    registry._entry_points.cache_clear()
    registry._listed.cache_clear()
    yield tmp_path
    registry._entry_points.cache_clear()
    registry._listed.cache_clear()


@pytest.mark.parametrize(
    ("text", "tells"),
    [
        ("vednor", "vendor"), ("", "vendor"), (" , ", "vendor"), ("vendor,vendor", "vendor"),
        ("vendor=here", "vendor"),
        ("chosen", "chosen"), ("a b", "a b"), ("protocol", "protocol"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("site")
def test_a_wrong_setting_is_refused(text: str, tells: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--holders=processes", "--once", "--gpu-readers", text]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gputally agent: gpu_readers: ")
    assert tells in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("text", ["1 / 0", "import sys; sys.exit(1)", "READER = 7", "import no_such_module_here"])
def test_a_package_that_cannot_be_loaded_is_named_and_the_agent_reads_on(site: Path, text: str) -> None:
    install(site, "bad-package", {"gputally.gpu_readers": {"bad": "bad_reader_module:READER"}}, bad_reader_module=text)
    found = open_readers("vendor,bad=x", surroundings())
    reading = found.read(T0)
    assert "bad-package" in dict(reading.sources)["bad"]
    found.close()
    sys.modules.pop("bad_reader_module", None)
