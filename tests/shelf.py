"""Files that are read in place and never copied: vectors, traces, the schedulers' CRDs.

They stand beside the checkout, or where GPUTALLY_SHARED says. Absent they skip a test with one clear
line, and fail it in CI.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def shared(name: str) -> Path:
    """The file or folder `name` of the shelf."""
    path = Path(os.environ.get("GPUTALLY_SHARED", Path(__file__).parents[2] / "shared")) / name
    if not path.exists():
        message = f"{path} is not there; set GPUTALLY_SHARED to the folder that holds {name}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path
