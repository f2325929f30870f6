"""A ledger whose content this version cannot read is named; the figures of the others are there as before."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.testclient import TestClient

from accountant.core.errors import LakeUnavailable
from accountant.core.settings import Settings
from accountant.fleet.fleet_ledgers import Fleet
from accountant.fleet.fleet_server import FleetService
from accountant.lake import tables
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue
from gputally.base.clock import VirtualClock
from tests.lake.comparison_queries import SPAN, PublishedLedger, lost, overwrite, published
from tests.plugin_cases import registered

Row = dict[str, Any]
WITHIN = "start=2026-10-01T00:00:00Z&end=2026-10-01T05:00:00Z"
WINDOW = "window=2026-10-01T00:00:00Z,2026-10-01T05:00:00Z&aggregate=cluster"
PAGES = ("/fleet", "/fleet/jobs?start=2026-10-01&end=2026-11-01", "/fleet/nodes?start=1d")


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[PublishedLedger, PublishedLedger]]:
    with ExitStack() as stack:
        north = stack.enter_context(published(name="north"))
        assert north.settings.lake is not None
        yield north, stack.enter_context(published(north.settings.lake.warehouse, name="south"))


def _with(**changes: object) -> Callable[[Row], Row]:
    return lambda row: {**row, **changes}


def _policy_of_tomorrow(row: Row) -> Row:
    return {**row, "policy": json.dumps({**json.loads(row["policy"]), "tomorrow": 1})}


def _price_book_of_tomorrow(row: Row) -> Row:
    return {**row, "content": json.dumps({"tomorrow": 1})} if row["kind"] == "prices" else row


@dataclass(frozen=True)
class Fault:
    """table: where the content is that cannot be read. shown_on: the address that needs it."""

    table: tables.LakeTable
    change: Callable[[Row], Row]
    shown_on: str


FAULTS = {
    "a time zone that is not known here": Fault(tables.LEDGERS, _with(timezone="Mars/Olympus"), "/fleet"),
    "a status in another form": Fault(tables.LEDGERS, _with(clusters="[]"), "/fleet/nodes?start=1d"),
    "a key of a policy": Fault(tables.POLICIES, _policy_of_tomorrow, "/fleet/nodes?start=1d"),
    "a statement in another form": Fault(tables.STATEMENTS, _with(canonical='{"schema": 99}'), "/fleet"),
    "a price book in another form": Fault(tables.ACTS, _price_book_of_tomorrow, f"/v1/cost?by=team&{WITHIN}"),
}


@contextmanager
def changed(lake: Catalogue, fault: Fault) -> Iterator[None]:
    """The rows of south, changed, and published by a later version."""
    before = {table: lake.read(table) for table in {fault.table.name: fault.table, "ledgers": tables.LEDGERS}.values()}
    for table, rows in before.items():
        of_version = [{**row, "version": "9.9.9"} if table is tables.LEDGERS else row for row in rows]
        new = [fault.change(row) if table is fault.table else row for row in of_version]
        overwrite(lake, table, table.of_rows(new), {})
    try:
        yield
    finally:
        for table, rows in before.items():
            overwrite(lake, table, table.of_rows(rows), {})


@contextmanager
def served(both: tuple[PublishedLedger, PublishedLedger]) -> Iterator[TestClient]:
    with closing(DuckDbEngine(both[0].connect())) as engine:
        service = FleetService(Settings(auth="off"), Fleet(engine), VirtualClock(SPAN[1] + 60_000))
        yield TestClient(service.app, base_url="http://127.0.0.1")


@pytest.mark.parametrize("name", FAULTS)
def test_one_ledger_that_cannot_be_read_is_named_and_the_others_are_shown(both, name):
    fault = FAULTS[name]
    with served(both) as client:
        alone = client.get(f"/v1/usage?by=team&ledger=north&{WITHIN}").json()
        whole = client.get(f"/opencost/allocation?{WINDOW}").json()
    with changed(both[1].connect(), fault), served(both) as client:
        for page in PAGES:
            answer = client.get(page)
            assert answer.status_code == 200, (page, answer.text)
            assert "/clusters/north/" in answer.text, page
            assert 'href="/clusters/south' in answer.text, "the menu leads to where the fault is told"
        named = client.get(fault.shown_on)
        assert named.status_code == 200
        assert "south" in named.text
        assert "9.9.9" in named.text
        assert client.get(f"/v1/usage?by=team&ledger=north&{WITHIN}").json() == alone
        assert client.get(f"/clusters/north/v1/usage?by=team&{WITHIN}").status_code == 200
        assert client.get("/v1/ledgers").status_code == 200
        together = client.get(f"/opencost/allocation?{WINDOW}").json()  # its clients show no warnings
        if together["code"] == 200:
            assert together["data"] == whole["data"]
        else:
            assert together["code"] == 503
            assert "south" in together["message"]
        assert client.get(f"/clusters/north/opencost/allocation?{WINDOW}").status_code == 200
        if registered("exports.csv"):
            table = client.get("/v1/report?month=2026-10&format=csv")  # complete, or refused by name
            if table.status_code == 200:
                assert {row["ledger"] for row in csv.DictReader(io.StringIO(table.text))} == {"north", "south"}
            else:
                assert table.status_code == 503
                assert "south" in table.json()["detail"]
            only = client.get("/v1/report?month=2026-10&format=csv&ledger=north")
            assert {row["ledger"] for row in csv.DictReader(io.StringIO(only.text))} == {"north"}


def test_the_pages_of_a_ledger_that_cannot_be_read_say_why(both):
    with changed(both[1].connect(), FAULTS["a time zone that is not known here"]), served(both) as client:
        answer = client.get("/clusters/south/v1/usage")
        assert answer.status_code == 503
        assert "9.9.9" in answer.json()["detail"]
    with changed(both[1].connect(), FAULTS["a key of a policy"]), served(both) as client:
        assert client.get("/clusters/south/v1/policy").status_code == 503


LOST = {
    "all of its tables": (),
    "the metadata of its status": ("ledgers", "metadata"),
    "the rows of its status": ("ledgers", "data"),
    "its journal": ("acts",),
}


@pytest.mark.parametrize("parts", LOST.values(), ids=[*LOST])
def test_one_ledger_that_cannot_be_opened_stops_no_page_of_the_others(both, parts):
    with closing(DuckDbEngine(both[0].connect())) as engine:
        service = FleetService(Settings(auth="off"), Fleet(engine), VirtualClock(SPAN[1] + 60_000))
        client = TestClient(service.app, base_url="http://127.0.0.1")
        before = client.get(f"/v1/usage?by=team&ledger=north&{WITHIN}").json()
        both[0].clock.advance(60_000)
        both[0].publisher.publish()
        both[1].clock.advance(60_000)
        both[1].publisher.publish()
        with lost(both[1], *parts):
            service.read_lake()
            for page in PAGES:
                answer = client.get(page)
                assert answer.status_code == 200, (page, answer.text)
                assert "/clusters/north/" in answer.text, page
            assert client.get(f"/v1/usage?by=team&ledger=north&{WITHIN}").json() == before
            assert client.get("/clusters/north/").status_code == 200
            assert client.get("/clusters/south/v1/usage").status_code == 503
            metrics = client.get("/metrics").text.splitlines()
            assert 'gputally_fleet_ledger_readable{ledger="south"} 0.0' in metrics
            assert 'gputally_fleet_ledger_readable{ledger="north"} 1.0' in metrics
            (north, south) = client.get("/v1/ledgers").json()
            assert north["until_ms"] == both[0].clock.wall_ms()
            assert south["fault"]
        service.read_lake()
        assert [one["fault"] for one in client.get("/v1/ledgers").json()] == [None, None]
        assert client.get("/clusters/south/").status_code == 200


def test_tables_that_are_lost_between_two_refreshes_leave_their_ledger_out_of_an_answer(both):
    with served(both) as client:
        alone = client.get(f"/v1/usage?by=team&ledger=north&{WITHIN}").json()
        with lost(both[1], "usage_hourly"):
            found = client.get(f"/v1/usage?by=team&{WITHIN}")
            assert found.status_code == 200, found.text
            assert found.json()["lines"] == alone["lines"]
            assert "south" in found.json()["note"]


def test_a_lake_of_which_no_ledger_can_be_opened_keeps_the_pages_that_there_are(both):
    with closing(DuckDbEngine(both[0].connect())) as engine:
        service = FleetService(Settings(auth="off"), Fleet(engine), VirtualClock(SPAN[1] + 60_000))
        client = TestClient(service.app, base_url="http://127.0.0.1")
        with lost(both[0]), lost(both[1]), pytest.raises(LakeUnavailable):
            service.read_lake()
        assert [one["fault"] for one in client.get("/v1/ledgers").json()] == [None, None]
