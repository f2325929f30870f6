"""Remembers sessions that were ended before their expiry, so that a copied cookie of a session is refused too.

A session is a signed cookie, which stays valid by itself. Signing out therefore stores a digest of the session's id
until no cookie of the session can be valid. All replicas that serve the pages share a store (`SessionStore`).

The number of stored sessions is limited. If more are ended, all sessions that began before are over, and everybody
signs in again: no ended session ever becomes valid again."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import Final, Protocol

import structlog

from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import Clock
from gputally.server.tokens_and_grants import AuthorityUnavailable

MOST: Final = 4_000
"""Largest number of ended sessions that are stored."""
ALL: Final = "all-before"
"""The name under which a store has the time before which every session is over."""
LOOK_SECONDS: Final = 5.0
"""How often a replica reads what other replicas stored."""


class SessionStore(Protocol):
    """Stores ended sessions for all replicas: a time in UTC milliseconds by the digest of the session's id, after which
    no cookie of the session is valid; and under `ALL` the time before which all sessions are over. Every method raises
    AuthorityUnavailable."""

    def load(self) -> Mapping[str, int]:
        """Return what is stored."""
        ...

    def change(self, added: Mapping[str, int], removed: frozenset[str]) -> None:
        """Add sessions, and remove others."""
        ...


class MemoryStore:
    """A store of one process, whose sessions are valid again after a restart."""

    def __init__(self) -> None:
        self._stored: dict[str, int] = {}

    def load(self) -> Mapping[str, int]:
        return dict(self._stored)

    def change(self, added: Mapping[str, int], removed: frozenset[str]) -> None:
        self._stored = {name: at for name, at in self._stored.items() if name not in removed} | dict(added)


def digest(session_id: str) -> str:
    """Return the name under which a session is stored; nobody can compute its id from it."""
    return hashlib.sha256(session_id.encode()).hexdigest()[:32]


class EndedSessions:
    """The sessions that were ended. Thread-safe.

    Reading a store may take long, so only `read` and `end` do it, and `ended` answers from memory."""

    def __init__(self, clock: Clock, store: SessionStore | None = None) -> None:
        """store: None for a store of this process."""
        self._clock = clock
        self._store = store or MemoryStore()
        self._lock = threading.Lock()
        self._known: Mapping[str, int] = {}
        self._unstored: tuple[Mapping[str, int], frozenset[str]] = {}, frozenset()
        """The changes that the store has not taken yet: added and removed sessions."""

    def ended(self, session_id: str, began_ms: int) -> bool:
        """Return True if a session was ended. began_ms: when the person signed in."""
        known = self._known
        return digest(session_id) in known or began_ms <= known.get(ALL, -1)

    def known(self) -> Mapping[str, int]:
        """Return what this process knows, in the form of `SessionStore`."""
        return self._known

    def end(self, session_id: str, until_ms: int) -> None:
        """End a session, at once in this process. until_ms: the time after which no cookie of the session is valid.
        Raises AuthorityUnavailable if the store cannot be written; other replicas then do not know it before a later
        `end` or `read` stores it."""
        now = self._clock.wall_ms()
        added = {digest(session_id): until_ms}
        with self._lock:
            over = frozenset(name for name, at in self._known.items() if name != ALL and at <= now)
            if len(self._known) - len(over) >= MOST:
                structlog.get_logger("http").warning("all_sessions_ended", reason=f"{MOST} sessions were ended by hand")
                over, added = frozenset(self._known) - {ALL}, {ALL: now}
            self._known = {name: at for name, at in self._known.items() if name not in over} | added
            unstored, removed = self._unstored
            kept = {name: at for name, at in unstored.items() if name not in over}
            self._unstored = kept | added, removed | over
            self._write()

    def read(self) -> None:
        """Read what other replicas stored, and store what could not be stored before. Raises AuthorityUnavailable."""
        stored, now = self._store.load(), self._clock.wall_ms()
        with self._lock:
            before = max(stored.get(ALL, -1), self._known.get(ALL, -1))
            known = {name: at for name, at in {**self._known, **stored}.items() if at > now}
            self._known = known | ({ALL: before} if before >= 0 else {})
            if not self.stored:
                self._write()

    @property
    def stored(self) -> bool:
        """Return whether the store has every session that was ended here."""
        return not any(self._unstored)

    def _write(self) -> None:
        self._store.change(*self._unstored)
        self._unstored = {}, frozenset()

    def keep_reading(self, stop: threading.Event, task: BackgroundTask) -> None:
        """Read what other replicas store until `stop` is set (`gputally.base.background_tasks.Work`)."""
        fault = ""
        while not stop.is_set():
            task.begin()
            before, fault = fault, ""
            try:
                self.read()
            except AuthorityUnavailable as error:
                fault = str(error)
            task.succeed()  # the pages go on with what is known
            if fault and not before:
                structlog.get_logger("http").warning("ended_sessions_not_read", reason=fault)
            self._clock.wait(LOOK_SECONDS, stop)
