"""The version of this release, the same as in pyproject.toml (scripts/release.py compares them).

A constant, because reading it from the installed distribution loads eighty modules in every program."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
