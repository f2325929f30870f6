"""A fleet over an object store that fails for one of its ledgers, and a ledger that leaves it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from accountant.core.errors import LakeUnavailable
from accountant.core.settings import Lake, LakeCatalog
from accountant.fleet.fleet_ledgers import Fleet, FleetQuery
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue, namespace_of
from tests.fakes.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.lake.comparison_queries import SPAN, PublishedLedger, published
from tests.real.object_store import ObjectStore

pytestmark = pytest.mark.real
SOUTH = "sued/β"
OF_SOUTH = r"gputally_sued_[^/]*"


@dataclass(frozen=True)
class Stored:
    """spoilt: the lake behind the proxy. folder: where the store keeps its objects."""

    north: PublishedLedger
    south: PublishedLedger
    spoilt: Lake
    folder: Path
    proxy: FaultProxy

    @contextmanager
    def fleet(self) -> Iterator[Fleet]:
        with closing(DuckDbEngine(Catalogue.connect(self.spoilt))) as engine:
            yield Fleet(engine)


@pytest.fixture(scope="module")
def stored(object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    place = tmp_path_factory.mktemp("fleet")
    bucket = object_store.bucket(f"fleet{uuid.uuid4().hex}")
    catalog = LakeCatalog(uri=f"sqlite:///{place}/catalog.db")
    own = object_store.write_secrets(place / "own.yaml")
    with fault_proxy(object_store.url) as proxy, ExitStack() as stack:
        secrets = object_store.behind(proxy.url).write_secrets(place / "spoilt.yaml")
        north, south = (
            stack.enter_context(
                published(bucket, catalog, secrets=own, name=name, rows=[(0, 0, seed, 9, False)], seed=seed)
            )
            for seed, name in enumerate(("north", SOUTH))
        )
        spoilt = Lake(warehouse=bucket, catalog=catalog, secrets=secrets)
        yield Stored(north, south, spoilt, object_store.folder / bucket.removeprefix("s3://"), proxy)


def billed(fleet: Fleet, *names: str) -> tuple[int, str]:
    """The time that the fleet bills, and its note."""
    found = fleet.cost(fleet.members(names), FleetQuery(*SPAN, ()))
    return sum(line.gpu_us for line in found.lines), found.note


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.HANGS])
@pytest.mark.parametrize("files", ["metadata", "data"])
def test_a_ledger_whose_files_may_be_listed_and_not_read_is_named_and_the_others_are_counted(
    stored: Stored, fault: Fault, files: str
) -> None:
    with stored.fleet() as fleet:
        both, north = billed(fleet)[0], billed(fleet, "north")[0]
        assert both > north > 0
        with stored.proxy.spoiling(rf"^(GET|HEAD) .*{OF_SOUTH}/[^/]*/{files}/", fault, 100_000):
            found, note = billed(fleet)
        assert found == north
        assert "sued" in note
        assert billed(fleet) == (both, "")


def test_a_ledger_whose_files_cannot_be_removed_is_gone_and_what_is_left_is_named(stored: Stored) -> None:
    def folders() -> set[str]:
        return {path.relative_to(stored.folder).parts[0] for path in stored.folder.rglob("*") if path.is_file()}

    lake = stored.spoilt.model_copy(update={"ledger": SOUTH})
    with stored.fleet() as fleet:
        north = billed(fleet, "north")[0]
        with closing(Catalogue.connect(lake)) as catalogue:
            refusing = stored.proxy.spoiling(r"^(DELETE|POST) ", Fault.REFUSED, 100_000)
            with refusing, pytest.raises(LakeUnavailable) as refused:
                catalogue.retire()
            assert namespace_of(SOUTH) in str(refused.value)
            assert folders() == {"gputally_north", namespace_of(SOUTH)}
            assert billed(fleet) == (north, "")
            stored.south.publisher.repair("ana", "it is back")
            assert billed(fleet)[0] > north
            catalogue.retire()
        assert billed(fleet) == (north, "")
    assert folders() == {"gputally_north"}
