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
The rule for start-up is `accountant.core.start_up`, and the rule for guarantees is in `quota_usage`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

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
