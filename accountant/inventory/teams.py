"""Who pays for a pod: which of its labels may count. Pure.

A queue decides first (agent.queues, accountant.store.writing.assignment), because a scheduler enforces it; then the
namespace, which only its administrator can label. A pod is labelled by its user, and users must not choose who
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
LATE_MS = MS_PER_HOUR
"""Labels of a pod that is first seen later than this after its start count for nothing."""


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
