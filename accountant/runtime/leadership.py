"""Lets one of several replicas of the accountant serve the ledger; the others wait for the Lease.

A replica that waits answers every request with 503, so that agents spool and ask again. One that can no longer renew
the Lease commits nothing more and ends before another one may begin. Replicas with volumes of their own rebuild the
ledger from the newest backup and the archive, unless no other replica led since they did.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from accountant.core.errors import LedgerFailed
from accountant.core.settings import LeaderElection, Settings
from accountant.storage import backups
from accountant.storage.duckdb_ledger import open_ledger
from accountant.storage.file_store import open_store
from accountant.storage.parquet_archive import Archive
from gputally.base.background_tasks import BackgroundTask, BackgroundTasks
from gputally.base.clock import Clock

if TYPE_CHECKING:
    from accountant.storage.backups import Backup

LOOK_S: Final = 0.2
"""Between two looks at whether this replica leads."""
LOST: Final = "this replica no longer holds the Lease: another one serves, or will"
END_S: Final = 4.0
"""A leader that lost the Lease has so long to end by itself: less than the Lease outlasts the last renewal that counts
(gputally.kubernetes.leader_election.LeaseTimes)."""


class Elected(Protocol):
    """gputally.kubernetes.leader_election.Election."""

    @property
    def fault(self) -> str: ...

    def leading(self) -> bool: ...
    def run(self, stop: threading.Event, task: BackgroundTask) -> None: ...


class Leadership:
    """Whether this replica leads. election: None where there is one replica, which always does. tasks: where its
    threads are listed."""

    def __init__(self, election: Elected | None, clock: Clock, tasks: BackgroundTasks | None = None) -> None:
        self._election = election
        self._clock = clock
        self._tasks = tasks or BackgroundTasks(clock)
        self._stop = threading.Event()
        self._log = structlog.get_logger("accountant.leadership")

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Stand for election within; at the end the Lease is given back. What is in the block has closed the ledger."""
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
        """Until this replica leads; False where `stop` was set before."""
        while not stop.is_set():
            if self._election is None or self._election.leading():
                return True
            self._clock.wait(LOOK_S, stop)
        return False

    def fence(self) -> str:
        """Why nothing may be committed; "" while this replica leads."""
        if self._election is None or self._election.leading():
            return ""
        return LOST

    def watch(self, lost: Callable[[LedgerFailed], None], end: Callable[[], None]) -> None:
        """Call `lost` when this replica leads no more, and `end` where the process is still there `END_S` later."""
        if self._election is None:
            return

        election = self._election

        def look(stop: threading.Event, task: BackgroundTask) -> None:
            while election.leading():
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
    """The leadership that the settings ask for."""
    wanted = settings.leader_election
    if wanted is None:
        return Leadership(None, clock)
    from gputally.kubernetes.leader_election import Election  # the asynchronous client: half a second

    election = Election(
        wanted.lease, wanted.namespace, identity(wanted), clock, kubeconfig=settings.kubernetes.kubeconfig
    )
    return Leadership(election, clock)


def identity(wanted: LeaderElection) -> str:
    """What the Lease calls this replica."""
    return wanted.identity or f"{socket.gethostname()}-{os.getpid()}"


def take_over(settings: Settings, clock: Clock) -> Backup | None:
    """Bring a ledger on a volume of its own up to where the last leader was: keep it where no other replica led since,
    else set it aside and put the newest backup in its place. What the archive has beyond it is taken over when it is
    opened.

    Returns the backup that was restored. Raises as `open_ledger` and `backups.restore` do."""
    if settings.leader_election is None or not settings.leader_election.own_volume:
        return None
    assert settings.archive is not None
    ledger = settings.ledger_file
    if ledger.exists():
        archive = Archive(open_store(settings.archive.to, settings.object_storage, settings.data))
        if _parts_of(ledger, clock) >= archive.newest():
            return None
        _set_aside(ledger)
    store = open_store(settings.backups_to, settings.object_storage, settings.data)
    found = backups.list_backups(store)
    return backups.restore(store, f"{found[0].name}.duckdb", ledger) if found else None


def _parts_of(ledger: Path, clock: Clock) -> int:
    opened = open_ledger(ledger, clock)
    try:
        return opened.parts()
    finally:
        opened.close()


def _set_aside(ledger: Path) -> None:
    """Another replica wrote since: what only this file has, agents send again. The newest one is kept, for people."""
    aside = ledger.parent / "set-aside"
    aside.mkdir(exist_ok=True)
    for place in sorted(ledger.parent.glob(f"{ledger.name}*")):
        place.replace(aside / place.name)
