"""Who and what the rows of a group name, as the ledger's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np

from accountant.store.database import Cursor
from accountant.store.writing.dictionary import Dictionary
from accountant.store.writing.incoming import Distinct, GpuName, Incoming, Stream, Whole, distinct
from accountant.store.writing.origins import Origins, PodKey
from agent.wire import Holder, Slice

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


class Parties:
    """Of the rows of a group, in their order. gpus: ids of all GPUs in them."""

    def __init__(self, cursor: Cursor, names: Dictionaries, incoming: Incoming, gpus: Mapping[GpuName, int]) -> None:
        devices = [_device(gpus[gpu], node, *sort) for ((_, node), gpu), sort in incoming.device.values]
        self.device = _ids(cursor, names.device, devices)[incoming.device.of_row]
        """Ids of devices, by row."""
        self._held = incoming.holder.of_row
        found = [None if holder is None else _holder(cluster, holder) for cluster, holder in incoming.holder.values]
        known = [name for name in found if name is not None]
        holders = np.zeros(len(found), np.int64)
        holders[[name is not None for name in found]] = _ids(cursor, names.holder, known)
        self.holder = holders[self._held]
        """Ids of holders, by row; 0 is nobody."""
        paying = np.array([name is not None and name[1] != "unattributed" for name in found])
        self.pays = paying[self._held] & ~incoming.lost
        """Whether somebody pays for the row: nobody does for lost, unheld and unattributed time."""
        self._pods = [None if name is None else (name[0], name[2]) for name in found]
        self._refs = names.origins.resolve(cursor, {pod for pod in self._pods if pod is not None})

    @property
    def payer(self) -> Whole:
        """Ids of holders who pay, by row; 0 is nobody."""
        return self.holder * self.pays

    @cached_property
    def queue(self) -> Distinct[str]:
        """What queue the pod of a row asked for."""
        refs = distinct(["" if pod is None else self._refs[pod] for pod in self._pods])
        return Distinct(refs.values, refs.of_row[self._held])

    def pods(self, places: Whole) -> dict[PodKey, str]:
        """Those that pay for the rows at these places, each with the queue it asked for."""
        paid = places[self.pays[places]]
        pods = (self._pods[number] for number in np.unique(self._held[paid]).tolist())
        return {pod: self._refs[pod] for pod in pods if pod is not None}


N = TypeVar("N", bound=tuple[str | int, ...])


def _ids(cursor: Cursor, of: Dictionary[N], names: Sequence[N]) -> Whole:
    known = of.resolve(cursor, names)
    return np.array([known[name] for name in names], np.int64)


def _device(gpu: int, node: str, gpu_model: str, part: Slice | None) -> DeviceName:
    if part is None:
        return (gpu, node, gpu_model, "", -1, -1, 0, 0, 0, 0)
    return (
        gpu, node, gpu_model, part.profile, part.gi, part.ci, part.compute, part.compute_of, part.memory_mib,
        part.memory_of_mib,
    )  # fmt: skip


def _holder(cluster: str, held: Holder) -> HolderName:
    return (cluster, held.kind, held.uid, held.namespace, held.name, held.container)
