"""Maps the names of outboxes, GPUs, devices and holders to the integer ids of the ledger and back, and caches the queue
of each pod.

A `Dictionary` caches committed ids. What a transaction adds is staged until `commit` or `undo`. Names that are not
cached are looked up in the table, so memory stays bounded for any number of pods. The caches are filled when the ledger
opens (`Dictionaries.open`), so that no sender waits for it.

`PodQueues` caches the queue reference of each pod in the same way. After an observation that differs from the cached
queue, it reads the pod's queue from the tables again. Only the writer uses these two caches. Readers get names from
`Devices` and `holders`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Generic, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import pyarrow as pa

from accountant.storage.duckdb_engine import Cursor
from accountant.storage.write import record_columns
from accountant.storage.write.pod_labels import PodLabels
from accountant.storage.write.record_columns import (
    DistinctColumn,
    GpuName,
    Incoming,
    Stream,
    Truth,
    Whole,
    add,
    distinct,
)
from accountant.wire.policy_models import UNASSIGNED
from agent.wire import Holder, PodFacts, Slice

Name = TypeVar("Name", bound=tuple[str | int, ...])
"""The columns of a table after its `id`, in order."""
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
OpenCursor = Callable[[], AbstractContextManager[Cursor]]
PodKey = tuple[str, str]
"""(cluster, uid)."""
KEEP = 200_000


class _WriterCache(Generic[Key, Value]):
    """Caches about `keep` entries, and stages those that the running transaction adds. Not thread-safe, because only
    the writer uses it."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._known: dict[Key, Value] = {}
        self._staged: dict[Key, Value] = {}
        self._complete = False
        """Whether the cache contains all entries of the tables."""

    def commit(self) -> None:
        """Add the staged entries to the cache after the commit."""
        if len(self._known) + len(self._staged) > self._keep:
            self._known.clear()
            self._complete = False
        self._known |= self._staged
        self._staged.clear()

    def undo(self) -> None:
        """Drop what a transaction added that changed nothing."""
        self._staged.clear()

    def forget(self) -> None:
        """Empty the cache, because the tables may contain something else."""
        self._known.clear()
        self._staged.clear()


class Dictionary(_WriterCache[Name, int]):
    """Assigns the ids of a table whose first column is `id`."""

    def __init__(
        self, table: str, columns: tuple[str, ...], numeric: frozenset[str] = frozenset(), keep: int = KEEP
    ) -> None:
        super().__init__(keep)
        self._table = table
        self._columns = columns
        self._schema = pa.schema(
            [("id", pa.int32()), *((c, pa.int64() if c in numeric else pa.string()) for c in columns)]
        )
        self._next: int | None = None

    def resolve(self, cursor: Cursor, names: Iterable[Name]) -> dict[Name, int]:
        """Return the id of each name. A new name gets the next free id and a row in the table."""
        self.open(cursor)
        ids = {name: self._known.get(name, 0) or self._staged.get(name, 0) for name in names}
        missing = [name for name, number in ids.items() if not number]
        if missing:
            found = {} if self._complete else self._find(cursor, missing)
            found |= self._add(cursor, [name for name in missing if name not in found])
            self._staged |= found
            ids |= found
        return ids

    def known(self, opened: OpenCursor, names: Iterable[Name]) -> dict[Name, int]:
        """Return the ids of those names that have one. opened: opens a cursor, which is seldom needed."""
        if self._next is None:
            with opened() as cursor:
                self.open(cursor)
        found = {name: self._known.get(name, 0) or self._staged.get(name, 0) for name in names}
        missing = [name for name, number in found.items() if not number]
        if missing and not self._complete:
            with opened() as cursor:
                found |= self._find(cursor, missing)
        return {name: number for name, number in found.items() if number}

    def last(self, cursor: Cursor) -> int:
        """Return the highest id, including those of this transaction; 0 if there is none."""
        self.open(cursor)
        assert self._next is not None
        return self._next - 1

    def open(self, cursor: Cursor) -> None:
        """Fill the cache from the table, unless that is done."""
        if self._next is not None:
            return
        count, highest = cursor.run(f"SELECT count(*), coalesce(max(id), 0) FROM {self._table}")[0]  # noqa: S608
        complete = count <= self._keep
        if complete:
            columns = ", ".join(self._columns)
            for number, *name in cursor.run(f"SELECT id, {columns} FROM {self._table}"):  # noqa: S608
                self._known[cast(Name, tuple(name))] = number
        self._next, self._complete = highest + 1, complete  # last, so that what fails before is done again

    def _add(self, cursor: Cursor, names: list[Name]) -> dict[Name, int]:
        assert self._next is not None
        fresh = {name: self._next + i for i, name in enumerate(names)}
        if fresh:
            self._next += len(fresh)
            add(cursor, self._table, self._schema, [(number, *name) for name, number in fresh.items()])
        return fresh

    def forget(self) -> None:
        super().forget()
        self._next = None

    def _find(self, cursor: Cursor, names: list[Name]) -> dict[Name, int]:
        match = " AND ".join(f"t.{c} = w.{c}" for c in self._columns)
        columns = ", ".join(f"t.{c}" for c in self._columns)
        sql = f"SELECT t.id, {columns} FROM {self._table} t JOIN incoming w ON {match}"  # noqa: S608
        incoming = record_columns.column_table(self._schema, [(0, *name) for name in names])
        found = {row[1:]: row[0] for row in cursor.run(sql, incoming=incoming)}
        return {name: found[name] for name in names if name in found}


class PodQueues(_WriterCache[PodKey, str]):
    """Caches the queue_ref of each pod; "" for a pod without a fact.

    `_unsure` are pods whose queue is read from the tables when it is needed next. `_since` has, for some pods, the
    earliest instant to which anything that is known of them applies, or an earlier one."""

    def __init__(self, keep: int = KEEP) -> None:
        super().__init__(keep)
        self._unsure: set[PodKey] = set()
        self._since: dict[PodKey, int] = {}
        self._opened = False

    def new_pods(self, cursor: Cursor, facts: Iterable[tuple[str, PodFacts]]) -> frozenset[PodKey]:
        """Return the pods of these facts that certainly have no row, according to the cache."""
        self.open(cursor)
        keys = ((cluster, fact.uid) for cluster, fact in facts)
        return frozenset(key for key in keys if self.lacks(key))

    def lacks(self, key: PodKey) -> bool:
        """Return whether the pod certainly has no row, according to the cache."""
        return self._opened and self._complete and not self._has(key)

    def requeued(self, cursor: Cursor, facts: Iterable[tuple[str, PodFacts]]) -> frozenset[PodKey]:
        """Return the pods with GPU time whose queue these facts, which are not written yet, may change."""
        self.open(cursor)
        changed = [
            (cluster, fact.uid)
            for cluster, fact in facts
            if self._staged.get((cluster, fact.uid), self._known.get((cluster, fact.uid))) != fact.queue_ref
        ]
        if not changed:
            return frozenset()
        held = "SELECT cluster, uid FROM holder WHERE uid IN (SELECT unnest(?))"
        return frozenset(changed).intersection(cursor.plainly(held, [[uid for _, uid in changed]]))

    def since(
        self, cursor: Cursor, told: Mapping[PodKey, int], fresh: Collection[PodKey], unfolded: Collection[int]
    ) -> list[int]:
        """Return the earliest instants to which what is known of these pods applies, including written facts and rows.

        told: for each pod the earliest instant of its new facts or rows.
        fresh: pods of which nothing else is known.
        unfolded: starts of the hours that are summed from their rows."""
        unread = [key for key in told if key not in self._since and key not in fresh]
        read: dict[PodKey, int] = {}
        if unread:
            keys = record_columns.column_table(record_columns.POD_KEY, unread)
            rows = cursor.rows("pods_since", {"low": min(unfolded, default=0)}, keys)
            read = {(cluster, uid): at_ms for cluster, uid, at_ms in rows}
        found = {key: min(at_ms, self._since.get(key, at_ms), read.get(key, at_ms)) for key, at_ms in told.items()}
        if len(self._since) > self._keep:
            self._since.clear()
        self._since |= found
        return [*found.values()]

    def held(
        self,
        cursor: Cursor,
        first_ms: Mapping[PodKey, int],
        new: Collection[PodKey],
        unfolded: Collection[int],
    ) -> list[int]:
        """Return instants as `since` for pods that hold their first GPU, because their gangs may have waited for them
        since their creation.

        first_ms: the earliest row of each pod.
        new: the pods that have a new holder."""
        for key in first_ms.keys() & self._since.keys():
            self._since[key] = min(self._since[key], first_ms[key])
        unknown = {key for key in new if self._complete and not self._has(key)}
        return self.since(cursor, {key: first_ms[key] for key in new}, unknown, unfolded)

    def learn(self, cursor: Cursor, facts: Iterable[tuple[str, PodFacts]]) -> None:
        """Update the cache with facts that this transaction has written, given as (cluster, facts)."""
        self.open(cursor)
        for cluster, fact in facts:
            key = (cluster, fact.uid)
            known = self._staged.get(key, self._known.get(key))
            if key in self._unsure or known == fact.queue_ref:
                continue
            if known is None and self._complete:
                self._staged[key] = fact.queue_ref
            else:
                self._unsure.add(key)

    def resolve(self, cursor: Cursor, keys: Collection[PodKey]) -> Mapping[PodKey, str]:
        """Return the queue_ref of each pod, including this transaction's facts."""
        self.open(cursor)
        found: dict[PodKey, str] = {}
        missing: list[PodKey] = []
        for key in keys:
            ref = self._staged.get(key, self._known.get(key))
            if key in self._unsure or (ref is None and not self._complete):
                missing.append(key)
            else:
                found[key] = ref or ""
        if missing:
            found |= dict.fromkeys(missing, "")
            rows = cursor.rows("pod_origins", incoming=record_columns.column_table(record_columns.POD_KEY, missing))
            found |= {(cluster, uid): ref for cluster, uid, ref in rows}
            self._staged |= {key: found[key] for key in missing}
            self._unsure.difference_update(missing)
        return found

    def undo(self) -> None:
        self._unsure |= self._staged.keys()  # what was read in the transaction may be older in `_known`
        super().undo()

    def forget(self) -> None:
        super().forget()
        self._unsure.clear()
        self._since.clear()
        self._opened = False

    def _has(self, key: PodKey) -> bool:
        return key in self._known or key in self._staged or key in self._unsure

    def open(self, cursor: Cursor) -> None:
        """Fill the cache from the tables, unless that is done."""
        if self._opened:
            return
        pods = sum(cursor.run(f"SELECT count(*) FROM {table}")[0][0] for table in ("pod", "pod_seen"))  # noqa: S608
        complete = pods <= self._keep
        if complete:
            keys = cursor.run("SELECT cluster, uid FROM pod UNION SELECT cluster, uid FROM pod_seen")
            found = cursor.rows("pod_origins", incoming=record_columns.column_table(record_columns.POD_KEY, keys))
            self._known = {(cluster, uid): ref for cluster, uid, ref in found}
        self._opened, self._complete = True, complete


DeviceKey = tuple[int, str, str, str, int, int, int, int, int, int]
HolderKey = tuple[str, str, str, str, str, str]


class Dictionaries:
    """The caches of the writer: the ids of outboxes, GPUs, devices and holders, the queues of pods, and the values of
    exported labels."""

    def __init__(self, labels: PodLabels | None = None) -> None:
        self.labels = labels or PodLabels()
        self.stream: Dictionary[Stream] = Dictionary("stream", ("cluster", "node", "epoch"))
        self.gpu: Dictionary[GpuName] = Dictionary("gpu", ("cluster", "gpu_uuid"))
        self.device: Dictionary[DeviceKey] = Dictionary(
            "device",
            ("gpu", "node", "gpu_model", "profile", "gi", "ci", "compute", "compute_of", "memory_mib", "memory_of_mib"),
            numeric=frozenset({"gpu", "gi", "ci", "compute", "compute_of", "memory_mib", "memory_of_mib"}),
        )
        self.holder: Dictionary[HolderKey] = Dictionary(
            "holder", ("cluster", "kind", "uid", "namespace", "name", "container")
        )

        self.origins = PodQueues()
        self._caches = (self.stream, self.gpu, self.device, self.holder, self.origins)

    def open(self, cursor: Cursor) -> None:
        """Fill the caches from the tables, unless that is done. Without it the first sender would wait for it."""
        for cache in self._caches:
            cache.open(cursor)

    def commit(self) -> None:
        for cache in self._caches:
            cache.commit()

    def undo(self) -> None:
        for cache in self._caches:
            cache.undo()
        self.labels.forget()

    def forget(self) -> None:
        for cache in self._caches:
            cache.forget()
        self.labels.forget()


class HolderColumns:
    """The devices, holders, payers and queues of the rows of a group, in the order of the rows.

    gpus: the ids of the GPUs of these rows.
    unfolded: starts of the hours that are summed from their rows."""

    def __init__(
        self,
        cursor: Cursor,
        names: Dictionaries,
        incoming: Incoming,
        gpus: Mapping[GpuName, int],
        unfolded: Collection[int],
    ) -> None:
        devices = [_device(gpus[gpu], node, *sort) for ((_, node), gpu), sort in incoming.device.values]
        self.device = _ids(cursor, names.device, devices)[incoming.device.of_row]
        """Device id by row."""
        of_row = incoming.holder.of_row
        keys = [None if holder is None else _holder(cluster, holder) for cluster, holder in incoming.holder.values]
        last = names.holder.last(cursor)
        ids = np.zeros(len(keys), np.int64)
        ids[[key is not None for key in keys]] = _ids(cursor, names.holder, [key for key in keys if key is not None])
        self.holder = ids[of_row]
        """Holder id by row; 0 without a holder."""
        paying = np.array([key is not None and key[1] != "unattributed" for key in keys])
        self.pays = paying[of_row] & ~incoming.lost
        """Whether the row has a payer; lost, unheld and unattributed time has none."""
        self.payer = self.holder * self.pays
        """Id of the paying holder by row; 0 without a payer."""
        pods = [None if key is None else (key[0], key[2]) for key in keys]
        queues = names.origins.resolve(cursor, {pod for pod in pods if pod is not None})
        refs = distinct(["" if pod is None else queues[pod] for pod in pods])
        self.queue = DistinctColumn(refs.values, refs.of_row[of_row])
        """The queue reference of each row's pod."""
        starts = np.full(len(keys), np.iinfo(np.int64).max)
        np.minimum.at(starts, of_row, incoming.start_ms)
        first_ms: dict[PodKey, int] = {}
        for pod, start_ms in zip(pods, starts.tolist(), strict=True):
            if pod is not None:
                first_ms[pod] = min(start_ms, first_ms.get(pod, start_ms))
        new = {pod for pod, number in zip(pods, ids.tolist(), strict=True) if pod is not None and number > last}
        self.since = names.origins.held(cursor, first_ms, new, unfolded)
        """Instants to which what is known of pods with a new holder applies."""


def new_names(opened: OpenCursor, names: Dictionaries, incoming: Incoming) -> tuple[Truth, Truth]:
    """Return which distinct devices and which distinct holders of the rows have no id yet. opened: opens a cursor."""
    gpus = names.gpu.known(opened, incoming.gpu.values)
    devices = [
        _device(gpus[gpu], node, *sort) if gpu in gpus else None for ((_, node), gpu), sort in incoming.device.values
    ]
    holders = [None if holder is None else _holder(cluster, holder) for cluster, holder in incoming.holder.values]
    known_devices = names.device.known(opened, [device for device in devices if device is not None])
    known_holders = names.holder.known(opened, [holder for holder in holders if holder is not None])
    return (
        np.array([device not in known_devices for device in devices], np.bool_),
        np.array([holder is not None and holder not in known_holders for holder in holders], np.bool_),
    )


N = TypeVar("N", bound=tuple[str | int, ...])


def _ids(cursor: Cursor, of: Dictionary[N], names: Sequence[N]) -> Whole:
    known = of.resolve(cursor, names)
    return np.array([known[name] for name in names], np.int64)


def _device(gpu: int, node: str, gpu_model: str, part: Slice | None) -> DeviceKey:
    if part is None:
        return (gpu, node, gpu_model, "", -1, -1, 0, 0, 0, 0)
    return (
        gpu, node, gpu_model, part.profile, part.gi, part.ci, part.compute, part.compute_of, part.memory_mib,
        part.memory_of_mib,
    )  # fmt: skip


def _holder(cluster: str, holder: Holder) -> HolderKey:
    return (cluster, holder.kind, holder.uid, holder.namespace, holder.name, holder.container)


_labels = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class DeviceName:
    node: str
    gpu_model: str
    profile: str
    gpu: int = 0


NO_DEVICE = DeviceName("", "", "")


LabelHistory: TypeAlias = tuple[tuple[int, tuple[tuple[str, str | None], ...]], ...]
"""Steps (instant, pairs of label and value), ascending. The first one also counts before its instant. A value is "" if
the label is not set, and None if it is unknown."""


@dataclass(frozen=True, slots=True)
class HolderName:
    """The names of a holder.

    job: the workload of the pod, or `Kind/name` of the holder itself if it has none.
    labels: the requested labels of the pod, as they were when the pod was first seen.
    exported: the requested exported labels of the pod over time, see `label_history`.
    user: the user of the pod; "" if it was not requested or is unknown."""

    cluster: str
    namespace: str
    name: str
    queue_ref: str
    job: str
    labels: frozenset[tuple[str, str]] = frozenset()
    container: str = ""
    user: str = ""
    exported: LabelHistory = ()

    def exported_at(self, label: str, at_ms: int) -> str:
        """Return the value of an exported label at an instant: UNASSIGNED if it is not set, "" if it is unknown."""
        place = bisect_right(self.exported, at_ms, key=itemgetter(0))
        value = dict(self.exported[max(0, place - 1)][1]).get(label) if self.exported else None
        return "" if value is None else value or UNASSIGNED


def label_history(names: Sequence[str], history: Sequence[Mapping[str, Any]] | None) -> LabelHistory:
    """Return the steps of the result of holder_exports.sql. names: the labels that it asked for."""
    return tuple(
        (step["since_ms"], tuple((name, value) for name, value in zip(names, step["texts"], strict=True)))
        for step in history or ()
    )


class Devices:
    """Caches the names of devices, because a committed id never changes its meaning. Thread-safe.

    It must only read committed snapshots, because an uncommitted id can be rolled back and then stand for another
    device."""

    def __init__(self) -> None:
        self._known: Mapping[int, DeviceName] = {}
        self._on_nodes: tuple[Mapping[int, DeviceName], Mapping[str, Sequence[int]]] = ({}, {})

    def read(self, cursor: Cursor) -> Mapping[int, DeviceName]:
        """Return the devices of the cursor's snapshot, by id."""
        known = self._known
        ((count, newest),) = cursor.run("SELECT count(*), max(id) FROM device")
        if count == len(known) and (newest is None or newest in known):
            return known
        rows = cursor.run("SELECT id, node, gpu_model, profile, gpu FROM device")
        devices = {row[0]: DeviceName(*row[1:]) for row in rows}
        if len(devices) > len(known):
            self._known = devices
        return devices

    def on(self, nodes: Collection[str], devices: Mapping[int, DeviceName]) -> Mapping[int, DeviceName]:
        """Return the devices on nodes of these names. devices: a result of `read`."""
        cached_for, ids = self._on_nodes
        if cached_for is not devices:
            by_node: dict[str, list[int]] = {}
            for device, name in devices.items():
                by_node.setdefault(name.node, []).append(device)
            self._on_nodes, ids = (devices, by_node), by_node
        return {device: devices[device] for node in nodes for device in ids.get(node, ())}


def holders(
    cursor: Cursor,
    ids: Collection[int],
    labels: Collection[str] = (),
    exported: Sequence[str] = (),
    *,
    users: bool = False,
) -> Mapping[int, HolderName]:
    """Return the names of holders by id, with the values of these pod labels and exported labels and, if `users` is
    set, their users."""
    if not ids:
        return {}
    incoming = record_columns.column_table(record_columns.ID, [(holder,) for holder in sorted(ids)])
    rows = cursor.rows("holder_names", incoming=incoming)
    names = {
        number: HolderName(
            cluster, namespace, name, queue_ref, workload or f"{kind.capitalize()}/{name or uid}", container=container
        )
        for number, cluster, kind, uid, namespace, name, container, queue_ref, workload in rows
    }
    if labels:
        for number, text in cursor.rows("holder_labels", incoming=incoming):
            chosen = frozenset((key, value) for key, value in _labels.decode(text).items() if key in labels)
            names[number] = replace(names[number], labels=chosen)
    if exported:
        for number, history in cursor.rows("holder_exports", {"exported": list(exported)}, incoming=incoming):
            names[number] = replace(names[number], exported=label_history(exported, history))
    if users:
        for number, user in cursor.rows("holder_users", incoming=incoming):
            names[number] = replace(names[number], user=user)
    return names
