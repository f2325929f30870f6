"""Stores ended sessions of the pages as empty files with speaking names, in the data folder or beside the archive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from accountant.core.errors import LedgerUnavailable
from accountant.storage.folder_or_object_store import FileStore
from gputally.server.tokens_and_grants import AuthorityUnavailable

FOLDER: Final = "ended-sessions"


class SessionFiles:
    """Implements `gputally.server.ended_sessions.SessionStore`. store: one that every replica that serves the pages
    reads."""

    def __init__(self, store: FileStore) -> None:
        self._store = store

    def load(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for name in self._names():
            session, _, until = name.rpartition(".")
            if until.isascii() and until.isdigit() and len(until) < 16:
                found[session] = max(int(until), found.get(session, 0))
        return found

    def change(self, added: Mapping[str, int], removed: frozenset[str]) -> None:
        try:
            for session, until_ms in added.items():
                name = f"{FOLDER}/{session}.{until_ms}"
                if not self._store.exists(name):
                    self._store.create(name, b"")
            if removed:
                for name in self._names():
                    if name.rpartition(".")[0] in removed:
                        self._store.delete(f"{FOLDER}/{name}")
        except LedgerUnavailable as error:
            raise AuthorityUnavailable(f"ended sessions cannot be stored: {error}") from error

    def _names(self) -> list[str]:
        try:
            return self._store.names(FOLDER)
        except LedgerUnavailable as error:
            raise AuthorityUnavailable(f"ended sessions cannot be read: {error}") from error
