"""Inventory facts as stored: one JSON text each, canonical so that equal facts are equal texts.

A node or a namespace is one row as it is now, and one row of `past` for each thing it was before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import msgspec
import pyarrow as pa

from accountant.dated import Dated
from accountant.ledger import NamespaceFacts, NodeFacts
from accountant.store.database import Cursor
from accountant.store.writing import columns

Key = tuple[str, str]
"""(cluster, name)."""
Histories = Mapping[Key, Dated[NodeFacts]]
Charged = Mapping[Key, Dated[NamespaceFacts]]
T = TypeVar("T", bound=NodeFacts | NamespaceFacts)

_encoder = msgspec.json.Encoder(order="deterministic")
_node = msgspec.json.Decoder(NodeFacts)
_namespace = msgspec.json.Decoder(NamespaceFacts)
_KEYED = pa.schema([("cluster", pa.string()), ("name", pa.string()), ("content", pa.string())])
_WHOSE = pa.schema([("kind", pa.string()), ("cluster", pa.string()), ("name", pa.string())])
_PAST = pa.schema([*_WHOSE, ("until_ms", pa.int64()), ("content", pa.string())])


def described(node: NodeFacts) -> NodeFacts:
    """What usage on it is labelled with; when it was down is a history of its own."""
    return replace(node, down=(), deleted_ms=None)


def read_nodes(cursor: Cursor) -> tuple[dict[Key, NodeFacts], dict[Key, Dated[NodeFacts]]]:
    """Every node as it is, and the histories of those that were something else."""
    rows = cursor.run("SELECT cluster, name, content FROM node")
    nodes = {(cluster, name): _node.decode(content) for cluster, name, content in rows}
    return nodes, _histories(cursor, "node", _node, {key: described(node) for key, node in nodes.items()})


def read_namespaces(cursor: Cursor) -> tuple[dict[Key, NamespaceFacts], dict[Key, Dated[NamespaceFacts]]]:
    rows = cursor.run("SELECT cluster, name, content FROM namespace")
    spaces = {(cluster, name): _namespace.decode(content) for cluster, name, content in rows}
    return spaces, _histories(cursor, "namespace", _namespace, spaces)


def write_nodes(cursor: Cursor, nodes: Iterable[NodeFacts], histories: Histories) -> None:
    _write(cursor, "set_nodes", nodes)
    _write_past(cursor, "node", histories)


def write_namespaces(cursor: Cursor, spaces: Iterable[NamespaceFacts], histories: Charged) -> None:
    _write(cursor, "set_namespaces", spaces)
    _write_past(cursor, "namespace", histories)


def _write(cursor: Cursor, statement: str, facts: Iterable[NodeFacts | NamespaceFacts]) -> None:
    rows = [(fact.cluster, fact.name, _text(fact)) for fact in facts]
    if rows:
        cursor.rows(statement, incoming=columns.table(_KEYED, rows))


def _write_past(cursor: Cursor, kind: str, histories: Mapping[Key, Dated[T]]) -> None:
    """Replace what was kept of these."""
    if not histories:
        return
    cursor.rows("drop_past", incoming=columns.table(_WHOSE, [(kind, *key) for key in histories]))
    rows = [
        (kind, *key, until, _text(value))
        for key, history in histories.items()
        for (_, value), (until, _) in pairwise(history.steps)
    ]
    if rows:
        cursor.rows("add_past", incoming=columns.table(_PAST, rows))


def _histories(cursor: Cursor, kind: str, of: msgspec.json.Decoder[T], current: Mapping[Key, T]) -> dict[Key, Dated[T]]:
    found: dict[Key, list[tuple[int, T]]] = defaultdict(list)
    rows = cursor.run("SELECT cluster, name, until_ms, content FROM past WHERE kind = ? ORDER BY until_ms", [kind])
    for cluster, name, until, content in rows:
        found[cluster, name].append((until, of.decode(content)))
    histories = {}
    for key, past in found.items():
        steps = [(0, past[0][1])]
        steps += [(since, value) for (since, _), (_, value) in pairwise(past)]
        histories[key] = Dated((*steps, (past[-1][0], current[key])))
    return histories


def _text(fact: NodeFacts | NamespaceFacts) -> str:
    return _encoder.encode(fact).decode()
