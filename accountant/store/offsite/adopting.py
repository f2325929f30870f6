"""Takes a part of the archive into a ledger that is behind it: after a crash, or restored from an older copy.

Rows go through the same booking as when they came, so what is rebuilt equals what was. Idempotent: what is at or
below a mark is there already, everything else is only added where it is missing. Nothing here knows how
transactions begin and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

import msgspec
import pyarrow as pa

from accountant.inventory.podqueue import ObservedPod
from accountant.store.database import Cursor, Row
from accountant.store.offsite.archive import Archive, Part, parts_rows
from accountant.store.writing.booking import write_pods
from accountant.store.writing.incoming import Incoming, Section, Stream
from accountant.store.writing.intake import Group
from agent.wire import Gap, Holder, Sharing, Slice, UsageInterval

ROWS_AT_ONCE = 50_000
"""Of one transaction, unless one outbox has more."""
_gaps = msgspec.json.Decoder(list[Gap])
_facts = msgspec.json.Decoder(ObservedPod)
_WHOLE = ("node", "namespace", "past", "retired")
"""Registers that are as they are, not histories."""


def groups(cursor: Cursor, archive: Archive, part: Part, marks: Mapping[Stream, int], now_ms: int) -> Iterator[Group]:
    """The rows of a part above `marks`, some outboxes at a time; together with their marks."""
    rows, last = archive.files([part.number])[0], marks_of(cursor, archive, part)
    counts = cursor.run(
        "SELECT cluster, node, epoch, count(*) FROM read_parquet(?) GROUP BY ALL ORDER BY ALL", [str(rows)]
    )
    sizes = {(cluster, node, epoch): count for cluster, node, epoch, count in counts}
    chosen: list[Stream] = []
    waiting = 0
    for stream in sorted(last):
        if last[stream] <= marks.get(stream, 0):
            continue
        chosen.append(stream)
        waiting += sizes.get(stream, 0)
        if waiting >= ROWS_AT_ONCE:
            yield _group(cursor, archive, part, chosen, last, marks, now_ms)
            chosen, waiting = [], 0
    if chosen:
        yield _group(cursor, archive, part, chosen, last, marks, now_ms)


def marks_of(cursor: Cursor, archive: Archive, part: Part) -> dict[Stream, int]:
    """By outbox, the number up to which the archive has everything."""
    file = archive.files([part.number], "marks")[0]
    found = cursor.run("SELECT cluster, node, epoch, seq FROM read_parquet(?)", [str(file)])
    return {(cluster, node, epoch): seq for cluster, node, epoch, seq in found}


def _group(
    cursor: Cursor,
    archive: Archive,
    part: Part,
    streams: list[Stream],
    last: Mapping[Stream, int],
    marks: Mapping[Stream, int],
    now_ms: int,
) -> Group:
    group = Group(marks, lambda _stream, _seqs: {}, now_ms)
    wanted = pa.table(
        [pa.array(part, pa.string()) for part in zip(*streams, strict=True)], ["cluster", "node", "epoch"]
    )
    source = parts_rows("[?]")
    rows = cursor.run(  # the names of the files are a parameter
        "SELECT cluster, node, epoch, set_seq, digest, seq, start_ms, end_ms, gpu_uuid, gpu_model, profile, gi, ci, "  # noqa: S608
        "compute, compute_of, memory_mib, memory_of_mib, kind, uid, namespace, name, container, sharing, replicas, "
        "health, method, capacity_us, allocated_us, measured_busy_us, sm_active_us, tensor_active_us, gaps, "
        "memory_mib_s, energy_uj, energy_blind_us, memory_blind_us "
        f"FROM ({source}) WHERE "
        "(cluster, node, epoch) IN (SELECT (cluster, node, epoch) FROM incoming) "
        "ORDER BY start_ms, cluster, node, epoch, set_seq, seq",
        [str(archive.files([part.number])[0])],
        wanted,
    )
    sections: list[Section] = []
    for (cluster, node, epoch, _), members in groupby(rows, key=lambda row: row[:4]):
        stream = (cluster, node, epoch)
        kept = [row for row in members if row[5] > marks.get(stream, 0)]
        if kept:
            sections.append(Section(stream, list(map(_row, kept)), [row[4] for row in kept]))
    group.incoming = Incoming(sections) if sections else None
    group.advanced = {stream: last[stream] for stream in streams}
    return group


def _row(found: Row) -> UsageInterval:
    """As it was sent, as far as the ledger keeps it."""
    (seq, start, end, uuid, model, profile, gi, ci, compute, compute_of, memory, memory_of) = found[5:17]
    (kind, uid, namespace, name, container, sharing, replicas, health, method) = found[17:26]
    (capacity, allocated, busy, sm, tensor, gaps, held_memory, energy, blind, memory_blind) = found[26:36]
    return UsageInterval(
        seq=seq,
        start_ms=start,
        end_ms=end,
        gpu_uuid=uuid,
        gpu_model=model,
        slice=None if gi < 0 and not profile else Slice(profile, gi, ci, compute, compute_of, memory, memory_of),
        holder=None if kind is None else Holder(kind, uid, namespace, name, container),
        sharing=None if sharing is None else Sharing(sharing, replicas),
        health=health,
        capacity_us=capacity,
        allocated_us=allocated,
        busy_us=busy,
        sm_active_us=sm,
        tensor_active_us=tensor,
        memory_mib_s=None if memory_blind else held_memory,
        energy_uj=None if blind else energy,
        method=method,
        gaps=() if gaps is None else tuple(_gaps.decode(gaps)),
    )


def take_rest(cursor: Cursor, archive: Archive, part: Part, *, behind: bool) -> None:
    """Everything but rows. behind: the ledger had less than the part, so its registers are the older ones."""
    files = archive.tables(part)
    named = "JOIN stream s ON s.cluster = p.cluster AND s.node = p.node AND s.epoch = p.epoch"
    for table, key, values in (
        ("pod_fact", "t.seq = p.seq AND t.digest = p.digest", "p.seq, p.digest"),
        ("hole", "t.first_seq = p.first_seq AND t.last_seq = p.last_seq", "p.first_seq, p.last_seq, p.reason"),
        (
            "quarantine",
            "t.seq = p.seq AND t.digest = p.digest",
            "p.seq, p.digest, p.received_ms, p.reason, p.detail, p.content",
        ),
    ):
        file = files[{"pod_fact": "facts", "hole": "holes"}.get(table, table)]
        cursor.run(
            f"INSERT INTO {table} SELECT s.id, {values} FROM read_parquet(?) p {named} "  # noqa: S608
            f"WHERE NOT EXISTS (SELECT 1 FROM {table} t WHERE t.stream = s.id AND {key})",
            [file],
        )
    _take_pods(cursor, files["pods"])
    for table, key in (("policy", "effective_ms"), ("act", "number")):
        cursor.run(
            f"INSERT INTO {table} FROM read_parquet(?) p "  # noqa: S608
            f"WHERE NOT EXISTS (SELECT 1 FROM {table} t WHERE t.{key} = p.{key}) ORDER BY p.{key}",
            [files[table]],
        )
    _take_numbered(cursor, "decision", files["decision"], "id, at_ms", numbered=bool(part.registers))
    if "progress" in files:  # parts of earlier releases have none
        key = "cluster, namespace, job, epoch, at_ms, received_ms, who"
        _take_numbered(cursor, "progress", files["progress"], key, numbered=bool(part.registers))
    if "gpu_owner" in files:  # the same; rows are only ever added
        cursor.run("INSERT INTO gpu_owner FROM read_parquet(?) EXCEPT FROM gpu_owner", [files["gpu_owner"]])
    if behind:
        for table in _WHOLE:
            cursor.run(f"DELETE FROM {table}")  # noqa: S608
            cursor.run(f"INSERT INTO {table} FROM read_parquet(?)", [files[table]])


def _take_numbered(cursor: Cursor, table: str, file: str, key: str, *, numbered: bool) -> None:
    """Add the rows of a register whose `key` is not in the ledger. numbered: they have their numbers; parts of earlier
    releases have none, and get the numbers after the last one."""
    new = f"FROM read_parquet($file) WHERE ({key}) NOT IN (SELECT ({key}) FROM {table})"  # noqa: S608
    if not numbered:
        after = f"(SELECT coalesce(max(number), 0) FROM {table})"  # noqa: S608
        new = f"SELECT *, {after} + row_number() OVER (ORDER BY received_ms, at_ms) AS number {new}"
    cursor.run(f"INSERT INTO {table} BY NAME (FROM ({new}) ORDER BY number)", {"file": file})


def _take_pods(cursor: Cursor, file: str) -> None:
    found = cursor.run("SELECT source, cluster, content FROM read_parquet(?) WHERE source != 'label'", [file])
    of_nodes = [(cluster, _fact(content)) for source, cluster, content in found if source == "node"]
    of_cluster = [(cluster, _fact(content)) for source, cluster, content in found if source == "cluster"]
    write_pods(cursor, of_nodes)
    write_pods(cursor, of_cluster, "pod_seen")
    cursor.rows("name_pods")
    cursor.run(
        "INSERT INTO pod_label SELECT cluster, uid, observed_ms, content FROM read_parquet(?) "
        "WHERE source = 'label' EXCEPT FROM pod_label",
        [file],
    )


def _fact(content: str) -> ObservedPod:
    return _facts.decode(content)
