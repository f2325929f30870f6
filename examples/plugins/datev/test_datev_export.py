"""The export passes the suite of exports, and its files have the form that DATEV publishes."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from datev_export import ENCODING, EXPORT, SETTINGS

from accountant.billing.statements import Adjustment
from accountant.core.errors import CannotRender
from accountant.reports.report_builder import Report
from gputally.testing.exports import HOSTILE, ExportSuite, refusal, reports, written

CENTRES = {"100": "vision", "200": HOSTILE, "900": "__idle__"}
LINES = [
    "consultant: 29098", "client: 55003", "year_begins: 4", "account: 4980", "counter_account: 4900",
    "cost_centres:", *(f"  {team!r}: '{centre}'" for centre, team in CENTRES.items() if team != HOSTILE),
]  # fmt: skip


def configure(folder: Path, *more: str) -> None:
    hostile = HOSTILE.replace("'", "''")
    text = "\n".join([*LINES, f"  '{hostile}': '200'", *more])
    (folder / "datev.yaml").write_text(text + "\n")
    os.environ[SETTINGS] = str(folder / "datev.yaml")


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SETTINGS, "")  # it is as before after the test
    configure(tmp_path, "open_months: true")
    return tmp_path


def fields(content: bytes) -> list[list[str]]:
    text = content.decode(ENCODING)
    assert text.endswith("\r\n")
    return list(csv.reader(io.StringIO(text, newline=""), delimiter=";", strict=True))


class TestDatev(ExportSuite):
    plugin = EXPORT

    def due(self, content: bytes) -> Mapping[str, Decimal]:
        _, columns, *entries = fields(content)
        rows = [dict(zip(columns, entry, strict=True)) for entry in entries]
        sign = {"S": 1, "H": -1}
        return {
            CENTRES[row["KOST1 - Kostenstelle"]]: sign[row["Soll/Haben-Kennzeichen"]]
            * Decimal(row["Umsatz (ohne Soll/Haben-Kz)"].replace(",", "."))
            for row in rows
        }


def month() -> Report:
    return reports(False).month


def test_the_head_has_the_31_fields_of_a_posting_batch() -> None:
    head, columns, *entries = fields(written(EXPORT, month()))
    assert len(head) == 31
    assert head[:5] == ["EXTF", "700", "21", "Buchungsstapel", "13"]
    assert head[10:17] == ["29098", "55003", "20260401", "4", "20261001", "20261031", "GPU 2026-10"]
    assert columns.index("KOST1 - Kostenstelle") == 36
    assert {len(entry) for entry in entries} == {len(columns)}
    assert {entry[columns.index("Belegdatum")] for entry in entries} == {"3110"}


def test_a_credit_is_on_the_other_side() -> None:
    statement = month().statement
    credit = Adjustment("A1", "2026-10", "2026-10", "vision", Decimal("-99.90"), "EUR", "a night lost", "a", "b", 0)
    report = replace(month(), statement=replace(statement, adjustments=(credit,), due={"vision": Decimal("-89.62")}))
    assert TestDatev().due(written(EXPORT, report)) == {"vision": Decimal("-89.62")}


def test_a_month_that_may_change_is_refused_unless_it_is_asked_for(settings: Path) -> None:
    configure(settings)
    assert "2026-10" in (refusal(EXPORT, month()) or "")
    assert refusal(EXPORT, replace(month(), period="closed")) is None


@pytest.mark.parametrize(
    "fault",
    ["account: none", "cost_centres: {}", "consultant: 7", "acount: 1"],
    ids=["number", "team", "small", "word"],
)
def test_a_fault_of_the_settings_is_named(settings: Path, fault: str) -> None:
    name = fault.partition(":")[0]
    kept = [line for line in LINES if not line.startswith(name)]
    if name == "cost_centres":
        kept = [line for line in kept if not line.startswith(" ")]
    (settings / "datev.yaml").write_text("\n".join([*kept, fault, "open_months: true"]) + "\n")
    with pytest.raises(CannotRender, match=r"datev\.yaml"):
        written(EXPORT, month())


def test_an_amount_that_the_format_cannot_hold_is_refused() -> None:
    report = replace(month(), statement=replace(month().statement, due={"vision": Decimal("0.005")}))
    assert "vision" in (refusal(EXPORT, report) or "")
