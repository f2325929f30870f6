"""From ids back to names, for the few that an answer holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from accountant.store.database import Cursor
from accountant.store.writing import columns

_labels = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class DeviceName:
    node: str
    gpu_model: str
    profile: str
    gpu: int = 0


NO_DEVICE = DeviceName("", "", "")


@dataclass(frozen=True, slots=True)
class HolderName:
    """job: the workload the pod belongs to, else the holder itself, `Pod/<name>`. labels: of the pod when
    it was first seen, as far as they were asked for. user: who runs it, if asked for and known."""

    cluster: str
    namespace: str
    name: str
    queue_ref: str
    job: str
    labels: frozenset[tuple[str, str]] = frozenset()
    container: str = ""
    user: str = ""


class Devices:
    """What each device is, remembered: a committed number never means anything else. Thread-safe.

    Asked of snapshots alone: what a transaction has not committed may be forgotten again."""

    def __init__(self) -> None:
        self._known: Mapping[int, DeviceName] = {}
        self._on_nodes: tuple[Mapping[int, DeviceName], Mapping[str, Sequence[int]]] = ({}, {})

    def read(self, cursor: Cursor) -> Mapping[int, DeviceName]:
        """By number, those of the cursor's snapshot."""
        known = self._known
        ((there, newest),) = cursor.run("SELECT count(*), max(id) FROM device")
        if there == len(known) and (newest is None or newest in known):
            return known
        found = devices(cursor)
        if len(found) > len(known):
            self._known = found
        return found

    def on(self, nodes: Collection[str], found: Mapping[int, DeviceName]) -> Mapping[int, DeviceName]:
        """Of `found`, which `read` answered, those that are on nodes of these names."""
        told_of, numbers = self._on_nodes
        if told_of is not found:
            by_node: dict[str, list[int]] = {}
            for number, name in found.items():
                by_node.setdefault(name.node, []).append(number)
            self._on_nodes, numbers = (found, by_node), by_node
        return {number: found[number] for node in nodes for number in numbers.get(node, ())}


def devices(cursor: Cursor) -> Mapping[int, DeviceName]:
    rows = cursor.run("SELECT id, node, gpu_model, profile, gpu FROM device")
    return {row[0]: DeviceName(*row[1:]) for row in rows}


def holders(
    cursor: Cursor,
    ids: Collection[int],
    labels: Collection[str] = (),
    *,
    users: bool = False,
) -> Mapping[int, HolderName]:
    """labels: those to look up. users: whether to look up who runs it."""
    if not ids:
        return {}
    asked = columns.table(columns.ID, [(i,) for i in sorted(ids)])
    rows = cursor.rows("holder_names", incoming=asked)
    names = {
        number: HolderName(
            cluster, namespace, name, queue_ref, workload or f"{kind.capitalize()}/{name or uid}", container=container
        )
        for number, cluster, kind, uid, namespace, name, container, queue_ref, workload in rows
    }
    if labels:
        for number, text in cursor.rows("holder_labels", incoming=asked):
            found = _labels.decode(text)
            kept = frozenset((key, value) for key, value in found.items() if key in labels)
            names[number] = replace(names[number], labels=kept)
    if users:
        for number, user in cursor.rows("holder_users", incoming=asked):
            names[number] = replace(names[number], user=user)
    return names
