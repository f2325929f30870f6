"""Finds files outside the repository that tests read: vectors, traces, the schedulers' CRDs.

They are in a folder beside the checkout, or in the folder that GPUTALLY_SHARED names. A test without its file is
skipped with one line that names it; in CI it fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


def shared(name: str) -> Path:
    """Return the path of a shared file or folder. For tests and fixtures; at import time use `shared_cases`."""
    path = _path(name)
    if not path.exists():
        message = _absent(path, name)
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


def shared_cases(name: str, cases_in: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Return the cases of a shared JSON file, for `pytest.mark.parametrize`.

    cases_in: extracts the cases from the parsed document.
    Without the file there is one case, which is skipped with the reason; in CI importing the test module fails."""
    path = _path(name)
    if path.exists():
        return list(cases_in(json.loads(path.read_text("utf-8"))))
    if os.environ.get("CI"):
        raise FileNotFoundError(_absent(path, name))
    return [pytest.param({}, marks=pytest.mark.skip(reason=_absent(path, name)), id="absent")]


def _path(name: str) -> Path:
    return Path(os.environ.get("GPUTALLY_SHARED", Path(__file__).parents[2] / "shared")) / name


def _absent(path: Path, name: str) -> str:
    return f"{path} does not exist; set GPUTALLY_SHARED to the folder that holds {name}"
