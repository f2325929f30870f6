"""A file that is read again when it changes, and whose broken versions change nothing.

A version counts as read once it is in force: what keeps it from that (a file that cannot be read, a disk that is full)
is tried again at every look. Only a version that is wrong in itself waits for the file to change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from agent.wholefile import Stamp, stamp
from agent.yamlfile import FileFault, Unreadable

T = TypeVar("T")


class Renewed(Generic[T]):
    """What `load` makes of a file, as of its last good version. Raises FileFault for a bad first one.

    enforce: puts a later version in force; the first one is its owner's. Whatever it raises leaves the version before
    in force, and the new one is tried again at the next look."""

    def __init__(self, path: Path, load: Callable[[Path], T], enforce: Callable[[T], None] | None = None) -> None:
        self._path = path
        self._load = load
        self._enforce = enforce
        self._stamp: Stamp | None = stamp(path)
        self._again = False
        """Whether the version that was looked at last has to be tried again."""
        self._raised = ""
        """The fault that was raised last."""
        self.refused = False
        """Whether the file's newest version is not in force."""
        self.current = load(path)

    def enforce_again(self) -> None:
        """Put the version that `current` holds in force at the next look: it could not be at the start."""
        self._again = True
        self.refused = True

    def renew(self) -> bool:
        """Read the file and put it in force, if it changed since the last time or could not be in force then; True if
        it is another version that is in force now.

        Raises FileFault for a version that is not put in force, once; and what `enforce` raises, each time."""
        found = stamp(self._path)
        if found == self._stamp and not self._again:
            return False
        if found != self._stamp:
            self._stamp, self._raised = found, ""
        self._again = True
        try:
            value = self._load(self._path)
            if self._enforce is not None:
                self._again_after_enforcing(value)
        except FileFault as fault:
            self.refused = True
            self._again = isinstance(fault, (Unreadable, NotInForce))
            told, self._raised = self._raised, str(fault)
            if str(fault) == told:
                return False
            raise
        except BaseException:
            self.refused = True
            raise
        self.current = value
        self._again, self._raised, self.refused = False, "", False
        return True

    def _again_after_enforcing(self, value: T) -> None:
        assert self._enforce is not None
        try:
            self._enforce(value)
        except FileFault as fault:
            raise NotInForce(fault.faults) from fault


class NotInForce(FileFault):
    """The file can be read, and is refused by what it has to agree with, which may change."""


class Watched(Renewed[T]):
    """One whose faults are reported instead of raised.

    report: called with the faults (`file:line: reason`) of a version that is not put in force."""

    def __init__(
        self,
        path: Path,
        load: Callable[[Path], T],
        report: Callable[[str], None],
        enforce: Callable[[T], None] | None = None,
    ) -> None:
        super().__init__(path, load, enforce)
        self._report = report

    def look(self) -> bool:
        """See renew."""
        try:
            return self.renew()
        except FileFault as fault:
            self._report(str(fault))
            return False
