"""Registers which node each GPU belongs to, and checks every set against it before the set is booked.

A GPU belongs to the node that first reported it. Another node takes it over once the owner has been silent about it for
a set time, or once an administrator confirms the move, and from then on only: what lies before stays the former
owner's. Knows nothing of how the register is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from accountant.core.periods import utc
from accountant.history_import.import_run import is_import
from accountant.storage.write.record_columns import Fault, GpuName, Stream
from gputally.base.units import MS_PER_HOUR

MOVE_AFTER_MS = MS_PER_HOUR
"""Silence about a GPU after which another node may report it."""


class Ownership(NamedTuple):
    """A GPU belongs to a node from `from_ms` on, until its next Ownership. at_ms: the accountant's clock when the
    register learned it. who: the administrator who confirmed the move; "" where records showed it."""

    node: str
    from_ms: int
    at_ms: int
    who: str = ""


class OwnedGpu(NamedTuple):
    """All ownerships of a GPU, ascending. first_ms, last_ms: the first booked start of any node and the newest booked
    end of the present owner. heard_ms: when the accountant last booked a record of an agent from the owner; None:
    not since the process started. imported: only an import told of the present owner. stored: how many of `owners` the
    table has; the others, always the last ones, were derived from records."""

    owners: tuple[Ownership, ...]
    first_ms: int
    last_ms: int
    heard_ms: int | None = None
    imported: bool = False
    stored: int = 0

    @property
    def owner(self) -> Ownership:
        """The present one."""
        return self.owners[-1]

    def moved(self, to: Ownership, *, imported: bool = False) -> OwnedGpu:
        """With a new present owner, who has reported nothing yet."""
        owners = (*self.owners, to)
        return OwnedGpu(owners, self.first_ms, to.from_ms, None, imported, len(owners))


class GpuOwners:
    """The register in the writer's memory. move_after_ms: see MOVE_AFTER_MS."""

    def __init__(self, move_after_ms: int = MOVE_AFTER_MS) -> None:
        self.move_after_ms = move_after_ms
        self.known: dict[GpuName, OwnedGpu] = {}
        self.listening_ms: int | None = None
        """When this process first took records in: until then it could not hear an owner."""

    def load(self, known: Mapping[GpuName, OwnedGpu]) -> None:
        """Replace the register; when an owner was heard is kept, as far as that is known."""
        heard = {gpu: (owned.owner.node, owned.heard_ms) for gpu, owned in self.known.items()}
        loaded = {}
        for gpu, owned in known.items():
            node, heard_ms = heard.get(gpu, ("", None))
            loaded[gpu] = owned._replace(heard_ms=heard_ms) if node == owned.owner.node else owned
        self.known = loaded

    def claims(self, now_ms: int) -> GpuClaims:
        """For the records of one transaction."""
        if self.listening_ms is None:
            self.listening_ms = now_ms
        return GpuClaims(self, now_ms)


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
    """What one transaction claims and changes. `commit` makes it known; dropped, it leaves nothing behind."""

    register: GpuOwners
    now_ms: int

    def __post_init__(self) -> None:
        self._changed: dict[GpuName, OwnedGpu] = {}
        self.rows: list[OwnershipRow] = []
        """New ownerships, to be stored."""

    def commit(self) -> None:
        self.register.known |= self._changed

    def fault(self, gpu: GpuName, stream: Stream, start_ms: int, end_ms: int) -> Fault | None:
        """Why the outbox's node cannot have this span of the GPU; None: it can, and the register knows that it has."""
        _, node, epoch = stream
        imported = is_import(epoch)
        owned = self._changed.get(gpu) or self.register.known.get(gpu)
        if owned is None:
            owned = OwnedGpu((), start_ms, end_ms, None, imported)
            self._change(gpu, owned, Ownership(node, start_ms, self.now_ms))
        elif not owns_span(owned.owners, node, start_ms, end_ms):
            if imported and end_ms <= owned.first_ms:
                return None  # history from before the first record of all: it displaces nothing and owns nothing
            free_ms = self._free_ms(owned)
            if node == owned.owner.node or start_ms < free_ms or self._silent_until_ms(owned) > self.now_ms:
                return _foreign(gpu[1], owned, node, start_ms, end_ms, self.register.move_after_ms)
            self._change(gpu, owned, Ownership(node, start_ms, self.now_ms), imported=imported)
        owned = self._changed.get(gpu, owned)
        if owned.owner.node == node and end_ms > owned.owner.from_ms:
            self._changed[gpu] = owned._replace(
                first_ms=min(owned.first_ms, start_ms),
                last_ms=max(owned.last_ms, end_ms),
                heard_ms=owned.heard_ms if imported else self.now_ms,
                imported=owned.imported and imported,
            )
        return None

    def move(self, gpu: GpuName, node: str, who: str, from_ms: int = 0) -> OwnedGpu:
        """The GPU belongs to the node from `from_ms` on, at the earliest from the newest record of its present owner.
        The silence of the new owner counts from now."""
        owned = self.register.known[gpu]
        begin = max(owned.last_ms, owned.owner.from_ms + 1, from_ms)
        self._change(gpu, owned, Ownership(node, begin, self.now_ms, who))
        self._changed[gpu] = self._changed[gpu]._replace(heard_ms=self.now_ms)
        return self._changed[gpu]

    def _change(self, gpu: GpuName, owned: OwnedGpu, to: Ownership, *, imported: bool = False) -> None:
        moved = owned.moved(to, imported=imported or (owned.imported and not owned.owners))
        self._changed[gpu] = moved
        for one in moved.owners[owned.stored :]:
            self.rows.append(OwnershipRow(*gpu, one.node, one.from_ms, one.at_ms, one.who))

    def _silent_until_ms(self, owned: OwnedGpu) -> int:
        """When the owner will have been silent for long enough."""
        if owned.imported:
            return 0
        heard = owned.heard_ms if owned.heard_ms is not None else self.register.listening_ms
        return (heard or 0) + self.register.move_after_ms

    def _free_ms(self, owned: OwnedGpu) -> int:
        """From when on another node may have the GPU: all that may still come of the owner's past lies before."""
        if owned.imported:
            return owned.last_ms
        return max(owned.last_ms + self.register.move_after_ms, self._silent_until_ms(owned))


def owns_span(owners: Iterable[Ownership], node: str, start_ms: int, end_ms: int) -> bool:
    """Whether all of the span lies in one ownership of the node. The first one also has all time before it."""
    steps = tuple(owners)
    for number, step in enumerate(steps):
        until_ms = steps[number + 1].from_ms if number + 1 < len(steps) else end_ms
        if step.node == node and (number == 0 or step.from_ms <= start_ms) and end_ms <= until_ms:
            return True
    return False


def _foreign(uuid: str, owned: OwnedGpu, node: str, start_ms: int, end_ms: int, move_after_ms: int) -> Fault:
    owner = next((one for one in reversed(owned.owners) if one.from_ms < end_ms), owned.owners[0])
    if owner.node == node:  # the span reaches into a neighbour's time
        owner = next(one for one in reversed(owned.owners) if one.node != node)
    return Fault(
        "foreign-gpu",
        f"GPU {uuid} belongs to node {owner.node!r} from {utc(owner.from_ms)} on, and node {node!r} reports it at "
        f"{utc(start_ms)}: node {node!r} may report it once {owner.node!r} has been silent about it for "
        f"{move_after_ms // 1000} s",
    )
