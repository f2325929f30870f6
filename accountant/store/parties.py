"""Who and what the rows of a group name, as the ledger's numbers.

A name comes back with every row of its pod and of its GPU: each different one is looked at once per group, the
rows only say which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from accountant.store.database import Cursor
from accountant.store.dictionary import Dictionary
from accountant.store.intake import IncomingSet, Stream
from accountant.store.origins import Origins, PodKey
from agent.wire import Holder, Slice

GpuName = tuple[str, str]
DeviceName = tuple[int, str, str, str, int, int, int, int, int, int]
HolderName = tuple[str, str, str, str, str, str]


class Dictionaries:
    """The names of the ledger, and what pods asked for."""

    def __init__(self) -> None:
        self.stream: Dictionary[Stream] = Dictionary("stream", ("cluster", "node", "epoch"))
        self.gpu: Dictionary[GpuName] = Dictionary("gpu", ("cluster", "gpu_uuid"))
        self.device: Dictionary[DeviceName] = Dictionary(
            "device",
            ("gpu", "node", "gpu_model", "profile", "gi", "ci", "compute", "compute_of", "memory_mib", "memory_of_mib"),
            numeric=frozenset({"gpu", "gi", "ci", "compute", "compute_of", "memory_mib", "memory_of_mib"}),
        )
        self.holder: Dictionary[HolderName] = Dictionary(
            "holder", ("cluster", "kind", "uid", "namespace", "name", "container")
        )

        self.origins = Origins()

    def commit(self) -> None:
        for memory in (self.stream, self.gpu, self.device, self.holder, self.origins):
            memory.commit()

    def forget(self) -> None:
        for memory in (self.stream, self.gpu, self.device, self.holder, self.origins):
            memory.forget()


K = TypeVar("K")


class _Numbered(dict[K, int]):
    """Keys in the order in which they were first asked for, each with its place."""

    def __missing__(self, key: K) -> int:
        place = self[key] = len(self)
        return place


class Parties:
    """Of the rows of `sets`, in their order. gpus: ids of all GPUs in them."""

    def __init__(
        self, cursor: Cursor, names: Dictionaries, sets: Sequence[IncomingSet], gpus: Mapping[GpuName, int]
    ) -> None:
        parts: _Numbered[tuple[int, str, str, Slice | None]] = _Numbered()
        held: _Numbered[tuple[str, Holder | None]] = _Numbered()
        self._part: list[int] = []
        self._held: list[int] = []
        self._lost: set[int] = set()
        for item in sets:
            cluster, node, _ = item.stream
            gpu = gpus[cluster, item.rows[0].gpu_uuid]
            for row in item.rows:
                if row.health == "lost":
                    self._lost.add(len(self._held))
                self._part.append(parts[gpu, node, row.gpu_model, row.slice])
                self._held.append(held[cluster, row.holder])
        self._devices = _ids(cursor, names.device, [_device(*key) for key in parts])
        found = [None if holder is None else _holder(cluster, holder) for cluster, holder in held]
        ids = iter(_ids(cursor, names.holder, [name for name in found if name is not None]))
        self._holders = [0 if name is None else next(ids) for name in found]
        refs = names.origins.resolve(cursor, {(name[0], name[2]) for name in found if name is not None})
        nobody: tuple[PodKey | None, str] = (None, "")
        self._paying = [
            nobody if name is None or name[1] == "unattributed" else ((name[0], name[2]), refs[name[0], name[2]])
            for name in found
        ]

    def paying(self, row: int) -> tuple[PodKey | None, str]:
        """The pod that pays for a row and the queue it asked for: nobody pays for lost, unheld and unattributed
        time."""
        return (None, "") if row in self._lost else self._paying[self._held[row]]

    def of_rows(self) -> tuple[list[int], list[int], list[int]]:
        """Ids of device, holder and payer of each row; 0 is nobody."""
        payers = [0 if pod is None else holder for (pod, _), holder in zip(self._paying, self._holders, strict=True)]
        paid = [payers[place] for place in self._held]
        for row in self._lost:
            paid[row] = 0
        return [self._devices[place] for place in self._part], [self._holders[place] for place in self._held], paid


N = TypeVar("N", bound=tuple[str | int, ...])


def _ids(cursor: Cursor, of: Dictionary[N], names: Sequence[N]) -> list[int]:
    known = of.resolve(cursor, names)
    return [known[name] for name in names]


def _device(gpu: int, node: str, gpu_model: str, part: Slice | None) -> DeviceName:
    if part is None:
        return (gpu, node, gpu_model, "", -1, -1, 0, 0, 0, 0)
    return (
        gpu, node, gpu_model, part.profile, part.gi, part.ci, part.compute, part.compute_of, part.memory_mib,
        part.memory_of_mib,
    )  # fmt: skip


def _holder(cluster: str, held: Holder) -> HolderName:
    return (cluster, held.kind, held.uid, held.namespace, held.name, held.container)
