"""What libraries load on the side, if it is installed, and a process that only serves has no use for.

The engine looks for pandas' kinds of nothing among the parameters of a statement, Arrow for its columns among what is
made an array: either loads all of it, which takes half a second and 45 MiB. Where it is not installed both do without,
and remember that for as long as the process lives; so this is for whoever owns the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Absent(MetaPathFinder):
    """Finds that there is no such package."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname == self._package:
            raise ModuleNotFoundError(f"{fullname} is not loaded into this process", name=fullname)
        return None


@contextmanager
def without(package: str) -> Iterator[None]:
    """Within, the package cannot be imported unless it is already."""
    absent = _Absent(package)
    sys.meta_path.insert(0, absent)
    try:
        yield
    finally:
        sys.meta_path.remove(absent)
