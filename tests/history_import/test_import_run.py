"""The chunks that are left to import, the numbers of their records, and the note about imports in reports."""

from __future__ import annotations

from dataclasses import replace
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.claim_overlap import union
from accountant.core.import_epochs import epoch, is_import, source_of
from accountant.history_import.import_run import ImportedChunk, chunks, first_seq, import_rows, imported_chunks, without
from accountant.history_import.protocol import SEAM, HistoryPlugin, known_limits, known_records
from accountant.ledger.journal import Act
from accountant.reports import html_page, report_tables
from gputally.base.plugins import usable
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.hypothesis_examples import examples
from tests.reports import sample_month

DAY_MS = 24 * MS_PER_HOUR
START = 20_700 * DAY_MS


def spans(found):
    return [((one.start_ms - START) // MS_PER_HOUR, (one.end_ms - START) // MS_PER_HOUR) for one in found]


def at(hour):
    return START + hour * MS_PER_HOUR


def test_an_epoch_says_that_it_is_an_import_and_sorts_after_every_agents():
    name = epoch("slurm", START)
    assert is_import(name)
    assert (source_of(name), source_of("0192-a")) == ("slurm", "")
    assert name > "ffffffff-ffff-7fff"


def test_chunks_begin_and_end_at_multiples_of_their_length():
    assert spans(chunks((at(5), at(53)), {}, "prometheus", DAY_MS)) == [(5, 24), (24, 48), (48, 53)]
    assert chunks((at(5), at(5)), {}, "prometheus", DAY_MS) == []
    with pytest.raises(ValueError, match="whole hours"):
        chunks((at(5) + 1, at(9)), {}, "prometheus", DAY_MS)


def test_what_follows_goes_on_with_its_epoch_and_what_lies_before_has_its_own():
    done = {epoch("prometheus", at(24)): [(at(24), at(48))]}
    found = chunks((at(0), at(72)), done, "prometheus", DAY_MS)
    assert spans(found) == [(0, 24), (48, 72)]
    assert [one.epoch for one in found] == [epoch("prometheus", at(0)), epoch("prometheus", at(24))]


@settings(max_examples=examples(13, 80))
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=5), st.sampled_from([1, 6, 24]))
def test_runs_in_any_order_do_every_hour_once_with_ascending_numbers(wanted, hours):
    done: dict[str, list[tuple[int, int]]] = {}
    last: dict[str, int] = {}
    for begin, length in wanted:
        for one in chunks((at(begin), at(begin + length)), done, "slurm", hours * MS_PER_HOUR):
            assert all(one.end_ms <= low or high <= one.start_ms for of in done.values() for low, high in of)
            assert first_seq(one.start_ms) > last.get(one.epoch, 0)
            last[one.epoch] = first_seq(one.start_ms)
            done.setdefault(one.epoch, []).append((one.start_ms, one.end_ms))
    assert union(span for of in done.values() for span in of) == union((at(b), at(b + n)) for b, n in wanted)


def test_what_agents_metered_is_left_out():
    assert without((0, 10), [(4, 6), (5, 20)]) == [(0, 4)]


DAY_US = 24 * 3_600_000_000


def noted(day: int, **changes: object) -> ImportedChunk:
    start = sample_month.START_MS + day * MS_PER_DAY
    plain = {
        "cluster": "prod", "source": "prometheus", "origin": "https://prom", "epoch": epoch("prometheus", start),
        "start_ms": start, "end_ms": start + MS_PER_DAY, "nodes": 1, "gpus": 8, "sent_us": 6 * DAY_US,
        "held_us": 3 * DAY_US, "unknown_us": DAY_US, "metered_us": 0, "missing_us": 2 * DAY_US,
    }  # fmt: skip
    return ImportedChunk.model_validate({**plain, **changes})


def test_of_a_span_the_part_that_lies_in_it_by_cluster_and_place():
    chunks_noted = [noted(0), noted(1), noted(2, cluster="lab"), noted(40)]
    half = sample_month.START_MS + MS_PER_DAY // 2
    lab, prod = import_rows(chunks_noted, half, sample_month.END_MS)
    assert (lab.cluster, lab.sent_us, lab.coverage) == ("lab", 6 * DAY_US, 0.75)
    assert (prod.start_ms, prod.end_ms) == (half, sample_month.START_MS + 2 * MS_PER_DAY)
    assert (prod.sent_us, prod.held_us, prod.unknown_us, prod.missing_us) == (
        9 * DAY_US, 9 * DAY_US // 2, 3 * DAY_US // 2, 3 * DAY_US,
    )  # fmt: skip
    assert import_rows(chunks_noted, half - MS_PER_DAY, half - MS_PER_DAY + MS_PER_HOUR) == ()


def test_a_chunk_that_was_noted_twice_is_one():
    act = Act(0, "imported", "prometheus/prod", "ann", "", noted(0).model_dump_json(), number=1)
    other = replace(act, kind="closed", content="{}", number=3)
    assert imported_chunks([act, replace(act, number=2), other]) == [noted(0)]


def cells(report, column):
    """Return the cell of the only import in the report's tables, of which every file is made."""
    (found,) = [table for table in report_tables.tables(report) if table.name == "imports"]
    (row,) = found.rows
    return row[[name for name, _ in found.columns].index(column)]


@pytest.mark.parametrize("source", ["gone", *usable(SEAM, HistoryPlugin)])
def test_pages_and_files_say_where_it_is_from_and_what_it_cannot_know(source):
    said = import_rows([noted(0, source=source)], sample_month.START_MS, sample_month.END_MS)
    report = replace(sample_month.report(), imports=said)
    page = html_page.render_html(report)
    words = " ".join(unescape(page).split())
    assert f"from {known_records(source)} (https://prom): 144.0 GPU-hours, 72.0 held" in words
    assert "75.0 % of the time of the GPUs that the source knew" in page
    assert known_limits(source)
    assert [limit for limit in known_limits(source) if limit not in words] == []
    assert (cells(report, "source"), cells(report, "gpu_hours"), cells(report, "coverage")) == (source, 144, 0.75)
    of_team = replace(sample_month.report("vision"), imports=said)
    assert cells(of_team, "gpu_hours") is None
    assert "144.0 GPU-hours" not in html_page.render_html(of_team)
    assert "Imported" not in html_page.render_html(sample_month.report("vision"))
