"""What an agent on a virtual clock is given, and what came of it."""

from __future__ import annotations

from typing import Any

from agent.core.readings import Allocation, Snapshot
from agent.main_loop import Agent
from agent.simulation.simulated_node import SimulatedNode
from agent.wire import Holder, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock

MINUTE = 60_000


class Flaky:
    """A source that fails on demand, in front of a simulated node."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.error: Exception | None = None
        self.closed = False

    def snapshot(self, at_ms: int) -> Snapshot:
        if self.error is not None:
            raise self.error
        snapshot: Snapshot = self.inner.snapshot(at_ms)
        return snapshot

    def close(self) -> None:
        self.closed = True


def place(node: SimulatedNode, uid: str, at_ms: int) -> None:
    facts = PodFacts(seq=0, uid=uid, namespace="vision", name=uid, node="n1", observed_ms=at_ms)
    holder = Holder(kind="pod", uid=uid, namespace="vision", name=uid, container="main")
    node.place(at_ms, Allocation("GPU-a", holder), 500_000, 1_000, facts)


def turn(agent: Agent, clock: VirtualClock, minutes: int, step_ms: int = 20_000) -> None:
    for _ in range(minutes * MINUTE // step_ms):
        agent.sample()
        clock.advance(step_ms)


def rows(accountant: Any) -> list[UsageInterval]:
    return [row for batch in accountant.batches for row in batch.intervals]
