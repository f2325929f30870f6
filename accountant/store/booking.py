"""Writes one group into the ledger, inside a transaction that somebody else begins and ends.

Rows go in as received, sums are kept in the same transaction. A set that follows everything known
of its GPU and lies inside one quarter-hour counts as it is; any other is settled against its
neighbours (`accountant.store.settling`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from accountant import teams, workloads
from accountant.accounts import split
from accountant.store import columns
from accountant.store.database import Cursor
from accountant.store.dictionary import Dictionary
from accountant.store.fleet import Fleet, Gpu, Tenure
from accountant.store.intake import Group, IncomingSet, Stream
from accountant.store.settling import Region, settle
from agent.units import BUCKET_MS
from agent.wire import PodFacts, UsageInterval

GpuName = tuple[str, str]
DeviceName = tuple[int, str, str, str, int, int, int, int, int, int]
HolderName = tuple[str, str, str, str, str, str]
Changes = dict[int, tuple[Gpu, Mapping[str, Tenure]]]
"""GPU id -> its names and all its tenures."""


class Dictionaries:
    """The names of the ledger."""

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

    def commit(self) -> None:
        for dictionary in (self.stream, self.gpu, self.device, self.holder):
            dictionary.commit()

    def forget(self) -> None:
        for dictionary in (self.stream, self.gpu, self.device, self.holder):
            dictionary.forget()


@dataclass(frozen=True, slots=True)
class Booked:
    """What the transaction changed: for the caches of readers, once it is committed."""

    fleet: Changes
    touched: frozenset[int]
    """Starts of the quarter-hours whose rows changed."""
    pods: tuple[tuple[str, PodFacts], ...] = ()
    """(cluster, facts) that came: who a holder belongs to may have changed."""


def book(cursor: Cursor, names: Dictionaries, group: Group, fleet: Fleet) -> Booked:
    """Write everything the group took. Raises LedgerUnavailable or LedgerFailed; then roll back."""
    streams = names.stream.resolve(cursor, [*group.advanced, *(item.stream for item in group.sets)])
    changes, touched = _book_sets(cursor, names, group.sets, streams, fleet)
    _book_facts(cursor, group, streams)
    if group.rejected:
        rows = [
            (streams[r.stream], r.seq, r.digest, group.now_ms, r.fault.reason, r.fault.detail, r.content)
            for r in group.rejected
        ]
        cursor.rows("add_quarantine", incoming=columns.table(columns.QUARANTINE, rows))
    if group.holes:
        holes = [(streams[stream], first, last, reason) for stream, first, last, reason in group.holes]
        cursor.rows("add_hole", incoming=columns.table(columns.HOLE, holes))
    marks = {"streams": [streams[stream] for stream in group.advanced], "seqs": list(group.advanced.values())}
    cursor.rows("add_mark", marks)
    return Booked(changes, frozenset(touched), tuple((stream[0], fact) for stream, fact, _ in group.facts))


def _book_sets(
    cursor: Cursor, names: Dictionaries, sets: list[IncomingSet], streams: Mapping[Stream, int], fleet: Fleet
) -> tuple[Changes, set[int]]:
    if not sets:
        return {}, set()
    gpus = names.gpu.resolve(cursor, [(item.stream[0], item.rows[0].gpu_uuid) for item in sets])
    device_of = [
        [_device(gpus[item.stream[0], row.gpu_uuid], item.stream[1], row) for row in item.rows] for item in sets
    ]
    holder_of = [[_holder(item.stream[0], row) for row in item.rows] for item in sets]
    devices = names.device.resolve(cursor, [name for group in device_of for name in group])
    holders = names.holder.resolve(cursor, [name for group in holder_of for name in group if name is not None])
    rows: list[tuple[object, ...]] = []
    regions: list[Region] = []
    touched: set[int] = set()
    changes: Changes = {}
    newest: dict[int, int] = {}
    for item, device_names, holder_names in zip(sets, device_of, holder_of, strict=True):
        first = item.rows[0]
        gpu = gpus[item.stream[0], first.gpu_uuid]
        if gpu not in newest:
            newest[gpu] = fleet.last_ms(gpu)
        simple = first.start_ms >= newest[gpu] and first.start_ms // BUCKET_MS == (first.end_ms - 1) // BUCKET_MS
        newest[gpu] = max(newest[gpu], first.end_ms)
        if simple:
            touched.add(first.start_ms - first.start_ms % BUCKET_MS)
        else:
            regions.append(Region(gpu, first.start_ms, first.end_ms))
        _extend(changes, fleet, gpu, item)
        stream, set_seq = streams[item.stream], first.seq
        rows += [
            columns.received(
                row, split(row), digest, stream=stream, set_seq=set_seq, gpu=gpu, device=devices[device],
                holder=0 if holder is None else holders[holder], booked=simple,
            )
            for row, digest, device, holder in zip(item.rows, item.digests, device_names, holder_names, strict=True)
        ]  # fmt: skip
    incoming = columns.table(columns.RECEIVED, rows)
    with cursor.visible(incoming=incoming):
        for name in ("add_received", "add_recent"):
            cursor.rows(name)
    if regions:
        touched |= settle(cursor, regions)
    tenures = [(gpu, node, t) for gpu, (_, nodes) in changes.items() for node, t in nodes.items()]
    cursor.rows(
        "add_tenure",
        {
            "gpus": [gpu for gpu, _, _ in tenures],
            "nodes": [node for _, node, _ in tenures],
            "firsts": [tenure.first_ms for _, _, tenure in tenures],
            "lasts": [tenure.last_ms for _, _, tenure in tenures],
        },
    )
    return changes, touched


def _device(gpu: int, node: str, row: UsageInterval) -> DeviceName:
    part = row.slice
    if part is None:
        return (gpu, node, row.gpu_model, "", -1, -1, 0, 0, 0, 0)
    return (
        gpu, node, row.gpu_model, part.profile, part.gi, part.ci, part.compute, part.compute_of, part.memory_mib,
        part.memory_of_mib,
    )  # fmt: skip


def _holder(cluster: str, row: UsageInterval) -> HolderName | None:
    held = row.holder
    return None if held is None else (cluster, held.kind, held.uid, held.namespace, held.name, held.container)


def _extend(changes: Changes, fleet: Fleet, gpu: int, item: IncomingSet) -> None:
    """Stretch the GPU's tenure on this node over one more set."""
    cluster, node, _ = item.stream
    first = item.rows[0]
    named, nodes = changes.get(gpu, (None, fleet.tenures.get(gpu, {})))
    if named is None:
        model = max(first.gpu_model, fleet.gpus[gpu].model if gpu in fleet.gpus else "")
        named = Gpu(cluster, first.gpu_uuid, model)
    elif first.gpu_model > named.model:
        named = Gpu(cluster, first.gpu_uuid, first.gpu_model)
    old = nodes.get(node)
    if old is None:
        tenure = Tenure(first.start_ms, first.end_ms)
    else:
        tenure = Tenure(min(old.first_ms, first.start_ms), max(old.last_ms, first.end_ms))
    changes[gpu] = (named, {**nodes, node: tenure})


def _book_facts(cursor: Cursor, group: Group, streams: Mapping[Stream, int]) -> None:
    if not group.facts:
        return
    numbered = [(streams[stream], fact.seq, digest) for stream, fact, digest in group.facts]
    cursor.rows("add_pod_fact", incoming=columns.table(columns.FACT, numbered))
    write_pods(cursor, [(stream[0], fact) for stream, fact, _ in group.facts])


def write_pods(cursor: Cursor, facts: list[tuple[str, PodFacts]], statement: str = "set_pods") -> None:
    """Keep the newest observation of each pod: (cluster, facts); of its labels, the earliest."""
    newest: dict[tuple[str, str], tuple[int, str, PodFacts]] = {}
    labels = set()
    for cluster, fact in facts:
        # The number belongs to the outbox, not to the pod.
        text = msgspec.json.encode(msgspec.structs.replace(fact, seq=0), order="deterministic").decode()
        known = newest.get((cluster, fact.uid))
        if known is None or (fact.observed_ms, text) > known[:2]:
            newest[cluster, fact.uid] = (fact.observed_ms, text, fact)
        if teams.labels_count(fact):
            chosen = msgspec.json.encode(fact.labels, order="deterministic").decode()
            labels.add((cluster, fact.uid, fact.observed_ms, chosen))
    rows = [
        (
            cluster, uid, fact.namespace, fact.name, fact.workload or workloads.job(fact.owners, fact.labels),
            fact.queue_ref, observed, text,
        )
        for (cluster, uid), (observed, text, fact) in newest.items()
    ]  # fmt: skip
    cursor.rows(statement, incoming=columns.table(columns.POD, rows))
    if labels:
        cursor.rows("add_pod_label", incoming=columns.table(columns.POD_LABEL, sorted(labels)))
