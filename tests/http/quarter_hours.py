"""Whole quarter-hours of GPUs, counted back from the present one."""

from __future__ import annotations

from typing import Any

from tests.fakes.memory_ledger import MINUTE_MS, NOW_MS
from tests.usage_records import QUARTER_MS, interval, pod_holder

HOUR_MS = 60 * MINUTE_MS
NOW = NOW_MS - NOW_MS % QUARTER_MS


def held(hours_ago: int, hours: int, gpu: str, space: str = "", share: int = 1) -> list[Any]:
    """Quarter-hours of a GPU from some hours ago on. share: the part 1/share that the namespace's pod holds."""
    start = NOW - hours_ago * HOUR_MS
    holder = pod_holder(f"{space}-0", space, space) if space else None
    part = {"capacity_us": QUARTER_MS * 1000 // share, "allocated_us": QUARTER_MS * 1000 // share}
    more = {} if share == 1 else {**part, "sharing": "time-slicing", "sharing_replicas": share}
    return [interval(start + at * QUARTER_MS, gpu, holder, **more) for at in range(hours * 4)]
