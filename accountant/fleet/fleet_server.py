"""Serves read-only pages and an API for every ledger of a lake, and for all of them together.

Each ledger has the accountant's own application under `/clusters/NAME/`, with its own time zone, price book and
policies. Each of these applications runs with a clock that stands at the end of its ledger's published figures. Its
records never change, so the fleet's lists of jobs and nodes are computed once for each publication, before it is shown.
Pages and API of all ledgers are in `fleet_routes`. At `/mcp` an assistant asks all of them, or one by its name.
OpenCost's API is under `/opencost/` for all ledgers and under `/clusters/NAME/opencost/` for one. The server is
stateless, because everything can be read from the lake again, so any number of replicas may run."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast
from urllib.parse import quote, unquote

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from accountant import composition
from accountant.api import problems
from accountant.api.access_control import CallersFile, admit, require_all_teams
from accountant.api.dependencies import ClusterPicker, Deps, RequestTurns, ServedLedger
from accountant.api.middleware import AccessMiddleware
from accountant.api.node_routes import NodesParams
from accountant.api.problems import Refusal, answer
from accountant.assistant import route as assistant_route
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.compat import opencost_api
from accountant.compat.opencost_api import (
    AllocationsOfLedgers,
    AllocationSource,
)
from accountant.composition import create_app
from accountant.core.errors import LedgerFailed
from accountant.core.settings import Settings
from accountant.fleet import fleet_routes
from accountant.fleet.fleet_ledgers import Fleet, Member
from accountant.fleet.fleet_routes import FleetState
from accountant.runtime.ingest import Ingest
from accountant.runtime.job_and_task_metrics import AccountantMetrics, FunctionCollector
from accountant.storage.ended_session_files import SessionFiles
from accountant.storage.folder_or_object_store import open_store
from accountant.web import month_and_decision_pages, page_queries
from accountant.web.list_bar import RECENT
from gputally.base.background_tasks import BackgroundTask, BackgroundTasks, set_on_signals
from gputally.base.clock import Clock
from gputally.base.errors import AccountantError, CannotStart
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.objects import Api
from gputally.server.https_server import serve
from gputally.server.logs_and_metrics import TaskMetrics
from gputally.server.rate_and_connection_limits import RateLimit

PREFIX: Final = "/clusters/"
_OPENCOST: Final = "opencost"
"""Path segment of the OpenCost API, below a ledger's path, and below the fleet's for all ledgers."""
_OF_THE_ACCOUNTANT: Final = frozenset(
    {
        "backups",
        "check",
        "clock",
        "deliveries",
        "gpus",
        "imports",
        "quarantine",
        "livez",
        "readyz",
        "metrics",
    }
)
"""Paths that only a cluster's own accountant serves, because their data is not published."""
_PATIENCE_S: Final = 300.0
_OWN_LINK: Final = re.compile(rb'((?:href|action|src)=")/(?!static/|sign-|fleet|clusters/|favicon)')
"""A link from a ledger's page to another page of the same ledger."""


@dataclass(frozen=True, slots=True)
class _Served:
    member: Member
    deps: Deps
    pages: ASGIApp
    source: AllocationSource
    allocations: ASGIApp


def published_metrics(state: FleetState) -> Iterable[Metric]:
    """The metrics of the instants up to which the ledgers are published, and of whether they can be read."""
    until = GaugeMetricFamily(
        "gputally_fleet_published_timestamp_seconds",
        "Instant up to which the figures of each ledger of the lake are published, as last read (Unix time).",
        labels=["ledger"],
    )
    readable = GaugeMetricFamily(
        "gputally_fleet_ledger_readable",
        "1 if the figures that the ledger has published can be used, 0 if the ledger is left out.",
        labels=["ledger"],
    )
    for member in state.members:
        if member.status.until_ms:
            until.add_metric([member.name], member.status.until_ms / MS_PER_SECOND)
        readable.add_metric([member.name], float(not member.fault))
    yield from (until, readable)


class FleetService:
    """Serves the pages and the API of a fleet.

    settings: accountant settings; those about a ledger file have no effect here.
    fleet: read again every `refresh_seconds`. The caller closes its engine after `close`.

    Half of `limits.pages_bytes` is for answers about all ledgers, the other half is divided among the ledgers.

    Raises CannotStart, FileFault and LakeUnavailable."""

    def __init__(self, settings: Settings, fleet: Fleet, clock: Clock) -> None:
        self.settings = settings
        self.over = threading.Event()
        self.tasks = BackgroundTasks(clock, (AccountantError,))
        self._clock = clock
        self._log = structlog.get_logger("accountant.fleet")
        self._rate = RateLimit(clock, settings.limits.requests_per_second, settings.limits.burst)
        self._turns = RequestTurns(settings.limits)
        self._served: dict[str, _Served] = {}
        self._unreadable: dict[str, Member] = {}
        self._state = FleetState(fleet, settings, clock)
        self._threads: list[threading.Thread] = []
        self._sessions: SessionFiles | None = None
        if settings.session_store is not None:
            staging = Path(tempfile.gettempdir())
            self._sessions = SessionFiles(open_store(settings.session_store, settings.object_storage, staging))
        self._callers = CallersFile(
            settings, clock, self._refused, _no_cluster, lambda: self._state.status().teams, self._sessions
        )
        self._metrics = AccountantMetrics()
        self._metrics.watch(TaskMetrics(self.tasks))
        self._metrics.watch(FunctionCollector(partial(published_metrics, self._state)))
        self._own = self._deps(cast(ServedLedger, self._state), clock, self._state.no_books, "", self._with_cache(2))
        self.read_lake()
        self.app: ASGIApp = self._composed()

    def start(self) -> None:
        """Starts threads that read the lake, and what other replicas store, again until `over` is set."""
        self._threads.append(self.tasks.start("lake", self._read_lake_repeatedly, self.over, self._failed, _PATIENCE_S))
        if self._sessions is not None:
            self._threads.append(self.tasks.start("sessions", self._callers.follow_sessions, self.over, self._failed))

    def close(self) -> None:
        """Ends the threads, and waits until nothing of this service uses the engine."""
        self.over.set()
        for thread in self._threads:
            thread.join()
        for deps in (self._own, *(one.deps for one in self._served.values())):
            deps.answers.close()

    def read_lake(self, prepare: Callable[[Deps], None] = lambda _: None) -> None:
        """Reads the status of all ledgers from the lake. Ledgers with new figures get a new application, the others
        keep theirs with its cached answers. Raises LakeUnavailable.

        prepare: computes answers of a new application before it is served."""
        before, published = self._served, self._state.fleet.statuses()
        unchanged = {name: one for name, one in before.items() if one.member.status == published.get(name)}
        changed = sorted(published.keys() - unchanged.keys())
        opened = self._state.fleet.members(changed) if changed else []
        settings = self._with_cache(2 * len(published))
        new = {member.name: self._of_ledger(member, settings) for member in opened if not member.fault}
        for one in new.values():
            prepare(one.deps)
        unreadable = {member.name: member for member in opened if member.fault}
        for name, member in unreadable.items():
            if name not in self._unreadable or self._unreadable[name].status != member.status:
                self._log.warning("ledger_unreadable", ledger=name, reason=member.fault)
        self._unreadable = unreadable
        self._served = dict(sorted((unchanged | new).items()))
        pages = {name: one.deps for name, one in self._served.items()}
        members = unreadable | {name: one.member for name, one in self._served.items()}
        self._state.replace_members([member for _, member in sorted(members.items())], pages)
        sources = {name: one.source for name, one in self._served.items()}
        faults = [member.fault for _, member in sorted(unreadable.items())]
        self._together = opencost_api.create_app(
            AllocationsOfLedgers(sources, self._clock, self.settings.limits, self._state.fleet.rates, faults)
        )
        for name in before.keys() - unchanged.keys():
            before[name].deps.answers.close()

    def names(self) -> Sequence[str]:
        """The names of the ledgers served at present."""
        return tuple(self._served)

    def prepare(self, prepare: Callable[[Deps], None] | None = None) -> None:
        """Computes the fleet's lists of jobs and nodes of all ledgers, so that the first reader gets them at once."""
        for one in tuple(self._served.values()):
            (prepare or self._prepare)(one.deps)

    def _read_lake_repeatedly(self, stop: threading.Event, task: BackgroundTask) -> None:
        task.succeed()

        def prepare(deps: Deps) -> None:
            if not stop.is_set():
                task.begin()
                self._prepare(deps)

        with task.guarded(self._failed):
            self.prepare(prepare)
        while not self._clock.wait(self.settings.refresh_seconds, stop):
            with task.guarded(self._failed):
                self.read_lake(prepare)
                self._callers.check()

    def _prepare(self, deps: Deps) -> None:
        """Computes what the fleet's lists of jobs and nodes show of a ledger. A fault is left to the reader who meets
        it."""
        try:
            month = fleet_routes.shown_month(self._state, None)
            page_queries.jobs_of(deps, page_queries.ListSpan.of_month(month, deps), {}, fleet_routes.FIRST_JOBS)
            for start in RECENT:
                page_queries.machines(deps, page_queries.ListSpan.of(NodesParams(start=start), deps))
        except Exception as error:  # noqa: BLE001 - one ledger must not stop the others
            self._log.info("pages_not_prepared", reason=str(error))

    def _failed(self, error: Exception) -> None:
        self._log.warning("lake_not_read", reason=str(error))

    def _refused(self, faults: str) -> None:
        self._log.error("file_refused_running_version_stays", faults=faults.splitlines())

    # --- applications -------------------------------------------------------------------------

    def _composed(self) -> ASGIApp:
        own = FastAPI(title="gputally fleet", docs_url=None, redoc_url=None, redirect_slashes=False)
        own.state.deps = self._own
        own.state.fleet = self._state
        problems.install(own, self._never, month_and_decision_pages.present, month_and_decision_pages.recognise)
        own.router.routes.extend(
            [
                *fleet_routes.ROUTES,
                assistant_route.ROUTE,
                *month_and_decision_pages.SIGN_IN_ROUTES,
                *month_and_decision_pages.STATIC,
            ]
        )
        local_only = self.settings.auth == "off"
        wrapped = AccessMiddleware(own, clock=self._clock, local_only=local_only)

        async def routed(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")
            if scope["type"] == "http" and path.startswith(f"/{_OPENCOST}/"):
                together = self._admitted(_at(f"/{_OPENCOST}", self._together))
                await AccessMiddleware(together, clock=self._clock, local_only=local_only)(scope, receive, send)
                return
            if scope["type"] != "http" or not path.startswith(PREFIX):
                await wrapped(scope, receive, send)
                return
            name, slash, rest = _ledger_of(scope)
            served = self._served.get(name)
            refusal = _refusal(scope["method"], rest, name)
            if served is not None and slash and refusal is None and rest.partition("/")[0] != _OPENCOST:
                await _under(served.pages, f"{PREFIX}{name}", scope, receive, send)
                return
            # OpenCost's routes do not authenticate, so it is done here.
            answering: ASGIApp
            if name in self._unreadable:
                answering = answer(Refusal("ledger-unavailable", self._unreadable[name].fault), path)
            elif served is None:
                answering = answer(Refusal("not-found", f"no ledger {name!r} is published in this lake"), path)
            elif not slash:
                answering = RedirectResponse(f"{PREFIX}{quote(name, safe='')}/", 307)
            elif refusal is not None:
                answering = answer(refusal, path)
            else:
                answering = _at(f"{PREFIX}{name}/{_OPENCOST}", served.allocations)
            admitted = self._admitted(answering)
            await AccessMiddleware(admitted, clock=self._clock, local_only=local_only)(scope, receive, send)

        own.state.whole = routed
        return routed

    def _admitted(self, app: ASGIApp) -> ASGIApp:
        """The app, restricted to callers who may read the figures of all teams. Others get a refusal."""

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                require_all_teams(await admit(Request(scope), self._own, "read"))
            except Refusal as refusal:
                await answer(refusal, scope["path"])(scope, receive, send)
            else:
                await app(scope, receive, send)

        return checked

    def _with_cache(self, parts: int) -> Settings:
        """The settings with one of so many parts of the memory for cached answers."""
        limits = self.settings.limits
        part = limits.model_copy(update={"pages_bytes": limits.pages_bytes // max(parts, 1)})
        return self.settings.model_copy(update={"limits": part})

    def _of_ledger(self, member: Member, settings: Settings) -> _Served:
        settings = settings.model_copy(
            update={
                "timezone": member.status.timezone, "grace_days": member.status.grace_days,
                "exported_labels": member.status.exported_labels,
            }
        )  # fmt: skip
        deps = self._deps(cast(ServedLedger, member.ledger), member.clock, member.books, member.name, settings)
        cluster = next(iter(sorted(member.status.clusters)), "")
        source = AllocationSource(member.ledger, member.clock, deps.book, cluster, settings.limits)
        return _Served(member, deps, create_app(deps), source, opencost_api.create_app(source))

    def _deps(self, ledger: ServedLedger, clock: Clock, books: Bookkeeper, name: str, settings: Settings) -> Deps:
        return Deps(
            settings,
            clock,
            ledger,
            cast(Ingest, None),  # only GET and HEAD reach a ledger
            self._callers.authenticator,
            self._metrics,
            books,
            self._never,
            self._callers.certified,
            people=self._callers.people,
            tasks=self.tasks,
            bound=self._rate,
            shared_turns=self._turns,
            picker=lambda: ClusterPicker(name, [one.name for one in self._state.members]),
            settled=bool(name),
        )

    def _never(self, failure: LedgerFailed) -> None:
        """Only logs the failure: a lake is never opened for writing, so a restart does not help."""
        self._log.error("ledger_failed", reason=str(failure))


def run(service: FleetService) -> None:
    """Serves until `service.over` is set. SIGTERM and SIGINT set it."""
    settings, events = service.settings, structlog.get_logger("accountant.fleet")
    tls = composition.tls(settings)
    set_on_signals(service.over)
    limits = settings.limits.of_connections()
    with serve(service.app, settings.host, settings.port, tls, limits, tasks=service.tasks, renew=True) as url:
        service.start()
        events.info("serving", url=url, ledgers=service.names(), auth=settings.auth)
        service.over.wait()
        events.info("stopping")
    service.close()


def _no_cluster() -> Api:
    raise CannotStart(
        "the fleet's pages have no cluster that reviews service account tokens: use `tokens`, or `issuers` or sign-in "
        "in the callers file"
    )


def _ledger_of(scope: Scope) -> tuple[str, str, str]:
    """The name of the ledger in a path, the slash behind it, and the path below. A slash in a name is written %2F."""
    path: str = scope["path"].removeprefix(PREFIX)
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    name = unquote(raw.decode("latin-1").removeprefix(PREFIX).partition("/")[0])
    return name, path[len(name) : len(name) + 1], path[len(name) + 1 :]


def _refusal(method: str, rest: str, name: str) -> Refusal | None:
    """The reason for which a request is not passed to a ledger's application; None if it is passed. rest: the path
    below the ledger's path."""
    if method not in ("GET", "HEAD") and (method, rest) != ("POST", "mcp"):
        detail = f"the fleet's pages are read-only: send this request to the accountant of {name}"
        return Refusal("method-not-allowed", detail, headers={"Allow": "GET, HEAD"})
    subject, _, _ = rest.removeprefix("v1/").partition("/")
    if subject in _OF_THE_ACCOUNTANT:
        return Refusal("not-found", f"{subject} is not published in a lake: ask the accountant of {name}")
    return None


def _at(prefix: str, app: ASGIApp) -> ASGIApp:
    """The app, mounted at `prefix`."""

    async def moved(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": scope.get("root_path", "") + prefix}, receive, send)

    return moved


async def _under(app: ASGIApp, prefix: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Calls the app and rewrites its absolute links, so that it appears to be mounted at `prefix`."""
    above = PREFIX + quote(prefix.removeprefix(PREFIX), safe="")
    own_link = rb"\1" + above.encode() + b"/"
    start: Message | None = None
    parts: list[bytes] = []

    async def relayed(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message["headers"])
            location = headers.get("location", "")
            if location.startswith("/") and not location.startswith(("/sign-", f"{above}/")):
                headers["location"] = above + location
            if headers.get("content-type", "").startswith("text/html"):
                start = message
                return
        elif start is not None:
            parts.append(message.get("body", b""))
            if message.get("more_body"):
                return
            body = _OWN_LINK.sub(own_link, b"".join(parts))
            if scope["method"] == "GET":
                MutableHeaders(raw=start["headers"])["content-length"] = str(len(body))
            await send(start)
            await send({"type": "http.response.body", "body": body})
            return
        await send(message)

    await _at(prefix, app)(scope, receive, relayed)
