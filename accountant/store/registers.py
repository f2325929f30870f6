"""What the ledger keeps beside usage: inventory facts, dated policies, decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
from msgspec import structs

from accountant.dated import Dated
from accountant.ledger import Facts, NamespaceFacts, NodeFacts
from accountant.store.database import Cursor
from accountant.store.facts import described, write_namespaces, write_nodes
from accountant.store.fleet import Fleet, NodeKey, blank
from accountant.store.progress import write_epochs
from accountant.store.writing.adding import add
from accountant.store.writing.booking import write_pods
from accountant.wire import Decision, PolicyVersion

_DECISION = pa.schema(
    [
        ("id", pa.string()),
        ("at_ms", pa.int64()),
        ("received_ms", pa.int64()),
        ("content", pa.string()),
        ("number", pa.int64()),
    ]
)
REMOVED_AT_ONCE = 100_000
"""Decisions that one transaction removes: the writer waits for it."""


def write_retired(cursor: Cursor, ends: Mapping[int, int]) -> None:
    """ends: by GPU id from when on it is no capacity."""
    cursor.rows("add_retired", {"gpus": list(ends), "ends": list(ends.values())})


def tells_news(fleet: Fleet, facts: Facts) -> bool:
    """Whether a reading can change anything: one of nodes and namespaces mostly repeats the last."""
    return (
        bool(facts.pods or facts.epochs)
        or any(fleet.nodes.get((node.cluster, node.name)) != node for node in facts.nodes)
        or any(fleet.namespaces.get((space.cluster, space.name)) != space for space in facts.namespaces)
    )


def write_facts(cursor: Cursor, fleet: Fleet, facts: Facts, now_ms: int, closed_ms: int) -> Fleet:
    """Replace what the reading names; the fleet as it is then.

    What was known stays so for the time before the reading; what was not is now known for all time that
    is not closed."""
    nodes = {(node.cluster, node.name): node for node in facts.nodes}
    changed = {key: node for key, node in nodes.items() if fleet.nodes.get(key) != node}
    placed: dict[NodeKey, Dated[NodeFacts]] = {}
    for key, node in changed.items():
        before, after = fleet.node_history(key), described(node)
        since = now_ms if before.latest != blank(before.latest) else 0
        if before.latest != after:
            placed[key] = before.changed(after, max(since if node.since_ms is None else node.since_ms, closed_ms))
    spaces = {(space.cluster, space.name): space for space in facts.namespaces}
    renamed = {key: space for key, space in spaces.items() if fleet.namespaces.get(key) != space}
    charged: dict[NodeKey, Dated[NamespaceFacts]] = {}
    for key, space in renamed.items():
        then = fleet.namespace_history(key)
        since = now_ms if then.latest.team or then.latest.label else 0
        charged[key] = then.changed(space, max(since if space.since_ms is None else space.since_ms, closed_ms))
    if changed:
        write_nodes(cursor, changed.values(), placed)
    if renamed:
        write_namespaces(cursor, renamed.values(), charged)
    if facts.pods:
        # An observation from the future would win over every later one.
        write_pods(
            cursor,
            [(c, structs.replace(f, observed_ms=min(f.observed_ms, now_ms))) for c, f in facts.pods],
            "pod_seen",
        )
    if facts.epochs:
        write_epochs(cursor, facts.epochs, now_ms)
    return replace(
        fleet,
        nodes={**fleet.nodes, **changed},
        namespaces={**fleet.namespaces, **renamed},
        placed={**fleet.placed, **placed},
        charged={**fleet.charged, **charged},
    )


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


def last_decision(cursor: Cursor) -> int:
    """The highest number that a decision ever had here or in the archive."""
    return int(cursor.rows("last_decision")[0][0])


def write_decisions(cursor: Cursor, decisions: Sequence[Decision], now_ms: int, last: int) -> int:
    """Write the decisions that are new, by cluster, id and instant; how many they are. They get the numbers above
    `last`. A decision that is known stays as it was."""
    first = {_key(decision): decision for decision in reversed(decisions)}
    if not first:
        return 0
    instants = [decision.at_ms for decision in first.values()]
    asked = {"low": min(instants), "high": max(instants), "ids": list(first)}
    known = {key for (key,) in cursor.rows("known_decisions", asked)}
    new = sorted((d.at_ms, key, d.model_dump_json()) for key, d in first.items() if key not in known)
    rows = [(key, at, now_ms, content, number) for number, (at, key, content) in enumerate(new, last + 1)]
    add(cursor, "decision", _DECISION, rows)
    return len(rows)


def remove_decisions(cursor: Cursor, before_ms: int, archived: int | None) -> int:
    """Remove decisions dated before an instant, at most `REMOVED_AT_ONCE`, the first to come first; how many.

    archived: the number up to which the archive has them, and above which none is removed; None: there is no
    archive."""
    asked = {"before": before_ms, "archived": archived, "most": REMOVED_AT_ONCE}
    return int(cursor.rows("remove_decisions", asked)[0][0])


def _key(decision: Decision) -> str:
    """Controllers of one policy that share a ledger may decide about queues of one name in one millisecond."""
    return f"{decision.cluster}/{decision.id}" if decision.cluster else decision.id


def read_decisions(
    cursor: Cursor,
    start_ms: int,
    end_ms: int,
    limit: int,
    kind: str | None = None,
    subject: str | None = None,
    gang: Collection[str] | None = None,
    cluster: str | None = None,
) -> list[Decision]:
    """See accountant.ledger.Ledger.decisions. The engine chooses; only what is chosen is built."""
    wanted = {
        "start": start_ms,
        "end": end_ms,
        "limit": limit,
        "kind": kind,
        "subject": subject,
        "gang": sorted(gang) if gang is not None else None,
        "cluster": cluster,
    }
    rows = cursor.rows("decisions", wanted)
    return [Decision.model_validate_json(row[0]) for row in rows]
