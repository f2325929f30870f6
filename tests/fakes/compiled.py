"""C fakes need a compiler: without one their tests are skipped with one clear line, and fail in CI."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.nvml.library import NoCompiler


def compiled(build: Callable[[Path], Path], folder: Path) -> Path:
    """The library that `build` makes in `folder`."""
    try:
        return build(folder)
    except NoCompiler as error:
        if "CI" in os.environ:
            pytest.fail(f"CI needs a C compiler: {error}")
        pytest.skip(str(error))
