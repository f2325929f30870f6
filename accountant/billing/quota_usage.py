"""Computes what each queue used of its guaranteed quota, borrowed beyond it, or left unused.

The guarantee is the policy's deserved quota at the time, counted per hour. An hour in which a queue held more does not
compensate for an hour in which it held less, because an unused guarantee cannot be used later. Only queues without
children hold GPUs.

Unused guarantees reserve at most the unallocated time of the same hour. If all queues together left more unused than
was free, the free time is divided among them in proportion."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from zoneinfo import ZoneInfo

from accountant.core.periods import hours
from accountant.ledger.usage import HELD, Usage
from accountant.wire.policy_models import Policy, PolicyVersion
from gputally.base.apportionment import apportion
from gputally.base.units import US_PER_MS

_MILLI = 1_000
"""Deserved quotas are decimal numbers of GPUs, counted here in thousandths."""


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """GPU-µs of one queue. guaranteed_us and unused_us are None if its quota was unlimited at some time.

    within_us + borrowed_us is the time that the queue held. within_us + unused_us is its guarantee."""

    queue: str
    team: str
    guaranteed_us: int | None
    within_us: int
    borrowed_us: int

    @property
    def unused_us(self) -> int | None:
        return None if self.guaranteed_us is None else self.guaranteed_us - self.within_us


def quotas(
    policies: Sequence[PolicyVersion], hourly: Usage, start_ms: int, end_ms: int, tz: ZoneInfo
) -> tuple[QuotaRow, ...]:
    """One row per leaf queue of the policies in force in the span, by name. Empty if no queue has a deserved quota."""
    quota_of = [
        (name, milli)
        for version, _, _ in _in_force(policies, start_ms, end_ms)
        for name, _, milli in _leaves(version.policy)
        if milli
    ]
    if not quota_of:
        return ()
    unlimited = {name for name, milli in quota_of if milli < 0}
    deserved, teams = leaf_quotas(policies, start_ms, end_ms, tz)
    held: dict[str, Counter[str]] = {name: Counter() for name in deserved}
    for (queue, hour), gpu_us in _allocated(hourly).items():
        if queue in held:
            held[queue][hour] += gpu_us
    return tuple(_row(name, teams[name], deserved[name], held[name], name in unlimited) for name in sorted(deserved))


def _allocated(hourly: Usage) -> Counter[tuple[str, str]]:
    """Held GPU-µs by queue and local hour. hourly: usage by at least these."""
    sums: Counter[tuple[str, str]] = Counter()
    queue, hour = hourly.by.index("queue"), hourly.by.index("hour")
    allocated = hourly.columns(HELD).sum(axis=1).tolist()
    for key, gpu_us in zip(hourly.row_keys(), allocated, strict=True):
        sums[key[queue], key[hour]] += gpu_us
    return sums


def leaf_quotas(
    policies: Sequence[PolicyVersion], start_ms: int, end_ms: int, tz: ZoneInfo
) -> tuple[dict[str, Counter[str]], dict[str, str]]:
    """Guaranteed GPU-µs by leaf queue and local hour, and the team by leaf queue, of the policies in force in the
    span."""
    deserved: dict[str, Counter[str]] = defaultdict(Counter)
    teams: dict[str, str] = {}
    for version, since, until in _in_force(policies, start_ms, end_ms):
        lengths = hours(since, until, tz)
        for name, team, milli in _leaves(version.policy):
            teams[name] = team
            for hour, length_ms in lengths.items():
                deserved[name][hour] += max(0, milli) * length_ms * US_PER_MS // _MILLI
    return deserved, teams


def _row(queue: str, team: str, deserved: Counter[str], held: Counter[str], unlimited: bool) -> QuotaRow:
    if unlimited:
        return QuotaRow(queue, team, None, held.total(), 0)
    within = sum(min(gpu_us, deserved[hour]) for hour, gpu_us in held.items())
    return QuotaRow(queue, team, deserved.total(), within, held.total() - within)


def _in_force(
    policies: Sequence[PolicyVersion], start_ms: int, end_ms: int
) -> Iterable[tuple[PolicyVersion, int, int]]:
    """Yields each version with the part of the span in which it was in force. The first version also applies before
    its start."""
    for i, version in enumerate(policies):
        since = start_ms if i == 0 else max(start_ms, version.effective_ms)
        until = min(end_ms, policies[i + 1].effective_ms) if i + 1 < len(policies) else end_ms
        if since < until:
            yield version, since, until


def _leaves(policy: Policy) -> Iterable[tuple[str, str, int]]:
    """Yields the name, the team and the deserved quota in thousandths of a GPU of each queue without children."""
    parents = {queue.parent for queue in policy.queues}
    for queue in policy.queues:
        if queue.name not in parents:
            yield queue.name, policy.team_of(queue.name), round(queue.deserved * _MILLI)


K = TypeVar("K", bound=Hashable)


def unused_by_queue(
    policies: Sequence[PolicyVersion], hourly: Usage, start_ms: int, end_ms: int, tz: ZoneInfo
) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """Unused guaranteed GPU-µs by local hour and queue, and the team by queue. hourly: usage by queue and hour."""
    deserved, teams = leaf_quotas(policies, start_ms, end_ms, tz)
    held = _allocated(hourly)
    unused: dict[str, dict[str, int]] = defaultdict(dict)
    for queue, by_hour in deserved.items():
        for hour, gpu_us in by_hour.items():
            if gpu_us > held[queue, hour]:
                unused[hour][queue] = gpu_us - held[queue, hour]
    return unused, teams


def unused_by_team(
    policies: Sequence[PolicyVersion], hourly: Usage, start_ms: int, end_ms: int, tz: ZoneInfo
) -> Mapping[str, Counter[str]]:
    """Unused guaranteed GPU-µs by local hour and team, for queues that belong to a team."""
    by_queue, teams = unused_by_queue(policies, hourly, start_ms, end_ms, tz)
    by_team: dict[str, Counter[str]] = defaultdict(Counter)
    for hour, queues in by_queue.items():
        for queue, unused_us in queues.items():
            if teams[queue]:
                by_team[hour][teams[queue]] += unused_us
    return by_team


def reserve(free: Mapping[K, int], unused: Mapping[str, int]) -> dict[tuple[K, str], int]:
    """Divides the unallocated time of each kind of GPU in one hour among the unused guarantees. The keys of the result
    are pairs of a key of `free` and a key of `unused`."""
    total = min(sum(free.values()), sum(unused.values()))
    if not total:
        return {}
    return {
        (kind, owner): gpu_us
        for kind, part in zip(free, apportion(total, list(free.values())), strict=True)
        for owner, gpu_us in zip(unused, apportion(part, list(unused.values())), strict=True)
        if gpu_us
    }
