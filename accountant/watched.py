"""A file that is read again when it changes, and whose broken versions change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from agent.wholefile import stamp
from agent.yamlfile import FileFault, Unreadable

T = TypeVar("T")


class Renewed(Generic[T]):
    """What `load` makes of a file, as of its last good version. Raises FileFault for a bad first one."""

    def __init__(self, path: Path, load: Callable[[Path], T]) -> None:
        self._path = path
        self._load = load
        self._stamp = stamp(path)
        self._unread = ""
        """Why the file could not be read when it was looked at last."""
        self.refused = False
        """Whether the file's newest version is not in force."""
        self.current = load(path)

    def renew(self) -> bool:
        """Read the file if it changed since the last time, or could not be read then; True if `current` is another one
        now.

        Raises FileFault for a version that is not taken into force; once, also for a file that cannot be read, which is
        tried again each time."""
        found = stamp(self._path)
        if found == self._stamp and not self._unread:
            return False
        self._stamp = found
        told, self._unread = self._unread, ""
        try:
            self.current = self._load(self._path)
        except FileFault as fault:
            self.refused = True
            if isinstance(fault, Unreadable):
                self._unread = str(fault)
            if str(fault) == told:
                return False
            raise
        self.refused = False
        return True


class Watched(Renewed[T]):
    """One whose faults are told instead of raised.

    report: called with the faults (`file:line: reason`) of a version that is not taken into force."""

    def __init__(self, path: Path, load: Callable[[Path], T], report: Callable[[str], None]) -> None:
        super().__init__(path, load)
        self._report = report

    def look(self) -> bool:
        """See renew."""
        try:
            return self.renew()
        except FileFault as fault:
            self._report(str(fault))
            return False
