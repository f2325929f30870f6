"""DuckDB in this process: PyIceberg determines which files a query needs, and DuckDB reads them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlparse

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from cachetools import LRUCache
from pyiceberg.table import Table
from sqlglot import exp

from accountant.lake.engines.sql_text import sql_text, with_parameters
from accountant.lake.iceberg_catalog import Catalogue, reachable, rows_where
from accountant.lake.tables import ARROW, BY_NAME, SQL_TYPE, LakeTable

_Days = tuple[date, date] | None
_PLANS: Final = 256
"""Number of cached plans: a page reads a few tables of up to twenty ledgers."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The files of a table version that a query needs. has_deletes: whether rows of them are marked as deleted in other
    files."""

    files: Sequence[str]
    has_deletes: bool


class DuckDbEngine:
    """DuckDB in this process. PyIceberg determines which files a query needs, DuckDB reads them."""

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
        self._plans: LRUCache[tuple[str, _Days], _Plan] = LRUCache(_PLANS)

    def namespaces(self) -> Sequence[str]:
        return self._catalogue.namespaces()

    def query(self, question: exp.Select, namespace: str, days: _Days = None) -> pa.Table:
        names = sorted({table.name for table in question.find_all(exp.Table)})
        registered: list[str] = []
        with self._lock, self._connection.cursor() as cursor, reachable(self._catalogue.place):
            try:
                for name in names:
                    self._register(cursor, BY_NAME[name], namespace, days)
                    registered.append(name)
                asked, values = with_parameters(question)
                return cursor.execute(sql_text(asked, "duckdb", _quoted), values).to_arrow_table()
            finally:
                for name in registered:
                    cursor.unregister(name)

    def close(self) -> None:
        self._connection.close()
        self._catalogue.close()

    def _register(self, cursor: duckdb.DuckDBPyConnection, table: LakeTable, namespace: str, days: _Days) -> None:
        found, name = self._catalogue.open(table, namespace), table.name
        by_day = days is not None and "day" in table.partition
        scan = found.scan(row_filter=rows_where({}, {"day": days} if days is not None and by_day else {}))
        # Cached, because a table version never changes, and planning a month takes longer than reading some of its
        # days.
        version = found.metadata_location, days
        plan = self._plans.get(version)
        if plan is None:
            tasks = list(scan.plan_files())
            plan = _Plan([task.file.file_path for task in tasks], any(task.delete_files for task in tasks))
            self._plans[version] = plan
        files = plan.files
        if not files:
            cursor.register(name, table.arrow.empty_table())
        elif plan.has_deletes:
            cursor.register(name, table.complete(scan.to_arrow_batch_reader()))
        elif all(_is_local(place) for place in files):
            relation = cursor.read_parquet(
                [_local(place) for place in files], union_by_name=len(found.metadata.schemas) > 1
            )
            # Columns that an earlier version did not publish are unknown.
            missing = [column for column in table.columns if column.name not in relation.columns]
            nulls = [f'CAST(NULL AS {SQL_TYPE[column.type]}) AS "{column.name}"' for column in missing]
            (relation.project(", ".join(["*", *nulls])) if nulls else relation).create_view(name)
        else:
            cursor.register(name, _remote(found, files, table))


def _quoted(table: str) -> exp.Table:
    return exp.Table(this=exp.to_identifier(table, quoted=True))


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
