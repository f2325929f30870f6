"""A folder as a destination of a deliveries file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "folder"


@contextmanager
def destination(folder: Path) -> Iterator[object]:
    """Yield the settings. folder: for files of its own."""
    yield str(folder / "sent")
