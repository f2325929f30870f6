"""A Trino coordinator, which reads the tables through a catalog that is configured there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow as pa
from sqlglot import exp

from accountant.core.errors import LakeUnavailable
from accountant.lake.engines.sql_text import client_library, engine_catalog, sql_text, with_unknown_columns
from accountant.lake.iceberg_catalog import PREFIX, described
from accountant.lake.tables import LEDGERS


class TrinoEngine:
    """A Trino coordinator, `http(s)://user@host:port`; with a password `https://user:password@host:port`."""

    def __init__(self, connection: Any, catalog: str) -> None:
        self._connection = connection
        self._catalog = catalog

    @classmethod
    def connect(cls, url: str) -> TrinoEngine:
        dbapi = client_library("trino.dbapi", "trino")
        at = urlparse(url)
        user = unquote(at.username or "gputally")
        basic = client_library("trino.auth", "trino").BasicAuthentication
        connection = dbapi.connect(
            host=at.hostname or "127.0.0.1",
            port=at.port or (443 if at.scheme == "https" else 8080),
            user=user,
            http_scheme=at.scheme or "http",
            auth=basic(user, unquote(at.password)) if at.password else None,
        )
        return cls(connection, engine_catalog())

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

    def query(self, question: exp.Select, namespace: str, _days: tuple[date, date] | None = None) -> pa.Table:
        def run(asked: exp.Select) -> pa.Table:
            text = sql_text(asked, "trino", lambda table: exp.table_(table, db=namespace, catalog=self._catalog))
            try:
                cursor = self._connection.cursor()
                cursor.execute(text)
                rows = cursor.fetchall()
                names = [column.name for column in cursor.description]
                columns = list(zip(*rows, strict=True)) or [()] * len(names)
            except Exception as error:
                raise LakeUnavailable(f"trino: {described(error)}") from error
            return pa.table(dict(zip(names, map(list, columns), strict=True)))

        return with_unknown_columns(run, question)

    def close(self) -> None:
        self._connection.close()
