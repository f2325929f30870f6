"""FOCUS exports in public checkers: the FinOps Foundation's validator for 1.2, focus-data-toolkit for 1.4.

scripts/focus.sh installs the programs in a venv of their own; the drivers come from the shared files."""

from __future__ import annotations

import csv
import io
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from accountant.exports.rendering_process import written
from accountant.exports.zip_archive import unpack
from accountant.reports.report_builder import Report
from tests.real.programs import built
from tests.reports import sample_month
from tests.shared_files import shared

pytestmark = pytest.mark.real

QUIRKS = {
    "InvoiceId-C-004-C": "says that InvoiceId must be null, whatever the row; C-005-C says that it must not",
    "InvoiceId-C-005-C": "the other of the two: one of them fails for every file",
}
"""Rules of the validator's model 1.2.0.1 that no file can meet."""
KIND = ("ChargeCategory", "ChargeClass", "PricingCategory", "CommitmentDiscountStatus", "x_Account", "x_Detail")


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python that has the checkers."""
    return built("focus.sh")


def checked(*command: str | Path) -> str:
    """Return a checker's output. Fails with it if the checker found something."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("team", [None, "genomics"])
def test_the_bundle_passes_and_the_check_would_catch_faults(python: Path, tmp_path: Path, team: str | None) -> None:
    for name, content in unpack(written("focus", replace(sample_month.charged(), team=team))).items():
        (tmp_path / name).write_bytes(content)
    said = checked(python, shared("tools/focus_bundle_check.py"), tmp_path, "--self-test")
    assert "0 finding(s)" in said
    assert said.count("caught: ") >= 6


@pytest.mark.parametrize("team", [None, "genomics"])
def test_the_toolkits_own_program_passes_the_files_of_the_bundle(
    python: Path, tmp_path: Path, team: str | None
) -> None:
    """With explicit files it also compares each row with its invoice line (FDT-CROSS-015)."""
    files = unpack(written("focus", replace(sample_month.charged(), team=team)))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    datasets = ("cost_and_usage", "billing_period", "invoice_detail")
    asked = [part for name in datasets for part in (f"--{name.replace('_', '-')}", tmp_path / f"{name}.csv")]
    program = [python.parent / "focus-toolkit", "validate-bundle"]
    assert "bundle validation: OK" in checked(*program, *asked)
    detail = tmp_path / "invoice_detail.csv"
    detail.write_text(detail.read_text(encoding="utf-8").replace("Adjustment", "Usage"), encoding="utf-8")
    wrong = subprocess.run([*program, *asked], capture_output=True, text=True, check=False, timeout=280)
    assert "FDT-CROSS-015" in wrong.stdout, "it looks"


def test_the_projection_passes_with_one_row_of_every_kind(python: Path, tmp_path: Path) -> None:
    """The validator accepts a column if any row has a legal value, so a file of few rows needs one row of each kind."""
    whole, few = tmp_path / "whole.csv", tmp_path / "few.csv"
    report: Report = sample_month.charged()
    content = written("focus-1.2", report)
    whole.write_bytes(content)
    rows = list(csv.DictReader(io.StringIO(content.decode(), newline="")))
    kinds = {tuple(row[name] for name in KIND): row for row in rows}
    assert len(kinds) > 12
    with few.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(kinds.values())
    allowed = [f"--allow={rule}" for rule in QUIRKS]
    said = checked(python, shared("tools/focus_validate_1_2.py"), whole, few, *allowed)
    assert said.count("unexpected=0") == 2
