"""Pods as dimensions: whose they are and what is known of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from accountant.inventory.podqueue import ObservedPod
from accountant.inventory.teams import labels_count
from accountant.progress import JobKey
from accountant.store.database import Cursor, statement
from accountant.store.state import State
from accountant.store.writing.assignment import NOBODY_RULES
from accountant.work.waits import KnownPod, merged

_decoder = msgspec.json.Decoder(ObservedPod)
_WAITING = " AND coalesce(s.at[2], p.at[2], s.at[3], p.at[3], s.at[4], p.at[4]) IS NULL"
_PLACED = ", CAST(s.at[2] AS BIGINT), CAST(p.at[2] AS BIGINT), CAST(s.at[3] AS BIGINT), CAST(p.at[3] AS BIGINT)"
_OF_JOBS = "(FROM {table} WHERE (cluster, uid) IN ({named}))"


def pods(
    cursor: Cursor,
    state: State,
    start_ms: int,
    end_ms: int,
    *,
    of: Collection[JobKey] | None = None,
    waiting: bool = False,
    placed: bool = False,
) -> list[KnownPod]:
    """Those that existed in the span, by cluster and uid. A pod whose making nobody saw is not among them, unless
    placed: then it counts from when it was placed, as imported pods do.

    of: only those of these jobs. waiting: only those of which nobody has told that they were placed, or ended."""
    asked: dict[str, Any] = {"low": start_ms, "high": end_ms}
    tables = {"pod": "pod", "seen": "pod_seen"}
    if of is not None:
        asked |= {"jobs": sorted({key.job for key in of}), "names": sorted({key.job.partition("/")[2] for key in of})}
        named = statement("pods_named")
        tables = {name: _OF_JOBS.format(table=table, named=named) for name, table in tables.items()}
    found = []
    sql = statement("pods_between").format(only=_WAITING * waiting, placed=_PLACED * placed, **tables)
    for cluster, node, seen in cursor.run(sql, asked):
        facts = merged(None if node is None else _decoder.decode(node), None if seen is None else _decoder.decode(seen))
        made = facts.created_ms if facts.created_ms is not None else start_ms
        rules = NOBODY_RULES
        for policy in state.policies[:1] + tuple(p for p in state.policies[1:] if p.since_ms <= made):
            rules = policy
        queue = rules.queue(facts.queue_ref)
        space = state.fleet.namespace_at((cluster, facts.namespace), made)
        chooses = space is not None and space.label and labels_count(facts)
        team = rules.team(queue, space, facts.labels if chooses else {})
        found.append(KnownPod(cluster, team, queue, facts))
    return found if of is None else [pod for pod in found if pod.key in frozenset(of)]
