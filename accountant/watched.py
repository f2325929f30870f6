"""A file that is read again when it changes, and whose broken versions change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from agent.wholefile import stamp
from agent.yamlfile import FileFault

T = TypeVar("T")


class Watched(Generic[T]):
    """What `load` makes of a file, as of its last good version. Raises FileFault for a bad first one.

    report: called with the faults (`file:line: reason`) of a version that is not taken into force."""

    def __init__(self, path: Path, load: Callable[[Path], T], report: Callable[[str], None]) -> None:
        self._path = path
        self._load = load
        self._report = report
        self._stamp = stamp(path)
        self.refused = False
        """Whether the file's newest version is not in force."""
        self.current = load(path)

    def look(self) -> bool:
        """Read the file if it changed since the last look; True if `current` is another one now."""
        found = stamp(self._path)
        if found == self._stamp:
            return False
        self._stamp = found
        try:
            self.current = self._load(self._path)
            self.refused = False
        except FileFault as fault:
            self.refused = True
            self._report(str(fault))
            return False
        return True
