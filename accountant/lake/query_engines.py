"""Runs SQLGlot queries over the lake's tables on an engine: DuckDB in this process, or Spark or Trino.

Engines only add integers and filter by name. Dividing, pricing and rounding are done in Python, so every engine gives
the same figures.

Spark and Trino read the tables themselves, through a catalog configured there (`GPUTALLY_ENGINE_CATALOG`, default
`lake`). Their packages are not dependencies of gputally; if one is missing, the error says what to install."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlparse

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from cachetools import LRUCache
from pyiceberg.expressions import BooleanExpression
from pyiceberg.table import Table
from sqlglot import exp

from accountant.core.errors import LakeUnavailable
from accountant.core.settings import Lake
from accountant.lake.iceberg_catalog import NAMESPACE, Catalogue, described, rows_where
from accountant.lake.tables import ARROW, TABLES, LakeTable

CATALOG_VARIABLE: Final = "GPUTALLY_ENGINE_CATALOG"
"""Name of the Iceberg catalog in Spark or Trino; default `lake`."""
_BY_NAME: Final = {table.name: table for table in TABLES}
_PLANS: Final = 64
"""Number of cached plans: a query reads at most three tables, of up to twenty ledgers in turn."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The partitions that a query needs. ledgers: their names; empty: all. days: the first and the last, both
    inclusive; None: all."""

    ledgers: tuple[str, ...]
    days: tuple[date, date] | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The files of a table version that a query needs. has_deletes: whether rows of them are marked as deleted in other
    files."""

    files: Sequence[str]
    has_deletes: bool


class Engine(Protocol):
    """A query engine that can read the lake. name: its name in the option --engine."""

    name: str

    def query(self, question: exp.Select, bounds: Bounds) -> pa.Table:
        """The rows of the answer, in any order. bounds: the partitions that hold all rows that the query selects.
        Raises LakeUnavailable."""
        ...

    def close(self) -> None: ...


class DuckDbEngine:
    """DuckDB in this process. PyIceberg determines which files a query needs, DuckDB reads them."""

    name = "duckdb"

    def __init__(self, catalogue: Catalogue, memory_limit: str = "400MB", threads: int | None = None) -> None:
        self._catalogue = catalogue
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": memory_limit, "autoinstall_known_extensions": False, "autoload_known_extensions": False,
            "enable_external_file_cache": False,
        }  # fmt: skip
        if threads is not None:
            config["threads"] = threads
        self._connection = duckdb.connect(config=config)
        self._lock = threading.Lock()
        self._plans: LRUCache[tuple[str, Bounds], _Plan] = LRUCache(_PLANS)

    def query(self, question: exp.Select, bounds: Bounds) -> pa.Table:
        names = sorted({table.name for table in question.find_all(exp.Table)})
        with self._lock, self._connection.cursor() as cursor:
            try:
                for name in names:
                    self._register(cursor, _BY_NAME[name], bounds)
                return cursor.execute(question.sql(dialect="duckdb")).to_arrow_table()
            except duckdb.Error as error:
                raise LakeUnavailable(f"{self._catalogue.place}: {described(error)}") from error
            finally:
                for name in names:
                    cursor.unregister(name)

    def close(self) -> None:
        self._connection.close()
        self._catalogue.close()

    def _register(self, cursor: duckdb.DuckDBPyConnection, table: LakeTable, bounds: Bounds) -> None:
        found = self._catalogue.open(table)
        scan = found.scan(row_filter=_filter(table, bounds))
        # Cached, because a table version never changes, and planning a month takes longer than reading some of its
        # days.
        version = found.metadata_location, bounds
        plan = self._plans.get(version)
        if plan is None:
            tasks = list(scan.plan_files())
            plan = _Plan([task.file.file_path for task in tasks], any(task.delete_files for task in tasks))
            self._plans[version] = plan
        files = plan.files
        if not files:
            cursor.register(table.name, table.arrow.empty_table())
        elif plan.has_deletes:
            cursor.register(table.name, scan.to_arrow_batch_reader())
        elif all(_is_local(place) for place in files):
            cursor.read_parquet(
                [_local(place) for place in files], union_by_name=len(found.metadata.schemas) > 1
            ).create_view(table.name)
        else:
            cursor.register(table.name, _remote(found, files, table))


def _filter(table: LakeTable, bounds: Bounds) -> BooleanExpression:
    by_day = bounds.days is not None and "day" in table.partition
    ledgers = {"ledger": tuple(bounds.ledgers)} if bounds.ledgers else {}
    return rows_where(ledgers, {"day": bounds.days} if by_day and bounds.days is not None else {})


def _is_local(place: str) -> bool:
    return urlparse(place).scheme in {"", "file"}


def _local(place: str) -> str:
    return str(Path(unquote(urlparse(place).path) if place.startswith("file:") else place))


def _remote(table: Table, files: Sequence[str], lake_table: LakeTable) -> ds.Dataset:
    """Files of an object store, read through PyIceberg's file system."""
    io: Any = table.io
    scheme, netloc, _ = io.parse_location(files[0], io.properties)
    paths = [io.parse_location(place, io.properties)[2] for place in files]
    schema = pa.schema([(column.name, ARROW[column.type]) for column in lake_table.columns])
    return ds.dataset(paths, schema=schema, format="parquet", filesystem=io.fs_by_scheme(scheme, netloc))


class SparkEngine:
    """A Spark session: on a cluster (`spark://…`), by Spark Connect (`sc://…`), or in this process (`local[2]`)."""

    name = "spark"

    def __init__(self, session: Any, catalog: str) -> None:
        self._session = session
        self._catalog = catalog

    @classmethod
    def connect(cls, url: str) -> SparkEngine:
        sql = _client("pyspark.sql", "pyspark")
        builder = sql.SparkSession.builder.appName("gputally")
        try:
            if url.startswith("sc://"):
                session = builder.remote(url).getOrCreate()
            else:
                session = (builder.master(url) if url else builder).getOrCreate()
        except Exception as error:
            raise LakeUnavailable(f"spark {url}: {described(error)}") from error
        return cls(session, os.environ.get(CATALOG_VARIABLE, "lake"))

    def query(self, question: exp.Select, bounds: Bounds) -> pa.Table:  # noqa: ARG002 - the question has its own bounds
        try:
            found: pa.Table = self._session.sql(_text(question, "spark", self._catalog)).toArrow()
        except Exception as error:
            raise LakeUnavailable(f"spark: {described(error)}") from error
        return found

    def close(self) -> None:
        self._session.stop()


class TrinoEngine:
    """A Trino coordinator, `http(s)://user@host:port`; with a password `https://user:password@host:port`."""

    name = "trino"

    def __init__(self, connection: Any, catalog: str) -> None:
        self._connection = connection
        self._catalog = catalog

    @classmethod
    def connect(cls, url: str) -> TrinoEngine:
        dbapi = _client("trino.dbapi", "trino")
        at = urlparse(url)
        user = unquote(at.username or "gputally")
        basic = _client("trino.auth", "trino").BasicAuthentication
        connection = dbapi.connect(
            host=at.hostname or "127.0.0.1",
            port=at.port or (443 if at.scheme == "https" else 8080),
            user=user,
            http_scheme=at.scheme or "http",
            auth=basic(user, unquote(at.password)) if at.password else None,
        )
        return cls(connection, os.environ.get(CATALOG_VARIABLE, "lake"))

    def query(self, question: exp.Select, bounds: Bounds) -> pa.Table:  # noqa: ARG002 - the question has its own bounds
        try:
            cursor = self._connection.cursor()
            cursor.execute(_text(question, "trino", self._catalog))
            rows = cursor.fetchall()
            names = [column.name for column in cursor.description]
            columns = list(zip(*rows, strict=True)) or [()] * len(names)
        except Exception as error:
            raise LakeUnavailable(f"trino: {described(error)}") from error
        return pa.table(dict(zip(names, map(list, columns), strict=True)))

    def close(self) -> None:
        self._connection.close()


def _text(question: exp.Select, dialect: str, catalog: str) -> str:
    def qualified(node: exp.Expression) -> exp.Expression:
        return exp.table_(node.name, db=NAMESPACE, catalog=catalog) if isinstance(node, exp.Table) else node

    return question.transform(qualified).sql(dialect=dialect)


def _client(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise LakeUnavailable(f"the package {package} is not installed: run pip install {package}") from error


def open_engine(name: str, lake: Lake, url: str = "") -> Engine:
    """The engine of that name over a lake. url: the address of a remote engine, in the form that its class states.
    Raises LakeUnavailable."""
    if name == "duckdb":
        return DuckDbEngine(Catalogue.connect(lake))
    if name == "spark":
        return SparkEngine.connect(url)
    return TrinoEngine.connect(url)
