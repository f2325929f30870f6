"""A fake of the accountant for a controller: its answers are attributes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from accountant.wire.policy_models import Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from accountant.wire.usage_cost_and_job_models import Accounts, BudgetState
from gputally.base.errors import AccountantUnavailable
from gputally.base.units import MS_PER_HOUR, US_PER_HOUR


def usage_window(usage: Mapping[str, int], capacity: int, *, end_ms: int = MS_PER_HOUR, **fields: Any) -> UsageWindow:
    """Build a window of the last hour before `end_ms`: without decay, wholly covered and up to date, unless fields say
    otherwise."""
    given: dict[str, Any] = {
        "kind": "sliding", "start_ms": end_ms - MS_PER_HOUR, "half_life_s": None, "measure": "allocated",
        "unit": "gpu_us", "by": "queue", "unassigned": 0, "watermark_ms": end_ms, "coverage": 1.0,
        "policy_version": None, **fields,
    }  # fmt: skip
    return UsageWindow(usage=dict(usage), capacity=capacity, end_ms=end_ms, **given)


class Accountant:
    """A fake accountant. Its answers are attributes that a test sets. `usage` is in GPU-microseconds of one hour on 16
    GPUs."""

    def __init__(self) -> None:
        self.usage: dict[str, int] = {}
        self.capacity = 16 * US_PER_HOUR
        self.coverage = 1.0
        self.age_ms: int | None = 0
        self.down = False
        self.takes_decisions = True
        self.policies: list[Policy] = []
        self.decisions: list[Decision] = []
        self.states: list[BudgetState] = []
        self.lost: dict[str, int] = {}
        self.nodes: set[str] = set()
        self.asked_nodes = 0
        self.used: Callable[[int, int], Mapping[tuple[str, str], Accounts]] = lambda start_ms, end_ms: {}

    def spend(self, **parts: float) -> None:
        """Set the usage as shares of the capacity."""
        self.usage = {queue: round(part * self.capacity) for queue, part in parts.items()}

    def window(self, spec: WindowSpec, measure: Measure, at_ms: int, min_coverage: float) -> UsageWindow:
        self._answer()
        watermark_ms = None if self.age_ms is None else at_ms - self.age_ms
        version = self.policies[-1].version() if self.policies else None
        said = {"kind": spec.kind, "measure": measure, "watermark_ms": watermark_ms, "coverage": self.coverage}
        return usage_window(self.usage, self.capacity, end_ms=at_ms, policy_version=version, **said)

    def policy_in_force(self) -> Policy | None:
        self._answer()
        return self.policies[-1] if self.policies else None

    def put_policy(self, policy: Policy) -> PolicyVersion:
        self._answer()
        self.policies.append(policy)
        return PolicyVersion(version=policy.version(), effective_ms=0, policy=policy)

    def budgets(self) -> Sequence[BudgetState]:
        self._answer()
        return self.states

    def pod_usage(
        self, start_ms: int, end_ms: int, pods: Sequence[tuple[str, str]] = ()
    ) -> Mapping[tuple[str, str], Accounts]:
        self._answer()
        return {key: held for key, held in self.used(start_ms, end_ms).items() if not pods or key in pods}

    def lost_gpus(self, start_ms: int, end_ms: int) -> Mapping[str, int]:
        self._answer()
        return self.lost

    def metered_nodes(self, start_ms: int, end_ms: int) -> Collection[str]:
        self._answer()
        self.asked_nodes += 1
        return self.nodes

    def post_decisions(self, decisions: Sequence[Decision]) -> None:
        self._answer()
        if not self.takes_decisions:
            raise AccountantUnavailable("http://accountant:8080/v1/decisions: 503 Ledger unavailable: disk full")
        self.decisions += decisions

    def _answer(self) -> None:
        if self.down:
            raise AccountantUnavailable("http://accountant:8080: connection refused")
