"""Makes, verifies, lists, prunes and restores backups, in a folder or in an object store.

A backup is `NAME.duckdb` with `NAME.json` beside it, which holds its time, number of rows and SHA-256. The backup
counts as existing only once its .json file is there. Restoring never overwrites a ledger. After that, records newer
than the backup come from the archive, if there is one, and from the agents."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from accountant.core.errors import LedgerDamaged, LedgerUnavailable
from accountant.core.periods import utc
from accountant.storage.crash_recovery import block_copy_path
from accountant.storage.duckdb_engine import lock_ledger
from accountant.storage.folder_or_object_store import FileStore, sha256
from gputally.base import atomic_file
from gputally.base.errors import AccountantError
from gputally.base.units import MS_PER_SECOND
from gputally.server.config_loading import Model

_NAME: Final = r"ledger-\d{8}T\d{9}Z"
_HIDDEN: Final = re.compile(rf"\.{_NAME}\..+")
"""Temporary files that an interrupted write of a .json file leaves."""
_COPY: Final = re.compile(rf"(?P<name>{_NAME})\.duckdb")
_NOTE: Final = re.compile(rf"(?P<name>{_NAME})\.json")
_making = threading.Lock()
"""Allows one backup at a time; otherwise one backup would remove the unfinished files of another."""


class Backup(Model):
    """One backup.

    bytes: size of the ledger file.
    rows: number of rows of all its tables.
    damage: why its .json file cannot be used; bytes, rows and SHA-256 are then unknown, and `at_ms` is that of the
    name."""

    name: str
    at_ms: int
    bytes: int | None
    rows: int | None
    sha256: str | None
    damage: str = ""


class CopyableLedger(Protocol):
    """A ledger that can be copied while it is being written (accountant.storage.DuckLedger)."""

    def copy_to(self, path: Path) -> int:
        """Writes a verified copy to a new file and returns its number of rows."""
        ...


class NoBackup(AccountantError):
    """There is no backup of that name, or a ledger already exists where one is to be restored."""


class KeptBackups:
    """Makes and lists the accountant's own backups, and keeps the newest `keep` of them. Thread-safe."""

    def __init__(self, store: FileStore, keep: int) -> None:
        self.store = store
        self._keep = keep
        self._known: list[Backup] | None = None

    def make(self, ledger: CopyableLedger, now_ms: int) -> tuple[Backup, list[Backup]]:
        """Make a backup and remove the oldest ones beyond `keep`. Returns the new backup and the removed ones. Raises
        LedgerUnavailable or LedgerDamaged."""
        backup = make(ledger, self.store, now_ms)
        removed = prune(self.store, self._keep)
        self.listed()
        return backup, removed

    def listed(self) -> list[Backup]:
        """Return all backups, newest first, also damaged ones. Raises LedgerUnavailable."""
        self._known = list_backups(self.store)
        return self._known

    def remembered(self) -> list[Backup]:
        """Return all backups, newest first. An object store is not listed again if it was listed before; the result is
        then that of the last listing. Raises LedgerUnavailable."""
        if self.store.folder is not None or self._known is None:
            return self.listed()
        return self._known


def make(ledger: CopyableLedger, store: FileStore, now_ms: int) -> Backup:
    """Copy the ledger, verify and sync the copy, and then write its .json file. A second call for the same instant
    returns the existing backup. Unfinished backups of killed processes are removed first.

    Raises LedgerUnavailable or LedgerDamaged if there is no new backup."""
    name = _name(now_ms)
    with _making:
        _sweep(store)
        if store.exists(f"{name}.json"):
            return _read(store, f"{name}.json")
        with store.staged("backup") as folder:
            fresh = folder / f"{name}.duckdb"
            rows = ledger.copy_to(fresh)
            with _reachable(folder):
                backup = Backup(name=name, at_ms=now_ms, bytes=fresh.stat().st_size, rows=rows, sha256=sha256(fresh))
            store.put(fresh, f"{name}.duckdb")
        store.create(f"{name}.json", (backup.model_dump_json(indent=2) + "\n").encode())
    return backup


def _name(at_ms: int) -> str:
    instant = datetime.fromtimestamp(at_ms // MS_PER_SECOND, UTC)
    return f"ledger-{instant:%Y%m%dT%H%M%S}{at_ms % MS_PER_SECOND:03d}Z"


def _at_ms(name: str) -> int:
    """Return the instant in a backup's name; 0 if its digits are no instant."""
    digits = "".join(filter(str.isdecimal, name))
    try:
        instant = datetime.strptime(f"{digits[:-3]}+0000", "%Y%m%d%H%M%S%z")
    except ValueError:
        return 0
    return int(instant.timestamp()) * MS_PER_SECOND + int(digits[-3:])


def _sweep(store: FileStore) -> None:
    """Remove copies without a .json file, and temporary files."""
    names = store.names()
    for name in names:
        copy = _COPY.fullmatch(name)
        if _HIDDEN.fullmatch(name) or (copy is not None and f"{copy['name']}.json" not in names):
            store.delete(name)


def list_backups(store: FileStore) -> list[Backup]:
    """Return the backups in a store, newest first. One whose .json file is damaged or cannot be read is listed with its
    damage."""
    found = [_listed(store, match) for match in map(_NOTE.fullmatch, store.names()) if match is not None]
    return sorted(found, key=lambda backup: (backup.at_ms, backup.name), reverse=True)


def _listed(store: FileStore, note: re.Match[str]) -> Backup:
    try:
        return _read(store, note[0])
    except (LedgerDamaged, LedgerUnavailable) as error:
        return Backup(
            name=note["name"], at_ms=_at_ms(note["name"]), bytes=None, rows=None, sha256=None, damage=str(error)
        )


def named(store: FileStore, name: str) -> Backup:
    """Return the backup of that name. Raises NoBackup."""
    if not store.exists(f"{name}.json"):
        raise NoBackup(f"{store}: there is no backup {name!r}")
    return _read(store, f"{name}.json")


def content(store: FileStore, backup: Backup) -> Iterator[bytes]:
    """Return the ledger file of a backup in chunks."""
    return store.chunks(f"{backup.name}.duckdb")


def prune(store: FileStore, keep: int) -> list[Backup]:
    """Remove the backups that are older than the newest `keep` intact ones, and return the removed ones. A damaged one
    takes no intact one's place."""
    listed = list_backups(store)
    intact = [backup for backup in listed if not backup.damage]
    removed = listed[listed.index(intact[keep - 1]) + 1 :] if len(intact) >= keep else []
    for backup in removed:
        # The .json file first: without it the other file is no backup.
        store.delete(f"{backup.name}.json")
        store.delete(f"{backup.name}.duckdb")
    return removed


@contextmanager
def restoring(ledger: Path) -> Iterator[Path]:
    """Yield the path at which to build a ledger, in a folder of its own, and give the closed file its name when the
    block ends. So a file with a ledger's name is complete, also if the process is killed. Ledger and folder are locked.

    Raises NoBackup if a ledger exists, LedgerLocked if another process uses it or restores it."""
    with closing(lock_ledger(ledger)), _reachable(ledger.parent):
        _refuse_existing(ledger)
        folder = ledger.with_name(f".{ledger.name}.restoring")
        shutil.rmtree(folder, ignore_errors=True)  # of a restoring that was killed
        folder.mkdir()
        built = folder / ledger.name
        try:
            yield built
            if _log_of(built).exists() and _log_of(built).stat().st_size:
                raise LedgerUnavailable(f"{ledger}: the ledger could not be written completely: free some space")
            _put_in_place(built, ledger)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _log_of(ledger: Path) -> Path:
    return ledger.with_name(ledger.name + ".wal")


def _refuse_existing(ledger: Path) -> None:
    if ledger.exists() or _log_of(ledger).exists():
        raise NoBackup(f"{ledger}: a ledger exists at this path: move it away, or restore to another path")


def _put_in_place(complete: Path, ledger: Path) -> None:
    """Give a complete file the name of the ledger."""
    atomic_file.sync(complete)
    block_copy_path(ledger).unlink(missing_ok=True)  # saved blocks of an earlier ledger at this path
    os.link(complete, ledger)  # unlike rename, link fails if a ledger was created meanwhile
    atomic_file.sync(ledger.parent)


def restore(store: FileStore, file: str, ledger: Path) -> Backup:
    """Restore a backup (its .duckdb file in the store) to a path where no ledger exists, and verify it.

    Raises NoBackup if the path exists, LedgerLocked if another process restores to it, LedgerDamaged if the file does
    not match the backup's SHA-256."""
    note = f"{file.removesuffix('.duckdb')}.json"
    if not store.exists(file) or not store.exists(note):
        raise NoBackup(f"{store}/{file}: not a backup: name a .duckdb file that has its .json file beside it")
    _refuse_existing(ledger)
    backup = _read(store, note)
    with _reachable(ledger.parent):
        ledger.parent.mkdir(parents=True, exist_ok=True)
    with restoring(ledger) as built:
        with built.open("wb") as copy:
            copy.writelines(store.chunks(file))
        if sha256(built) != backup.sha256:
            day = utc(backup.at_ms)[: len("2026-10-01")]
            raise LedgerDamaged(
                f"{store}/{file}: damaged since it was made on {day} (its SHA-256 differs): use another backup"
            )
    return backup


def _read(store: FileStore, note: str) -> Backup:
    try:
        backup = Backup.model_validate_json(store.read(note))
        if (f"{backup.name}.json", backup.name) != (note, _name(backup.at_ms)):
            raise ValueError("name and time contradict the name of the file")
        return backup
    except (ValueError, OverflowError, OSError) as error:
        raise LedgerDamaged(
            f"{store}/{note}: the file does not describe a backup: restore it, or delete it with its .duckdb file"
        ) from error


@contextmanager
def _reachable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LedgerUnavailable(f"{folder}: {error.strerror or error}") from error
