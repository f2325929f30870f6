"""The PDF, with the real WeasyPrint and Pango."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import weasyprint

from accountant.core.settings import InvoiceIssuer
from accountant.exports.pdf import document
from accountant.reports import html_page
from tests.billing.usage_rows import held
from tests.reports import sample_month

pytestmark = pytest.mark.real


def test_a_pdf_is_the_same_every_time_and_carries_no_script() -> None:
    names = dict.fromkeys(("team", "namespace", "job"), "<script>alert(1)</script>")
    report = sample_month.october(held("2026-10-01", "2026-10-03", gpus=8, busy=0.01, **names))
    first, second = (document.render_pdf(report) for _ in range(2))
    assert first == second
    assert first.startswith(b"%PDF-")
    assert not any(mark in first for mark in (b"/JavaScript", b"/Launch", b"/URI", b"/CreationDate"))


def test_charts_have_their_colours_on_paper() -> None:
    style = document._chart_style()
    assert ".a-busy { fill: #0072b2;" in style
    assert "var(" not in style


def test_nothing_is_fetched() -> None:
    with pytest.raises(ValueError, match="must not load external content"):
        document._refuse("file:///etc/passwd")


def test_captions_for_screen_readers_are_not_printed() -> None:
    """On the page they are hidden; WeasyPrint would draw clipped text as specks beside the tables."""
    page = html_page.render_html(sample_month.charged())
    hidden = re.findall(r'<caption class="quiet">([^<]+)</caption>', page)
    assert len(hidden) > 5
    captions = [
        box
        for sheet in weasyprint.HTML(string=page).render().pages
        for box in sheet._page_box.descendants()
        if box.element_tag == "caption" and "quiet" in (box.element.get("class") or "")
    ]
    assert captions == []


@pytest.mark.parametrize(
    "name", ["team-" + "x" * 248, "a-team-of-a-name-as-long-as-a-namespace-may-have-it-in-kubernetes"]
)
def test_no_name_pushes_a_figure_off_the_page(name: str) -> None:
    names = dict.fromkeys(("team", "queue", "namespace", "job", "user"), name)
    named = held("2026-10-01", "2026-10-03", gpus=8, busy=0.01, **names)
    report = sample_month.october(named, held("2026-10-01", "2026-10-03", busy=0.3))
    for page in weasyprint.HTML(string=html_page.render_html(report)).render().pages:
        (box,) = page._page_box.children[0].children[:1] or [page._page_box]
        inside = [part for part in box.descendants() if getattr(part, "text", "").strip()]
        assert [part.text for part in inside if part.position_x + part.width > page.width] == []


@pytest.mark.parametrize("team", ["vision", "team-" + "x" * 248])
def test_the_first_page_of_an_invoice_says_what_it_is(team: str) -> None:
    report = replace(
        sample_month.october(held("2026-10-01", "2026-10-03", gpus=8, team=team)),
        team=team, issuer=InvoiceIssuer(name="The platform"),
    )  # fmt: skip
    first = weasyprint.HTML(string=html_page.render_html(report)).render().pages[0]
    said = [getattr(box, "text", "") for box in first._page_box.descendants()]
    text = "".join("".join(said).split())
    assert report.due_total is not None
    due = f"USD{report.due_total:,.2f}"
    for part in ("Invoice", f"INV-2026-10-{team}", "Theplatform", "October2026", due, "Currency"):
        assert part in text, part
    assert not replace(report, issuer=None).invoice, "a report that nobody issues is no invoice"
    assert not replace(report, team=None).invoice, "a report of all teams is no invoice"
