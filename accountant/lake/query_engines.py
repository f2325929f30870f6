"""Runs SQLGlot queries over the lake's tables on an engine: DuckDB in this process, or Spark or Trino.

Engines only add integers and filter by name. Dividing, pricing and rounding are done in Python, so every engine gives
the same figures.

Spark and Trino read the tables themselves, through a catalog configured there (`GPUTALLY_ENGINE_CATALOG`, default
`lake`). Their packages are not dependencies of gputally; if one is missing, the error says what to install."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Sequence
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
from accountant.lake.iceberg_catalog import PREFIX, Catalogue, described, rows_where
from accountant.lake.tables import ARROW, LEDGERS, TABLES, LakeTable

CATALOG_VARIABLE: Final = "GPUTALLY_ENGINE_CATALOG"
"""Name of the Iceberg catalog in Spark or Trino; default `lake`."""
_BY_NAME: Final = {table.name: table for table in TABLES}
_PLANS: Final = 256
"""Number of cached plans: a page reads a few tables of up to twenty ledgers."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a query needs to read. namespaces: those of its ledgers, at least one; the rows of all are one table. days:
    the first and the last, both inclusive; None: all."""

    namespaces: tuple[str, ...]
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

    def namespaces(self) -> Sequence[str]:
        """The namespaces of all ledgers, each once. Raises LakeUnavailable."""
        ...

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
        self._plans: LRUCache[tuple[str, tuple[date, date] | None], _Plan] = LRUCache(_PLANS)

    def namespaces(self) -> Sequence[str]:
        return self._catalogue.namespaces()

    def query(self, question: exp.Select, bounds: Bounds) -> pa.Table:
        names = sorted({table.name for table in question.find_all(exp.Table)})
        registered: list[str] = []
        with self._lock, self._connection.cursor() as cursor:
            try:
                for name in names:
                    for namespace in bounds.namespaces:
                        self._register(cursor, _BY_NAME[name], namespace, bounds)
                        registered.append(_local_name(namespace, name))
                return cursor.execute(_text(question, "duckdb", bounds, _local_table)).to_arrow_table()
            except duckdb.Error as error:
                raise LakeUnavailable(f"{self._catalogue.place}: {described(error)}") from error
            finally:
                for name in registered:
                    cursor.unregister(name)

    def close(self) -> None:
        self._connection.close()
        self._catalogue.close()

    def _register(self, cursor: duckdb.DuckDBPyConnection, table: LakeTable, namespace: str, bounds: Bounds) -> None:
        found = self._catalogue.open(table, namespace)
        name = _local_name(namespace, table.name)
        scan = found.scan(row_filter=_filter(table, bounds))
        # Cached, because a table version never changes, and planning a month takes longer than reading some of its
        # days.
        version = found.metadata_location, bounds.days
        plan = self._plans.get(version)
        if plan is None:
            tasks = list(scan.plan_files())
            plan = _Plan([task.file.file_path for task in tasks], any(task.delete_files for task in tasks))
            self._plans[version] = plan
        files = plan.files
        if not files:
            cursor.register(name, table.arrow.empty_table())
        elif plan.has_deletes:
            cursor.register(name, scan.to_arrow_batch_reader())
        elif all(_is_local(place) for place in files):
            cursor.read_parquet(
                [_local(place) for place in files], union_by_name=len(found.metadata.schemas) > 1
            ).create_view(name)
        else:
            cursor.register(name, _remote(found, files, table))


def _local_name(namespace: str, table: str) -> str:
    return f"{namespace}.{table}"


def _local_table(namespace: str, table: str) -> exp.Table:
    return exp.Table(this=exp.to_identifier(_local_name(namespace, table), quoted=True))


def _filter(table: LakeTable, bounds: Bounds) -> BooleanExpression:
    return rows_where({}, {"day": bounds.days} if bounds.days is not None and "day" in table.partition else {})


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

    def namespaces(self) -> Sequence[str]:
        catalog = exp.to_identifier(self._catalog, quoted=True).sql(dialect="spark")
        shown = exp.Command(this="SHOW NAMESPACES IN", expression=catalog).sql(dialect="spark")
        try:
            names = [row[0] for row in self._session.sql(shown).collect()]
            return [
                name for name in sorted(names)
                if name.startswith(PREFIX)
                and self._session.catalog.tableExists(f"{self._catalog}.{name}.{LEDGERS.name}")
            ]  # fmt: skip
        except Exception as error:
            raise LakeUnavailable(f"spark: {described(error)}") from error

    def query(self, question: exp.Select, bounds: Bounds) -> pa.Table:
        try:
            found: pa.Table = self._session.sql(_text(question, "spark", bounds, self._table)).toArrow()
        except Exception as error:
            raise LakeUnavailable(f"spark: {described(error)}") from error
        return found

    def close(self) -> None:
        self._session.stop()

    def _table(self, namespace: str, table: str) -> exp.Table:
        return exp.table_(table, db=namespace, catalog=self._catalog)


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

    def namespaces(self) -> Sequence[str]:
        tables = exp.table_("tables", db="information_schema", catalog=self._catalog)
        named = exp.column("table_name").eq(exp.Literal.string(LEDGERS.name))
        try:
            cursor = self._connection.cursor()
            # Trino may name a table twice if the query has a filter by name.
            schemas = exp.select("table_schema").distinct().from_(tables).where(named)
            cursor.execute(schemas.sql(dialect="trino"))
            return sorted(name for (name,) in cursor.fetchall() if name.startswith(PREFIX))
        except Exception as error:
            raise LakeUnavailable(f"trino: {described(error)}") from error

    def query(self, question: exp.Select, bounds: Bounds) -> pa.Table:
        try:
            cursor = self._connection.cursor()
            cursor.execute(_text(question, "trino", bounds, self._table))
            rows = cursor.fetchall()
            names = [column.name for column in cursor.description]
            columns = list(zip(*rows, strict=True)) or [()] * len(names)
        except Exception as error:
            raise LakeUnavailable(f"trino: {described(error)}") from error
        return pa.table(dict(zip(names, map(list, columns), strict=True)))

    def close(self) -> None:
        self._connection.close()

    def _table(self, namespace: str, table: str) -> exp.Table:
        return exp.table_(table, db=namespace, catalog=self._catalog)


def _text(question: exp.Select, dialect: str, bounds: Bounds, table_of: Callable[[str, str], exp.Table]) -> str:
    """The query in an engine's dialect. Several namespaces are read as one table. table_of: the engine's table for a
    namespace and the name of a table."""

    def qualified(node: exp.Expression) -> exp.Expression:
        if not isinstance(node, exp.Table):
            return node
        first, *others = (table_of(namespace, node.name) for namespace in bounds.namespaces)
        if not others:
            return first
        whole: exp.Query = exp.select("*").from_(first)
        for other in others:
            whole = whole.union(exp.select("*").from_(other), distinct=False)
        return whole.subquery(node.name)

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
