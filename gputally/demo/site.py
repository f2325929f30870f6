"""The simulated site: eight machines that follow the scheduler's events, and the truth beside them.

Every event is applied at its exact instant; the agents of the machines it touches read at that instant,
and all agents read at least every second interval. An agent sees only what its own machine shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from random import Random

from agent.clock import VirtualClock
from fairshare.simulator.cluster import NodeSpec, Slot
from fairshare.simulator.events import Event, OutageBegan, OutageEnded, Started, Stopped
from gputally.demo.faults import FaultPlan
from gputally.demo.inventory import SimulatedInventory
from gputally.demo.machine import Machine
from gputally.demo.pods import pod_nodes, pod_uid, pods_of
from gputally.demo.truth import Truth

LAST_READING_MS = 2_000


class Site:
    """Machines and truth under one clock, which this moves; `inventory` hears of nodes that go and come."""

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        inventory: SimulatedInventory,
        queues: frozenset[str],
        folder: Path,
        url: str,
        interval_s: int,
        clock: VirtualClock,
        faults: FaultPlan,
        seed: int,
    ) -> None:
        self._clock = clock
        self._faults = faults
        self._queued = queues
        self._sample_ms = 2 * interval_s * 1000
        self._inventory = inventory
        self.truth = Truth(nodes, clock.wall_ms(), interval_s * 1000)
        self.machines: dict[str, Machine] = {}
        for node in nodes:
            random = Random(f"{seed}/{node.name}")  # noqa: S311 - repeatable is what is wanted here
            self.machines[node.name] = Machine(
                node, folder, url, interval_s, clock, randbits=random.getrandbits, jitter=random.random
            )
        self._of_gpu = {gpu.uuid: node.name for node in nodes for gpu in node.gpus}
        self._mig_uuids: dict[Slot, str] = {}
        for machine in self.machines.values():
            self._mig_uuids |= machine.mig_uuids

    @property
    def closed(self) -> int:
        """Intervals closed by all agents together."""
        return sum(machine.closed for machine in self.machines.values())

    def begin(self, events: Sequence[Event]) -> None:
        """Switch everything on, after what happens at the very start: an agent sees an instant once."""
        self._happen(events, self._clock.wall_ms())
        for machine in self.machines.values():
            machine.boot()

    def follow(self, events: Iterable[Event], until_ms: int) -> None:
        """Let everything happen up to `until_ms`, readings included."""
        for at_ms, group in groupby(events, _when):
            happening = list(group)
            self._read_before_losses(happening, at_ms)
            self._pass_time(at_ms - 1)
            self._move(at_ms)
            self._happen(happening, at_ms)
            if at_ms % self._sample_ms == 0:
                self._read_all()
        self._pass_time(until_ms)

    def close(self) -> None:
        """Shut the agents down in good order."""
        for machine in self.machines.values():
            machine.close()

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
        for name in self.machines:
            self._read(name)

    def _read(self, name: str) -> None:
        machine = self.machines[name]
        if machine.running:
            machine.sample()
            self.truth.agent_read(name, self._clock.wall_ms())

    def _kill(self) -> None:
        machine = self.machines[self._faults.killed_node]
        if machine.running:
            self.truth.agent_dies(machine.name)
            machine.kill_agent()

    def _return(self) -> None:
        machine = self.machines[self._faults.killed_node]
        if not machine.running:
            machine.start_agent()
            self.truth.agent_returns(machine.name, self._clock.wall_ms())

    def _read_before_losses(self, events: Sequence[Event], at_ms: int) -> None:
        """Readings are every few seconds in reality: the last before a GPU falls off the bus is that close."""
        for event in events:
            if isinstance(event, OutageBegan) and event.outage.target == "gpu":
                read_ms = max(self._clock.wall_ms(), at_ms - LAST_READING_MS)
                self._pass_time(read_ms)
                self._move(read_ms)
                self._read(self._of_gpu[event.outage.name])
                self.truth.gpu_fails(event.outage.name, read_ms, at_ms)

    def _happen(self, events: Sequence[Event], at_ms: int) -> None:
        """All that happens at one instant, then one reading of each machine that it touched."""
        for event in events:
            if isinstance(event, OutageBegan) and event.outage.target == "node":
                self.truth.power_fails(event.outage.name, at_ms)
        touched: set[str] = set()
        booting: list[str] = []
        for event in events:
            self.truth.see(event)
            if isinstance(event, Started):
                for pod in pods_of(event, self._mig_uuids, self._queued):
                    self.machines[pod.node].start_pod(at_ms, pod)
                    touched.add(pod.node)
            elif isinstance(event, Stopped):
                for node in pod_nodes(event):
                    self.machines[node].stop_pod(at_ms, pod_uid(event.job, event.attempt, node))
                    touched.add(node)
            elif isinstance(event, OutageEnded) and event.outage.target == "node":
                booting.append(event.outage.name)
            else:
                touched.add(self._outage(event))
        for name in booting:
            self._inventory.node_up(name, at_ms)
            self.machines[name].boot()
            self.truth.agent_read(name, at_ms)
        for name in self.machines:
            if name in touched:
                self._read(name)

    def _outage(self, event: OutageBegan | OutageEnded) -> str:
        name, at_ms = event.outage.name, event.at_ms
        began = isinstance(event, OutageBegan)
        if event.outage.target == "gpu":
            machine = self.machines[self._of_gpu[name]]
            (machine.lose_gpu if began else machine.recover_gpu)(at_ms, name)
            return machine.name
        self.machines[name].kill_agent()
        self._inventory.node_down(name, at_ms, event.outage.reason)
        return name


def _when(event: Event) -> int:
    return event.at_ms
