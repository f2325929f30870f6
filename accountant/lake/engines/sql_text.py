"""Writes a query in the SQL dialect of an engine, and opens what engines that run elsewhere need."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
from sqlglot import exp

from accountant.core.errors import LakeUnavailable
from accountant.lake.tables import BY_NAME, SQL_TYPE

CATALOG_VARIABLE: Final = "GPUTALLY_ENGINE_CATALOG"
"""Name of the Iceberg catalog in an engine that runs elsewhere; default `lake`."""


def with_parameters(question: exp.Select) -> tuple[exp.Select, dict[str, str]]:
    """The query with a parameter in place of each text, and the texts by parameter. An engine whose client binds
    parameters gets the texts beside the SQL, where nothing can read a part of them as SQL."""
    names: dict[str, str] = {}

    def taken(node: exp.Expression) -> exp.Expression:
        if not (isinstance(node, exp.Literal) and node.is_string):
            return node
        return exp.Placeholder(this=names.setdefault(node.name, f"p{len(names)}"))

    asked = question.transform(taken)
    assert isinstance(asked, exp.Select)
    return asked, {name: text for text, name in names.items()}


def sql_text(question: exp.Select, dialect: str, table_of: Callable[[str], exp.Table]) -> str:
    """The query in an engine's dialect. Texts are quoted as the dialect demands, and so are all names, because some
    dialects reserve one of them. table_of: the engine's table for the name of a table."""
    tables = question.transform(lambda node: table_of(node.name) if isinstance(node, exp.Table) else node)
    return tables.sql(dialect=dialect, identify=True)


def with_unknown_columns(run: Callable[[exp.Select], pa.Table], question: exp.Select) -> pa.Table:
    """The answer of an engine that refuses queries for columns which a table does not have: these are null, as an
    earlier version did not publish them. Only a query that was refused costs further ones.

    run: answers a query with the columns that there are. Raises LakeUnavailable."""
    try:
        return run(question)
    except LakeUnavailable:
        lacking = {name: _lacking(run, name) for name in {table.name for table in question.find_all(exp.Table)}}
        if not any(lacking.values()):
            raise

    def filled(node: exp.Expression) -> exp.Expression:
        if not (isinstance(node, exp.Table) and lacking.get(node.name)):
            return node
        return exp.select("*", *lacking[node.name]).from_(exp.table_(node.name)).subquery(node.name)

    whole = question.transform(filled)
    assert isinstance(whole, exp.Select)
    return run(whole)


def _lacking(run: Callable[[exp.Select], pa.Table], table: str) -> list[exp.Expr]:
    """Nulls under the names of the columns that a table lacks."""
    # Trino shows names in small letters.
    there = {name.casefold() for name in run(exp.select("*").from_(table).limit(0)).column_names}
    return [
        exp.cast(exp.null(), SQL_TYPE[column.type]).as_(column.name, quoted=True)
        for column in BY_NAME[table].columns if column.name.casefold() not in there
    ]  # fmt: skip


def engine_catalog() -> str:
    """The name of the lake's catalog in an engine that has catalogs of its own."""
    return os.environ.get(CATALOG_VARIABLE, "lake")


def client_library(module: str, package: str) -> Any:
    """The client of an engine, which is no dependency of gputally. Raises LakeUnavailable, which says what to
    install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise LakeUnavailable(f"the package {package} is not installed: run pip install {package}") from error
