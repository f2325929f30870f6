"""Hand-written snapshots of a GPU and of one with MIG instances, and a meter that observes them."""

from __future__ import annotations

from collections.abc import Sequence
from zoneinfo import ZoneInfo

import msgspec

from agent.core.readings import Allocation, DeviceReading, HolderReading, NodeSnapshot, Reading, Unavailable
from agent.metering.meter import ClosedSet, Meter
from agent.simulation.simulated_node import A100, H100, make_gpu
from agent.wire import UsageInterval
from tests.agent.sample_values import MINUTE, T0, pod

GPU = make_gpu("GPU-0", 0, H100)
MIG = make_gpu("GPU-1", 1, A100, ["4g.40gb", "3g.40gb"])
UNREAD = Unavailable("driver said no")
A = Allocation("GPU-0", pod("a"))


def device(busy_s: float | Reading, energy_j: float = 0, *holders: HolderReading, **more: object) -> DeviceReading:
    busy = busy_s if isinstance(busy_s, Unavailable) else round(busy_s * 1_000_000)
    reading = DeviceReading(GPU, busy_us=busy, energy_uj=round(energy_j * 1_000_000), holders=holders)
    return replaced(reading, **more)


def replaced(reading: DeviceReading, **changes: object) -> DeviceReading:
    return msgspec.structs.replace(reading, **changes)


def snapshot(
    after_ms: int, devices: Sequence[DeviceReading], *allocations: Allocation, unknown: str = ""
) -> NodeSnapshot:
    return NodeSnapshot(T0 + after_ms, tuple(devices), Unavailable(unknown) if unknown else allocations)


def used(name: str, busy_s: float, memory_mib: int = 0) -> HolderReading:
    return HolderReading(pod(name), busy_us=round(busy_s * 1_000_000), memory_mib=memory_mib)


def sliced(name: str) -> Allocation:
    return Allocation("GPU-0", pod(name), sharing="time-slicing", sharing_replicas=2)


def meter(interval_ms: int = MINUTE, **more: object) -> Meter:
    return Meter(interval_ms, ZoneInfo("UTC"), boot_id="boot-1", **more)  # type: ignore[arg-type]


def rows(sets: Sequence[ClosedSet]) -> list[UsageInterval]:
    return [row for closed in sets for row in closed.rows]


def spans(sets: Sequence[ClosedSet]) -> list[tuple[int, int]]:
    return [(closed.rows[0].start_ms - T0, closed.rows[0].end_ms - T0) for closed in sets]


def run(meter: Meter, *snapshots: NodeSnapshot) -> list[ClosedSet]:
    return [closed for one in snapshots for closed in meter.observe(one)]


def over_a_minute(*readings: DeviceReading, claims: Sequence[Allocation] = (A,)) -> list[UsageInterval]:
    """Meter one minute of evenly spaced readings, including its first and its last instant, and return the rows."""
    step_ms = MINUTE // (len(readings) - 1)
    return rows(run(meter(), *(snapshot(step_ms * step, [reading], *claims) for step, reading in enumerate(readings))))
