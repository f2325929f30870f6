"""A ledger writes and removes only what is its own, and only while the lake and the ledger are what they were."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.errors import LakeRefused, LakeUnavailable
from accountant.core.import_epochs import import_prefix
from accountant.fleet.fleet_ledgers import Fleet, FleetQuery
from accountant.lake import tables
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue, namespace_of
from accountant.lake.lake_comparison import LakeComparison
from accountant.ledger.journal import NewAct
from accountant.ledger.protocols import ImportSpan, Retirement
from accountant.storage.duckdb_ledger import open_ledger
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from tests.lake.comparison_queries import HOUR, SPAN, KeptLedger, PublishedLedger, age, overwrite, published
from tests.lake.publishers import lake_of, publisher
from tests.ledger.busy_ledger import AGENT, HAND
from tests.ledger.conftest import MINUTE, START_MS
from tests.moments import present


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def billed(known: PublishedLedger) -> dict[str, Any]:
    """The ledgers that a fleet counts, with the sum of their cost."""
    with closing(DuckDbEngine(known.connect())) as engine:
        fleet = Fleet(engine)
        members = fleet.members()
        return {
            ", ".join(one.name for one in members): fleet.cost(members, FleetQuery(*SPAN, ())).lines[0].cost,
        }


def later_record(known: PublishedLedger, minute: int = 0) -> None:
    """Book a record that no publication has yet, of a quarter of an hour from this minute."""
    late = HAND.row(1, minute, minute + 15, "gpu-late", gpu_model="H100")
    known.clock.advance(HOUR)
    known.ledger.append([HAND.batch(late, node="n9", epoch="late")], known.clock.wall_ms())


@contextmanager
def at_another_place(known: PublishedLedger, file: Path) -> Iterator[PublishedLedger]:
    """The ledger in a file, with the settings and the time of a known one. A file that does not exist is a new
    ledger."""
    clock = VirtualClock(known.clock.wall_ms())
    opened = open_ledger(file, clock, exported_labels=known.settings.exported_labels)
    with closing(opened) as ledger, ExitStack() as stack:
        books = Bookkeeper(ledger, clock, known.settings.timezone)
        yield PublishedLedger(ledger, books, clock, known.publisher, known.settings, stack)


def copied(known: PublishedLedger, file: Path) -> Path:
    known.ledger.checkpoint()
    return Path(shutil.copy(known.settings.data / "ledger.duckdb", file))


@pytest.fixture(scope="module")
def kept_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[KeptLedger, KeptLedger]:
    place = tmp_path_factory.mktemp("kept")
    with published(name="north") as north, published(lake_of(north).warehouse, name="south") as south:
        return north.kept(place / "north"), south.kept(place / "south")


@pytest.fixture
def two(kept_two: tuple[KeptLedger, KeptLedger]) -> Iterator[tuple[PublishedLedger, PublishedLedger]]:
    """The ledgers north and south in one lake, whose publishers have just started."""
    of_north, of_south = kept_two
    with of_north.again() as north, of_south.again() as south:
        yield north, south


def test_a_ledger_that_is_renamed_is_billed_once(known):
    ((name, cost),) = billed(known).items()
    assert name == "prod"
    publisher(known, ledger="new-name").publish()
    assert billed(known) == {"new-name": cost}


def figures(known: PublishedLedger) -> dict[str, Counter[str]]:
    """The accounts and the cost of each ledger of the fleet, and of all."""
    found = {}
    with closing(DuckDbEngine(known.connect())) as engine:
        fleet = Fleet(engine)
        names = [one.name for one in fleet.members()]
        for asked in [[name] for name in names] + [[]]:
            members, query = fleet.members(asked), FleetQuery(*SPAN, ())
            (usage,), (cost,) = fleet.usage(members, query).lines, fleet.cost(members, query).lines
            sums: Counter[str] = Counter(usage.accounts_gpu_us.model_dump())
            sums["unpriced"] = cost.unpriced_gpu_us
            sums["billed"] = cost.gpu_us
            found[asked[0] if asked else "all"] = sums
    return found


def test_the_sums_of_a_fleet_lose_and_double_nothing_when_ledgers_are_added_renamed_and_retired(tmp_path):
    with published(str(tmp_path), name="north") as north:
        alone = figures(north)
        assert alone["all"] == alone["north"]
        untouched = files(tmp_path / namespace_of("north"))
        with published(str(tmp_path), name="south", rows=[(0, 0, 0, 0, False)], seed=3) as south:
            both = figures(north)
            assert both == {"north": alone["north"], "south": both["south"], "all": alone["north"] + both["south"]}
            assert both["south"]["busy"] + both["south"]["allocated_idle"] > 0
            assert files(tmp_path / namespace_of("north")) == untouched
            publisher(south, ledger="east").publish()
            assert figures(north) == {"north": both["north"], "east": both["south"], "all": both["all"]}
            north.connect().retire()
            assert figures(south) == {"east": both["south"], "all": both["south"]}
            publisher(south, ledger="south").publish()
            assert figures(south) == {"south": both["south"], "all": both["south"]}


def test_a_node_that_no_inventory_lists_has_its_newest_record_and_what_its_agent_said(known):
    later_record(known)
    known.ledger.append([HAND.batch(node="n8", epoch="silent", agent=AGENT)], known.clock.wall_ms())
    known.publisher.publish()
    with closing(DuckDbEngine(known.connect())) as engine:
        found, own = known.asked(engine).status(), known.ledger.status()
        assert (found.agents, found.newest_by_node, found.nodes) == (own.agents, own.newest_by_node, own.nodes)
    assert {("prod", "n1"), ("prod", "n8")} == {*found.agents}
    assert found.newest_by_node["prod", "n9"] == START_MS + 15 * MINUTE


def test_the_nodes_of_a_ledger_that_is_split_count_once(known, tmp_path):
    """From the second hour on the agent of one node reports to a new accountant, and the former one retires the
    node."""
    later_record(known)
    known.publisher.publish()
    whole = figures(known)["all"]
    known.ledger.retire(Retirement(node="n9"), START_MS + HOUR, known.clock.wall_ms(), "ana", "split")
    lake = lake_of(known).model_copy(update={"ledger": "half"})
    with at_another_place(known, tmp_path / "half.duckdb") as place:
        half = replace(place, settings=place.settings.model_copy(update={"lake": lake}))
        moved = HAND.row(1, 60, 75, "gpu-late", gpu_model="H100")
        half.ledger.append([HAND.batch(moved, node="n9", epoch="moved")], half.clock.wall_ms())
        for one in (known, half):
            publisher(one, ledger=lake.ledger if one is half else "prod").publish()
        with closing(DuckDbEngine(known.connect())) as engine:
            fleet = Fleet(engine)
            assert [one.name for one in fleet.members()] == ["half", "prod"]
            query = FleetQuery(*SPAN, ("gpu",), {"gpu": ("gpu-late",)})
            (line,) = fleet.usage(fleet.members(), query).lines
        split = figures(known)["all"]
    assert line.accounts_gpu_us.total == (SPAN[1] - SPAN[0]) * 1_000, "each hour of the GPU is in one ledger"
    quarter_us = 15 * MINUTE * 1_000
    moved = split - whole
    assert moved["busy"] + moved["allocated_idle"] + moved["allocated_unknown"] == quarter_us
    assert (whole - split) == Counter(unmetered=quarter_us), "all other time stays"


def test_a_ledger_does_not_write_under_the_name_of_another(known):
    before = {table.name: known.connect().read(table) for table in tables.TABLES}
    with published(lake_of(known).warehouse, rows=[(0, 0, 0, 0, False)], seed=3, publish=False) as other:
        with pytest.raises(LakeRefused):
            other.publisher.publish()
        assert other.publisher.refused
        with pytest.raises(LakeRefused):
            other.publisher.repair("ana", "mine")
    assert {table.name: known.connect().read(table) for table in tables.TABLES} == before
    known.publisher.publish()
    assert known.publisher.compare() == LakeComparison(1, ())
    assert not known.publisher.refused


def test_a_first_publication_that_is_not_finished_is_not_taken_over(tmp_path):
    with (
        published(str(tmp_path), name="default", publish=False) as first,
        published(str(tmp_path), name="default", rows=[(0, 0, 0, 0, False)], seed=3, publish=False) as second,
    ):

        def another_starts() -> None:
            with pytest.raises(LakeRefused):
                publisher(second).publish()

        publisher(first, lambda: Woken(first, another_starts)).publish()
        assert publisher(first).compare() == LakeComparison(1, ())
        assert present(second.ledger).acts("lake") == []


def test_a_process_that_ends_before_its_first_claim_leaves_tables_that_the_next_one_uses(tmp_path):
    with published(str(tmp_path), publish=False) as known:
        known.connect().begin()  # one that ended there has not recorded an id

        class Ends(Catalogue):
            def claim(self, ledger_id: str) -> Any:
                raise LakeUnavailable("the process ends")

        good = known.connect()
        with pytest.raises(LakeUnavailable):
            publisher(known, lambda: Ends(good._catalog, good.place, lake_of(known))).publish()
        publisher(known).publish()
        assert len(present(known.ledger).acts("lake")) == 1
        assert known.publisher.compare() == LakeComparison(1, ())


def test_a_process_that_is_refused_at_its_start_writes_nothing_and_stops_no_other(tmp_path):
    with published(str(tmp_path)) as known:
        lake = known.connect()
        (row,) = lake.read(tables.LEDGERS)
        overwrite(lake, tables.LEDGERS, tables.LEDGERS.of_rows([{**row, "first_ms": row["first_ms"] - HOUR}]), {})
        before, refused = files(tmp_path), publisher(known)
        for _ in range(2):
            with pytest.raises(LakeRefused):
                refused.publish()
        assert files(tmp_path) == before
        known.clock.advance(HOUR)
        known.publisher.publish()
        assert not known.publisher.refused


def test_two_threads_that_use_the_lake_first_at_one_time_make_one_claim(known):
    calls: list[str] = []
    second_connects = threading.Event()

    def connect() -> Catalogue:
        calls.append(threading.current_thread().name)
        if len(calls) == 1:
            second.start()
            second_connects.wait(0.5)
        else:
            second_connects.set()
        return known.connect()

    writer = publisher(known, connect)

    def compare() -> None:
        with suppress(LakeRefused):
            writer.compare()

    second = threading.Thread(target=compare)
    with suppress(LakeRefused):
        writer.publish()
    second.join()
    assert len(calls) == 1
    known.clock.advance(HOUR)
    writer.publish()


class Woken(Catalogue):
    """Runs something else before the first write, as a process that is stopped there meets the world changed."""

    def __init__(self, known: PublishedLedger, meanwhile: Any) -> None:
        good = known.connect()
        super().__init__(good._catalog, good.place, lake_of(known))
        self._meanwhile = [meanwhile]

    def replace(self, *args: Any) -> None:
        while self._meanwhile:
            self._meanwhile.pop()()
        super().replace(*args)


def test_a_leader_that_wakes_inside_a_publication_writes_over_nothing_newer(unpublished):
    later = publisher(unpublished)

    def another_leads() -> None:
        later_record(unpublished)
        later.publish()

    woken = publisher(unpublished, lambda: Woken(unpublished, another_leads))
    for _ in range(2):  # also not at its next time
        with pytest.raises(LakeRefused):
            woken.publish()
    assert later.compare() == LakeComparison(1, ())
    assert any(row["gpu"] == "gpu-late" for row in unpublished.connect().read(tables.USAGE_HOURLY))


def test_every_commit_names_its_ledger_its_term_and_its_publication(known):
    publisher(known).publish()
    (act,) = present(known.ledger).acts("lake")
    ledger_id = json.loads(act.content)["id"]
    terms = set()
    for table in tables.TABLES:
        for snapshot in known.connect().open(table).snapshots():
            assert snapshot.summary is not None
            assert snapshot.summary["gputally.ledger-id"] == ledger_id
            terms.add((int(snapshot.summary["gputally.term"]), int(snapshot.summary["gputally.version"])))
    assert {(1, 0), (1, 1), (2, 0), (2, 1)} == terms


def test_a_clock_that_is_days_ahead_removes_nothing(two):
    north, _ = two
    lake = Path(lake_of(north).warehouse)
    folder = lake / namespace_of("north") / tables.DAYS.name / "data"
    (folder / "pending.parquet").write_bytes(b"PAR1")
    (lake / namespace_of("south") / tables.DAYS.name / "data" / "pending.parquet").write_bytes(b"PAR1")
    north.publisher.publish()
    before = files(lake)
    north.clock.advance(9 * 24 * HOUR)
    removed = north.publisher.remove_old_versions()
    assert (removed.versions, removed.files) == (0, 0)
    assert files(lake) == before


def test_only_what_is_its_own_is_removed(two):
    north, _ = two
    lake = Path(lake_of(north).warehouse)
    age(lake, 9)
    north.publisher.publish()
    south = files(lake / namespace_of("south"))
    for _ in range(2):
        age(lake / namespace_of("north"), 9)
        north.clock.advance(HOUR)
        north.publisher.publish()
    assert north.publisher.remove_old_versions().files > 0
    assert files(lake / namespace_of("south")) == south
    assert north.publisher.compare().differences == ()


def test_the_claim_stays_when_old_versions_are_removed_after_another_program_compacted_the_tables(known):
    lake = known.connect()
    for days in (30, 0):
        for table in tables.TABLES:
            overwrite(lake, table, lake.open(table).scan().to_arrow(), {})
        age(Path(lake_of(known).warehouse), days)
    known.publisher.remove_old_versions()
    with pytest.raises(LakeRefused):
        lake.require_own("another ledger")
    known.clock.advance(HOUR)
    known.publisher.publish()
    assert known.publisher.compare().differences == ()


def test_after_a_clock_was_ahead_the_versions_of_a_table_stay_in_order(known):
    """Engines in Java refuse a table whose versions are not."""
    lake = known.connect()
    table = lake.open(tables.DAYS)
    ahead = table.transaction()
    ahead.append(tables.DAYS.arrow.empty_table())
    ahead._updates = tuple(
        update.model_copy(update={"snapshot": update.snapshot.model_copy(
            update={"timestamp_ms": update.snapshot.timestamp_ms + 8 * 24 * HOUR}
        )}) if update.action == "add-snapshot" else update
        for update in ahead._updates
    )  # fmt: skip
    ahead.commit_transaction()
    known.clock.advance(HOUR)
    known.publisher.publish()
    metadata = lake.open(tables.DAYS).metadata
    times = [entry.timestamp_ms for entry in metadata.snapshot_log] + [metadata.last_updated_ms]
    assert len(times) > 4, "the next process claimed and published"
    assert times == sorted(times)


def test_a_ledger_that_lost_acts_publishes_nothing_until_a_person_says_that_it_is_right(known, tmp_path):
    backup = copied(known, tmp_path / "ledger.duckdb")
    seen = known.ledger.status().last_act
    known.ledger.record([NewAct(SPAN[1], "delivery", "mail", "ana", "sent", "{}")], seen)
    known.clock.advance(HOUR)
    known.publisher.publish()
    acts = known.connect().read(tables.ACTS)
    with at_another_place(known, backup) as restored:
        writer = publisher(restored)
        with pytest.raises(LakeRefused):
            writer.publish()
        assert writer.refused
        assert restored.connect().read(tables.ACTS) == acts
        writer.repair("ana", "the backup is what is left")
        assert not writer.refused
        assert {row["digest"] for row in restored.connect().read(tables.ACTS)} == {
            act.digest for act in present(restored.ledger).acts()
        }
        assert present(restored.ledger).acts()[-1].who == "ana"
        assert writer.compare().differences == ()


def test_a_ledger_that_begins_later_than_its_lake_publishes_nothing(known):
    lake = known.connect()
    (row,) = lake.read(tables.LEDGERS)
    overwrite(lake, tables.LEDGERS, tables.LEDGERS.of_rows([{**row, "first_ms": row["first_ms"] - HOUR}]), {})
    with pytest.raises(LakeRefused):
        publisher(known).publish()


def test_a_ledger_of_which_an_import_was_withdrawn_publishes_after_a_failure_too(unpublished):
    imported = HAND.row(1, -24 * 60, -24 * 60 + 15, "gpu-old", gpu_model="H100", holder=Holder("slurm", "7", "", "7"))
    unpublished.ledger.append(
        [HAND.batch(imported, node="old", epoch=f"{import_prefix('slurm')}1")], unpublished.clock.wall_ms()
    )
    publisher(unpublished).publish()
    span = ImportSpan(cluster="prod", source="slurm", start_ms=START_MS - 24 * HOUR, end_ms=START_MS)
    unpublished.ledger.withdraw_import(span, unpublished.clock.wall_ms(), "ana", "wrong cluster")

    class Fails(Catalogue):
        def replace(self, table: tables.LakeTable, *args: Any) -> None:
            if table is tables.LEDGERS:
                raise LakeUnavailable("the store is away")
            super().replace(table, *args)

    good = unpublished.connect()
    unpublished.clock.advance(HOUR)
    with pytest.raises(LakeUnavailable, match="away"):
        publisher(unpublished, lambda: Fails(good._catalog, good.place, lake_of(unpublished))).publish()
    publisher(unpublished).publish()
    (row,) = unpublished.connect().read(tables.LEDGERS)
    assert row["first_ms"] == START_MS


def test_a_restored_ledger_publishes_nothing_until_its_newest_records_were_sent_again(known, tmp_path):
    backup = copied(known, tmp_path / "ledger.duckdb")
    later_record(known, 285)
    known.publisher.publish()
    before = files(Path(lake_of(known).warehouse))
    with at_another_place(known, backup) as restored:
        writer = publisher(restored)
        with pytest.raises(LakeUnavailable):
            writer.publish()
        assert files(Path(lake_of(known).warehouse)) == before
        assert not writer.refused, "it needs no person"
        later_record(restored, 285)
        writer.publish()
        assert writer.compare() == LakeComparison(1, ())


def test_a_restored_ledger_that_lacks_only_a_late_record_publishes_nothing_until_it_was_sent_again(known, tmp_path):
    backup = copied(known, tmp_path / "ledger.duckdb")
    later_record(known)  # earlier than the newest one
    known.publisher.publish()
    before = files(Path(lake_of(known).warehouse))
    with at_another_place(known, backup) as restored:
        others = [HAND.row(seq, 180 + seq, 181 + seq, "gpu-new", gpu_model="H100") for seq in range(1, 5)]
        restored.ledger.append([HAND.batch(*others, node="n8", epoch="new")], restored.clock.wall_ms())
        writer = publisher(restored)
        with pytest.raises(LakeUnavailable, match="n9"):
            writer.publish()
        assert files(Path(lake_of(known).warehouse)) == before
        assert not writer.refused, "it needs no person"
        later_record(restored)
        writer.publish()
        assert writer.compare() == LakeComparison(1, ())


def test_a_volume_that_was_emptied_empties_nothing_in_the_lake(known, tmp_path):
    before = files(Path(lake_of(known).warehouse))
    with at_another_place(known, tmp_path / "empty.duckdb") as emptied, pytest.raises(LakeRefused):
        publisher(emptied).publish()
    assert files(Path(lake_of(known).warehouse)) == before


def test_a_warehouse_that_is_not_mounted_becomes_no_new_lake(known, tmp_path):
    place, away = Path(lake_of(known).warehouse), tmp_path / "away"
    place.rename(away)
    for mount_point in (False, True):
        if mount_point:
            place.mkdir()
        writer = publisher(known)
        with pytest.raises(LakeUnavailable):
            writer.publish()
        with pytest.raises(LakeUnavailable), closing(DuckDbEngine(known.connect())) as engine:
            Fleet(engine).members()
        assert files(place) == {}
    place.rmdir()
    away.rename(place)
    writer.publish()
    assert writer.compare() == LakeComparison(1, ())


def test_the_first_publication_needs_a_folder_that_exists(unpublished, tmp_path):
    with pytest.raises(LakeRefused):
        publisher(unpublished, warehouse=str(tmp_path / "nowhere")).publish()
    assert not (tmp_path / "nowhere").exists()
    assert present(unpublished.ledger).acts("lake") == []


def test_a_lake_that_was_lost_is_begun_again_only_by_a_person(known):
    place = Path(lake_of(known).warehouse)
    shutil.rmtree(place)
    place.mkdir()
    writer = publisher(known)
    with pytest.raises(LakeUnavailable):
        writer.publish()
    writer.repair("ana", "the store is gone")
    assert writer.compare() == LakeComparison(1, ())
    assert publisher(known).publish().days == ()


def test_a_repair_writes_what_another_hand_changed_and_nothing_else(known):
    known.clock.advance(24 * HOUR)
    known.publisher.publish()
    lake = known.connect()
    hourly = lake.open(tables.USAGE_HOURLY).scan("day = '2026-10-01'").to_arrow()
    overwrite(lake, tables.USAGE_HOURLY, hourly.slice(1), {"day": hourly["day"][0].as_py()})
    assert known.publisher.compare().differences
    assert known.publisher.publish().days == (), "the control totals are as they were"
    assert known.publisher.repair("ana", "a row was deleted").days == (hourly["day"][0].as_py(),)
    assert known.publisher.compare() == LakeComparison(2, ())
    assert present(known.ledger).acts("lake")[-1].reason == "a row was deleted"


def test_a_ledger_that_is_retired_leaves_the_lake_and_no_other_does(two):
    north, south = two
    lake = Path(lake_of(north).warehouse)
    before = files(lake / namespace_of("south"))
    north.connect().retire()
    assert not (lake / namespace_of("north") / tables.DAYS.name).exists()
    assert files(lake / namespace_of("south")) == before
    assert list(billed(south)) == ["south"]
    north.clock.advance(HOUR)
    with pytest.raises(LakeRefused):
        north.publisher.publish()
    assert list(billed(south)) == ["south"]
    north.publisher.repair("ana", "it is back")
    assert list(billed(south)) == ["north, south"]


@pytest.mark.parametrize(
    "names", [("a-b", "a_b"), ("a-b", "A-b"), ("a.b", "a-b"), ("a--b", "a-b"), ("ä", "ö"), ("", "a")]
)
def test_different_names_have_different_namespaces_that_every_catalog_accepts(names):
    one, other = (namespace_of(name) for name in names)
    assert one != other
    for namespace in (one, other, namespace_of("x" * 253)):
        assert len(namespace) <= 128
        assert namespace.replace("_", "").isalnum()
        assert namespace == namespace.lower()
