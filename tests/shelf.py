"""Files that are read in place and never copied: vectors, traces, the schedulers' CRDs.

They stand beside the checkout, or where GPUTALLY_SHARED says. Absent they skip a test with one clear
line, and fail it in CI."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


def shared(name: str) -> Path:
    """The file or folder `name` of the shelf. For tests and fixtures; `shared_cases` is for what is read at import."""
    path = _path(name)
    if not path.exists():
        message = _absent(path, name)
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


def shared_cases(name: str, cases_in: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """The cases of a JSON file of the shelf, for `pytest.mark.parametrize`: cases_in takes them out of the document.

    Absent there is one case that skips with the reason, and in CI an error of the module."""
    path = _path(name)
    if path.exists():
        return list(cases_in(json.loads(path.read_text("utf-8"))))
    if os.environ.get("CI"):
        raise FileNotFoundError(_absent(path, name))
    return [pytest.param({}, marks=pytest.mark.skip(reason=_absent(path, name)), id="absent")]


def _path(name: str) -> Path:
    return Path(os.environ.get("GPUTALLY_SHARED", Path(__file__).parents[2] / "shared")) / name


def _absent(path: Path, name: str) -> str:
    return f"{path} is not there; set GPUTALLY_SHARED to the folder that holds {name}"
