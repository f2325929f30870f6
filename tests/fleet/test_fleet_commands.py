"""The commands of `gputally fleet`."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import pytest
import sqlglot
from sqlglot import exp

from accountant.core.periods import Month
from accountant.lake import tables
from accountant.lake.iceberg_catalog import namespace_of
from gputally.__main__ import main
from gputally.base.money import exact_sum
from tests.fleet.conftest import TwoLedgers
from tests.lake.comparison_queries import HOUR, published
from tests.plugin_cases import needs

pytestmark = needs("engines.duckdb")  # the only one that reads a lake here, without a server

OCTOBER = Month(2026, 10)
SPAN = "--start", "2026-10-01", "--end", "2026-10-01T05:00:00Z"


def run(*arguments: str) -> int:
    return main(["fleet", *arguments])


def test_the_ledgers_of_a_lake(lake_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("clusters", "--lake", str(lake_file), "--output", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["ledger"] for one in found] == ["north", "south"]
    assert [one["timezone"] for one in found] == ["UTC", "America/New_York"]
    assert run("clusters", "--lake", str(lake_file)) == 0
    assert "north" in capsys.readouterr().out


def test_usage_and_cost(two: TwoLedgers, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("usage", "--lake", two.warehouse, *SPAN, "--by", "cluster,team", "--output", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["by"] == ["cluster", "team"]
    assert sum(line["accounts_gpu_us"]["busy"] for line in found["lines"]) > 0
    assert (
        run("cost", "--lake", two.warehouse, *SPAN, "--by", "gpu_model", "--cluster", "north", "--output", "json") == 0
    )
    assert json.loads(capsys.readouterr().out)["currency"] == "USD"


def test_usage_and_cost_by_project(two: TwoLedgers, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--by", "label:project", "--output", "json"
    assert run("usage", "--lake", two.warehouse, *SPAN, *asked) == 0
    found = json.loads(capsys.readouterr().out)
    held = {line["key"]["label:project"]: line["accounts_gpu_us"]["busy"] for line in found["lines"]}
    assert held["search"] > 0
    assert run("usage", "--lake", two.warehouse, *SPAN, *asked, "--where", "label:project=search") == 0
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert line["accounts_gpu_us"]["busy"] == held["search"]
    assert run("cost", "--lake", two.warehouse, *SPAN, "--by", "label:nobody") == 1


def test_windows(two: TwoLedgers, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("windows", "--lake", two.warehouse, "--size", "4h", "--output", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["end_ms"] - found["start_ms"], found["end_ms"] % 3_600_000) == (4 * 3_600_000, 0)
    assert found["capacity"] > sum(found["usage"].values()) > 0
    assert run("windows", "--lake", two.warehouse, "--size", "4h", "--half-life", "1d") == 0
    drawn = capsys.readouterr().out
    assert "half-life 24 h; " in drawn
    assert "of capacity" in drawn
    assert run("windows", "--lake", two.warehouse, "--size", "soon") != 0


def test_a_month_s_lines_add_up_to_what_the_statements_say(two: TwoLedgers, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", "2026-10", "--lake", two.warehouse, "--output", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    for one in two.both:
        own = one.books.month(OCTOBER)
        found = [row for row in rows if row["ledger"] == one.publisher.name]
        assert exact_sum(Decimal(row["cost"]) for row in found if row["cost"]) == own.cost
        assert sum(int(row["gpu_us"]) for row in found) == own.gpu_us


def test_every_amount_of_a_table_of_costs_has_its_currency(two: TwoLedgers, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cost", "--lake", two.warehouse, "--by", "gpu_model", "--start", "2026-10-01", "--output", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["currency"] for row in rows if row["cost"]} == {"USD"}
    assert all(row["unpriced_gpu_us"] for row in rows)


@needs("exports.csv")
def test_each_cluster_s_report_lands_in_the_folder(
    two: TwoLedgers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command makes the folder."""
    folder = tmp_path / "of" / "october"
    assert run("report", "2026-10", "--lake", two.warehouse, "--to", str(folder), "--format", "csv") == 0
    captured = capsys.readouterr()
    assert "The fleet in 2026-10" in captured.out
    assert sorted(file.name for file in folder.iterdir()) == [
        "gputally-2026-10-north.csv", "gputally-2026-10-south.csv",
    ]  # fmt: skip
    assert "gputally-2026-10-north.csv" in captured.err.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("usage", "--by", "colour"), "there is no dimension 'colour'"),
        (("usage", "--where", "team"), "write DIMENSION=VALUE, for example team=vision"),
        (("usage", "--start", "2026-10-02", "--end", "2026-10-01"), "the span ends at or before its start"),
        (("usage", "--cluster", "east"), "no ledger 'east' publishes in this lake"),
        (("report", "2026-10", "--to", "/dev/null/reports"), "/dev/null/reports: the folder of --to cannot be made"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    two: TwoLedgers,
    arguments: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*arguments, "--lake", two.warehouse) in (1, 2)
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_ledger_is_retired_by_its_name_after_a_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ledgers() -> list[str]:
        assert run("clusters", "--lake", str(tmp_path), "--output", "json") == 0
        return [one["ledger"] for one in json.loads(capsys.readouterr().out)]

    with published(str(tmp_path), name="north"), published(str(tmp_path), name="south") as south:
        capsys.readouterr()
        cost = ("cost", "--lake", str(tmp_path), *SPAN, "--by", "team", "--cluster", "south", "--output", "json")
        assert run(*cost) == 0
        before = json.loads(capsys.readouterr().out)
        monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
        assert run("retire", "north", "--lake", str(tmp_path)) != 0
        capsys.readouterr()
        assert ledgers() == ["north", "south"], "it asks first"
        assert run("retire", "nobody", "--yes", "--lake", str(tmp_path)) != 0
        assert "nobody" in capsys.readouterr().err
        assert run("retire", "north", "--yes", "--lake", str(tmp_path), "--output", "json") == 0
        assert json.loads(capsys.readouterr().out) == [{"ledger": "north", "tables": len(tables.TABLES)}]
        assert ledgers() == ["south"]
        assert run(*cost) == 0
        assert json.loads(capsys.readouterr().out) == before
        assert run("retire", "north", "--yes", "--lake", str(tmp_path)) != 0, "it is gone"
        capsys.readouterr()
        assert not list((tmp_path / namespace_of("north")).glob("*"))
        south.clock.advance(HOUR)
        south.publisher.publish()
        assert south.publisher.compare().differences == ()


def test_a_ledger_without_a_table_is_left_out_of_its_query_and_named(
    two: TwoLedgers, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(two.south.connect()) as lake:
        identifier = namespace_of("south"), tables.OUTBOXES.name
        place = lake.open(tables.OUTBOXES).metadata_location
        lake._catalog.drop_table(identifier)
        try:
            assert run("view", "outboxes", "--lake", two.warehouse) == 0
        finally:
            lake._catalog.register_table(identifier, place)
    printed = capsys.readouterr()
    assert namespace_of("north") in printed.out
    assert namespace_of("south") not in printed.out
    assert "south" in printed.err
    assert "north" not in printed.err


@pytest.mark.parametrize("dialect", ["spark", "trino", "clickhouse"])
def test_a_table_of_all_ledgers_is_printed_as_one_query(
    dialect: str, two: TwoLedgers, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "view", "--lake", two.warehouse, "--dialect", dialect, "--catalog", "books"

    def printed() -> exp.Expression:
        text = re.sub(r", SETTINGS \w+ = '[^']+'", "", capsys.readouterr().out)  # which the parser does not know
        return sqlglot.parse_one(text, dialect=dialect)

    assert run(*asked) == 0
    query = printed()
    assert isinstance(query, exp.Union)
    assert query.named_selects == [column.name for column in tables.USAGE_HOURLY.columns]
    assert run("view", "statement_lines", *asked[1:]) == 0
    assert printed().find(exp.Select).named_selects[0] == "ledger"  # type: ignore[union-attr]
    assert run("view", "no_such_table", *asked[1:]) != 0
    assert "no_such_table" in capsys.readouterr().err
