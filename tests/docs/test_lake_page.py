"""docs/lake.md lists the tables as they are, and its example runs."""

from __future__ import annotations

import re

import duckdb
from pyiceberg.catalog import load_catalog

from accountant.billing.usage_pricing import cost
from scripts.reference_pages import LAKE_PAGE, lake_page
from tests.lake.questions import SPAN, published
from tests.ledger.busy import BOOK


def test_the_page_lists_every_table_and_column() -> None:
    page = LAKE_PAGE.read_text(encoding="utf-8")
    assert lake_page(page) == page


def test_the_example_for_duckdb_gives_what_the_ledger_says() -> None:
    page = LAKE_PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r'found\.sql\("""(.*?)"""\)', page, re.DOTALL)
    with published() as known:
        assert known.settings.lake is not None
        place = known.settings.lake.warehouse
        catalog = load_catalog("gputally", type="sql", uri=f"sqlite:///{place}/catalog.db", warehouse=place)
        table = catalog.load_table("gputally.usage_hourly")
        found = table.scan(row_filter="day >= '2026-10-01' and day < '2026-11-01'").to_duckdb("usage_hourly")
        asked = {team: (hours, costs) for team, hours, costs in found.sql(example).fetchall()}
        assert isinstance(found, duckdb.DuckDBPyConnection)
        for line in known.ledger.usage(*SPAN, ("team",)):
            assert asked[line.key["team"]][0] == line.accounts_gpu_us.allocated / 3.6e9
        priced = {line.key["team"]: line for line in cost(known.ledger, BOOK, *SPAN, ("team",)).lines}
        for team, line in priced.items():
            if line.cost is not None:
                assert abs(asked[team][1] - line.cost) < 1
        found.close()
