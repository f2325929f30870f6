"""The version of this release, the same as in pyproject.toml (scripts/release.py compares them), and the order of
releases.

A constant, because reading it from the installed distribution loads eighty modules in every program."""

from __future__ import annotations

import re
from typing import Final

__version__: Final = "0.1.0"
_RELEASE: Final = re.compile(r"v?([0-9]{1,9}(?:\.[0-9]{1,9}){1,3})(?![0-9])(.*)", re.ASCII)


def release_order(version: str) -> tuple[tuple[int, ...], bool] | None:
    """Return what a version is ordered by, so that 0.9.1 < 0.10.0rc1 < 0.10.0; None if the text is no version."""
    found = _RELEASE.fullmatch(version)
    return None if found is None else (tuple(map(int, found[1].split("."))), not re.match(r"[-.]?[a-z]", found[2]))


def is_older(version: str, than: str = __version__) -> bool:
    """Return whether both are versions, and the first one is of an earlier release."""
    one, other = release_order(version), release_order(than)
    return one is not None and other is not None and one < other
