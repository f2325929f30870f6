"""A Spark session, which reads the tables through a catalog that is configured there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
from sqlglot import exp

from accountant.core.errors import LakeUnavailable
from accountant.lake.engines.protocol import Bounds
from accountant.lake.engines.sql_text import client_library, engine_catalog, sql_text, with_parameters
from accountant.lake.iceberg_catalog import PREFIX, described
from accountant.lake.tables import LEDGERS

_BIND_LATE: Final = "spark.sql.legacy.parameterSubstitution.constantsOnly"
"""Setting with which Spark 4.1 binds parameters after it parsed the query. Otherwise its parser does, and the one that
Iceberg's extensions put in its place does not know parameters."""


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

    def query(self, question: exp.Select, bounds: Bounds) -> pa.Table:
        try:
            asked, values = with_parameters(question)
            self._session.conf.set(_BIND_LATE, "true")
            found: pa.Table = self._session.sql(sql_text(asked, "spark", bounds, self._table), args=values).toArrow()
        except Exception as error:
            raise LakeUnavailable(f"spark: {described(error)}") from error
        return found

    def close(self) -> None:
        self._session.stop()

    def _table(self, namespace: str, table: str) -> exp.Table:
        return exp.table_(table, db=namespace, catalog=self._catalog)
