"""Copies of the ledger, asked for over HTTP or made by themselves, and a lost volume rebuilt from them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from accountant.composition import Service
from accountant.core.errors import LedgerDamaged
from accountant.core.settings import Archive, Backups, Settings
from accountant.ledger.journal import NewAct, record
from accountant.storage import backups
from accountant.storage.folder_or_object_store import in_folder
from gputally.server.https_server import serve
from tests import fresh
from tests.price_books import price_book_text

HOUR_MS = 3_600_000


@pytest.fixture
def settings(tmp_path):
    return Settings(
        data=fresh.data(tmp_path / "data"), auth="off", linger_ms=0,
        archive=Archive(to=tmp_path / "off" / "archive", every=3600),
        backups=Backups(to=tmp_path / "off" / "backups", every=7200, keep=2),
    )  # fmt: skip


@pytest.fixture
def place(settings, clock, kit):
    """A running accountant with half an hour of one GPU."""
    with Service(settings, clock) as service:
        service.ingest.submit_batch(kit.batch(rows=30)).result()
        with serve(service.app, "127.0.0.1", 0) as url:
            yield service, url


@pytest.fixture
def asked(run_command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    return run_command


def booked(service, kit):
    return service.ledger.usage(kit.now_ms - 2 * HOUR_MS, kit.now_ms, ("gpu", "pod"))


def test_a_backup_is_asked_for_listed_fetched_and_restored(place, asked, kit, clock, tmp_path, settings):
    service, url = place
    code, out, _ = asked("backup", "--url", url, "--to", tmp_path / "here")
    assert code == 0
    (name,) = set(re.findall(r"ledger-\S+Z", out))
    assert re.search(name, asked("backups", "--url", url)[1])
    truth = booked(service, kit)
    new, source = tmp_path / "new" / "ledger.duckdb", tmp_path / "here" / f"{name}.duckdb"
    code, out, err = asked("restore", new, "--from", source)
    assert (code, err) == (0, "")
    assert re.search(r"2026-11-01 11:00:00\s+2026-11-01 11:30:00\s+0\b", out)
    with Service(Settings(data=tmp_path / "new", auth="off"), clock) as again:
        assert booked(again, kit) == truth
    code, _, err = asked("restore", new, "--from", source)
    assert (code, err.count("\n")) == (1, 1)
    assert "there is a ledger already; move it away first" in err


def test_a_lost_volume_comes_back_from_backup_archive_and_agents(place, asked, kit, clock, settings, tmp_path):
    service, _ = place
    clock.advance(7_200_000)
    service.maintain()  # archive and backup
    service.ingest.submit_batch(kit.batch(first=31, rows=10)).result()
    clock.advance(3_600_000)
    service.maintain()  # the next part
    unarchived = kit.batch(first=41, rows=5)
    receipt = service.ingest.submit_batch(unarchived).result()
    assert (receipt.ack.durable_seq, receipt.ack.archived_seq) == (45, 40)
    truth = booked(service, kit)
    service.close()
    shutil.rmtree(settings.data)
    (newest,) = backups.list_backups(in_folder(Path(settings.backups_to)))
    source = Path(settings.backups_to) / f"{newest.name}.duckdb"
    code, out, err = asked("restore", settings.ledger_file, "--from", source, "--archive", settings.archive.to)
    assert (code, err) == (0, ""), out
    with Service(settings, clock) as again:
        assert again.ledger.acks("node-1", "prod")["0192-epoch"].durable_seq == 40
        again.ingest.submit_batch(unarchived).result()
        assert booked(again, kit) == truth


def figure(service: Service, series: str) -> float | None:
    """Of one series of the accountant's page; None where there is none."""
    found = [line for line in service.metrics.exposition().decode().splitlines() if line.startswith(f"{series} ")]
    return float(found[0].rpartition(" ")[2]) if found else None


def test_a_backup_and_an_archive_that_cannot_be_made_are_said_until_they_are(place, clock, settings):
    service, _ = place
    tasks = {task: f'gputally_upkeep_failing{{task="{task}"}}' for task in ("archive", "backup")}
    newest = "gputally_backup_last_timestamp_seconds"
    assert {figure(service, series) for series in tasks.values()} == {0}
    assert figure(service, newest) is None
    off = Path(settings.backups_to).parent
    off.write_text("no folder")
    clock.advance(7_200_000)
    service.maintain()
    assert {figure(service, series) for series in tasks.values()} == {1}
    off.unlink()
    clock.advance(7_200_000)
    service.maintain()
    assert {figure(service, series) for series in tasks.values()} == {0}
    assert figure(service, newest) == clock.wall_ms() / 1000


def test_a_refused_file_is_said_until_it_is_mended(settings, clock, tmp_path):
    prices = tmp_path / "prices.yaml"
    good = price_book_text(H100="2.4")
    prices.write_text(good)
    with Service(settings.model_copy(update={"prices": prices}), clock) as service:
        said = 'gputally_upkeep_failing{task="prices file"}'
        assert figure(service, said) == 0
        for text, expected in (("schema: 1\nrows: what\n", 1), (good + "# mended\n", 0)):
            prices.write_text(text)
            clock.advance(600_000)
            service.maintain()
            assert figure(service, said) == expected


def test_a_faulty_inventory_is_said_until_it_is_mended(settings, clock, tmp_path):
    """Nothing new of nodes, pods and teams is learned meanwhile."""
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text("schema: 1\nnodes: []\n")
    with Service(settings.model_copy(update={"inventory": inventory}), clock) as service:
        said = 'gputally_upkeep_failing{task="inventory"}'
        assert figure(service, said) == 0
        for text, expected in (("schema: 1\nnodes: what\n", 1), ("schema: 1\nnodes: []\n# mended\n", 0)):
            inventory.write_text(text)
            clock.advance(600_000)
            service.maintain()
            assert figure(service, said) == expected


def test_an_act_is_in_the_archive_at_once_and_a_restored_ledger_says_which_is_its_newest(
    place, asked, kit, clock, settings, tmp_path
):
    """Usage agents send again; what people did to the books nobody could tell."""
    service, _ = place
    clock.advance(7_200_000)
    service.maintain()  # archive and backup
    now = clock.wall_ms()
    kept = NewAct(now, "invoiced", "2026-10", "ada", "", '{"lines": []}')
    record(service.ledger, [NewAct(now, "imported", "2026-10", "ada", "")], None)
    clock.advance(1_000)
    service.maintain()
    assert len(list(Path(settings.archive.to).iterdir())) == 1, "whoever imported can do so again"
    record(service.ledger, [kept], None)
    clock.advance(1_000)
    for _ in range(2):
        service.maintain()
    assert len(list(Path(settings.archive.to).iterdir())) == 2
    service.close()
    shutil.rmtree(settings.data)
    (newest,) = backups.list_backups(in_folder(Path(settings.backups_to)))
    source = Path(settings.backups_to) / f"{newest.name}.duckdb"
    _, out, _ = asked("restore", tmp_path / "of-the-backup.duckdb", "--from", source)
    assert "Newest act of the books: none." in out
    code, out, err = asked("restore", settings.ledger_file, "--from", source, "--archive", settings.archive.to)
    assert (code, err) == (0, "")
    assert "Newest act of the books: act 2, 2026-11-01 14:00:00 UTC: invoiced 2026-10." in out
    with Service(settings, clock) as again:
        assert [act.kind for act in again.ledger.acts()] == ["imported", "invoiced"]


def test_what_a_killed_backup_left_is_removed_by_the_next(place, clock, settings):
    """Killed while it copied, between its name and its note, and while the note was written."""
    service, _ = place
    folder = Path(settings.backups_to)
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


def test_old_backups_go_when_new_ones_are_made(place, clock, settings):
    service, _ = place
    for _ in range(4):
        clock.advance(7_200_000)
        service.maintain()
    kept = backups.list_backups(in_folder(Path(settings.backups_to)))
    assert [backup.at_ms for backup in kept] == [clock.wall_ms(), clock.wall_ms() - 7_200_000]
    assert len(list(Path(settings.backups_to).iterdir())) == 4


def test_a_folder_of_fetched_backups_keeps_the_newest(place, asked, clock, settings, tmp_path):
    _, url = place
    there = tmp_path / "there"
    for _ in range(4):
        clock.advance(60_000)
        assert asked("backup", "--url", url, "--to", there, "--keep", 3)[0] == 0
    assert [made.at_ms for made in backups.list_backups(in_folder(there))] == [
        clock.wall_ms() - 60_000 * age for age in range(3)
    ]
    assert len(list(there.iterdir())) == 6
    assert len(backups.list_backups(in_folder(Path(settings.backups_to)))) == settings.backups.keep
    code, _, err = asked("backup", "--url", url, "--keep", 3)
    assert code == 2
    assert "--to" in err


def test_what_is_not_the_backup_that_was_made_is_not_restored(place, settings, tmp_path, clock):
    service, _ = place
    store = in_folder(Path(settings.backups_to))
    made = backups.make(service.ledger, store, clock.wall_ms())
    assert backups.make(service.ledger, store, clock.wall_ms()) == made, "of the same instant"
    source = Path(settings.backups_to) / f"{made.name}.duckdb"
    with source.open("r+b") as file:
        file.seek(made.bytes // 2)
        file.write(b"something else")
    with pytest.raises(LedgerDamaged, match="SHA-256 differs"):
        backups.restore(store, source.name, tmp_path / "new" / "ledger.duckdb")
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(backups.NoBackup):
        backups.named(store, "ledger-20200101T000000000Z")


def test_a_stopped_ledger_is_copied_beside_itself(place, asked, settings):
    service, _ = place
    code, _, err = asked("backup", "--db", settings.ledger_file)
    assert code == 1
    assert "another process has this ledger open" in err
    service.close()
    code, out, _ = asked("backup", "--db", settings.ledger_file)
    assert code == 0
    assert re.search(r"ledger-\S+Z\s+20\d\d-", out)
    assert asked("restore", settings.data / "x.duckdb")[0] == 2


def test_rows_leave_the_file_and_are_still_asked_for(settings, clock, kit):
    keeping = settings.model_copy(update={"archive": settings.archive.model_copy(update={"keep_rows": 86_400})})
    with Service(keeping, clock) as service:
        service.ingest.submit_batch(kit.batch(rows=30)).result()
        clock.advance(26 * HOUR_MS)
        late = kit.batch(first=1, rows=1, node="node-2", epoch="0193")
        service.ingest.submit_batch(late).result()
        truth = service.ledger.usage(kit.now_ms - 3_590_000, kit.now_ms - 1_812_345, ("gpu", "pod"))
        service.maintain()
        clock.advance(HOUR_MS)
        service.maintain()
        assert service.ledger.usage(kit.now_ms - 3_590_000, kit.now_ms - 1_812_345, ("gpu", "pod")) == truth
        assert service.ledger.examine(kit.now_ms - 2 * HOUR_MS, kit.now_ms).total_us == 0


def test_an_archive_that_is_away_stops_nothing_else(settings, clock, kit, tmp_path):
    with Service(settings, clock) as service:
        shutil.rmtree(tmp_path / "off", ignore_errors=True)
        (tmp_path / "off").write_text("not a folder")
        clock.advance(7_200_000)
        service.maintain()
        receipt = service.ingest.submit_batch(kit.batch(rows=3)).result()
        assert (receipt.ack.durable_seq, receipt.ack.archived_seq) == (3, 0)
