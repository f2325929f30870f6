"""Where the policy file stands, and the one way in which a page may change it."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from pathlib import Path

from fairshare.errors import FairshareError


class NotKept(FairshareError):
    """The policy could not be written, and why."""


class Changed(NotKept):
    """The file is no longer the one that the form was opened on."""


def digest(text: str) -> str:
    """What a form remembers of the file it was opened on."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class PolicyPlace:
    """The file that the controller reads. write: it may be changed from here."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.writable = writable

    @property
    def name(self) -> str:
        """As people know it."""
        return self._path.name

    @property
    def path(self) -> str:
        return str(self._path)

    def read(self) -> str:
        """Raises NotKept."""
        try:
            return self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise NotKept(f"{self._path}: {getattr(error, 'strerror', None) or error}") from error

    def write(self, text: str, before: str) -> None:
        """Replace the file at once, or not at all. before: digest of what should stand there. Raises NotKept."""
        if not self.writable:
            raise NotKept("pages do not write the policy here: commit the file instead")
        with self._lock:
            if digest(self.read()) != before:
                raise Changed(f"{self._path} has changed since the form was opened: open it again")
            try:
                self._replace(text)
            except OSError as error:
                raise NotKept(f"{self._path}: {error.strerror or error}") from error

    def _replace(self, text: str) -> None:
        place = self._path.resolve()
        mode = place.stat().st_mode
        handle, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
        fresh = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            fresh.chmod(mode & 0o777)
            fresh.replace(place)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
