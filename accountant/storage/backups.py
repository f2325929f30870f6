"""Makes, verifies, lists, prunes and restores backups.

A backup is `NAME.duckdb` with `NAME.json` beside it, which says when it was made, how many rows it has and its
SHA-256; it exists only once the second is there. Restoring never writes over a ledger. What came after the backup
comes from the archive, if there is one, and from the agents.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from accountant.core.errors import LedgerDamaged, LedgerUnavailable
from accountant.storage.crash_recovery import block_copy_path
from accountant.storage.parquet_archive import sha256
from gputally.base import atomic_file
from gputally.base.errors import AccountantError
from gputally.base.units import MS_PER_SECOND
from gputally.server.config_models import Model

_HALF: Final = re.compile(r"(?P<hidden>\.?)(?P<name>ledger-\d{8}T\d{9}Z)\.(?:duckdb(?:\..+)?|json\..+\.part)")
"""Every file that a backup consists of until it is whole."""
_making = threading.Lock()
"""A backup is made at a time: else one would remove the halves of another."""


class Backup(Model):
    """One backup. bytes: of the ledger file; rows: of all its tables."""

    name: str
    at_ms: int
    bytes: int
    rows: int
    sha256: str


class CopyableLedger(Protocol):
    """A ledger that can be copied while it is written (accountant.storage.DuckLedger)."""

    def copy_to(self, path: Path) -> int:
        """A verified copy in a new file; its rows."""
        ...


class NoBackup(AccountantError):
    """There is none of that name, or the place cannot take a restored one."""


def make(ledger: CopyableLedger, folder: Path, now_ms: int) -> Backup:
    """Copy, verify, sync and only then name it. A second one of the same instant is the first. What a process that
    was killed in the middle of a backup left behind is removed first.

    Raises LedgerUnavailable or LedgerDamaged; nothing is left then."""
    with _making:
        return _make(ledger, folder, now_ms)


def _make(ledger: CopyableLedger, folder: Path, now_ms: int) -> Backup:
    instant = datetime.fromtimestamp(now_ms / MS_PER_SECOND, UTC)
    name = f"ledger-{instant:%Y%m%dT%H%M%S}{now_ms % MS_PER_SECOND:03d}Z"
    with _reachable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
    place, fresh = _file(folder, name), folder / f".{name}.duckdb"
    if (folder / f"{name}.json").exists():
        return _read(folder / f"{name}.json")
    try:
        with _reachable(folder):
            fresh.unlink(missing_ok=True)
            rows = ledger.copy_to(fresh)
            made = Backup(name=name, at_ms=now_ms, bytes=fresh.stat().st_size, rows=rows, sha256=sha256(fresh))
            atomic_file.sync(fresh)
            fresh.rename(place)
            atomic_file.write(folder / f"{name}.json", (made.model_dump_json(indent=2) + "\n").encode())
    finally:
        with suppress(OSError):
            for left in folder.glob(f"{fresh.name}*"):  # the copy's own lock and log too
                left.unlink(missing_ok=True)
    return made


def _sweep(folder: Path) -> None:
    """Remove halves: copies that were never named, and named ones whose note was never written."""
    for place in folder.iterdir():
        half = _HALF.fullmatch(place.name)
        if half is None:
            continue
        if half["hidden"] or not (folder / f"{half['name']}.json").exists():
            place.unlink(missing_ok=True)


def list_backups(folder: Path) -> list[Backup]:
    """Those in a folder, newest first."""
    with _reachable(folder):
        notes = sorted(folder.glob("ledger-*.json")) if folder.is_dir() else []
    return sorted((_read(note) for note in notes), key=lambda backup: (backup.at_ms, backup.name), reverse=True)


def file_of(folder: Path, name: str) -> Path:
    """The ledger file of a backup. Raises NoBackup."""
    if not any(backup.name == name for backup in list_backups(folder)):
        raise NoBackup(f"{folder}: no backup {name!r}")
    return _file(folder, name)


def prune(folder: Path, keep: int) -> list[Backup]:
    """Remove all but the newest `keep`; those removed."""
    gone = list_backups(folder)[keep:]
    with _reachable(folder):
        for backup in gone:
            # The note first: without it the file is no backup.
            (folder / f"{backup.name}.json").unlink()
            _file(folder, backup.name).unlink(missing_ok=True)
    return gone


def restore(backup: Path, ledger: Path) -> Backup:
    """Put a backup (its .duckdb file) in the place of a ledger that is not there, verified.

    Raises NoBackup where there is something in the place, LedgerDamaged where the backup is not what was made."""
    note = backup.with_suffix(".json")
    if not backup.is_file() or not note.is_file():
        raise NoBackup(f"{backup}: no backup (a .duckdb file with its .json beside it)")
    if ledger.exists() or ledger.with_name(ledger.name + ".wal").exists():
        raise NoBackup(f"{ledger}: there is a ledger already; move it away first")
    made = _read(note)
    fresh = ledger.with_name(f".{ledger.name}.restoring")
    with _reachable(ledger.parent):
        ledger.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(backup, fresh)
            if sha256(fresh) != made.sha256:
                raise LedgerDamaged(f"{backup}: not what was written on {_day(made.at_ms)} (SHA-256 differs)")
            atomic_file.sync(fresh)
            block_copy_path(ledger).unlink(missing_ok=True)  # of the file that was here
            os.link(fresh, ledger)  # unlike a renaming, refuses to replace one that came meanwhile
            atomic_file.sync(ledger.parent)
        finally:
            fresh.unlink(missing_ok=True)
    return made


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.duckdb"


def _read(note: Path) -> Backup:
    try:
        return Backup.model_validate_json(note.read_bytes())
    except (OSError, ValueError) as error:
        raise LedgerDamaged(f"{note}: cannot be read") from error


def _day(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / MS_PER_SECOND, UTC):%Y-%m-%d}"


@contextmanager
def _reachable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LedgerUnavailable(f"{folder}: {error.strerror or error}") from error
