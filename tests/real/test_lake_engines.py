"""Every engine answers every query of the lake as the ledger does, with every catalog and file store."""

from __future__ import annotations

import subprocess
import sys
import uuid
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import yaml

from accountant.core.errors import LakeUnavailable
from accountant.core.settings import Lake, LakeCatalog
from accountant.fleet.fleet_ledgers import load_lake
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.tables import DAYS, TABLES
from tests.deadlines import until
from tests.fakes.fault_proxy import Fault, FaultProxy
from tests.lake.comparison_queries import HOUR, differences, published
from tests.lake.concurrent_writers import write_once, write_side_by_side
from tests.real.object_store import ObjectStore
from tests.real.postgres import Postgres

pytestmark = pytest.mark.real
LASTING = (Fault.REFUSED, Fault.HANGS, Fault.ANSWER_LOST)
"""One fault of each kind: answered, not answered, carried out."""
STEPS = (r"/data/.*\.parquet", r"/metadata/[^/]*-m\d+\.avro", r"/metadata/snap-", r"/metadata/[^/]*\.metadata\.json")


def test_postgresql_and_an_object_store(postgres: Postgres, object_store: ObjectStore, tmp_path: Path) -> None:
    database = f"lake{uuid.uuid4().hex}"
    postgres.create(database)
    secrets = object_store.write_secrets(tmp_path / "lake.yaml")
    catalog = LakeCatalog(uri=postgres.uri(database))
    with ExitStack() as stack:
        known = stack.enter_context(published(object_store.bucket(database), catalog, secrets=secrets))
        engine = DuckDbEngine(known.connect())
        stack.callback(engine.close)
        assert differences(known, engine) == []
        assert known.publisher.compare().differences == ()


def test_eight_writers_on_postgresql_lose_and_double_nothing(postgres: Postgres, tmp_path: Path) -> None:
    database = f"lake{uuid.uuid4().hex}"
    postgres.create(database)
    lake = Lake(warehouse=f"file://{tmp_path}", catalog=LakeCatalog(uri=postgres.uri(database)))
    assert write_side_by_side(lake, 8, 3) == sorted((f"ledger-{number}", 3) for number in range(8))


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.ANSWER_LOST], ids=["not carried out", "carried out"])
def test_a_writer_killed_at_any_step_leaves_the_rows_before_it(
    fault: Fault, object_store: ObjectStore, store_proxy: FaultProxy, tmp_path: Path
) -> None:
    """The writer process is killed while it repeats the upload of a step. The next writer replaces the rows once."""
    place = {"warehouse": object_store.bucket(f"killed{uuid.uuid4().hex}")}
    lakes = []
    for name, store in (("direct", object_store), ("spoilt", object_store.behind(store_proxy.url))):
        secrets = store.write_secrets(tmp_path / f"{name}-secrets.yaml")
        settings = {**place, "catalog": {"uri": f"sqlite:///{tmp_path}/catalog.db"}, "secrets": str(secrets)}
        lakes.append(tmp_path / f"{name}.yaml")
        lakes[-1].write_text(yaml.safe_dump(settings))
    direct, spoilt = load_lake(str(lakes[0])).model_copy(update={"ledger": "prod"}), lakes[1]

    def held() -> list[int]:
        with closing(Catalogue.connect(direct)) as found:
            return [row["rows"] for row in found.read(DAYS)]

    write_once(direct, "prod", 0)
    for number, step in enumerate(STEPS, 1):
        before = len(store_proxy.spoilt)
        with store_proxy.spoiling(rf"^(PUT|POST) .*/days{step}", fault, 1_000):
            writer = subprocess.Popen(
                [sys.executable, "-m", "tests.lake.concurrent_writers", str(spoilt), "prod", str(number)]
            )
            until(lambda before=before: len(store_proxy.spoilt) > before, f"it never comes to {step}")
            writer.kill()
            writer.wait()
        assert held() == [number - 1], step
        write_once(direct, "prod", number)
        assert held() == [number], step


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        *(pytest.param(fault, 1, id=f"{fault}, once") for fault in Fault),
        *(pytest.param(fault, 1_000, id=f"{fault}, until it is healed") for fault in LASTING),
    ],
)
def test_a_spoilt_request_at_any_step_of_publishing_loses_and_doubles_nothing(
    fault: Fault, times: int, object_store: ObjectStore, store_proxy: FaultProxy, tmp_path: Path
) -> None:
    """At the upload of data and of the metadata to which the catalog then points; a lost connection also at that of a
    manifest and of the manifest list, which are known to be carried out or not only afterwards."""
    secrets = object_store.behind(store_proxy.url).write_secrets(tmp_path / "lake.yaml")
    catalog = LakeCatalog(uri=f"sqlite:///{tmp_path}/catalog.db")
    bucket = object_store.bucket(f"spoilt{uuid.uuid4().hex}")
    with published(bucket, catalog, secrets=secrets) as known:
        for step in STEPS if fault in (Fault.CUT, Fault.ANSWER_LOST) else STEPS[::3]:
            known.clock.advance(HOUR)
            refused = ""
            with store_proxy.spoiling(rf"^(PUT|POST) .*{step}", fault, times):
                try:
                    known.publisher.publish()
                except LakeUnavailable as error:
                    refused = str(error)
            assert times == 1 or fault is Fault.ANSWER_LOST or " was not written: " in refused
            known.publisher.publish()
            assert known.publisher.compare().differences == ()
            for described in TABLES:
                rows = known.connect().read(described)
                keys = [tuple(row[name] for name in described.key) for row in rows]
                assert len(set(keys)) == len(keys), (step, described.name)
            (running,) = [row for row in known.connect().read(DAYS) if not row["sealed"]]
            assert running["end_ms"] == known.clock.wall_ms()
