"""Which queue and team a holder belongs to, by the policy in force.

The queue comes from the pod's queue_ref; the team from the queue or its nearest ancestor that has
one, then from the namespace, where a label of the pod may choose among the teams the namespace allows.
What nothing assigns is UNASSIGNED: never guessed. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from accountant.ledger import NamespaceFacts
from accountant.wire import UNASSIGNED, PolicyVersion, QueuePolicy

OWN_SCHEME = "policy:"
"""A queue_ref that names a queue of the policy itself."""

_KUEUE, _COHORT = "kueue:", "kueue-cohort:"


class Assignment:
    """The mapping of one policy; without a policy only namespaces assign."""

    def __init__(self, version: PolicyVersion | None) -> None:
        self.version = version
        queues = version.policy.queues if version is not None else ()
        self.queues: Mapping[str, QueuePolicy] = {queue.name: queue for queue in queues}
        self._owner = {ref: queue.name for queue in queues for ref in queue.refs}
        for name in self.queues:
            self._owner.setdefault(OWN_SCHEME + name, name)

    @property
    def since_ms(self) -> int:
        """From when on it is in force."""
        return self.version.effective_ms if self.version is not None else 0

    @cached_property
    def counting(self) -> str | None:
        """accountant.wire.Policy.counting; None without a policy."""
        return self.version.policy.counting() if self.version is not None else None

    def mapping(self) -> object:
        """What decides: two policies with equal mapping assign alike."""
        return tuple(sorted((q.name, q.parent or "", q.team or "", q.refs) for q in self.queues.values()))

    def queue(self, queue_ref: str) -> str:
        """UNASSIGNED for one nobody has. Of `kueue:NAMESPACE/NAME@CLUSTERQUEUE^COHORT^PARENT` the LocalQueue counts
        before the ClusterQueue it leads to, and that before its cohorts, nearest first."""
        found = self._owner.get(queue_ref)
        if found is None and queue_ref.startswith(_KUEUE) and "@" in queue_ref:
            local, _, leads = queue_ref.partition("@")
            cluster_queue, *cohorts = leads.split("^")
            names = (local, _KUEUE + cluster_queue, *(_COHORT + cohort for cohort in cohorts))
            found = next((owner for name in names if (owner := self._owner.get(name)) is not None), None)
        return found or UNASSIGNED

    def team(self, queue: str, space: NamespaceFacts | None, labels: Mapping[str, str]) -> str:
        """Who pays: the queue or its nearest ancestor with a team, then the pod's label where the namespace
        lets it choose among some teams, then the namespace's own team."""
        for name in self.lineage(queue):
            team = self.queues[name].team
            if team:
                return team
        if space is None:
            return UNASSIGNED
        chosen = labels.get(space.label) if space.label else None
        return chosen if chosen and chosen in space.teams else space.team or UNASSIGNED

    def lineage(self, queue: str) -> list[str]:
        """The queue and its ancestors, nearest first; nothing for an unknown one."""
        names = []
        at: str | None = queue if queue in self.queues else None
        while at is not None:
            names.append(at)
            at = self.queues[at].parent
        return names


NOBODY_RULES = Assignment(None)


def in_force(policies: Sequence[Assignment], start_ms: int, end_ms: int) -> list[tuple[int, int, Assignment]]:
    """The span cut where the mapping changes: (start, end, rules), ascending.

    `policies` ascends by since_ms. Before the first one, the first one is used. Of versions that assign
    alike the last stands for all."""
    current = policies[0] if policies else NOBODY_RULES
    pieces: list[tuple[int, int, Assignment]] = []
    at = start_ms
    for rules in policies:
        if rules.since_ms >= end_ms:
            break
        if rules.since_ms > at and rules.mapping() != current.mapping():
            pieces.append((at, rules.since_ms, current))
            at = rules.since_ms
        current = rules
    pieces.append((at, end_ms, current))
    return pieces
