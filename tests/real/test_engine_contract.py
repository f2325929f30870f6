"""The engines that run elsewhere pass the suite of engines, on a cluster of Spark and a coordinator of Trino."""

from __future__ import annotations

import polars as pl
import pytest
from sqlglot import exp

from accountant.lake.engines.sql_text import sql_text
from accountant.lake.lake_ledger import every_column
from accountant.lake.tables import TABLES, LakeTable

pytestmark = pytest.mark.real


@pytest.mark.parametrize("table", TABLES, ids=[table.name for table in TABLES])
def test_a_name_that_a_dialect_reserves_is_a_column(table: LakeTable) -> None:
    """The SQL of polars reserves `cluster`, for example."""
    frame = pl.from_arrow(table.arrow.empty_table())
    asked = sql_text(every_column(table), "postgres", exp.table_)
    with pl.SQLContext({table.name: frame}) as context:
        assert context.execute(asked, eager=True).columns == table.arrow.names
