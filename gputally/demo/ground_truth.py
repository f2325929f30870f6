"""Computes the true GPU time of the simulation by account and team, to the microsecond.

The demo compares the ledger with these totals. The module uses neither the agents' rows nor the ledger. It follows the
scheduler's events and the spans that no agent could meter (a node without power, a killed agent). It shares one rule
with the agents: the microseconds of a GPU are divided among its MIG instances by largest remainder over each closed
span. A span ends at every multiple of the interval and at every change of a holder on the GPU. All figures are
integers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from fairshare.simulator.simulation_model import WHOLE, Event, GpuSpec, OutageBegan, SimulatedNodeSpec, Started, Stopped
from gputally.base.apportionment import apportion
from gputally.base.units import US_PER_MS
from gputally.demo.cluster_and_workload import SHARED, compute_of

Condition = Literal["ok", "lost", "off", "blind"]
HELD = ("busy", "allocated_idle", "allocated_unknown")
TRUE_ACCOUNTS = (*HELD, "unallocated", "unmetered", "down")


@dataclass(frozen=True, slots=True)
class _PodHold:
    """A pod that holds a slot. permille: its utilisation."""

    job: str
    attempt: int
    team: str
    permille: int


@dataclass(slots=True)
class _Gpu:
    """One GPU, its condition, and the holders of its slots.

    since_ms: the time up to which the GPU is booked.
    weights: the relative size of each slot; weight_sum: their sum.
    before: the holders when the agent was killed."""

    since_ms: int
    weights: tuple[int, ...]
    weight_sum: int
    slots: list[_PodHold | None]
    condition: Condition = "ok"
    before: list[_PodHold | None] = field(default_factory=list)


@dataclass(slots=True)
class TrueTotals:
    """True GPU-microseconds by account, and by team and account."""

    accounts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TRUE_ACCOUNTS, 0))
    teams: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, account: str, amount_us: int, team: str = "") -> None:
        """Add time to an account. Held time needs a team."""
        self.accounts[account] += amount_us
        if team:
            self.teams.setdefault(team, dict.fromkeys(HELD, 0))[account] += amount_us

    def merge(self, other: TrueTotals) -> None:
        """Add the totals of other GPUs."""
        for account, amount in other.accounts.items():
            self.accounts[account] += amount
        for team, accounts in other.teams.items():
            mine = self.teams.setdefault(team, dict.fromkeys(HELD, 0))
            for account, amount in accounts.items():
                mine[account] += amount

    def held_us(self, team: str) -> int:
        """Return the time that a team held."""
        return sum(self.teams.get(team, {}).values())


class GroundTruth:
    """Follows the GPUs of some nodes. Its owner reports the scheduler's events in order, and the spans that no agent
    could meter."""

    def __init__(self, nodes: Sequence[SimulatedNodeSpec], start_ms: int, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self._nodes = {node.name: [gpu.uuid for gpu in node.gpus] for node in nodes}
        self._gpus = {gpu.uuid: _new_gpu(gpu, start_ms) for node in nodes for gpu in node.gpus}
        self._read_ms = dict.fromkeys(self._nodes, start_ms)
        self.totals = TrueTotals()

    def apply(self, event: Event) -> None:
        """Apply an event at `event.at_ms`."""
        at_ms = event.at_ms
        if isinstance(event, Started | Stopped):
            job = event.job
            hold = _PodHold(job.id, event.attempt, job.queue, job.utilisation_permille)
            for slot in event.slots:
                gpu = self._gpus.get(slot.gpu)
                if gpu is not None:
                    self._book_until(gpu, at_ms)
                    gpu.slots[slot.index] = hold if isinstance(event, Started) else None
            return
        condition: Condition = "ok"
        if isinstance(event, OutageBegan):
            condition = "lost" if event.outage.target == "gpu" else "off"
        names = (event.outage.name,) if event.outage.target == "gpu" else self._nodes.get(event.outage.name, ())
        for uuid in names:
            gpu = self._gpus.get(uuid)
            if gpu is not None:
                self._book_until(gpu, at_ms)
                gpu.condition = condition

    def agent_read(self, node: str, at_ms: int) -> None:
        """Record that the agent took a reading, which closes every interval that has ended."""
        self._read_ms[node] = at_ms

    def power_fails(self, node: str, at_ms: int) -> None:
        """Record a power failure, before the other events of the same time. The agent loses the intervals that it has
        not closed."""
        for uuid in self._nodes[node]:
            gpu = self._gpus[uuid]
            closed_ms = self._closed_by(gpu, node)
            self._book_until(gpu, closed_ms)
            self.totals.add("unmetered", (at_ms - closed_ms) * US_PER_MS)
            gpu.since_ms = at_ms

    def gpu_fails(self, uuid: str, read_ms: int, at_ms: int) -> None:
        """Record the loss of a GPU, before the other events of the same time. Its use since the last reading is
        unknown."""
        gpu = self._gpus[uuid]
        self._book_until(gpu, read_ms)
        for hold, share in zip(gpu.slots, self._shares(gpu, read_ms, at_ms), strict=True):
            if hold is None:
                self.totals.add("unallocated", share)
            else:
                self.totals.add("allocated_unknown", share, hold.team)
        gpu.since_ms = at_ms

    def agent_dies(self, node: str) -> None:
        """Record that the agent is killed. It loses its counters, and keeps the intervals that it has closed."""
        for uuid in self._nodes[node]:
            gpu = self._gpus[uuid]
            self._book_until(gpu, self._closed_by(gpu, node))
            gpu.before = list(gpu.slots)
            gpu.condition = "blind"

    def agent_returns(self, node: str, at_ms: int) -> None:
        """Record that the agent is back. It knows which pods still hold their GPUs, but not their use meanwhile."""
        for uuid in self._nodes[node]:
            gpu = self._gpus[uuid]
            for start, end in pairwise(self._instants(gpu.since_ms, at_ms)):
                for share, before, now in zip(self._shares(gpu, start, end), gpu.before, gpu.slots, strict=True):
                    if before is not None and before == now:
                        self.totals.add("allocated_unknown", share, before.team)
                    else:
                        self.totals.add("unmetered", share)
            gpu.since_ms = at_ms
            gpu.condition = "ok"

    def finish(self, end_ms: int) -> None:
        """Book all GPUs up to the end."""
        for gpu in self._gpus.values():
            self._book_until(gpu, end_ms)

    def _book_until(self, gpu: _Gpu, at_ms: int) -> None:
        if gpu.condition == "blind" or at_ms == gpu.since_ms:
            return
        if gpu.condition != "ok":
            self.totals.add("down", (at_ms - gpu.since_ms) * US_PER_MS)
        else:
            for start, end in self._closed_spans(gpu, at_ms):
                for i, share in enumerate(self._shares(gpu, start, end)):
                    hold = gpu.slots[i]
                    if hold is None:
                        self.totals.add("unallocated", share)
                    else:
                        busy = (end - start) * hold.permille * gpu.weights[i] // gpu.weight_sum
                        self.totals.add("busy", busy, hold.team)
                        self.totals.add("allocated_idle", share - busy, hold.team)
        gpu.since_ms = at_ms

    def _closed_spans(self, gpu: _Gpu, end_ms: int) -> Iterable[tuple[int, int]]:
        """Split the span that is not booked as an agent does. A GPU that divides into whole microseconds needs no
        split."""
        if US_PER_MS % gpu.weight_sum == 0:
            return ((gpu.since_ms, end_ms),)
        return pairwise(self._instants(gpu.since_ms, end_ms))

    def _shares(self, gpu: _Gpu, start_ms: int, end_ms: int) -> Sequence[int]:
        return apportion((end_ms - start_ms) * US_PER_MS, gpu.weights)

    def _instants(self, start_ms: int, end_ms: int) -> Iterator[int]:
        """Yield start, every multiple of the interval in between, and end."""
        yield start_ms
        yield from range((start_ms // self._interval_ms + 1) * self._interval_ms, end_ms, self._interval_ms)
        yield end_ms

    def _closed_by(self, gpu: _Gpu, node: str) -> int:
        """Return the time up to which the node's agent has closed the GPU's intervals."""
        return max(gpu.since_ms, self._read_ms[node] // self._interval_ms * self._interval_ms)


def _new_gpu(gpu: GpuSpec, start_ms: int) -> _Gpu:
    if gpu.shapes == (WHOLE,):
        weights: tuple[int, ...] = (1,)
    elif SHARED in gpu.shapes:
        weights = (1,) * len(gpu.shapes)
    else:
        weights = tuple(compute_of(shape) for shape in gpu.shapes)
    return _Gpu(start_ms, weights, sum(weights), [None] * len(weights))
