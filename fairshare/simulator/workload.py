"""Jobs in columns: what a replay of weeks needs, and nothing else. Frozen; times in whole seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.units import MS_PER_SECOND
from fairshare.simulator.jobs import Job


@dataclass(frozen=True, slots=True)
class Workload:
    """Gangs by (submit_s, id), one list per column. queue: index into `queues`. left_out: jobs that no
    policy could run (larger than the cluster, or of a queue that has no share)."""

    queues: tuple[str, ...]
    submit_s: Sequence[int]
    gpus: Sequence[int]
    duration_s: Sequence[int]
    queue: Sequence[int]
    left_out: int = 0

    @property
    def gpu_hours(self) -> float:
        """All work offered."""
        return sum(g * d for g, d in zip(self.gpus, self.duration_s, strict=True)) / 3600

    def between(self, start_s: int, end_s: int) -> Workload:
        """Jobs submitted in [start_s, end_s), counted from `start_s`."""
        kept = [i for i, at in enumerate(self.submit_s) if start_s <= at < end_s]
        return Workload(
            self.queues,
            [self.submit_s[i] - start_s for i in kept],
            [self.gpus[i] for i in kept],
            [self.duration_s[i] for i in kept],
            [self.queue[i] for i in kept],
            self.left_out,
        )

    def fitting(self, capacity: int) -> Workload:
        """Without the gangs that are larger than the cluster; they are counted."""
        kept = [i for i, gang in enumerate(self.gpus) if gang <= capacity]
        if len(kept) == len(self.gpus):
            return self
        return Workload(
            self.queues,
            [self.submit_s[i] for i in kept],
            [self.gpus[i] for i in kept],
            [self.duration_s[i] for i in kept],
            [self.queue[i] for i in kept],
            self.left_out + len(self.gpus) - len(kept),
        )


def columns(jobs: Iterable[Job], queues: Sequence[str]) -> Workload:
    """Jobs of these queues; of others they are left out and counted. Part seconds of a run count whole."""
    index = {name: i for i, name in enumerate(queues)}
    ordered = sorted(jobs, key=lambda job: (job.submit_ms, job.id))
    kept = [job for job in ordered if job.queue in index]
    return Workload(
        tuple(queues),
        [job.submit_ms // MS_PER_SECOND for job in kept],
        [job.gpus for job in kept],
        [-(-job.duration_ms // MS_PER_SECOND) for job in kept],
        [index[job.queue] for job in kept],
        len(ordered) - len(kept),
    )


def capacity_for(workload: Workload, hours: float, load: float) -> int:
    """GPUs at which the offered work is `load` times what they can do in `hours`; a multiple of 8."""
    return max(8, round(workload.gpu_hours / (hours * load) / 8) * 8)
