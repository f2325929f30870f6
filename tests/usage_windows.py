"""Builds usage windows as the accountant answers them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accountant.wire.policy_models import UsageWindow


def usage_window(usage: Mapping[str, int], capacity: int, *, end_ms: int = 3_600_000, **fields: Any) -> UsageWindow:
    """Build a window of the last hour before `end_ms`: without decay, wholly covered and up to date, unless fields say
    otherwise."""
    given: dict[str, Any] = {
        "kind": "sliding", "start_ms": end_ms - 3_600_000, "half_life_s": None, "measure": "allocated",
        "unit": "gpu_us", "by": "queue", "unassigned": 0, "watermark_ms": end_ms, "coverage": 1.0,
        "policy_version": None, **fields,
    }  # fmt: skip
    return UsageWindow(usage=dict(usage), capacity=capacity, end_ms=end_ms, **given)
