"""Every engine reads the same values of an Iceberg table, with every catalog and file store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from tests.fakes.fault_proxy import Fault, FaultProxy
from tests.real.clickhouse import clickhouse_rows, iceberg_table
from tests.real.object_store import ObjectStore
from tests.real.postgres import Postgres
from tests.real.spark import SparkCluster
from tests.real.trino import Trino

pytestmark = pytest.mark.real

ROWS = [
    (1, Decimal("0.000000001"), datetime(2026, 10, 25, 0, 30, 0, 1, UTC)),
    (2**53 + 1, Decimal("12345678901234567890.123456789"), datetime(2026, 10, 25, 1, 30, tzinfo=UTC)),
    (2**63 - 1, Decimal("-1.500000000"), datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)),
]
"""Whole numbers, costs and instants that a float or a local clock would change; the instants lie around the end of
daylight-saving time in Europe and before the epoch."""


def microseconds(at: datetime) -> int:
    """Return microseconds since the epoch."""
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


READ = [(n, cost, microseconds(at)) for n, cost, at in ROWS]
SCHEMA = pa.schema([("n", pa.int64()), ("cost", pa.decimal128(38, 9)), ("moment", pa.timestamp("us", "UTC"))])


@dataclass(frozen=True)
class Lake:
    """A table `lake.usage` with ROWS, and its catalog in the form for Java's engines. store: None for a folder."""

    catalog: str
    table: Table
    jdbc: str
    warehouse: str
    store: ObjectStore | None


@pytest.fixture(params=["sqlite-folder", "sqlite-s3", "postgres-folder", "postgres-s3"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lake]:
    catalog, warehouse = request.param.split("-")
    name = f"lake{uuid.uuid4().hex}"
    if catalog == "sqlite":
        uri, jdbc = f"sqlite:///{tmp_path}/catalog.db", f"jdbc:sqlite:{tmp_path}/catalog.db"
    else:
        server: Postgres = request.getfixturevalue("postgres")
        server.create(name)
        uri, jdbc = server.uri(name), server.jdbc(name) + "?user=postgres"
    store: ObjectStore | None = request.getfixturevalue("object_store") if warehouse == "s3" else None
    place = f"file://{tmp_path}/warehouse" if store is None else store.bucket(name)
    properties = {} if store is None else store.iceberg
    books = SqlCatalog(name, uri=uri, warehouse=place, **properties)
    try:
        yield Lake(name, written(books), jdbc, place, store)
    finally:
        books.close()


def written(catalog: SqlCatalog) -> Table:
    """Write two snapshots, so that readers have to use the newest; together they have ROWS."""
    catalog.create_namespace("lake")
    table = catalog.create_table("lake.usage", SCHEMA)
    for part in (ROWS[:1], ROWS[1:]):
        table.append(pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in part], SCHEMA))
    return table


def test_duckdb_reads_the_files_that_the_plan_names(lake: Lake) -> None:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        if lake.store is None:
            files = [task.file.file_path.removeprefix("file://") for task in lake.table.scan().plan_files()]
            assert len(files) == 2
            connection.read_parquet(files).create_view("usage")
        else:
            connection.register("usage", lake.table.scan().to_arrow_batch_reader())
        found = connection.execute("SELECT n, cost, epoch_us(moment) FROM usage ORDER BY n").fetchall()
    assert found == READ


def test_spark_with_two_workers_reads_the_same(lake: Lake, spark_cluster: SparkCluster) -> None:
    assert spark_cluster.workers == 2
    spark_cluster.add_catalog(lake.catalog, lake.jdbc, lake.warehouse, lake.store.iceberg if lake.store else {})
    found = spark_cluster.rows(f"SELECT n, cost, unix_micros(moment) FROM {lake.catalog}.lake.usage ORDER BY n")
    assert found == READ


def test_clickhouse_reads_the_same(lake: Lake) -> None:
    table = iceberg_table(lake.table.location(), lake.store)
    found = clickhouse_rows(f"SELECT n, cost, toUnixTimestamp64Micro(moment) AS moment FROM {table} ORDER BY n")
    assert [(int(row["n"]), Decimal(row["cost"]), int(row["moment"])) for row in found] == READ


def test_trino_reads_the_same(lake: Lake, trino: Trino) -> None:
    trino.add_catalog(lake.catalog, lake.jdbc, lake.warehouse, lake.store)
    found = trino.rows(f"SELECT n, cost, moment AT TIME ZONE 'UTC' FROM {lake.catalog}.lake.usage ORDER BY n")
    assert [(n, cost, microseconds(at)) for n, cost, at in found] == READ


@pytest.mark.parametrize("fault", Fault)
def test_a_spoilt_upload_loses_and_doubles_nothing(
    fault: Fault, tmp_path: Path, object_store: ObjectStore, store_proxy: FaultProxy
) -> None:
    """A commit whose data upload failed once succeeds, because the S3 client repeats it, or fails as a whole."""
    bucket = object_store.bucket(f"spoilt{uuid.uuid4().hex}")
    uri = f"sqlite:///{tmp_path}/catalog.db"
    books = SqlCatalog("books", uri=uri, warehouse=bucket, **object_store.behind(store_proxy.url).iceberg)
    table = written(books)
    store_proxy.spoil(r"^(PUT|POST) .*/data/", fault)
    row = pa.Table.from_pylist([dict(zip(SCHEMA.names, (7, Decimal(7), ROWS[0][2]), strict=True))], SCHEMA)
    try:
        table.append(row)
        written_now = [7]
    except OSError:
        written_now = []
    assert [kind for _, kind in store_proxy.spoilt] == [fault]
    again = SqlCatalog("books", uri=uri, warehouse=bucket, **object_store.iceberg)
    found = again.load_table("lake.usage").scan().to_arrow()["n"].to_pylist()
    assert sorted(found) == sorted([*written_now, *(n for n, _, _ in ROWS)])
    books.close()
    again.close()
