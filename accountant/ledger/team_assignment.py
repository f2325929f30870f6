"""Determines the queue and the team of a pod from its queue reference, namespace and labels.

The queue comes from the pod's queue_ref. The team comes from the queue or its nearest ancestor that has one, otherwise
from the namespace, where a label of the pod may choose among the teams that the namespace allows. A pod without any of
these is UNASSIGNED; nothing is guessed.

The queue takes precedence because a scheduler enforces it; the namespace comes second because only its administrator
can label it. Users label their own pods and must not choose who pays. Pod labels therefore count only if the namespace
allows it, only with the values that it allows, and only as they were when the pod was first seen, early in its life. A
label that is set later has no effect, so it cannot move booked time to another team."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from accountant.ledger.protocols import NamespaceFacts
from accountant.wire.policy_models import UNASSIGNED, PolicyVersion, QueuePolicy
from agent.wire import PodFacts
from gputally.base.units import MS_PER_HOUR
from gputally.kubernetes.pod_queue_labels import refs_of_levels

OWN_SCHEME = "policy:"
"""Prefix of a queue_ref that names a queue of the policy itself."""


class Assignment:
    """Assigns pods by the mapping of one policy; without a policy only namespaces assign teams."""

    def __init__(self, version: PolicyVersion | None) -> None:
        self.version = version
        queues = version.policy.queues if version is not None else ()
        self.queues: Mapping[str, QueuePolicy] = {queue.name: queue for queue in queues}
        self._owner = {ref: queue.name for queue in queues for ref in queue.refs}
        for name in self.queues:
            self._owner.setdefault(OWN_SCHEME + name, name)

    @property
    def since_ms(self) -> int:
        """The instant from which the policy is in force."""
        return self.version.effective_ms if self.version is not None else 0

    @cached_property
    def counting(self) -> str | None:
        """A digest of what the policy says about queues and teams (`Policy.counting`); None without a policy."""
        return self.version.policy.counting() if self.version is not None else None

    def mapping(self) -> object:
        """The part of the policy that determines the assignment; policies with equal mappings assign alike."""
        return tuple(sorted((q.name, q.parent or "", q.team or "", q.refs) for q in self.queues.values()))

    def queue(self, queue_ref: str) -> str:
        """The queue of a queue_ref; UNASSIGNED if no queue has it. Of its levels the nearest counts."""
        found = self._owner.get(queue_ref)
        if found is None and "@" in queue_ref:
            refs = refs_of_levels(queue_ref)
            found = next((owner for ref in refs if (owner := self._owner.get(ref)) is not None), None)
        return found or UNASSIGNED

    def team(self, queue: str, space: NamespaceFacts | None, labels: Mapping[str, str]) -> str:
        """The team that pays: that of the queue or its nearest ancestor with a team, otherwise the one the pod's label
        chooses if the namespace allows it, otherwise the namespace's own team, otherwise UNASSIGNED.

        space: None if the namespace is unknown.
        labels: those of the pod."""
        for name in self.lineage(queue):
            team = self.queues[name].team
            if team:
                return team
        if space is None:
            return UNASSIGNED
        chosen = labels.get(space.label) if space.label else None
        return chosen if chosen and chosen in space.teams else space.team or UNASSIGNED

    def lineage(self, queue: str) -> list[str]:
        """The queue and its ancestors, nearest first; empty for an unknown queue."""
        names = []
        at: str | None = queue if queue in self.queues else None
        while at is not None:
            names.append(at)
            at = self.queues[at].parent
        return names


NO_POLICY = Assignment(None)


def policies_between(policies: Sequence[PolicyVersion], start_ms: int, end_ms: int) -> list[PolicyVersion]:
    """The policies in force in [start_ms, end_ms), oldest first. The first policy also applies before its
    date."""
    ends = [later.effective_ms for later in policies[1:]] + [end_ms]
    found = []
    for index, (version, until) in enumerate(zip(policies, ends, strict=False)):
        since = version.effective_ms if index else min(start_ms, version.effective_ms)
        last = index == len(policies) - 1
        if since < end_ms and (last or until > start_ms):
            found.append(version)
    return found


def in_force(policies: Sequence[Assignment], start_ms: int, end_ms: int) -> list[tuple[int, int, Assignment]]:
    """Splits the span where the mapping changes and returns (start, end, assignment) in ascending order.

    policies: ascending by since_ms. The first one also applies before its start. Consecutive versions with the same
    mapping are merged; the last one stands for them."""
    current = policies[0] if policies else NO_POLICY
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


def rolled_up(leaves: Mapping[str, int], policies: Sequence[Assignment]) -> tuple[dict[str, int], int]:
    """Usage per queue including descendants, and the usage that belongs to no queue.

    If a queue was removed from the policy, its usage goes to the queue that now has its refs. If no queue or several
    have them, the usage stays under the old name, and also counts for its former ancestors that still exist."""
    current = policies[-1] if policies else NO_POLICY
    usage = dict.fromkeys(current.queues, 0)
    for queue, value in leaves.items():
        if queue == UNASSIGNED or not value:
            continue
        for name in current.lineage(queue) or _heirs(queue, policies, current):
            usage[name] = usage.get(name, 0) + value
    return dict(sorted(usage.items())), leaves.get(UNASSIGNED, 0)


def _heirs(queue: str, policies: Sequence[Assignment], current: Assignment) -> list[str]:
    """The queues that receive the usage of a removed one, by the last policy that contained it."""
    before = next((rules for rules in reversed(policies) if queue in rules.queues), None)
    if before is None:
        return [queue]
    owners = {current.queue(ref) for ref in before.queues[queue].refs}
    if len(owners) == 1 and UNASSIGNED not in owners:
        return current.lineage(owners.pop())
    above = next((name for name in before.lineage(queue) if name in current.queues), None)
    return [queue, *(current.lineage(above) if above is not None else ())]


TEAM_KEY = "gputally.dev/team"
"""Annotation or label of a namespace that names its team."""
LABEL_KEY = "gputally.dev/team-label"
"""Annotation of a namespace that names the pod label by which pods may choose a team."""
TEAMS_KEY = "gputally.dev/teams"
"""Annotation of a namespace with the teams that this label may name, comma-separated."""
USER_KEY = "gputally.dev/user"
"""Label or annotation of a pod that names the user who runs it. It appears in reports only and does not affect who
pays."""
LATE_MS = MS_PER_HOUR
"""If a pod is first seen later than this after its start, its labels are ignored."""


def labels_count(fact: PodFacts) -> bool:
    """Whether this observation has labels that may choose a team: labels besides USER_KEY, observed at most LATE_MS
    after the pod's start (if that is unknown, after its placement or creation)."""
    begun = next((at for at in (fact.started_ms, fact.scheduled_ms, fact.created_ms) if at is not None), None)
    return bool(fact.labels.keys() - {USER_KEY}) and begun is not None and fact.observed_ms <= begun + LATE_MS


def namespace_facts(
    cluster: str,
    name: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    keys: Collection[str] = (),
) -> NamespaceFacts:
    """Returns what a namespace's labels and annotations say about its team. keys: further label keys that name the
    team, in order of precedence."""
    found = [annotations.get(TEAM_KEY), labels.get(TEAM_KEY), *(labels.get(key) for key in keys)]
    teams = tuple(sorted({team.strip() for team in annotations.get(TEAMS_KEY, "").split(",")} - {""}))
    label = annotations.get(LABEL_KEY, "") if teams else ""
    return NamespaceFacts(cluster, name, next((team for team in found if team), ""), label, teams if label else ())
