"""The suites of exports, readers, sources of holders and histories refuse what is nearly right: an amount of another
team, a counter in another unit or that begins again, "N/A" as 0, a holder who is billed elsewhere, a lock file that
cannot be read, a meter that was silent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from accountant.channels.protocol import one_line, webhook_channel
from accountant.exports.protocol import ExportPlugin
from accountant.reports.report_builder import Report
from agent.core.readings import Allocation, DeviceReading, Gpu, Unavailable
from agent.gpu_readers.protocol import GpuReadings
from agent.holders.protocol import Holdings
from agent.wire import Gap, Holder, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_HOUR, US_PER_MS
from gputally.testing import channels, gpu_readers, histories, holders
from gputally.testing.exports import ExportSuite, reports
from gputally.testing.http_receiver import http_receiver


def _exact(report: Report) -> Mapping[str, Decimal]:
    return report.due


def _swapped(report: Report) -> Mapping[str, Decimal]:
    return dict(zip(report.due, reversed(report.due.values()), strict=True))


def _cents_of_floats(report: Report) -> Mapping[str, Decimal]:
    return {team: Decimal(int(float(amount) * 100)) / 100 for team, amount in report.due.items()}


def _without_the_last(report: Report) -> Mapping[str, Decimal]:
    return dict(list(report.due.items())[:-1])


class _Amounts(ExportSuite):
    __test__ = False

    def due(self, content: bytes) -> Mapping[str, Decimal]:
        return {team: Decimal(amount) for team, amount in json.loads(content).items()}


@pytest.mark.parametrize("amounts", [_swapped, _cents_of_floats, _without_the_last])
def test_an_amount_is_exact_and_that_of_its_team(amounts: Any) -> None:
    def judge(of: Any) -> None:
        def write(report: Report, stream: Any) -> None:
            stream.write(json.dumps({team: f"{amount:f}" for team, amount in of(report).items()}).encode())

        case = _Amounts()
        case.plugin = ExportPlugin(  # type: ignore[misc]
            name="feed", title="Feed", media_type="application/json", suffix="feed", write=write, reaches="nothing",
            page="https://feed.example.com",
        )  # fmt: skip
        case.test_the_amounts_are_those_that_are_due(reports(False))

    judge(_exact)
    with pytest.raises(AssertionError):
        judge(amounts)


def _escaped(text: str) -> str:
    return re.sub(r"([<@\[*])", "\\\\\\1\u200b", text)


@pytest.mark.parametrize("kind", channels.MARKUP)
def test_a_name_with_markup_that_the_medium_reads_is_refused(kind: str, tmp_path: Path) -> None:
    def judge(shown: Any) -> None:
        case = channels.ChannelSuite()
        case.plugin = webhook_channel("chat", lambda message: {"text": shown(one_line(message.text))}, "page")  # type: ignore[misc]
        with http_receiver() as server:
            (tmp_path / "url").write_text(server.url)
            read = {kind: lambda body: [json.loads(body)["text"]]}
            medium = channels.Medium({"url_file": str(tmp_path / "url")}, server, read)
            case.test_names_of_users_are_no_markup_of_their_own_and_may_be_long(medium)

    judge(_escaped)
    for wrong in (lambda text: text, lambda _: ""):
        with pytest.raises(AssertionError, match=kind):
            judge(wrong)


class _Machine:
    """A GPU that is busy for half of the time, and its reader. per_ms: what its counter adds in a millisecond."""

    place, uuids, before = "", frozenset({"X-0"}), ()

    def __init__(self, per_ms: float) -> None:
        self.clock = VirtualClock(gpu_readers.START_MS)
        self._per_ms = per_ms

    def advance(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)

    def read(self, at_ms: int, _before: Sequence[DeviceReading] = ()) -> GpuReadings:
        busy_us = round((at_ms - gpu_readers.START_MS) * self._per_ms)
        return GpuReadings((DeviceReading(Gpu("X-0", 0, "Tensor One", None), busy_us=busy_us),))

    def close(self) -> None: ...

    def fail(self) -> None: ...

    def mend(self) -> None: ...


@pytest.mark.parametrize("per_ms", [50_000, 0.5], ids=["more than the time", "milliseconds"])
def test_a_counter_counts_microseconds(per_ms: float) -> None:
    law = gpu_readers.GpuReaderSuite().test_counters_only_go_up_and_a_device_that_works_counts
    good, wrong = _Machine(500), _Machine(per_ms)
    law(good, good)
    with pytest.raises(AssertionError):
        law(wrong, wrong)


class _Vms:
    """Machines that hold GPUs, and the source that says so. billed: the namespace that it names."""

    place = ""

    def __init__(self, billed: str) -> None:
        self.clock, self._billed = VirtualClock(holders.START_MS), billed
        self._held: list[holders.Held] = []

    def give(self, gpu_uuid: str, mig_uuid: str) -> holders.Held:
        self._held.append((gpu_uuid, mig_uuid, f"vm of {gpu_uuid}", "vision"))
        return self._held[-1]

    def take(self, held: holders.Held) -> None:
        self._held.remove(held)

    def read(self, _at_ms: int, _gpus: Sequence[Gpu]) -> Holdings:
        told = [(gpu, Holder("container", uid, self._billed, uid), mig) for gpu, mig, uid, _ in self._held]
        return Holdings((), tuple(Allocation(*each) for each in told))

    def close(self) -> None: ...

    def fail(self) -> None: ...

    def mend(self) -> None: ...


def test_a_holder_is_billed_to_its_own_namespace() -> None:
    law = holders.HolderSuite().test_who_holds_what_is_told_until_it_is_free_again
    good, wrong = _Vms("vision"), _Vms("finance")
    law(good, good)
    with pytest.raises(AssertionError):
        law(wrong, wrong)


class _Counting:
    """A vendor's file and its reader, which may have a fault. Its counter counts half of the time; its power is known.

    What the file says is (counter in microseconds, power in milliwatts or None, the number of the vendor's start)."""

    place, uuids, before = "", frozenset({"X-0"}), ()

    def __init__(self, fault: str = "") -> None:
        self.clock, self._fault = VirtualClock(gpu_readers.START_MS), fault
        self._counter_us, self._start, self._has_power = 0, 0, True
        self._last_us = self._sum_us = 0

    def advance(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)
        self._counter_us += milliseconds * 500

    def withhold(self) -> frozenset[str]:
        self._has_power = False
        return frozenset({"power_mw"})

    def restart(self, kept: float) -> None:
        self._counter_us, self._start = int(self._counter_us * kept), self._start + 1

    def read(self, at_ms: int, _before: Sequence[DeviceReading] = ()) -> GpuReadings:
        fell = self._counter_us < self._last_us
        self._sum_us += self._counter_us if fell else self._counter_us - self._last_us
        self._last_us = self._counter_us
        busy_us = self._sum_us if self._fault == "adds a fall" else self._counter_us
        unknown = 0 if self._fault == "N/A is 0" else Unavailable("N/A")
        epochs = {"adds a fall": "", "one epoch": "", "an epoch a reading": str(at_ms)}
        epoch = epochs.get(self._fault, str(self._start))
        power_mw = 90_000 if self._has_power else unknown
        gpu = Gpu("X-0", 0, "Tensor One", None)
        return GpuReadings((DeviceReading(gpu, "ok", epoch, busy_us=busy_us, power_mw=power_mw),))

    def close(self) -> None: ...

    def fail(self) -> None: ...

    def mend(self) -> None: ...


def test_not_available_is_not_zero() -> None:
    law = gpu_readers.GpuReaderSuite().test_a_value_that_the_source_does_not_have_is_unknown
    good, wrong = _Counting(), _Counting("N/A is 0")
    law(good, good)
    with pytest.raises(AssertionError, match="Unavailable"):
        law(wrong, wrong)


@pytest.mark.parametrize(
    ("fault", "kept"),
    [("one epoch", 0.0), ("one epoch", 0.99), ("adds a fall", 0.5), ("adds a fall", 0.99), ("an epoch a reading", 0.0)],
)
def test_counters_that_begin_again_give_no_negative_and_no_doubled_time(fault: str, kept: float) -> None:
    law = gpu_readers.GpuReaderSuite().test_counters_that_begin_again_take_no_time_away_and_add_none
    good, wrong = _Counting(), _Counting(fault)
    law(good, good, kept)
    with pytest.raises(AssertionError, match=r"counter_epoch|twice"):
        law(wrong, wrong, kept)


class _Locks:
    """A folder with a lock file for each GPU, and the source that reads it. fault: "free" leaves a file out that it
    cannot read, "quiet" does not say so."""

    place = ""

    def __init__(self, fault: str = "") -> None:
        self.clock, self._fault = VirtualClock(holders.START_MS), fault
        self._files: dict[str, str | None] = {}

    def give(self, gpu_uuid: str, mig_uuid: str) -> holders.Held:
        self._files[gpu_uuid] = mig_uuid
        return gpu_uuid, mig_uuid, f"lock of {gpu_uuid}", ""

    def damage(self, held: holders.Held) -> bool:
        self._files[held[0]] = None
        return True

    def read(self, _at_ms: int, _gpus: Sequence[Gpu]) -> Holdings:
        told = tuple(
            Allocation(gpu, Holder("container", f"lock of {gpu}", "", "x"), mig)
            for gpu, mig in self._files.items()
            if mig is not None
        )
        unknown = {gpu: "cannot be read" for gpu, mig in self._files.items() if mig is None}
        fault = "a lock file cannot be read" if unknown and self._fault != "quiet" else ""
        return Holdings((), told, fault, unknown={} if self._fault == "free" else unknown)

    def close(self) -> None: ...


@pytest.mark.parametrize("fault", ["free", "quiet"])
def test_a_lock_file_that_cannot_be_read_is_not_a_free_gpu(fault: str) -> None:
    class Suite(holders.HolderSuite):
        __test__ = False

        def open(self, site: Any) -> Any:
            return site

    law = Suite().test_a_device_of_which_nothing_can_be_read_is_not_free
    good, wrong = _Locks(), _Locks(fault)
    law(good, good)
    with pytest.raises(AssertionError):
        law(wrong, wrong)


def _row(start_ms: int, hours: int, holder: Holder | None, busy_us: int | None, gaps: tuple[Gap, ...]) -> UsageInterval:
    us = hours * MS_PER_HOUR * US_PER_MS
    return UsageInterval(
        seq=0, start_ms=start_ms, end_ms=start_ms + hours * MS_PER_HOUR, gpu_uuid="g" if holder else "free",
        gpu_model="", holder=holder, capacity_us=us, allocated_us=us if holder else 0, busy_us=busy_us,
        method="imported", gaps=gaps,
    )  # fmt: skip


def _silence_as(fault: str) -> None:
    """Judge a history whose meter was silent for the second of three hours: the rows of a GPU that a pod held before
    and after, and of one that nobody held."""
    pod, books, start_ms = Holder("pod", "uid", "vision", "train"), histories.FakeAccountant(), histories.START_MS
    gap = () if fault == "busy" else (Gap(*histories.SILENT_MS, "not recorded"),)
    books.facts["uid"] = PodFacts(seq=0, uid="uid", namespace="vision", name="train", node="n", observed_ms=0)
    rows = [
        _row(start_ms, 3, pod, MS_PER_HOUR * US_PER_MS, gap), _row(start_ms, 1, None, None, ()),
        _row(histories.SILENT_MS[1], 1, None, None, ()),
    ]  # fmt: skip
    if fault == "free":
        rows.append(_row(histories.SILENT_MS[0], 1, None, None, ()))
    if fault == "longer":
        rows.append(_row(histories.SILENT_MS[1] + MS_PER_HOUR, 40, pod, None, ()))
    books.rows = {("n", "e", number): ("n", row) for number, row in enumerate(rows)}

    class Suite(histories.HistorySuite):
        __test__ = False
        samples = True

    def told(*_: str) -> histories.Told:
        return histories.Told(0, [{"coverage": 1.0 if fault == "whole" else 0.7}], "")

    Suite().test_nothing_counts_while_the_meter_was_silent(lambda _uses, _silent_ms: (), told, books)


@pytest.mark.parametrize("fault", ["free", "busy", "longer", "whole"])
def test_a_silent_meter_counts_nothing(fault: str) -> None:
    _silence_as("")
    with pytest.raises(AssertionError):
        _silence_as(fault)
