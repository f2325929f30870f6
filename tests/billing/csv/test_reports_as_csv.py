"""Reports as CSV."""

from __future__ import annotations

import csv as csvfile
import io
import re
from decimal import Decimal

import pytest

from accountant.exports.csv.lines import render_csv
from tests.billing.month_reports import OCTOBER, build_month, busy_ledger
from tests.billing.usage_rows import SAMPLE_PRICES, busy_month, held, ledger_of, price_book
from tests.fakes.list_ledger import ListLedger


def test_without_a_price_book_nothing_is_payable(ledger):
    assert "payable" not in render_csv(build_month(ledger, None, OCTOBER))


def test_an_empty_ledger_has_two_lines():
    found = build_month(ListLedger(), price_book(SAMPLE_PRICES), OCTOBER)
    assert render_csv(found).count("\r\n") == 2


def test_the_same_ledger_gives_the_same_bytes(report):
    again = build_month(busy_ledger(reversed(busy_month())), price_book(SAMPLE_PRICES), OCTOBER)
    assert render_csv(again) == render_csv(report)


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "\n=x", "＝1"])
def test_formulas_stay_text(name):
    ledger = ledger_of(held("2026-10-01", "2026-10-02", team=name))
    found = build_month(ledger, price_book(SAMPLE_PRICES), OCTOBER)
    cells = [row["team"] for row in csvfile.DictReader(io.StringIO(render_csv(found), newline=""))]
    shown = f"\\x{ord(name[0]):02x}{name[1:]}" if name[0] < " " else f"'{name}"
    assert shown in cells
    assert not any(cell.startswith(name) for cell in cells)


def test_csv_lines_add_up(report):
    text = render_csv(report)
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
