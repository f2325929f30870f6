"""Adds the usage windows of other clusters to the window of the controller's own.

A policy may count usage of several clusters (`usage.clusters`). Each accountant returns the window of its own cluster,
and this module adds them. Without a half-life the sum equals, to the microsecond, the window of one ledger with the
rows of all clusters. With a half-life every accountant rounds the usage of each queue to a whole number, so the sum
over n clusters differs from the window of one ledger by at most n/2 + 1/2 units per queue.

Every window must pass the same checks as that of the controller's own cluster. If a window fails a check, if its
accountant does not answer, or if its figures cannot be added, the last good weights stay, and the reason names the
cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from accountant.wire.policy_models import Measure, Policy, UsageWindow, WindowSpec
from fairshare.core.queues_and_weights import FleetWindow
from fairshare.core.scheduler_queue_objects import join_texts
from fairshare.usage.stale_usage_hold import UsageHold, usage_hold
from gputally.base.errors import AccountantUnavailable
from gputally.base.yaml_file import Document, FileFault

_EQUAL_FIELDS = ("kind", "start_ms", "end_ms", "half_life_s", "decay", "measure", "unit", "by", "gpu_weights", "shard")
"""Fields in which windows must agree so that their figures can be added."""


class WindowSource(Protocol):
    """An accountant that answers for one cluster."""

    def window(self, spec: WindowSpec, measure: Measure, at_ms: int, min_coverage: float) -> UsageWindow:
        """Return the window that `fairshare.usage.accountant_client.AccountantPort.window` describes.

        Raises AccountantUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class OtherClusters:
    """Clusters that a policy may count besides the controller's own.

    own: the name of the controller's own cluster in its ledger, "" if it has none.
    accountants: by cluster name."""

    own: str = ""
    accountants: Mapping[str, WindowSource] = field(default_factory=dict)

    def check(self, policy: Policy, document: Document) -> None:
        """Raises FileFault, with its place, for every cluster of the policy without an accountant."""
        listed = policy.usage.clusters
        if listed and not self.own:
            place = document.place(("usage", "clusters"))
            raise FileFault(
                [f"{place}: usage.clusters: this cluster has no name in the ledger: set cluster (--cluster)"]
            )
        known = join_texts(sorted(self.accountants)) or "none"
        faults = [
            f"{document.place(('usage', 'clusters', i))}: usage.clusters.{i}: no accountant is known for cluster"
            f" {name!r}: add it to the accountants file (--accountants), which names {known}"
            for i, name in enumerate(listed)
            if name != self.own and name not in self.accountants
        ]
        if faults:
            raise FileFault(faults)

    def add(
        self, policy: Policy, own: UsageWindow, at_ms: int, now_ms: int, *, same_counting: bool = True
    ) -> tuple[UsageWindow, UsageHold | None]:
        """Return the window of all clusters that the policy counts, or `own` with the reason why there is none.

        own: the window of the controller's own cluster at `at_ms`.
        same_counting: whether each window must have been counted with the policy's own queues."""
        names = [name for name in policy.usage.clusters if name != self.own]
        windows: dict[str, UsageWindow] = {}
        for name in names:
            if name not in self.accountants:
                return own, UsageHold("ClusterUnknown", f"no accountant is known for cluster {name!r} (--accountants)")
            try:
                window = self.accountants[name].window(policy.window, policy.measure, at_ms, policy.min_coverage)
            except AccountantUnavailable as error:
                return own, _of_cluster(name, UsageHold(error.reason, str(error)))
            hold = _differs(own, window, name)
            if hold is None and same_counting and window.policy_counting != policy.counting():
                version = window.policy_version or "none"
                text = f"usage was counted by policy {version}, ours is {policy.version()}: give both the same queues"
                hold = UsageHold("PolicyNotInForce", text)
            hold = hold or usage_hold(policy, window, now_ms)
            if hold is not None:
                return own, _of_cluster(name, hold)
            windows[name] = window
        return (sum_of_windows(self.own, own, windows) if windows else own), None


NO_OTHER_CLUSTERS = OtherClusters()


def sum_of_windows(own_name: str, own: UsageWindow, others: Mapping[str, UsageWindow]) -> FleetWindow:
    """Return the sum of windows that agree in all but their figures. others: by name of the cluster."""
    windows = (own, *others.values())
    usage: dict[str, int] = {}
    for window in windows:
        for queue, used in window.usage.items():
            usage[queue] = usage.get(queue, 0) + used
    price_books = {window.price_book_version for window in windows}
    figures = {
        "usage": usage,
        "unassigned": sum(window.unassigned for window in windows),
        "capacity": sum(window.capacity for window in windows),
        "watermark_ms": _if_all_known(min, [window.watermark_ms for window in windows]),
        "coverage": min(window.coverage for window in windows),
        "lost_ms": _if_all_known(max, [window.lost_ms for window in windows]),
        "since_ms": _if_all_known(min, [window.since_ms for window in windows]),
        "price_book_version": price_books.pop() if len(price_books) == 1 else None,
        "cluster": None,
    }
    return FleetWindow(**{**dict(own), **figures}, clusters=(own_name, *others), own=own)


def _if_all_known(choose: Callable[[Sequence[int]], int], values: Sequence[int | None]) -> int | None:
    """Return the chosen one of values that are all known; otherwise None."""
    known = [value for value in values if value is not None]
    return choose(known) if len(known) == len(values) else None


def _differs(own: UsageWindow, other: UsageWindow, name: str) -> UsageHold | None:
    """Return why the two windows cannot be added; None if they can."""
    if other.cluster != name:
        of = f"cluster {other.cluster!r}" if other.cluster else "every cluster in its ledger"
        return UsageHold("WindowsDiffer", f"its accountant answered for {of}")
    for field_name in _EQUAL_FIELDS:
        own_value, other_value = getattr(own, field_name), getattr(other, field_name)
        if own_value != other_value:
            text = f"the {field_name} of its window is {other_value}, and {own_value} here"
            return UsageHold("WindowsDiffer", f"{text}: windows that differ cannot be added")
    return None


def _of_cluster(name: str, hold: UsageHold) -> UsageHold:
    return UsageHold(hold.reason, f"cluster {name}: {hold.message}")
