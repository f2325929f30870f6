"""Whom the rules leave alone whoever asks, and to whose limits a victim counts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from accountant.wire import Policy
from agent.units import MS_PER_SECOND
from fairshare.preempting.limits import Past
from fairshare.preempting.rulings import Situation
from fairshare.preempting.victims import Bundle

_STAYS = {"DaemonSet": "a DaemonSet, which starts it again at once on the same node", "Node": "the kubelet itself"}
"""Whose pods make no room by going."""


def protected(policy: Policy, situation: Situation, bundle: Bundle) -> str | None:
    """Why this part is left alone whoever asks; None: it is not."""
    gang = bundle.gang
    if bundle.key in situation.vetoed:
        return situation.vetoed[bundle.key]
    if not gang.preemptible:
        return "it may not be preempted"
    for pod in bundle.pods:
        whose = _STAYS.get(pod.owner.partition("/")[0])
        if whose is not None:
            return f"its pod {pod.name} belongs to {whose}"
    runtime = policy.preemption.min_runtime
    started_ms = gang.started_ms
    if started_ms is None and bundle.pods:
        started_ms = situation.now_ms  # bound, and its kubelet has not spoken yet
    if bundle.whole and started_ms is not None:
        ran_s = (situation.now_ms - started_ms) / MS_PER_SECOND
        if ran_s < runtime:
            return f"it has run for {max(0.0, ran_s) // 60:.0f} of the {runtime / 60:g} min that every start is left"
    return None


def teams(policy: Policy) -> Mapping[str, str]:
    """Whose limit a queue's victims count to: its team, the nearest ancestor's, else the queue itself."""
    queues = {each.name: each for each in policy.queues}

    def team(name: str) -> str:
        at: str | None = name
        while at is not None and at in queues:
            found = queues[at].team
            if found is not None:
                return found
            at = queues[at].parent
        return name

    return {name: team(name) for name in queues}


def past_of(team: str, bundle: Bundle, now_ms: int) -> Past:
    """What stopping it now will have been. team: whose limit it counts to."""
    return Past(now_ms, bundle.key, bundle.gang.queue, team, bundle.gpus, bundle.lost_gpu_hours)


def class_name(policy: Policy, priority: int) -> str:
    """A priority as people know it."""
    found = next((each.name for each in policy.preemption.classes if each.value == priority), None)
    return f"{found} ({priority})" if found else str(priority)
