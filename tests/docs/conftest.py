"""The documents of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def written() -> dict[Path, str]:
    """Every Markdown file that people read, with its text."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "helm").rglob("*.md")]
    return {path: path.read_text(encoding="utf-8") for path in sorted(found)}


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def pages() -> dict[Path, str]:
    return written()
