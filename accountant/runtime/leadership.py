"""Lets one of several replicas of the accountant serve the ledger, while the others wait for the Lease.

A waiting replica answers every request except /livez with 503, so agents keep records in their spools and send them
again. A process serves in one term. When the term ends, it commits nothing more and ends before another replica may
start. A replica with
a volume of its own rebuilds the ledger from the newest backup and the archive if another replica has led since then."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import structlog

from accountant.core.errors import LedgerDamaged, LedgerFailed, LedgerUnavailable
from accountant.core.settings import LeaderElection, Settings
from accountant.storage import backups
from accountant.storage.backups import Backup, NoBackup
from accountant.storage.duckdb_ledger import open_ledger
from accountant.storage.folder_or_object_store import FileStore, open_store
from accountant.storage.record_archive import Archive
from gputally.base.background_tasks import BackgroundTask, BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.leader_election import Election, Term

LOOK_S: Final = 0.2
"""Interval at which a replica checks whether it leads."""
LOST: Final = "this replica no longer holds the Lease, so another one serves or will serve"
END_S: Final = 4.0
"""A leader that lost the Lease has this long to end; less than the Lease outlasts its last renewal
(gputally.kubernetes.leader_election.LeaseTimes)."""


class Elected(Protocol):
    """The part of `gputally.kubernetes.leader_election.Election` that this module uses."""

    @property
    def fault(self) -> str: ...

    def term(self) -> Term | None: ...
    def leaderless(self) -> str | None: ...
    def run(self, stop: threading.Event, task: BackgroundTask) -> None: ...


class Leadership:
    """Knows whether this replica leads. election: None for a single replica, which always leads."""

    def __init__(self, election: Elected | None, clock: Clock) -> None:
        self._election = election
        self._term: Term | None = None
        """The term in which this process serves; None until it leads."""
        self._clock = clock
        self._tasks = BackgroundTasks(clock)
        self._stop = threading.Event()
        self._log = structlog.get_logger("accountant.leadership")

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Takes part in the election inside the context, and gives the Lease back at the end. The ledger must be closed
        before the context ends."""
        if self._election is None:
            yield
            return
        thread = self._tasks.start("leader election", self._election.run, self._stop, self._failed)
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def wait(self, stop: threading.Event) -> bool:
        """Waits until this replica leads and returns True, or False once `stop` is set."""
        if self._election is None:
            return not stop.is_set()
        fault = ""
        while not stop.is_set():
            self._term = self._election.term()
            if self._term is not None:
                return True
            if fault != self._election.fault:
                fault = self._election.fault
                if fault:
                    self._log.warning("leader_election_failed", reason=fault)
            self._clock.wait(LOOK_S, stop)
        return False

    def leaderless(self) -> bool:
        """Whether no replica is known to lead."""
        return self._election is not None and self._election.leaderless() is not None

    def _leads(self) -> bool:
        """Whether the term lasts in which this process serves. Another replica may lead between two terms."""
        return self._election is None or (self._term is not None and self._election.term() == self._term)

    def fence(self) -> str:
        """Why nothing may be committed; "" while this replica leads."""
        return "" if self._leads() else LOST

    def watch(self, lost: Callable[[LedgerFailed], None], end: Callable[[], None]) -> None:
        """Starts a thread that calls `lost` when this replica no longer leads, and `end` if the process still runs
        `END_S` later."""
        if self._election is None:
            return

        election = self._election

        def look(stop: threading.Event, task: BackgroundTask) -> None:
            while self._leads():
                task.progress()
                if self._clock.wait(LOOK_S, stop):
                    return
            lost(LedgerFailed(f"{LOST} ({election.fault or 'no answer from the API server'})"))
            if not self._clock.wait(END_S, stop):
                end()
            stop.wait()

        self._tasks.start("leadership", look, self._stop, self._failed)

    def _failed(self, error: Exception) -> None:
        self._log.warning("leader_election_failed", reason=str(error))


def leadership(settings: Settings, clock: Clock) -> Leadership:
    """The leadership configured in the settings."""
    wanted = settings.leader_election
    if wanted is None:
        return Leadership(None, clock)
    from gputally.kubernetes.api_client import connect_for_election  # takes half a second to import

    connect = partial(connect_for_election, settings.kubernetes.kubeconfig)
    election = Election(wanted.lease, wanted.namespace, identity(wanted), clock, connect)
    return Leadership(election, clock)


def identity(wanted: LeaderElection) -> str:
    """This replica's name in the Lease."""
    return wanted.identity or f"{socket.gethostname()}-{os.getpid()}"


def take_over(settings: Settings, clock: Clock) -> Backup | None:
    """Brings a ledger on this replica's own volume to the state of the last leader. If no other replica has led since,
    the ledger stays; otherwise it is set aside, and one is built from the newest intact backup and the archive, which
    holds everything that a backup holds. The new one gets its name when it is complete, so a process that is killed
    meanwhile sets nothing unfinished aside.

    Returns the restored backup; None: nothing was restored. Raises what `open_ledger` and `backups.restoring` raise."""
    if settings.leader_election is None or not settings.leader_election.own_volume:
        return None
    assert settings.archive is not None
    ledger = settings.ledger_file
    archive = open_store(settings.archive.to, settings.object_storage, settings.data)
    if ledger.exists() and _parts_of(ledger, clock) >= Archive(archive).newest():
        return None
    _set_aside(ledger)
    with backups.restoring(ledger) as built:
        backup = _restore_newest(open_store(settings.backups_to, settings.object_storage, settings.data), built)
        open_ledger(
            built,
            clock,
            month_zone=settings.timezone,
            archive=archive,
            gpu_move_after_ms=settings.gpu_move_after * MS_PER_SECOND,
            quotas=settings.quotas,
            exported_labels=settings.exported_labels,
        ).close()
    return backup


def _restore_newest(store: FileStore, ledger: Path) -> Backup | None:
    """Restores the newest intact backup, and returns it; None if there is none."""
    unreachable: LedgerUnavailable | None = None
    for backup in backups.list_backups(store):
        try:
            return backups.restore(store, f"{backup.name}.duckdb", ledger)
        except (LedgerDamaged, LedgerUnavailable, NoBackup) as error:
            structlog.get_logger("accountant.leadership").error(
                "backup_not_restored", name=backup.name, reason=str(error)
            )
            unreachable = error if isinstance(error, LedgerUnavailable) else unreachable
    if unreachable is not None:
        raise unreachable
    return None


def _parts_of(ledger: Path, clock: Clock) -> int:
    opened = open_ledger(ledger, clock)
    try:
        return opened.status().parts
    finally:
        opened.close()


def _set_aside(ledger: Path) -> None:
    """Moves the ledger with its log to the folder `set-aside`, for inspection, and removes an older one there. Agents
    send records again that only this ledger has. Without a ledger, moves what an earlier call left when it was
    killed."""
    aside = ledger.parent / "set-aside"
    if ledger.exists():
        shutil.rmtree(aside, ignore_errors=True)
    for place in sorted(ledger.parent.glob(f"{ledger.name}*")):  # the ledger first
        aside.mkdir(exist_ok=True)
        place.replace(aside / place.name)
