"""Guaranteed quota that its queue did not use while there was capacity for it: `reserved_unused`.

Hour by hour, because a guarantee that was not used is gone: hours in which a queue held more do not make up for
it. Of one hour no more than the unallocated time of that hour can have been reserved; where less was free than
all queues together left unused, it is divided in proportion. Pure. The hourly rule is accountant.books.quota's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar
from zoneinfo import ZoneInfo

from accountant.books.quota import leaf_quotas
from accountant.wire import PolicyVersion, UsageLine
from agent.units import apportion

K = TypeVar("K", bound=Hashable)


def unused_by_queue(
    policies: Sequence[PolicyVersion], hourly: Iterable[UsageLine], start_ms: int, end_ms: int, tz: ZoneInfo
) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """(unused guaranteed GPU-µs by local hour and queue, team by queue); hourly: usage by queue and hour."""
    deserved, teams = leaf_quotas(policies, start_ms, end_ms, tz)
    held: dict[tuple[str, str], int] = {}
    for line in hourly:
        at = (line.key["queue"], line.key["hour"])
        held[at] = held.get(at, 0) + line.accounts_gpu_us.allocated
    found: dict[str, dict[str, int]] = {}
    for queue, lengths in deserved.items():
        for hour, gpu_us in lengths.items():
            unused = gpu_us - held.get((queue, hour), 0)
            if unused > 0:
                found.setdefault(hour, {})[queue] = unused
    return found, teams


def unused_by_team(
    policies: Sequence[PolicyVersion], hourly: Iterable[UsageLine], start_ms: int, end_ms: int, tz: ZoneInfo
) -> dict[str, dict[str, int]]:
    """Unused guaranteed GPU-µs by local hour and team, of queues that belong to one."""
    by_queue, teams = unused_by_queue(policies, hourly, start_ms, end_ms, tz)
    found: dict[str, dict[str, int]] = {}
    for hour, queues in by_queue.items():
        for queue, unused in queues.items():
            if teams[queue]:
                of_hour = found.setdefault(hour, {})
                of_hour[teams[queue]] = of_hour.get(teams[queue], 0) + unused
    return found


def reserve(free: Mapping[K, int], unused: Mapping[str, int]) -> dict[tuple[K, str], int]:
    """One hour: of the free time per kind of GPU, what each unused guarantee reserved."""
    taken = min(sum(free.values()), sum(unused.values()))
    if not taken:
        return {}
    found: dict[tuple[K, str], int] = {}
    for kind, part in zip(free, apportion(taken, list(free.values())), strict=True):
        for team, gpu_us in zip(unused, apportion(part, list(unused.values())), strict=True):
            if gpu_us:
                found[kind, team] = gpu_us
    return found
