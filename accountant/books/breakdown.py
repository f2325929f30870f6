"""What a usage line is made of beyond its accounts: the sorts of idle time, and guarantees nobody used.

`starting`, `gang_waiting` and `running_idle` add up to a line's `allocated_idle`. `reserved_unused` is a memo on the
line of the queue (or team) whose guarantee it was: the part of the unallocated time of an hour that it could have
had, by the policy in force. Of one hour no more is reserved than was unallocated, over all lines together. Asked for
by name, because both look at more than the sums. Asks the ledger; the rules are accountant.work.phases' and
guarantees'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from accountant.books.guarantees import reserve, unused_by_queue
from accountant.ledger import OF_HOLDERS, Questions
from accountant.periods import zone
from accountant.wire import Dimension, UsageLine

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
    """The lines of `ledger.usage` for the same question with their breakdown, sorted by key; further lines for
    queues that had a guarantee and held nothing."""
    known = {_key(by, line.key): line for line in lines}
    starting: dict[Key, int] = {}
    gang_waiting: dict[Key, int] = {}
    dimensions = tuple(dict.fromkeys((*by, *where)))
    for phase in ledger.idle_phases(start_ms, end_ms, dimensions, timezone):
        if _asked(phase.key, where):
            key = _key(by, phase.key)
            starting[key] = starting.get(key, 0) + phase.starting_us
            gang_waiting[key] = gang_waiting.get(key, 0) + phase.gang_waiting_us
    reserved: dict[Key, int] = {}
    for names, gpu_us in _reserved(ledger, start_ms, end_ms, dimensions, timezone):
        if _asked(names, where):
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
    """Names of the dimensions and GPU-µs: the queue's own, and those of the unallocated GPUs."""
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


def _asked(names: Mapping[str, str], where: Where) -> bool:
    return all(names[name] in values for name, values in where.items())


def _key(by: Sequence[Dimension], names: Mapping[str, str]) -> Key:
    return tuple(names[name] for name in by)
