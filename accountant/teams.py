"""Who pays for a pod: which queue it asked for, and which of its labels may count. Pure.

A queue decides first (accountant.store.assignment), because a scheduler enforces it; then the namespace,
which only its administrator can label. A pod is labelled by its user, and users must not choose who
pays: its labels count only where the namespace allows, only with the values that it allows, and only as
they were when the pod was first seen, early in its life. A label set later changes nothing, so nothing
that is booked is ever paid by somebody else on a user's word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from accountant.ledger import NamespaceFacts
from agent.units import MS_PER_HOUR
from agent.wire import PodFacts

TEAM_KEY = "gputally.dev/team"
"""Of a namespace, as annotation or label: its team."""
LABEL_KEY = "gputally.dev/team-label"
"""Of a namespace, as annotation: the pod label that may name a team …"""
TEAMS_KEY = "gputally.dev/teams"
"""… and the teams it may name, comma-separated."""
USER_KEY = "gputally.dev/user"
"""Of a pod, as label or annotation: who runs it. It names a person in a table and decides nothing."""
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
KAI_SCHEDULERS = frozenset({"kai-scheduler", "runai-scheduler"})
VOLCANO_SCHEDULERS = frozenset({"volcano"})
_KAI_QUEUES = ("kai.scheduler/queue", "runai/queue")
_VOLCANO_QUEUES = ("volcano.sh/queue-name", "scheduling.volcano.sh/queue-name")
LATE_MS = MS_PER_HOUR
"""Labels of a pod that is first seen later than this after its start count for nothing."""


def queue_ref(
    namespace: str, scheduler: str, labels: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> str:
    """The queue a pod asked for, as in agent.wire.PodFacts; "" where none.

    KAI's and Volcano's labels count only on pods that these schedulers place: on any other they would be
    a way to let somebody else pay. Kueue's name a LocalQueue of the pod's own namespace."""
    written = {**(annotations or {}), **labels}
    if local := labels.get(KUEUE_QUEUE):
        return f"kueue:{namespace}/{local}"
    for schedulers, keys, scheme in (
        (KAI_SCHEDULERS, _KAI_QUEUES, "kai"),
        (VOLCANO_SCHEDULERS, _VOLCANO_QUEUES, "volcano"),
    ):
        named = next((written[key] for key in keys if written.get(key)), "")
        if scheduler in schedulers and named:
            return f"{scheme}:{named}"
    return ""


def labels_count(fact: PodFacts) -> bool:
    """Whether labels as of this observation may name a team: seen within LATE_MS of the pod's start."""
    begun = next((at for at in (fact.started_ms, fact.scheduled_ms, fact.created_ms) if at is not None), None)
    return bool(fact.labels.keys() - {USER_KEY}) and begun is not None and fact.observed_ms <= begun + LATE_MS


def namespace_facts(
    cluster: str,
    name: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    keys: Collection[str] = (),
) -> NamespaceFacts:
    """What a namespace says about who pays. keys: further label keys that name the team, best first."""
    found = [annotations.get(TEAM_KEY), labels.get(TEAM_KEY), *(labels.get(key) for key in keys)]
    teams = tuple(sorted({team.strip() for team in annotations.get(TEAMS_KEY, "").split(",")} - {""}))
    label = annotations.get(LABEL_KEY, "") if teams else ""
    return NamespaceFacts(cluster, name, next((team for team in found if team), ""), label, teams if label else ())
