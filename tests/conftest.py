"""What holds for all tests: how hard properties look (tests/effort.py), and what is loaded and collected.

What the suite loads stays until its end. It is left out of the collections of cyclic garbage, which would else walk all
of it again and again: a third of the time that loading takes.
"""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
from hypothesis import settings

from tests.effort import examples

settings.register_profile("house", max_examples=examples(30, 200))
settings.load_profile("house")

_REAL = re.compile(r"^pytestmark = \[?pytest\.mark\.real\b", re.MULTILINE)
_GARBAGE = 50_000
"""Objects between collections."""

gc.disable()


def pytest_collection_finish() -> None:
    """All is loaded."""
    gc.freeze()
    gc.set_threshold(_GARBAGE)
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules that are `real` as a whole are not even imported where no such test is wanted."""
    if config.getoption("markexpr") != "not real" or collection_path.suffix != ".py":
        return None
    return bool(_REAL.search(collection_path.read_text(encoding="utf-8"))) or None
