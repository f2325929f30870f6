"""Which queue and team a holder belongs to, by the policy in force.

The queue comes from the pod's queue_ref; the team from the queue or its nearest ancestor that has
one, then from the namespace. What nothing assigns is UNASSIGNED: never guessed. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from accountant.ledger import NamespaceFacts
from accountant.store.fleet import NodeKey
from accountant.wire import UNASSIGNED, Policy, PolicyVersion, QueuePolicy

OWN_SCHEME = "policy:"
"""A queue_ref that names a queue of the policy itself."""


class Assignment:
    """The mapping of one policy; without a policy only namespaces assign."""

    def __init__(self, policy: Policy | None) -> None:
        queues = policy.queues if policy is not None else ()
        self.queues: Mapping[str, QueuePolicy] = {queue.name: queue for queue in queues}
        self._owner = {ref: queue.name for queue in queues for ref in queue.refs}
        for name in self.queues:
            self._owner.setdefault(OWN_SCHEME + name, name)

    def mapping(self) -> object:
        """What decides: two policies with equal mapping assign alike."""
        return tuple(sorted((q.name, q.parent or "", q.team or "", q.refs) for q in self.queues.values()))

    def queue(self, queue_ref: str) -> str:
        return self._owner.get(queue_ref, UNASSIGNED)

    def team(self, queue: str, cluster: str, namespace: str, namespaces: Mapping[NodeKey, NamespaceFacts]) -> str:
        for name in self.lineage(queue):
            team = self.queues[name].team
            if team:
                return team
        facts = namespaces.get((cluster, namespace))
        return facts.team if facts is not None and facts.team else UNASSIGNED

    def lineage(self, queue: str) -> list[str]:
        """The queue and its ancestors, nearest first; nothing for an unknown one."""
        names = []
        at: str | None = queue if queue in self.queues else None
        while at is not None:
            names.append(at)
            at = self.queues[at].parent
        return names


@lru_cache(maxsize=64)
def assignment(policy: Policy | None) -> Assignment:
    return Assignment(policy)


def in_force(
    policies: Sequence[PolicyVersion], start_ms: int, end_ms: int
) -> list[tuple[int, int, PolicyVersion | None]]:
    """The span cut where the policy changes: (start, end, version), ascending.

    `policies` ascends by effective_ms. Before the first one, the first one is used."""
    current: PolicyVersion | None = policies[0] if policies else None
    pieces: list[tuple[int, int, PolicyVersion | None]] = []
    at = start_ms
    for version in policies:
        if version.effective_ms <= start_ms:
            current = version
        elif version.effective_ms < end_ms:
            if version.effective_ms > at:
                pieces.append((at, version.effective_ms, current))
                at = version.effective_ms
            current = version
    pieces.append((at, end_ms, current))
    return pieces


def by_mapping(
    policies: Sequence[PolicyVersion], start_ms: int, end_ms: int
) -> list[tuple[int, int, PolicyVersion | None]]:
    """`in_force`, with neighbours joined that assign alike; the later version stands for both."""
    joined: list[tuple[int, int, PolicyVersion | None]] = []
    for begin, end, version in in_force(policies, start_ms, end_ms):
        if joined and rules_of(joined[-1][2]).mapping() == rules_of(version).mapping():
            joined[-1] = (joined[-1][0], end, version)
        else:
            joined.append((begin, end, version))
    return joined


def rules_of(version: PolicyVersion | None) -> Assignment:
    """The mapping of a stored policy."""
    return assignment(version.policy if version is not None else None)
