"""Decides whether a usage window is good enough to change weights.

While usage is missing, stale or incompletely metered, a `UsageHold` keeps the last good weights and says why."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from accountant.wire.policy_models import Policy, UsageWindow
from fairshare.core.queues_and_weights import Condition
from gputally.base.units import MS_PER_SECOND

USAGE_FRESH = "UsageFresh"
"""Type of the condition that reports a hold."""


@dataclass(frozen=True, slots=True)
class UsageHold:
    """Why the last good weights stay.

    reason: one word, as in the conditions of Kubernetes.
    message: a sentence with the figures."""

    reason: str
    message: str


def usage_hold(policy: Policy, window: UsageWindow, now_ms: int) -> UsageHold | None:
    """Return why the window must not change weights; None if it is good enough."""
    if window.capacity <= 0:
        of = f" of cluster {window.cluster!r}: do its agents report this name?" if window.cluster else ""
        return UsageHold("NoCapacity", f"the window has no capacity{of}")
    if window.watermark_ms is None:
        return UsageHold("NoUsage", "the ledger knows of no GPU in service")
    age_s = max(0, now_ms - window.watermark_ms) / MS_PER_SECOND
    if age_s > policy.max_staleness:
        return UsageHold("StaleUsage", f"usage is {age_s:.0f} s old, and the policy allows {policy.max_staleness} s")
    if window.coverage < policy.min_coverage:
        metered = floor(window.coverage * 10_000) / 10_000  # rounded down, so that it is below the required part
        return UsageHold(
            "LowCoverage", f"{metered:.2%} of the window is metered, and the policy requires {policy.min_coverage:.2%}"
        )
    return None


def freshness_condition(hold: UsageHold | None) -> Condition:
    """Return the condition `UsageFresh`, which is False during a hold."""
    if hold is None:
        return Condition(USAGE_FRESH, "True", "Fresh", "usage is recent and complete enough to act on")
    return Condition(USAGE_FRESH, "False", hold.reason, f"{hold.message}: the last good weights stay")
