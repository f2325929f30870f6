"""Compiles the fakes written in C. Without a compiler their tests are skipped with one line, and in CI they fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.nvml.library import NoCompiler


def compiled(build: Callable[[Path], Path], folder: Path) -> Path:
    """Return the library that `build` writes to `folder`."""
    try:
        return build(folder)
    except NoCompiler as error:
        if "CI" in os.environ:
            pytest.fail(f"CI needs a C compiler: {error}")
        pytest.skip(str(error))
