"""The archive: what was received, in numbered parts on another volume, each record in exactly one of them.

A part holds every record above the marks of the part before (rows with their names, numbers of facts, holes,
quarantined records), the pods of which something came, and the registers: of those that only grow what is new since
the part before, each other one whole where it changed since. A register that did not change is named with the part
that has it. A part is written from one
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
GROWING = ("act", "decision", "progress")
"""Registers whose rows are numbered in the order in which they came."""
REGISTERS = ("policy", "node", "namespace", "past", "retired", "gpu_owner")
"""Registers that are written whole."""
MANIFEST = "part.json"


class Part(msgspec.Struct, frozen=True):
    """One part. low_ms, high_ms: around its rows, equal where there are none. files: name to SHA-256. unchanged: by
    file that is as an earlier part has it, the number of that part. registers: by register that only grows, the number
    up to which the parts up to this one have it; empty in parts of earlier releases, which have all of each."""

    number: int
    at_ms: int
    low_ms: int
    high_ms: int
    rows: int
    files: dict[str, str]
    unchanged: dict[str, int] = {}
    registers: dict[str, int] = {}


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
        """Raises LedgerDamaged where a file of the part, or one that it names, is not what was written."""
        for name, digest in part.files.items():
            self._verify(part.number, name, digest)
        for name, number in part.unchanged.items():
            self._verify(number, name, self.part(number).files.get(name))

    def _verify(self, number: int, name: str, digest: str | None) -> None:
        place = self.place(number) / name
        if not place.is_file() or sha256(place) != digest:
            raise LedgerDamaged(f"{place}: missing, or not what was written")

    def tables(self, part: Part) -> dict[str, str]:
        """The file of each table that the part has or names, by the table's name."""
        numbers = {**part.unchanged, **dict.fromkeys(part.files, part.number)}
        return {name.removesuffix(".parquet"): str(self.place(number) / name) for name, number in numbers.items()}

    def files(self, numbers: Iterable[int], table: str = "rows") -> list[Path]:
        return [self.place(number) / f"{table}.parquet" for number in sorted(numbers)]

    def write(
        self, cursor: Cursor, number: int, at_ms: int, pods: Collection[PodKey] | None, registers: Mapping[str, int]
    ) -> Part:
        """Everything above the marks in the snapshot behind `cursor`. pods: of which something came, None: all.
        registers: by register that only grows, the number up to which the archive has it."""
        before = self._before(number)
        with _reachable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            fresh = self.folder / f".part-{number:08d}"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
        for name in RECORDS:
            _copy(cursor, statement(f"archive_{name}"), fresh / f"{name}.parquet")
        through = {}
        for name in GROWING:
            low = registers.get(name, 0)
            query = f"FROM {name} WHERE number > $low ORDER BY number"
            _copy(cursor, query, fresh / f"{name}.parquet", parameters={"low": low})
            asked = f"SELECT coalesce(max(number), 0) FROM {name} WHERE number > ?"  # noqa: S608
            through[name] = max(low, int(cursor.run(asked, [low])[0][0]))
        for name in REGISTERS:
            _copy(cursor, f"FROM {name} ORDER BY ALL", fresh / f"{name}.parquet")
        keys = columns.table(columns.POD_KEY, sorted(pods or ()))
        _copy(cursor, statement("archive_pods"), fresh / "pods.parquet", keys, {"all": pods is None})
        low, high, rows = cursor.run(
            "SELECT coalesce(min(start_ms), 0), coalesce(max(end_ms), 0), count(*) FROM read_parquet(?)",
            [str(fresh / "rows.parquet")],
        )[0]
        with _reachable(self.folder):
            files = {place.name: sha256(place) for place in sorted(fresh.iterdir())}
            unchanged = {}
            for name in [f"{register}.parquet" for register in REGISTERS]:
                if name in before and before[name].files[name] == files[name]:
                    unchanged[name] = before[name].number
                    del files[name]
                    (fresh / name).unlink()
            part = Part(number, at_ms, low, high, rows, files, unchanged, through)
            (fresh / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(part)))
            for place in fresh.iterdir():
                sync(place)
            sync(fresh)
            fresh.rename(self.place(number))
            sync(self.folder)
        return part

    def _before(self, number: int) -> dict[str, Part]:
        """By file of a register, the part that has it as the part before `number` does; empty where that part, or one
        that it names, cannot be read: everything is written then."""
        try:
            last = self.part(number - 1)
            named = {name: self.part(source) for name, source in last.unchanged.items()}
        except LedgerDamaged:
            return {}
        return {**named, **dict.fromkeys(last.files, last)}


def rows_of(cursor: Cursor, files: Collection[Path]) -> str:
    """A query for rows in parts' files, as `received` has them; for this cursor, until it is told of other files."""
    cursor.run("SET VARIABLE archived = ?", [[str(file) for file in files]])
    return statement("archived_rows").format(rows=parts_rows("getvariable('archived')"))


def parts_rows(files: str) -> str:
    """A query for rows as the parts have them. files: how the statement names their files."""
    return statement("parts_rows").format(files=files)


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
