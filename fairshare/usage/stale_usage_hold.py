"""Holds the last weights while usage is missing, stale or incompletely metered, and gives the reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accountant.wire.policy_models import Policy, UsageWindow
from fairshare.core.queues_and_weights import Condition, own_window
from fairshare.laws.weight_calculation import effective_s
from gputally.base.units import MS_PER_SECOND, US_PER_MS
from gputally.kubernetes.objects import Object, gpus, gpus_of_nodes, value_at

USAGE_FRESH = "UsageFresh"
"""The type of the condition about a hold."""


NOTHING_IN_SERVICE = "NothingInService"
"""The reason of a hold that is not a fault."""
_NONE = frozenset({"NoCapacity", "NoUsage"})


@dataclass(frozen=True, slots=True)
class UsageHold:
    """Why the last good weights stay.

    reason: one word.
    message: the reason as text, with the figures."""

    reason: str
    message: str


def usage_gate(policy: Policy, window: UsageWindow, now_ms: int) -> UsageHold | None:
    """Return the hold; None if the window is good enough to use."""
    if window.capacity <= 0:
        of = f" of cluster {window.cluster!r}: is that what its agents call it?" if window.cluster else ""
        return UsageHold("NoCapacity", f"the window holds no capacity{of}")
    if window.watermark_ms is None:
        return UsageHold("NoUsage", "the ledger knows of no GPU in service")
    age_s = max(0, now_ms - window.watermark_ms) / MS_PER_SECOND
    if age_s > policy.max_staleness:
        return UsageHold("StaleUsage", f"usage is {age_s:.0f} s old, allowed are {policy.max_staleness} s")
    if window.coverage < policy.min_coverage:
        return UsageHold(
            "LowCoverage", f"{window.coverage:.2%} of the window is metered, needed are {policy.min_coverage:.0%}"
        )
    return None


def with_capacity_reason(hold: UsageHold | None, nodes: Sequence[Object]) -> UsageHold | None:
    """Return the hold, with another reason if the cluster has no usable GPU now, for example because it was scaled to
    zero or drained. Without another hold, nodes that list GPUs and accept no work cause one, because the window's
    average would be divided as if it were available. nodes: all of the cluster; empty if they cannot be read."""
    if (hold is not None and hold.reason not in _NONE) or not nodes or gpus_of_nodes(nodes) > 0:
        return hold
    if hold is None and not any(map(_lists_gpus, nodes)):
        return None  # these nodes list no GPUs at all, so the GPUs are elsewhere
    return UsageHold(NOTHING_IN_SERVICE, "no node lists a GPU that may be given work: there is nothing to divide")


def _lists_gpus(node: Object) -> bool:
    return any(gpus(value_at(node, ("status", what))) > 0 for what in ("allocatable", "capacity"))


def fresh(hold: UsageHold | None) -> Condition:
    """Return the hold as a condition."""
    if hold is None:
        return Condition(USAGE_FRESH, "True", "Fresh", "usage is recent and complete enough to act on")
    return Condition(USAGE_FRESH, "False", hold.reason, f"{hold.message}: the last good weights stay")


def within(gpus: float, capacity: float | None) -> float:
    """Return the GPUs to divide at one target. capacity: what it can give by quotas of its own; None: all."""
    return gpus if capacity is None else min(gpus, capacity)


def gpus_of_window(window: UsageWindow) -> float | None:
    """Return the average GPUs of the controller's own cluster over the recorded part of the window, weighted like its
    usage; None if it is not measured in GPU time."""
    window = own_window(window)
    if window.unit != "gpu_us":
        return None
    since_ms = window.start_ms if window.since_ms is None else max(window.start_ms, window.since_ms)
    span_s = effective_s((window.end_ms - since_ms) / MS_PER_SECOND, window.half_life_s)
    return window.capacity / (span_s * MS_PER_SECOND * US_PER_MS) if span_s > 0 else None
