"""One simulated machine with a real agent on it.

Only the hardware and the kubelet are made up: the agent's loop, meter, outbox and uploader are the ones
that run in production. The outbox's fsync is off, as nothing here can lose power but the simulation's
own machines, whose outboxes live on in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from agent.clock import Clock
from agent.loop import Agent
from agent.metrics.collector import AgentMetrics
from agent.settings import Settings
from agent.shipping.outbox import Outbox
from agent.shipping.upload import ShipResult, Uploader
from agent.simulation.simulated import SimulatedNode, SimulatedSource
from fairshare.simulator.cluster import NodeSpec, Slot, slots_of
from gputally.demo.cluster import CLUSTER, devices
from gputally.demo.pods import Pod


class Machine:
    """A node, switched off until `boot`; `running` while its agent does.

    randbits, jitter: where the agent's randomness comes from. metrics: of its agents, for a Prometheus."""

    def __init__(
        self,
        spec: NodeSpec,
        folder: Path,
        url: str,
        interval_s: int,
        clock: Clock,
        *,
        randbits: Callable[[int], int],
        jitter: Callable[[], float],
        metrics: AgentMetrics | None = None,
    ) -> None:
        self.name = spec.name
        self._clock = clock
        self._randbits = randbits
        self._jitter = jitter
        self._metrics = metrics
        self._outbox_file = folder / f"{spec.name}.sqlite"
        self._settings = Settings(cluster=CLUSTER, node=spec.name, url=url, interval_s=interval_s, batch_rows=20_000)
        gpus = devices(spec)
        self._node = SimulatedNode(spec.name, gpus, start_ms=clock.wall_ms())
        self.mig_uuids: dict[Slot, str] = {
            slot: gpus[g].mig[slot.index].uuid
            for slot in slots_of(spec)
            for g in (next(i for i, gpu in enumerate(gpus) if gpu.uuid == slot.gpu),)
            if gpus[g].mig
        }
        self._boots = 0
        self._closed_before = 0
        self._agent: Agent | None = None
        self._uploader: Uploader | None = None
        self._outbox: Outbox | None = None

    @property
    def running(self) -> bool:
        return self._agent is not None

    @property
    def closed(self) -> int:
        """Intervals that its agents, all lives together, closed and spooled."""
        return self._closed_before + (self._agent.health.intervals_closed if self._agent is not None else 0)

    @property
    def spooled(self) -> int:
        """The newest number its outbox gave out."""
        return self._outbox.last_seq if self._outbox is not None else 0

    @property
    def unconfirmed(self) -> int:
        """Intervals that would be sent now."""
        pending = self._outbox.pending(1_000_000, 1 << 40) if self._outbox is not None else None
        return len(pending.rows) if pending is not None else 0

    # --- what happens to it ------------------------------------------------------------------

    def boot(self) -> None:
        """Power is back: a new boot, fresh driver counters, and the agent starts."""
        self._boots += 1
        for gpu in self._node.gpus:
            self._node.reset_counters(self._clock.wall_ms(), gpu.uuid)
        self.start_agent()

    def start_agent(self) -> None:
        """The agent starts on the outbox it finds, and looks around at once."""
        self._outbox = Outbox(self._outbox_file, self._clock, fsync=False, randbits=self._randbits)
        self._uploader = Uploader(
            self._outbox,
            self._settings.url,
            self._settings.cluster,
            self.name,
            str(uuid5(NAMESPACE_URL, f"{self.name}/boot/{self._boots}")),
            None,
            self._clock,
            max_rows=self._settings.batch_rows,
            max_bytes=self._settings.batch_kib * 1024,
            compares_clocks=False,
            jitter=self._jitter,
        )
        source = SimulatedSource(self._node)
        self._agent = Agent(self._settings, source, self._outbox, self._uploader, self._clock, metrics=self._metrics)
        self.sample()

    def kill_agent(self) -> None:
        """The process ends without a word: what it had not spooled is gone."""
        self._closed_before = self.closed
        if self._uploader is not None and self._outbox is not None:
            self._uploader.close()
            self._outbox.close()
        self._agent = self._uploader = self._outbox = None

    def start_pod(self, at_ms: int, pod: Pod) -> None:
        """The kubelet gives the pod its devices."""
        for claim in pod.claims:
            self._node.place(at_ms, claim.allocation, claim.utilisation_ppm, claim.memory_mib, pod.facts)

    def stop_pod(self, at_ms: int, uid: str) -> None:
        """The pod ends and its devices are free."""
        self._node.remove(at_ms, uid)

    def lose_gpu(self, at_ms: int, uuid: str) -> None:
        """The GPU falls off the bus."""
        self._node.lose(at_ms, uuid)

    def recover_gpu(self, at_ms: int, uuid: str) -> None:
        """The GPU was reset and answers again."""
        self._node.recover(at_ms, uuid)

    # --- what its agent does -----------------------------------------------------------------

    def sample(self) -> None:
        """One reading, if the agent runs."""
        if self._agent is not None:
            self._agent.sample()

    def deliver(self, upto: int | None = None) -> ShipResult | None:
        """Send what is pending, as far as number `upto`, until nothing is left or the other side does not take it."""
        result = None
        while self._agent is not None and (result is None or (result.progress and not self._delivered(upto))):
            result = self._agent.ship(upto)
        return result

    def _delivered(self, upto: int | None) -> bool:
        return upto is not None and self._outbox is not None and self._outbox.durable_seq >= upto

    def exposition(self) -> str:
        """Its agent's /metrics page; empty where it keeps none."""
        return str(self._metrics.exposition(), "utf-8") if self._metrics is not None else ""

    def close(self) -> None:
        """Shut the agent down in good order."""
        closed = self.closed
        if self._agent is not None:
            self._agent.shutdown()
        self._closed_before = closed
        self._agent = self._uploader = self._outbox = None
