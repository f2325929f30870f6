"""Runs the accountant's recurring tasks (routines), and defines those for late records, checkpoint, archive, retention,
backup and lake.

Each routine has a thread of its own, so that a long backup does not stop the inventory, a certificate's renewal or a
checkpoint. A routine that fails is logged, counted and tried again within a minute; the others continue. Only a failed
ledger ends the process. The routines for the inventory and for changed files are in accountant.composition.

`warm` queries the windows of a new policy once, so that the first query of the controller is fast."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.errors import LedgerFailed
from accountant.core.settings import Settings
from accountant.ledger.journal import Act, ActKind
from accountant.ledger.protocols import ReadableLedger
from accountant.prices.price_book import PriceBook
from accountant.storage.backups import KeptBackups
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.policy_models import Policy
from gputally.base.background_tasks import PATIENCE_S, BackgroundTask, BackgroundTasks, error_summary
from gputally.base.called_off import CalledOff, Work, make_current
from gputally.base.clock import Clock
from gputally.base.errors import AccountantError
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

if TYPE_CHECKING:  # an accountant without a lake does not load its libraries
    from accountant.lake.publisher import Publisher

RESENDABLE: Final[frozenset[ActKind]] = frozenset({"imported", "pods"})
"""Acts whose content the sender can send again; all others exist only in the ledger."""
RETRY_SECONDS: Final = 60
"""A routine that failed is tried again after at most this time."""
RETENTION_SECONDS: Final = 3600
"""How often data older than its retention is removed."""
ARCHIVE_PATIENCE_S: Final = 900.0
LAKE_UPKEEP_SECONDS: Final = 86_400
"""How often old versions are removed from the lake, and the lake is compared with the ledger."""
LAKE_PATIENCE_S: Final = 3600.0
"""The first run publishes everything in the ledger."""
MOST_DIFFERENCES: Final = 20
"""Maximum number of differences between lake and ledger that are logged."""
BACKUP_PATIENCE_S: Final = 3600.0
"""A backup copies the whole ledger and reads it back."""


@dataclass(frozen=True)
class Routine:
    """A function that is called at an interval.

    seconds: the interval.
    early: returns whether a run is due before its time; called on every check.
    patience_s: how long one run may take."""

    name: str
    seconds: int
    do: Callable[[], object]
    early: Callable[[], bool] = lambda: False
    patience_s: float = PATIENCE_S


class Routines:
    """Runs routines that are due: in the given order (`do_due`), or each in a thread of its own (`start_due`)."""

    def __init__(self, clock: Clock, routines: Sequence[Routine], tasks: BackgroundTasks | None = None) -> None:
        self._clock = clock
        self._log = structlog.get_logger("accountant.composition")
        tasks = tasks or BackgroundTasks(clock)
        self._routines = {routine: tasks.add(routine.name, routine.patience_s) for routine in routines}
        self._threads: dict[Routine, threading.Thread] = {}
        now = clock.monotonic_ms()
        self._due = {routine: now + routine.seconds * MS_PER_SECOND for routine in routines}

    def do_due(self) -> None:
        """Runs all routines that are due, and continues after failures. Raises LedgerFailed."""
        for routine in self._routines:
            if self._is_due(routine):
                self._do(routine)

    def start_due(self, failed: Callable[[LedgerFailed], None]) -> None:
        """Starts all routines that are due and do not run already, so that one that takes long does not stop the
        others. failed: called in the thread of the routine with a failure of the ledger."""

        def run(routine: Routine) -> None:
            try:
                self._do(routine)
            except LedgerFailed as failure:
                failed(failure)

        for routine in self._routines:
            running = self._threads.get(routine)
            if (running is None or not running.is_alive()) and self._is_due(routine):
                thread = self._threads[routine] = threading.Thread(
                    target=run, args=(routine,), name=routine.name, daemon=True
                )
                thread.start()

    def join(self) -> None:
        """Waits for the routines that `start_due` started."""
        for thread in self._threads.values():
            thread.join()

    def _do(self, routine: Routine) -> None:
        try:
            with self._routines[routine].running():
                routine.do()
        except LedgerFailed:
            raise
        except Exception as error:  # noqa: BLE001 - a defect in one routine must not end the others
            self._try_again(routine, error)

    def _is_due(self, routine: Routine) -> bool:
        now, task = self._clock.monotonic_ms(), self._routines[routine]
        try:
            if now < self._due[routine] and (task.failing or not routine.early()):
                return False
        except LedgerFailed:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            task.fail(error)
            self._try_again(routine, error)
            return False
        self._due[routine] = now + routine.seconds * MS_PER_SECOND
        return True

    def _try_again(self, routine: Routine, error: Exception) -> None:
        self._due[routine] = self._clock.monotonic_ms() + min(routine.seconds, RETRY_SECONDS) * MS_PER_SECOND
        _log_failure(self._log, "maintenance_failed", routine.name, error)


class PeriodicTasks:
    """Threads that call a function at an interval until `stop`, and continue after exceptions.

    failed: called with a LedgerFailed, after which no thread calls its function again."""

    def __init__(self, failed: Callable[[LedgerFailed], None], tasks: BackgroundTasks) -> None:
        self._failed = failed
        self._tasks = tasks
        self._log = structlog.get_logger("accountant.composition")
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._reads = Work()

    def begin(
        self,
        name: str,
        seconds: float,
        do: Callable[[], None],
        patience_s: float = PATIENCE_S,
        *,
        may_stop: bool = False,
    ) -> None:
        """Starts a thread that calls `do` every `seconds`. patience_s: how long one call may take. may_stop: `do` only
        reads, so that `join` calls it off."""

        def report(error: Exception) -> None:
            if isinstance(error, LedgerFailed):
                self._over.set()
                self._failed(error)
            else:
                _log_failure(self._log, "failed", name, error)

        def work(stop: threading.Event, task: BackgroundTask) -> None:
            make_current(self._reads if may_stop else None)
            task.succeed()
            while not stop.wait(seconds):
                with task.guarded(report), suppress(CalledOff):
                    do()

        self._threads.append(self._tasks.start(name, work, self._over, report, patience_s))

    def stop(self) -> None:
        """Starts no further calls; `join` waits for calls in progress."""
        self._over.set()

    def join(self) -> None:
        """Calls off calls in progress that only read, and waits for all."""
        for thread in self._threads:
            self._reads.end(thread)


class Maintenance:
    """The routines that maintain ledger, archive, lake and backups."""

    def __init__(
        self,
        ledger: DuckLedger,
        books: Bookkeeper,
        settings: Settings,
        clock: Clock,
        backups: KeptBackups,
        publisher: Publisher | None = None,
    ) -> None:
        self._ledger, self._books, self._settings, self._clock = ledger, books, settings, clock
        self._backups = backups
        self._publisher = publisher
        self._log = structlog.get_logger("accountant.composition")
        self._checked_act = -1
        """The newest act at the last comparison of archive and journal."""

    def routines(self) -> list[Routine]:
        settings = self._settings
        found = [
            Routine("correct", settings.correct_seconds, self._look),
            Routine("checkpoint", settings.checkpoint_seconds, self._ledger.checkpoint),
        ]
        if (archive := settings.archive) is not None:
            keep_archive = partial(self._keep_archive, archive.keep_rows)
            found.append(Routine("archive", archive.every, keep_archive, self._acts_unarchived, ARCHIVE_PATIENCE_S))
        if settings.keep_decisions is not None:
            remove_decisions = partial(self._remove_decisions, settings.keep_decisions)
            found.append(Routine("retention", RETENTION_SECONDS, remove_decisions))
        if settings.backups.every is not None:
            found.append(Routine("backup", settings.backups.every, self._back_up, patience_s=BACKUP_PATIENCE_S))
        return found

    def lake_routines(self) -> list[Routine]:
        """The routines of the lake, which can take long; none without a lake. Each runs soon after a start, so that it
        also runs in an accountant that is often restarted."""
        publisher, lake = self._publisher, self._settings.lake
        if publisher is None or lake is None:
            return []
        return [
            Routine("lake", lake.every, publisher.publish, lambda: publisher.published_ms is None, LAKE_PATIENCE_S),
            Routine(
                "lake upkeep", LAKE_UPKEEP_SECONDS, lambda: self._maintain_lake(publisher),
                lambda: publisher.compared is None, LAKE_PATIENCE_S,
            ),
        ]  # fmt: skip

    def _look(self) -> None:
        for found in self._books.new_proposals():
            self._log.warning(
                "proposal_waits", month=found.month, id=found.id, teams=len(found.effects()),
                act=f"gputally accountant proposals {found.month}",
            )  # fmt: skip

    def _acts_unarchived(self) -> bool:
        """Whether the journal has acts that the archive lacks and that no sender can send again."""
        last = self._ledger.status().last_act
        if last == self._checked_act:
            return False
        archived = self._ledger.status().archived_act
        new: list[Act] = []
        if last > archived:
            with self._ledger.moment() as moment:
                new = moment.acts(after=archived)
        if any(act.kind not in RESENDABLE for act in new):
            return True  # stays true until a part contains them
        self._checked_act = last
        return False

    def _keep_archive(self, keep_rows: int | None) -> None:
        now = self._clock.wall_ms()
        part = self._ledger.archive(now)
        if part is not None:
            self._log.info("archived", part=part.number, rows=part.rows)
        hours = 0 if keep_rows is None else self._ledger.freeze(now - keep_rows * MS_PER_SECOND)
        if hours:
            self._log.info("rows_left_the_file", hours=hours)

    def _remove_decisions(self, keep_s: int) -> None:
        removed = self._ledger.remove_decisions(self._clock.wall_ms() - keep_s * MS_PER_SECOND)
        if removed:
            self._log.info("decisions_removed", decisions=removed)

    def _maintain_lake(self, publisher: Publisher) -> None:
        removed = publisher.remove_old_versions()
        if removed.versions or removed.files:
            self._log.info("old_lake_versions_removed", versions=removed.versions, files=removed.files)
        for line in publisher.compare().differences[:MOST_DIFFERENCES]:
            self._log.error("lake_differs", difference=line, act="gputally accountant check --lake")

    def _back_up(self) -> None:
        made, gone = self._backups.make(self._ledger, self._clock.wall_ms())
        self._log.info("backed_up", name=made.name, rows=made.rows, removed=len(gone))
        for backup in self._backups.remembered():
            if backup.damage:
                self._log.error("backup_damaged", name=backup.name, reason=backup.damage)


def _log_failure(log: structlog.stdlib.BoundLogger, event: str, what: str, error: Exception) -> None:
    if isinstance(error, AccountantError):
        log.error(event, what=what, reason=str(error))
    else:
        log.error(event, what=what, reason=error_summary(error), exc_info=error)


def warm(ledger: ReadableLedger, policy: Policy, book: PriceBook | None, now_ms: int) -> None:
    """Queries the windows that controllers will query, for everything and for each cluster: up to this minute, and up
    to the newest record.

    Raises AccountantError as `window` does."""
    asked = (policy.measure, policy.min_coverage)
    minute_ms = now_ms - now_ms % MS_PER_MINUTE
    for cluster in (None, *sorted(ledger.status().clusters)):
        with ledger.moment() as moment:
            found = moment.window(policy.window, minute_ms, *asked, book=book, cluster=cluster)
            if found.watermark_ms is not None and found.watermark_ms < minute_ms:
                moment.window(policy.window, found.watermark_ms, *asked, book=book, cluster=cluster)
