"""Runs SQLGlot queries on a query engine (DuckDB here, others in remote_query_engines) over the lake's tables.

Engines only add integers and filter by name. Dividing, pricing and rounding are done in Python, so every engine gives
the same figures."""

from __future__ import annotations

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
from accountant.lake.catalog import Catalogue, described, rows_where
from accountant.lake.tables import ARROW, TABLES, LakeTable

_BY_NAME: Final = {table.name: table for table in TABLES}
_PLANS: Final = 64
"""Number of cached plans: a query reads at most three tables, of up to twenty ledgers in turn."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The partitions that a query concerns. days: first and last, both inclusive; None: all."""

    ledgers: tuple[str, ...]
    days: tuple[date, date] | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The files of a table version that a query needs."""

    files: Sequence[str]
    has_deletes: bool


class Engine(Protocol):
    """name: as on the command line."""

    name: str

    def query(self, question: exp.Select, bounds: Bounds) -> pa.Table:
        """The rows of the answer, in any order. Raises LakeUnavailable."""
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


def open_engine(name: str, lake: Lake, url: str = "") -> Engine:
    """The engine of that name over a lake. url: address of a remote engine. Raises LakeUnavailable."""
    if name == "duckdb":
        return DuckDbEngine(Catalogue.connect(lake))
    from accountant.lake import remote_query_engines

    return remote_query_engines.connect(name, lake, url)
