"""How often a page asks the engine: as often on any ledger, and not twice for the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from accountant.billing.cost_allocation import bills_by_grouping
from accountant.billing.statement_breakdown import DIMENSIONS
from accountant.storage.duckdb_engine import Cursor, Parameters, Row
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.query.group_by_dimensions import coarser_lines
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.bench import pages

SIZES = (pages.Size(nodes=2, minutes=1_500, queues=4), pages.Size(nodes=6, minutes=3 * 1_440 + 100, queues=4))
Site = tuple[TestClient, DuckLedger]
MOST = {"/": 30, "/job/": 36, "/node/": 30}
"""Statements of a page. A question of usage is up to seven: days, hours, quarters, rows and edges each by itself."""


@pytest.fixture(scope="module", params=SIZES, ids=("2 nodes", "6 nodes"))
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("pages")
    pages.prepare(folder, request.param)
    with pages.site(folder, request.param) as (client, ledger, _):
        yield client, ledger


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the engine since."""
    statements: list[str] = []
    run = Cursor.run

    def counted(self: Cursor, sql: str, parameters: Parameters = None, *tables: Any, **named: Any) -> list[Row]:
        statements.append(sql)
        return run(self, sql, parameters, *tables, **named)

    monkeypatch.setattr(Cursor, "run", counted)
    return statements


def test_a_page_asks_no_more_however_large_the_ledger_is(site: Site, asked: list[str]) -> None:
    client, _ = site
    job = re.search(r'href="(/job/[^"]+)"', client.get(f"/jobs?month={pages.MONTH}").text)
    assert job is not None
    for address in ("/", job[1], "/node/bench/node-1?days=2"):
        client.get(address)
        asked.clear()
        assert client.get(address).status_code == 200
        (most,) = (most for begin, most in MOST.items() if re.fullmatch(f"{begin}.*" if begin != "/" else "/", address))
        assert 0 < len(asked) <= most, (address, asked)


@pytest.mark.parametrize("site", SIZES[1:], indirect=True, ids=["6 nodes"])
def test_a_moment_finds_the_holders_of_a_job_once(site: Site, asked: list[str]) -> None:
    _, ledger = site
    start, end = ledger.extent()
    with ledger.moment(start, end) as moment:
        (key, *_) = {pod.key for pod in moment.pods(end - MS_PER_HOUR, end)}
        where: dict[Dimension, tuple[str, ...]] = {
            "cluster": (key.cluster,),
            "namespace": (key.namespace,),
            "job": (key.job,),
        }
        asked.clear()
        moment.extents({key})
        first = len(asked)
        for hours in (1, 2, 3):
            moment.usage(end - hours * MS_PER_HOUR, end, ("team", "user"), where)
    named = [sql for sql in asked if "FROM holder" in sql]
    assert first <= 4
    assert len(named) <= 3, "ids, names and users, once"
    assert not any("holder_class" in sql for sql in asked)


@pytest.mark.parametrize("site", SIZES[1:], indirect=True, ids=["6 nodes"])
@pytest.mark.parametrize(
    ("by", "finer", "where"),
    [
        ((), ("team", "job", "gpu_model"), {}),
        (("team",), ("cluster", "team", "namespace", "job", "gpu_model", "pool"), {}),
        (("gpu_model", "node"), ("node", "gpu", "gpu_model", "hour"), {"node": ("node-0", "node-1")}),
        (("day",), ("day", "team", "user"), {"team": ("team-0",)}),
        (("job",), ("job", "gpu"), {"namespace": ("ns-0", "ns-1", "ns-2")}),
    ],
)
def test_what_is_added_up_is_what_the_engine_says(
    site: Site,
    by: tuple[Dimension, ...],
    finer: tuple[Dimension, ...],
    where: dict[Dimension, tuple[str, ...]],
) -> None:
    """Also at an odd second, where rows are cut, and in every way a question may be told apart."""
    _, ledger = site
    end = ledger.extent()[1] - 7_001
    for start in (end - 1_800_000, end - MS_PER_DAY - 1):
        alone = ledger.usage(start, end, by, where)
        assert coarser_lines(ledger.usage(start, end, finer, where), by) == alone
        with ledger.moment(start, end) as moment:
            assert moment.usage(start, end, finer, where) == ledger.usage(start, end, finer, where)
            assert moment.usage(start, end, by, where) == alone
            assert moment.usage(start, end, tuple(reversed(by)), where) == ledger.usage(
                start, end, tuple(reversed(by)), where
            )


@pytest.mark.parametrize("site", SIZES[1:], indirect=True, ids=["6 nodes"])
@pytest.mark.parametrize("by", [("job", "team", "user"), ("job", "queue", "namespace", "pod"), ("job", "container")])
def test_holders_that_are_looked_up_by_name_are_those_that_the_engine_tells_apart(
    site: Site, by: tuple[Dimension, ...]
) -> None:
    _, ledger = site
    start, end = ledger.extent()[0] + 1_234, ledger.extent()[1] - 61_001
    everybody = ledger.usage(start, end, by)
    jobs = sorted({line.key["job"] for line in everybody})
    for chosen in (jobs[:1], jobs[-2:], ["Job/nobody"]):
        assert ledger.usage(start, end, by, {"job": chosen}) == [
            line for line in everybody if line.key["job"] in chosen
        ]


@pytest.mark.parametrize("site", SIZES[1:], indirect=True, ids=["6 nodes"])
def test_every_cut_that_is_found_at_once_is_the_cut_found_alone(site: Site) -> None:
    """Also where the span begins and ends at odd instants."""
    _, ledger = site
    start, end = ledger.extent()[0] + 1_234, ledger.extent()[1] - 61_001
    cuts = tuple(DIMENSIONS.values())
    with ledger.moment(start, end) as moment:
        together = bills_by_grouping(moment, None, start, end, cuts, "Asia/Kathmandu")
        for by, found in zip(cuts, together, strict=True):
            (alone,) = bills_by_grouping(moment, None, start, end, (by,), "Asia/Kathmandu")
            assert found.charges == alone.charges
            assert list(found.groups.keys) == list(alone.groups.keys)
            assert {line: [c.tolist() for c in columns] for line, columns in found.groups.by_line.items()} == {
                line: [c.tolist() for c in columns] for line, columns in alone.groups.by_line.items()
            }
