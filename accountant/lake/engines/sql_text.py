"""Writes a query in the SQL dialect of an engine, and opens what engines that run elsewhere need."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, Final

from sqlglot import exp

from accountant.core.errors import LakeUnavailable
from accountant.lake.engines.protocol import Bounds

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


def sql_text(question: exp.Select, dialect: str, bounds: Bounds, table_of: Callable[[str, str], exp.Table]) -> str:
    """The query in an engine's dialect; texts in it are quoted as the dialect demands. Several namespaces are read as
    one table. table_of: the engine's table for a namespace and the name of a table."""

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
