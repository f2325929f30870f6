"""Defines `Deps`, the objects that the routes of one server need, and the protocols of the ledger that they query.

An accountant has one `Deps`. The server of a fleet has one for the fleet and one for each ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, cast

import structlog
from fastapi import Depends, Request

from accountant.api.answer_cache import AnswerCache
from accountant.api.middleware import BodyLimits
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.corrections_and_adjustments import Proposal
from accountant.core.errors import LedgerFailed, OverQuota
from accountant.core.periods import Month, utc
from accountant.core.record_age import is_old
from accountant.core.settings import Limits, Settings
from accountant.ledger.protocols import (
    Ledger,
    MisdatedRecords,
    Moment,
    SavedView,
)
from accountant.notifications.dispatcher import Dispatcher
from accountant.prices.price_book import PriceBook
from accountant.reports.figure_formatting import silence_note
from accountant.runtime.clock_step_guard import GuardedClock
from accountant.runtime.ingest import Ingest
from accountant.runtime.job_and_task_metrics import AccountantMetrics
from accountant.storage.backups import KeptBackups
from accountant.storage.folder_or_object_store import open_store
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_DAY
from gputally.server.rate_and_connection_limits import RateLimit
from gputally.server.sign_in import SignInService
from gputally.server.tokens_and_grants import Authenticator, Principal
from gputally.server.turns import TurnLimits, Turns

if TYPE_CHECKING:  # an accountant without a lake does not load its libraries
    from accountant.lake.publisher import Publisher


CallerQuota = Literal["acts", "decisions"]
"""The quotas of a caller, whatever node it speaks of."""


class ServedLedger(Ledger, Protocol):
    """A ledger with checks and maintenance (accountant.storage.DuckLedger)."""

    def views(self, owner: str) -> tuple[SavedView, ...]:
        """The views of the page Explore that the owner saved, by name."""
        ...

    def save_view(self, owner: str, view: SavedView, now_ms: int) -> None:
        """Stores a view, instead of the owner's view of that name. Raises accountant.core.errors.TooManyViews."""
        ...

    def remove_view(self, owner: str, name: str) -> None:
        """Removes a view of the owner, if there is one of that name."""
        ...

    def redate(self, now_ms: int, who: str, reason: str) -> tuple[MisdatedRecords, ...]:
        """Quarantines or redates what is dated in the future. Raises accountant.core.errors.CannotRedate."""
        ...

    def moment(self, start_ms: int = 0, end_ms: int = 0) -> AbstractContextManager[Moment]:
        """A snapshot, all answers of which come from one commit. start_ms, end_ms: a span whose raw rows must be
        readable, because queries in it may begin or end inside an hour."""
        ...

    def wal_bytes(self) -> int: ...

    def room_bytes(self) -> int:
        """Free disk space above the limit at which ingestion stops."""
        ...

    def copy_to(self, path: Path) -> int:
        """Writes a verified copy to a new file and returns its number of rows."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterPicker:
    """The ledgers that one server shows. current: the name of the ledger that the pages show, "" for all together."""

    current: str
    names: Sequence[str]


WorkKind = Literal["reads", "documents", "acts", "metrics", "tools"]


class RequestTurns:
    """A pool of turns for each kind of work. Probes and the ingest need none.

    reads: queries and pages. documents: statements and reports. acts: what changes something, and its previews; it is
    not called off when its client goes. metrics: scrapes. tools: calls of an assistant, whose questions are reads."""

    def __init__(self, limits: Limits) -> None:
        self._pools = {
            "reads": Turns("queries and pages", TurnLimits(limits.reads, limits.reads_by_caller)),
            "documents": Turns("statements and reports", TurnLimits(limits.documents, 1)),
            "acts": Turns("changes", TurnLimits(4, 4)),
            "metrics": Turns("scrapes", TurnLimits(2, 1, waiting=32, waiting_by_caller=4, patience_s=10)),
            "tools": Turns("calls of an assistant", TurnLimits(8, 4)),
        }

    def turn(self, kind: WorkKind, request: Request, caller: str) -> AbstractAsyncContextManager[None]:
        """A turn of this kind, as `Turns.turn` returns it."""
        return self._pools[kind].turn(request, caller, may_stop=kind != "acts")


@dataclass(frozen=True)
class Deps:
    """The objects of one server.

    ingest: stores batches; a fleet's server has none, because it serves only reading requests.
    books: statements, months and items booked besides metered time.
    failed: called when the ledger needs a restart.
    certified: returns the principal of a client certificate with this common name; None: unknown.
    deliveries: None if nothing is sent automatically.
    people: returns the sign-in for the pages; None: no sign-in.
    tasks: the background tasks, None if there are none.
    spent: returns the CPU seconds of the calling thread so far.
    guard: detects that the machine's clock was set; None: not checked.
    lake: publishes the ledger as Iceberg tables; None: nothing is published.
    bound: a rate limit that all ledgers of this server share; None: this ledger has its own.
    shared_turns: the turns that all ledgers of this server share; None: this ledger has its own.
    picker: returns the ledgers to choose from; None: only this one.
    settled: whether the ledger's records never change while it is served.
    pods_heard_ms: the time of the API server's last answer about pods; None if there was none, or it is not
        checked."""

    settings: Settings
    clock: Clock
    ledger: ServedLedger
    ingest: Ingest
    authenticator: Authenticator
    metrics: AccountantMetrics
    books: Bookkeeper
    failed: Callable[[LedgerFailed], None]
    certified: Callable[[str], Principal | None] = lambda _: None
    deliveries: Dispatcher | None = None
    people: Callable[[], SignInService | None] = lambda: None
    tasks: BackgroundTasks | None = None
    spent: Callable[[], float] = time.thread_time
    guard: GuardedClock | None = None
    lake: Publisher | None = None
    bound: RateLimit | None = None
    shared_turns: RequestTurns | None = None
    picker: Callable[[], ClusterPicker | None] = lambda: None
    settled: bool = False
    pods_heard_ms: Callable[[], int | None] | None = None

    def __post_init__(self) -> None:
        """Make what threads share before there are threads: a cached property has no lock since Python 3.12, and twins
        would each allow the whole of a limit. The backups, of which twins do no harm, may be unavailable."""
        _ = self.rate, self.refusals_logged, self.recorded, self.turns, self.answers, self.intake

    def book(self) -> PriceBook | None:
        """The price book in force, None if there is none."""
        return self.books.prices.current

    def newest_ms(self) -> int:
        """End of the newest record; 0 if nothing is booked."""
        return self.ledger.status().newest_ms

    def silence_note(self) -> str:
        """Names the clusters that stopped reporting while others continue; "" if there are none."""
        return silence_note(self.ledger.status().newest_by_cluster, self.clock.wall_ms())

    def waiting_unknown(self, clusters: Iterable[str] = ()) -> str:
        """Why nobody knows how many pods of these clusters wait for a node; "" if it is known. Agents report only pods
        that are on their nodes. clusters: none of them for all of the ledger."""
        kubernetes, now = self.settings.kubernetes, self.clock.wall_ms()
        if not kubernetes.watched:
            return "this accountant reads no pods from an API server: set kubernetes.inventory"
        others = {*(clusters or self.ledger.status().clusters)} - {kubernetes.watched}
        if others:
            names = ", ".join(sorted(others)[:3]) + (", …" if len(others) > 3 else "")
            return f"pods of {names} are read from no API server, only those of {kubernetes.watched}: ask with its name"
        if self.pods_heard_ms is None:
            return ""
        heard = self.pods_heard_ms()
        if heard is None:
            return f"the API server of {kubernetes.watched} has not answered yet: run gputally doctor"
        if is_old(heard, now):
            return f"the API server of {kubernetes.watched} has not answered since {utc(heard)}: run gputally doctor"
        return ""

    @cached_property
    def backups(self) -> KeptBackups:
        """The accountant's backups. Raises LedgerUnavailable if the store in the settings cannot be opened."""
        settings = self.settings
        return KeptBackups(
            open_store(settings.backups_to, settings.object_storage, settings.data), settings.backups.keep
        )

    @cached_property
    def rate(self) -> RateLimit:
        limits = self.settings.limits
        return self.bound or RateLimit(self.clock, limits.requests_per_second, limits.burst)

    @cached_property
    def refusals_logged(self) -> RateLimit:
        """The rate at which refusals by quotas are logged."""
        return RateLimit(self.clock, 10 / 3600, 10)

    @cached_property
    def recorded(self) -> Mapping[CallerQuota, RateLimit]:
        """What callers have left of their allowances of a day, by (caller, quota)."""
        quotas = self.settings.quotas
        allowed: Mapping[CallerQuota, int] = {"acts": quotas.acts, "decisions": quotas.decisions}
        return {quota: RateLimit(self.clock, most * 1000 / MS_PER_DAY, most) for quota, most in allowed.items()}

    def require_quota(self, quota: CallerQuota, who: str) -> None:
        """Use one of a caller's allowance of a day. Raises OverQuota if nothing is left of it."""
        if not self.recorded[quota].admit((who, quota)):
            return
        most = getattr(self.settings.quotas, quota)
        over = OverQuota(
            f"{who!r} has recorded {most} {quota} within a day: find out who sends them, and then raise quotas.{quota}"
            " in the accountant's settings",
            quota,
        )
        self.count_refusal(over)
        raise over

    def count_refusal(self, error: OverQuota) -> None:
        """Count a refused sender, and log the first ones of an hour, because senders can be invented without end."""
        self.metrics.refused(error.quota)
        if not self.refusals_logged.admit(("", error.quota)):
            structlog.get_logger("ingest").warning("sender_over_quota", quota=error.quota, reason=str(error))

    @cached_property
    def turns(self) -> RequestTurns:
        """The work that requests may do at one time."""
        return self.shared_turns or RequestTurns(self.settings.limits)

    @cached_property
    def answers(self) -> AnswerCache:
        """The cache of answers; it must be closed before the ledger."""
        return AnswerCache(self.clock, self.settings.limits.pages_bytes, self.spent, self.tasks, settled=self.settled)

    def proposals(self, month: Month | None = None) -> list[Proposal]:
        """The late changes that wait for a decision, of one closed month or of all. They are computed again only after
        an act or a change of closed months' records, because that bills every recent month again."""
        closed_ms, act = self.books.closed_ms(), self.ledger.status().last_act
        if not closed_ms:
            return []
        key = ("proposals", None if month is None else str(month), act)
        return self.answers.ask(
            key, lambda: self.books.proposals(month), lambda: self.ledger.status().mark(0, closed_ms)
        ).value

    def page_lines(self, wanted: int) -> int:
        """The number of lines of a page: `wanted`, at most the limit."""
        return min(wanted, self.settings.limits.page_lines)

    @cached_property
    def intake(self) -> BodyLimits:
        return BodyLimits(self.settings.limits)


async def deps_of(request: Request) -> Deps:
    """The dependencies of the app. It is async, although it awaits nothing, because FastAPI runs other functions in a
    thread, and switching threads twice takes longer than the rest of a small request."""
    return cast(Deps, request.app.state.deps)


AppDeps = Annotated[Deps, Depends(deps_of)]
