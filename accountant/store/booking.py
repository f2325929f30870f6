"""Writes one group into the ledger, inside a transaction that somebody else begins and ends.

Rows go in as received. A set that follows everything known of its GPU and lies inside one quarter-hour
counts as it is; any other is settled against its neighbours (`accountant.store.settling`). A statement costs
a small commit more than its rows do, so nothing is written that the rows tell as well: sums are folded later
(`accountant.store.compaction`), and a tenure is written where it begins, not wherever it grows. What readers
remember is told what came (`Booked.added`), so that they need not ask for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from accountant import teams, workloads
from accountant.accounts import Cells, split
from accountant.importing.protocol import is_import
from accountant.store import columns
from accountant.store.adding import add
from accountant.store.compaction import hours_of, unfold
from accountant.store.database import Cursor, once
from accountant.store.days import Days
from accountant.store.fleet import Fleet, Gpu, Tenure
from accountant.store.intake import Group, IncomingSet, Stream
from accountant.store.origins import PodKey
from accountant.store.parties import Dictionaries, GpuName, Parties
from accountant.store.settling import Region, settle
from agent.units import BUCKET_MS
from agent.wire import PodFacts

Own = dict[int, Mapping[str, Tenure]]
Changes = dict[int, tuple[Gpu, Mapping[str, Tenure]]]
"""GPU id -> its names and all its tenures."""


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
    own: Mapping[int, Mapping[str, Tenure]] = field(default_factory=dict)
    """Of GPUs that imports told of: what agents metered of them (accountant.store.fleet)."""


def book(
    cursor: Cursor, names: Dictionaries, group: Group, fleet: Fleet, unfolded: frozenset[int], days: Days
) -> Booked:
    """Write everything the group took. Raises LedgerUnavailable or LedgerFailed; then roll back."""
    streams = names.stream.resolve(cursor, [*group.advanced, *(item.stream for item in group.sets)])
    pods = tuple((stream[0], fact) for stream, fact, _ in group.facts)
    if pods:
        told = [(streams[stream], fact.seq, digest) for stream, fact, digest in group.facts]
        add(cursor, "pod_fact", columns.FACT, told)
        write_pods(cursor, pods, unheard=names.origins.unheard(cursor, pods))
        names.origins.learn(cursor, pods)
    changes, own, touched, added = _book_sets(cursor, names, group.sets, streams, fleet)
    newest_ms = fleet.newest_end_ms
    fresh_hours = hours_of(touched) - unfolded
    if fresh_hours:
        unfold(cursor, fresh_hours, newest_ms, days)
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
    return Booked(changes, frozenset(touched), added, fresh, fresh_hours, pods, own)


def _book_sets(
    cursor: Cursor, names: Dictionaries, sets: list[IncomingSet], streams: Mapping[Stream, int], fleet: Fleet
) -> tuple[Changes, Own, set[int], Mapping[int, Sequence[Added]]]:
    if not sets:
        return {}, {}, set(), {}
    gpus = names.gpu.resolve(cursor, [(item.stream[0], item.rows[0].gpu_uuid) for item in sets])
    parties = Parties(cursor, names, sets, gpus)
    cells = [split(row) for item in sets for row in item.rows]
    regions: list[Region] = []
    added: dict[int, list[Added]] = {}
    newest: dict[int, int] = {}
    unsettled: set[tuple[int, str]] = set()
    of_set: list[tuple[int, int, int, bool]] = []
    number = 0
    for item in sets:
        first = item.rows[0]
        gpu, start, end = gpus[item.stream[0], first.gpu_uuid], first.start_ms, first.end_ms
        last = newest.get(gpu)
        if last is None:
            last = fleet.last_ms(gpu)
        bucket = start - start % BUCKET_MS
        simple = start >= last and end - bucket <= BUCKET_MS
        newest[gpu] = max(last, end)
        of_set += [(streams[item.stream], first.seq, gpu, simple)] * len(item.rows)
        if simple:
            counted = added.setdefault(bucket, [])
            for place in range(number, number + len(item.rows)):
                pod, ref = parties.paying(place)
                counted.append(Added(pod, ref, start, end, cells[place]))
        else:
            regions.append(Region(gpu, start, end))
            unsettled.add((gpu, item.stream[1]))
        number += len(item.rows)
    rows = [row for item in sets for row in item.rows]
    digests = [digest for item in sets for digest in item.digests]
    incoming = columns.received(rows, cells, digests, of_set, parties.of_rows())
    cursor.rows("add_received", incoming=once(incoming))
    touched = set(added)
    if regions:
        settled = settle(cursor, regions)
        touched |= settled
        added = {bucket: rows_of for bucket, rows_of in added.items() if bucket not in settled}
    imported = [item for item in sets if is_import(item.stream[2])]
    changes = _extended(fleet, sets, gpus)
    told = {gpus[item.stream[0], item.rows[0].gpu_uuid] for item in imported}
    apart = told | (fleet.own.keys() & changes.keys())
    _book_tenures(cursor, fleet, {gpu: found for gpu, found in changes.items() if gpu not in apart}, unsettled)
    own: Own = {}
    if apart:
        own = _own(fleet, sets, gpus, apart)
        _book_apart(cursor, sets, gpus, apart)
    return changes, own, touched, added


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
        _write_tenures(cursor, tenures, imported=False)


def _book_apart(
    cursor: Cursor, sets: Iterable[IncomingSet], gpus: Mapping[GpuName, int], apart: Collection[int]
) -> None:
    """Tenures of the GPUs that imports told of, of imports and of agents apart."""
    for imported in (False, True):
        chosen = [item for item in sets if is_import(item.stream[2]) == imported]
        spans = [(gpu, node, tenure) for gpu, node, tenure in _spans(chosen, gpus) if gpu in apart]
        if spans:
            _write_tenures(cursor, spans, imported=imported)


def _write_tenures(cursor: Cursor, tenures: Sequence[tuple[int, str, Tenure]], *, imported: bool) -> None:
    lists = {
        "gpus": [gpu for gpu, _, _ in tenures],
        "nodes": [node for _, node, _ in tenures],
        "firsts": [tenure.first_ms for _, _, tenure in tenures],
        "lasts": [tenure.last_ms for _, _, tenure in tenures],
        "imported": [imported] * len(tenures),
    }
    cursor.rows("add_tenure", lists)


def _own(fleet: Fleet, sets: Iterable[IncomingSet], gpus: Mapping[GpuName, int], apart: Collection[int]) -> Own:
    """What agents metered of the GPUs that imports told of, by now; of those alone that changed."""
    found = {gpu: fleet.own.get(gpu, fleet.tenures.get(gpu, {})) for gpu in apart}
    for gpu, node, tenure in _spans((item for item in sets if not is_import(item.stream[2])), gpus):
        if gpu in apart:
            found[gpu] = {**found[gpu], node: tenure.with_(found[gpu].get(node))}
    return found


def _spans(sets: Iterable[IncomingSet], gpus: Mapping[GpuName, int]) -> list[tuple[int, str, Tenure]]:
    """Around the sets, by GPU and node."""
    found: dict[tuple[int, str], Tenure] = {}
    for item in sets:
        first = item.rows[0]
        key = (gpus[item.stream[0], first.gpu_uuid], item.stream[1])
        found[key] = Tenure(first.start_ms, first.end_ms).with_(found.get(key))
    return [(gpu, node, tenure) for (gpu, node), tenure in found.items()]


def _extended(fleet: Fleet, sets: Iterable[IncomingSet], gpus: Mapping[GpuName, int]) -> Changes:
    """The GPUs of the sets, their tenures stretched over them."""
    reached: dict[tuple[str, str, str, str], list[int]] = {}
    for item in sets:
        cluster, node, _ = item.stream
        first = item.rows[0]
        start, end = first.start_ms, first.end_ms
        bounds = reached.setdefault((cluster, first.gpu_uuid, node, first.gpu_model), [start, end])
        if start < bounds[0]:
            bounds[0] = start
        if end > bounds[1]:
            bounds[1] = end
    changes: Changes = {}
    for (cluster, uuid, node, model), (start, end) in reached.items():
        gpu = gpus[cluster, uuid]
        known, nodes = changes.get(gpu, (fleet.gpus.get(gpu), fleet.tenures.get(gpu, {})))
        named = Gpu(cluster, uuid, max(model, known.model if known is not None else ""))
        old = nodes.get(node)
        tenure = Tenure(start, end) if old is None else Tenure(min(old.first_ms, start), max(old.last_ms, end))
        changes[gpu] = (named, {**nodes, node: tenure})
    return changes


def write_pods(
    cursor: Cursor,
    facts: Sequence[tuple[str, PodFacts]],
    table: Literal["pod", "pod_seen"] = "pod",
    unheard: Collection[PodKey] = (),
) -> None:
    """Keep the newest observation of each pod: (cluster, facts); of its labels, the earliest. unheard: pods that
    are known to have no row; among those alone there is none to look for."""
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
    if all(key in unheard for key in newest):
        add(cursor, table, columns.POD, rows)
    else:
        cursor.rows("set_pods" if table == "pod" else "set_pods_seen", incoming=once(columns.table(columns.POD, rows)))
    add(cursor, "pod_label", columns.POD_LABEL, sorted(labels))
