"""Breaks idle time down into starting, gang waiting, running idle and unused guarantees.

A pod holds its GPU from the moment it is bound. Three figures add up to a line's `allocated_idle`:

- `starting`: idle time before the pod's first container runs.
- `gang_waiting`: idle time while the pod runs and at least one other pod of its gang, created before this one started,
  has not started yet. A pod that replaces another one later does not make the others wait.
- `running_idle`: its later idle time.

Unreported instants are not guessed. A pod without a start counts as `starting` only as long as it was seen bound and
not running.

`reserved_unused_us` is an additional figure on the line of the queue (or team) that owns the guarantee. It is the part
of an hour's unallocated time that its unused guarantee reserved, by the policy in force. All lines together reserve at
most the unallocated time of the hour.

The breakdown is computed only on request, because it needs more than the hourly sums. This module queries the ledger.
The rule for start-up is `phase_spans` below, and the rule for guarantees is in `quota_usage`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from accountant.billing.quota_usage import reserve, unused_by_queue
from accountant.core.periods import zone
from accountant.ledger.protocols import OF_HOLDERS, Questions
from accountant.wire.usage_models import Dimension, UsageLine

Where = Mapping[Dimension, Collection[str]]
Key = tuple[str, ...]


def broken_down(
    ledger: Questions,
    lines: Iterable[UsageLine],
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Where,
    timezone: str,
) -> list[UsageLine]:
    """Return the lines of `ledger.usage` for the same query with their breakdown, sorted by key.

    Further lines are added for queues that had a guarantee and held nothing."""
    known = {_key(by, line.key): line for line in lines}
    starting: dict[Key, int] = {}
    gang_waiting: dict[Key, int] = {}
    dimensions = tuple(dict.fromkeys((*by, *where)))
    for phase in ledger.idle_phases(start_ms, end_ms, dimensions, timezone):
        if _matches(phase.key, where):
            key = _key(by, phase.key)
            starting[key] = starting.get(key, 0) + phase.starting_us
            gang_waiting[key] = gang_waiting.get(key, 0) + phase.gang_waiting_us
    reserved: dict[Key, int] = {}
    for names, gpu_us in _reserved(ledger, start_ms, end_ms, dimensions, timezone):
        if _matches(names, where):
            key = _key(by, names)
            reserved[key] = reserved.get(key, 0) + gpu_us
    found = []
    for key in sorted(known.keys() | reserved.keys()):
        line = known.get(key) or UsageLine(key=dict(zip(by, key, strict=True)))
        early, waiting = starting.get(key, 0), gang_waiting.get(key, 0)
        found.append(
            line.model_copy(
                update={
                    "starting_us": early,
                    "gang_waiting_us": waiting,
                    "running_idle_us": line.accounts_gpu_us.allocated_idle - early - waiting,
                    "reserved_unused_us": reserved.get(key, 0),
                }
            )
        )
    return found


def _reserved(
    ledger: Questions, start_ms: int, end_ms: int, dimensions: Sequence[Dimension], timezone: str
) -> Iterable[tuple[dict[str, str], int]]:
    """Yield the dimension values and GPU-µs of reserved time: the queue's own values, and those of the unallocated
    GPUs."""
    policies = ledger.policies(start_ms, end_ms)
    if not any(queue.deserved > 0 for version in policies for queue in version.policy.queues):
        return
    hourly = ledger.usage(start_ms, end_ms, ("queue", "hour"), None, timezone)
    unused, teams = unused_by_queue(policies, hourly, start_ms, end_ms, zone(timezone))
    of_gpus: tuple[Dimension, ...] = tuple(
        dict.fromkeys(("hour", *(name for name in dimensions if name not in OF_HOLDERS)))
    )
    free: dict[str, dict[Key, int]] = {}
    for line in ledger.usage(start_ms, end_ms, of_gpus, None, timezone):
        if line.accounts_gpu_us.unallocated:
            kind = _key(of_gpus, line.key)
            free.setdefault(line.key["hour"], {})[kind] = line.accounts_gpu_us.unallocated
    for hour in sorted(free):
        for (kind, queue), gpu_us in reserve(free[hour], dict(sorted(unused.get(hour, {}).items()))).items():
            names: dict[str, str] = dict.fromkeys(dimensions, "")
            yield {**names, **dict(zip(of_gpus, kind, strict=True)), "queue": queue, "team": teams[queue]}, gpu_us


def _matches(names: Mapping[str, str], where: Where) -> bool:
    return all(names[name] in values for name, values in where.items())


def _key(by: Sequence[Dimension], names: Mapping[str, str]) -> Key:
    return tuple(names[name] for name in by)


Phase = Literal["starting", "gang_waiting"]
GANGS = frozenset(
    {
        "PyTorchJob", "TFJob", "MPIJob", "XGBoostJob", "PaddleJob", "JAXJob", "TrainJob", "JobSet", "LeaderWorkerSet",
        "RayJob", "RayCluster", "PodGroup",
    }
)  # fmt: skip
"""Kinds of workload whose pods start together, or wait for each other."""
_BEGINNING = 0


class Launch(NamedTuple):
    """When a holder's pod started. gang: the key that its members share, "" for a single pod.

    observed_ms: time of the newest report. Unreported instants are None."""

    holder: int
    gang: str
    created_ms: int | None
    scheduled_ms: int | None
    started_ms: int | None
    observed_ms: int


class PhaseSpan(NamedTuple):
    """The span [start_ms, end_ms) of one holder in which its idle time belongs to `phase`."""

    holder: int
    phase: Phase
    start_ms: int
    end_ms: int


def in_gangs(workload: str) -> bool:
    """Whether pods of a workload (`Kind/name`) start together."""
    return workload.partition("/")[0] in GANGS


def gang(workload: str, place: str) -> str:
    """The gang of a pod, from its workload (`Kind/name`) and the workload's place; "" for kinds without gangs."""
    return f"{place}/{workload}" if in_gangs(workload) else ""


def phase_spans(launches: Iterable[Launch]) -> list[PhaseSpan]:
    """Return the start-up spans of all holders, by holder and time. Those of one holder do not overlap."""
    ordered = sorted(launches, key=attrgetter("holder"))
    members: dict[str, list[Launch]] = {}
    for launch in ordered:
        if launch.gang:
            members.setdefault(launch.gang, []).append(launch)
    found = []
    for launch in ordered:
        running = launch.started_ms
        if running is None:
            if launch.scheduled_ms is not None:
                found.append(PhaseSpan(launch.holder, "starting", _BEGINNING, launch.observed_ms))
            continue
        found.append(PhaseSpan(launch.holder, "starting", _BEGINNING, running))
        if launch.gang:
            until = max(_there(other, running) for other in members[launch.gang])
            if until > running:
                found.append(PhaseSpan(launch.holder, "gang_waiting", running, until))
    return found


def _there(other: Launch, running_ms: int) -> int:
    """Return the instant until which a member that runs since `running_ms` waits for the other one."""
    if other.created_ms is None or other.created_ms > running_ms:
        return running_ms
    return other.started_ms if other.started_ms is not None else other.observed_ms
