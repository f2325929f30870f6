"""Writes received records to an archive of numbered parts, and replays the parts into a ledger that lacks them.

A part is one folder of Parquet files (zstd), on disk or in an object store (`folder_or_object_store`). Its `part.json`
lists the files with their SHA-256. A part holds

- every record that arrived since the previous part: rows with their names, numbers and digests of facts, sequence
  numbers that will never arrive, and quarantined records
- the mark of each outbox: the number up to which all of its records are archived
- the pods with new facts
- the registers: the tables of policies, nodes, namespaces, owners and retirements of GPUs, acts, decisions and epochs

Of an append-only register the part holds only the rows that are new since the previous part. Every other register is
written in full if it changed. `part.json` names the part that holds an unchanged register.

A part is written locally from one snapshot, then moved to the archive with `part.json` as the last file, and only then
recorded in the ledger. If the accountant was killed between the last two steps, or the ledger was restored from a
backup, the archive has a part that the ledger has not recorded. Its records are replayed into the ledger. A folder
without `part.json` is a leftover of a killed writer. Parts are never changed or deleted.

Replayed rows are booked like rows from agents, so a rebuilt ledger equals the original. Replaying is idempotent: rows
at or below a mark are skipped, and most other data are added only if they are missing. If the ledger is older than the
part, the part's nodes, namespaces and retirements of GPUs replace the ledger's."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import pyarrow as pa

from accountant.core.errors import LedgerDamaged, LedgerUnavailable
from accountant.inventory.pod_facts import ObservedPod
from accountant.storage.duckdb_engine import Cursor, Row, statement
from accountant.storage.folder_or_object_store import FileStore, in_folder, sha256
from accountant.storage.write import record_columns
from accountant.storage.write.batch_admission import GroupCommit
from accountant.storage.write.interval_writer import write_pods
from accountant.storage.write.name_ids import PodKey
from accountant.storage.write.record_columns import Incoming, Section, Stream
from agent.wire import Gap, Holder, Sharing, Slice, UsageInterval
from gputally.base.measures import REPORTED
from gputally.base.untrusted_text import UNDECODABLE

RECORDS = ("rows", "facts", "holes", "quarantine", "marks")
GROWING = ("act", "decision", "progress")
"""Append-only registers. Their rows are numbered in the order of arrival."""
REGISTERS = ("policy", "node", "namespace", "past", "retired", "gpu_owner", "saved_view")
"""Registers that are written in full."""
MANIFEST = "part.json"


class ArchivePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of one part.

    low_ms, high_ms: the span of the part's rows; equal if it has none.
    files: the SHA-256 of each file.
    unchanged: for each file that equals that of an earlier part, the number of that part.
    registers: by append-only register, the number up to which this part and earlier parts contain it.
    digest: the SHA-256 of the manifest's JSON without it."""

    number: int
    at_ms: int
    low_ms: int
    high_ms: int
    rows: int
    files: dict[str, str]
    unchanged: dict[str, int]
    registers: dict[str, int]
    digest: str = ""

    def sealed(self) -> ArchivePart:
        """Return the manifest with its digest."""
        content = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return msgspec.structs.replace(self, digest=hashlib.sha256(content).hexdigest())


_part = msgspec.json.Decoder(ArchivePart)


@dataclass(frozen=True, slots=True)
class Archive:
    """Reads and writes the parts in a store. Raises LedgerUnavailable if the store cannot be read or written."""

    store: FileStore

    def newest(self) -> int:
        """Return the number of the newest complete part; 0 if there is none."""
        return max(self._numbers(), default=0)

    def parts(self, after: int) -> list[ArchivePart]:
        """Return the complete parts numbered above `after`, ascending. Raises LedgerDamaged if one is missing in
        between."""
        found = [self.part(number) for number in self._numbers() if number > after]
        missing = {part.number for part in found} ^ set(range(after + 1, after + 1 + len(found)))
        if missing:
            raise LedgerDamaged(f"{self.store}: part {min(missing)} is missing: restore its folder")
        return found

    def part(self, number: int) -> ArchivePart:
        """Return the manifest of a part. Raises LedgerDamaged if it is missing or unreadable."""
        place = f"{_place(number)}/{MANIFEST}"
        if not self.store.exists(place):
            raise LedgerDamaged(f"{self.store}/{place}: the file is missing: restore it")
        try:
            part = _part.decode(self.store.read(place))
        except UNDECODABLE as error:
            raise LedgerDamaged(
                f"{self.store}/{place}: not the manifest of a part: {error}: restore the file"
            ) from error
        if part != part.sealed() or part.number != number:
            raise LedgerDamaged(f"{self.store}/{place}: the manifest is damaged: restore the file")
        return part

    def _numbers(self) -> list[int]:
        """Return the numbers of parts, ascending. The last part is left out if it has no manifest, because its writer
        was killed."""
        names = self.store.names()
        numbers = sorted(int(name[5:]) for name in names if name.startswith("part-") and name[5:].isdecimal())
        if numbers and not self.store.exists(f"{_place(numbers[-1])}/{MANIFEST}"):
            numbers.pop()
        return numbers

    def copy(self, part: ArchivePart, folder: Path) -> Archive:
        """Copy the files of a part, and those that it refers to, into an empty local folder, and return the archive in
        it. Raises LedgerDamaged if a file is missing or does not match its SHA-256."""
        for name, digest in part.files.items():
            self._copy(part.number, name, digest, folder)
        for name, number in part.unchanged.items():
            self._copy(number, name, self.part(number).files.get(name), folder)
        return Archive(in_folder(folder))

    def _copy(self, number: int, name: str, digest: str | None, folder: Path) -> None:
        place = f"{_place(number)}/{name}"
        if not self.store.exists(place) or self.store.get(place, folder / place) != digest:
            raise LedgerDamaged(f"{self.store}/{place}: the file is missing, or its SHA-256 differs: restore it")

    def tables(self, part: ArchivePart) -> dict[str, str]:
        """Return the file of each table that the part contains or refers to, by the table's name."""
        numbers = {**part.unchanged, **dict.fromkeys(part.files, part.number)}
        return {
            name.removesuffix(".parquet"): self.store.url(f"{_place(number)}/{name}")
            for name, number in numbers.items()
        }

    def files(self, numbers: Iterable[int], table: str = "rows") -> list[str]:
        return [self.store.url(f"{_place(number)}/{table}.parquet") for number in sorted(numbers)]

    def write(
        self, cursor: Cursor, number: int, at_ms: int, pods: Collection[PodKey] | None, registers: Mapping[str, int]
    ) -> ArchivePart:
        """Write a part with everything above the marks in the snapshot of `cursor`.

        pods: the pods with new facts; None for all pods.
        registers: by append-only register, the number up to which it is archived."""
        before, place = self._before(number), _place(number)
        if self.store.exists(f"{place}/{MANIFEST}"):
            raise LedgerUnavailable(
                f"{self.store}/{place}: the part exists already and is not overwritten: give every accountant an "
                "archive of its own"
            )
        with self.store.staged(place) as fresh:
            part = self._written(cursor, fresh, number, at_ms, pods, registers, before)
            for name in part.files:
                self.store.put(fresh / name, f"{place}/{name}")
        self.store.create(f"{place}/{MANIFEST}", msgspec.json.format(msgspec.json.encode(part)))
        return part

    def _written(
        self,
        cursor: Cursor,
        fresh: Path,
        number: int,
        at_ms: int,
        pods: Collection[PodKey] | None,
        registers: Mapping[str, int],
        before: Mapping[str, ArchivePart],
    ) -> ArchivePart:
        """Write the files of a part into a local folder. `before` is, by file of a register, the part with its last
        version."""
        for name in RECORDS:
            write_parquet(cursor, statement(f"archive_{name}"), fresh / f"{name}.parquet")
        through = {}
        for name in GROWING:
            low = registers.get(name, 0)
            query = f"FROM {name} WHERE number > $low ORDER BY number"
            write_parquet(cursor, query, fresh / f"{name}.parquet", parameters={"low": low})
            newest = f"SELECT coalesce(max(number), 0) FROM {name} WHERE number > ?"  # noqa: S608
            through[name] = max(low, int(cursor.run(newest, [low])[0][0]))
        for name in REGISTERS:
            write_parquet(cursor, f"FROM {name} ORDER BY ALL", fresh / f"{name}.parquet")
        keys = record_columns.column_table(record_columns.POD_KEY, sorted(pods or ()))
        write_parquet(cursor, statement("archive_pods"), fresh / "pods.parquet", keys, {"all": pods is None})
        low, high, rows = cursor.run(
            "SELECT coalesce(min(start_ms), 0), coalesce(max(end_ms), 0), count(*) FROM read_parquet(?)",
            [str(fresh / "rows.parquet")],
        )[0]
        files = {file.name: sha256(file) for file in sorted(fresh.iterdir())}
        unchanged = {}
        for name in [f"{register}.parquet" for register in REGISTERS]:
            if name in before and before[name].files[name] == files[name]:
                unchanged[name] = before[name].number
                del files[name]
        return ArchivePart(number, at_ms, low, high, rows, files, unchanged, through).sealed()

    def _before(self, number: int) -> dict[str, ArchivePart]:
        """Return, for each file of a register, the part with its version before part `number`. The result is empty if a
        manifest cannot be read; the part then contains every register."""
        try:
            last = self.part(number - 1)
            named = {name: self.part(source) for name, source in last.unchanged.items()}
        except LedgerDamaged:
            return {}
        return {**named, **dict.fromkeys(last.files, last)}


def _place(number: int) -> str:
    return f"part-{number:08d}"


def write_parquet(
    cursor: Cursor, query: str, to: Path, incoming: object = None, parameters: Mapping[str, object] | None = None
) -> None:
    """Write the rows of a query to a new local file."""
    sql = f"COPY ({query}) TO $to (FORMAT parquet, COMPRESSION zstd)"
    cursor.run(sql, {"to": str(to), **(parameters or {})}, incoming=incoming)


def rows_of(cursor: Cursor, files: Collection[str]) -> str:
    """Return a query for the rows in the files of parts, with the columns of `received`. It is valid for this cursor
    until the next call."""
    cursor.run("SET VARIABLE archived = ?", [list(files)])
    return statement("archived_rows", rows=statement("rows_in_files", files="getvariable('archived')"))


ROWS_AT_ONCE = 50_000
"""Approximate number of rows of one transaction. All rows of an outbox are in the same transaction."""
_gaps = msgspec.json.Decoder(list[Gap])
_facts = msgspec.json.Decoder(ObservedPod)
_WHOLE = ("node", "namespace", "past", "retired", "saved_view")
"""Registers that a newer part replaces. To the other registers, rows are only ever added."""


def groups(
    cursor: Cursor, archive: Archive, part: ArchivePart, marks: Mapping[Stream, int], now_ms: int
) -> Iterator[GroupCommit]:
    """Yield the rows of a part that are above the `marks` of their outboxes, in groups that are each committed in one
    transaction."""
    rows, last = archive.files([part.number])[0], marks_of(cursor, archive, part)
    counts = cursor.run("SELECT cluster, node, epoch, count(*) FROM read_parquet(?) GROUP BY ALL ORDER BY ALL", [rows])
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


def marks_of(cursor: Cursor, archive: Archive, part: ArchivePart) -> dict[Stream, int]:
    """Return, for each outbox, the number up to which everything is archived."""
    file = archive.files([part.number], "marks")[0]
    rows = cursor.run("SELECT cluster, node, epoch, seq FROM read_parquet(?)", [file])
    return {(cluster, node, epoch): seq for cluster, node, epoch, seq in rows}


def mark_of(cursor: Cursor, archive: Archive, number: int, stream: Stream) -> int:
    """Return the number up to which an outbox is archived with part `number`; 0 if it was unknown then."""
    sql = "SELECT seq FROM read_parquet(?) WHERE cluster = ? AND node = ? AND epoch = ?"
    found = cursor.run(sql, [archive.files([number], "marks")[0], *stream])
    return int(found[0][0]) if found else 0


def _group(
    cursor: Cursor,
    archive: Archive,
    part: ArchivePart,
    streams: list[Stream],
    last: Mapping[Stream, int],
    marks: Mapping[Stream, int],
    now_ms: int,
) -> GroupCommit:
    group = GroupCommit(marks, lambda _stream, _seqs: {}, now_ms)
    wanted = pa.table(
        [pa.array(part, pa.string()) for part in zip(*streams, strict=True)], ["cluster", "node", "epoch"]
    )
    rows = cursor.run(
        statement("archived_intervals", rows=statement("rows_in_files", files="?")),
        archive.files([part.number]),
        wanted,
    )
    sections: list[Section] = []
    for (cluster, node, epoch, _), members in groupby(rows, key=lambda row: row[:4]):
        stream = (cluster, node, epoch)
        new = [row for row in members if row[5] > marks.get(stream, 0)]
        if new:
            sections.append(Section(stream, list(map(_interval, new)), [row[4] for row in new]))
    group.incoming = Incoming(sections) if sections else None
    group.advanced = {stream: last[stream] for stream in streams}
    return group


def _interval(row: Row) -> UsageInterval:
    """Return the interval of an archived row with those fields that the ledger stores."""
    (seq, start, end, uuid, model, profile, gi, ci, compute, compute_of, memory, memory_of) = row[5:17]
    (kind, uid, namespace, name, container, sharing, replicas, health, method) = row[17:26]
    capacity, allocated, busy, gaps, *read = row[26:]
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
        method=method,
        gaps=() if gaps is None else tuple(_gaps.decode(gaps)),
        **{measure.field: value for measure, value in zip(REPORTED, read, strict=True)},
    )


def take_whole(cursor: Cursor, archive: Archive, part: ArchivePart) -> None:
    """Replace the ledger's registers of nodes, namespaces, retired GPUs and saved views by those of a newer
    part."""
    files = archive.tables(part)
    for table in _WHOLE:
        cursor.run(f"DELETE FROM {table}")  # noqa: S608
        cursor.run(f"INSERT INTO {table} FROM read_parquet(?)", [files[table]])


def last_view_change(cursor: Cursor, file: str | None = None) -> int:
    """Return the number of the last change of the ledger's saved views, or of those in a file; -1 if there was none."""
    if file is None:
        ((last,),) = cursor.run("SELECT coalesce(max(at_ms), -1) FROM saved_view")
    else:
        ((last,),) = cursor.run("SELECT coalesce(max(at_ms), -1) FROM read_parquet(?)", [file])
    return int(last)


def take_newer_views(cursor: Cursor, archive: Archive, part: ArchivePart) -> bool:
    """Take the saved views of a part if they were changed after those of the ledger, which shows by itself that the
    part is newer. Returns whether they were."""
    file = archive.tables(part)["saved_view"]
    if last_view_change(cursor, file) <= last_view_change(cursor):
        return False
    cursor.run("DELETE FROM saved_view")
    cursor.run("INSERT INTO saved_view FROM read_parquet(?)", [file])
    return True


def take_rest(cursor: Cursor, archive: Archive, part: ArchivePart) -> None:
    """Replay everything in a part of the archive except its rows and the registers of `take_whole`."""
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
    for table, key in (
        ("decision", "id, at_ms"),
        ("progress", "cluster, namespace, job, epoch, at_ms, received_ms, who"),
    ):
        cursor.run(
            f"INSERT INTO {table} FROM read_parquet(?) WHERE ({key}) NOT IN (SELECT ({key}) FROM {table}) "  # noqa: S608
            "ORDER BY number",
            [files[table]],
        )
    cursor.run("INSERT INTO gpu_owner FROM read_parquet(?) EXCEPT FROM gpu_owner", [files["gpu_owner"]])


def _take_pods(cursor: Cursor, file: str) -> None:
    """Replay the pods of a part. Their exported labels are those that the part has, as they counted then; a fact has
    only the newest ones, and when a pod was last seen."""
    rows = cursor.run(
        "SELECT source, cluster, content FROM read_parquet(?) WHERE source IN ('node', 'cluster')", [file]
    )
    of_nodes = [(cluster, _facts.decode(content)) for source, cluster, content in rows if source == "node"]
    of_cluster = [(cluster, _facts.decode(content)) for source, cluster, content in rows if source == "cluster"]
    for text in statement("take_exported_labels").split(";"):
        cursor.run(text, [file])
    write_pods(cursor, of_nodes)
    write_pods(cursor, of_cluster, "pod_seen")
    cursor.rows("name_pods")
    cursor.run(
        "INSERT INTO pod_label SELECT cluster, uid, observed_ms, content FROM read_parquet(?) "
        "WHERE source = 'label' EXCEPT FROM pod_label",
        [file],
    )
