"""Decides which queue may reclaim GPUs from which other queue, and limits how much is preempted.

A queue may reclaim up to its fair share. It takes from queues that hold more than both their fair share and their
deserved quota, or more than their limit. While it is within its own deserved quota, it takes from every queue that
holds more than its quota.

Two queues are compared at the children of their lowest common ancestor. A bundle is a part of a workload that can be
stopped separately. As in the source, a bundle's queue is checked before the bundle is taken, so taking it may bring the
queue below its share. `victim_selection` is stricter: it never brings a queue below its quota.

Source: pkg/scheduler/plugins/proportion/reclaimable of the scheduler and commit that `laws.division` names.

Three limits apply at once: workloads of one team in an hour, workloads of the cluster in an hour, and GPU-hours of work
lost in a day. In addition, a workload that was preempted is protected for some time. Dry runs do not count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import inf
from typing import Final, Literal

from accountant.wire.policy_models import PreemptionPolicy
from fairshare.core.queues_and_weights import UNLIMITED
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND

Amounts = Mapping[str, float]
"""Quantity by resource (`gpu`, and `cpu`, `memory` if they count). A missing one is 0."""
Right = Literal["within quota", "above share"]
"""The two rules by which a bundle may be taken."""
EPSILON: Final = 1e-9


@dataclass(frozen=True, slots=True)
class QueueResource:
    """One resource of one queue.

    deserved, share, limit: -1 for unlimited.
    fixed: the part of `allocated` that belongs to workloads that may not be preempted."""

    deserved: float
    share: float
    limit: float
    allocated: float
    fixed: float = 0.0

    @property
    def allocatable(self) -> float:
        """The amount that the queue may hold before others may reclaim it; infinite for unlimited."""
        return min(_open(self.limit), max(_open(self.deserved), _open(self.share)))


@dataclass(frozen=True, slots=True)
class Account:
    """A queue's amounts of each resource, and its parent in the tree ("" for a root)."""

    queue: str
    parent: str
    stocks: Mapping[str, QueueResource]


@dataclass(frozen=True, slots=True)
class Claimant:
    """A workload of a leaf queue that needs `required`. preemptible: whether it may be preempted itself."""

    queue: str
    required: Amounts
    preemptible: bool = True


Accounts = Mapping[str, Account]


def may_reclaim(claimant: Claimant, accounts: Accounts) -> bool:
    """Return whether the claimant's queue stays within its fair share.

    The fixed part of a queue must stay within its quota if the claimant is not preemptible."""
    return all(
        _sum(stock.allocated, claimant.required, name) <= _open(stock.share) + EPSILON
        and (claimant.preemptible or _sum(stock.fixed, claimant.required, name) <= _open(stock.deserved) + EPSILON)
        for name, stock in accounts[claimant.queue].stocks.items()
    )


def right_to_take(claimant: Claimant, own: Account, other: Account, remaining: Amounts) -> Right | None:
    """Return the rule by which the claimant may take the next bundle from the queue `other`; None without such a rule.

    own: the claimant's queue at the level where the two are compared.
    remaining: what `other` still holds."""
    held = {name: remaining.get(name, 0.0) for name in other.stocks}
    if within_quota(claimant, own) and any(
        held[name] > _open(stock.deserved) + EPSILON for name, stock in other.stocks.items()
    ):
        return "within quota"
    if above_share(other, held):
        return "above share"
    return None


def above_share(account: Account, remaining: Amounts) -> bool:
    """Return whether a queue that still holds `remaining` holds more than it may of some resource. This is the
    source's rule MaintainFairShare."""
    return any(remaining.get(name, 0.0) > stock.allocatable + EPSILON for name, stock in account.stocks.items())


def within_quota(claimant: Claimant, account: Account) -> bool:
    """Return whether the request stays within the queue's deserved quota in every resource."""
    return all(
        _sum(stock.allocated, claimant.required, name) <= _open(stock.deserved) + EPSILON
        for name, stock in account.stocks.items()
    )


def queues_to_compare(one: str, other: str, accounts: Accounts) -> tuple[str, str]:
    """Return the two queues to compare: the first in which the paths from the roots differ, otherwise the last pair."""
    pairs = list(zip(path(one, accounts), path(other, accounts), strict=False))
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])


def path(queue: str, accounts: Accounts) -> tuple[str, ...]:
    """Return the names of the queues from the root to this one."""
    names = [queue]
    while accounts[names[-1]].parent:
        names.append(accounts[names[-1]].parent)
    return tuple(reversed(names))


class TakenBundles:
    """Takes bundles one by one from queues, and decides whether the result is fair. Not thread-safe."""

    def __init__(self, claimant: Claimant, accounts: Accounts) -> None:
        self._claimant = claimant
        self._accounts = accounts
        self.path = cache(partial(path, accounts=accounts))
        """Returns the names of the queues from the root to a queue."""
        self.compared = cache(partial(queues_to_compare, claimant.queue, accounts=accounts))
        """Returns the claimant's queue and another one, or the ancestors of both at which they are compared."""
        self._remaining: dict[str, dict[str, float]] = {}
        self._involved: dict[str, set[str]] = {}

    def held(self, queue: str) -> dict[str, float]:
        """Return what the queue still holds."""
        stocks = self._accounts[queue].stocks
        return self._remaining.get(queue) or {name: stock.allocated for name, stock in stocks.items()}

    def right(self, queue: str) -> Right | None:
        """Return the rule by which the next bundle may come from this leaf queue; None without such a rule."""
        own, other = self.compared(queue)
        if own == other:
            return None
        return right_to_take(self._claimant, self._accounts[own], self._accounts[other], self.held(other))

    def take(self, queue: str, bundle: Amounts) -> None:
        """Subtract the bundle from the queue and its ancestors."""
        for name in self.path(queue):
            held = self._remaining.setdefault(name, self.held(name))
            for resource, amount in bundle.items():
                if amount and resource in held:
                    held[resource] -= amount
                    self._involved.setdefault(name, set()).add(resource)

    def fair(self, saturation: float = 1.0) -> bool:
        """Return whether the claimant's queue ends up no more saturated than the queues it takes from, at every level.

        saturation: >= 1. The queues from which the claimant takes must stay more saturated than its own queue by this
            factor if its queue goes above its share."""
        requested = {name for name, amount in self._claimant.required.items() if amount > 0}
        for name in reversed(path(self._claimant.queue, self._accounts)):
            account = self._accounts[name]
            amounts = {r: _sum(amount, self._claimant.required, r) for r, amount in self.held(name).items()}
            if name in self._remaining:
                self._remaining[name] = amounts
            for sibling in sorted(self._remaining):
                other = self._accounts[sibling]
                if sibling == name or other.parent != account.parent:
                    continue
                for resource in sorted(self._involved.get(sibling, set()) | requested):
                    if self._is_unfair(account, other, amounts, resource, saturation):
                        return False
            if not self._claimant.preemptible and any(
                _sum(stock.fixed, self._claimant.required, r) > _open(stock.deserved) + EPSILON
                for r, stock in account.stocks.items()
            ):
                return False
        return True

    def _is_unfair(self, account: Account, other: Account, amounts: Amounts, resource: str, saturation: float) -> bool:
        if resource not in account.stocks or resource not in other.stocks:
            return False
        own_share, other_share = account.stocks[resource].share, other.stocks[resource].share
        if own_share == UNLIMITED and other_share == UNLIMITED:
            return False
        own_ratio = ratio(amounts[resource], own_share)
        return (
            own_ratio > 1 + EPSILON
            and other_share > 0
            and own_ratio * saturation >= ratio(self._remaining[other.queue][resource], other_share)
        )


def ratio(allocated: float, share: float) -> float:
    """Return the saturation of a queue, which is allocated / share.

    The result is 0 for an unlimited share, and infinite for a queue that has no share and holds something."""
    if share == UNLIMITED:
        return 0.0
    if share == 0:
        return inf if allocated > 0 else 0.0
    return allocated / share


def _open(amount: float) -> float:
    """Return the amount with infinity for unlimited."""
    return inf if amount == UNLIMITED else amount


def _sum(held: float, required: Amounts, resource: str) -> float:
    return held + required.get(resource, 0.0)


Limit = Literal["cool-down", "per-team", "per-cluster", "lost-hours"]
"""The limit that kept a workload from being stopped."""


@dataclass(frozen=True)
class Denial:
    """The limit because of which a workload may not be stopped, and the reason in words with its figures.

    A search meets a limit at thousands of parts, and only some reasons are read: the words are put together for these
    alone."""

    limit: Limit
    words: str
    figures: tuple[object, ...]

    @cached_property
    def reason(self) -> str:
        return self.words.format(*self.figures)


@dataclass(frozen=True, slots=True)
class PastPreemption:
    """One preempted workload (or a part of it).

    key: the workload (`Gang.key`).
    team: the team of its queue, or the queue itself if it has no team.
    decision: the id of the decision record."""

    at_ms: int
    key: str
    queue: str
    team: str
    gpus: float
    lost_gpu_hours: float
    decision: str = ""


def still_limiting(past: Sequence[PastPreemption], now_ms: int, cool_down_s: int) -> tuple[PastPreemption, ...]:
    """Return the preemptions that any limit still counts, oldest first."""
    since = now_ms - max(MS_PER_DAY, cool_down_s * MS_PER_SECOND)
    return tuple(sorted((each for each in past if each.at_ms > since), key=lambda each: (each.at_ms, each.key)))


COUNT_LIMITS: Final[frozenset[Limit]] = frozenset({"per-team", "per-cluster"})
"""Limits that refuse, once they are reached, every workload of a team that is not being stopped already."""
_PARTS_OF_AN_HOUR: Final = 2**1074
"""Every float is a whole number of these parts, so sums of lost GPU-hours are exact."""


class ReclaimBudget:
    """The workloads and the work that the limits still allow to be stopped now.

    Each `spend` reduces it. A cycle checks it thousands of times, once for every candidate. It therefore keeps sums of
    everything that a limit compares, and the sum of lost work exactly."""

    def __init__(self, rules: PreemptionPolicy, past: Sequence[PastPreemption], now_ms: int) -> None:
        self._rules = rules
        self.now_ms = now_ms
        self.stopped: set[str] = set()
        """Keys of the workloads of which anything was stopped. Only they may meet other limits than the rest of their
        team (`COUNT_LIMITS`)."""
        self._last_ms: dict[str, int] = {}
        self._going: set[str] = set()
        self._hour: set[tuple[str, int]] = set()
        self._by_team: dict[str, set[tuple[str, int]]] = {}
        self._full: dict[str, Denial | None] = {}
        self._lost, self._lost_hours = 0, 0.0
        for each in still_limiting(past, now_ms, rules.cool_down):
            self.spend(each)

    def copy(self) -> ReclaimBudget:
        other = copy(self)
        other.stopped = set(self.stopped)
        other._last_ms, other._going, other._hour = dict(self._last_ms), set(self._going), set(self._hour)
        other._full = {}
        other._by_team = {team: set(stopped) for team, stopped in self._by_team.items()}
        return other

    def spend(self, past: PastPreemption) -> None:
        stop = (past.key, past.at_ms)
        self.stopped.add(past.key)
        self._full.clear()
        if past.at_ms < self.now_ms:
            self._last_ms[past.key] = max(past.at_ms, self._last_ms.get(past.key, past.at_ms))
        elif past.at_ms == self.now_ms:
            self._going.add(past.key)
        if past.at_ms > self.now_ms - MS_PER_HOUR:
            self._hour.add(stop)
            self._by_team.setdefault(past.team, set()).add(stop)
        if past.at_ms > self.now_ms - MS_PER_DAY:
            numerator, denominator = past.lost_gpu_hours.as_integer_ratio()
            self._lost += numerator * (_PARTS_OF_AN_HOUR // denominator)
            self._lost_hours = self._lost / _PARTS_OF_AN_HOUR

    def refusal(self, key: str, team: str, lost_gpu_hours: float) -> Denial | None:
        """Return why this workload may not be stopped now; None if it may.

        Further parts of a workload that is being stopped at the same time do not count as another workload."""
        rules = self._rules
        last = self._last_ms.get(key) if self._last_ms else None
        if last is not None and self.now_ms - last < rules.cool_down * MS_PER_SECOND:
            ago = (self.now_ms - last) // MS_PER_MINUTE
            return Denial("cool-down", _COOL_DOWN, (ago, rules.cool_down / 60))
        if key not in self._going:
            if team not in self._full:
                self._full[team] = self._count_refusal(team)
            denial = self._full[team]
            if denial is not None:
                return denial
        if self._lost_hours + lost_gpu_hours > rules.lost_gpu_hours:
            return Denial("lost-hours", _LOST_HOURS, (self._lost_hours, lost_gpu_hours, rules.lost_gpu_hours))
        return None

    def _count_refusal(self, team: str) -> Denial | None:
        """Return why no further workload of the team may be stopped; None if one may."""
        of_team = len(self._by_team.get(team, ()))
        if of_team >= self._rules.per_team:
            return Denial("per-team", _PER_TEAM, (of_team, team))
        of_cluster = len(self._hour)
        if of_cluster >= self._rules.per_cluster:
            return Denial("per-cluster", _PER_CLUSTER, (of_cluster,))
        return None


_COOL_DOWN = "it was preempted {} min ago, and is protected for {:g} min"
_PER_TEAM = "{} workloads of team {} were stopped within the hour, and no more may be"
_PER_CLUSTER = "{} workloads of the cluster were stopped within the hour, and no more may be"
_LOST_HOURS = (
    "{:.1f} GPU-hours of work were lost within the day, and with its {:.1f} that would be more than the {:g} allowed"
)
