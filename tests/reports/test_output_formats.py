"""Every form of a report: written twice, it is the same; a name stays text; an empty month has it.

What a format alone has is tested in its folder of `tests/exports`."""

from __future__ import annotations

import hashlib
import re

import pytest

from accountant.exports.protocol import exports, file_name
from accountant.exports.rendering_process import written
from accountant.reports import report_tables
from accountant.reports.report_builder import Report, build
from tests.billing.usage_rows import held
from tests.exports.format_cases import cases_of
from tests.fakes.list_ledger import ListLedger
from tests.reports import sample_month

AS_TEXT = cases_of("AS_TEXT")
"""The forms of a report of any days."""
PLAIN = [pytest.param(form, marks=pytest.mark.real if form == "pdf" else ()) for form in AS_TEXT]
"""Those, of which the PDF needs a library of the system."""


def test_every_form_has_cases() -> None:
    assert {name for name, export in exports().items() if not export.charges} == AS_TEXT.keys()


@pytest.fixture(scope="module")
def report() -> Report:
    return sample_month.report()


@pytest.mark.parametrize("form", PLAIN)
def test_a_second_report_is_the_same_in_every_form(report: Report, form: str) -> None:
    again = sample_month.report.__wrapped__()
    first, second = (hashlib.sha256(written(form, one)).hexdigest() for one in (report, again))
    assert first == second


@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("name", sample_month.HOSTILE)
def test_names_stay_text_in_every_form(name: str, form: str) -> None:
    names = dict.fromkeys(("team", "namespace", "job", "user", "gpu_model", "pool"), name)
    report = sample_month.october(held("2026-10-01", "2026-10-03", gpus=8, busy=0.01, **names))
    AS_TEXT[form](written(form, report), name)


@pytest.mark.parametrize("form", PLAIN)
def test_an_empty_month_has_every_form(form: str) -> None:
    for book in (None, sample_month.book()):
        assert written(form, build(ListLedger(), book, sample_month.START_MS, sample_month.END_MS))


def test_every_table_is_as_wide_as_its_heading(report: Report) -> None:
    for table in report_tables.tables(report):
        assert {len(row) for row in table.rows} <= {len(table.columns)}
        assert table.total is None or len(table.total) == len(table.columns)


def test_no_two_teams_share_a_file() -> None:
    teams = ("vision", "шахта", "школа", "a/b", "a_b", "a b", "x" * 253, "x" * 252, "\udc80")
    names = [file_name("focus-1.2.csv", "2026-10", team) for team in teams]
    assert names[0] == "gputally-2026-10-vision.focus-1.2.csv"
    assert names[4] == "gputally-2026-10-a_b.focus-1.2.csv"
    assert len(set(names)) == len(teams)
    assert all(len(name) < 255 and re.fullmatch(r"[\w.-]+", name, re.ASCII) for name in names)
