"""The sizing table is arithmetic on measured figures, and the figures are those that the pages say were measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gputally
from scripts.reference_pages import (
    FLEETS,
    MEASURED,
    MEASURED_LAKE,
    SIZING_PAGE,
    Measured,
    lake_sizing_table,
    load,
    sizing_page,
    sizing_table,
)


def test_the_table_is_fresh() -> None:
    text = SIZING_PAGE.read_text(encoding="utf-8")
    assert text == sizing_page(text), "write it anew: make reference"
    assert sizing_table().count("\n") == len(FLEETS) + 1


def test_what_it_is_computed_from_is_what_was_measured() -> None:
    measured = (SIZING_PAGE.parent / "performance.md").read_text(encoding="utf-8")
    of = MEASURED
    for figure in (f"{of.bytes_per_row:g} bytes", f"{of.ingest_us} µs", f"{of.rows_per_s:,.0f} rows/s"):
        assert figure in measured, f"{figure} is not in docs/performance.md"
        assert figure in SIZING_PAGE.read_text(encoding="utf-8"), f"{figure} is not named in docs/sizing.md"


def test_the_lake_s_figures_are_those_that_were_measured() -> None:
    of, page = MEASURED_LAKE, SIZING_PAGE.read_text(encoding="utf-8")
    measured = (SIZING_PAGE.parent / "performance.md").read_text(encoding="utf-8")
    for figure in (of.stated_s, of.rows_s, of.window_s, of.publish_s):
        assert re.search(rf"\b{figure}(;| s)", measured), f"{figure} is not in docs/performance.md"
        assert f"{figure} s" in page, f"{figure} s is not named in docs/sizing.md"
    assert f"{of.bytes_per_gpu_hour} bytes" in page
    assert lake_sizing_table() in page


def test_it_grows_with_the_fleet_and_with_each_cost() -> None:
    small, large = load(1_000), load(10_000)
    assert large.rows_per_day == 10 * small.rows_per_day == 14_400_000
    assert load(1_000, Measured(bytes_per_row=54)).file_per_day_mb == 2 * small.file_per_day_mb
    assert small.ingest_s_per_day * 1_000_000 == pytest.approx(1_440_000 * MEASURED.ingest_us)
    assert small.catch_up_s == 60_000 / MEASURED.rows_per_s


def test_the_requests_are_those_of_the_chart() -> None:
    values = (Path(gputally.__file__).parents[1] / "helm" / "gputally" / "values.yaml").read_text(encoding="utf-8")
    page = SIZING_PAGE.read_text(encoding="utf-8")
    for cpu, memory in (("50m", "96Mi"), ("250m", "512Mi"), ("50m", "192Mi")):
        assert f"requests: {{cpu: {cpu}, memory: {memory}}}" in values
        assert f"{cpu} / {memory}" in page
