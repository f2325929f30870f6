"""The usage a cycle weighs by: the policy is announced, then the window that was counted by it is asked for.

An accountant counts by one policy at a time. Where it counts by another's, ours is announced again, each time after
twice as long, so that two controllers that tell one accountant of their own do not turn it over all the time. What
this must not do: decide what usage that is good is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

from accountant.wire import Policy, UsageWindow
from agent.clock import Clock
from agent.units import MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND
from fairshare.errors import AccountantUnavailable
from fairshare.kube.marks import instant
from fairshare.kube.ports import AccountantPort
from fairshare.weighing import budgets
from fairshare.weighing.gates import Hold, gate

LONGEST_MS = 6 * MS_PER_HOUR
"""Between two announcements of one policy where somebody else's replaces it every time."""


@dataclass(frozen=True, slots=True)
class Measured:
    """window: None where there was no answer. hold: why it may not be acted on. spent: queues whose budget is
    exhausted."""

    window: UsageWindow | None
    hold: Hold | None
    spent: frozenset[str] = frozenset()


class Usage:
    """Belongs to one controller; not made for threads."""

    def __init__(self, accountant: AccountantPort, clock: Clock) -> None:
        self._accountant = accountant
        self._clock = clock
        self._announced: str | None = None
        self._announced_ms = 0
        self._effective_ms = 0
        self._contests = 0

    def ask(self, policy: Policy, version: str, *, quiet: bool) -> Measured:
        """version: of the policy. quiet: announce nothing. Never raises for what the accountant answers."""
        try:
            if self._announced != version and not quiet:
                self._effective_ms = self._accountant.put_policy(policy).effective_ms
                self._announced, self._announced_ms = version, self._clock.wall_ms()
            now_ms = self._clock.wall_ms()
            # Rows end at whole minutes: a window that does too cuts none, and costs the accountant a twentieth.
            at_ms = now_ms - now_ms % MS_PER_MINUTE
            if at_ms <= self._announced_ms:  # a policy that has just been announced is in force only after it
                at_ms = now_ms
            if at_ms < self._effective_ms <= now_ms + MS_PER_MINUTE:  # by the accountant's clock, which may go before
                at_ms = self._effective_ms
            window = self._accountant.window(policy.window, policy.measure, at_ms, policy.min_coverage)
            spent = budgets.exhausted(policy, self._accountant.budgets()) if budgets.acts(policy) else frozenset()
        except AccountantUnavailable as error:
            return Measured(None, Hold("AccountantUnavailable", str(error)))
        counted_alike = window.policy_version == version or window.policy_counting == policy.counting()
        if not counted_alike and not quiet:
            return Measured(window, self._counted_otherwise(window, version, now_ms))
        if now_ms - self._announced_ms > 2 * LONGEST_MS:
            self._contests = 0
        return Measured(window, gate(policy, window, now_ms), spent)

    def _counted_otherwise(self, window: UsageWindow, version: str, now_ms: int) -> Hold:
        """Its queues are not ours: another controller's, or a ledger that was restored. Announced again when it is
        time."""
        if now_ms < self._effective_ms:  # nobody else's doing, and announcing it again would change nothing
            return Hold("PolicyNotInForce", _behind(self._effective_ms, now_ms))
        told = window.policy_version or "none"
        text = f"usage was counted by policy {told}, ours is {version}"
        if self._contests > 1:
            text = f"{text}, announced {self._contests} times: another controller tells this accountant of its own"
        if now_ms >= self._announced_ms + min(MS_PER_MINUTE << self._contests, LONGEST_MS):
            self._announced, self._contests = None, self._contests + 1
        return Hold("PolicyNotInForce", text)


def _behind(effective_ms: int, now_ms: int) -> str:
    return (
        f"the accountant has ours in force from {instant(effective_ms)} on, and our clock shows {instant(now_ms)}:"
        f" it is {(effective_ms - now_ms) / MS_PER_SECOND:.0f} s or more behind the accountant's"
    )
