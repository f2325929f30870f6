"""How long a PDF takes."""

from __future__ import annotations

import time

import pytest

from accountant.exports.pdf import document
from accountant.reports.report_builder import Report
from tests.billing.usage_rows import held
from tests.reports import sample_month


def processor_s(report: Report) -> float:
    began = time.process_time()
    document.render_pdf(report)
    return time.process_time() - began


@pytest.mark.real
def test_long_names_do_not_multiply_the_time_of_a_pdf() -> None:
    """A name that may be broken after each of its 253 characters took fifteen times as long as a short one."""

    def named(length: int) -> Report:
        rows = [
            held("2026-10-01", "2026-10-02", **dict.fromkeys(("namespace", "job"), f"{number:x<{length}}"))
            for number in range(10)
        ]
        return sample_month.october(*rows)

    short = processor_s(named(8))
    assert processor_s(named(253)) < 5 * short
