"""The report as page, table and picture: it stands alone, lets nothing through, and is drawn to scale."""

from __future__ import annotations

import csv as csvfile
import io
import re
from decimal import Decimal
from xml.etree import ElementTree as ET

import pytest

from accountant.reports import csv_xlsx_parquet, html_and_pdf
from accountant.reports.report_builder import build
from tests.billing.october import HOUR, OCTOBER, Page, build_month

HOSTILE = '</td><script>alert("x")</script>{{7*7}}'


def test_the_page_stands_alone(report):
    text = html_and_pdf.render_html(report)
    page = Page(text)
    names = [tag for tag, _ in page.tags]
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(names)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert names.count("h1") == 1
    tables = names.count("table")
    assert tables == names.count("caption") > 5
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in page.tags if tag == "th")
    assert names.count("svg") - 1 == names.count("desc") == 3  # the brand's mark is hidden from readers


def test_the_same_ledger_gives_the_same_bytes(books, report):
    rows = books.busy_month()
    ledger = books.ledger(reversed(rows))
    ledger.put_policy(books.quota_policy(vision=16, language=16, robotics=12, genomics=8, teaching=4), 0)
    again = build_month(ledger, books.price_book(books.sample_prices), OCTOBER)
    assert html_and_pdf.render_html(again) == html_and_pdf.render_html(report)
    assert csv_xlsx_parquet.render_csv(again) == csv_xlsx_parquet.render_csv(report)


def test_hostile_names_stay_text(books):
    names = {"team": HOSTILE, "namespace": HOSTILE, "job": HOSTILE, "gpu_model": HOSTILE, "pool": HOSTILE}
    ledger = books.ledger([books.held("2026-10-01", "2026-10-03", gpus=8, busy=0.01, **names)])
    for team in (None, HOSTILE):
        text = html_and_pdf.render_html(build_month(ledger, books.price_book(books.sample_prices), OCTOBER, team=team))
        page = Page(text)
        assert "script" not in [tag for tag, _ in page.tags]
        assert "<script" not in text
        assert HOSTILE in page.text


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "\n=x", "＝1"])
def test_formulas_stay_text(books, name):
    ledger = books.ledger([books.held("2026-10-01", "2026-10-02", team=name)])
    found = build_month(ledger, books.price_book(books.sample_prices), OCTOBER)
    cells = [row["team"] for row in csvfile.DictReader(io.StringIO(csv_xlsx_parquet.render_csv(found), newline=""))]
    shown = f"\\x{ord(name[0]):02x}{name[1:]}" if name[0] < " " else f"'{name}"
    assert shown in cells
    assert not any(cell.startswith(name) for cell in cells)


def test_csv_lines_add_up(report):
    text = csv_xlsx_parquet.render_csv(report)
    assert text.endswith("\r\n")
    assert text.count("\n") == text.count("\r\n")
    rows = list(csvfile.DictReader(io.StringIO(text, newline="")))
    lines = [row for row in rows if row["record"] == "line"]
    (total,) = [row for row in rows if row["record"] == "total"]
    assert sum(Decimal(row["gpu_hours"]) for row in lines) == Decimal(total["gpu_hours"])
    assert sum(Decimal(row["cost"]) for row in lines if row["cost"]) == Decimal(total["cost"])
    payable = [Decimal(row["cost"]) for row in rows if row["record"] == "payable"]
    (payable_total,) = [row for row in rows if row["record"] == "payable total"]
    assert sum(payable) == Decimal(payable_total["cost"]) == report.statement.payable_total
    for row in lines:
        assert not re.search(r"[eE,]", row["gpu_hours"] + row["cost"])
        if row["unit_price"]:
            assert Decimal(row["unit_price"]) * Decimal(row["gpu_hours"]) == Decimal(row["cost"])
    assert {row["cost"] for row in lines if row["gpu_model"] == "Tesla T4"} == {""}


def test_more_teams_than_colours(books):
    rows = [books.held("2026-10-01", "2026-10-02", team=f"team-{i:02d}", gpus=20 - i) for i in range(12)]
    found = build_month(books.ledger(rows), None, OCTOBER)
    shown = html_and_pdf.series(found.daily)
    assert len(shown) == html_and_pdf.SERIES
    assert (shown[-1].name, len(shown[-1].teams)) == ("6 other teams", 6)
    assert sum(one.gpu_us for one in shown) == found.headline.figures.accounts.allocated


def test_charts_are_drawn_to_scale(books, report):
    svg = ET.fromstring(html_and_pdf.accounts(report.accounts, "Accounts"))
    widths = [float(rect.get("width")) for rect in svg.iter("{http://www.w3.org/2000/svg}rect")]
    shares = [row.share for row in report.accounts if row.gpu_us]
    assert widths == pytest.approx([share * 1040 for share in shares], abs=2.1)
    chart = ET.fromstring(html_and_pdf.daily(report.daily, "Days"))
    heights = [float(rect.get("height")) for rect in chart.iter("{http://www.w3.org/2000/svg}rect")]
    held = sum(sum(day.allocated_us.values()) for day in report.daily)
    per_hour = sum(heights) / (held / HOUR)
    assert 'class="capacity"' in html_and_pdf.daily(report.daily, "Days")
    assert 'class="capacity"' not in html_and_pdf.daily(report.daily, "Days", capacity=False)
    assert per_hour == pytest.approx((280 - 12 - 28) / 2000, rel=0.01)


@pytest.mark.parametrize(
    ("gpus", "ticks"),
    [(1, "0 6 12 18 24"), (10, "0 60 120 180 240"), (400, "0 2,500 5,000 7,500 10,000"), (64, "0 400 800 1,200 1,600")],
)
def test_ticks_say_what_they_stand_for(books, gpus, ticks):
    found = build(
        books.ledger([books.held("2026-10-01", "2026-10-02", gpus=gpus)]),
        None,
        *map(books.at, ("2026-10-01", "2026-10-02")),
    )
    chart = ET.fromstring(html_and_pdf.daily(found.daily, "Days"))
    texts = [text.text for text in chart.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "tick end"]
    assert texts == ticks.split()
