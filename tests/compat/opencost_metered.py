"""Meters the same day: simulated GPUs, the agent's meter, a real ledger, and its answer in OpenCost's form.

The meter reads its node every five seconds, which is how often an agent asks the kubelet for allocations; it gets no
notice of pod changes in between. While nothing changes on a node, only every fifth minute is read. A node that loses
power loses the open interval and returns with a new boot id and a new meter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
from starlette.testclient import TestClient

from accountant.compat.opencost_api import AllocationSource, create_app
from accountant.core.settings import Limits
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from agent.core.readings import Allocation, Gpu
from agent.metering.meter import ClosedSet, Meter
from agent.simulation.simulated_node import H100, SimulatedNode, make_gpu
from agent.wire import Batch, Holder
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND
from tests.compat.opencost_day import DARK_S, DAY_S, MARGIN_S, START_MS, Pod
from tests.empty_ledger import fresh

ASKED_S = 5
"""Time between two answers of the kubelet."""
STEADY_S = 300


def metered(every: Sequence[Pod], folder: Path, interval_ms: int = MS_PER_MINUTE) -> DuckLedger:
    """Return a ledger with the records of all nodes' agents; the caller closes it. Longer intervals make fewer rows,
    and a node that loses power may lose more."""
    clock = VirtualClock(START_MS + (DAY_S + MARGIN_S) * MS_PER_SECOND)
    ledger = open_ledger(fresh(folder / "ledger.duckdb"), clock)
    for name in sorted({pod.node for pod in every}):
        mine = [pod for pod in every if pod.node == name]
        numbers = count(1)
        rows = tuple(
            msgspec.structs.replace(row, seq=next(numbers))
            for closed in _node(name, mine, interval_ms)
            for row in closed.rows
        )
        batch = Batch(
            cluster="prod", node=name, boot_id="b", epoch=f"0192-{name}", first_seq=1, oldest_seq=1, intervals=rows
        )
        (receipt,) = ledger.append([batch], clock.wall_ms())
        assert not isinstance(receipt, Exception), receipt
        assert receipt.quarantined == 0
    return ledger


def answer(ledger: DuckLedger, aggregate: str) -> dict[str, float]:
    """Return the GPU-hours of the window, as a client of OpenCost's API receives them."""
    end = START_MS + DAY_S * MS_PER_SECOND
    source = AllocationSource(
        ledger, VirtualClock(end + MARGIN_S * MS_PER_SECOND), lambda: None, "prod", Limits(span_days=400)
    )
    asked = {"window": f"{START_MS // 1000},{end // 1000}", "aggregate": aggregate}
    found = TestClient(create_app(source)).get("/allocation/compute", params=asked)
    assert found.status_code == 200, found.text
    return {name: one["gpuHours"] for name, one in found.json()["data"][0].items()}


def _node(name: str, mine: Sequence[Pod], interval_ms: int) -> Iterator[ClosedSet]:
    """Return the sets that the node's meters close, one meter per boot."""
    start, end = -MARGIN_S, DAY_S + MARGIN_S
    node = SimulatedNode(name, _gpus(name, mine), start_ms=START_MS + start * MS_PER_SECOND)
    changes = sorted(
        [(pod.start_s, 1, pod) for pod in mine] + [(pod.end_s, 0, pod) for pod in mine if pod.end_s < end],
        key=lambda change: change[:2],
    )
    looks = {start, end, *range(start, end, STEADY_S), *range(DARK_S[0] - STEADY_S, DARK_S[0], ASKED_S)}
    looks |= {DARK_S[1] + ASKED_S}
    looks |= {at + late for at, _, _ in changes for late in (-at % ASKED_S - ASKED_S, -at % ASKED_S) if at > start}
    meter = Meter(interval_ms, ZoneInfo("UTC"), boot_id="first")
    for at in sorted(looks):
        while changes and changes[0][0] <= at:
            when, begins, pod = changes.pop(0)
            if begins:
                node.place(START_MS + when * MS_PER_SECOND, _allocation(node, pod, pod.gpus[0]), 500_000, 1_024)
                for gpu in pod.gpus[1:]:
                    node.place(START_MS + when * MS_PER_SECOND, _allocation(node, pod, gpu), 500_000, 1_024)
            else:
                node.remove(START_MS + when * MS_PER_SECOND, pod.uid)
        if name == "dark" and DARK_S[0] <= at < DARK_S[1]:
            meter = Meter(interval_ms, ZoneInfo("UTC"), boot_id="second")
            continue
        yield from meter.observe(node.snapshot(START_MS + at * MS_PER_SECOND))
    yield from meter.flush(START_MS + end * MS_PER_SECOND)


def _gpus(name: str, mine: Sequence[Pod]) -> list[Gpu]:
    mig = ["1g.10gb"] * 7 if name == "mig" else []
    return [make_gpu(f"GPU-{name}-{gpu}", gpu, H100, mig) for gpu in sorted({gpu for pod in mine for gpu in pod.gpus})]


def _allocation(node: SimulatedNode, pod: Pod, gpu: int) -> Allocation:
    device = next(each for each in node.gpus if each.index == gpu)
    holder = Holder(kind="pod", uid=pod.uid, namespace=pod.namespace, name=pod.name, container="main")
    if device.mig:
        return Allocation(device.uuid, holder, device.mig[pod.slot].uuid)
    if pod.parts > 1:
        return Allocation(device.uuid, holder, sharing="time-slicing", sharing_replicas=pod.parts)
    return Allocation(device.uuid, holder)
