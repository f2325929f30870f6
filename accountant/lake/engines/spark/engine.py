"""A Spark session, which reads the tables through a catalog that is configured there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any, Final

import pyarrow as pa
from sqlglot import exp

from accountant.core.errors import LakeUnavailable
from accountant.lake.engines.sql_text import client_library, engine_catalog, sql_text, with_unknown_columns
from accountant.lake.iceberg_catalog import PREFIX, described
from accountant.lake.tables import LEDGERS

_SUBSTITUTE: Final = "spark.sql.variable.substitute"
"""Setting by which Spark replaces `${env:NAME}` in a query, even inside quotes. Texts are not bound as parameters,
because the parser that Iceberg's extensions put in the place of Spark 4.1's does not know them."""


class SparkEngine:
    """A Spark session: on a cluster (`spark://…`), by Spark Connect (`sc://…`), or in this process (`local[2]`)."""

    def __init__(self, session: Any, catalog: str) -> None:
        self._session = session
        self._catalog = catalog

    @classmethod
    def connect(cls, url: str) -> SparkEngine:
        sql = client_library("pyspark.sql", "pyspark")
        builder = sql.SparkSession.builder.appName("gputally")
        try:
            if url.startswith("sc://"):
                session = builder.remote(url).getOrCreate()
            else:
                session = (builder.master(url) if url else builder).getOrCreate()
        except Exception as error:
            raise LakeUnavailable(f"spark {url}: {described(error)}") from error
        return cls(session, engine_catalog())

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

    def query(self, question: exp.Select, namespace: str, _days: tuple[date, date] | None = None) -> pa.Table:
        def run(asked: exp.Select) -> pa.Table:
            text = sql_text(asked, "spark", lambda table: exp.table_(table, db=namespace, catalog=self._catalog))
            try:
                self._session.conf.set(_SUBSTITUTE, "false")
                found: pa.Table = self._session.sql(text).toArrow()
            except Exception as error:
                raise LakeUnavailable(f"spark: {described(error)}") from error
            return found

        return with_unknown_columns(run, question)

    def close(self) -> None:
        self._session.stop()
