"""Spark with two workers answers as the ledger does."""

from __future__ import annotations

import pytest

from accountant.lake.engines.spark.engine import SparkEngine
from tests.lake.comparison_queries import PublishedLedger, differences
from tests.real.engines.java_catalog import jdbc
from tests.real.spark import SparkCluster

pytestmark = pytest.mark.real


# PySpark leaves the sockets open over which Arrow batches come.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_spark_with_two_workers(known: PublishedLedger, name: str, spark_cluster: SparkCluster) -> None:
    lake = known.settings.lake
    assert lake is not None
    spark_cluster.add_catalog(name, *jdbc(lake))
    assert differences(known, SparkEngine(spark_cluster.session, name)) == []
