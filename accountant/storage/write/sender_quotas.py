"""Limits what one sender leaves in the ledger for ever.

A request is limited while it is under way, but its names and rows stay: every name of a pod, a process or a MIG
instance, and every row, is kept and read again. A node that invents names would fill the memory of every later query.
So each sender has an allowance of each `Kind`, which fills again within a day, and a GPU has a number of parts that it
can have in its life. The senders of a cluster have an allowance of new nodes and new GPUs together, because an issuer
of another cluster can name any number of nodes. A record beyond the allowance is quarantined as `over-quota`, and if
the allowance of bytes is used up, not even its content is kept: its numbers are recorded as a hole. Neither is booked,
so it is in no capacity, no coverage and no window. The node's numbers still advance. Holes count as bytes, and a sender
that has left twice its bytes must wait, as must one that would begin an outbox too many or is a node too many.

For example, a node with 24,000 new holders a day (`Quotas.holders`) may name 24,000 at once, and then a thousand an
hour. A record whose names are known costs bytes alone. An import tells the past at once, so it has the allowance of
`IMPORT_DAYS` days, for each node.

The use is kept in memory: a restart of the accountant makes it zero. Records that are resent after it are checked
again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from accountant.core.errors import OverQuota
from accountant.core.import_epochs import is_import
from accountant.core.record_faults import Rejection
from accountant.core.settings import Quotas
from accountant.storage.write.record_columns import GpuName, NodeName, Stream
from gputally.base.units import MS_PER_DAY

OVER_QUOTA: Final = "over-quota"
"""The reason of a quarantined record or a hole."""
IMPORT_DAYS: Final = 400
"""An import may leave as much as a node within this number of days, because it tells a year at once."""
ROW_BYTES: Final = 256
"""What a row takes in the ledger, about; its names are counted as holders."""
GAP_BYTES: Final = 64
HOLE_BYTES: Final = 64

Kind = Literal["gpus", "holders", "bytes", "outboxes", "import_nodes", "nodes", "cluster_gpus"]
QuotaName = Literal["gpus", "cluster_gpus", "parts", "holders", "bytes"]
"""The quotas by which records are set aside."""
REFUSALS: Final = ("bytes", "outboxes", "import_nodes", "nodes")
"""The quotas by which a request is refused."""


class Sender(NamedTuple):
    """A node of a cluster, as itself or as an import tells it."""

    cluster: str
    node: str
    imported: bool


def cluster_of(sender: Sender) -> Sender:
    """Return all senders of the cluster of one, which have an allowance together."""
    return Sender(sender.cluster, "", sender.imported)


def sender_of(stream: Stream) -> Sender:
    cluster, node, epoch = stream
    return Sender(cluster, node, is_import(epoch))


class _Use(NamedTuple):
    """What of an allowance was in use at an instant. It becomes free evenly within a day.

    scaled: the amount times MS_PER_DAY, so that nothing that became free in a short time is lost by rounding."""

    scaled: int
    at_ms: int


class SenderUse:
    """What every sender has used of its allowances. Only the writer uses it."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self.used: dict[tuple[Sender, Kind], _Use] = {}
        self.nodes: set[NodeName] = set()
        """Every node with an outbox. Empty until one is opened after the start."""

    def claims(self, now_ms: int, parts_of: Callable[[GpuName], int]) -> QuotaClaims:
        """Return the claims of one transaction. parts_of: returns the number of parts that a GPU has had."""
        return QuotaClaims(self, now_ms, parts_of)


@dataclass
class QuotaClaims:
    """Checks and uses allowances for one transaction. Without `commit` the use is dropped."""

    _use: SenderUse
    now_ms: int
    _parts_of: Callable[[GpuName], int]
    _changed: dict[tuple[Sender, Kind], _Use] = field(default_factory=dict)
    _parts: dict[GpuName, int] = field(default_factory=dict)
    _nodes: set[NodeName] = field(default_factory=set)

    def commit(self) -> None:
        self._use.used |= self._changed
        self._use.nodes |= self._nodes

    def allowance(self, sender: Sender, kind: Kind) -> int:
        """Return what the sender may leave within a day; at once, if it left nothing in the day before."""
        days = IMPORT_DAYS if sender.imported and kind not in ("import_nodes", "nodes") else 1
        allowed: int = getattr(self._use.quotas, kind)
        return days * allowed

    def left(self, sender: Sender, kind: Kind) -> int:
        """Return what the sender may leave now; negative if it has left more."""
        return (self.allowance(sender, kind) * MS_PER_DAY - self._scaled(sender, kind)) // MS_PER_DAY

    def take(self, sender: Sender, kind: Kind, amount: int) -> bool:
        """Use the amount, if so much is left, and return whether it was."""
        if amount > self.left(sender, kind):
            return False
        self.charge(sender, kind, amount)
        return True

    def charge(self, sender: Sender, kind: Kind, amount: int) -> None:
        """Use the amount, even if less is left."""
        self._changed[sender, kind] = _Use(self._scaled(sender, kind) + amount * MS_PER_DAY, self.now_ms)

    def record_hole(self, sender: Sender, reason: str) -> None:
        """Count a hole, which is recorded even if the sender has used up its bytes."""
        self.charge(sender, "bytes", HOLE_BYTES + len(reason))

    def require_bytes(self, sender: Sender) -> None:
        """Raises OverQuota for a sender that has left twice its bytes, of which half are holes: it must wait."""
        if self.left(sender, "bytes") < -self.allowance(sender, "bytes"):
            raise self._too_many(f"node {sender.node!r} has left", sender, "bytes", "bytes, twice,")

    def open_outbox(self, stream: Stream, known: Collection[Stream]) -> None:
        """Count an outbox that is not among the known ones. Raises OverQuota."""
        sender = sender_of(stream)
        self._name_node(sender, known)
        if not self.take(sender, "outboxes", 1):
            raise self._too_many(f"node {sender.node!r} has begun", sender, "outboxes", "outboxes")

    def _name_node(self, sender: Sender, known: Collection[Stream]) -> None:
        """Count a node that no outbox had. Raises OverQuota."""
        if not self._use.nodes:
            self._use.nodes = {stream[:2] for stream in known}
        node = sender.cluster, sender.node
        kind: Kind = "import_nodes" if sender.imported else "nodes"
        if node not in self._use.nodes and node not in self._nodes and not self.take(cluster_of(sender), kind, 1):
            who = "imports" if sender.imported else "agents"
            whose = f"{who} of cluster {sender.cluster!r} have named before node {sender.node!r}"
            raise self._too_many(whose, cluster_of(sender), kind, "new nodes")
        self._nodes.add(node)

    def _too_many(self, who: str, sender: Sender, kind: Kind, what: str) -> OverQuota:
        allowed = self.allowance(sender, kind)
        return OverQuota(
            f"{who} more than {allowed} {what} within a day: wait, or raise quotas.{kind} in the accountant's settings",
            kind,
        )

    def take_gpu(self, sender: Sender) -> QuotaName | None:
        """Count a GPU that the sender is the first to report, and return None; if it may report no further one, return
        the quota that it has used up."""
        allowances: tuple[tuple[Sender, Literal["gpus", "cluster_gpus"]], ...]
        allowances = (sender, "gpus"), (cluster_of(sender), "cluster_gpus")
        for whose, kind in allowances:
            if self.left(whose, kind) < 1:
                return kind
        for whose, kind in allowances:
            self.charge(whose, kind, 1)
        return None

    def take_parts(self, gpu: GpuName, new: int) -> bool:
        """Count new parts of a GPU, if it can have so many, and return whether it can."""
        had = self._parts[gpu] if gpu in self._parts else self._parts_of(gpu)
        if had + new > self._use.quotas.parts:
            self._parts[gpu] = had
            return False
        self._parts[gpu] = had + new
        return True

    def fault(self, sender: Sender, quota: QuotaName, what: str) -> Rejection:
        """Return why a record is set aside. what: the name that is too many."""
        allowed = self._use.quotas.parts if quota == "parts" else self.allowance(sender, quota)
        who = f"cluster {sender.cluster!r}" if quota == "cluster_gpus" else f"node {sender.node!r}"
        limits: Mapping[QuotaName, str] = {
            "gpus": "new GPUs a day",
            "cluster_gpus": "new GPUs a day",
            "parts": "parts of a GPU",
            "holders": "new holders a day",
            "bytes": "bytes a day",
        }
        return Rejection(
            OVER_QUOTA,
            f"{what}: {who} has used its {allowed} {limits[quota]} (quotas.{quota} in the settings)",
            quota,
        )

    def _scaled(self, sender: Sender, kind: Kind) -> int:
        use = self._changed.get((sender, kind)) or self._use.used.get((sender, kind))
        if use is None:
            return 0
        return max(0, use.scaled - self.allowance(sender, kind) * max(0, self.now_ms - use.at_ms))
