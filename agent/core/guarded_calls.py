"""Calls what another package brings so that it can stop nothing: a reader of GPUs, a source of holders.

It opens and works on a thread of its own, with a time limit. While a call has not ended, no further one begins. What
fails is named and tried again. The log has one line for each way in which it fails until it answers again, because the
text of a failure is of others and can be another one each time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, Literal, Protocol, TypeVar

from agent.core.settings import SettingsError
from gputally.base.errors import AgentError
from gputally.base.plugins import NoPlugin, TakesTooLong, within
from gputally.base.units import MS_PER_SECOND
from gputally.base.untrusted_text import escaped

MOST_LOADING_S, MOST_READING_S = 20.0, 2.0
RETRY_MS = 30 * MS_PER_SECOND
MOST_TEXT = 253


class Closable(Protocol):
    def close(self) -> None:
        """Releases what it holds."""
        ...


T = TypeVar("T", bound=Closable)
R = TypeVar("R")
_Failing = Literal["tells", "raises", "hangs"]
"""How an object fails: it answers and names a failure, it raises an exception, or its call does not end in time."""


class NotOpened(AgentError):
    """It could not be opened, and it is not yet time to try again."""


class GuardedCalls(Generic[T]):
    """Calls of one object of another package.

    name: its name in messages.
    open_it: makes the object; it is tried again if it fails.
    most_s: how long a call may take.
    most_opening_s: how long the first opening may take; one that ends later counts too.
    failure: why the last call failed, or what it told; "" if it went well."""

    def __init__(
        self,
        name: str,
        open_it: Callable[[], T],
        log: logging.Logger,
        most_s: float,
        most_opening_s: float = MOST_LOADING_S,
    ) -> None:
        self.failure = ""
        self._name = name
        self._open_it = open_it
        self._log = log
        self._most_s = most_s
        self._most_opening_s = most_opening_s
        self._object: T | None = None
        self._running: threading.Event | None = None
        """Set when the last call has ended; None if it ended in its time."""
        self._next_try_ms: int | None = None
        self._logged: set[_Failing] = set()
        """How it has failed since it last answered."""

    def open(self) -> None:
        """Open it. Raises SettingsError alone; another failure is told by `failure`."""
        try:
            within(self._most_opening_s, self._open)
        except SettingsError:
            raise
        except Exception as error:  # noqa: BLE001 - code of others
            self._fail(error)

    def ask(self, at_ms: int, question: Callable[[T], R]) -> R | None:
        """Return the answer; None if there is none, and `failure` says why. at_ms: the time now."""
        if self._running is not None and not self._running.is_set():
            return None
        try:
            answer = within(self._most_s, lambda: question(self._opened(at_ms)))
        except Exception as error:  # noqa: BLE001 - code of others
            self._fail(error)
            return None
        self._running = None
        return answer

    def close(self) -> None:
        """Close it, if it answers."""
        found = self._object
        if found is None or (self._running is not None and not self._running.is_set()):
            return
        try:
            within(self._most_s, found.close)
        except Exception as error:  # noqa: BLE001 - code of others
            self._fail(error)

    def tell(self, failure: str) -> None:
        """Keep the failure that an answer names; "" if it names none."""
        self._keep(failure, "tells")

    def _keep(self, failure: str, failing: _Failing) -> None:
        if failure and failing not in self._logged:
            self._logged.add(failing)
            self._log.warning("a plug-in fails", extra={"plugin": self._name, "reason": failure})
        elif self._logged and not failure:
            self._logged.clear()
            self._log.info("a plug-in answers again", extra={"plugin": self._name})
        self.failure = failure

    def _opened(self, at_ms: int) -> T:
        if self._object is None:
            if self._next_try_ms is not None and at_ms < self._next_try_ms:
                raise NotOpened(self.failure)
            self._next_try_ms = at_ms + RETRY_MS
            self._object = self._open_it()
        return self._object

    def _open(self) -> None:
        self._object = self._open_it()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, TakesTooLong):
            self._running = error.done
        words = (AgentError, NoPlugin, TakesTooLong)
        text = str(error) if isinstance(error, words) else f"{type(error).__name__}: {error}"
        self._keep(escaped(text)[:MOST_TEXT], "hangs" if isinstance(error, TakesTooLong) else "raises")
