"""Asks the policy's windows once after the start, so that the first question of the controller is fast.

Nothing depends on it: a window answers the same without it, only later. It must not hold up the start, and keeps
nothing itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from gputally.base.units import MS_PER_MINUTE


class WarmupLedger(Protocol):
    """What is asked: accountant.storage.DuckLedger."""

    def policies(self, start_ms: int, end_ms: int) -> list[PolicyVersion]: ...

    def clusters(self) -> Collection[str]: ...

    def window(
        self,
        spec: WindowSpec,
        at_ms: int,
        measure: Measure,
        min_coverage: float,
        *,
        book: PriceBook | None = None,
        shard: str | None = None,
        cluster: str | None = None,
    ) -> UsageWindow: ...


def in_force(ledger: WarmupLedger, now_ms: int) -> PolicyVersion | None:
    """The policy whose window the controller asks for."""
    return next(reversed(ledger.policies(now_ms, now_ms + 1)), None)


def warm(ledger: WarmupLedger, policy: Policy, book: PriceBook | None, now_ms: int) -> None:
    """Ask as controllers will, of everything and of each cluster: up to this minute, and up to where the records reach.

    Raises AccountantError as `window` does."""
    asked = (policy.measure, policy.min_coverage)
    minute_ms = now_ms - now_ms % MS_PER_MINUTE
    for cluster in (None, *sorted(ledger.clusters())):
        found = ledger.window(policy.window, minute_ms, *asked, book=book, cluster=cluster)
        if found.watermark_ms is not None and found.watermark_ms < minute_ms:
            ledger.window(policy.window, found.watermark_ms, *asked, book=book, cluster=cluster)
