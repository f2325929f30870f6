"""Which slots are free, and which of them a gang gets: best fit, so that whole nodes stay whole.

A gang that fits on one node goes to the node it fills best; a larger one takes the emptiest nodes
first and packs its rest. Everything is decided by (count, order of the nodes), never by the order
of a dict or a set.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence

from fairshare.simulator.cluster import Flavour, NodeSpec, Slot, slots_of
from fairshare.simulator.jobs import Job


class Placement:
    """Free slots per flavour and node. A GPU may be withdrawn (several causes count) and restored."""

    def __init__(self, nodes: Sequence[NodeSpec]) -> None:
        self._slots: tuple[Slot, ...] = tuple(slot for node in nodes for slot in slots_of(node))
        self._ordinal = {slot: i for i, slot in enumerate(self._slots)}
        self._of_gpu: dict[str, list[int]] = {}
        self._node = [0] * len(self._slots)
        node_index = {node.name: i for i, node in enumerate(nodes)}
        if len(node_index) != len(nodes) or len(self._ordinal) != len(self._slots):
            raise ValueError("node names and GPU uuids must be unique")
        self._withdrawn: dict[str, int] = {gpu.uuid: 0 for node in nodes for gpu in node.gpus}
        self._free: dict[Flavour, dict[int, list[int]]] = {}
        self._count: dict[Flavour, int] = {}
        self._in_service: dict[Flavour, int] = {}
        for i, slot in enumerate(self._slots):
            self._of_gpu.setdefault(slot.gpu, []).append(i)
            self._node[i] = node_index[slot.node]
            self._free.setdefault(slot.flavour, {}).setdefault(self._node[i], []).append(i)
            self._count[slot.flavour] = self._count.get(slot.flavour, 0) + 1
        self._in_service.update(self._count)
        self._total = dict(self._count)
        self._allowed: dict[tuple[str, tuple[str, ...], tuple[str, ...]], tuple[Flavour, ...]] = {}

    def flavours(self, job: Job) -> tuple[Flavour, ...]:
        """Those the job may use, in the order of the nodes."""
        key = (job.shape, job.models, job.pools)
        if key not in self._allowed:
            self._allowed[key] = tuple(
                f
                for f in self._total
                if f.shape == job.shape
                and (not job.models or f.model in job.models)
                and (not job.pools or f.pool in job.pools)
            )
        return self._allowed[key]

    def possible(self, job: Job) -> bool:
        """Whether the gang fits on the empty, healthy cluster."""
        return any(self._total[f] >= job.gpus for f in self.flavours(job))

    def free(self, flavour: Flavour) -> int:
        return self._count[flavour]

    def most_free(self, shape: str) -> int:
        """The largest number of free slots of one flavour: no larger gang can start."""
        return max((n for f, n in self._count.items() if f.shape == shape), default=0)

    def in_service(self, shape: str) -> int:
        """Slots of a shape on usable GPUs, held or free."""
        return sum(n for f, n in self._in_service.items() if f.shape == shape)

    def fitting(self, job: Job, extra: Mapping[Flavour, int] | None = None) -> Flavour | None:
        """The flavour with the fewest free slots that takes the gang; `extra` counts as free too."""
        best: tuple[int, int, Flavour] | None = None
        for order, flavour in enumerate(self.flavours(job)):
            count = self._count[flavour] + (extra.get(flavour, 0) if extra else 0)
            if count >= job.gpus and (best is None or (count, order) < best[:2]):
                best = (count, order, flavour)
        return best[2] if best else None

    def take(self, job: Job, flavour: Flavour) -> tuple[Slot, ...]:
        """Hold slots for the whole gang. The caller has made sure that they are there."""
        nodes = self._free[flavour]
        taken: list[int] = []
        missing = job.gpus
        while missing:
            fill = min(((len(free), node) for node, free in nodes.items() if len(free) >= missing), default=None)
            if fill is None:
                emptiest = max(((len(free), -node) for node, free in nodes.items()), default=(0, 0))
                if not emptiest[0]:
                    raise ValueError(f"{job.id}: {job.gpus} slots of {flavour} are not free")
                fill = (emptiest[0], -emptiest[1])
            free = nodes[fill[1]]
            number = min(missing, len(free))
            taken += free[:number]
            del free[:number]
            missing -= number
        self._count[flavour] -= job.gpus
        return tuple(self._slots[i] for i in taken)

    def give(self, slots: Iterable[Slot]) -> None:
        """Free held slots. Those of a withdrawn GPU stay out of service."""
        for slot in slots:
            if self._withdrawn[slot.gpu] == 0:
                self._insert(self._ordinal[slot])

    def withdraw(self, gpu: str) -> None:
        """Take a GPU out of service for one more cause. Its holders must have been stopped."""
        self._withdrawn[gpu] += 1
        if self._withdrawn[gpu] == 1:
            for i in self._of_gpu[gpu]:
                flavour = self._slots[i].flavour
                free = self._free[flavour][self._node[i]]
                if i in free:
                    free.remove(i)
                    self._count[flavour] -= 1
                self._in_service[flavour] -= 1

    def restore(self, gpu: str) -> None:
        """Take back one cause; with the last one the slots are free again."""
        self._withdrawn[gpu] -= 1
        if self._withdrawn[gpu] == 0:
            for i in self._of_gpu[gpu]:
                self._insert(i)
                self._in_service[self._slots[i].flavour] += 1

    def _insert(self, i: int) -> None:
        flavour = self._slots[i].flavour
        insort(self._free[flavour][self._node[i]], i)
        self._count[flavour] += 1
