"""Defines clusters, jobs, events and results of a simulation, as objects and as columns.

A slot is what one member of a gang holds: a whole GPU, one MIG instance, or one replica of a time-sliced GPU. Slots of
one shape, model and pool are interchangeable except for their place. All data is frozen."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

WHOLE = "gpu"
"""Shape of a slot that is a whole GPU. Only these are divided into fair shares and reclaimed."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One physical GPU and the shapes of its slots: `(WHOLE,)`, a MIG geometry, or N equal replicas."""

    uuid: str
    model: str
    shapes: tuple[str, ...] = (WHOLE,)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node. `pool` is what jobs may be restricted to, e.g. `spot`."""

    name: str
    gpus: tuple[GpuSpec, ...]
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Flavour:
    """The properties that make slots interchangeable. A gang runs on slots of one flavour."""

    shape: str
    model: str
    pool: str


@dataclass(frozen=True, slots=True)
class Slot:
    """One schedulable part of a GPU: `index` counts from 0 in the order of `GpuSpec.shapes`."""

    node: str
    gpu: str
    index: int
    flavour: Flavour


@dataclass(frozen=True, slots=True)
class Outage:
    """A span in which a node, or one GPU, cannot be used. end_ms: None if it does not end.

    Its jobs stop at `start_ms` as after a crash. They keep the work that they checkpointed."""

    target: Literal["node", "gpu"]
    name: str
    start_ms: int
    end_ms: int | None
    reason: str


def slots_of(node: NodeSpec) -> tuple[Slot, ...]:
    """Return all slots of a node, by GPU and index."""
    return tuple(
        Slot(node.name, gpu.uuid, index, Flavour(shape, gpu.model, node.pool))
        for gpu in node.gpus
        for index, shape in enumerate(gpu.shapes)
    )


JobKind = Literal["training", "notebook", "short", "inference"]


@dataclass(frozen=True, slots=True)
class Job:
    """A gang of `gpus` slots of one shape, needed all at once for `duration_ms` of work.

    queue: leaf queue. If the engine does not know the name, the job belongs to another scheduler: it starts as soon as
        it fits and takes no part in the division of shares.
    models, pools: where it may run; empty means anywhere.
    utilisation_permille: how busy each of its slots is, 0..1000.
    preemptible: if False, it runs only inside its queue's deserved quota and is never reclaimed."""

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
    """How the scheduler works. The defaults are the preemption model that is used to evaluate fair-share policies.

    scan_depth: how many waiting jobs of a queue are tried in one cycle, oldest first.
    checkpoint_ms: work since the last multiple is lost when a job is stopped.
    restart_ms: extra run time of every start but the first.
    min_runtime_ms: a job is not reclaimed before it has run that long.
    cycle_ms: scheduling happens at multiples of this.
    one_line: one line for all queues, first in first out across them, without reclaim.
    backfill: EASY backfilling instead of starting whatever fits, without reclaim and limits.
    settle: if True, GPUs that a reclaim freed and its gang does not need are given out by an extra scheduling cycle
    that follows at once. If False, the present cycle goes on, but only for queues that may reclaim; the others wait for
    the next event."""

    scan_depth: int = 32
    checkpoint_ms: int = 30 * MS_PER_MINUTE
    restart_ms: int = 2 * MS_PER_MINUTE
    min_runtime_ms: int = 10 * MS_PER_MINUTE
    cycle_ms: int = 1_000
    reclaim: bool = True
    one_line: bool = False
    backfill: bool = False
    settle: bool = True


@dataclass(slots=True)
class Outcome:
    """The result of one job. None means that the event has not happened.

    lost_gpu_ms: work done and lost by stops, restarts included.
    evictions: stops by reclaim.
    crashes: stops by outages."""

    job: Job
    first_start_ms: int | None = None
    finish_ms: int | None = None
    evictions: int = 0
    crashes: int = 0
    lost_gpu_ms: int = 0
    rejected: bool = False
    """Whether no flavour that it may use has that many slots even when empty."""


StopReason = Literal["finished", "reclaimed", "outage"]


@dataclass(frozen=True, slots=True)
class Started:
    """`job` holds `slots` from now on. attempt counts from 1."""

    at_ms: int
    job: Job
    slots: tuple[Slot, ...]
    attempt: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """`job` no longer holds its slots. for_queue: the queue for which it was reclaimed."""

    at_ms: int
    job: Job
    slots: tuple[Slot, ...]
    attempt: int
    reason: StopReason
    for_queue: str = ""


@dataclass(frozen=True, slots=True)
class OutageBegan:
    at_ms: int
    outage: Outage


@dataclass(frozen=True, slots=True)
class OutageEnded:
    at_ms: int
    outage: Outage


Event = Started | Stopped | OutageBegan | OutageEnded


@dataclass(frozen=True, slots=True)
class Workload:
    """Gangs by (submit_s, id), one list per column.

    queue: index into `queues`.
    left_out: number of jobs that no policy could run (larger than the cluster, or of a queue that has no share)."""

    queues: tuple[str, ...]
    submit_s: Sequence[int]
    gpus: Sequence[int]
    duration_s: Sequence[int]
    queue: Sequence[int]
    left_out: int = 0

    @property
    def gpu_hours(self) -> float:
        """Return the GPU-hours that all jobs together need."""
        return sum(g * d for g, d in zip(self.gpus, self.duration_s, strict=True)) / 3600

    def between(self, start_s: int, end_s: int) -> Workload:
        """Return the jobs submitted in [start_s, end_s), counted from `start_s`."""
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
        """Return the workload without gangs that are larger than the cluster. They are counted in `left_out`."""
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
    """Return the workload of these queues. Jobs of other queues are left out and counted.

    Parts of a second of a run count as a whole second."""
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
    """Return the GPUs at which the offered work is `load` times the work that they can do in `hours`; a multiple of
    8."""
    return max(8, round(workload.gpu_hours / (hours * load) / 8) * 8)


TICK_S = 60
CONTROL_S = 600
SNAPSHOT_S = 6 * 3600


@dataclass(frozen=True, slots=True)
class Pool:
    """The cluster and its shares.

    deserved, weights, limits: per queue, in the workload's order. A limit of None means no limit.
    rules: the scheduler's. Its cycle is the replay's tick, and a reclaim settles at the next event."""

    capacity: int
    deserved: Sequence[float]
    weights: Sequence[float]
    limits: Sequence[int | None] = ()
    rules: Rules = Rules()


@dataclass(slots=True)
class ControllerView:
    """The data that a controller sees every `CONTROL_S`.

    used: GPU-seconds since the start.
    gang: smallest that waits within the scan depth.
    reclaims: evictions made for the queue since the start."""

    now_s: int
    capacity: int
    used: list[int]
    held: list[int]
    asked: list[float]
    gang: list[int]
    reclaims: list[int]


class SimulatedController(Protocol):
    """A policy that sets weights during the replay."""

    def __call__(self, view: ControllerView) -> Sequence[float] | None:
        """Return the weights from now on; None leaves them."""
        ...


Dividing = Callable[[ControllerView, Sequence[float]], list[float]]
"""Fair shares from a view and the weights in force."""
Ranking = Callable[[ControllerView], Sequence[float]]
"""Queues in the order in which they are served, lowest first, where fair shares do not decide it."""


@dataclass(slots=True)
class Record:
    """The result of a replay.

    used, weights: [t] per control period.
    backlog: per snapshot, every job that is submitted and not finished, with its seconds of work left.
    started_s, finished_s: -1 for events that did not happen."""

    workload: Workload
    pool: Pool
    end_s: int
    used: list[list[int]] = field(default_factory=list)
    held: list[list[int]] = field(default_factory=list)
    weights: list[tuple[float, ...]] = field(default_factory=list)
    shares: list[tuple[float, ...]] = field(default_factory=list)
    backlog: list[tuple[array[int], array[int]]] = field(default_factory=list)
    started_s: list[int] = field(default_factory=list)
    finished_s: list[int] = field(default_factory=list)
    evictions: int = 0
    evicted: list[int] = field(default_factory=list)
    lost_gpu_s: int = 0
    delivered_gpu_s: int = 0
