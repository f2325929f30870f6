"""One node whose agent runs on a virtual clock and sends to a scripted accountant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent.core.readings import Allocation, Snapshot
from agent.core.settings import Settings
from agent.main_loop import Agent
from agent.simulation.simulated_node import H100, SimulatedNode, SimulatedSource, make_gpu
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from agent.wire import Holder, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY
from tests.agent_shell.outboxes import T0
from tests.agent_shell.scripted_accountant import ScriptedAccountant

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


class Site:
    """`source` and `outbox` are those of the agent that was started last; `agent` is that agent."""

    agent: Agent
    source: Flaky
    outbox: Any

    def __init__(self, open_outbox: Callable[..., Outbox], accountant: ScriptedAccountant, clock: VirtualClock) -> None:
        self.node = SimulatedNode("n1", [make_gpu("GPU-a", 0, H100)], start_ms=T0)
        self.accountant = accountant
        self.clock = clock
        self._open_outbox = open_outbox
        self._uploaders: list[Uploader] = []

    def start(
        self, boot_id: str = "boot-1", wrap: Any = lambda o: o, max_age_ms: int = MS_PER_DAY, **options: Any
    ) -> Agent:
        self.source = Flaky(SimulatedSource(self.node))
        self.outbox = wrap(self._open_outbox(max_age_ms=max_age_ms))
        url, jitter = self.accountant.url, lambda: 1.0
        self._uploaders.append(Uploader(self.outbox, url, "c1", "n1", boot_id, None, self.clock, jitter=jitter))
        self.agent = Agent(Settings(node="n1"), self.source, self.outbox, self._uploaders[-1], self.clock, **options)
        return self.agent

    def place(self, uid: str) -> None:
        """From now on a pod keeps the node's GPU half busy."""
        place(self.node, uid, self.clock.wall_ms())

    def turn(self, minutes: int, step_ms: int = 20_000) -> None:
        for _ in range(minutes * MINUTE // step_ms):
            self.agent.sample()
            self.clock.advance(step_ms)

    @property
    def rows(self) -> list[UsageInterval]:
        """What the accountant was sent."""
        return [row for batch in self.accountant.batches for row in batch.intervals]

    @property
    def facts(self) -> list[PodFacts]:
        return [fact for batch in self.accountant.batches for fact in batch.facts]

    def close(self) -> None:
        for uploader in self._uploaders:
            uploader.close()
