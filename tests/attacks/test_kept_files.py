"""One flipped bit, or a cut, in any small file that a program keeps: nothing is read that was not saved, and the damage
is named. The spool has tests of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from accountant.core.errors import LedgerDamaged
from accountant.runtime.clock_step_guard import GuardedClock
from accountant.storage import backups
from accountant.storage.crash_recovery import BLOCK, HEADERS, block_copy_path, restore_blocks, save_blocks
from accountant.storage.folder_or_object_store import in_folder
from accountant.storage.record_archive import MANIFEST, Archive, ArchivePart
from gputally.base import atomic_file
from gputally.base.clock import VirtualClock

ENTRIES = [b'["uid-1",["0.5","",["g1"],"kai:vision"]]', b"", b'["uid-2",["","16384",[],"kai:speech"]]']


def damaged(content: bytes, step: int = 1) -> Iterator[bytes]:
    """The content with one flipped bit in every `step`-th byte, and cut before it."""
    for at in range(0, len(content), step):
        yield content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        yield content[:at]


def test_entries_that_are_intact_are_read_and_damage_is_named_and_kept_aside(tmp_path: Path) -> None:
    file, aside = tmp_path / "kept", tmp_path / "kept.damaged"
    atomic_file.save_entries(file, ENTRIES, 0o600)
    content = file.read_bytes()
    assert atomic_file.load_entries(file) == (ENTRIES, "")
    for bad in damaged(content):
        file.write_bytes(bad)
        entries, damage = atomic_file.load_entries(file)
        assert [entry for entry in ENTRIES if entry in entries] == entries
        assert str(aside) in damage
        assert aside.read_bytes() == bad
        assert atomic_file.load_entries(file) == (entries, ""), "the intact entries are written anew"
        assert file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(content.replace(b"0.5", b"0.7"))
    assert atomic_file.load_entries(file).entries == ENTRIES[1:], "one entry is lost, not all"
    assert atomic_file.load_entries(tmp_path / "absent") == ([], "")


def test_a_damaged_anchor_of_the_clock_moves_no_time(tmp_path: Path) -> None:
    file, machine = tmp_path / "clock.json", VirtualClock(1_791_288_000_000)
    GuardedClock(machine, file, "boot-1").keep()
    content = file.read_bytes()
    for bad in damaged(content):
        file.write_bytes(bad)
        with capture_logs() as logs:
            assert GuardedClock(machine, file, "boot-1").wall_ms() == machine.wall_ms()
        assert [str(file) in entry["reason"] for entry in logs] == [True]


def test_a_damaged_copy_of_blocks_restores_nothing(tmp_path: Path) -> None:
    database = tmp_path / "ledger"
    written = bytes(range(256)) * (BLOCK // 128)
    database.write_bytes(b"h" * HEADERS + written)
    with database.open("rb") as file:
        save_blocks(database, file.fileno(), [1])
    copy = block_copy_path(database).read_bytes()
    after = b"h" * HEADERS + b"?" * len(written)
    for bad in damaged(copy, 4001):
        database.write_bytes(after)
        block_copy_path(database).write_bytes(bad)
        with capture_logs() as logs:
            assert restore_blocks(database) == 0
        assert database.read_bytes() == after
        assert logs
    block_copy_path(database).write_bytes(copy)
    assert restore_blocks(database) == 1


def test_a_damaged_manifest_of_an_archive_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "part-00000003"
    folder.mkdir()
    part = ArchivePart(3, 7, 1, 5, 2, {"rows.parquet": "00"}, {"node.parquet": 1}, {"act": 12}).sealed()
    content = msgspec.json.format(msgspec.json.encode(part))
    archive = Archive(in_folder(tmp_path))
    (folder / MANIFEST).write_bytes(content)
    assert archive.part(3) == part
    for bad in damaged(content):
        (folder / MANIFEST).write_bytes(bad)
        with contextlib.suppress(LedgerDamaged):
            assert archive.part(3) == part, "only white space differs"


class _EmptyLedger:
    def copy_to(self, path: Path) -> int:
        path.write_bytes(b"ledger")
        return 12


def test_a_damaged_description_never_gives_a_backup_another_time_or_content(tmp_path: Path) -> None:
    store = in_folder(tmp_path / "backups")
    made = backups.make(_EmptyLedger(), store, 1_791_288_000_000)
    note = tmp_path / "backups" / f"{made.name}.json"
    content = note.read_bytes()
    for bad in damaged(content):
        note.write_bytes(bad)
        try:
            (found,) = backups.list_backups(store)
        except LedgerDamaged:
            continue
        assert (found.name, found.at_ms) == (made.name, made.at_ms)
        if found.sha256 != made.sha256:
            with pytest.raises(LedgerDamaged):
                backups.restore(store, f"{made.name}.duckdb", tmp_path / "ledger")
