"""Records what really happened in the simulation, to the microsecond.

The ledger's accounts are compared with these. This module uses neither the agents' rows nor the ledger: it follows the
scheduler's events and the spans that could not be metered (a node that lost power, an agent that was killed). It shares
one rule with the agents: how microseconds of a GPU are divided among MIG instances, by largest remainder over each
closed span. Spans end at every multiple of the interval and at every change of holders on that GPU. All figures are
integers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from fairshare.simulator.simulation_model import WHOLE, Event, GpuSpec, NodeSpec, OutageBegan, Started, Stopped
from gputally.base.units import US_PER_MS, apportion
from gputally.demo.cluster_and_workload import SHARED, compute_of

Condition = Literal["ok", "lost", "off", "blind"]
HELD = ("busy", "allocated_idle", "allocated_unknown")
TRUE_ACCOUNTS = (*HELD, "unallocated", "unmetered", "down")


@dataclass(frozen=True, slots=True)
class _PodHold:
    """One pod's hold on a slot."""

    job: str
    attempt: int
    team: str
    permille: int


@dataclass(slots=True)
class _Gpu:
    """One GPU: the holders of its slots and since when, and its condition."""

    spec: GpuSpec
    since_ms: int
    weights: tuple[int, ...]
    per: int
    slots: list[_PodHold | None]
    condition: Condition = "ok"
    before: list[_PodHold | None] = field(default_factory=list)


@dataclass(slots=True)
class TrueTotals:
    """GPU-microseconds by account, and by team and account."""

    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TRUE_ACCOUNTS, 0))
    teams: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, account: str, amount_us: int, team: str = "") -> None:
        """Add time to an account; held time needs a team."""
        self.totals[account] += amount_us
        if team:
            self.teams.setdefault(team, dict.fromkeys(HELD, 0))[account] += amount_us

    def merge(self, other: TrueTotals) -> None:
        """Add the totals of other GPUs."""
        for account, amount in other.totals.items():
            self.totals[account] += amount
        for team, accounts in other.teams.items():
            mine = self.teams.setdefault(team, dict.fromkeys(HELD, 0))
            for account, amount in accounts.items():
                mine[account] += amount

    def held_us(self, team: str) -> int:
        """Return the time that a team held."""
        return sum(self.teams.get(team, {}).values())


class GroundTruth:
    """The ground truth. Give it the engine's events in order, and the spans that could not be metered.

    It follows only the GPUs of its own nodes."""

    def __init__(self, nodes: Sequence[NodeSpec], start_ms: int, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self._nodes = {node.name: [gpu.uuid for gpu in node.gpus] for node in nodes}
        self._gpus = {gpu.uuid: _fresh(gpu, start_ms) for node in nodes for gpu in node.gpus}
        self._read_ms = dict.fromkeys(self._nodes, start_ms)
        self.books = TrueTotals()

    def see(self, event: Event) -> None:
        """Apply an event at `event.at_ms`."""
        at_ms = event.at_ms
        if isinstance(event, Started | Stopped):
            job = event.job
            hold = _PodHold(job.id, event.attempt, job.queue, job.utilisation_permille)
            for slot in event.slots:
                gpu = self._gpus.get(slot.gpu)
                if gpu is not None:
                    self._settle(gpu, at_ms)
                    gpu.slots[slot.index] = hold if isinstance(event, Started) else None
            return
        condition: Condition = "ok"
        if isinstance(event, OutageBegan):
            condition = "lost" if event.outage.target == "gpu" else "off"
        names = (event.outage.name,) if event.outage.target == "gpu" else self._nodes.get(event.outage.name, ())
        for uuid in names:
            gpu = self._gpus.get(uuid)
            if gpu is not None:
                self._settle(gpu, at_ms)
                gpu.condition = condition

    def agent_read(self, node: str, at_ms: int) -> None:
        """Record that the agent took a reading, which closes every interval that had ended."""
        self._read_ms[node] = at_ms

    def power_fails(self, node: str, at_ms: int) -> None:
        """Record a power failure, before the other events of that time: intervals that the agent had not closed are
        lost."""
        for uuid in self._nodes[node]:
            gpu = self._gpus[uuid]
            closed_ms = self._closed_by(gpu, node)
            self._settle(gpu, closed_ms)
            self.books.add("unmetered", (at_ms - closed_ms) * US_PER_MS)
            gpu.since_ms = at_ms

    def gpu_fails(self, uuid: str, read_ms: int, at_ms: int) -> None:
        """Record the loss of a GPU, before the other events of that time: its use since the last reading is unknown."""
        gpu = self._gpus[uuid]
        self._settle(gpu, read_ms)
        for hold, share in zip(gpu.slots, self._shares(gpu, read_ms, at_ms), strict=True):
            if hold is None:
                self.books.add("unallocated", share)
            else:
                self.books.add("allocated_unknown", share, hold.team)
        gpu.since_ms = at_ms

    def agent_dies(self, node: str) -> None:
        """Record that the agent was killed: its counters are lost, and the intervals that it closed are kept."""
        for uuid in self._nodes[node]:
            gpu = self._gpus[uuid]
            self._settle(gpu, self._closed_by(gpu, node))
            gpu.before = list(gpu.slots)
            gpu.condition = "blind"

    def agent_returns(self, node: str, at_ms: int) -> None:
        """Record that the agent is back: it knows which pods still hold their GPUs, but neither their use nor idle time
        meanwhile."""
        for uuid in self._nodes[node]:
            gpu = self._gpus[uuid]
            for start, end in pairwise(self._instants(gpu.since_ms, at_ms)):
                for share, before, now in zip(self._shares(gpu, start, end), gpu.before, gpu.slots, strict=True):
                    if before is not None and before == now:
                        self.books.add("allocated_unknown", share, before.team)
                    else:
                        self.books.add("unmetered", share)
            gpu.since_ms = at_ms
            gpu.condition = "ok"

    def finish(self, end_ms: int) -> None:
        """Book everything up to the end."""
        for gpu in self._gpus.values():
            self._settle(gpu, end_ms)

    # --- internal ----------------------------------------------------------------------------

    def _settle(self, gpu: _Gpu, at_ms: int) -> None:
        if gpu.condition == "blind" or at_ms == gpu.since_ms:
            return
        if gpu.condition != "ok":
            self.books.add("down", (at_ms - gpu.since_ms) * US_PER_MS)
        else:
            for start, end in self._pieces(gpu, at_ms):
                for i, share in enumerate(self._shares(gpu, start, end)):
                    hold = gpu.slots[i]
                    if hold is None:
                        self.books.add("unallocated", share)
                    else:
                        busy = (end - start) * hold.permille * gpu.weights[i] // gpu.per
                        self.books.add("busy", busy, hold.team)
                        self.books.add("allocated_idle", share - busy, hold.team)
        gpu.since_ms = at_ms

    def _pieces(self, gpu: _Gpu, end_ms: int) -> Iterable[tuple[int, int]]:
        """Split a GPU's span where agents would; a GPU that divides into whole microseconds needs no split."""
        if US_PER_MS % gpu.per == 0:
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
        """Return the last time up to which the node's agent had closed this GPU's rows."""
        return max(gpu.since_ms, self._read_ms[node] // self._interval_ms * self._interval_ms)


def _fresh(gpu: GpuSpec, start_ms: int) -> _Gpu:
    if gpu.shapes == (WHOLE,):
        weights: tuple[int, ...] = (1,)
    elif SHARED in gpu.shapes:
        weights = (1,) * len(gpu.shapes)
    else:
        weights = tuple(compute_of(shape) for shape in gpu.shapes)
    return _Gpu(gpu, start_ms, weights, sum(weights), [None] * len(weights))
