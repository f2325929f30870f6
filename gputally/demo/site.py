"""A simulated site: machines that follow the scheduler's events, and the truth beside them.

Every event is applied at its exact instant; the agents of the machines it touches read at that instant,
and all agents read at least every second interval. An agent sees only what its own machine shows. As in
an agent itself, delivering and metering may go on at once, in two threads: everything but `deliver` belongs to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import groupby
from random import Random

from agent.clock import VirtualClock
from agent.metrics.collector import AgentMetrics
from fairshare.simulator.cluster import Slot
from fairshare.simulator.events import Event, OutageBegan, OutageEnded, Started, Stopped
from gputally.demo.letters import Plot, Stocktaking
from gputally.demo.machine import Machine
from gputally.demo.pods import pod_nodes, pod_uid, pods_of
from gputally.demo.truth import Truth

LAST_READING_MS = 2_000


class Site:
    """Machines with their agents and the truth about them, under one clock, which this moves.

    It is told of everything that happens in the cluster and minds what happens on its own machines."""

    def __init__(self, plot: Plot) -> None:
        self._clock = VirtualClock(plot.start_ms)
        self._faults = plot.faults
        self._queued = plot.queues
        self._sample_ms = 2 * plot.interval_s * 1000
        self._truth = Truth(plot.nodes, plot.start_ms, plot.interval_s * 1000)
        self._machines: dict[str, Machine] = {}
        for node in plot.nodes:
            random = Random(f"{plot.seed}/{node.name}")  # noqa: S311 - repeatable is what is wanted here
            self._machines[node.name] = Machine(
                node,
                plot.folder,
                plot.url,
                plot.interval_s,
                self._clock,
                randbits=random.getrandbits,
                jitter=random.random,
                metrics=AgentMetrics(node.name, version("gputally")) if plot.scraped else None,
            )
        self._of_gpu = {gpu.uuid: node.name for node in plot.nodes for gpu in node.gpus}
        self._mig_uuids: dict[Slot, str] = {}
        for machine in self._machines.values():
            self._mig_uuids |= machine.mig_uuids
        self._pool = ThreadPoolExecutor(max(1, len(plot.nodes)), "agent")

    def begin(self, events: Sequence[Event]) -> None:
        """Switch everything on, after what happens at the very start: an agent sees an instant once."""
        self._happen(events, self._clock.wall_ms())
        for machine in self._machines.values():
            machine.boot()

    def follow(self, events: Iterable[Event], until_ms: int) -> dict[str, int]:
        """Let everything happen up to `until_ms`, readings included; what can be delivered then (`deliver`)."""
        for at_ms, group in groupby(events, _when):
            happening = list(group)
            self._read_before_losses(happening, at_ms)
            self._pass_time(at_ms - 1)
            self._move(at_ms)
            self._happen(happening, at_ms)
            if at_ms % self._sample_ms == 0:
                self._read_all()
        self._pass_time(until_ms)
        return {name: machine.spooled for name, machine in self._machines.items() if machine.running}

    def deliver(self, upto: Mapping[str, int]) -> None:
        """These agents send what they had at number `upto`, all at once, as far as the other side takes it.

        Meanwhile `follow` may go on, as long as no agent ends in it."""
        for _ in self._pool.map(lambda name: self._machines[name].deliver(upto[name]), upto):
            pass

    def deliver_alone(self, name: str) -> int:
        """One agent sends what it has; returns how many intervals that were."""
        machine = self._machines[name]
        number = machine.unconfirmed
        machine.deliver()
        return number

    def scrape(self) -> dict[str, str]:
        """What each running agent shows to a Prometheus, by node."""
        return {name: machine.exposition() for name, machine in self._machines.items() if machine.running}

    def finish(self, end_ms: int) -> Stocktaking:
        """Book everything up to the end."""
        self._truth.finish(end_ms)
        return Stocktaking(self._truth.books, sum(machine.closed for machine in self._machines.values()))

    def close(self) -> None:
        """Shut the agents down in good order."""
        for machine in self._machines.values():
            machine.close()
        self._pool.shutdown()

    # --- within ------------------------------------------------------------------------------

    def _pass_time(self, until_ms: int) -> None:
        """Regular readings, and what the fault plan has in store, up to `until_ms`."""
        due: list[tuple[int, int, Callable[[], None]]] = []
        now = self._clock.wall_ms()
        for at_ms, happen in ((self._faults.killed_ms, self._kill), (self._faults.back_ms, self._return)):
            if now < at_ms <= until_ms:
                due.append((at_ms, 0, happen))
        first = (now // self._sample_ms + 1) * self._sample_ms
        due += [(at_ms, 1, self._read_all) for at_ms in range(first, until_ms + 1, self._sample_ms)]
        for at_ms, _, happen in sorted(due, key=lambda entry: entry[:2]):
            self._move(at_ms)
            happen()

    def _move(self, at_ms: int) -> None:
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

    def _read_before_losses(self, events: Sequence[Event], at_ms: int) -> None:
        """Readings are every few seconds in reality: the last before a GPU falls off the bus is that close."""
        for event in events:
            if isinstance(event, OutageBegan) and event.outage.name in self._of_gpu:
                read_ms = max(self._clock.wall_ms(), at_ms - LAST_READING_MS)
                self._pass_time(read_ms)
                self._move(read_ms)
                self._read(self._of_gpu[event.outage.name])
                self._truth.gpu_fails(event.outage.name, read_ms, at_ms)

    def _happen(self, events: Sequence[Event], at_ms: int) -> None:
        """All that happens at one instant, then one reading of each machine that it touched."""
        for event in events:
            if isinstance(event, OutageBegan) and event.outage.name in self._machines:
                self._truth.power_fails(event.outage.name, at_ms)
        touched: set[str] = set()
        booting: list[str] = []
        for event in events:
            self._truth.see(event)
            if isinstance(event, Started):
                for pod in pods_of(event, self._mig_uuids, self._queued, self._machines):
                    self._machines[pod.node].start_pod(at_ms, pod)
                    touched.add(pod.node)
            elif isinstance(event, Stopped):
                for node in pod_nodes(event):
                    if node in self._machines:
                        self._machines[node].stop_pod(at_ms, pod_uid(event.job, event.attempt, node))
                        touched.add(node)
            elif event.outage.name in self._of_gpu:
                touched.add(self._gpu_outage(event))
            elif event.outage.name in self._machines:
                if isinstance(event, OutageEnded):
                    booting.append(event.outage.name)
                else:
                    self._machines[event.outage.name].kill_agent()
        for name in booting:
            self._machines[name].boot()
            self._truth.agent_read(name, at_ms)
        for name in self._machines:
            if name in touched:
                self._read(name)

    def _gpu_outage(self, event: OutageBegan | OutageEnded) -> str:
        """The machine it happened on."""
        machine = self._machines[self._of_gpu[event.outage.name]]
        act = machine.lose_gpu if isinstance(event, OutageBegan) else machine.recover_gpu
        act(event.at_ms, event.outage.name)
        return machine.name


def _when(event: Event) -> int:
    return event.at_ms
