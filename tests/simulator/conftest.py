"""Builders of small clusters and workloads, and a check of the simulation's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fairshare.core.queues_and_weights import QueueClaim
from fairshare.simulator.simulation_model import (
    Event,
    GpuSpec,
    OutageBegan,
    OutageEnded,
    SimulatedJob,
    SimulatedNodeSpec,
    Started,
    Stopped,
    Workload,
)
from gputally.base.units import MS_PER_MINUTE

MINUTE = MS_PER_MINUTE


def fleet(nodes: int, gpus: int = 8, model: str = "H100") -> list[SimulatedNodeSpec]:
    """Build `nodes` equal nodes of whole GPUs."""
    return [
        SimulatedNodeSpec(f"n{n}", tuple(GpuSpec(f"GPU-{n}-{i}", model) for i in range(gpus))) for n in range(nodes)
    ]


def job(name: str, queue: str = "a", gpus: int = 1, minutes: float = 60, at: float = 0, **more: object) -> SimulatedJob:
    return SimulatedJob(name, queue, round(at * MINUTE), gpus, round(minutes * MINUTE), **more)  # type: ignore[arg-type]


def queue(name: str, deserved: float = 0.0, weight: float = 1.0, limit: float = -1.0, **more: object) -> QueueClaim:
    return QueueClaim(name, 0.0, deserved=deserved, weight=weight, limit=limit, **more)  # type: ignore[arg-type]


def work_of(rows: Sequence[tuple[int, int, int, int]], queues: tuple[str, ...] = ("a", "b")) -> Workload:
    """Build a workload. rows: submission in seconds, GPUs, duration in seconds, number of the queue."""
    ordered = sorted(rows)
    return Workload(queues, *([row[i] for row in ordered] for i in range(4)))


@dataclass
class Watcher:
    """Follows the events as a kubelet would, and fails on an impossible one."""

    nodes: Sequence[SimulatedNodeSpec]
    holders: dict[tuple[str, int], str] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    gpu_ms: dict[str, int] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)
    last_ms: int = -1

    def see(self, event: Event) -> None:
        assert event.at_ms >= self.last_ms, "events are in order"
        self.last_ms = event.at_ms
        match event:
            case Started():
                assert len(event.slots) == event.job.gpus, "a gang is all or nothing"
                assert len({slot.flavour for slot in event.slots}) == 1
                for slot in event.slots:
                    assert (slot.gpu, slot.index) not in self.holders, "a slot has one holder"
                    assert not self.down.get(slot.gpu), "nothing starts on a GPU that is down"
                    self.holders[slot.gpu, slot.index] = event.job.id
                self.since[event.job.id] = event.at_ms
            case Stopped():
                for slot in event.slots:
                    assert self.holders.pop((slot.gpu, slot.index)) == event.job.id
                held = (event.at_ms - self.since.pop(event.job.id)) * event.job.gpus
                self.gpu_ms[event.job.queue] = self.gpu_ms.get(event.job.queue, 0) + held
            case OutageBegan() | OutageEnded():
                step = 1 if isinstance(event, OutageBegan) else -1
                for node in self.nodes:
                    for gpu in node.gpus:
                        if event.outage.name in (node.name, gpu.uuid):
                            self.down[gpu.uuid] = self.down.get(gpu.uuid, 0) + step
                            assert not any(g == gpu.uuid for g, _ in self.holders), "an outage stops its jobs"

    def see_all(self, events: Sequence[Event]) -> Watcher:
        for event in events:
            self.see(event)
        return self
