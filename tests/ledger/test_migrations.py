"""A ledger is migrated to the schema of a later release, here a made-up one, and gives the same answers. A step that
fails changes nothing, and an earlier release refuses what a later one wrote."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import pytest

from accountant.core.errors import LedgerUnavailable
from accountant.ledger.protocols import EpochReport, Facts, JobKey, NamespaceFacts, NodeFacts
from accountant.storage.duckdb_engine import Database, Migration, fingerprints, migrations
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.folder_or_object_store import in_folder
from accountant.wire.policy_models import Policy, QueuePolicy, WindowSpec
from agent.wire import Skipped
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_HOUR
from tests.empty_ledger import fresh
from tests.ledger.conftest import NOW_MS, START_MS, Hand, booked
from tests.moments import acks, present

NEXT = (
    *migrations(),
    Migration(
        "0002_cabinets.sql",
        "CREATE TABLE cabinet (node VARCHAR NOT NULL, name VARCHAR NOT NULL); "
        "INSERT INTO cabinet SELECT name, 'c1' FROM node; "
        "ALTER TABLE act ADD COLUMN cabinet VARCHAR DEFAULT '';",
    ),
    Migration("0003_named.sql", "UPDATE cabinet SET name = name || '-north';"),
)
"""The steps of a made-up later release."""


def answers(ledger: DuckLedger) -> Mapping[str, Any]:
    """Return the ledger's answers to users and schedulers."""
    span = (START_MS, START_MS + 3 * MS_PER_HOUR)
    return {
        "usage": present(ledger).usage(span, ("gpu", "team", "queue", "job", "pool")).lines(),
        "window": present(ledger).window(WindowSpec(size=10_800, half_life=3_600), span[1], "allocated", 0.98),
        "acks": {epoch: ack.durable_seq for epoch, ack in acks(ledger, "n1", "prod").items()},
        "acts": present(ledger).acts(),
        "holes": present(ledger).holes(),
        "quarantined": present(ledger).quarantined(),
        "imbalance": present(ledger).imbalance(*span).total_us,
    }


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Any]]:
    """A stopped ledger with rows in every kind of table, and its answers."""
    folder, hand = tmp_path_factory.mktemp("kept"), Hand()
    place = fresh(folder / "ledger.duckdb")
    ledger = open_ledger(place, VirtualClock(NOW_MS), archive=in_folder(folder / "archive"))
    ledger.put_policy(Policy(queues=(QueuePolicy(name="left", team="red", refs=("kai:left",)),)), START_MS, "ann")
    spaces = (NamespaceFacts("prod", "vision", team="blue"),)
    ledger.observe(Facts(nodes=(NodeFacts("prod", "n1", pool="a"),), namespaces=spaces), NOW_MS)
    rows = [hand.row(n, n - 2, n - 1, energy_uj=n * 1000) for n in range(2, 12)]
    ledger.append([hand.batch(hand.fact(1, queue_ref="kai:left"), *rows)], NOW_MS)
    ledger.append([hand.batch(hand.row(12, 3.5, 4.5, method="carried"), Skipped(13, "outbox-full"))], NOW_MS)
    ledger.append([hand.batch(hand.row(14, 100_000, 100_001), hand.row(15, 60, 61, gpu="gpu-2"))], NOW_MS + MS_PER_HOUR)
    ledger.report_epochs([EpochReport(JobKey("prod", "vision", "Pod/train-0"), 1, START_MS + 60_000, "ann")], NOW_MS)
    ledger.archive(NOW_MS)
    ledger.checkpoint()
    told = answers(ledger)
    ledger.close()
    return place, told


@pytest.fixture
def written(kept: tuple[Path, Mapping[str, Any]], tmp_path: Path) -> tuple[Path, Mapping[str, Any]]:
    """A copy of the ledger, and its answers."""
    return Path(shutil.copy(kept[0], tmp_path)), kept[1]


def tables(place: Path) -> dict[str, tuple[int, int]]:
    """Return the number of rows and the checksum of each table of a stopped ledger."""
    database = Database(place)
    with database.cursor() as cursor:
        found = fingerprints(cursor)
    database.close()
    return found


def test_a_later_release_adds_its_steps_once_and_keeps_every_row(written):
    place, _ = written
    before = tables(place)
    for _ in range(2):
        database = Database(place, steps=NEXT)
        with database.cursor() as cursor:
            assert cursor.run("SELECT number, name FROM migration ORDER BY number") == [
                (number, step.name) for number, step in enumerate(NEXT, start=1)
            ]
            assert cursor.run("FROM cabinet") == [("n1", "c1-north")]
            assert cursor.run("SELECT DISTINCT cabinet FROM act") == [("",)]
            after = fingerprints(cursor)
        database.close()
        assert not place.with_name(place.name + ".wal").exists()
        assert {name: rows for name, rows in after.items() if name not in ("migration", "cabinet", "act")} == {
            name: rows for name, rows in before.items() if name not in ("migration", "act")
        }
        assert after["act"][0] == before["act"][0]


def test_a_ledger_answers_the_same_after_an_upgrade_and_books_on(written, opened, hand):
    place, told = written
    Database(place, steps=NEXT).close()
    with duckdb.connect(str(place)) as file:  # as if this release were the later one
        file.execute(f"ALTER TABLE act DROP COLUMN cabinet; DELETE FROM migration WHERE number > {len(migrations())}")
    ledger = opened(place, VirtualClock(NOW_MS + 2 * MS_PER_HOUR))
    assert answers(ledger) == told
    receipt = booked(ledger, NOW_MS + 2 * MS_PER_HOUR, hand.batch(hand.row(16, 61, 62, gpu="gpu-2")))
    assert (receipt.stored, receipt.quarantined) == (1, 0)
    ledger.checkpoint()
    assert present(ledger).imbalance(START_MS, START_MS + 3 * MS_PER_HOUR).total_us == 0


def test_a_step_that_fails_changes_nothing_and_frees_the_ledger(written, opened):
    place, told = written
    before = tables(place)
    for broken in ("CREATE TABLE half (id INTEGER); INSERT INTO nowhere VALUES (1);", "SELECT error('no')"):
        with pytest.raises(LedgerUnavailable):
            Database(place, steps=(*NEXT, Migration("0004_broken.sql", broken)))
        assert tables(place) == before
    assert answers(opened(place, VirtualClock(NOW_MS))) == told


def test_an_earlier_release_refuses_a_later_ledger_and_leaves_it_as_it_is(written):
    place, _ = written
    Database(place, steps=NEXT).close()
    before = place.read_bytes()
    with pytest.raises(LedgerUnavailable, match=f"schema {len(NEXT)}, known {len(migrations())}"):
        open_ledger(place, VirtualClock(NOW_MS))
    assert place.read_bytes() == before
