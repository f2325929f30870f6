"""Spark passes the suite of engines, on a cluster."""

from __future__ import annotations

import pytest

from accountant.core.settings import Lake
from accountant.lake.engines.protocol import SEAM, Engine, EnginePlugin
from accountant.lake.engines.spark.engine import SparkEngine
from gputally.base.plugins import usable
from gputally.testing.engines import EngineSuite
from tests.real.engines.java_catalog import Reach, jdbc
from tests.real.spark import SparkCluster

pytestmark = pytest.mark.real


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
