"""The engines that run elsewhere pass the suite of engines, on a cluster of Spark and a coordinator of Trino."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import polars as pl
import pytest
from sqlglot import exp

from accountant.core.settings import Lake
from accountant.lake.engines.protocol import SEAM, Engine, EnginePlugin
from accountant.lake.engines.spark.engine import SparkEngine
from accountant.lake.engines.sql_text import CATALOG_VARIABLE, sql_text
from accountant.lake.lake_ledger import every_column
from accountant.lake.tables import TABLES, LakeTable
from gputally.base.plugins import usable
from gputally.testing.engines import EngineSuite
from tests.real.spark import SparkCluster
from tests.real.trino import Trino

pytestmark = pytest.mark.real
Reach = Callable[[Lake], str]


def jdbc(lake: Lake) -> tuple[str, str]:
    """Return catalog and warehouse in the form for Java's engines."""
    return f"jdbc:sqlite:{lake.warehouse}/catalog.db", f"file://{lake.warehouse}"


# PySpark leaves the sockets open over which Arrow batches come.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
class TestSpark(EngineSuite):
    plugin = usable(SEAM, EnginePlugin)["spark"]
    hostile_pieces = ("${spark.app.name}",)
    cluster: SparkCluster

    @pytest.fixture(scope="class")
    @classmethod
    def reach(cls, spark_cluster: SparkCluster) -> Reach:
        cls.cluster = spark_cluster

        def url_of(lake: Lake) -> str:
            spark_cluster.add_catalog(lake.catalog.name, *jdbc(lake), {"cache-enabled": "false"})
            return spark_cluster.master

        return url_of

    @classmethod
    def opened(cls, lake: Lake, url: str) -> Engine:
        """The session of the cluster, which other tests use too and which stays open."""

        class Shared(SparkEngine):
            def close(self) -> None: ...

        return Shared(cls.cluster.session, lake.catalog.name)


class TestTrino(EngineSuite):
    plugin = usable(SEAM, EnginePlugin)["trino"]

    @pytest.fixture(scope="class")
    @classmethod
    def reach(cls, trino: Trino) -> Iterator[Reach]:
        with pytest.MonkeyPatch.context() as patch:

            def url_of(lake: Lake) -> str:
                trino.add_catalog(lake.catalog.name, *jdbc(lake))
                patch.setenv(CATALOG_VARIABLE, lake.catalog.name)
                return trino.url

            yield url_of


@pytest.mark.parametrize("table", TABLES, ids=[table.name for table in TABLES])
def test_a_name_that_a_dialect_reserves_is_a_column(table: LakeTable) -> None:
    """The SQL of polars reserves `cluster`, for example."""
    frame = pl.from_arrow(table.arrow.empty_table())
    asked = sql_text(every_column(table), "postgres", exp.table_)
    with pl.SQLContext({table.name: frame}) as context:
        assert context.execute(asked, eager=True).columns == table.arrow.names
