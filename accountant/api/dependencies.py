"""Holds what the routes need, built once per process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Protocol, cast

from fastapi import Depends, Request

from accountant.api.answer_cache import AnswerCache, AnswerPages
from accountant.api.middleware import BodyLimits
from accountant.billing.job_costs import JobQuestions
from accountant.billing.queue_waits import KnownPod
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.errors import LedgerFailed
from accountant.core.settings import Settings
from accountant.ledger.journal import Journal
from accountant.ledger.protocols import JobKey, Ledger, MisdatedRecords, Quarantined, Receipt
from accountant.notifications.dispatcher import Dispatcher
from accountant.prices.price_book import PriceBook
from accountant.reports.report_model import ReportQuestions
from accountant.reports.report_text import silence_note
from accountant.runtime.background_tasks import LakePublisher
from accountant.runtime.guarded_clock import GuardedClock
from accountant.runtime.service_metrics import Metrics
from accountant.storage.backups import KeptBackups
from accountant.storage.file_store import open_store
from accountant.storage.snapshot import Hole, Imbalance
from agent.wire import Batch
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.server.request_handling import RateBound
from gputally.server.sign_in import SignInService
from gputally.server.tokens_and_grants import Authenticator, Principal


class Ingesting(Protocol):
    """accountant.runtime.ingest.Ingest, as far as the routes use it."""

    def submit_batch(self, batch: Batch) -> Future[Receipt]:
        """The same for a batch that is decoded already."""
        ...

    def submit(self, raw: bytes) -> Future[Receipt]:
        """Decode and queue. Raises accountant.core.errors.BadBatch at once; the future gives the Receipt after
        the commit, or SequenceGap, or LedgerUnavailable."""
        ...


class LedgerSnapshot(JobQuestions, ReportQuestions, Protocol):
    """One moment of the ledger (accountant.storage.snapshot)."""

    def gpus_at(self, start_ms: int, end_ms: int) -> Mapping[tuple[str, str], int]:
        """How many GPUs each node had for a part of the span, by cluster and node."""
        ...

    def jobs_in(self, cluster: str, namespace: str) -> frozenset[str]:
        """Jobs (`Kind/name`) that pods of the namespace belonged to."""
        ...


class Checked(Ledger, Journal, Protocol):
    """A ledger that can also say how it is (accountant.storage.DuckLedger)."""

    def examine(self, start_ms: int, end_ms: int) -> Imbalance: ...

    def newest_end_ms(self) -> int:
        """End of the newest booked record; 0 where there is none."""
        ...

    def misdated(self, now_ms: int) -> tuple[MisdatedRecords, ...]:
        """What is dated later than `now_ms`, by kind."""
        ...

    def redate(self, now_ms: int, who: str, reason: str) -> tuple[MisdatedRecords, ...]:
        """Heal it. Raises accountant.core.errors.CannotRedate."""
        ...

    def pods(
        self, start_ms: int, end_ms: int, *, of: Collection[JobKey] | None = None, waiting: bool = False
    ) -> list[KnownPod]:
        """Those that existed in the span."""
        ...

    def moment(self, start_ms: int = 0, end_ms: int = 0) -> AbstractContextManager[LedgerSnapshot]:
        """Questions that are all answered from the same commit. start_ms, end_ms: where stretches that are asked
        for begin or end inside an hour."""
        ...

    def mark(self, start_ms: int, end_ms: int) -> Hashable:
        """A mark of the span's content: while it is equal, every question about the span has the same answer."""
        ...

    def quarantined(self, limit: int = 1000) -> list[Quarantined]:
        """Newest first."""
        ...

    def holes(self, limit: int = 1000) -> list[Hole]:
        """Numbers of outboxes that will never come."""
        ...

    def teams(self) -> frozenset[str]:
        """Every team that a queue or a namespace names now."""
        ...

    def wal_bytes(self) -> int: ...

    def room_bytes(self) -> int:
        """Free space left before nothing is taken in any more."""
        ...

    def copy_to(self, path: Path) -> int:
        """A verified copy in a new file; its rows."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterPicker:
    """The ledgers that one server shows. current: whose pages these are, "" for those of all."""

    current: str
    names: Sequence[str]


@dataclass(frozen=True)
class Deps:
    """books: statements, months and what is booked beside the metered time. failed: told once nothing but
    a restart helps any more. certified: agents by the common name of their client certificate; None: none.
    deliveries: None where nothing is delivered by itself. people: those who sign in to the pages; None: sign-in is off.
    tasks: what runs in the background, None where nothing does. spent: CPU seconds of the calling thread so far. guard:
    the clock, where it notices that it was set. lake: what is published for a fleet; None: nothing is. bound: the rate
    of all ledgers of one server; None: of this one alone. picker: the ledgers to choose from; None: there is this one.
    """

    settings: Settings
    clock: Clock
    ledger: Checked
    ingest: Ingesting
    authenticator: Authenticator
    metrics: Metrics
    books: Bookkeeper
    failed: Callable[[LedgerFailed], None]
    certified: Callable[[str], Principal | None] = lambda _: None
    deliveries: Dispatcher | None = None
    people: Callable[[], SignInService | None] = lambda: None
    tasks: BackgroundTasks | None = None
    spent: Callable[[], float] = time.thread_time
    guard: GuardedClock | None = None
    lake: LakePublisher | None = None
    bound: RateBound | None = None
    picker: Callable[[], ClusterPicker | None] = lambda: None

    def book(self) -> PriceBook | None:
        """The price book in force now, None where there is none."""
        return self.books.prices.current

    def newest_ms(self) -> int:
        """End of the newest record; 0 where nothing is booked."""
        return self.ledger.extent()[1]

    def silence_note(self) -> str:
        """Names the clusters that stopped reporting while others go on; else ""."""
        return silence_note(self.ledger.newest_by_cluster(), self.clock.wall_ms())

    @cached_property
    def backups(self) -> KeptBackups:
        """Raises LedgerUnavailable where the settings do not lead to a place for them."""
        wanted = self.settings
        return KeptBackups(open_store(wanted.backups_to, wanted.object_storage, wanted.data), wanted.backups.keep)

    @cached_property
    def rate(self) -> RateBound:
        limits = self.settings.limits
        return self.bound or RateBound(self.clock, limits.requests_per_second, limits.burst)

    @cached_property
    def prepared(self) -> AnswerCache:
        """The cache of the pages; its builder closes it before the ledger."""
        return AnswerCache(self.clock, self.spent, self.tasks)

    @cached_property
    def kept(self) -> AnswerPages:
        return AnswerPages(self.clock, self.settings.limits.pages_bytes)

    def page_lines(self, asked: int) -> int:
        """How many lines a page has, of those that were asked for."""
        return min(asked, self.settings.limits.page_lines)

    @cached_property
    def intake(self) -> BodyLimits:
        return BodyLimits(self.settings.limits)


async def deps_of(request: Request) -> Deps:
    """The dependencies the app was built with. Async though it awaits nothing: FastAPI calls anything else in
    a thread, and two hops between threads cost more than the rest of a small request."""
    return cast(Deps, request.app.state.deps)


Given = Annotated[Deps, Depends(deps_of)]
