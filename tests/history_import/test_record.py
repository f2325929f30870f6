"""What the report says of imported history."""

from __future__ import annotations

import json
from dataclasses import replace

from accountant.history_import.import_run import ImportedChunk, epoch, of_acts, said_of
from accountant.ledger.journal import Act
from accountant.reports import html_and_pdf, report_tables
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.reports import sample

DAY_US = 24 * 3_600_000_000


def chunk(day: int, **changes: object) -> ImportedChunk:
    start = sample.START_MS + day * MS_PER_DAY
    plain = {
        "cluster": "prod", "source": "prometheus", "origin": "https://prom", "epoch": epoch("prometheus", start),
        "start_ms": start, "end_ms": start + MS_PER_DAY, "nodes": 1, "gpus": 8, "sent_us": 6 * DAY_US,
        "held_us": 3 * DAY_US, "unknown_us": DAY_US, "metered_us": 0, "missing_us": 2 * DAY_US,
    }  # fmt: skip
    return ImportedChunk.model_validate({**plain, **changes})


def test_of_a_span_the_part_that_lies_in_it_by_cluster_and_place():
    noted = [chunk(0), chunk(1), chunk(2, cluster="lab"), chunk(40)]
    half = sample.START_MS + MS_PER_DAY // 2
    lab, prod = said_of(noted, half, sample.END_MS)
    assert (lab.cluster, lab.sent_us, lab.coverage) == ("lab", 6 * DAY_US, 0.75)
    assert (prod.start_ms, prod.end_ms) == (half, sample.START_MS + 2 * MS_PER_DAY)
    assert (prod.sent_us, prod.held_us, prod.unknown_us, prod.missing_us) == (
        9 * DAY_US, 9 * DAY_US // 2, 3 * DAY_US // 2, 3 * DAY_US,
    )  # fmt: skip
    assert said_of(noted, half - MS_PER_DAY, half - MS_PER_DAY + MS_PER_HOUR) == ()


def test_a_chunk_that_was_noted_twice_is_one():
    act = Act(0, "imported", "prometheus/prod", "ann", "", chunk(0).model_dump_json(), number=1)
    other = replace(act, kind="closed", content="{}", number=3)
    assert of_acts([act, replace(act, number=2), other]) == [chunk(0)]


def test_pages_and_files_say_where_it_is_from_and_what_it_cannot_know():
    said = said_of([chunk(0)], sample.START_MS, sample.END_MS)
    report = replace(sample.report(), imports=said)
    page = html_and_pdf.render_html(report)
    assert "from dcgm-exporter and kube-state-metrics (https://prom): 144.0 GPU-hours, 72.0 held" in " ".join(
        page.split()
    )
    assert "75.00 % of the time of the GPUs it knew" in page
    assert "it is not known whose it was" in page
    (row,) = json.loads(report_tables.render(report))["tables"]["imports"]
    assert (row["source"], row["gpu_hours"], row["coverage"]) == ("prometheus", "144.000000000", 0.75)
    of_team = replace(sample.report("vision"), imports=said)
    assert json.loads(report_tables.render(of_team))["tables"]["imports"][0]["gpu_hours"] is None
    assert "144.0 GPU-hours" not in html_and_pdf.render_html(of_team)
    assert "Imported" not in html_and_pdf.render_html(sample.report("vision"))
