"""Writes SQL in which a table of several ledgers is one relation, for analysts on an engine of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote, urlparse

from pyiceberg.table import Table
from sqlglot import exp

from accountant.core.errors import LakeUnavailable
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.tables import SQL_TYPE, LakeTable

CLICKHOUSE: Final = "clickhouse"
"""The dialect in which a table is a folder and a version, not a name in a catalog."""


def union_of_ledgers(
    catalogue: Catalogue, namespaces: Sequence[str], table: LakeTable, dialect: str, catalog: str
) -> str:
    """A query for the rows of a table of several ledgers, which all have it. It names every column, because ledgers of
    earlier versions lack some; these are null. Raises LakeUnavailable.

    dialect: a dialect that SQLGlot knows.
    catalog: the name of the lake's catalog in the engine."""
    selects = []
    for namespace in namespaces:
        found = catalogue.open(table, namespace)
        there = set(found.schema().column_names)
        columns = [
            exp.column(column.name) if column.name in there
            else exp.cast(exp.null(), SQL_TYPE[column.type]).as_(column.name)
            for column in table.columns
        ]  # fmt: skip
        select = exp.select(*columns).sql(dialect=dialect, identify=True)
        if dialect == CLICKHOUSE:
            place = _present_version(found)
        else:
            place = exp.table_(table.name, db=namespace, catalog=catalog).sql(dialect=dialect, identify=True)
        selects.append(f"{select}\nFROM {place}")
    if not selects:
        raise LakeUnavailable(f"{catalogue.place}: no ledger has published the table {table.name} there")
    return "\nUNION ALL\n".join(selects)


def _present_version(table: Table) -> str:
    """ClickHouse's function for the present version of a table."""
    folder, _, version = table.metadata_location.rpartition("/metadata/")
    if urlparse(folder).scheme not in {"", "file"}:
        raise LakeUnavailable(
            f"{folder}: SQL for ClickHouse can be written for a lake in a folder only, because for an object store it "
            "contains credentials: see docs/lake.md"
        )
    path = unquote(urlparse(folder).path) if folder.startswith("file:") else folder
    shown = exp.Literal.string(path).sql(dialect=CLICKHOUSE)
    file = exp.Literal.string(f"metadata/{version}").sql(dialect=CLICKHOUSE)
    return f"icebergLocal({shown}, SETTINGS iceberg_metadata_file_path = {file})"
