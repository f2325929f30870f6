"""The policy's window, asked for once after a start, so that whoever asks next finds its quarter-hours remembered.

Nothing depends on it: a window answers the same without it, only later. It must not hold up the start, and keeps
nothing itself.
"""

from __future__ import annotations

from typing import Protocol

from accountant.prices import PriceBook
from accountant.wire import Measure, PolicyVersion, UsageWindow, WindowSpec


class Asked(Protocol):
    """What is asked: accountant.store.DuckLedger."""

    def policies(self, start_ms: int, end_ms: int) -> list[PolicyVersion]: ...

    def window(
        self,
        spec: WindowSpec,
        at_ms: int,
        measure: Measure,
        min_coverage: float,
        *,
        book: PriceBook | None = None,
        shard: str | None = None,
    ) -> UsageWindow: ...


def warm(ledger: Asked, book: PriceBook | None, now_ms: int) -> bool:
    """Ask as the controller will: now, and up to where the records reach. False where no policy is in force.

    Raises AccountantError as `window` does."""
    policies = ledger.policies(now_ms, now_ms + 1)
    if not policies:
        return False
    policy = policies[-1].policy
    asked = (policy.measure, policy.min_coverage)
    found = ledger.window(policy.window, now_ms, *asked, book=book)
    if found.watermark_ms is not None and found.watermark_ms < now_ms:
        ledger.window(policy.window, found.watermark_ms, *asked, book=book)
    return True
