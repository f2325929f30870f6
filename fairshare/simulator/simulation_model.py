"""Defines the clusters, jobs, events and results of a simulation.

A slot is what one member of a gang holds: a whole GPU, one MIG instance, or one replica of a time-sliced GPU. Slots of
one shape, GPU model and node pool are interchangeable except for their node."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

WHOLE = "gpu"
"""The shape of a whole GPU. Fair shares and reclaim concern only slots of this shape."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One physical GPU. shapes: the shape of each slot: `(WHOLE,)`, the profiles of its MIG instances, or N times the
    name of a time-sliced replica."""

    uuid: str
    model: str
    shapes: tuple[str, ...] = (WHOLE,)


@dataclass(frozen=True, slots=True)
class SimulatedNodeSpec:
    """One node. pool: the name of its node pool, such as `spot`, to which jobs may be restricted."""

    name: str
    gpus: tuple[GpuSpec, ...]
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Flavour:
    """The properties that make slots interchangeable. All slots of a gang have the same flavour."""

    shape: str
    model: str
    pool: str


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot. gpu: the GPU's uuid. index: the slot's position in `GpuSpec.shapes`."""

    node: str
    gpu: str
    index: int
    flavour: Flavour


@dataclass(frozen=True, slots=True)
class Outage:
    """A span in which a node, or one GPU, cannot be used. end_ms: None if the outage does not end.

    The jobs on the node or GPU stop at `start_ms` as after a crash, and keep the work up to their last checkpoint."""

    target: Literal["node", "gpu"]
    name: str
    start_ms: int
    end_ms: int | None
    reason: str


def slots_of(node: SimulatedNodeSpec) -> tuple[Slot, ...]:
    """Return all slots of a node, by GPU and index."""
    return tuple(
        Slot(node.name, gpu.uuid, index, Flavour(shape, gpu.model, node.pool))
        for gpu in node.gpus
        for index, shape in enumerate(gpu.shapes)
    )


JobKind = Literal["training", "notebook", "short", "inference"]


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A gang that needs `gpus` slots of one shape at the same time for `duration_ms` of work.

    queue: a leaf queue. A job of a queue that the engine does not know belongs to another scheduler: it starts as soon
        as it fits, and takes no part in the division of shares.
    models, pools: the GPU models and node pools on which it may run; empty: any.
    utilisation_permille: how busy each of its slots is, 0..1000.
    preemptible: False: it runs only within its queue's deserved quota and is never reclaimed."""

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
    """The settings of the scheduler. The defaults are the preemption model with which policies are evaluated.

    scan_depth: the number of waiting jobs of a queue that one cycle tries, oldest first.
    checkpoint_ms: the time between two checkpoints; a stopped job loses the work since the last one.
    restart_ms: the extra run time of every start except the first.
    min_runtime_ms: the run time before which a job is not reclaimed.
    cycle_ms: the time between two scheduling cycles.
    reclaim: queues below their share take GPUs back.
    one_line: all queues share one first-in-first-out line, without reclaim.
    backfill: EASY backfilling instead of starting every job that fits, without reclaim and limits.
    settle: True: an extra cycle at once gives out the GPUs that a reclaim freed and its gang does not need. False: the
        present cycle goes on, but only for queues that may reclaim; the other queues wait for the next event."""

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
class JobOutcome:
    """The result of one job. A time of None means that the event has not happened.

    evictions: the number of stops by reclaim.
    crashes: the number of stops by outages.
    lost_gpu_ms: the work that stops destroyed, and the time of restarts.
    rejected: the job can never start: even in an empty cluster no flavour that it may use has enough slots, or the
        limits and quotas of its queues do not admit it."""

    job: SimulatedJob
    first_start_ms: int | None = None
    finish_ms: int | None = None
    evictions: int = 0
    crashes: int = 0
    lost_gpu_ms: int = 0
    rejected: bool = False


StopReason = Literal["finished", "reclaimed", "outage"]


@dataclass(frozen=True, slots=True)
class Started:
    """The job holds its slots from now on.

    attempt: the number of its starts so far.
    queued_ms: since when it waited for this start: its submission, or the stop before."""

    at_ms: int
    job: SimulatedJob
    slots: tuple[Slot, ...]
    attempt: int
    queued_ms: int


@dataclass(frozen=True, slots=True)
class QueueAtReclaim:
    """A queue as the scheduler compared it with another one: the GPUs that it holds, its quota and its fair share."""

    name: str
    held: float
    quota: float
    share: float
    priority: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The job no longer holds its slots.

    for_queue, for_job: the queue and the job for which it was reclaimed; "" for other reasons.
    compared: of a reclaim, the queue that lost GPUs and the one that claimed them."""

    at_ms: int
    job: SimulatedJob
    slots: tuple[Slot, ...]
    attempt: int
    reason: StopReason
    for_queue: str = ""
    for_job: str = ""
    compared: tuple[QueueAtReclaim, ...] = ()


@dataclass(frozen=True, slots=True)
class OutageBegan:
    """A node or a GPU cannot be used from now on."""

    at_ms: int
    outage: Outage


@dataclass(frozen=True, slots=True)
class OutageEnded:
    """A node or a GPU can be used again."""

    at_ms: int
    outage: Outage


Event = Started | Stopped | OutageBegan | OutageEnded


@dataclass(frozen=True, slots=True)
class Workload:
    """The jobs of a replay as columns, ordered by (submit_s, id).

    queue: indices into `queues`.
    left_out: the number of jobs that no policy could run (larger than the cluster, or of a queue without a share)."""

    queues: tuple[str, ...]
    submit_s: Sequence[int]
    gpus: Sequence[int]
    duration_s: Sequence[int]
    queue: Sequence[int]
    left_out: int = 0

    @property
    def gpu_hours(self) -> float:
        """Return the GPU-hours that all jobs need together."""
        return sum(g * d for g, d in zip(self.gpus, self.duration_s, strict=True)) / 3600

    def between(self, start_s: int, end_s: int) -> Workload:
        """Return the jobs submitted in [start_s, end_s), with submission times counted from `start_s`."""
        rows = ((at - start_s, *job) for at, *job in self.rows() if start_s <= at < end_s)
        return workload_of_rows(self.queues, rows, self.left_out)

    def fitting(self, capacity: int) -> Workload:
        """Return the workload without gangs that are larger than the cluster, which `left_out` counts."""
        fitting = workload_of_rows(self.queues, (row for row in self.rows() if row[1] <= capacity))
        return replace(fitting, left_out=self.left_out + len(self.gpus) - len(fitting.gpus))

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Return the jobs as rows (submit_s, gpus, duration_s, index of the queue)."""
        return zip(self.submit_s, self.gpus, self.duration_s, self.queue, strict=True)


def workload_of_rows(queues: Sequence[str], rows: Iterable[Sequence[int]], left_out: int = 0) -> Workload:
    """Return the workload of rows (submit_s, gpus, duration_s, index of the queue) in the order of their submission."""
    rows = list(rows)
    submit_s, gpus, duration_s, queue = ([row[column] for row in rows] for column in range(4))
    return Workload(tuple(queues), submit_s, gpus, duration_s, queue, left_out)


def workload_of(jobs: Iterable[SimulatedJob], queues: Sequence[str]) -> Workload:
    """Return the workload of the jobs of these queues. `left_out` counts the jobs of other queues.

    A started second of a run counts as a whole second."""
    index = {name: i for i, name in enumerate(queues)}
    ordered = sorted(jobs, key=lambda job: (job.submit_ms, job.id))
    rows = [
        (job.submit_ms // MS_PER_SECOND, job.gpus, -(-job.duration_ms // MS_PER_SECOND), index[job.queue])
        for job in ordered
        if job.queue in index
    ]
    return workload_of_rows(queues, rows, len(ordered) - len(rows))


TICK_S = 60
"""Seconds of a scheduling cycle."""
CONTROL_S = 600
"""Seconds of a control period, after which the controller may change weights."""
SNAPSHOT_S = 6 * 3600
"""Seconds between two snapshots of the unfinished jobs."""


@dataclass(frozen=True, slots=True)
class ReplayPool:
    """The cluster of a replay: equal GPUs in one pool, and the shares of the queues.

    deserved, weights, limits: one per queue, in the workload's order. A limit of None means no limit.
    rules: the scheduler's settings. The replay sets `cycle_ms` to its tick and `settle` to False."""

    capacity: int
    deserved: Sequence[float]
    weights: Sequence[float]
    limits: Sequence[int | None] = ()
    rules: Rules = Rules()


@dataclass(slots=True)
class ControllerView:
    """The data that a controller sees in every control period. The lists have one entry per queue.

    used: GPU-seconds since the start.
    held, asked: the GPUs that the queue holds and requests.
    gang: the GPUs of the smallest gang that waits within the scan depth; 0 if none waits.
    reclaims: the number of gangs stopped for the queue since the start."""

    now_s: int
    capacity: int
    used: list[int]
    held: list[int]
    asked: list[float]
    gang: list[int]
    reclaims: list[int]


SimulatedController = Callable[[ControllerView], Sequence[float] | None]
"""Returns the weights of the queues from now on; None: no change."""
Dividing = Callable[[ControllerView, Sequence[float]], list[float]]
"""Returns the fair shares of the queues for a view and the weights in force."""
Ranking = Callable[[ControllerView], Sequence[float]]
"""Returns the rank of every queue. The lowest rank is served first, where fair shares do not decide the order."""


@dataclass(slots=True)
class ReplayRecord:
    """The result of a replay.

    used, held, weights, shares: one list of queues per control period; `used` is GPU-seconds since the start.
    backlog: per snapshot, the numbers of the submitted and unfinished jobs, and their seconds of work left.
    started_s, finished_s: one per job; -1 if it did not start or finish.
    evicted: for each job, how often it was evicted."""

    workload: Workload
    pool: ReplayPool
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
