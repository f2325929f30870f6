"""Keeps a register of the node to which each GPU and each pod belongs, and checks records against it before booking.

A GPU belongs to the node that first reported it. Another node takes the GPU over if the owner has been silent about it
for `move_after_ms`, or if an administrator confirms the move. Earlier time stays with the former owner. An import binds
no agent: an agent that measures a GPU takes it over from a node that only an import names, also for time that the
import has told. Of the records of both, the agent's count (`claim_overlap`).

The node of a pod is the first of these that is known:

- the node to which the API server bound it, or the nodes of its job in an imported accounting
- the node whose row first named it
- the node that first reported facts about it

A report about the pod from another node is quarantined, or stored under an identifier that only that other node uses.
Neither node can then change which team pays for the other's rows.

Whoever can guess an identifier could name it first. Identifiers therefore belong to the name space of the one that
issues them. The number of a batch system's job (`is_job_number`) is never a pod's or a container's, and a node says
nothing about it but that the job holds its GPUs. The number of a process is its node's own. The identifiers of pods and
containers are random, so the first node that names one has it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from msgspec import structs

from accountant.core.import_epochs import is_import
from accountant.core.node_lists import node_names
from accountant.core.periods import utc
from accountant.core.record_faults import Rejection
from accountant.inventory.pod_facts import is_job_number
from accountant.storage.duckdb_engine import Cursor, Row
from accountant.storage.write.name_ids import PodKey
from accountant.storage.write.record_columns import GpuName, Stream
from accountant.storage.write.sender_quotas import QuotaClaims, sender_of
from agent.wire import JOB, Holder, PodFacts
from gputally.base.units import MS_PER_HOUR

MOVE_AFTER_MS = MS_PER_HOUR
"""If the owner is silent about a GPU for this long, another node may report it."""


class Ownership(NamedTuple):
    """A GPU belongs to a node from `from_ms` until its next Ownership begins.

    at_ms: when the register learned it, by the accountant's clock.
    who: the administrator who confirmed the move; "" if it was derived from records.
    imported: whether only imports, and no agent, have reported the GPU on this node."""

    node: str
    from_ms: int
    at_ms: int
    who: str = ""
    imported: bool = False


class OwnedGpu(NamedTuple):
    """All ownerships of a GPU, ascending.

    first_ms: the first booked start of any node.
    last_ms: the newest booked end of the present owner.
    heard_ms: when the accountant last booked an agent's record from the owner; None if it did not since the process
        started."""

    owners: tuple[Ownership, ...]
    first_ms: int
    last_ms: int
    heard_ms: int | None = None

    @property
    def owner(self) -> Ownership:
        """The present owner."""
        return self.owners[-1]

    def moved(self, to: Ownership) -> OwnedGpu:
        """Return a copy with a new present owner, which has reported nothing yet."""
        owners = with_owner(self.owners, to)
        return OwnedGpu(owners, self.first_ms, to.from_ms)

    def confirmed(self) -> OwnedGpu:
        """Return a copy whose present owner an agent has reported."""
        return self._replace(owners=(*self.owners[:-1], self.owner._replace(imported=False)))


class GpuRegister:
    """The writer's copy of the register of GPUs. For move_after_ms see MOVE_AFTER_MS."""

    def __init__(self, move_after_ms: int = MOVE_AFTER_MS) -> None:
        self.move_after_ms = move_after_ms
        self.known: dict[GpuName, OwnedGpu] = {}
        self.listening_ms: int | None = None
        """When this process first accepted records. Before that it could not have received any from an owner."""

    def load(self, known: Mapping[GpuName, OwnedGpu]) -> None:
        """Replace the register, but keep the times at which owners last reported."""
        last_reports = {gpu: (owned.owner.node, owned.heard_ms) for gpu, owned in self.known.items()}
        loaded = {}
        for gpu, owned in known.items():
            node, heard_ms = last_reports.get(gpu, ("", None))
            loaded[gpu] = owned._replace(heard_ms=heard_ms) if node == owned.owner.node else owned
        self.known = loaded

    def claims(self, now_ms: int, quotas: QuotaClaims) -> GpuClaims:
        """Return the checks for one transaction."""
        if self.listening_ms is None:
            self.listening_ms = now_ms
        return GpuClaims(self, now_ms, quotas)


class OwnershipRow(NamedTuple):
    """A row of the table `gpu_owner`."""

    cluster: str
    gpu_uuid: str
    node: str
    from_ms: int
    at_ms: int
    who: str


@dataclass
class GpuClaims:
    """Checks and changes ownerships for one transaction. `commit` applies the changes to the register. Without it they
    are dropped."""

    register: GpuRegister
    now_ms: int
    quotas: QuotaClaims

    def __post_init__(self) -> None:
        self._changed: dict[GpuName, OwnedGpu] = {}
        self.rows: list[OwnershipRow] = []
        """New ownerships to be stored."""

    def commit(self) -> None:
        self.register.known |= self._changed

    def fault(self, gpu: GpuName, stream: Stream, start_ms: int, end_ms: int) -> Rejection | None:
        """Return why the outbox's node may not report this span of the GPU. If it may, note what the report changes in
        the register, for `commit`, and return None."""
        _, node, epoch = stream
        imported = is_import(epoch)
        owned = self._changed.get(gpu) or self.register.known.get(gpu)
        if owned is None:
            if (over := self._over_quota(gpu, stream)) is not None:
                return over
            owned = OwnedGpu((), start_ms, end_ms)
            self._change(gpu, owned, Ownership(node, start_ms, self.now_ms, imported=imported))
        elif not imported and self._yields(owned, node, start_ms, end_ms):
            if (over := self._over_quota(gpu, stream)) is not None:
                return over
            self._change(gpu, owned, Ownership(node, start_ms, self.now_ms))
        elif not owns_span(_binding(owned.owners, node, imported=imported), node, start_ms, end_ms):
            if imported and end_ms <= owned.first_ms:
                return None  # time before the first record of the GPU does not change the owner
            free_ms = self._free_ms(owned)
            if node == owned.owner.node or start_ms < free_ms or self._silent_until_ms(owned) > self.now_ms:
                return _foreign_gpu(gpu[1], owned, node, start_ms, end_ms, self.register.move_after_ms)
            if (over := self._over_quota(gpu, stream)) is not None:
                return over
            self._change(gpu, owned, Ownership(node, start_ms, self.now_ms, imported=imported))
        owned = self._changed.get(gpu, owned)
        if owned.owner.node == node and end_ms > owned.owner.from_ms:
            known = owned if imported or not owned.owner.imported else owned.confirmed()
            self._changed[gpu] = known._replace(
                first_ms=min(owned.first_ms, start_ms),
                last_ms=max(owned.last_ms, end_ms),
                heard_ms=owned.heard_ms if imported else self.now_ms,
            )
        return None

    def _over_quota(self, gpu: GpuName, stream: Stream) -> Rejection | None:
        """Return why the node may have no further GPU; None if it may, which is then counted."""
        sender = sender_of(stream)
        quota = self.quotas.take_gpu(sender)
        return None if quota is None else self.quotas.fault(sender, quota, f"GPU {gpu[1]}")

    def move(self, gpu: GpuName, node: str, who: str, from_ms: int = 0) -> OwnedGpu:
        """Assign the GPU to the node from `from_ms` on, but not before the end of its present owner's newest record.
        Return the GPU with its new owner, which counts as having reported now."""
        owned = self.register.known[gpu]
        begin = max(owned.last_ms, owned.owner.from_ms + 1, from_ms)
        self._change(gpu, owned, Ownership(node, begin, self.now_ms, who))
        self._changed[gpu] = self._changed[gpu]._replace(heard_ms=self.now_ms)
        return self._changed[gpu]

    def _yields(self, owned: OwnedGpu, node: str, start_ms: int, end_ms: int) -> bool:
        """Return whether the GPU's present owner gives way to an agent of another node, because only an import names
        it. The agent must not claim time of a third node that an agent reported."""
        if not owned.owner.imported or owned.owner.node == node:
            return False
        agents = _binding(owned.owners, node, imported=False)
        return not agents or start_ms >= owned.owner.from_ms or owns_span(agents, node, start_ms, end_ms)

    def _change(self, gpu: GpuName, owned: OwnedGpu, to: Ownership) -> None:
        self._changed[gpu] = owned.moved(to)
        self.rows.append(OwnershipRow(*gpu, to.node, to.from_ms, to.at_ms, to.who))

    def _silent_until_ms(self, owned: OwnedGpu) -> int:
        """Return the time until which the owner must stay silent before another node may take over."""
        if owned.owner.imported:
            return 0
        last_report_ms = owned.heard_ms if owned.heard_ms is not None else self.register.listening_ms
        return (last_report_ms or 0) + self.register.move_after_ms

    def _free_ms(self, owned: OwnedGpu) -> int:
        """Return the time from which another node may own the GPU. Late records of the owner still lie before it."""
        if owned.owner.imported:
            return owned.last_ms
        return max(owned.last_ms + self.register.move_after_ms, self._silent_until_ms(owned))


def with_owner(owners: Sequence[Ownership], to: Ownership) -> tuple[Ownership, ...]:
    """Return the ownerships with a new one. An agent's displaces those of imports that do not begin before it."""
    return (*(one for one in owners if to.imported or not one.imported or one.from_ms < to.from_ms), to)


def _binding(owners: Sequence[Ownership], node: str, *, imported: bool) -> Sequence[Ownership]:
    """Return the ownerships that bind a sender of this node: an agent is not bound by what imports tell of other
    nodes."""
    return owners if imported else [one for one in owners if not one.imported or one.node == node]


def owns_span(owners: Iterable[Ownership], node: str, start_ms: int, end_ms: int) -> bool:
    """Return whether the whole span lies in one ownership of the node. The first ownership includes all earlier
    time."""
    steps = tuple(owners)
    for number, step in enumerate(steps):
        until_ms = steps[number + 1].from_ms if number + 1 < len(steps) else end_ms
        if step.node == node and (number == 0 or step.from_ms <= start_ms) and end_ms <= until_ms:
            return True
    return False


def _foreign_gpu(uuid: str, owned: OwnedGpu, node: str, start_ms: int, end_ms: int, move_after_ms: int) -> Rejection:
    owner = next((one for one in reversed(owned.owners) if one.from_ms < end_ms), owned.owners[0])
    if owner.node == node:  # the span reaches into another owner's time
        owner = next(one for one in reversed(owned.owners) if one.node != node)
    return Rejection(
        "foreign-gpu",
        f"GPU {uuid} belongs to node {owner.node!r} from {utc(owner.from_ms)} on, and node {node!r} reports it at "
        f"{utc(start_ms)}: node {node!r} may report it once {owner.node!r} has been silent about it for "
        f"{move_after_ms // 1000} s",
    )


KEEP = 200_000
_OWN = "@"
"""Separates an identifier from the name of the only node that uses it."""
_NO_NODE = ""
"""Stands in the register for the node of holders that are not pods. No node owns these."""


class PodNode(NamedTuple):
    """The node that first named a pod. `by_row` is true if it did so in a row, and false if only in a fact."""

    node: str
    by_row: bool


class PodNodes:
    """The writer's copy of the register of pods. Entries that are not cached are read from the tables.

    lacks: whether the tables certainly have no fact of a pod."""

    def __init__(
        self,
        cursor: Callable[[], AbstractContextManager[Cursor]],
        lacks: Callable[[PodKey], bool],
        keep: int = KEEP,
    ) -> None:
        self._cursor = cursor
        self._lacks = lacks
        self._keep = keep
        self.named: dict[PodKey, PodNode | None] = {}
        self.bound: dict[PodKey, str] = {}
        """By pod, its node (API server) or list of nodes (an imported accounting); "" if unknown."""

    def fetch(self, keys: Collection[PodKey], own: Collection[PodKey]) -> None:
        """Read the entries of these pods into the cache. own: identifiers that only one node uses, so that no API
        server shows them."""
        if max(len(self.named), len(self.bound)) > self._keep:
            self.forget()
        unnamed = [key for key in {*keys, *own} if key not in self.named]
        unbound = [key for key in keys if key not in self.bound]
        if unnamed:
            nodes = "SELECT cluster, uid, node, by_row FROM pod_node WHERE uid IN (SELECT unnest(?))"
            rows = self._of(nodes, unnamed)
            self.named |= dict.fromkeys(unnamed)
            for cluster, uid, node, by_row in rows:
                if self.named[cluster, uid] is None or by_row:
                    self.named[cluster, uid] = PodNode(node, by_row)
        if unbound:
            # Most are new. To read `content` of all pods takes four times as long as to find out which are there.
            told = [key for key in unbound if not self._lacks(key)]
            there = self._of("SELECT cluster, uid FROM pod_seen WHERE uid IN (SELECT unnest(?))", told) if told else []
            shown = "SELECT cluster, uid, content ->> '$.node' FROM pod_seen WHERE uid IN (SELECT unnest(?))"
            seen = self._of(shown, [(cluster, uid) for cluster, uid in there]) if there else []
            self.bound |= dict.fromkeys(unbound, "")
            self.bound |= {(cluster, uid): node for cluster, uid, node in seen if node}

    def _of(self, sql: str, keys: Sequence[PodKey]) -> list[Row]:
        """Return the rows of these pods. sql: takes their uids; its first columns are cluster and uid."""
        wanted = set(keys)
        with self._cursor() as cursor:
            rows = cursor.plainly(sql, [[uid for _, uid in keys]])
        return [row for row in rows if row[:2] in wanted]

    def observe(self, facts: Iterable[tuple[str, PodFacts]]) -> None:
        """Update the cache with committed facts of the inventory."""
        self.bound |= {(cluster, fact.uid): fact.node for cluster, fact in facts if fact.node}

    def bound_node(self, key: PodKey) -> str:
        """Return the node that the pod is bound to; "" if none or several are known."""
        return _one_node(self.bound.get(key, ""))

    def forget(self) -> None:
        """Drop the cache."""
        self.named.clear()
        self.bound.clear()


class PodNodeRow(NamedTuple):
    """A row of the table `pod_node`."""

    cluster: str
    uid: str
    node: str
    by_row: bool


class PodClaims:
    """Checks and new entries of one transaction. `commit` applies them to the register. Without it they are dropped."""

    def __init__(self, register: PodNodes) -> None:
        self._register = register
        self._named: dict[PodKey, PodNode] = {}

    @property
    def rows(self) -> list[PodNodeRow]:
        """The new entries to be stored."""
        return [PodNodeRow(*key, *named) for key, named in self._named.items()]

    def commit(self) -> None:
        self._register.named |= self._named

    def fetch(self, named: Iterable[tuple[Stream, str]]) -> None:
        """Prepare the checks of these pods, given as (outbox, identifier)."""
        given = {(stream[0], stream[1], uid) for stream, uid in named}
        own = {(cluster, _own(uid, node)) for cluster, node, uid in given}
        self._register.fetch({(cluster, uid) for cluster, _, uid in given}, own)

    def is_new(self, stream: Stream, fact: PodFacts) -> bool:
        """Return whether neither a record nor the API server has named the pod."""
        key = (stream[0], fact.uid)
        if self._who(key) is not None or self._register.bound.get(key):
            return False
        return self._who((stream[0], _own(fact.uid, stream[1]))) is None

    def keep_only(self, named: Collection[PodKey]) -> None:
        """Drop the new entries of other pods, whose records are rejected after all."""
        self._named = {key: node for key, node in self._named.items() if key in named}

    def fault(self, stream: Stream, holder: Holder) -> Rejection | None:
        """Return why the node may not name the holder; None if it may.

        It may not if the API server has bound the pod to another node."""
        bound = self._register.bound_node((stream[0], holder.uid)) if holder.kind == "pod" else ""
        return _foreign_pod(holder.uid, bound, stream[1]) if bound and bound != stream[1] else None

    def holder(self, stream: Stream, holder: Holder) -> Holder:
        """Return the holder under which the row is booked.

        If the pod belongs to another node, the holder gets an identifier that only this node uses."""
        cluster, node, _ = stream
        key = (cluster, holder.uid)
        if holder.kind == "process":
            return structs.replace(holder, uid=_own(holder.uid, node))
        if holder.kind == JOB:
            if not _is_listed(node, self._register.bound.get(key, "")):
                holder = structs.replace(holder, uid=_own(holder.uid, node))
                key = (cluster, holder.uid)
            named = self._who(key)
            if named is None:
                self._named[key] = PodNode(_NO_NODE, True)
            elif named.node != _NO_NODE:  # a node named it as a pod, which no node can do with a job number
                return structs.replace(holder, uid=holder.uid + _OWN + holder.kind)
            return holder
        bound = self._register.bound_node(key) if holder.kind == "pod" else ""
        uid = holder.uid
        named = self._who(key)
        if _OWN in uid or is_job_number(uid) or (not bound and named is not None and named.node != node):
            uid = _own(uid, node)
            key = (cluster, uid)
            named = self._who(key)
        if named is None or (not named.by_row and named.node == node):
            self._named[key] = PodNode(node, True)
        return holder if uid == holder.uid else structs.replace(holder, uid=uid)

    def fact(self, stream: Stream, fact: PodFacts) -> PodFacts | Rejection:
        """Return the fact as it is stored, or why it is rejected."""
        cluster, node, epoch = stream
        bound = self._register.bound_node((cluster, fact.uid))
        named = self._who((cluster, fact.uid))
        if is_job_number(fact.uid):  # an import has it from the batch system; the job may run on several nodes
            return fact if is_import(epoch) else _foreign_pod(fact.uid, "", node)
        if is_import(epoch) and named is not None and named.node == _NO_NODE:
            return fact
        if bound:
            return fact if bound == node else _foreign_pod(fact.uid, bound, node)
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
                return _foreign_pod(fact.uid, named.node, node)
        if self._who((cluster, own)) is None:
            self._named[cluster, own] = PodNode(node, False)
        return structs.replace(fact, uid=own)

    def _who(self, key: PodKey) -> PodNode | None:
        return self._named.get(key) or self._register.named.get(key)


def _one_node(nodes: str) -> str:
    """Return the node; "" for a list of several nodes."""
    return "" if "," in nodes or "[" in nodes else nodes


def _is_listed(node: str, nodes: str) -> bool:
    """Return whether the node is in the list of a job's nodes. True if there is no list, or it cannot be parsed.

    Nodes are compared by host name, because an accounting may leave out domains."""
    hosts = _hosts(nodes)
    return not hosts or _host(node) in hosts


@lru_cache(maxsize=10_000)
def _hosts(nodes: str) -> frozenset[str]:
    try:
        return frozenset(map(_host, node_names(nodes))) if nodes else frozenset()
    except ValueError:
        return frozenset()


def _host(node: str) -> str:
    return node.partition(".")[0]


def _own(uid: str, node: str) -> str:
    return uid + _OWN + node


def _foreign_pod(uid: str, owner: str, node: str) -> Rejection:
    if not owner:
        return Rejection("foreign-pod", f"{uid} is not a pod, so node {node!r} may not report facts about a pod {uid}")
    return Rejection(
        "foreign-pod",
        f"pod {uid} belongs to node {owner!r}, and node {node!r} reports it: only the node of a pod may report it",
    )
