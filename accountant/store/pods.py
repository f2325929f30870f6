"""Pods as dimensions: whose they are and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from accountant.store.assignment import NOBODY_RULES
from accountant.store.database import Cursor
from accountant.store.state import State
from accountant.teams import labels_count
from accountant.waits import merged
from agent.wire import PodFacts

_decoder = msgspec.json.Decoder(PodFacts)


@dataclass(frozen=True, slots=True)
class KnownPod:
    """A pod, with the team and the queue it had when it was made."""

    cluster: str
    team: str
    queue: str
    facts: PodFacts


def pods(cursor: Cursor, state: State, start_ms: int, end_ms: int) -> list[KnownPod]:
    """Those that existed in the span, by cluster and uid. A pod whose making nobody saw is not among them."""
    found = []
    for cluster, node, seen in cursor.rows("pods_between", {"low": start_ms, "high": end_ms}):
        facts = merged(*(_decoder.decode(text) if text is not None else None for text in (node, seen)))
        made = facts.created_ms if facts.created_ms is not None else start_ms
        rules = NOBODY_RULES
        for policy in state.policies[:1] + tuple(p for p in state.policies[1:] if p.since_ms <= made):
            rules = policy
        queue = rules.queue(facts.queue_ref)
        space = state.fleet.namespace_at((cluster, facts.namespace), made)
        team = rules.team(queue, space, facts.labels if labels_count(facts) else {})
        found.append(KnownPod(cluster, team, queue, facts))
    return found
