"""Computes the GPU time that nobody held, or that was held idle, while pods waited for GPUs of the same cluster.

It compares the sums of each hour: of the GPU time for which waiting pods asked, as much as nobody held stands beside a
wait as free, and of the rest as much as was held idle. Both are upper bounds, because a pod that asks for eight GPUs of
one node cannot use eight free GPUs on eight nodes, GPUs are of different models, and a part of a GPU counts as a whole
one. Example: pods asked for 4 GPU-hours within an hour, in which 3 were free and 5 idle: 3 and 1.

An hour is unknown, and in no figure, if less than LEAST_METERED of it is metered, or if a pod waited in it of which it
is unknown for how many GPUs it asks. A day or a month is the sum of its known hours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from accountant.billing.queue_waits import waits_within
from accountant.core import periods
from accountant.ledger.protocols import Moment, QueuedPod
from accountant.ledger.usage import ACCOUNTS, Usage, Where
from accountant.reports.week_parts import LEAST_METERED
from accountant.wire.usage_cost_and_job_models import Accounts, UnusedLine
from gputally.base import called_off
from gputally.base.gpu_resources import requested_devices
from gputally.base.units import US_PER_MS


class GpuHour(NamedTuple):
    """What is known of a cluster's GPUs in [start_ms, end_ms), an hour or a part of one.

    free_us: GPU time that nobody held. idle_us: that was held and is known to be idle. None: unknown."""

    start_ms: int
    end_ms: int
    free_us: int | None
    idle_us: int | None


def hours_of_cluster(moment: Moment, start_ms: int, end_ms: int, timezone: str, cluster: str) -> list[GpuHour]:
    """The hours of a span. moment: it was opened for the span."""
    # Without a filter, the ledger's hourly sums of all GPUs are enough.
    alone = {*moment.status().clusters} <= {cluster}
    where: Where | None = None if alone else {"cluster": (cluster,)}
    return gpu_hours_of(moment.usage((start_ms, end_ms), ("hour",), where, timezone, ()), start_ms, end_ms, timezone)


def gpu_hours_of(usage: Usage, start_ms: int, end_ms: int, timezone: str) -> list[GpuHour]:
    """The hours of a span. usage: of the span by local hour. An hour without a row is unknown."""
    rows = zip(usage.row_keys(), usage.columns(ACCOUNTS).tolist(), strict=True)
    found = {hour: Accounts(**dict(zip(ACCOUNTS, figures, strict=True))) for (hour,), figures in rows}
    return [
        GpuHour(hour.start_ms, hour.end_ms, *_unused(found.get(hour.hour, Accounts())))
        for hour in called_off.each(periods.local_hours(start_ms, end_ms, periods.zone(timezone)))
    ]


def _unused(known: Accounts) -> tuple[int | None, int | None]:
    """The free and the idle time."""
    in_service_us = known.total - known.down
    if not known.total or known.unmetered > (1 - LEAST_METERED) * in_service_us:
        return None, None
    is_use_unknown = known.allocated_unknown and known.allocated_unknown == known.allocated
    return known.unallocated, None if is_use_unknown else known.allocated_idle


def unused_while_waiting(pods: Iterable[QueuedPod], hours: Sequence[GpuHour]) -> list[UnusedLine]:
    """One line for each of the hours, which follow each other without a gap. pods: those of the cluster that existed in
    them; what happened later does not count."""
    if not hours:
        return []
    start_ms, end_ms = hours[0].start_ms, hours[-1].end_ms
    asked: dict[int, int] = defaultdict(int)
    unknown: dict[int, int] = defaultdict(int)
    for pod, wait in waits_within(pods, start_ms, end_ms):
        if pod.facts.created_ms is not None and wait.queued_ms is not None:
            devices = requested_devices(pod.facts.requests)
            changes, by = (unknown, 1) if devices is None else (asked, devices)
            changes[max(start_ms, pod.facts.created_ms)] += by
            changes[max(start_ms, pod.facts.created_ms + wait.queued_ms)] -= by
    return [
        _line(hour, asked_us, is_known=not unknown_us)
        for hour, asked_us, unknown_us in zip(hours, _summed(asked, hours), _summed(unknown, hours), strict=True)
    ]


def _summed(changes: Mapping[int, int], hours: Sequence[GpuHour]) -> list[int]:
    """A number that changes at some instants, multiplied by time: its sum in each hour, in µs."""
    found, number = [], 0
    following = iter(sorted(changes.items()))
    change_ms, by = next(following, (hours[-1].end_ms, 0))
    for hour in hours:
        sum_us, at_ms = 0, hour.start_ms
        while at_ms < hour.end_ms:
            until_ms = min(change_ms, hour.end_ms)
            sum_us += number * (until_ms - at_ms) * US_PER_MS
            at_ms = until_ms
            if change_ms == at_ms < hours[-1].end_ms:
                number += by
                change_ms, by = next(following, (hours[-1].end_ms, 0))
        found.append(sum_us)
    return found


def _line(hour: GpuHour, asked_us: int, *, is_known: bool) -> UnusedLine:
    start_ms, end_ms, unheld_us, held_idle_us = hour
    if unheld_us is None or not is_known:
        return _added(start_ms, end_ms, ())
    free_us = min(unheld_us, asked_us)
    left_us = asked_us - free_us
    idle_us = None if held_idle_us is None and left_us else min(held_idle_us or 0, left_us)
    return UnusedLine(
        start_ms=start_ms, end_ms=end_ms, known_ms=end_ms - start_ms, asked_gpu_us=asked_us, free_gpu_us=free_us,
        idle_gpu_us=idle_us,
    )  # fmt: skip


def by_unit(lines: Iterable[UnusedLine], unit: periods.TimeUnit, timezone: str) -> tuple[UnusedLine, ...]:
    """The sums of hours by local hour, day or month."""
    zone, letters = periods.zone(timezone), {"hour": None, "day": len("2026-10-01"), "month": len("2026-10")}[unit]
    parts = groupby(lines, lambda line: periods.hour_name(line.start_ms, zone)[:letters])
    return tuple(together(list(part)) for _, part in parts)


def together(lines: Sequence[UnusedLine]) -> UnusedLine:
    """The sum of one or more lines that follow each other."""
    return _added(lines[0].start_ms, lines[-1].end_ms, [line for line in lines if line.known_ms])


def _added(start_ms: int, end_ms: int, known: Sequence[UnusedLine]) -> UnusedLine:
    def figure(name: str) -> int | None:
        values = [getattr(line, name) for line in known]
        return None if None in values or not values else sum(values)

    return UnusedLine(
        start_ms=start_ms, end_ms=end_ms, known_ms=sum(line.known_ms for line in known),
        asked_gpu_us=figure("asked_gpu_us"), free_gpu_us=figure("free_gpu_us"), idle_gpu_us=figure("idle_gpu_us"),
    )  # fmt: skip
