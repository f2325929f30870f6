"""Jobs, the rules they run under, and what became of them. Frozen data; times in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agent.units import MS_PER_MINUTE
from fairshare.simulator.cluster import WHOLE

JobKind = Literal["training", "notebook", "short", "inference"]


@dataclass(frozen=True, slots=True)
class Job:
    """A gang of `gpus` slots of one shape, needed all at once for `duration_ms` of work.

    queue: leaf queue; a name the engine does not know is a job of another scheduler, placed as it
        comes and outside the division. models, pools: where it may run; empty is anywhere.
    utilisation_permille: how busy each of its slots is, of the slot, 0..1000.
    preemptible: False runs only inside its queue's deserved quota and is never reclaimed.
    """

    id: str
    queue: str
    submit_ms: int
    gpus: int
    duration_ms: int
    kind: JobKind = "training"
    shape: str = WHOLE
    models: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    utilisation_permille: int = 1000
    preemptible: bool = True

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.duration_ms < 1 or not 0 <= self.utilisation_permille <= 1000:
            raise ValueError(f"job {self.id}: needs gpus >= 1, duration_ms >= 1, utilisation_permille 0..1000")


@dataclass(frozen=True, slots=True)
class Rules:
    """How the scheduler works. Defaults: the preemption model used to evaluate fair-share policies.

    scan_depth: how many waiting jobs of a queue are tried in one cycle, oldest first.
    checkpoint_ms: work since the last multiple is lost when a job is stopped.
    restart_ms: extra run time of every start but the first.
    min_runtime_ms: a job is not reclaimed before it has run that long.
    cycle_ms: scheduling happens at multiples of this.
    """

    scan_depth: int = 32
    checkpoint_ms: int = 30 * MS_PER_MINUTE
    restart_ms: int = 2 * MS_PER_MINUTE
    min_runtime_ms: int = 10 * MS_PER_MINUTE
    cycle_ms: int = 1_000
    reclaim: bool = True


@dataclass(slots=True)
class Outcome:
    """What became of one job. None: has not happened. lost_gpu_ms: work done and lost by stops,
    restarts included. evictions: stops by reclaim; crashes: stops by outages."""

    job: Job
    first_start_ms: int | None = None
    finish_ms: int | None = None
    evictions: int = 0
    crashes: int = 0
    lost_gpu_ms: int = 0
    rejected: bool = False
    """No flavour it may use has that many slots even when empty."""
