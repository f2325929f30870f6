"""The ending of a file's name is its format."""

from __future__ import annotations

from pathlib import Path

import pytest

from accountant.exports.protocol import exports
from gputally.base.file_formats import WrongEnding, format_of_file

ENDINGS = {name: export.suffix for name, export in exports().items()}
SOME = {
    "csv": "csv", "charges": "charges.zip", "charges-1.2": "charges-1.2.csv", "html": "html", "json": "json",
    "pdf": "pdf", "parquet": "parquet",
}  # fmt: skip
"""Formats, of which one's ending is a part of another one's."""


@pytest.mark.parametrize(
    ("name", "asked", "form"),
    [
        *((f"october.{ending}", asked, form) for form, ending in ENDINGS.items() for asked in (None, form)),
        *((f"OCTOBER.{ending}".upper(), None, form) for form, ending in ENDINGS.items()),
        ("october", None, "html"),
        *(("october", form, form) for form in ENDINGS),
    ],
)
def test_a_name_has_one_format(name, asked, form):
    assert format_of_file(Path(name), ENDINGS, asked, "html") == form


def test_a_name_with_an_ending_of_no_format_has_the_one_that_is_asked_for():
    assert format_of_file(Path("october.bak"), SOME, "csv", "html") == "csv"


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("october.docx", None), ("2026.10", None), ("october.pdf", "html"), ("october.html", "pdf"),
        ("october.charges-1.2.csv", "csv"), ("october.charges.zip", "csv"), ("october.json", "parquet"),
    ],
)  # fmt: skip
def test_a_name_that_says_something_else_is_refused(name, asked):
    with pytest.raises(WrongEnding):
        format_of_file(Path(name), SOME, asked, "html")
