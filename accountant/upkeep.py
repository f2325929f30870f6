"""What an accountant does again and again: its routines, each when it is due, and the threads that ask for that.

Faults are logged and the rest goes on; a ledger that failed ends it. It decides nothing about the books.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from accountant import backups
from accountant.bookkeeping import Bookkeeper
from accountant.errors import AccountantError, LedgerFailed
from accountant.journal import ActKind
from accountant.settings import Settings
from accountant.store import DuckLedger
from agent.clock import Clock
from agent.units import MS_PER_SECOND

TOLD_AGAIN: Final[frozenset[ActKind]] = frozenset({"imported", "pods"})
"""Acts whose lines whoever recorded them can send once more; of all others only the ledger knows."""


@dataclass(frozen=True)
class Routine:
    """Something done every so many seconds. early: whether it is due before its time; asked every time."""

    name: str
    seconds: int
    do: Callable[[], None]
    early: Callable[[], bool] = lambda: False


class Routines:
    """In the order in which they are done."""

    def __init__(self, clock: Clock, routines: Sequence[Routine]) -> None:
        self._clock = clock
        self._log = structlog.get_logger("accountant.service")
        self._routines = tuple(routines)
        now = clock.monotonic_ms()
        self._due = {routine: now + routine.seconds * MS_PER_SECOND for routine in self._routines}
        self.failing = {routine.name: False for routine in self._routines}
        """Whether each failed the last time."""

    def do_due(self) -> None:
        """Everything that is due by now, even if something of it fails. Raises LedgerFailed."""
        for routine in self._routines:
            if self._is_due(routine):
                try:
                    routine.do()
                    self.failing[routine.name] = False
                except LedgerFailed:
                    raise
                except AccountantError as error:
                    self.failing[routine.name] = True
                    self._log.error("maintenance_failed", what=routine.name, reason=str(error))

    def _is_due(self, routine: Routine) -> bool:
        now = self._clock.monotonic_ms()
        if not routine.early() and now < self._due[routine]:
            return False
        self._due[routine] = now + routine.seconds * MS_PER_SECOND
        return True


class Pulses:
    """Threads that do something every so many seconds until `stop`. failed: told once the ledger has."""

    def __init__(self, failed: Callable[[LedgerFailed], None]) -> None:
        self._failed = failed
        self._log = structlog.get_logger("accountant.service")
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, name: str, seconds: float, do: Callable[[], None]) -> None:
        def run() -> None:
            while not self._over.wait(seconds):
                try:
                    do()
                except LedgerFailed as failure:
                    self._failed(failure)
                    return
                except AccountantError as error:
                    self._log.error("failed", what=name, reason=str(error))

        self._threads.append(threading.Thread(target=run, name=name, daemon=True))
        self._threads[-1].start()

    def stop(self) -> None:
        """Nothing more begins; `join` waits for what is under way."""
        self._over.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


class Upkeep:
    """What keeps books and ledger as they should be without anybody asking."""

    def __init__(self, ledger: DuckLedger, books: Bookkeeper, settings: Settings, clock: Clock) -> None:
        self._ledger, self._books, self._settings, self._clock = ledger, books, settings, clock
        self._log = structlog.get_logger("accountant.service")
        self._seen = ledger.last_act()

    def routines(self) -> list[Routine]:
        settings = self._settings
        found = [
            Routine("correct", settings.correct_seconds, self._correct),
            Routine("checkpoint", settings.checkpoint_seconds, self._ledger.checkpoint),
        ]
        if settings.archive is not None:
            found.append(Routine("archive", settings.archive.every, self._keep_archive, self._acted))
        if settings.backups.every is not None:
            found.append(Routine("backup", settings.backups.every, self._back_up))
        return found

    def _correct(self) -> None:
        booked = self._books.correct_lately("accountant")
        if booked:
            self._log.info("corrections_booked", lines=len(booked), month=booked[0].booked_in)

    def _acted(self) -> bool:
        """Whether the books have acts that nobody could tell again, since this was last asked."""
        seen, self._seen = self._seen, self._ledger.last_act()
        new = self._ledger.trail(seen, self._seen - seen) if self._seen > seen else []
        return any(act.kind not in TOLD_AGAIN for act in new)

    def _keep_archive(self) -> None:
        now = self._clock.wall_ms()
        part = self._ledger.archive(now)
        if part is not None:
            self._log.info("archived", part=part.number, rows=part.rows)
        keep = self._settings.archive.keep_rows if self._settings.archive is not None else None
        hours = 0 if keep is None else self._ledger.freeze(now - keep * MS_PER_SECOND)
        if hours:
            self._log.info("rows_left_the_file", hours=hours)

    def _back_up(self) -> None:
        made = backups.make(self._ledger, self._settings.backup_folder, self._clock.wall_ms())
        gone = backups.prune(self._settings.backup_folder, self._settings.backups.keep)
        self._log.info("backed_up", name=made.name, rows=made.rows, removed=len(gone))
