"""The PDF, with the real WeasyPrint and Pango."""

from __future__ import annotations

import pytest

from accountant.reports import pdf
from accountant.reports.model import build
from tests.books.rows import held
from tests.fakes.rows import ListLedger
from tests.reports import sample

pytestmark = pytest.mark.real


def test_a_pdf_is_the_same_every_time_and_carries_no_script() -> None:
    names = dict.fromkeys(("team", "namespace", "job"), "<script>alert(1)</script>")
    ledger = ListLedger([held("2026-10-01", "2026-10-03", gpus=8, busy=0.01, **names)])
    report = build(ledger, sample.book(), sample.START_MS, sample.END_MS)
    first, second = (pdf.render(report) for _ in range(2))
    assert first == second
    assert first.startswith(b"%PDF-")
    assert not any(mark in first for mark in (b"/JavaScript", b"/Launch", b"/URI", b"/CreationDate"))


def test_charts_have_their_colours_on_paper() -> None:
    style = pdf._chart_style()
    assert ".a-busy { fill: #0072b2;" in style
    assert "var(" not in style


def test_nothing_is_fetched() -> None:
    with pytest.raises(ValueError, match="loads nothing"):
        pdf._refuse("file:///etc/passwd")
