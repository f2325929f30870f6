"""A renamed ledger counts once under its last name; a copy that publishes under another name hides no figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.errors import LakeUnavailable, UnreadableLedger
from accountant.fleet.fleet_ledgers import Fleet, FleetQuery
from accountant.lake import tables
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.lake_ledger import LedgerStatus, ledgers
from accountant.lake.publisher import Publisher
from accountant.ledger.journal import NewAct
from accountant.storage.duckdb_ledger import open_ledger
from gputally.base.clock import VirtualClock
from tests.lake.comparison_queries import HOUR, SPAN, KeptLedger, PublishedLedger, lost, overwrite, published
from tests.lake.publishers import publisher
from tests.ledger.busy_ledger import HAND


def under(known: PublishedLedger, name: str) -> PublishedLedger:
    """The ledger as its accountant publishes it under another name."""
    assert known.settings.lake is not None
    lake = known.settings.lake.model_copy(update={"ledger": name})
    found = replace(known, settings=known.settings.model_copy(update={"lake": lake}))
    return replace(found, publisher=Publisher(known.ledger, known.books, found.settings, known.clock, found.connect))


@contextmanager
def copy_of(known: PublishedLedger, folder: Path) -> Iterator[PublishedLedger]:
    kept = known.kept(folder / "copy")
    clock = VirtualClock(kept.at_ms)
    exported = kept.settings.exported_labels
    opened = open_ledger(kept.files / "ledger.duckdb", clock, exported_labels=exported)
    with closing(opened) as ledger, ExitStack() as stack:
        books = Bookkeeper(ledger, clock, kept.settings.timezone)
        yield under(PublishedLedger(ledger, books, clock, known.publisher, kept.settings, stack), "restore-test")


def seen(known: PublishedLedger) -> Mapping[str, LedgerStatus]:
    with closing(DuckDbEngine(known.connect())) as engine:
        return ledgers(engine)


class OwnFolderOnly(Catalogue):
    """With credentials that write below the folder of the ledger's present name only."""

    def leave(self, namespace: str, row: Mapping[str, Any]) -> None:
        raise LakeUnavailable(f"{namespace}: access denied")


def changed(known: PublishedLedger, **values: Any) -> None:
    """The ledger's status as another version publishes it."""
    lake = known.connect()
    (row,) = lake.read(tables.LEDGERS)
    overwrite(lake, tables.LEDGERS, tables.LEDGERS.of_rows([{**row, **values}]), {})


@pytest.fixture(scope="module")
def kept_old(tmp_path_factory: pytest.TempPathFactory) -> KeptLedger:
    with published(name="old") as known:
        return known.kept(tmp_path_factory.mktemp("kept") / "files")


@pytest.fixture
def old(kept_old: KeptLedger) -> Iterator[PublishedLedger]:
    """A published ledger whose publisher has just started."""
    with kept_old.again() as known:
        yield known


def test_a_renamed_ledger_that_cannot_be_read_is_not_replaced_by_its_former_figures(old):
    new = under(old, "new")
    new.publisher.publish()
    changed(new, timezone="Mars/Olympus")
    assert {name: bool(one.fault) for name, one in seen(old).items()} == {"new": True}


@pytest.mark.parametrize("part", ["metadata", "data"])
def test_a_renamed_ledger_whose_status_is_lost_is_not_replaced_by_its_former_figures(old, part):
    new = under(old, "new")
    new.publisher.publish()
    with lost(new, "ledgers", part):
        assert {name: bool(one.fault) for name, one in seen(old).items()} == {"new": True}
    with lost(old, "ledgers", part):
        assert {name: bool(one.fault) for name, one in seen(old).items()} == {"new": False, "old": True}
    assert {name: one.fault for name, one in seen(old).items()} == {"new": ""}


def test_a_renamed_ledger_whose_tables_are_all_lost_is_remembered(old):
    new = under(old, "new")
    with closing(DuckDbEngine(old.connect())) as engine:
        fleet = Fleet(engine)
        assert set(fleet.statuses()) == {"old"}
        new.publisher.publish()
        assert set(fleet.statuses()) == {"new"}
        with lost(new):
            for _ in range(2):
                assert all(one.fault for one in fleet.statuses().values())
                assert all(member.fault for member in fleet.members())
        with lost(old):
            assert {name: bool(one.fault) for name, one in fleet.statuses().items()} == {"new": False, "old": True}
        assert {name: one.fault for name, one in fleet.statuses().items()} == {"new": ""}


def test_the_former_figures_of_a_lost_ledger_are_not_counted_by_a_process_that_never_saw_it(old):
    """The last name has a note of every former one."""
    for name in ("new", "newest"):
        old.clock.advance(HOUR)
        last = under(old, name)
        last.publisher.publish()
    with closing(DuckDbEngine(old.connect())) as engine, lost(last):
        fleet = Fleet(engine)
        (told,) = fleet.members()
        assert told.name == "newest"
        assert told.fault
        with pytest.raises(UnreadableLedger):
            fleet.usage([told], FleetQuery(*SPAN, ()))
    last.connect().retire()
    assert all(one.fault for one in seen(old).values()), "former figures do not count twice without the newest either"


def test_a_note_of_a_new_name_is_gone_when_the_ledger_is_published_under_the_former_one_again(old):
    under(old, "new").publisher.publish()
    assert seen(old)["new"].renamed_to == ""
    old.clock.advance(HOUR)
    again = under(old, "old")
    again.publisher.publish()
    assert [row["renamed_to"] for row in again.connect().read(tables.LEDGERS)] == [None]
    with lost(again):
        assert {name: bool(one.fault) for name, one in seen(old).items()} == {"old": True}


def test_a_copy_leaves_no_note_at_a_ledger_that_has_gone_on(old, tmp_path):
    with copy_of(old, tmp_path) as restored:
        old.clock.advance(HOUR)
        act = NewAct(SPAN[1], "delivery", "mail", "ana", "sent", "{}")
        old.ledger.record([act], old.ledger.status().last_act)
        old.publisher.publish()
        restored.clock.advance(2 * HOUR)
        restored.publisher.publish()
        assert [row["renamed_to"] for row in old.connect().read(tables.LEDGERS)] == [None]


def test_a_copy_leaves_no_note_at_a_ledger_that_has_newer_records(old, tmp_path):
    with copy_of(old, tmp_path) as restored:
        old.clock.advance(HOUR)
        later = HAND.row(1, 270, 285, "gpu-0", gpu_model="H100")
        old.ledger.append([HAND.batch(later, node="n1", epoch="late")], old.clock.wall_ms())
        old.publisher.publish()
        restored.clock.advance(2 * HOUR)
        restored.publisher.publish()
        assert {name: bool(one.fault) for name, one in seen(old).items()} == {"old": True, "restore-test": True}


def test_a_row_at_a_former_name_that_cannot_be_read_stops_no_publication(old):
    new = under(old, "new")
    changed(old, until_ms=None)
    new.publisher.publish()
    assert new.publisher.published_ms == old.clock.wall_ms()
    assert {name: bool(one.fault) for name, one in seen(old).items()} == {"new": False, "old": True}


def test_a_former_name_that_could_not_be_noted_is_named(old):
    """The credentials of the new name may not reach it."""
    new = under(old, "new")
    assert new.settings.lake is not None
    own = OwnFolderOnly(new.connect()._catalog, "here", new.settings.lake)
    publisher(new, lambda: own).publish()
    assert {name: bool(one.fault) for name, one in seen(old).items()} == {"new": True, "old": True}
    renamed_ms = old.clock.wall_ms()
    with closing(DuckDbEngine(old.connect())) as engine, lost(new):
        told = Fleet(engine).statuses()["new"].fault
        assert "former name" in told
        assert Fleet(engine).statuses()["old"].until_ms <= renamed_ms, "it counts with what it published"
    with closing(DuckDbEngine(old.connect())) as engine, lost(new, "ledgers"):
        told = Fleet(engine).statuses()
        assert told["new"].fault
        assert "former name" not in told["new"].fault
    new.publisher.publish()
    with lost(new):
        assert {name: bool(one.fault) for name, one in seen(old).items()} == {"new": True}, "it is noted later"


def test_a_ledger_that_is_renamed_there_and_back_counts_once(old):
    for name in ("new", "newer", "old"):
        old.clock.advance(HOUR)
        under(old, name).publisher.publish()
        assert {name: one.fault for name, one in seen(old).items()} == {name: ""}


def test_a_copy_under_another_name_is_named_and_so_is_the_ledger(old, tmp_path):
    with copy_of(old, tmp_path) as restored:
        restored.clock.advance(HOUR)
        restored.publisher.publish()
        old.clock.advance(2 * HOUR)
        act = NewAct(SPAN[1], "delivery", "mail", "ana", "sent", "{}")
        for acts in ([], [act, act]):
            old.ledger.record(acts, old.ledger.status().last_act)
            old.clock.advance(HOUR)
            old.publisher.publish()
            named = seen(old)
            assert {name: bool(one.fault) for name, one in named.items()} == {"old": True, "restore-test": True}
            assert all(name in one.fault for name in named for one in named.values())
        changed(old, timezone="Mars/Olympus")
        assert set(seen(old)) == {"old", "restore-test"}
        restored.connect().retire()
        changed(old, timezone="UTC")
        assert {name: one.fault for name, one in seen(old).items()} == {"old": ""}


def test_a_copy_whose_clock_is_days_ahead_hides_no_figures(old, tmp_path):
    with copy_of(old, tmp_path) as restored:
        restored.clock.advance(200 * HOUR)
        restored.publisher.publish()
        for _ in range(2):
            old.clock.advance(HOUR)
            old.publisher.publish()
            assert {name: bool(one.fault) for name, one in seen(old).items()} == {"old": True, "restore-test": True}


@pytest.mark.parametrize("claim", ["name", "id"])
def test_nobody_takes_the_figures_of_another_ledger_from_the_fleet_unseen(old, claim):
    """Whoever may write one namespace publishes there what another ledger's tables say."""
    assert old.settings.lake is not None
    (theirs,) = old.connect().read(tables.LEDGERS)
    before = seen(old)["old"]
    with published(old.settings.lake.warehouse, name="other", rows=[(0, 0, 0, 0, False)], seed=3) as other:
        if claim == "name":
            changed(other, ledger="old", until_ms=theirs["until_ms"] + HOUR)
            found = seen(old)
            assert found["old"] == before
            assert found["other"].fault
        else:
            changed(other, id=theirs["id"])
            acts = other.connect().read(tables.ACTS)
            last = max(old.connect().read(tables.ACTS), key=lambda row: row["number"])
            made = {
                **last,
                "number": last["number"] + 1,
                "kind": "lake",
                "at_ms": theirs["until_ms"] * 2,
                "ledger": "other",
            }
            overwrite(other.connect(), tables.ACTS, tables.ACTS.of_rows([*acts, {**last, "ledger": "other"}, made]), {})
            assert {name: bool(one.fault) for name, one in seen(old).items()} == {"old": True, "other": True}
