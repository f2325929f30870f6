"""What the ledger keeps beside usage: inventory facts, dated policies, decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
from msgspec import structs

from accountant.ledger import Facts
from accountant.store import columns
from accountant.store.booking import write_pods
from accountant.store.database import Cursor
from accountant.store.facts import node_text
from accountant.store.fleet import Fleet
from accountant.wire import Decision, PolicyVersion

_NODE = pa.schema([("cluster", pa.string()), ("name", pa.string()), ("content", pa.string())])
_NAMESPACE = pa.schema([("cluster", pa.string()), ("name", pa.string()), ("team", pa.string())])
_DECISION = pa.schema(
    [("id", pa.string()), ("at_ms", pa.int64()), ("received_ms", pa.int64()), ("content", pa.string())]
)


def write_facts(cursor: Cursor, fleet: Fleet, facts: Facts, now_ms: int) -> Fleet:
    """Replace what the reading names; the fleet as it is then."""
    nodes = {(node.cluster, node.name): node for node in facts.nodes}
    namespaces = {(space.cluster, space.name): space for space in facts.namespaces}
    changed = {key: node for key, node in nodes.items() if fleet.nodes.get(key) != node}
    if changed:
        rows = [(*key, node_text(node)) for key, node in changed.items()]
        cursor.rows("set_nodes", incoming=columns.table(_NODE, rows))
    renamed = {key: space for key, space in namespaces.items() if fleet.namespaces.get(key) != space}
    if renamed:
        cursor.rows("set_namespaces", incoming=columns.table(_NAMESPACE, [(*k, s.team) for k, s in renamed.items()]))
    if facts.pods:
        # An observation from the future would win over every later one.
        write_pods(cursor, [(c, structs.replace(f, observed_ms=min(f.observed_ms, now_ms))) for c, f in facts.pods])
    return replace(fleet, nodes={**fleet.nodes, **changed}, namespaces={**fleet.namespaces, **renamed})


def write_policy(cursor: Cursor, version: PolicyVersion) -> None:
    content = version.policy.model_dump_json(by_alias=True)
    cursor.run("INSERT INTO policy VALUES (?, ?, ?)", [version.version, version.effective_ms, content])


def policies_between(policies: Sequence[PolicyVersion], start_ms: int, end_ms: int) -> list[PolicyVersion]:
    """Those in force in [start_ms, end_ms), oldest first; the first one is in force before its date too."""
    ends = [later.effective_ms for later in policies[1:]] + [end_ms]
    found = []
    for index, (version, until) in enumerate(zip(policies, ends, strict=False)):
        since = version.effective_ms if index else min(start_ms, version.effective_ms)
        last = index == len(policies) - 1
        if since < end_ms and (last or until > start_ms):
            found.append(version)
    return found


def write_decisions(cursor: Cursor, decisions: Sequence[Decision], now_ms: int) -> int:
    """How many were new, by id; what is known already stays as it was."""
    first = {decision.id: decision for decision in reversed(decisions)}
    rows = [(d.id, d.at_ms, now_ms, d.model_dump_json()) for d in sorted(first.values(), key=lambda d: (d.at_ms, d.id))]
    return int(cursor.rows("add_decisions", incoming=columns.table(_DECISION, rows))[0][0]) if rows else 0


def read_decisions(cursor: Cursor, start_ms: int, end_ms: int, limit: int) -> list[Decision]:
    """Newest first."""
    rows = cursor.run(
        "SELECT content FROM decision WHERE at_ms >= ? AND at_ms < ? ORDER BY at_ms DESC, id DESC LIMIT ?",
        [start_ms, end_ms, limit],
    )
    return [Decision.model_validate_json(row[0]) for row in rows]
