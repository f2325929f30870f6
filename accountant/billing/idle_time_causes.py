"""Breaks idle time down into starting, gang waiting, running idle and unused guarantees.

A pod holds its GPU from the moment it is bound. Three figures add up to a line's `allocated_idle`:

- `starting`: idle time before the pod's first container runs.
- `gang_waiting`: idle time while the pod runs and at least one other pod of its gang, created before this one started,
  has not started yet. A pod that replaces another one later does not make the others wait.
- `running_idle`: the pod's idle time after these two.

Unreported instants are not guessed. A pod without a reported start counts as `starting` until the last report that
shows it bound and not running.

`reserved_unused_us` is a further figure on the line of the queue (or team) that owns the guarantee. It is the part of
an hour's unallocated time that this queue's unused guarantee reserved, by the policy in force. All lines together
reserve at most the unallocated time of the hour.

The breakdown is computed only on request, because it needs more than the hourly sums. This module queries the ledger.
The rule for start-up is `phase_spans` below, and the rule for guarantees is in `quota_usage`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from accountant.billing.quota_usage import Lot, ModelSpans, reserve, unused_by_queue
from accountant.core.periods import zone
from accountant.ledger.protocols import Moment, of_holders
from accountant.ledger.usage import START_UP, Where
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine

Key = tuple[str, ...]


def broken_down(
    ledger: Moment,
    lines: Iterable[UsageLine],
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Where,
    timezone: str,
) -> list[UsageLine]:
    """Adds the breakdown of idle time to the lines of `ledger.usage` for the same query; sorted by key.

    Queues that had a guarantee and held nothing have lines of their own."""
    known = {_key(by, line.key): line for line in lines}
    starting: Counter[Key] = Counter()
    gang_waiting: Counter[Key] = Counter()
    dimensions = tuple(dict.fromkeys((*by, *where)))
    phases = ledger.usage((start_ms, end_ms), by, where, timezone, START_UP)
    for values, (starting_us, waiting_us) in zip(phases.row_keys(), phases.columns(START_UP).tolist(), strict=True):
        key = _key(by, dict(zip(phases.by, values, strict=True)))
        starting[key] += starting_us
        gang_waiting[key] += waiting_us
    reserved: Counter[Key] = Counter()
    for names, gpu_us in _reserved(ledger, start_ms, end_ms, dimensions, timezone):
        if _matches(names, where):
            reserved[_key(by, names)] += gpu_us
    broken_down_lines = []
    for key in sorted(known.keys() | reserved.keys()):
        line = known.get(key) or UsageLine(key=dict(zip(by, key, strict=True)))
        breakdown = {
            "starting_us": starting[key],
            "gang_waiting_us": gang_waiting[key],
            "running_idle_us": line.accounts_gpu_us.allocated_idle - starting[key] - gang_waiting[key],
            "reserved_unused_us": reserved[key],
        }
        broken_down_lines.append(line.model_copy(update=breakdown))
    return broken_down_lines


def _reserved(
    ledger: Moment, start_ms: int, end_ms: int, dimensions: Sequence[Dimension], timezone: str
) -> Iterable[tuple[dict[str, str], int]]:
    """Yields GPU-µs of reserved time with their dimension values: queue and team are those of the guarantee, the others
    those of the unallocated GPUs."""
    policies = ledger.status().policies(start_ms, end_ms)
    queues = [queue for version in policies for queue in version.policy.queues]
    if not any(max([queue.deserved, *(own.deserved for own in queue.gpu_models.values())]) > 0 for queue in queues):
        return
    spans = ModelSpans.of(policies, start_ms, end_ms)
    usage = ledger.usage(spans.edges, ("queue", *spans.dimensions), None, timezone, ())
    unused, teams = unused_by_queue(policies, usage, start_ms, end_ms, zone(timezone))
    held = of_holders(dimensions)
    of_gpus: tuple[Dimension, ...] = tuple(
        dict.fromkeys((*spans.dimensions, *(name for name in dimensions if name not in held)))
    )
    free: dict[Lot, dict[Key, int]] = defaultdict(dict)
    relation = ledger.usage(spans.edges, of_gpus, None, timezone, ())
    unallocated = relation.column("unallocated").tolist()
    for number, key, gpu_us in zip(relation.span.tolist(), relation.row_keys(), unallocated, strict=True):
        if gpu_us:
            free[spans.lot(number, *key[: len(spans.dimensions)])][key] = gpu_us
    for lot in sorted(free):
        for (kind, queue), gpu_us in reserve(free[lot], dict(sorted(unused.get(lot, {}).items()))).items():
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
    """The instants of a holder's pod; None if unreported.

    gang: a key that all members of the pod's gang share, "" for a pod without a gang.
    observed_ms: time of the newest report."""

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


def gang(workload: str, scope: str) -> str:
    """The key of a pod's gang, from its workload (`Kind/name`) and the cluster and namespace (`scope`); "" for kinds
    without gangs."""
    return f"{scope}/{workload}" if in_gangs(workload) else ""


def phase_spans(launches: Iterable[Launch]) -> list[PhaseSpan]:
    """The start-up spans of all holders, by holder and time. Those of one holder do not overlap."""
    ordered = sorted(launches, key=attrgetter("holder"))
    members: dict[str, list[Launch]] = defaultdict(list)
    for launch in ordered:
        members[launch.gang].append(launch)
    spans = []
    for launch in ordered:
        running = launch.started_ms
        if running is None:
            if launch.scheduled_ms is not None:
                spans.append(PhaseSpan(launch.holder, "starting", _BEGINNING, launch.observed_ms))
            continue
        spans.append(PhaseSpan(launch.holder, "starting", _BEGINNING, running))
        if launch.gang:
            until = max(_waits_until(other, running) for other in members[launch.gang])
            if until > running:
                spans.append(PhaseSpan(launch.holder, "gang_waiting", running, until))
    return spans


def _waits_until(other: Launch, running_ms: int) -> int:
    """The instant until which a member that runs since `running_ms` waits for the other one."""
    if other.created_ms is None or other.created_ms > running_ms:
        return running_ms
    return other.started_ms if other.started_ms is not None else other.observed_ms
