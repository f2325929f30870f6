"""The queue tree a scheduler keeps: what each queue holds and asks for, and its fair share.

Shares are KAI's division without history (k = 0) over the weights in force; a controller that wants
history to count changes the weights. Whole GPUs only. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from fairshare.division import divide
from fairshare.model import UNLIMITED, Case, Claim
from fairshare.preempting.claims import GPU
from fairshare.preempting.reclaim import Account, Stock


@dataclass(frozen=True, slots=True)
class QueueState:
    """One queue as its status shows it, in whole GPUs. requested contains allocated; a parent contains
    its children. share: the scheduler's own fair share under the weights in force."""

    allocated: int
    allocated_non_preemptible: int
    requested: int
    share: float
    weight: float


class QueueTree:
    """Mutable counts over a fixed tree. Jobs belong to leaves; a parent counts its leaves."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        """Raises fairshare.errors.DivisionError for a tree that cannot be divided."""
        divide(Case("check", 0.0, 0.0, tuple(claims)))
        self._claims = {claim.name: claim for claim in sorted(claims, key=lambda c: c.name)}
        parents = {claim.parent for claim in claims}
        self.leaves = tuple(name for name in self._claims if name not in parents)
        self._path: dict[str, tuple[str, ...]] = {}
        for leaf in self.leaves:
            path: list[str] = []
            at: str | None = leaf
            while at is not None:
                path.append(at)
                at = self._claims[at].parent
            self._path[leaf] = tuple(path)
        self._unlimited = {n for n, path in self._path.items() if all(self._limit(q) == inf for q in path)}
        self.allocated = dict.fromkeys(self._claims, 0)
        self._non_preemptible = dict.fromkeys(self._claims, 0)
        self.requested = dict.fromkeys(self._claims, 0)
        self._shares: Mapping[str, float] = {}
        self._divided: int | None = None
        """The total that `_shares` was divided from; None once a request or a weight has changed."""

    def set_weights(self, weights: Mapping[str, float]) -> bool:
        """Weights of some queues from now on; True if any changed. Raises KeyError for an unknown queue,
        ValueError for a negative weight."""
        changed = False
        for name, weight in weights.items():
            if not weight >= 0:
                raise ValueError(f"queue {name}: weight {weight} is not >= 0")
            if weight != self._claims[name].weight:
                self._claims[name] = replace(self._claims[name], weight=weight)
                changed = True
        if changed:
            self._divided = None
        return changed

    def deserved(self, name: str) -> float:
        quota = self._claims[name].deserved
        return inf if quota == UNLIMITED else quota

    def request(self, leaf: str, gpus: int) -> None:
        """`gpus` more are asked for (fewer, if negative)."""
        self._divided = None
        for name in self._path[leaf]:
            self.requested[name] += gpus

    def allocate(self, leaf: str, gpus: int, preemptible: bool) -> None:
        """`gpus` more are held (fewer, if negative)."""
        for name in self._path[leaf]:
            self.allocated[name] += gpus
            if not preemptible:
                self._non_preemptible[name] += gpus

    def admits(self, leaf: str, gpus: int, preemptible: bool) -> bool:
        """KAI's capacity gates on the whole path: within every limit; non-preemptible within deserved."""
        if preemptible and leaf in self._unlimited:
            return True
        return all(
            self.allocated[name] + gpus <= self._limit(name)
            and (preemptible or self._non_preemptible[name] + gpus <= self.deserved(name))
            for name in self._path[leaf]
        )

    def ever_admits(self, leaf: str, gpus: int, preemptible: bool) -> bool:
        """Whether the gates open for this gang while nothing else runs."""
        return all(
            gpus <= self._limit(name) and (preemptible or gpus <= self.deserved(name)) for name in self._path[leaf]
        )

    def shares(self, total: int) -> Mapping[str, float]:
        """Fair share of every queue out of `total` GPUs, given what is asked for now."""
        if total != self._divided:
            for name, claim in self._claims.items():
                if claim.request != self.requested[name]:
                    self._claims[name] = replace(claim, request=self.requested[name])
            self._shares = divide(Case("cycle", total, 0.0, tuple(self._claims.values()))).shares
            self._divided = total
        return self._shares

    def order(self, leaf: str, gpus: int, shares: Mapping[str, float]) -> tuple[object, ...]:
        """Sort key of a queue whose next job needs `gpus`: the smallest goes first.

        Source: KAI-Scheduler queue_order.go, commit d5bc503a (one resource, usage acts through the share)."""
        claim = self._claims[leaf]
        held = self.allocated[leaf]
        allocatable = min(self._limit(leaf), max(self.deserved(leaf), shares[leaf]))
        with_job, without = ((held + gpus) / allocatable, held / allocatable) if allocatable > 0 else (inf, inf)
        return (
            held > shares[leaf],
            held + gpus > self.deserved(leaf),
            -claim.priority,
            with_job,
            without,
            claim.creation,
            leaf,
        )

    def accounts(self, total: int) -> dict[str, Account]:
        """Every queue as the rules of reclaim see it, now."""
        shares = self.shares(total)
        return {
            name: Account(
                name,
                claim.parent or "",
                {
                    GPU: Stock(
                        claim.deserved, shares[name], claim.limit, self.allocated[name], self._non_preemptible[name]
                    )
                },
            )
            for name, claim in self._claims.items()
        }

    def states(self, total: int) -> dict[str, QueueState]:
        shares = self.shares(total)
        return {
            name: QueueState(
                self.allocated[name], self._non_preemptible[name], self.requested[name], shares[name], claim.weight
            )
            for name, claim in self._claims.items()
        }

    def _limit(self, name: str) -> float:
        limit = self._claims[name].limit
        return inf if limit == UNLIMITED else limit
