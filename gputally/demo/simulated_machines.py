"""Simulates machines with a real agent on each, and turns jobs into pods.

Every event happens at its exact time. The agents of the affected machines take a reading at that time, and all agents
take a reading at least once in two intervals. An agent sees only its own machine. As in a real agent, delivery and
metering run in two threads: everything except `deliver` belongs to one thread.

Only the hardware and the kubelet are simulated. The agent's loop, meter, outbox and uploader are the real ones. The
outbox does not call fsync, because only the simulated machines lose power, and this process keeps their outboxes.

The queue of a pod is in `queue_ref`, so it is billed to its team even if it lived while no agent ran."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from random import Random
from uuid import NAMESPACE_URL, uuid5

from agent.core.readings import Allocation
from agent.core.settings import AgentSettings
from agent.main_loop import Agent
from agent.metrics.exporter import AgentMetrics
from agent.simulation.simulated_node import SimulatedNode, SimulatedSource
from agent.upload.spool import Outbox
from agent.upload.uploader import ShipResult, Uploader
from agent.wire import Holder, Owner, PodFacts
from fairshare.simulator.simulation_model import (
    Event,
    OutageBegan,
    OutageEnded,
    SimulatedJob,
    SimulatedNodeSpec,
    Slot,
    Started,
    Stopped,
    slots_of,
)
from gputally.base.clock import Clock, VirtualClock
from gputally.base.version import __version__
from gputally.demo.cluster_and_workload import CLUSTER, REPLICAS, SHARED, devices, labels_of
from gputally.demo.ground_truth import GroundTruth
from gputally.demo.played_scheduler import queue_ref
from gputally.demo.simulated_pods import (
    WORKLOADS,
    pod_name,
    pod_uid,
    priority_of,
    resource_of,
    slots_by_rank,
    uid_of,
)
from gputally.demo.worker_processes import SiteConfig, SiteResult

_MEMORY_MIB = 80_000
"""Approximate memory of a GPU. A pod uses a third of it, and more if the pod is busy."""


@dataclass(frozen=True, slots=True)
class SimulatedHolding:
    """A GPU, or a part of one, that a pod holds. utilisation_ppm: utilisation of the GPU, or of its MIG instance."""

    allocation: Allocation
    utilisation_ppm: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class SimulatedPod:
    """A pod on one node, with the GPUs that it holds."""

    node: str
    facts: PodFacts
    claims: tuple[SimulatedHolding, ...]


def pods_of(
    start: Started, mig_uuids: dict[Slot, str], queued: frozenset[str], here: Container[str]
) -> tuple[SimulatedPod, ...]:
    """Return the pods of a started gang on the nodes in `here`.

    mig_uuids: the MIG instance of each slot that has one.
    queued: the names of the existing queues."""
    return tuple(
        _pod(start, rank, node, slots, mig_uuids, queued)
        for rank, (node, slots) in enumerate(slots_by_rank(start.slots))
        if node in here
    )


def _pod(
    start: Started, rank: int, node: str, slots: list[Slot], mig_uuids: dict[Slot, str], queued: frozenset[str]
) -> SimulatedPod:
    job = start.job
    uid, name = pod_uid(job, start.attempt, rank), pod_name(job, rank)
    kind = WORKLOADS[job.kind][1]
    namespace = job.queue  # a namespace has the name of its team
    facts = PodFacts(
        seq=0,
        uid=uid,
        namespace=namespace,
        name=name,
        node=node,
        labels=labels_of(job),
        owners=(Owner(kind, job.id, uid_of(job.id)),),
        workload=f"{kind}/{job.id}",
        queue_ref=queue_ref(job.queue) if job.queue in queued else "",
        priority=priority_of(job),
        requests={resource_of(slots[0].flavour.shape): str(len(slots))},
        created_ms=start.queued_ms,
        scheduled_ms=start.at_ms,
        started_ms=start.at_ms,
        observed_ms=start.at_ms,
    )
    holder = Holder("pod", uid, namespace, name, "main")
    return SimulatedPod(node, facts, tuple(_claim(holder, slot, job, mig_uuids.get(slot, "")) for slot in slots))


def _claim(holder: Holder, slot: Slot, job: SimulatedJob, mig_uuid: str) -> SimulatedHolding:
    ppm = job.utilisation_permille * 1_000
    memory = _MEMORY_MIB // 3 + job.utilisation_permille * _MEMORY_MIB // 2_000
    if slot.flavour.shape == SHARED:
        allocation = Allocation(slot.gpu, holder, sharing="time-slicing", sharing_replicas=REPLICAS)
        return SimulatedHolding(allocation, ppm // REPLICAS, memory // REPLICAS)
    return SimulatedHolding(Allocation(slot.gpu, holder, mig_uuid=mig_uuid), ppm, memory // 8 if mig_uuid else memory)


class SimulatedMachine:
    """A machine with an agent. It is off until `boot`.

    node: the simulated hardware and kubelet.
    folder: the folder of the agent's outbox.
    url: the accountant's address.
    randbits, jitter: sources of the agent's randomness.
    metrics: the metrics of the node's agents; None for none."""

    def __init__(
        self,
        spec: SimulatedNodeSpec,
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
        self._settings = AgentSettings(
            cluster=CLUSTER, node=spec.name, url=url, interval_s=interval_s, batch_rows=20_000
        )
        gpus = devices(spec)
        self.node = SimulatedNode(spec.name, gpus, start_ms=clock.wall_ms())
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
        """Number of intervals that the node's agents have closed and spooled, over all restarts."""
        return self._closed_before + (self._agent.health.intervals_closed if self._agent is not None else 0)

    @property
    def spooled(self) -> int:
        """The newest sequence number in the outbox."""
        return self._outbox.last_seq if self._outbox is not None else 0

    @property
    def unconfirmed(self) -> int:
        """Number of intervals in the outbox that the accountant has not confirmed."""
        pending = self._outbox.pending(1_000_000, 1 << 40) if self._outbox is not None else None
        return len(pending.intervals) if pending is not None else 0

    def boot(self) -> None:
        """Switch the power on: get a new boot id, reset the driver's counters, and start the agent."""
        self._boots += 1
        for gpu in self.node.gpus:
            self.node.reset_counters(self._clock.wall_ms(), gpu.uuid)
        self.start_agent()

    def start_agent(self) -> None:
        """Start the agent with the existing outbox, and let it take a reading."""
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
        source = SimulatedSource(self.node)
        self._agent = Agent(self._settings, source, self._outbox, self._uploader, self._clock, metrics=self._metrics)
        self.sample()

    def kill_agent(self) -> None:
        """Kill the agent without a clean stop. It loses the intervals that it has not spooled."""
        self._closed_before = self.closed
        if self._uploader is not None and self._outbox is not None:
            self._uploader.close()
            self._outbox.close()
        self._agent = self._uploader = self._outbox = None

    def start_pod(self, at_ms: int, pod: SimulatedPod) -> None:
        """Give the pod its devices, as the kubelet does."""
        for claim in pod.claims:
            self.node.place(at_ms, claim.allocation, claim.utilisation_ppm, claim.memory_mib, pod.facts)

    def sample(self) -> None:
        """Let the agent take a reading, if it is running."""
        if self._agent is not None:
            self._agent.sample()

    def deliver(self, upto: int | None = None) -> ShipResult | None:
        """Let the agent send pending records up to the sequence number `upto`, until none is left or the accountant
        does not accept them."""
        result = None
        while self._agent is not None and (result is None or (result.progress and not self._delivered(upto))):
            result = self._agent.ship(upto)
        return result

    def _delivered(self, upto: int | None) -> bool:
        return upto is not None and self._outbox is not None and self._outbox.durable_seq >= upto

    def exposition(self) -> str:
        """Return the agent's /metrics page; "" if it keeps no metrics."""
        return str(self._metrics.exposition(), "utf-8") if self._metrics is not None else ""

    def close(self) -> None:
        """Shut the agent down cleanly."""
        closed = self.closed
        if self._agent is not None:
            self._agent.shutdown()
        self._closed_before = closed
        self._agent = self._uploader = self._outbox = None


LAST_READING_MS = 2_000
"""Time between an agent's last reading of a GPU and the loss of the GPU."""


class AgentSite:
    """Machines with their agents, and the ground truth about them, under one clock, which this class moves.

    The site receives all events of the cluster and applies those of its own machines."""

    def __init__(self, config: SiteConfig) -> None:
        self._clock = VirtualClock(config.start_ms)
        self._faults = config.faults
        self._queued = config.queues
        self._sample_ms = 2 * config.interval_s * 1000
        self._truth = GroundTruth(config.nodes, config.start_ms, config.interval_s * 1000)
        self._machines: dict[str, SimulatedMachine] = {}
        for node in config.nodes:
            random = Random(f"{config.seed}/{node.name}")  # noqa: S311 - the demo must be repeatable
            self._machines[node.name] = SimulatedMachine(
                node,
                config.folder,
                config.url,
                config.interval_s,
                self._clock,
                randbits=random.getrandbits,
                jitter=random.random,
                metrics=AgentMetrics(node.name, __version__) if config.scraped else None,
            )
        self._node_of_gpu = {gpu.uuid: node.name for node in config.nodes for gpu in node.gpus}
        self._mig_uuids: dict[Slot, str] = {}
        for machine in self._machines.values():
            self._mig_uuids |= machine.mig_uuids
        self._pool = ThreadPoolExecutor(max(1, len(config.nodes)), "agent")

    def begin(self, events: Sequence[Event]) -> None:
        """Apply the events of the start time, and then switch all machines on. In this order an agent takes one reading
        at the start time."""
        self._apply_events(events, self._clock.wall_ms())
        for machine in self._machines.values():
            machine.boot()

    def follow(self, events: Iterable[Event], until_ms: int) -> dict[str, int]:
        """Apply all events up to `until_ms`, and take the readings in between. Return the newest sequence number in
        each running agent's outbox, for `deliver`."""
        for at_ms, group in groupby(events, attrgetter("at_ms")):
            simultaneous = list(group)
            self._read_before_gpu_losses(simultaneous, at_ms)
            self._take_readings_until(at_ms - 1)
            self._advance_to(at_ms)
            self._apply_events(simultaneous, at_ms)
            if at_ms % self._sample_ms == 0:
                self._read_all()
        self._take_readings_until(until_ms)
        return {name: machine.spooled for name, machine in self._machines.items() if machine.running}

    def deliver(self, upto: Mapping[str, int]) -> None:
        """Let these agents deliver their records at the same time, up to the sequence numbers in `upto`, as far as the
        accountant accepts them. `follow` may run at the same time, as long as no agent ends in it."""
        for _ in self._pool.map(lambda name: self._machines[name].deliver(upto[name]), upto):
            pass

    def deliver_alone(self, name: str) -> int:
        """Let one agent deliver its records. Return the number of intervals that it had to deliver."""
        machine = self._machines[name]
        number = machine.unconfirmed
        machine.deliver()
        return number

    def scrape(self) -> dict[str, str]:
        """Return the metrics page of each running agent, by node."""
        return {name: machine.exposition() for name, machine in self._machines.items() if machine.running}

    def finish(self, end_ms: int) -> SiteResult:
        """Book the ground truth up to the end, and return the site's result."""
        self._truth.finish(end_ms)
        return SiteResult(self._truth.totals, sum(machine.closed for machine in self._machines.values()))

    def close(self) -> None:
        """Shut the agents down cleanly."""
        for machine in self._machines.values():
            machine.close()
        self._pool.shutdown()

    def _take_readings_until(self, until_ms: int) -> None:
        """Take the regular readings up to `until_ms`, and kill and restart the agent as planned."""
        due: list[tuple[int, int, Callable[[], None]]] = []
        now = self._clock.wall_ms()
        for at_ms, act in ((self._faults.killed_ms, self._kill), (self._faults.back_ms, self._return)):
            if now < at_ms <= until_ms:
                due.append((at_ms, 0, act))
        first = (now // self._sample_ms + 1) * self._sample_ms
        due += [(at_ms, 1, self._read_all) for at_ms in range(first, until_ms + 1, self._sample_ms)]
        for at_ms, _, act in sorted(due, key=lambda entry: entry[:2]):
            self._advance_to(at_ms)
            act()

    def _advance_to(self, at_ms: int) -> None:
        if at_ms > self._clock.wall_ms():
            self._clock.advance_to(at_ms)

    def _read_all(self) -> None:
        for name in self._machines:
            self._read(name)

    def _read(self, name: str) -> None:
        machine = self._machines[name]
        if machine.running:
            machine.sample()
            self._truth.agent_read(name, self._clock.wall_ms())

    def _kill(self) -> None:
        machine = self._machines.get(self._faults.killed_node)
        if machine is not None and machine.running:
            self._truth.agent_dies(machine.name)
            machine.kill_agent()

    def _return(self) -> None:
        machine = self._machines.get(self._faults.killed_node)
        if machine is not None and not machine.running:
            machine.start_agent()
            self._truth.agent_returns(machine.name, self._clock.wall_ms())

    def _read_before_gpu_losses(self, events: Sequence[Event], at_ms: int) -> None:
        """Take a reading shortly before a GPU is lost, because a real agent takes a reading every few seconds."""
        for event in events:
            if isinstance(event, OutageBegan) and event.outage.name in self._node_of_gpu:
                read_ms = max(self._clock.wall_ms(), at_ms - LAST_READING_MS)
                self._take_readings_until(read_ms)
                self._advance_to(read_ms)
                self._read(self._node_of_gpu[event.outage.name])
                self._truth.gpu_fails(event.outage.name, read_ms, at_ms)

    def _apply_events(self, events: Sequence[Event], at_ms: int) -> None:
        """Apply all events of one time, and then take one reading of each affected machine."""
        for event in events:
            if isinstance(event, OutageBegan) and event.outage.name in self._machines:
                self._truth.power_fails(event.outage.name, at_ms)
        affected: set[str] = set()
        booting: list[str] = []
        for event in events:
            self._truth.apply(event)
            if isinstance(event, Started):
                for pod in pods_of(event, self._mig_uuids, self._queued, self._machines):
                    self._machines[pod.node].start_pod(at_ms, pod)
                    affected.add(pod.node)
            elif isinstance(event, Stopped):
                for rank, (node, _) in enumerate(slots_by_rank(event.slots)):
                    if node in self._machines:
                        self._machines[node].node.remove(at_ms, pod_uid(event.job, event.attempt, rank))
                        affected.add(node)
            elif event.outage.name in self._node_of_gpu:
                affected.add(self._gpu_outage(event))
            elif event.outage.name in self._machines:
                if isinstance(event, OutageEnded):
                    booting.append(event.outage.name)
                else:
                    self._machines[event.outage.name].kill_agent()
        for name in booting:
            self._machines[name].boot()
            self._truth.agent_read(name, at_ms)
        for name in self._machines:
            if name in affected:
                self._read(name)

    def _gpu_outage(self, event: OutageBegan | OutageEnded) -> str:
        """Apply the outage of a GPU. Return the name of its machine."""
        machine = self._machines[self._node_of_gpu[event.outage.name]]
        act = machine.node.lose if isinstance(event, OutageBegan) else machine.node.recover
        act(event.at_ms, event.outage.name)
        return machine.name
