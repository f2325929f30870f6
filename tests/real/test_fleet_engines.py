"""`gputally fleet report` over two clusters equals the statements of their two accountants, to the cent, on every
engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from accountant.core.periods import Month
from accountant.core.settings import LakeCatalog
from accountant.exports.rendering_process import written
from accountant.lake.engines.sql_text import CATALOG_VARIABLE
from accountant.reports import report_builder
from gputally.base.money import exact_sum, plain
from tests.fleet.conftest import OTHER_ROWS
from tests.lake.comparison_queries import ROWS, PublishedLedger, published
from tests.ledger.busy_ledger import BOOK
from tests.real.spark import catalog_settings, spark_connect
from tests.real.trino import Trino

pytestmark = pytest.mark.real
OCTOBER = Month(2026, 10)


@dataclass(frozen=True)
class TwoClusters:
    """jdbc: the catalog for Java's engines."""

    catalog: str
    folder: Path
    ledgers: tuple[PublishedLedger, PublishedLedger]

    @property
    def jdbc(self) -> str:
        return f"jdbc:sqlite:{self.folder}/catalog.db"

    @property
    def settings(self) -> Path:
        """Return the value of `--lake`."""
        found = self.folder / "lake.yaml"
        found.write_text(yaml.safe_dump({"warehouse": f"file://{self.folder}", "catalog": {"name": self.catalog}}))
        return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoClusters]:
    folder = tmp_path_factory.mktemp("lake")
    catalog = LakeCatalog(name=f"books{uuid.uuid4().hex}")
    dearer: Any = BOOK.model_copy(
        update={"rows": tuple(row.model_copy(update={"price": row.price and row.price * 2}) for row in BOOK.rows)}
    )
    with ExitStack() as stack:
        north = published(f"file://{folder}", catalog, name="north", rows=ROWS, epochs=False)
        south = published(f"file://{folder}", catalog, name="south", rows=OTHER_ROWS, book=dearer, seed=7, epochs=False)
        ledgers = stack.enter_context(north), stack.enter_context(south)
        yield TwoClusters(catalog.name, folder, ledgers)


@contextmanager
def address(engine: str, two: TwoClusters, request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Return the address of the engine, which knows the lake; empty for one that runs within the command."""
    if engine == "trino":
        server: Trino = request.getfixturevalue("trino")
        server.add_catalog(two.catalog, two.jdbc, f"file://{two.folder}")
        yield server.url
    elif engine == "spark":
        with spark_connect(folder, catalog_settings(two.catalog, two.jdbc, f"file://{two.folder}")) as url:
            yield url
    else:
        yield ""


@pytest.mark.parametrize("engine", ["duckdb", "trino", "spark"])
def test_the_month_of_two_clusters_is_the_sum_of_their_own_reports(
    engine: str, two: TwoClusters, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    with address(engine, two, request, tmp_path) as url:
        command = [
            sys.executable, "-m", "gputally", "fleet", "report", str(OCTOBER), "--lake", str(two.settings),
            "--engine", engine, "--engine-url", url, "--output", "json", "--to", str(reports), "--format", "csv",
        ]  # fmt: skip
        environment = {**os.environ, CATALOG_VARIABLE: two.catalog}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    own = {one.publisher.name: one.books.month(OCTOBER) for one in two.ledgers}
    owed = [one.due_total for one in own.values() if one.due_total is not None]
    assert found["left_out"] == {}
    assert found["totals"] == {"USD": plain(exact_sum(owed))}
    teams = {(row["ledger"], row["team"]): row["due"] for row in found["teams"] if row["due"] is not None}
    assert teams == {(name, team): plain(due) for name, one in own.items() for team, due in one.due.items()}
    for one in two.ledgers:
        start_ms, end_ms = OCTOBER.span(one.settings.zone)
        report = report_builder.report(
            one.ledger, one.books, start_ms, min(end_ms, one.clock.wall_ms()), one.settings.timezone, month=OCTOBER
        )
        (file,) = reports.glob(f"*-{one.publisher.name}.csv")
        assert file.read_bytes() == written("csv", report)
