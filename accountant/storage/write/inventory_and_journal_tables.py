"""Writes and reads the tables of nodes, namespaces, policies, decisions, acts (journal entries) and epochs.

A node or a namespace has one row for its present facts, and one row in `past` for each earlier version."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, TypeVar

import msgspec
import pyarrow as pa
from msgspec import structs

from accountant.core.claim_overlap import Span
from accountant.core.periods import Timeline
from accountant.inventory.node_facts_and_downtime import with_reports
from accountant.ledger.journal import FIRST_DIGEST, Act, ActKind, BooksMoved, NewAct, numbered
from accountant.ledger.protocols import MOST_EPOCHS, EpochReport, Facts, JobKey, NamespaceFacts, NodeFacts
from accountant.storage.duckdb_engine import Cursor, statement
from accountant.storage.gpu_lifetimes import GpuLifetimes, NodeKey, blank, described
from accountant.storage.write import record_columns
from accountant.storage.write.interval_writer import write_pods
from accountant.storage.write.pod_labels import PodLabels
from accountant.storage.write.record_columns import add
from accountant.wire.policy_models import Decision, PolicyVersion

Key = tuple[str, str]
"""(cluster, name)."""
T = TypeVar("T", bound=NodeFacts | NamespaceFacts)

_encoder = msgspec.json.Encoder(order="deterministic")
_node = msgspec.json.Decoder(NodeFacts)
_namespace = msgspec.json.Decoder(NamespaceFacts)
_KEYED = pa.schema([("cluster", pa.string()), ("name", pa.string()), ("content", pa.string())])
_WHOSE = pa.schema([("kind", pa.string()), ("cluster", pa.string()), ("name", pa.string())])
_PAST = pa.schema([*_WHOSE, ("until_ms", pa.int64()), ("content", pa.string())])


def read_nodes(cursor: Cursor) -> tuple[dict[Key, NodeFacts], dict[Key, Timeline[NodeFacts]]]:
    """Return the present facts of every node, and the histories of nodes that changed."""
    rows = cursor.run("SELECT cluster, name, content FROM node")
    nodes = {(cluster, name): _node.decode(content) for cluster, name, content in rows}
    return nodes, _histories(cursor, "node", _node, {key: described(node) for key, node in nodes.items()})


def read_namespaces(cursor: Cursor) -> tuple[dict[Key, NamespaceFacts], dict[Key, Timeline[NamespaceFacts]]]:
    rows = cursor.run("SELECT cluster, name, content FROM namespace")
    spaces = {(cluster, name): _namespace.decode(content) for cluster, name, content in rows}
    return spaces, _histories(cursor, "namespace", _namespace, spaces)


def _write(
    cursor: Cursor, kind: Literal["node", "namespace"], facts: Iterable[T], histories: Mapping[Key, Timeline[T]]
) -> None:
    """Store the present facts of nodes or namespaces, and replace the stored histories of those that have one."""
    rows: list[tuple[object, ...]] = [(fact.cluster, fact.name, _text(fact)) for fact in facts]
    cursor.run(statement("set_facts", table=kind), incoming=record_columns.column_table(_KEYED, rows))
    if not histories:
        return
    cursor.rows("drop_past", incoming=record_columns.column_table(_WHOSE, [(kind, *key) for key in histories]))
    rows = [
        (kind, *key, until, _text(value))
        for key, history in histories.items()
        for (_, value), (until, _) in pairwise(history.steps)
    ]
    if rows:
        cursor.insert("past", record_columns.column_table(_PAST, rows))


def _histories(
    cursor: Cursor, kind: str, of: msgspec.json.Decoder[T], current: Mapping[Key, T]
) -> dict[Key, Timeline[T]]:
    found: dict[Key, list[tuple[int, T]]] = defaultdict(list)
    rows = cursor.run("SELECT cluster, name, until_ms, content FROM past WHERE kind = ? ORDER BY until_ms", [kind])
    for cluster, name, until, content in rows:
        found[cluster, name].append((until, of.decode(content)))
    histories = {}
    for key, past in found.items():
        steps = [(0, past[0][1])]
        steps += [(since, value) for (since, _), (_, value) in pairwise(past)]
        histories[key] = Timeline((*steps, (past[-1][0], current[key])))
    return histories


def _text(fact: NodeFacts | NamespaceFacts) -> str:
    return _encoder.encode(fact).decode()


def last_act(cursor: Cursor) -> int:
    return int(cursor.run("SELECT coalesce(max(number), 0) FROM act")[0][0])


def read_acts(
    cursor: Cursor,
    kinds: Sequence[ActKind] = (),
    subject: str | None = None,
    after: int = 0,
    limit: int | None = None,
) -> list[Act]:
    """Return the acts with a number above `after`, in their order.

    kinds: only these; all if it is empty.
    subject: only acts with this subject; None: all.
    limit: the largest number of acts; None: any number."""
    rows = cursor.run(
        "SELECT at_ms, kind, subject, who, reason, content, number, digest FROM act "
        "WHERE (len($kinds) = 0 OR list_contains($kinds, kind)) AND ($subject IS NULL OR subject = $subject) "
        "AND number > $after ORDER BY number LIMIT $limit",
        {"kinds": list(kinds), "subject": subject, "after": after, "limit": limit},
    )
    return [Act(*row) for row in rows]


def write_acts(cursor: Cursor, acts: Sequence[NewAct], seen: int) -> list[Act]:
    """Append acts to the journal. Raises BooksMoved if its last act is not number `seen`."""
    found = cursor.run("SELECT number, digest FROM act ORDER BY number DESC LIMIT 1")
    last, digest = found[0] if found else (0, FIRST_DIGEST)
    if last != seen:
        raise BooksMoved(seen, last)
    recorded = numbered(acts, last, digest)
    for act in recorded:
        cursor.run(
            "INSERT INTO act VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [act.number, act.at_ms, act.kind, act.subject, act.who, act.reason, act.content, act.digest],
        )
    return recorded


_JOB = pa.schema([("cluster", pa.string()), ("namespace", pa.string()), ("job", pa.string())])
_PROGRESS = pa.schema(
    [
        *_JOB,
        ("epoch", pa.int64()),
        ("at_ms", pa.int64()),
        ("received_ms", pa.int64()),
        ("who", pa.string()),
        ("number", pa.int64()),
    ]
)


def write_epochs(cursor: Cursor, reports: Iterable[EpochReport], now_ms: int, most: int = MOST_EPOCHS) -> int:
    """Store the reports that are of a new epoch, or earlier than the stored report of their epoch, and return their
    number. New epochs beyond `most` per job are dropped. An instant after now_ms is stored as now_ms."""
    earliest: dict[tuple[JobKey, int], EpochReport] = {}
    for report in reports:
        at = report.key, report.epoch
        if at not in earliest or report.at_ms < earliest[at].at_ms:
            earliest[at] = report
    known: dict[tuple[JobKey, int], int] = {}
    for *job, epoch, at_ms in cursor.rows("known_epochs", {"jobs": sorted({key.job for key, _ in earliest})}):
        at = JobKey(*job), epoch
        known[at] = min(at_ms, known.get(at, at_ms))
    count = Counter(key for key, _ in known)
    rows: list[tuple[object, ...]] = []
    for (key, epoch), report in sorted(earliest.items()):
        at_ms = min(report.at_ms, now_ms)
        before = known.get((key, epoch))
        if before is None:
            count[key] += 1
        if (before is None and count[key] <= most) or (before is not None and at_ms < before):
            rows.append((*key, epoch, at_ms, now_ms, report.who))
    if rows:
        (last,) = cursor.run("SELECT coalesce(max(number), 0) FROM progress")[0]
        add(cursor, "progress", _PROGRESS, [(*row, number) for number, row in enumerate(rows, last + 1)])
    return len(rows)


_OF_JOBS = "JOIN incoming i ON i.cluster = p.cluster AND i.namespace = p.namespace AND i.job = p.job"
_IN_SPAN = "HAVING min(p.at_ms) >= $low AND min(p.at_ms) < $high"


def read_epochs(cursor: Cursor, span: Span | None = None, *, of: Collection[JobKey] | None = None) -> list[EpochReport]:
    """Return the epochs that ended in the span, by job and instant.

    span: None: all time.
    of: only epochs of these jobs; None: all."""
    if of is not None and not of:
        return []
    only = "" if of is None else _OF_JOBS
    ended = "" if span is None else _IN_SPAN
    sql = statement("epochs", only=only, ended=ended)
    parameters = None if span is None else {"low": span[0], "high": span[1]}
    incoming = None if of is None else record_columns.column_table(_JOB, sorted(of))
    return [EpochReport(JobKey(*row[:3]), *row[3:]) for row in cursor.run(sql, parameters, incoming)]


def count_epochs(cursor: Cursor, keys: Collection[JobKey]) -> dict[JobKey, int]:
    """Return the number of epochs of each of these jobs, without jobs that reported none."""
    rows = cursor.rows("epoch_counts", incoming=record_columns.column_table(_JOB, list(keys)))
    return {JobKey(*row[:3]): row[3] for row in rows}


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
"""Largest number of decisions removed in one transaction, because the writer waits for it."""


def write_retired(cursor: Cursor, ends: Mapping[int, int]) -> None:
    """Store the instants in `ends` until which GPUs count as capacity, by GPU id."""
    cursor.rows("add_retired", {"gpus": list(ends), "ends": list(ends.values())})


def has_changes(fleet: GpuLifetimes, facts: Facts) -> bool:
    """Return whether an inventory reading differs from the stored facts. Most readings repeat the last one."""
    return (
        bool(facts.pods or facts.epochs)
        or bool(_changed_nodes(fleet, facts.nodes))
        or any(fleet.namespaces.get((space.cluster, space.name)) != space for space in facts.namespaces)
    )


def write_facts(
    cursor: Cursor,
    fleet: GpuLifetimes,
    facts: Facts,
    now_ms: int,
    closed_ms: int,
    labels: PodLabels,
    new_pods: Collection[tuple[str, str]] = (),
) -> tuple[GpuLifetimes, list[int]]:
    """Store the facts of an inventory reading. Return the new fleet, and instants from which on a fact changed, without
    those of the new facts of pods.

    A changed fact is valid from the reading on. A fact that was unknown before is valid for all time after `closed_ms`,
    the end of the last closed month.

    labels: keeps the exported labels of pods.
    new_pods: pods that certainly have no row, so that they need not be looked up, by cluster and uid."""
    instants: list[int] = []
    changed = _changed_nodes(fleet, facts.nodes)
    placed: dict[NodeKey, Timeline[NodeFacts]] = {}
    for key, node in changed.items():
        before, after = fleet.node_history(key), described(node)
        since = now_ms if before.latest != blank(before.latest) else 0
        if before.latest != after:
            instants.append(max(since if node.since_ms is None else node.since_ms, closed_ms))
            placed[key] = before.changed(after, instants[-1])
        instants += _capacity_changes(fleet.nodes.get(key), node)
    spaces = {(space.cluster, space.name): space for space in facts.namespaces}
    renamed = {key: space for key, space in spaces.items() if fleet.namespaces.get(key) != space}
    charged: dict[NodeKey, Timeline[NamespaceFacts]] = {}
    for key, space in renamed.items():
        then = fleet.namespace_history(key)
        since = now_ms if then.latest.team or then.latest.label else 0
        instants.append(max(since if space.since_ms is None else space.since_ms, closed_ms))
        charged[key] = then.changed(space, instants[-1])
    if changed:
        _write(cursor, "node", changed.values(), placed)
    if renamed:
        _write(cursor, "namespace", renamed.values(), charged)
    if facts.pods:
        # An observation dated in the future would override every later one.
        pods = [(c, structs.replace(f, observed_ms=min(f.observed_ms, now_ms))) for c, f in facts.pods]
        instants += write_pods(cursor, pods, "pod_seen", new_pods)
        labels.write(cursor, ((cluster, None, fact) for cluster, fact in pods), new_pods)
    if facts.epochs and write_epochs(cursor, facts.epochs, now_ms):
        instants += (min(report.at_ms, now_ms) for report in facts.epochs)
    after_all = replace(
        fleet,
        nodes={**fleet.nodes, **changed},
        namespaces={**fleet.namespaces, **renamed},
        placed={**fleet.placed, **placed},
        charged={**fleet.charged, **charged},
    )
    return after_all, instants


def _capacity_changes(before: NodeFacts | None, after: NodeFacts) -> list[int]:
    """Return the instants from which two facts of a node differ in its down times, renewals and deletion."""
    known = before or blank(after)
    found = [down.start_ms for down in {*known.down} ^ {*after.down}] + [*{*known.renewed_ms} ^ {*after.renewed_ms}]
    return found + [at for at in {known.deleted_ms} ^ {after.deleted_ms} if at is not None]


def write_agents(cursor: Cursor, fleet: GpuLifetimes, nodes: Mapping[NodeKey, NodeFacts]) -> GpuLifetimes:
    """Store nodes after reports of their agents, which change no label and no down time, and return the new fleet."""
    _write(cursor, "node", nodes.values(), {})
    return replace(fleet, nodes={**fleet.nodes, **nodes})


def _changed_nodes(fleet: GpuLifetimes, nodes: Sequence[NodeFacts]) -> dict[NodeKey, NodeFacts]:
    """Return the nodes whose facts, with what their agents reported, differ from the stored ones."""
    told = {(node.cluster, node.name): node for node in nodes}
    known = {key: with_reports(node, fleet.nodes.get(key)) for key, node in told.items()}
    return {key: node for key, node in known.items() if fleet.nodes.get(key) != node}


def write_policy(cursor: Cursor, version: PolicyVersion) -> None:
    content = version.policy.model_dump_json(by_alias=True)
    cursor.run("INSERT INTO policy VALUES (?, ?, ?)", [version.version, version.effective_ms, content])


def last_decision(cursor: Cursor) -> int:
    """Return the highest number of a decision, here or in the archive."""
    return int(cursor.rows("last_decision")[0][0])


def write_decisions(cursor: Cursor, decisions: Sequence[Decision], now_ms: int, last: int) -> int:
    """Store the decisions that are new by cluster, id and instant, and return their number. They are numbered from
    `last` + 1. A decision that is already stored is not changed."""
    first = {decision.key: decision for decision in reversed(decisions)}
    if not first:
        return 0
    instants = [decision.at_ms for decision in first.values()]
    parameters = {"low": min(instants), "high": max(instants), "ids": list(first)}
    known = {key for (key,) in cursor.rows("known_decisions", parameters)}
    new = sorted((d.at_ms, key, d.model_dump_json()) for key, d in first.items() if key not in known)
    rows = [(key, at, now_ms, content, number) for number, (at, key, content) in enumerate(new, last + 1)]
    add(cursor, "decision", _DECISION, rows)
    return len(rows)


def remove_decisions(cursor: Cursor, before_ms: int, archived: int | None) -> int:
    """Remove decisions dated before an instant, at most `REMOVED_AT_ONCE`, in order of their numbers, and return how
    many.

    archived: the number up to which decisions are archived; later ones are not removed. None without an archive."""
    parameters = {"before": before_ms, "archived": archived, "most": REMOVED_AT_ONCE}
    return int(cursor.rows("remove_decisions", parameters)[0][0])


def read_decisions(
    cursor: Cursor,
    start_ms: int,
    end_ms: int,
    limit: int,
    kind: str | None = None,
    subject: str | None = None,
    gang: Collection[str] | None = None,
    cluster: str | None = None,
    before: str | None = None,
) -> list[Decision]:
    """Return decisions, see `Ledger.decisions`. The engine filters, so that only matching decisions are decoded."""
    wanted = {
        "start": start_ms,
        "end": end_ms,
        "limit": limit,
        "kind": kind,
        "subject": subject,
        "gang": sorted(gang) if gang is not None else None,
        "cluster": cluster,
        "before": before,
    }
    rows = cursor.rows("decisions", wanted)
    return [Decision.model_validate_json(row[0]) for row in rows]
