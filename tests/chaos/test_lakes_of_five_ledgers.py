"""Five ledgers publish into one lake at once, while their processes are killed and frozen and their clocks are set:
each ledger's part equals its ledger, and nobody writes to another's part."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.settings import Lake, Settings
from accountant.fleet.fleet_ledgers import Fleet
from accountant.lake import tables
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue, namespace_of
from accountant.lake.lake_ledger import LakeLedger
from accountant.ledger.protocols import Moment
from accountant.storage.duckdb_ledger import open_ledger
from gputally.base.clock import SystemClock
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.chaos.accountant_process import fork_program, is_running
from tests.chaos.publishing_process import PUBLISHED, STEP, begin_of, publishing
from tests.deadlines import until
from tests.hypothesis_examples import examples
from tests.ledger.busy_ledger import BOOK
from tests.moments import present

SEED = 20261128
LEDGERS = 5
FAULTS = examples(12, 200)
FILES_OF_A_RUN = 100
"""About the number of files that one run publishes. Faults are timed by files, independent of the machine's speed."""
STEPS_MS = (-2 * MS_PER_DAY, -3 * MS_PER_HOUR, 0, 0, 5 * MS_PER_HOUR, 9 * MS_PER_DAY)
"""How wrong a clock is after it is set. A clock two days behind is before the newest records."""


@dataclass
class Member:
    """A ledger with its process."""

    name: str
    settings: Settings
    zygote: subprocess.Popen[str]
    pid: int = 0

    @property
    def tables(self) -> Path:
        assert self.settings.lake is not None
        return Path(self.settings.lake.warehouse) / namespace_of(self.name)

    def start(self) -> None:
        file = self.settings.data / "settings.json"
        self.pid = fork_program(self.zygote, ["publish", str(file)], self.settings.data / "log")

    def set_clock(self, step_ms: int) -> None:
        (self.settings.data / f"{STEP}.new").write_text(str(step_ms), encoding="ascii")
        (self.settings.data / f"{STEP}.new").rename(self.settings.data / STEP)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        until(lambda: not is_running(self.pid), "it still lives")

    def written(self) -> tuple[int, int]:
        """The number of files in its tables, and of publications that ended."""
        published = self.settings.data / PUBLISHED
        files = sum(len(files) for _, _, files in os.walk(self.tables))
        return files, published.stat().st_size if published.exists() else 0

    def has_written(self, files: int) -> None:
        """Wait until it has written this many files, or ended a publication, or says that it cannot publish."""
        log = self.settings.data / "log"
        before, said = self.written(), log.stat().st_size if log.exists() else 0

        def met() -> bool:
            now = self.written()
            assert is_running(self.pid), log.read_text(errors="replace")[-3_000:]
            return now[0] >= before[0] + files or now[1] > before[1] or log.stat().st_size > said

        until(met, lambda: f"{self.name} writes nothing:\n{log.read_text(errors='replace')[-3_000:]}")


def _member(folder: Path, number: int, zygote: subprocess.Popen[str]) -> Member:
    name, clock = f"ledger-{number}", SystemClock()
    data = folder / name
    data.mkdir()
    settings = Settings(auth="off", data=data, lake=Lake(warehouse=str(folder / "lake"), ledger=name))
    with closing(open_ledger(data / "ledger.duckdb", clock)) as ledger:
        Bookkeeper(ledger, clock, "UTC").prices.take(BOOK, "put", "ana", "new prices", begin_of(clock.wall_ms()))
    (data / "begin").write_text(str(begin_of(clock.wall_ms())), encoding="ascii")
    (data / "settings.json").write_text(settings.model_dump_json(), encoding="utf-8")
    found = Member(name, settings, zygote)
    found.set_clock(0)
    return found


@contextlib.contextmanager
def _running(members: list[Member]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in members:
            one.start()
            stack.callback(one.end)
        yield


def _fault(members: list[Member], chance: random.Random) -> str:
    """Let one fault happen to one ledger while it publishes; returns its kind."""
    one, kind = chance.choice(members), chance.choice(("kill", "freeze", "clock"))
    one.has_written(chance.randint(1, FILES_OF_A_RUN // 2))
    time.sleep(chance.uniform(0, 0.03))  # the instant of the fault is what is drawn
    if kind == "clock":
        one.set_clock(chance.choice(STEPS_MS))
    elif kind == "kill":
        one.end()
        one.start()
    else:
        os.kill(one.pid, signal.SIGSTOP)
        chance.choice([other for other in members if other is not one]).has_written(FILES_OF_A_RUN // 8)
        os.kill(one.pid, signal.SIGCONT)
    return kind


def _by_gpu(questions: Moment, span: tuple[int, int]) -> object:
    return [(line.key, line.accounts_gpu_us, line.energy_uj) for line in questions.usage(span, ("gpu",)).lines()]


def _assert_own(one: Member) -> None:
    """Check that after one more publication the ledger's part of the lake equals the ledger, and has nothing of
    another."""
    one.set_clock(0)
    with publishing(one.settings) as (ledger, publisher, _):
        publisher.publish()
        assert publisher.compare().differences == ()
        (act,) = present(ledger).acts("lake")
        assert one.settings.lake is not None
        with closing(DuckDbEngine(Catalogue.connect(one.settings.lake))) as engine:
            status = Fleet(engine).statuses()[one.name]
            begin_ms = ledger.status().extent[0]
            span = begin_ms, begin_ms + (status.until_ms - begin_ms) // MS_PER_HOUR * MS_PER_HOUR
            found = _by_gpu(LakeLedger(engine, status), span)
            assert found
            assert found == _by_gpu(present(ledger), span)
        catalogue = Catalogue.connect(one.settings.lake)
        with closing(catalogue):
            for table in tables.TABLES:
                opened = catalogue.open(table)
                marks = [snapshot.summary for snapshot in opened.snapshots()]
                assert {mark and mark["gputally.ledger-id"] for mark in marks} == {json.loads(act.content)["id"]}
                rows = opened.scan().to_arrow()
                assert set(rows["ledger"].to_pylist()) <= {one.name}
                keys = Counter(zip(*(rows[name].to_pylist() for name in table.key), strict=True))
                assert not [key for key, times in keys.items() if times > 1], table.name


@pytest.mark.real
@pytest.mark.timeout(3_600)
def test_what_five_ledgers_publish_at_once_is_exact_after_kills_freezes_and_clock_steps(
    tmp_path: Path, zygote: subprocess.Popen[str]
) -> None:
    (tmp_path / "lake").mkdir()
    members, chance = [_member(tmp_path, number, zygote) for number in range(LEDGERS)], random.Random(SEED)
    with _running(members):
        kinds = Counter(_fault(members, chance) for _ in range(FAULTS))
    print(kinds)
    assert all(kinds[kind] for kind in ("kill", "freeze", "clock"))
    for one in members:
        _assert_own(one)
    with closing(DuckDbEngine(Catalogue.connect(Lake(warehouse=str(tmp_path / "lake"))))) as engine:
        assert list(Fleet(engine).statuses()) == [one.name for one in members]
