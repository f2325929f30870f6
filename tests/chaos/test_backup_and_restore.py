"""`gputally backup`, `gputally restore` and a replica's take-over are killed at any of their writes and renames.

Every process is the real program, killed with SIGKILL before a change of a file or in the middle of a write. A file
with the name of a ledger or of a backup is then complete, and the next run succeeds with every microsecond and act."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accountant.runtime.leadership import take_over
from accountant.storage import backups
from accountant.storage.duckdb_ledger import open_ledger
from accountant.storage.folder_or_object_store import in_folder
from gputally.base.clock import SystemClock
from tests import empty_ledger
from tests.chaos.accountant_process import Outbox, fork_program, fork_server, is_running
from tests.deadlines import until
from tests.ledger.replica_turns import START_MS, act, deliver, opened, two_replicas
from tests.moments import present

SEED = 20261128
KILLS = 4
MANY = 16
CLOCK = SystemClock()
Books = tuple[dict[str, int], list[str]]


@pytest.fixture(scope="module")
def killer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A fork server whose programs can be killed at a change of a file."""
    library = tmp_path_factory.mktemp("kill") / "kill_at.so"
    source = Path(__file__).with_name("kill_at.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    with fork_server({"LD_PRELOAD": str(library)}) as found:
        yield found


class Site:
    """Two replicas with volumes of their own, of which the second led last, and their common archive and backups."""

    def __init__(self, folder: Path, server: subprocess.Popen[str]) -> None:
        self.folder, self._server, self._runs = folder, server, 0
        self.archive, self.stored = folder / "archive", folder / "backups"
        self.first, self.second = two_replicas(folder, archive=self.archive, backups=self.stored)
        self.sender: Outbox | None = None
        for replica, quarters in ((self.first, 4), (self.second, 8)):
            take_over(replica, CLOCK)
            empty_ledger.data(replica.data)
            ledger = opened(replica, CLOCK)
            self.sender = deliver(ledger, quarters, CLOCK)
            for number in range(3):
                ledger.record([act(f"2025-{quarters + number:02d}", CLOCK)], ledger.status().last_act)
            if replica is self.first:
                self.backup = backups.make(ledger, in_folder(self.stored), CLOCK.wall_ms())
            ledger.close()
        self.truth = self.books(self.second.ledger_file)

    def books(self, file: Path) -> Books:
        """Return busy time by GPU and all acts of a ledger, which has to balance. Its copy is opened."""
        copy = self.folder / "read" / "ledger.duckdb"
        shutil.rmtree(copy.parent, ignore_errors=True)
        copy.parent.mkdir()
        for place in file.parent.glob(f"{file.name}*"):
            shutil.copyfile(place, copy.with_name(place.name.replace(file.name, copy.name)))
        ledger = open_ledger(copy, CLOCK)
        try:
            assert self.sender is not None
            lines = present(ledger).usage((START_MS, self.sender.end_ms), ("gpu",)).lines()
            assert present(ledger).imbalance(START_MS, self.sender.end_ms).total_us == 0
            return {line.key["gpu"]: line.accounts_gpu_us.busy for line in lines}, [
                entry.subject for entry in present(ledger).acts()
            ]
        finally:
            ledger.close()

    def run(self, command: list[str], kill_at: int = 0) -> str:
        """Run a program to its end, and return what it printed."""
        self._runs += 1
        log = self.folder / f"{self._runs}.log"
        pid = fork_program(self._server, command, log, kill_at)
        until(lambda: not is_running(pid), lambda: f"it still runs:\n{log.read_text()}")
        return log.read_text()

    def changes(self, command: list[str]) -> int:
        """Run a program that has to succeed, and return the number of its changes of files."""
        printed = self.run(command)
        code, changes = map(int, printed.splitlines()[-1].split())
        assert code == 0, printed
        return changes

    def backs_up(self, chance: random.Random, kills: int) -> None:
        """Back up the stopped ledger of the replica that led last."""
        ledger, folder = self.second.ledger_file, self.folder / "new-backups"
        command = ["accountant", "backup", "--db", str(ledger), "--to", str(folder)]
        changes = self.changes(command)
        for _ in range(kills):
            self.run(command, chance.randint(1, changes))
            assert self.books(ledger) == self.truth
            self.changes(command)
            restored = self.folder / "restored"
            for made in backups.list_backups(in_folder(folder)):
                backups.restore(in_folder(folder), f"{made.name}.duckdb", restored / "ledger.duckdb")
                assert self.books(restored / "ledger.duckdb") == self.truth
                shutil.rmtree(restored)
            # Nothing of the killed one is left.
            assert {path.suffix for path in folder.iterdir()} == {".duckdb", ".json"}
            assert len(list(folder.iterdir())) == 2 * len(backups.list_backups(in_folder(folder)))
            shutil.rmtree(folder)

    def restores(self, chance: random.Random, kills: int) -> None:
        """Restore from backup and archive."""
        new = self.folder / "new" / "ledger.duckdb"
        source = self.stored / f"{self.backup.name}.duckdb"
        command = ["accountant", "restore", str(new), "--from", str(source), "--archive", str(self.archive)]
        changes = self.changes(command)
        assert self.books(new) == self.truth
        for _ in range(kills):
            shutil.rmtree(new.parent)
            self.run(command, chance.randint(1, changes))
            if not new.exists():
                self.changes(command)
            assert self.books(new) == self.truth

    def takes_over(self, chance: random.Random, kills: int) -> None:
        """Let the first replica lead again: its own ledger is set aside."""
        settings, ledger = self.folder / "first.json", self.first.ledger_file
        settings.write_text(self.first.model_dump_json(exclude_defaults=True))
        own, command = self.folder / "own", ["lead", str(settings)]
        old = self.books(ledger)
        assert old != self.truth
        shutil.copytree(self.first.data, own)
        changes = self.changes(command)
        assert self.books(ledger) == self.truth
        for _ in range(kills // 2):  # two in a row
            shutil.rmtree(self.first.data)
            shutil.copytree(own, self.first.data)
            self.run(command, chance.randint(1, changes))
            if ledger.exists():
                assert self.books(ledger) in (old, self.truth)
            self.run(command, chance.randint(1, changes))
            self.changes(command)
            assert self.books(ledger) == self.truth
            assert self.books(self.first.data / "set-aside" / "ledger.duckdb") == old


ACTS = {"backup": Site.backs_up, "restore": Site.restores, "set-aside": Site.takes_over}
every_act = pytest.mark.parametrize("does", [pytest.param(does, id=name) for name, does in ACTS.items()])


@pytest.fixture
def site(tmp_path: Path, killer: subprocess.Popen[str]) -> Site:
    return Site(tmp_path, killer)


@every_act
def test_killed_at_any_write_or_rename_no_half_ledger_has_a_ledgers_name(
    site: Site, does: Callable[[Site, random.Random, int], None]
) -> None:
    does(site, random.Random(SEED), KILLS)


@pytest.mark.real
@pytest.mark.timeout(900)
@every_act
def test_the_same_sixteen_times(site: Site, does: Callable[[Site, random.Random, int], None]) -> None:
    does(site, random.Random(SEED + 1), MANY)
