"""The archive: what was received, in numbered parts on another volume, each record in exactly one of them.

A part holds every record above the marks of the part before (rows with their names, numbers of facts, holes,
quarantined records), the pods of which something came, and the registers as they were. It is written from one
snapshot under a temporary name, synced and renamed, and only then entered in the ledger. A part that lies there
and is not entered (the accountant was killed between the two, or the ledger is an older copy of itself) is never
written over: it is taken over (`accountant.store.offsite.adopting`). Parts are never changed and never deleted here.

Folders are Parquet (zstd), readable by anything; `part.json` says what is in them and its SHA-256.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from accountant.errors import LedgerDamaged, LedgerUnavailable
from accountant.store.database import Cursor, statement
from accountant.store.writing import columns
from accountant.store.writing.origins import PodKey
from agent.wholefile import sync

RECORDS = ("rows", "facts", "holes", "quarantine", "marks")
REGISTERS = ("policy", "act", "node", "namespace", "past", "retired", "gpu_owner", "decision", "progress")
MANIFEST = "part.json"


class Part(msgspec.Struct, frozen=True):
    """One part. low_ms, high_ms: around its rows, equal where there are none. files: name to SHA-256."""

    number: int
    at_ms: int
    low_ms: int
    high_ms: int
    rows: int
    files: dict[str, str]


_part = msgspec.json.Decoder(Part)


@dataclass(frozen=True, slots=True)
class Archive:
    """The folder of parts. Raises LedgerUnavailable where it cannot be read or written."""

    folder: Path

    def place(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}"

    def parts(self, after: int) -> list[Part]:
        """Whole parts numbered above `after`, ascending. Raises LedgerDamaged where one is missing between them."""
        with _reachable(self.folder):
            numbers = sorted(int(place.name[5:]) for place in self.folder.glob("part-[0-9]*"))
        found = [self.part(number) for number in numbers if number > after]
        missing = {part.number for part in found} ^ set(range(after + 1, after + 1 + len(found)))
        if missing:
            raise LedgerDamaged(f"{self.folder}: part {min(missing)} is missing between others")
        return found

    def part(self, number: int) -> Part:
        """What a part says of itself. Raises LedgerDamaged where it does not."""
        place = self.place(number) / MANIFEST
        try:
            return _part.decode(place.read_bytes())
        except (OSError, msgspec.MsgspecError) as error:
            raise LedgerDamaged(f"{place}: cannot be read: {error}") from error

    def verify(self, part: Part) -> None:
        """Raises LedgerDamaged where a file of the part is not what was written."""
        for name, digest in part.files.items():
            place = self.place(part.number) / name
            if not place.is_file() or sha256(place) != digest:
                raise LedgerDamaged(f"{place}: missing, or not what was written")

    def files(self, numbers: Iterable[int], table: str = "rows") -> list[Path]:
        return [self.place(number) / f"{table}.parquet" for number in sorted(numbers)]

    def last_act(self, cursor: Cursor, number: int) -> int:
        """The number of the newest act in a part; 0 where it has none."""
        (file,) = self.files([number], "act")
        return int(cursor.run("SELECT coalesce(max(number), 0) FROM read_parquet(?)", [str(file)])[0][0])

    def write(self, cursor: Cursor, number: int, at_ms: int, pods: Collection[PodKey] | None) -> Part:
        """Everything above the marks in the snapshot behind `cursor`. pods: of which something came, None: all."""
        with _reachable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            fresh = self.folder / f".part-{number:08d}"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
        for name in RECORDS:
            _copy(cursor, statement(f"archive_{name}"), fresh / f"{name}.parquet")
        for name in REGISTERS:
            _copy(cursor, f"FROM {name}", fresh / f"{name}.parquet")
        asked = columns.table(columns.POD_KEY, sorted(pods or ()))
        _copy(cursor, statement("archive_pods"), fresh / "pods.parquet", asked, {"all": pods is None})
        low, high, rows = cursor.run(
            "SELECT coalesce(min(start_ms), 0), coalesce(max(end_ms), 0), count(*) FROM read_parquet(?)",
            [str(fresh / "rows.parquet")],
        )[0]
        with _reachable(self.folder):
            files = {place.name: sha256(place) for place in sorted(fresh.iterdir())}
            part = Part(number, at_ms, low, high, rows, files)
            (fresh / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(part)))
            for place in fresh.iterdir():
                sync(place)
            sync(fresh)
            fresh.rename(self.place(number))
            sync(self.folder)
        return part


def rows_of(cursor: Cursor, files: Collection[Path]) -> str:
    """A query for rows in parts' files, as `received` has them; for this cursor, until it is told of other files."""
    cursor.run("SET VARIABLE archived = ?", [[str(file) for file in files]])
    return statement("archived_rows")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(
    cursor: Cursor, query: str, to: Path, incoming: object = None, parameters: Mapping[str, object] | None = None
) -> None:
    sql = f"COPY ({query}) TO $to (FORMAT parquet, COMPRESSION zstd)"
    cursor.run(sql, {"to": str(to), **(parameters or {})}, incoming=incoming)


@contextmanager
def _reachable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LedgerUnavailable(f"archive {folder}: {error.strerror or error}") from error
