"""What scripts.reference_pages writes agrees with the code, and has an explanation for every entry."""

from __future__ import annotations

import json
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyiceberg.catalog import load_catalog

from accountant.billing.usage_pricing import cost
from accountant.lake.tables import TABLES
from gputally.shell_completion import all_commands
from scripts.contracts import FOLDER, api_document
from scripts.reference_pages import (
    FLEETS,
    LAKE_PAGE,
    MEASURED,
    MEASURED_LAKE,
    SIZING_PAGE,
    Measured,
    agent_families,
    api_page,
    chart_values,
    committed,
    families_by_program,
    lake_sizing_table,
    load,
    published_reference,
    said_inside,
    sizing_table,
)
from tests.lake.comparison_queries import SPAN, published
from tests.ledger.busy_ledger import BOOK
from tests.moments import present

NOT_BASE = "ms|us|mib|mw|mj|percent|mhz|hours|minutes|days|microseconds|milliseconds"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return api_document()


def test_a_contract_changes_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of docs/contract is a route, field, option or metric that somebody's program may use."""
    for name in [name for name in os.environ if name.startswith("GPUTALLY_")]:
        monkeypatch.delenv(name)  # the defaults of the commands
    files = committed()
    assert {file.name for file in FOLDER.iterdir()} == {file.name for file in files if file.parent == FOLDER}
    for file, text in files.items():
        assert file.read_text(encoding="utf-8") == text, (
            f"{file.name}: if it shall change, write it again: make reference"
        )


# --- the API ------------------------------------------------------------------------------------


def test_nothing_of_the_document_is_left_out(document: dict[str, Any]) -> None:
    text = api_page(document)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"### {method.upper()} {path}\n" in text
            for parameter in operation.get("parameters", ()):
                name = parameter["name"].removeprefix("where.")
                assert f"`{name}`" in text, (path, name)
    for name in document["components"]["schemas"]:
        assert f"\n### {name}\n" in text
    types = {word for line in json.dumps(document).split("`") for word in [line] if "-" in word and word.islower()}
    assert all(f"`{name}`" in text for name in types if name.replace("-", "").isalpha())


def test_every_question_and_parameter_is_explained(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
            for parameter in operation.get("parameters", ()):
                own = parameter["name"].startswith("where.")
                said = own or parameter.get("description") or said_inside(parameter["schema"])
                assert said or parameter["in"] == "path", f"{method} {path}: {parameter['name']} says nothing"


# --- commands, metrics and values ---------------------------------------------------------------


def test_the_published_reference_has_every_command_metric_and_value() -> None:
    found = published_reference()
    for path, command in all_commands():
        assert f" {path}\n" in found["commands.md"]
        assert all(
            f"`{one.opts[0]}`" in found["commands.md"] for one in command.params if one.param_type_name == "option"
        )
    for family in [*agent_families(), *(one for several in families_by_program().values() for one in several)]:
        assert f"| `{family.series}` |" in found["metrics.md"]
    for table in TABLES:
        assert f"### {table.name}\n" in found["lake-tables.md"]
        assert all(f"| `{column.name}` |" in found["lake-tables.md"] for column in table.columns)
    for value in ("clusterName", "accountant.archive.enabled", "monitoring.rules.enabled"):
        assert f"| `{value}` |" in found["chart-values.md"]


def test_every_command_and_option_is_explained() -> None:
    silent = []
    for path, command in all_commands():
        silent += [] if command.help else [path]
        silent += [
            f"{path} {each.opts[0]}"
            for each in command.params
            if each.param_type_name == "option" and not getattr(each, "help", None)
        ]
    assert silent == []


def test_every_metric_has_our_prefix_a_meaning_and_a_unit() -> None:
    programs = [list(agent_families()), *families_by_program().values()]
    for program in programs:
        assert len({family.name for family in program}) == len(program)
    families = [family for program in programs for family in program]
    assert len(families) > 50
    for family in families:
        # One name that others agreed on, opt-in.
        assert family.name == "training_job_cost_usd" or re.fullmatch(r"gputally_[a-z0-9_]+", family.name)
        assert len(family.text) > 10
        assert not re.search(rf"_({NOT_BASE})(_|$)", family.name), family.name
        assert "pod_uid" not in family.labels
        assert not {"job", "instance"} & set(family.labels), "Prometheus gives these labels to what it scrapes"


def test_a_value_of_the_chart_without_a_meaning_is_named_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"values\.yaml:4: a\.c has no comment"):
        list(chart_values("a:\n  # -- A meaning.\n  b: 1\n  c: 2\n"))
    assert [tuple(v) for v in chart_values("# -- It goes | on\n# and on.\na: {x: 1}\n")] == [
        ("a", '`{"x": 1}`', "It goes | on and on.")
    ]


# --- the lake -----------------------------------------------------------------------------------


def test_the_example_for_duckdb_gives_what_the_ledger_says() -> None:
    page = LAKE_PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r'found\.sql\("""(.*?)"""\)', page, re.DOTALL)
    with published() as known:
        assert known.settings.lake is not None
        place = known.settings.lake.warehouse
        catalog = load_catalog("gputally", type="sql", uri=f"sqlite:///{place}/catalog.db", warehouse=place)
        table = catalog.load_table("gputally_prod.usage_hourly")
        found = table.scan(row_filter="day >= '2026-10-01' and day < '2026-11-01'").to_duckdb("usage_hourly")
        asked = {team: row for team, *row in found.sql(example).fetchall()}
        assert isinstance(found, duckdb.DuckDBPyConnection)
        for line in present(known.ledger).usage(SPAN, ("team",)).lines():
            assert asked[line.key["team"]][:2] == ["USD", line.accounts_gpu_us.allocated / 3.6e9]
        for line in cost(present(known.ledger), BOOK, *SPAN, ("team",)).lines:
            _, _, unpriced_hours, amount = asked[line.key["team"]]
            assert unpriced_hours == line.unpriced_gpu_us / 3.6e9
            if line.cost is not None:
                assert abs(amount - line.cost) < Decimal("1e-6")
        found.close()


# --- sizing -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sizing() -> str:
    return SIZING_PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def measured() -> str:
    return (SIZING_PAGE.parent / "performance.md").read_text(encoding="utf-8")


def test_what_the_sizing_is_computed_from_is_what_was_measured(sizing: str, measured: str) -> None:
    of = MEASURED
    for figure in (f"{of.bytes_per_row:g} bytes", f"{of.ingest_us} µs", f"{of.rows_per_s:,.0f} rows/s"):
        assert figure in measured, f"{figure} is not in docs/performance.md"
        assert figure in sizing, f"{figure} is not named in docs/sizing.md"
    assert sizing_table().count("\n") == len(FLEETS) + 1


def test_the_lake_s_figures_are_those_that_were_measured(sizing: str, measured: str) -> None:
    of = MEASURED_LAKE
    for figure in (of.stated_s, of.rows_s, of.window_s, of.publish_s):
        assert re.search(rf"\b{figure}(;| s)", measured), f"{figure} is not in docs/performance.md"
        assert f"{figure} s" in sizing, f"{figure} s is not named in docs/sizing.md"
    assert f"{of.bytes_per_gpu_hour} bytes" in sizing
    assert lake_sizing_table() in sizing


def test_it_grows_with_the_fleet_and_with_each_cost() -> None:
    small, large = load(1_000), load(10_000)
    assert large.rows_per_day == 10 * small.rows_per_day == 14_400_000
    assert load(1_000, Measured(bytes_per_row=54)).file_per_day_mb == 2 * small.file_per_day_mb
    assert small.ingest_s_per_day * 1_000_000 == pytest.approx(1_440_000 * MEASURED.ingest_us)
    assert small.catch_up_s == 60_000 / MEASURED.rows_per_s


def test_the_requests_are_those_of_the_chart(root: Path, sizing: str) -> None:
    values = (root / "helm" / "gputally" / "values.yaml").read_text(encoding="utf-8")
    for cpu, memory in (("50m", "96Mi"), ("250m", "512Mi"), ("50m", "192Mi")):
        assert f"requests: {{cpu: {cpu}, memory: {memory}}}" in values
        assert f"{cpu} / {memory}" in sizing
