"""The accountant is killed while it publishes: the lake equals the ledger, with nothing twice and nothing missing.

Every process is the real program (forked from one that has imported it already), killed with SIGKILL."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from accountant.core.settings import Lake
from accountant.lake import tables
from accountant.lake.iceberg_catalog import Catalogue, Removed
from tests.chaos.accountant_process import (
    GONE,
    AccountantProcess,
    Outbox,
    accountant_process,
    assert_balanced,
    fork_program,
    is_running,
    outbox,
)
from tests.deadlines import until
from tests.hypothesis_examples import examples
from tests.lake.comparison_queries import age, published

SEED = 20261124
PUBLISHED = "gputally_lake_published_timestamp_seconds"
LAKE_FOLDER = "lake"
MOST_QUARTERS = 18 * 96
FILES_OF_A_RUN = 100
"""About the number of files that one run publishes. Kills are timed by files, independent of the machine's speed."""


@pytest.fixture
def accountant(tmp_path: Path, zygote: subprocess.Popen[str]) -> Iterator[AccountantProcess]:
    with accountant_process(tmp_path, zygote) as found:
        (tmp_path / LAKE_FOLDER).mkdir()
        found.settings(lake={"warehouse": str(tmp_path / LAKE_FOLDER), "ledger": "prod"})
        yield found


def _files(lake: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(lake))


def _live_and_die(accountant: AccountantProcess, sender: Outbox, files: int, after_s: float) -> None:
    """Kill the accountant `after_s` after it has written `files` files to the lake, or has published."""
    lake = accountant.folder / LAKE_FOLDER
    before = _files(lake)
    accountant.serve()
    sender.deliver(accountant, 9 if sender.made < MOST_QUARTERS else 0)
    accountant.until(lambda: _files(lake) >= before + files or _published(accountant), "it writes nothing to the lake")
    killer = threading.Timer(after_s, accountant.end)
    killer.start()
    killer.join()


def _published(accountant: AccountantProcess) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", accountant.port)
    with closing(connection), contextlib.suppress(*GONE):
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        return any(line.startswith(f"{PUBLISHED} ") for line in lines)
    return False


def _killed(accountant: AccountantProcess, kills: int) -> None:
    chance, sender = random.Random(SEED), outbox(days=20)  # what it tells lies on several days
    for _ in range(kills):
        _live_and_die(accountant, sender, chance.randint(1, FILES_OF_A_RUN), chance.uniform(0.0, 0.03))
    assert accountant.kills == kills
    accountant.serve()
    sender.deliver(accountant)
    accountant.end()  # what is sent above is published by the run after a start
    accountant.serve()
    accountant.until(lambda: _published(accountant), "it does not publish")
    assert_balanced(accountant, sender.start_ms, sender.end_ms)
    status, checked = accountant.ask("GET", "/v1/check?lake=true")
    assert status == 200, checked
    assert checked["lake_days"] > 1
    assert checked["lake_differences"] == []
    accountant.end()
    folder = accountant.folder / LAKE_FOLDER
    with closing(Catalogue.connect(Lake(warehouse=str(folder), ledger="prod"))) as catalogue:
        _exact(catalogue, sender)
        removed = _all_removed(catalogue, folder)
        assert removed.files > 0
        assert removed.versions > kills // 4, "too few were killed after a commit for the test to show something"
        assert catalogue.remove_old_versions(3_600) == Removed(0, 0)
        _exact(catalogue, sender)
        for described in tables.TABLES:
            table = catalogue.open(described)
            needed = {
                Path(task.file.file_path.removeprefix("file://"))
                for snapshot in table.snapshots()
                for task in table.scan(snapshot_id=snapshot.snapshot_id).plan_files()
            }
            assert set((Path(table.location().removeprefix("file://")) / "data").rglob("*.parquet")) == needed


def _all_removed(catalogue: Catalogue, folder: Path) -> Removed:
    """Remove every version and file that is not needed, as if all were written days before another commit."""
    (row,) = catalogue.read(tables.LEDGERS)
    age(folder, 9)
    catalogue.claim(row["id"])
    return catalogue.remove_old_versions(3_600)


def _exact(catalogue: Catalogue, sender: Outbox) -> None:
    """Check that every table has each of its keys once, and that the usage equals what was sent."""
    for described in tables.TABLES:
        found = catalogue.open(described).scan().to_arrow()
        keys = Counter(zip(*(found[name].to_pylist() for name in described.key), strict=True))
        assert not [key for key, times in keys.items() if times > 1], described.name
    rows = catalogue.read(tables.USAGE_HOURLY)
    sums: dict[str, list[int]] = {}
    for row in rows:
        of_gpu = sums.setdefault(row["gpu"], [0, 0, 0])
        of_gpu[0] += row["busy_us"]
        of_gpu[1] += row["busy_us"] + row["allocated_idle_us"] + row["allocated_unknown_us"]
        of_gpu[2] += row["energy_uj"]
    assert {gpu: tuple(found) for gpu, found in sums.items()} == sender.truth()
    days = {row["day"]: row for row in catalogue.read(tables.DAYS)}
    assert {day: total["rows"] for day, total in days.items()} == Counter(row["day"] for row in rows)


def test_killed_at_any_instant_of_publishing_the_lake_equals_the_ledger(accountant: AccountantProcess) -> None:
    _killed(accountant, 12)


@pytest.mark.real
@pytest.mark.timeout(1_800)
def test_the_same_many_times(accountant: AccountantProcess) -> None:
    _killed(accountant, examples(24, 200))


def _upkeep_killed(folder: Path, zygote: subprocess.Popen[str], kills: int) -> None:
    chance = random.Random(SEED)
    with published(f"{folder}/lake") as known:
        catalogue = known.connect()
        (row,) = catalogue.read(tables.LEDGERS)
        catalogue.claim(row["id"])
        catalogue.tag(tables.USAGE_HOURLY, "stated")
        rows = catalogue.open(tables.USAGE_HOURLY).scan().to_arrow()
        days = sorted(set(rows["day"].to_pylist()))
        interrupted = 0
        for _ in range(kills):
            for _ in range(3):
                catalogue.replace(tables.USAGE_HOURLY, rows, {"day": days})
            age(folder / "lake", 9)
            before = _files(folder / "lake")
            upkeep = fork_program(zygote, ["lake_upkeep", f"{folder}/lake", row["id"]], folder / "log")
            until(
                lambda before=before, upkeep=upkeep: _files(folder / "lake") != before or not is_running(upkeep), "idle"
            )
            time.sleep(chance.uniform(0, 0.03))  # the instant of the kill is what is drawn
            with contextlib.suppress(ProcessLookupError):
                os.kill(upkeep, signal.SIGKILL)
                interrupted += 1
            until(lambda upkeep=upkeep: not is_running(upkeep), "it still lives")
            catalogue.claim(row["id"])
            table = catalogue.open(tables.USAGE_HOURLY)
            assert table.scan().to_arrow().num_rows == rows.num_rows
            assert table.scan().use_ref("stated").to_arrow().num_rows == rows.num_rows
        assert interrupted > kills // 2, "too few were killed before they ended"
        _all_removed(catalogue, folder / "lake")
        assert catalogue.remove_old_versions(3_600) == Removed(0, 0)
        assert known.publisher.compare().differences == ()


def test_killed_while_it_removes_old_files_every_version_that_is_kept_stays_readable(
    tmp_path: Path, zygote: subprocess.Popen[str]
) -> None:
    _upkeep_killed(tmp_path, zygote, 8)


@pytest.mark.real
def test_the_same_twenty_times(tmp_path: Path, zygote: subprocess.Popen[str]) -> None:
    _upkeep_killed(tmp_path, zygote, 20)
