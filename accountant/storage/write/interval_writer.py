"""Writes the records of a group commit, and resolves the overlaps of intervals with stored ones.

Rows are stored as received. A set is the rows of one GPU with the same span. Most sets need no comparison: a set that
starts after all earlier rows of its GPU and lies inside one quarter-hour counts as it is (`simple`). Any other set is
resolved against the sets that it overlaps (`settle`). The result is computed from all sets that overlap the changed
span, so the ledger does not depend on the order in which sets arrive.

In a small commit each SQL statement costs more than its rows. Nothing is therefore written that can be derived from the
rows. Sums are computed later (`rollups`). A tenure (the span in which a node has a GPU) is written when it begins, not
each time that a new interval extends it. The caches of readers receive the added rows (`BookedChanges.added`), so they
need not read them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from accountant.core import claim_overlap
from accountant.core.claim_overlap import ClaimRank, Span, TimeClaim
from accountant.core.gpu_time_accounts import AccountVector, part
from accountant.core.import_epochs import is_import
from accountant.core.periods import quarters
from accountant.core.record_faults import MAX_INTERVAL_MS
from accountant.inventory import pod_facts
from accountant.inventory.pod_facts import ObservedPod
from accountant.ledger import team_assignment
from accountant.storage.duckdb_engine import Cursor, Row, statement
from accountant.storage.gpu_lifetimes import FOREVER, GpuLifetimes, MeteredGpu, Tenure
from accountant.storage.write import record_columns
from accountant.storage.write.batch_admission import GroupCommit
from accountant.storage.write.name_ids import Dictionaries, HolderColumns, PodKey
from accountant.storage.write.record_columns import (
    DistinctColumn,
    GpuName,
    Incoming,
    IntervalSets,
    Stream,
    Truth,
    Whole,
    add,
)
from accountant.storage.write.rollups import DailySums, hours_of, unfold_hours
from agent.wire import PodFacts
from gputally.base.units import BUCKET_MS

SetId = tuple[int, int]
"""(stream id, set_seq)."""


@dataclass(frozen=True, slots=True)
class TouchedSpan:
    """A span of one GPU in which a set arrived."""

    gpu: int
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class _NeighbourSet:
    """A stored set that overlaps a touched span, or overlaps another set that does.

    booked: whether the set counts as received; otherwise only its pieces in the table `piece` count."""

    gpu: int
    id: SetId
    claim: TimeClaim
    booked: bool


def settle(cursor: Cursor, regions: Iterable[TouchedSpan]) -> set[int]:
    """Resolve the overlaps of all sets that overlap these spans. Returns the starts of the quarter-hours that
    changed."""
    regions_of = _merged(regions)
    neighbours = _neighbours(cursor, regions_of)
    kept: dict[SetId, list[Span]] = {}
    concerned: dict[SetId, _NeighbourSet] = {}
    for gpu, known in neighbours.items():
        result = claim_overlap.resolve_overlaps(item.claim for item in known)
        for item in known:
            if claim_overlap.overlaps(regions_of[gpu], item.claim.start_ms, item.claim.end_ms):
                concerned[item.id] = item
                kept[item.id] = [p for span in result[item.claim.rank] for p in quarters(*span)]
    before = _kept_before(cursor, concerned)
    changed = {key: item for key, item in concerned.items() if kept[key] != before[key]}
    if not changed:
        return set()
    _rewrite(cursor, changed, kept)
    return {
        bucket
        for item in changed.values()
        for bucket in range(item.claim.start_ms - item.claim.start_ms % BUCKET_MS, item.claim.end_ms, BUCKET_MS)
    }


def _merged(regions: Iterable[TouchedSpan]) -> dict[int, list[Span]]:
    """Return the spans by GPU, merged so that they do not overlap."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for region in regions:
        spans[region.gpu].append((region.start_ms, region.end_ms))
    return {gpu: claim_overlap.union(found) for gpu, found in sorted(spans.items())}


def _neighbours(cursor: Cursor, regions_of: Mapping[int, Sequence[Span]]) -> dict[int, list[_NeighbourSet]]:
    """Return, by GPU, every set that overlaps the regions, and every set that overlaps one of these sets."""
    regions = [TouchedSpan(gpu, *span) for gpu, spans in regions_of.items() for span in spans]
    # Regions near each other share a reach: the engine compares each reach of a GPU with each of its sets.
    reaches = [
        (0, gpu, start_ms, end_ms)
        for gpu, spans in regions_of.items()
        for start_ms, end_ms in claim_overlap.union(
            (start_ms - MAX_INTERVAL_MS, end_ms + MAX_INTERVAL_MS) for start_ms, end_ms in spans
        )
    ]
    rows = cursor.rows(
        "overlapping_sets",
        _bounds(regions, 2 * MAX_INTERVAL_MS),
        incoming=record_columns.column_table(record_columns.SPAN, reaches),
    )
    met: dict[int, list[Span]] = defaultdict(list)
    for gpu, _, _, start, end, *_ in rows:
        if claim_overlap.overlaps(regions_of[gpu], start, end):
            met[gpu].append((start, end))
    concerned = {gpu: claim_overlap.union(spans) for gpu, spans in met.items()}
    near = sorted(row for row in rows if claim_overlap.overlaps(concerned.get(row[0], ()), row[3], row[4]))
    ids = sorted({stream for _, stream, *_ in near})
    names = "SELECT id, epoch, cluster || '/' || node FROM stream WHERE id IN (SELECT unnest(?))"
    streams = {stream: (epoch, node) for stream, epoch, node in cursor.run(names, [ids])}
    found: dict[int, list[_NeighbourSet]] = defaultdict(list)
    for gpu, stream, set_seq, start, end, origin, booked in near:
        epoch, node = streams[stream]
        claim = TimeClaim(ClaimRank(origin, epoch, set_seq, node), start, end)
        found[gpu].append(_NeighbourSet(gpu, (stream, set_seq), claim, booked))
    return found


def _kept_before(cursor: Cursor, sets: dict[SetId, _NeighbourSet]) -> dict[SetId, list[Span]]:
    before: dict[SetId, list[Span]] = {
        key: [(item.claim.start_ms, item.claim.end_ms)] if item.booked else [] for key, item in sets.items()
    }
    for stream, set_seq, start, end in cursor.rows("kept_pieces", incoming=_ids(sets)):
        before[stream, set_seq].append((start, end))
    return before


def _rewrite(cursor: Cursor, sets: dict[SetId, _NeighbourSet], kept: dict[SetId, list[Span]]) -> None:
    bounds = _bounds([TouchedSpan(i.gpu, i.claim.start_ms, i.claim.end_ms) for i in sets.values()], 0)
    rows: dict[SetId, list[Row]] = defaultdict(list)
    for row in cursor.rows("set_cells", bounds, incoming=_ids(sets)):
        rows[row[0], row[1]].append(row)
    whole = {key: kept[key] == [(item.claim.start_ms, item.claim.end_ms)] for key, item in sets.items()}
    pieces = []
    for key in sets:
        if not whole[key]:
            pieces += _pieces(rows[key], kept[key])
    flags = _ids(sets).append_column("booked", pa.array([whole[key] for key in sets], type=pa.bool_()))
    for part_of_it in statement("mark_booked").split(";"):
        cursor.run(part_of_it, bounds if "$low" in part_of_it else None, incoming=flags)
    cursor.rows("drop_pieces", incoming=_ids(sets))
    if pieces:
        cursor.insert("piece", record_columns.column_table(record_columns.PIECE, pieces))


def _pieces(rows: list[Row], kept: list[Span]) -> list[tuple[object, ...]]:
    """Return rows of PIECE for each remaining span of one set (columns of set_cells.sql)."""
    start, end = rows[0][2], rows[0][3]
    cells = [AccountVector(*row[8:]) for row in rows]
    pieces: list[tuple[object, ...]] = []
    for begin, stop in kept:
        parts = part(cells, end - start, begin - start, stop - start)
        for (stream, set_seq, _, _, seq, gpu, device, payer, *_), cells_of_part in zip(rows, parts, strict=True):
            pieces.append((stream, seq, set_seq, begin, stop, gpu, device, payer, *cells_of_part))
    return pieces


def _ids(sets: Iterable[SetId]) -> pa.Table:
    return record_columns.column_table(record_columns.NUMBER, list(sets))


def _bounds(regions: Iterable[TouchedSpan], reach_ms: int) -> dict[str, int]:
    """Return the range of start_ms of rows up to `reach_ms` away from the regions, to limit a scan."""
    spans = [(r.start_ms, r.end_ms) for r in regions]
    return {"low": min(s for s, _ in spans) - reach_ms, "high": max(e for _, e in spans) + reach_ms}


_observed = msgspec.json.Decoder(ObservedPod)
Own = dict[int, Mapping[str, Tenure]]
Changes = dict[int, tuple[MeteredGpu, Mapping[str, Tenure]]]
"""GPU id -> its names and all its tenures."""
_ABOVE_MS = 2**43
"""Later than the end of every row."""


class AddedRows(NamedTuple):
    """Rows of one quarter-hour that count as received, as columns.

    queue: the queue reference of the payer's pod.
    paid: false without a payer.
    cluster: the sender's."""

    start_ms: Whole
    end_ms: Whole
    cells: Whole
    queue: DistinctColumn[str]
    paid: Truth
    cluster: DistinctColumn[str]


@dataclass(frozen=True, slots=True)
class BookedChanges:
    """What a transaction changed. After the commit the caches of readers are updated from it."""

    fleet: Changes
    touched: frozenset[int]
    """Starts of the quarter-hours whose rows changed."""
    added: Mapping[int, Callable[[], AddedRows]] = field(default_factory=dict)
    """The added rows of each touched quarter-hour in which nothing else changed."""
    fresh: frozenset[int] = frozenset()
    """Touched quarter-hours that had no row before."""
    unfolded: frozenset[int] = frozenset()
    """Hours that are no longer folded."""
    pods: tuple[tuple[str, PodFacts], ...] = ()
    """New facts as (cluster, facts)."""
    requeued: bool = False
    """Whether a pod that holds GPU time changed its queue."""
    since_ms: int | None = None
    """The earliest instant to which changed facts apply; None if no fact of any time changed."""
    own: Mapping[int, Mapping[str, Tenure]] = field(default_factory=dict)
    """Tenures of GPUs that imports named, as the agents themselves reported them (see `gpu_lifetimes`)."""


def book(
    cursor: Cursor,
    names: Dictionaries,
    group: GroupCommit,
    fleet: GpuLifetimes,
    unfolded: frozenset[int],
    days: DailySums,
) -> BookedChanges:
    """Write the records of the group. If this raises LedgerUnavailable or LedgerFailed, the caller rolls back."""
    streams = names.stream.resolve(cursor, group.advanced)
    pods = tuple((stream[0], fact) for stream, fact, _ in group.facts)
    requeued: frozenset[PodKey] = frozenset()
    instants: list[int] = []
    if pods:
        requeued = names.origins.requeued(cursor, pods)
        numbers = [(streams[stream], fact.seq, digest) for stream, fact, digest in group.facts]
        new_pods = names.origins.new_pods(cursor, pods)
        instants += write_pods(cursor, pods, new_pods=new_pods)
        names.labels.write(cursor, ((*stream[:2], fact) for stream, fact, _ in group.facts), new_pods)
        add(cursor, "pod_fact", record_columns.FACT, numbers)
        names.origins.learn(cursor, pods)
        instants += names.origins.since(cursor, first_instants(pods), new_pods - requeued, unfolded)
    if group.gpus is not None:
        add(cursor, "gpu_owner", record_columns.GPU_OWNER, group.gpus.rows)
    if group.pods is not None:
        add(cursor, "pod_node", record_columns.POD_NODE, group.pods.rows)
    changes, own, touched, added, since = _book_rows(cursor, names, group.incoming, streams, fleet, unfolded)
    if any(_moved(nodes, fleet.tenures.get(gpu, {})) for gpu, (_, nodes) in changes.items()):
        instants.append(min(touched, default=0))
    newest_ms = fleet.newest_end_ms
    fresh_hours = hours_of(touched) - unfolded
    if fresh_hours:
        unfold_hours(cursor, fresh_hours, newest_ms, days)
    if group.rejected:
        rows = [
            (streams[r.stream], r.seq, r.digest, group.now_ms, r.fault.reason, r.fault.detail, r.content)
            for r in group.rejected
        ]
        cursor.insert("quarantine", record_columns.column_table(record_columns.QUARANTINE, rows))
    if group.holes:
        holes = [(streams[stream], first, last, reason) for stream, first, last, reason in group.holes]
        cursor.insert("hole", record_columns.column_table(record_columns.HOLE, holes))
    marks = {"streams": [streams[stream] for stream in group.advanced], "seqs": list(group.advanced.values())}
    cursor.plainly(statement("add_mark"), marks)
    fresh = frozenset(bucket for bucket in touched if bucket >= newest_ms)
    since_ms = min([*instants, *since], default=None)
    return BookedChanges(changes, frozenset(touched), added, fresh, fresh_hours, pods, bool(requeued), since_ms, own)


def _moved(after: Mapping[str, Tenure], before: Mapping[str, Tenure]) -> bool:
    """Return whether a GPU with these tenures was on other nodes, or since other instants, than was known before."""
    return len(after) > 1 and {n: one.first_ms for n, one in after.items()} != {
        n: one.first_ms for n, one in before.items()
    }


def _book_rows(
    cursor: Cursor,
    names: Dictionaries,
    incoming: Incoming | None,
    streams: Mapping[Stream, int],
    fleet: GpuLifetimes,
    unfolded: Collection[int],
) -> tuple[Changes, Own, set[int], Mapping[int, Callable[[], AddedRows]], list[int]]:
    if incoming is None:
        return {}, {}, set(), {}, []
    known = names.gpu.resolve(cursor, incoming.gpu.values)
    gpus = np.array([known[gpu] for gpu in incoming.gpu.values], np.int64)
    parties = HolderColumns(cursor, names, incoming, known, unfolded)
    cells = record_columns.cells(incoming)
    sets = incoming.sets
    as_came = simple(sets, np.array([fleet.last_ms(gpu) for gpu in gpus.tolist()], np.int64))
    booked = sets.spread(as_came)
    stream = np.array([streams[section.stream] for section in incoming.sections], np.int64)[incoming.section]
    ids = record_columns.RowIds(stream, gpus[incoming.gpu.of_row], parties.device, parties.holder, parties.payer)
    rows = record_columns.received(incoming, cells, ids, booked)
    cursor.insert("received", rows)
    added = _added(incoming, cells, parties, booked)
    touched = set(added)
    compared: set[tuple[int, str]] = set()
    if not as_came.all():
        late = np.flatnonzero(~as_came)
        spans = zip(
            gpus[sets.gpu[late]].tolist(), sets.start_ms[late].tolist(), sets.end_ms[late].tolist(), strict=True
        )
        regions = [TouchedSpan(*span) for span in spans]
        nodes = [incoming.sections[section].stream[1] for section in sets.section[late].tolist()]
        compared = {(region.gpu, node) for region, node in zip(regions, nodes, strict=True)}
        settled = settle(cursor, regions)
        touched |= settled
        added = {bucket: rows_of for bucket, rows_of in added.items() if bucket not in settled}
    imported = np.array([is_import(section.stream[2]) for section in incoming.sections])[incoming.section]
    reached = _reached(incoming, known, imported)
    changes = _extended(fleet, reached)
    imported_gpus = {reach.gpu for reach in reached if reach.imported} | (fleet.own.keys() & changes.keys())
    _book_tenures(cursor, fleet, {gpu: found for gpu, found in changes.items() if gpu not in imported_gpus}, compared)
    own: Own = {}
    if imported_gpus:
        reached_by_imports = [reach for reach in reached if reach.gpu in imported_gpus]
        own = _own(fleet, reached_by_imports, imported_gpus)
        _write_tenures(cursor, [(reach.gpu, reach.node, reach.tenure, reach.imported) for reach in reached_by_imports])
    return changes, own, touched, added, parties.since


def simple(sets: IntervalSets, last_ms: Whole) -> Truth:
    """Return for each set whether it lies inside one quarter-hour and starts after all earlier rows of its GPU, booked
    ones and those of the group.

    last_ms: by GPU, the end of its newest booked record."""
    by_gpu = np.argsort(sets.gpu, kind="stable")
    gpu, end = sets.gpu[by_gpu], sets.end_ms[by_gpu]
    # The running maximum is taken per GPU: an offset for each GPU keeps its values apart from those of the others.
    so_far = np.maximum.accumulate(gpu * _ABOVE_MS + end) - gpu * _ABOVE_MS
    before = np.where(np.diff(gpu, prepend=-1) == 0, np.concatenate(([0], so_far[:-1])), 0)
    last = np.empty(len(gpu), np.int64)
    last[by_gpu] = np.maximum(before, last_ms[gpu])
    bucket = sets.start_ms - sets.start_ms % BUCKET_MS
    found: Truth = (sets.start_ms >= last) & (sets.end_ms - bucket <= BUCKET_MS)
    return found


def _added(
    incoming: Incoming, cells: Whole, parties: HolderColumns, booked: Truth
) -> dict[int, Callable[[], AddedRows]]:
    """Return for each quarter-hour a function that returns the rows that count as received."""
    buckets = np.where(booked, incoming.start_ms - incoming.start_ms % BUCKET_MS, -1)

    def of(bucket: int) -> AddedRows:
        places = np.flatnonzero(buckets == bucket)
        queue = DistinctColumn(parties.queue.values, parties.queue.of_row[places])
        start, end = incoming.start_ms[places], incoming.end_ms[places]
        cluster = DistinctColumn(incoming.cluster.values, incoming.cluster.of_row[places])
        return AddedRows(start, end, cells[places], queue, parties.pays[places], cluster)

    return {bucket: partial(of, bucket) for bucket in np.unique(buckets).tolist() if bucket >= 0}


def _book_tenures(cursor: Cursor, fleet: GpuLifetimes, changes: Changes, compared: Collection[tuple[int, str]]) -> None:
    """Write tenures that are new or begin earlier than before.

    The ends of tenures follow from the rows of unfolded hours. A set that was displaced entirely unfolds no hour, so
    for the GPUs and nodes of sets in `compared` the end is written too."""
    tenures = []
    for gpu, (_, nodes) in changes.items():
        before = fleet.tenures.get(gpu, {})
        for node, tenure in nodes.items():
            if node not in before or tenure.first_ms < before[node].first_ms or (gpu, node) in compared:
                tenures.append((gpu, node, tenure, False))
    if tenures:
        _write_tenures(cursor, tenures)


class _GpuExtent(NamedTuple):
    """The extent of a GPU's rows on a node, separately for imports and agents."""

    gpu: int
    name: GpuName
    model: str
    node: str
    tenure: Tenure
    imported: bool


def _reached(incoming: Incoming, gpus: Mapping[GpuName, int], imported: Truth) -> list[_GpuExtent]:
    """Return the extents of the GPUs of all rows."""
    devices = incoming.device
    kinds = devices.of_row * 2 + imported
    first = np.full(2 * len(devices.values), _ABOVE_MS)
    last = np.zeros(2 * len(devices.values), np.int64)
    np.minimum.at(first, kinds, incoming.start_ms)
    np.maximum.at(last, kinds, incoming.end_ms)
    found: list[_GpuExtent] = []
    for kind, (start, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        if end:
            ((_, node), gpu), (model, _) = devices.values[kind // 2]
            found.append(_GpuExtent(gpus[gpu], gpu, model, node, Tenure(start, end), imported=bool(kind % 2)))
    return found


def _write_tenures(cursor: Cursor, tenures: Sequence[tuple[int, str, Tenure, bool]]) -> None:
    gpus, nodes, spans, imported = map(list, zip(*tenures, strict=True))
    firsts, lasts = map(list, zip(*spans, strict=True))
    cursor.rows("add_tenure", {"gpus": gpus, "nodes": nodes, "firsts": firsts, "lasts": lasts, "imported": imported})


def _own(fleet: GpuLifetimes, reached: Iterable[_GpuExtent], gpus: Collection[int]) -> Own:
    """Return the entries of `GpuLifetimes.own` for these GPUs, which imports named, after the commit."""
    found = {gpu: fleet.own.get(gpu, fleet.tenures.get(gpu, {})) for gpu in gpus}
    for reach in reached:
        if not reach.imported:
            before = found[reach.gpu]
            found[reach.gpu] = {**before, reach.node: reach.tenure.with_(before.get(reach.node))}
    return found


def _extended(fleet: GpuLifetimes, reached: Iterable[_GpuExtent]) -> Changes:
    """Return the GPUs of the rows with their tenures extended to cover them."""
    changes: Changes = {}
    for gpu, name, model, node, tenure, _ in reached:
        known, nodes = changes.get(gpu) or (fleet.gpus.get(gpu), fleet.tenures.get(gpu, {}))
        if known is None or known.model < model:
            known = MeteredGpu(*name, model)
        changes[gpu] = (known, {**nodes, node: tenure.with_(nodes.get(node))})
    return changes


def write_pods(
    cursor: Cursor,
    facts: Sequence[tuple[str, PodFacts]],
    table: Literal["pod", "pod_seen"] = "pod",
    new_pods: Collection[PodKey] = (),
) -> list[int]:
    """Store the newest observation of each pod, given as (cluster, facts). Return instants before which the stored
    observations that it replaces say nothing.

    The earliest labels, and the queue with which the pod was placed, do not change.

    new_pods: pods that certainly have no row, so that they need not be looked up."""
    newest: dict[PodKey, ObservedPod] = {}
    replaced: list[int] = []
    early = set()
    for cluster, fact in facts:
        seen = pod_facts.observed(fact, through_owners=table == "pod_seen")
        _merge(newest, (cluster, fact.uid), seen)
        if team_assignment.labels_count(fact):
            chosen = msgspec.json.encode(fact.labels, order="deterministic").decode()
            early.add((cluster, fact.uid, fact.observed_ms, chosen))
    known_uids = sorted({uid for cluster, uid in newest if (cluster, uid) not in new_pods})
    if known_uids:
        for row in cursor.plainly(statement("take_pods", table=table), [known_uids]):
            stored = _PodRow(*row)
            before = _observed.decode(stored.content)
            replaced += _instants(before)
            _merge(newest, (stored.cluster, stored.uid), before)
    add(cursor, table, record_columns.POD, [_pod_row(cluster, fact) for (cluster, _), fact in newest.items()])
    add(cursor, "pod_label", record_columns.POD_LABEL, sorted(early))
    return replaced


def first_instants(facts: Iterable[tuple[str, PodFacts]]) -> dict[PodKey, int]:
    """Return the earliest creation, placement or start that these facts, given as (cluster, facts), tell of each
    pod."""
    found: dict[PodKey, int] = {}
    for cluster, fact in facts:
        key = (cluster, fact.uid)
        found[key] = min([found.get(key, FOREVER), *_instants(fact)])
    return found


def _instants(fact: PodFacts | ObservedPod) -> list[int]:
    return [at for at in (fact.created_ms, fact.scheduled_ms, fact.started_ms) if at is not None]


class _PodRow(NamedTuple):
    """A row of the pod tables (record_columns.POD)."""

    cluster: str
    uid: str
    namespace: str
    name: str
    workload: str
    queue_ref: str
    observed_ms: int
    content: str


def _pod_row(cluster: str, fact: ObservedPod) -> _PodRow:
    text = msgspec.json.encode(fact, order="deterministic").decode()
    workload = fact.workload or pod_facts.job(fact.owners, fact.labels)
    return _PodRow(cluster, fact.uid, fact.namespace, fact.name, workload, fact.queue_ref, fact.observed_ms, text)


def _merge(newest: dict[PodKey, ObservedPod], key: PodKey, fact: ObservedPod) -> None:
    known = newest.get(key)
    newest[key] = fact if known is None else pod_facts.merge_observations(known, fact)
