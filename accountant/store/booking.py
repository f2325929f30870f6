"""Writes one group into the ledger, inside a transaction that somebody else begins and ends.

Rows go in as received. A set that follows everything known of its GPU and lies inside one quarter-hour
counts as it is; any other is settled against its neighbours (`accountant.store.settling`). A statement costs
a small commit more than its rows do, so nothing is written that the rows tell as well: sums are folded later
(`accountant.store.compaction`), and a tenure is written where it begins, not wherever it grows. What readers
remember is told what came (`Booked.added`), so that they need not ask for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from accountant import teams, workloads
from accountant.accounts import Cells, split
from accountant.store import columns
from accountant.store.compaction import hours_of, unfold
from accountant.store.database import Cursor
from accountant.store.dictionary import Dictionary
from accountant.store.fleet import Fleet, Gpu, Tenure
from accountant.store.intake import Group, IncomingSet, Stream
from accountant.store.origins import Origins, PodKey
from accountant.store.settling import Region, settle
from agent.units import BUCKET_MS
from agent.wire import PodFacts, UsageInterval

GpuName = tuple[str, str]
DeviceName = tuple[int, str, str, str, int, int, int, int, int, int]
HolderName = tuple[str, str, str, str, str, str]
Changes = dict[int, tuple[Gpu, Mapping[str, Tenure]]]
"""GPU id -> its names and all its tenures."""


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


class Added(NamedTuple):
    """A row that counts as it came. pod: (cluster, uid) of who pays, None for nobody; queue_ref: its."""

    pod: PodKey | None
    queue_ref: str
    start_ms: int
    end_ms: int
    cells: Cells


@dataclass(frozen=True, slots=True)
class Booked:
    """What the transaction changed: for the caches of readers, once it is committed."""

    fleet: Changes
    touched: frozenset[int]
    """Starts of the quarter-hours whose rows changed."""
    added: Mapping[int, Sequence[Added]] = field(default_factory=dict)
    """By touched quarter-hour, where rows were only added to it: all of them."""
    fresh: frozenset[int] = frozenset()
    """Touched quarter-hours that had no row before."""
    unfolded: frozenset[int] = frozenset()
    """Hours that are no longer folded."""
    pods: tuple[tuple[str, PodFacts], ...] = ()
    """(cluster, facts) that came: who a holder belongs to may have changed."""


def book(cursor: Cursor, names: Dictionaries, group: Group, fleet: Fleet, unfolded: frozenset[int]) -> Booked:
    """Write everything the group took. Raises LedgerUnavailable or LedgerFailed; then roll back."""
    streams = names.stream.resolve(cursor, [*group.advanced, *(item.stream for item in group.sets)])
    _book_facts(cursor, group, streams)
    pods = tuple((stream[0], fact) for stream, fact, _ in group.facts)
    names.origins.learn(cursor, pods)
    changes, touched, added = _book_sets(cursor, names, group.sets, streams, fleet)
    newest_ms = fleet.newest_end_ms
    fresh_hours = hours_of(touched) - unfolded
    if fresh_hours:
        unfold(cursor, fresh_hours, newest_ms)
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
    fresh = frozenset(bucket for bucket in touched if bucket >= newest_ms)
    return Booked(changes, frozenset(touched), added, fresh, fresh_hours, pods)


def _book_sets(
    cursor: Cursor, names: Dictionaries, sets: list[IncomingSet], streams: Mapping[Stream, int], fleet: Fleet
) -> tuple[Changes, set[int], Mapping[int, Sequence[Added]]]:
    if not sets:
        return {}, set(), {}
    gpus = names.gpu.resolve(cursor, [(item.stream[0], item.rows[0].gpu_uuid) for item in sets])
    device_of = [
        [_device(gpus[item.stream[0], row.gpu_uuid], item.stream[1], row) for row in item.rows] for item in sets
    ]
    holder_of = [[_holder(item.stream[0], row) for row in item.rows] for item in sets]
    devices = names.device.resolve(cursor, [name for group in device_of for name in group])
    holders = names.holder.resolve(cursor, [name for group in holder_of for name in group if name is not None])
    paying = {(held[0], held[2]) for group in holder_of for held in group if held is not None}
    refs = names.origins.resolve(cursor, paying)
    rows: list[tuple[object, ...]] = []
    regions: list[Region] = []
    added: dict[int, list[Added]] = {}
    changes: Changes = {}
    newest: dict[int, int] = {}
    unsettled: list[tuple[int, str]] = []
    for item, device_names, holder_names in zip(sets, device_of, holder_of, strict=True):
        first = item.rows[0]
        gpu = gpus[item.stream[0], first.gpu_uuid]
        if gpu not in newest:
            newest[gpu] = fleet.last_ms(gpu)
        simple = first.start_ms >= newest[gpu] and first.start_ms // BUCKET_MS == (first.end_ms - 1) // BUCKET_MS
        newest[gpu] = max(newest[gpu], first.end_ms)
        if not simple:
            regions.append(Region(gpu, first.start_ms, first.end_ms))
            unsettled.append((gpu, item.stream[1]))
        _extend(changes, fleet, gpu, item)
        stream, set_seq = streams[item.stream], first.seq
        counted = added.setdefault(first.start_ms - first.start_ms % BUCKET_MS, []) if simple else None
        for row, digest, device, holder in zip(item.rows, item.digests, device_names, holder_names, strict=True):
            cells, number = split(row), 0 if holder is None else holders[holder]
            payer = number if columns.pays(row) else 0
            rows.append(
                columns.received(row, cells, digest, (stream, set_seq, gpu, devices[device], number, payer), simple)
            )
            if counted is not None:
                pod = (holder[0], holder[2]) if payer and holder is not None else None
                counted.append(Added(pod, refs[pod] if pod else "", row.start_ms, row.end_ms, cells))
    cursor.rows("add_received", incoming=columns.table(columns.RECEIVED, rows))
    touched = set(added)
    if regions:
        settled = settle(cursor, regions)
        touched |= settled
        added = {bucket: rows_of for bucket, rows_of in added.items() if bucket not in settled}
    _book_tenures(cursor, fleet, changes, unsettled)
    return changes, touched, added


def _book_tenures(cursor: Cursor, fleet: Fleet, changes: Changes, unsettled: Collection[tuple[int, str]]) -> None:
    """Those that begin, or begin earlier. How far they reach is told by the rows of unfolded hours, but
    for `unsettled` sets: one that was displaced whole unfolds nothing."""
    tenures = []
    for gpu, (_, nodes) in changes.items():
        before = fleet.tenures.get(gpu, {})
        for node, tenure in nodes.items():
            if node not in before or tenure.first_ms < before[node].first_ms or (gpu, node) in unsettled:
                tenures.append((gpu, node, tenure))
    if tenures:
        lists = {
            "gpus": [gpu for gpu, _, _ in tenures],
            "nodes": [node for _, node, _ in tenures],
            "firsts": [tenure.first_ms for _, _, tenure in tenures],
            "lasts": [tenure.last_ms for _, _, tenure in tenures],
        }
        cursor.rows("add_tenure", lists)


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
