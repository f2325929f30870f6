"""The suites of exports, readers and sources of holders refuse what is nearly right: an amount of another team, a
counter in another unit, a holder who is billed elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pytest

from accountant.exports.protocol import ExportPlugin
from accountant.reports.report_builder import Report
from agent.core.readings import Allocation, DeviceReading, Gpu
from agent.gpu_readers.protocol import GpuReadings
from agent.holders.protocol import Holdings
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from gputally.testing import gpu_readers, holders
from gputally.testing.exports import ExportSuite, reports


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
