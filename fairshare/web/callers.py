"""People who sign in, as the callers file in force has them; it is looked at again like the token file.

Imported only where people sign in: a controller with tokens alone does without what verifies a provider's word.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from accountant import yamlfile
from accountant.callers.grants import Callers
from accountant.errors import CannotStart
from accountant.signin.cookies import Seal, key_of
from accountant.signin.people import People
from accountant.watched import Watched
from agent.clock import Clock
from fairshare.errors import FairshareError

HOUSE = "gputally-fairshare"
"""Cookies differ from the accountant's in name and seal: a session there is none here, though both have one key."""
_LOOK_EVERY_MS = 1_000


class NoSessions(FairshareError):
    """There is nothing that sessions can be signed with."""


class SignIns:
    """From any thread. report: called with the faults of a version that is not taken into force.

    Raises FileFault for a bad first version, NoSessions for the key."""

    def __init__(
        self,
        callers: Path,
        key: Path,
        public_url: str,
        session_seconds: int,
        clock: Clock,
        report: Callable[[str], None],
    ) -> None:
        try:
            self._seal = Seal(key_of(key), HOUSE)
        except CannotStart as error:
            raise NoSessions(f"pages_session_key: {error}") from error
        self._clock = clock
        self._public_url = public_url
        self._session_seconds = session_seconds
        self._lock = threading.Lock()
        self._file = Watched(callers, lambda path: yamlfile.load(path, Callers), report, self._enforce)
        self._looked_ms = clock.monotonic_ms()
        self._people: People | None = None
        self._enforce(self._file.current)

    def __call__(self) -> People | None:
        """None where no issuer of the file has a login."""
        with self._lock:
            now = self._clock.monotonic_ms()
            if now - self._looked_ms >= _LOOK_EVERY_MS:
                self._looked_ms = now
                self._file.look()
            return self._people

    def _enforce(self, callers: Callers) -> None:
        if all(issuer.login is None for issuer in callers.issuers):
            self._people = None
        else:
            self._people = People(callers, self._clock, self._seal, self._public_url, self._session_seconds)
