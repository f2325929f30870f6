"""Registers which node may report each pod, and checks facts and rows about pods against it.

The API server says which node a pod is bound to, and Slurm's accounting which nodes a job ran on. Where the accountant
does not see it, the node counts whose row first named the pod, and until a row names it, the node that first told of
it. What another node says of the pod is quarantined, or is kept under an identifier of that node's own, so that neither
can change which team pays for the other's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import NamedTuple

from msgspec import structs

from accountant.history_import.import_run import is_import
from accountant.history_import.slurm_history import node_names
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.write import record_columns
from accountant.storage.write.name_ids import PodKey
from accountant.storage.write.record_columns import Fault, Stream
from agent.wire import Holder, PodFacts

KEEP = 200_000
_OWN = "@"
"""Ends the identifier before the node that alone uses it."""
_NO_NODE = ""
"""In the place of a node: rows that are no pod's named it, and no node tells facts about it."""


class PodNode(NamedTuple):
    """The node that first named a pod. by_row: in a row; else in a fact alone."""

    node: str
    by_row: bool


class PodNodes:
    """The register in the writer's memory; what is not remembered is looked up."""

    def __init__(self, cursor: Callable[[], AbstractContextManager[Cursor]], keep: int = KEEP) -> None:
        self._cursor = cursor
        self._keep = keep
        self.named: dict[PodKey, PodNode | None] = {}
        self.bound: dict[PodKey, str] = {}
        """By the API server or Slurm's accounting, a node or a list of nodes; "" where neither has told any."""

    def fetch(self, keys: Collection[PodKey]) -> None:
        """Remember what the tables say of these."""
        if len(self.named) > self._keep:
            self.forget()
        missing = [key for key in keys if key not in self.named or key not in self.bound]
        if not missing:
            return
        self.named |= dict.fromkeys(missing)
        self.bound |= dict.fromkeys(missing, "")
        with self._cursor() as cursor:
            rows = cursor.rows("pod_nodes", incoming=record_columns.column_table(record_columns.POD_KEY, missing))
        for cluster, uid, node, by_row, bound in rows:
            key = (cluster, uid)
            self.bound[key] = bound
            known = self.named[key]
            if node is not None and (known is None or by_row):
                self.named[key] = PodNode(node, by_row)

    def observe(self, facts: Iterable[tuple[str, PodFacts]]) -> None:
        """What the inventory told, committed."""
        for cluster, fact in facts:
            if fact.node and (cluster, fact.uid) in self.bound:
                self.bound[cluster, fact.uid] = fact.node

    def bound_node(self, key: PodKey) -> str:
        """The one node that the pod is bound to; "" where none is known, or several."""
        return _one_node(self.bound.get(key, ""))

    def forget(self) -> None:
        """Believe the tables alone."""
        self.named.clear()
        self.bound.clear()


class PodNodeRow(NamedTuple):
    """A row of the table `pod_node`."""

    cluster: str
    uid: str
    node: str
    by_row: bool


class PodClaims:
    """What one transaction names. `commit` makes it known; dropped, it leaves nothing behind."""

    def __init__(self, register: PodNodes) -> None:
        self._register = register
        self._named: dict[PodKey, PodNode] = {}

    @property
    def rows(self) -> list[PodNodeRow]:
        """To be stored."""
        return [PodNodeRow(*key, *named) for key, named in self._named.items()]

    def commit(self) -> None:
        self._register.named |= self._named

    def fetch(self, named: Iterable[tuple[Stream, str]]) -> None:
        """Before anything is asked of these: outboxes, and identifiers that they name."""
        keys = {(stream[0], uid) for stream, uid in named}
        keys |= {(stream[0], _own(uid, stream[1])) for stream, uid in named}
        self._register.fetch(keys)

    def fault(self, stream: Stream, holder: Holder) -> Fault | None:
        """Why the node cannot name the holder: the API server has bound the pod to another."""
        bound = self._register.bound_node((stream[0], holder.uid)) if holder.kind == "pod" else ""
        return _foreign(holder.uid, bound, stream[1]) if bound and bound != stream[1] else None

    def holder(self, stream: Stream, holder: Holder) -> Holder:
        """The holder as it is booked."""
        cluster, node, _ = stream
        key = (cluster, holder.uid)
        if holder.kind == "slurm" and not _is_listed(node, self._register.bound.get(key, "")):
            holder = structs.replace(holder, uid=_own(holder.uid, node))
            key = (cluster, holder.uid)
        if holder.kind != "pod":
            named = self._who(key)
            if named is None:
                self._named[key] = PodNode(_NO_NODE, True)
            elif named.node != _NO_NODE:  # a node told facts about it as of a pod
                return structs.replace(holder, uid=holder.uid + _OWN + holder.kind)
            return holder
        bound = self._register.bound_node(key)
        uid = holder.uid
        named = self._who(key)
        if _OWN in uid or (not bound and named is not None and named.node != node):
            uid = _own(uid, node)
            key = (cluster, uid)
            named = self._who(key)
        if named is None or (not named.by_row and named.node == node):
            self._named[key] = PodNode(node, True)
        return holder if uid == holder.uid else structs.replace(holder, uid=uid)

    def fact(self, stream: Stream, fact: PodFacts) -> PodFacts | Fault:
        """The fact as it is kept, or why it is not believed."""
        cluster, node, epoch = stream
        bound = self._register.bound_node((cluster, fact.uid))
        named = self._who((cluster, fact.uid))
        if is_import(epoch) and named is not None and named.node == _NO_NODE:
            return fact  # a workload manager's own record of a job, which may run on several nodes
        if bound:
            return fact if bound == node else _foreign(fact.uid, bound, node)
        if is_import(epoch) and named is None:
            return fact
        own = _own(fact.uid, node)
        if _OWN not in fact.uid:
            if named is None:
                self._named[cluster, fact.uid] = PodNode(node, False)
                return fact
            if named.node == node:
                return fact
            if named.by_row and self._who((cluster, own)) is None:
                return _foreign(fact.uid, named.node, node)
        if self._who((cluster, own)) is None:
            self._named[cluster, own] = PodNode(node, False)
        return structs.replace(fact, uid=own)

    def _who(self, key: PodKey) -> PodNode | None:
        return self._named.get(key) or self._register.named.get(key)


def _one_node(told: str) -> str:
    """The node; "" for the list of a job that runs on several."""
    return "" if "," in told or "[" in told else told


def _is_listed(node: str, told: str) -> bool:
    """Whether the node is on the list of a job's nodes, by host name alone: Slurm leaves domains out. True where there
    is no list, or none that can be read."""
    hosts = _hosts(told)
    return not hosts or _host(node) in hosts


@lru_cache(maxsize=10_000)
def _hosts(told: str) -> frozenset[str]:
    try:
        return frozenset(map(_host, node_names(told))) if told else frozenset()
    except ValueError:
        return frozenset()


def _host(node: str) -> str:
    return node.partition(".")[0]


def _own(uid: str, node: str) -> str:
    return uid + _OWN + node


def _foreign(uid: str, owner: str, node: str) -> Fault:
    whose = f"is bound to node {owner!r}" if owner else "is no pod"
    return Fault("foreign-pod", f"{uid} {whose}, and node {node!r} reports it: only its own node does")
