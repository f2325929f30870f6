"""Backups of the ledger, on demand and on schedule, and a lost volume rebuilt from backup and archive."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from accountant.composition import Service
from accountant.core.errors import LedgerDamaged, LedgerLocked
from accountant.core.settings import Settings
from accountant.ledger.journal import NewAct, record
from accountant.storage import backups
from accountant.storage.folder_or_object_store import FileStore, in_folder
from tests.http.conftest import NOW_MS, pod_minutes
from tests.moments import acks, present
from tests.usage_records import running_accountant

HOUR_MS = 3_600_000


@pytest.fixture
def place(archiving, clock):
    """A running accountant with half an hour of one GPU."""
    with running_accountant(archiving, clock, pod_minutes(rows=30)) as running:
        yield running


@pytest.fixture
def folder(archiving):
    """The folder of the backups."""
    return Path(archiving.backups_to)


def booked(service):
    return present(service.ledger).usage((NOW_MS - 2 * HOUR_MS, NOW_MS), ("gpu", "pod")).lines()


def test_a_backup_is_asked_for_listed_fetched_and_restored(place, run_command, clock, tmp_path):
    service, url = place
    out = run_command.shown("backup", "--url", url, "--to", tmp_path / "here")
    (name,) = set(re.findall(r"ledger-\S+Z", out))
    assert re.search(name, run_command("backups", "--url", url)[1])
    truth = booked(service)
    new, source = tmp_path / "new" / "ledger.duckdb", tmp_path / "here" / f"{name}.duckdb"
    out = run_command.shown("restore", new, "--from", source)
    assert re.search(r"2026-11-01 11:00:00\s+2026-11-01 11:30:00\s+0\b", out)
    with Service(Settings(data=tmp_path / "new", auth="off"), clock) as again:
        assert booked(again) == truth
    assert "a ledger exists at this path: move it away" in run_command.refused("restore", new, "--from", source)


def test_a_lost_volume_comes_back_from_backup_archive_and_agents(folder, place, run_command, clock, archiving):
    service, _ = place
    clock.advance(7_200_000)
    service.maintain()  # archive and backup
    service.ingest.submit_batch(pod_minutes(first=31, rows=10)).result()
    clock.advance(3_600_000)
    service.maintain()  # the next part
    unarchived = pod_minutes(first=41, rows=5)
    receipt = service.ingest.submit_batch(unarchived).result()
    assert (receipt.ack.durable_seq, receipt.ack.archived_seq) == (45, 40)
    truth = booked(service)
    service.close()
    shutil.rmtree(archiving.data)
    (newest,) = backups.list_backups(in_folder(folder))
    source = folder / f"{newest.name}.duckdb"
    run_command.shown("restore", archiving.ledger_file, "--from", source, "--archive", archiving.archive.to)
    with Service(archiving, clock) as again:
        assert acks(again.ledger, "node-1", "prod")["0192-epoch"].durable_seq == 40
        again.ingest.submit_batch(unarchived).result()
        assert booked(again) == truth


def test_a_ledger_under_its_final_name_is_complete_however_a_restore_ends(
    place, run_command, clock, archiving, tmp_path
):
    """The archive is replayed part by part, and the second part is damaged."""
    service, _ = place
    for first in (31, 36):
        clock.advance(3_600_000)
        service.ingest.submit_batch(pod_minutes(first=first, rows=5)).result()
        service.maintain()
    service.close()
    new = tmp_path / "new" / "ledger.duckdb"
    archived = Path(archiving.archive.to) / "part-00000002" / "rows.parquet"
    content = archived.read_bytes()
    archived.write_bytes(b"damaged")
    assert "part-00000002" in run_command.refused("restore", new, "--archive", archiving.archive.to)
    assert [file.name for file in new.parent.iterdir()] == ["ledger.duckdb.lock"]
    archived.write_bytes(content)
    with suppress(KeyboardInterrupt), backups.restoring(new) as built:  # as a killed process leaves it
        built.write_bytes(b"half a ledger")
        shutil.copytree(built.parent, tmp_path / "half")
        with pytest.raises(LedgerLocked), backups.restoring(new):
            pass
        raise KeyboardInterrupt
    shutil.copytree(tmp_path / "half", built.parent)
    assert not new.exists()
    run_command.shown("restore", new, "--archive", archiving.archive.to)
    assert {file.name for file in new.parent.iterdir()} == {"ledger.duckdb", "ledger.duckdb.lock"}


def test_an_act_is_in_the_archive_at_once_and_a_restored_ledger_says_which_is_its_newest(
    folder, place, run_command, clock, archiving, tmp_path
):
    """Agents send usage again; manual journal entries have no second source."""
    service, _ = place
    clock.advance(7_200_000)
    service.maintain()  # archive and backup
    now = clock.wall_ms()
    kept = NewAct(now, "invoiced", "2026-10", "ada", "", '{"lines": []}')
    record(service.ledger, [NewAct(now, "imported", "2026-10", "ada", "")], None)
    clock.advance(1_000)
    service.maintain()
    assert len(list(Path(archiving.archive.to).iterdir())) == 1, "an import can be repeated"
    record(service.ledger, [kept], None)
    clock.advance(1_000)
    for _ in range(2):
        service.maintain()
    assert len(list(Path(archiving.archive.to).iterdir())) == 2
    service.close()
    shutil.rmtree(archiving.data)
    (newest,) = backups.list_backups(in_folder(folder))
    source = folder / f"{newest.name}.duckdb"
    _, out, _ = run_command("restore", tmp_path / "of-the-backup.duckdb", "--from", source)
    assert "Newest administrative act: none." in out
    out = run_command.shown("restore", archiving.ledger_file, "--from", source, "--archive", archiving.archive.to)
    assert "Newest administrative act: act 2, 2026-11-01 14:00:00 UTC: invoiced 2026-10." in out
    with Service(archiving, clock) as again:
        assert [act.kind for act in present(again.ledger).acts()] == ["imported", "invoiced"]


def test_what_a_killed_backup_left_is_removed_by_the_next(folder, place, clock):
    """Killed during the copy, between its name and its note, and during the note."""
    service, _ = place
    clock.advance(7_200_000)
    service.maintain()
    whole = sorted(path.name for path in folder.iterdir())
    assert [name.rpartition(".")[2] for name in whole] == ["duckdb", "json"]
    halves = [
        ".ledger-20261031T000000000Z.duckdb", ".ledger-20261031T000000000Z.duckdb.wal",
        ".ledger-20261031T000000000Z.duckdb.lock", ".ledger-20261031T000000000Z.duckdb.blocks",
        "ledger-20261030T000000000Z.duckdb", ".ledger-20261030T000000000Z.json.0a1b2c3d.part",
    ]  # fmt: skip
    others = ["ledger-of-ada.duckdb", "notes.txt"]
    for name in halves + others:
        (folder / name).write_bytes(b"half")
    clock.advance(7_200_000)
    service.maintain()
    left = {path.name for path in folder.iterdir()}
    assert not left & set(halves)
    assert left >= {*whole, *others}
    assert len(left) == 4 + len(others)


def test_old_backups_go_when_new_ones_are_made(folder, place, clock):
    service, _ = place
    for _ in range(4):
        clock.advance(7_200_000)
        service.maintain()
    kept = backups.list_backups(in_folder(folder))
    assert [backup.at_ms for backup in kept] == [clock.wall_ms(), clock.wall_ms() - 7_200_000]
    assert len(list(folder.iterdir())) == 4


def test_a_folder_of_fetched_backups_keeps_the_newest(folder, place, run_command, clock, archiving, tmp_path):
    _, url = place
    there = tmp_path / "there"
    for _ in range(4):
        clock.advance(60_000)
        assert run_command("backup", "--url", url, "--to", there, "--keep", 3)[0] == 0
    assert [made.at_ms for made in backups.list_backups(in_folder(there))] == [
        clock.wall_ms() - 60_000 * age for age in range(3)
    ]
    assert len(list(there.iterdir())) == 6
    assert len(backups.list_backups(in_folder(folder))) == archiving.backups.keep
    code, _, err = run_command("backup", "--url", url, "--keep", 3)
    assert code == 2
    assert "--to" in err


def test_a_damaged_note_names_its_backup_and_the_others_stay_usable(
    folder, place, run_command, clock, archiving, tmp_path
):
    service, url = place
    kept = backups.KeptBackups(in_folder(folder), archiving.backups.keep)
    made = []
    for _ in range(2):
        clock.advance(1_000)
        made.append(kept.make(service.ledger, clock.wall_ms())[0])
    intact, damaged = made
    (folder / f"{damaged.name}.json").write_bytes(b'{"name": "led')
    (folder / "ledger-20269999T000000000Z.json").write_bytes(b"no instant")
    (folder / "ledger-of-ada.json").write_bytes(b"no backup")
    listed = json.loads(run_command.shown("backups", "--url", url, "--output", "json"))
    assert [(row["name"], row["at_ms"], bool(row["damage"])) for row in listed] == [
        (damaged.name, damaged.at_ms, True),
        (intact.name, intact.at_ms, False),
        ("ledger-20269999T000000000Z", 0, True),
    ]
    assert {row["rows"] for row in listed if row["damage"]} == {None}
    assert intact.name in run_command.shown("backups", "--url", url)
    run_command.shown("restore", tmp_path / "new.duckdb", "--from", folder / f"{intact.name}.duckdb")
    for _ in range(2):
        clock.advance(1_000)
        kept.make(service.ledger, clock.wall_ms())
    left = backups.list_backups(in_folder(folder))
    assert [backup.damage for backup in left] == ["", ""], "the damaged ones were older than those that are kept"


def test_what_is_not_the_backup_that_was_made_is_not_restored(folder, place, tmp_path, clock):
    service, _ = place
    store = in_folder(folder)
    made = backups.make(service.ledger, store, clock.wall_ms())
    assert backups.make(service.ledger, store, clock.wall_ms()) == made, "of the same instant"
    source = folder / f"{made.name}.duckdb"
    with source.open("r+b") as file:
        file.seek(made.bytes // 2)
        file.write(b"something else")
    with pytest.raises(LedgerDamaged, match="SHA-256 differs"):
        backups.restore(store, source.name, tmp_path / "new" / "ledger.duckdb")
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["ledger.duckdb.lock"]
    with pytest.raises(backups.NoBackup):
        backups.named(store, "ledger-20200101T000000000Z")


class SlowStore:
    """A store that does something while a file is read."""

    def __init__(self, store: FileStore, meanwhile: Callable[[], object]) -> None:
        self._store, self._meanwhile = store, meanwhile

    def chunks(self, name: str) -> Iterator[bytes]:
        for chunk in self._store.chunks(name):
            yield chunk
            self._meanwhile()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_of_two_restores_to_one_path_the_second_is_refused_by_name(folder, place, tmp_path, clock):
    service, _ = place
    store, new = in_folder(folder), tmp_path / "new" / "ledger.duckdb"
    made = backups.make(service.ledger, store, clock.wall_ms())

    def again() -> None:
        with pytest.raises(LedgerLocked):
            backups.restore(store, f"{made.name}.duckdb", new)

    backups.restore(SlowStore(store, again), f"{made.name}.duckdb", new)  # type: ignore[arg-type]
    assert backups.sha256(new) == made.sha256


def test_a_stopped_ledger_is_copied_beside_itself(place, run_command, archiving):
    service, _ = place
    assert "another process has this ledger open" in run_command.refused("backup", "--db", archiving.ledger_file)
    service.close()
    out = run_command.shown("backup", "--db", archiving.ledger_file)
    assert re.search(r"ledger-\S+Z\s+20\d\d-", out)
    assert run_command("restore", archiving.data / "x.duckdb")[0] == 2


def test_rows_leave_the_file_and_are_still_asked_for(archiving, clock):
    keeping = archiving.model_copy(update={"archive": archiving.archive.model_copy(update={"keep_rows": 86_400})})
    with Service(keeping, clock) as service:
        service.ingest.submit_batch(pod_minutes(rows=30)).result()
        clock.advance(26 * HOUR_MS)
        late = pod_minutes(first=1, rows=1, node="node-2", epoch="0193")
        service.ingest.submit_batch(late).result()
        truth = present(service.ledger).usage((NOW_MS - 3_590_000, NOW_MS - 1_812_345), ("gpu", "pod")).lines()
        service.maintain()
        clock.advance(HOUR_MS)
        service.maintain()
        assert present(service.ledger).usage((NOW_MS - 3_590_000, NOW_MS - 1_812_345), ("gpu", "pod")).lines() == truth
        assert present(service.ledger).imbalance(NOW_MS - 2 * HOUR_MS, NOW_MS).total_us == 0
