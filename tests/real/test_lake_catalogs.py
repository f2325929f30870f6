"""A lake whose catalog is a REST server, AWS Glue or a Hive metastore gives the same answers and accepts the same
commits as one with a SQL catalog."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from accountant.core.settings import Lake, LakeCatalog
from accountant.lake import iceberg_catalog
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import BATCH
from accountant.lake.tables import DAYS
from tests.fakes.fault_proxy import Fault, fault_proxy
from tests.lake.comparison_queries import HOUR, PublishedLedger, differences, published
from tests.lake.concurrent_writers import write_side_by_side
from tests.real.object_store import ObjectStore
from tests.real.rest_catalog import RestCatalog

pytestmark = pytest.mark.real


@dataclass(frozen=True)
class Place:
    """The location of a lake."""

    warehouse: str
    catalog: LakeCatalog
    secrets: Path


@pytest.fixture(scope="module")
def secrets(object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return object_store.write_secrets(tmp_path_factory.mktemp("secrets") / "lake.yaml")


@pytest.fixture(params=["rest", "glue", "hive"])
def place(request: pytest.FixtureRequest, object_store: ObjectStore, secrets: Path, tmp_path: Path) -> Place:
    kind, name = request.param, f"lake{uuid.uuid4().hex}"
    if kind == "rest":
        server: RestCatalog = request.getfixturevalue("rest_catalog")
        return Place(server.warehouse, LakeCatalog(type="rest", uri=server.url), secrets)
    if kind == "glue":
        properties: dict[str, str] = request.getfixturevalue("glue")
        return Place(object_store.bucket(name), LakeCatalog(type="glue", properties=properties), secrets)
    address: str = request.getfixturevalue("hive_metastore")
    catalog = LakeCatalog(type="hive", uri=address, properties={"hive.hive2-compatible": "true"})
    (tmp_path / "warehouse").mkdir()
    return Place(f"file://{tmp_path}/warehouse", catalog, secrets)


def test_the_lake_answers_as_the_ledger_does(place: Place) -> None:
    name = f"prod-{uuid.uuid4().hex}"
    with published(place.warehouse, place.catalog, secrets=place.secrets, name=name) as known:
        engine = DuckDbEngine(known.connect())
        assert differences(known, engine) == []
        engine.close()
        assert known.publisher.compare().differences == ()
        known.clock.advance(HOUR)
        known.publisher.publish()
        assert known.publisher.compare().differences == ()
        assert len(known.connect().read(DAYS)) == 1


def test_writers_side_by_side_lose_and_double_nothing(place: Place) -> None:
    lake = Lake(warehouse=place.warehouse, catalog=place.catalog, secrets=place.secrets)
    found = write_side_by_side(lake, 4, 2)
    assert found == [(f"ledger-{number}", 2) for number in range(4)]


def commits(known: PublishedLedger) -> set[str]:
    """Return the ids of all commits to the control totals; a commit that replaces rows leaves several snapshots."""
    snapshots = known.connect().open(DAYS).snapshots()
    return {snapshot.summary[BATCH] for snapshot in snapshots if snapshot.summary is not None}


@pytest.mark.parametrize("fault", Fault)
def test_a_commit_whose_answer_a_rest_catalog_owes_is_made_once(
    fault: Fault, rest_catalog: RestCatalog, secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceberg_catalog, "ANSWER_S", 15.0)  # the request that hangs takes all of it
    with fault_proxy(rest_catalog.url) as proxy:
        catalog = LakeCatalog(type="rest", uri=proxy.url)
        name = f"prod-{uuid.uuid4().hex}"
        with published(rest_catalog.warehouse, catalog, secrets=secrets, name=name) as known:
            before = len(commits(known))
            known.clock.advance(HOUR)
            proxy.spoil("^POST .*/tables/days", fault)
            known.publisher.publish()
            assert [kind for _, kind in proxy.spoilt] == [fault]
            assert len(commits(known)) == before + 1
            assert known.publisher.compare().differences == ()
            (total,) = known.connect().read(DAYS)
            assert total["end_ms"] == known.clock.wall_ms()
