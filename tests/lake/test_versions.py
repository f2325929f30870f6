"""Ledgers and readers of different versions share a lake: what one of them does not know yet is unknown to it, and all
else is as before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from pyiceberg.types import LongType, StringType

from accountant.core.errors import LakeRefused, UnreadableLedger
from accountant.fleet.fleet_ledgers import Fleet, FleetQuery
from accountant.lake import tables
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue, namespace_of
from accountant.lake.lake_comparison import LakeComparison
from accountant.lake.tables import LakeTable
from tests.lake.comparison_queries import HOUR, SPAN, PublishedLedger, differences
from tests.lake.publishers import publisher

TOMORROW = "known_tomorrow"
ACTIVITY = ("sm_active_us", "sm_unknown_us", "tensor_active_us", "tensor_unknown_us")


def of_a_later_version(lake: Catalogue, table: LakeTable) -> None:
    """The table with two more columns, which have values in some of its files."""
    opened = lake.open(table)
    with opened.update_schema() as update:
        update.add_column(TOMORROW, StringType())
        update.add_column(f"{TOMORROW}_us", LongType())
    rows = lake.open(table).scan().to_arrow()
    later = {TOMORROW: "x", f"{TOMORROW}_us": 7}
    lake.open(table).overwrite(rows.from_pylist([{**row, **later} for row in rows.to_pylist()], schema=rows.schema))


def of_an_earlier_version(lake: Catalogue, table: LakeTable, *missing: str) -> None:
    """The table as a version published it that did not know these columns."""
    opened = lake.open(table)
    with opened.update_schema() as update:
        for name in missing:
            update.delete_column(name)
    lake.open(table).overwrite(lake.open(table).scan().to_arrow())
    if table is tables.USAGE_HOURLY:  # digests are of rows with their columns
        totals = [{**row, "digest": "of fewer columns"} for row in lake.read(tables.DAYS)]
        lake.open(tables.DAYS).overwrite(tables.DAYS.of_rows(totals))


def without(lake: Catalogue, table: LakeTable) -> None:
    """The lake as a version published it that did not know this register."""
    lake._catalog.drop_table((namespace_of(lake.ledger), table.name))
    totals = lake.open(tables.REGISTERS).scan(f"register != '{table.name}'").to_arrow()
    lake.open(tables.REGISTERS).overwrite(totals)


def asked(known: PublishedLedger, ask: Callable[[Fleet], Any]) -> Any:
    with closing(DuckDbEngine(known.connect())) as engine:
        return ask(Fleet(engine))


def usage(fleet: Fleet) -> Any:
    (line,) = fleet.usage(fleet.members(), FleetQuery(*SPAN, ())).lines
    return line


def test_a_reader_and_a_writer_ignore_what_a_later_version_added(known):
    lake = known.connect()
    for table in tables.TABLES:
        of_a_later_version(lake, table)
    lake._catalog.create_table((namespace_of(lake.ledger), TOMORROW), lake.open(tables.DAYS).schema())
    with closing(DuckDbEngine(known.connect())) as engine:
        assert differences(known, engine) == []
    known.clock.advance(24 * HOUR)
    writer = publisher(known)  # the version before is started again
    assert writer.publish().days
    assert writer.compare() == LakeComparison(2, ())
    writer.repair("ana", "an upgrade was taken back")
    assert writer.compare() == LakeComparison(2, ())


def test_what_an_earlier_version_did_not_publish_is_unknown_and_never_zero(known):
    before = asked(known, usage)
    of_an_earlier_version(known.connect(), tables.USAGE_HOURLY, *ACTIVITY, "energy_uj", "energy_unknown_us")
    line = asked(known, usage)
    accounts = before.accounts_gpu_us
    assert line.accounts_gpu_us == accounts
    assert line.memory_mib_s == before.memory_mib_s
    assert (line.sm_active_us, line.tensor_active_us) == (None, None)
    assert line.sm_unknown_us == line.tensor_unknown_us == accounts.allocated
    assert line.energy_unknown_us == accounts.allocated + accounts.unallocated


def test_a_figure_of_which_nothing_says_where_it_is_unknown_leaves_the_ledger_out_by_name(known):
    of_an_earlier_version(known.connect(), tables.USAGE_HOURLY, "node_down_us")
    with pytest.raises(UnreadableLedger, match="node_down_us"):
        asked(known, usage)


def test_an_upgraded_accountant_adds_to_its_lake_what_the_earlier_version_lacked(known):
    lake, before = known.connect(), asked(known, usage)
    known.clock.advance(24 * HOUR)
    known.publisher.publish()
    of_an_earlier_version(lake, tables.USAGE_HOURLY, *ACTIVITY)
    of_an_earlier_version(lake, tables.LEDGERS, "teams")
    without(lake, tables.OUTBOXES)
    upgraded = publisher(known)
    assert len(upgraded.publish().days) == 2, "the days are written again, because their rows have more columns"
    assert upgraded.compare() == LakeComparison(2, ())
    assert asked(known, usage) == before
    assert lake.read(tables.OUTBOXES)


def test_rows_of_two_versions_in_one_group_are_added_with_what_is_unknown_of_one(known):
    """An upgraded accountant has written one of two days again."""
    known.clock.advance(24 * HOUR)
    known.publisher.publish()
    whole = asked(known, usage)
    lake = known.connect()
    opened = lake.open(tables.USAGE_HOURLY)
    rows = opened.scan().to_arrow().to_pylist()
    known_here = {"memory_mib_s": 7, "memory_unknown_us": 0}
    half = [{**row, **(dict.fromkeys(known_here) if at % 2 else known_here)} for at, row in enumerate(rows)]
    opened.overwrite(tables.USAGE_HOURLY.of_rows(half))
    line = asked(known, usage)
    of_span = [(at, row) for at, row in enumerate(rows) if row["start_ms"] < SPAN[1]]
    held = sum(row["busy_us"] + row["allocated_idle_us"] + row["allocated_unknown_us"] for at, row in of_span if at % 2)
    assert line.memory_unknown_us == held
    assert 0 < held < whole.accounts_gpu_us.allocated
    assert line.memory_mib_s == 7 * sum(1 for at, _ in of_span if not at % 2)
    assert line.accounts_gpu_us == whole.accounts_gpu_us


@pytest.mark.parametrize("table", [tables.DAYS, tables.ACTS, tables.OUTBOXES], ids=lambda one: one.name)
def test_a_table_that_was_removed_is_not_taken_for_one_of_a_later_version(known, table):
    lake = known.connect()
    lake._catalog.drop_table((namespace_of(lake.ledger), table.name))
    with pytest.raises(LakeRefused):
        publisher(known).publish()
