"""Builds one running accountant from its settings: ledger, ingest, prices, inventory, HTTP application, optional
listeners.

`start` starts a thread for each kind of task: maintenance, windows of a new policy, deliveries and pages; and one for
each routine of maintenance and of the lake while it runs. `maintain` runs the maintenance that is due: it checks files,
reads the inventory, looks for late records, and runs checkpoints, archive and backups. The demo and the tests call it
themselves at chosen times. `close` flushes the ingest before it closes the ledger."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from prometheus_client.core import Metric
from starlette.types import ASGIApp, Receive, Scope, Send

from accountant.api import (
    bookkeeping_routes,
    ingest_and_policy_routes,
    node_routes,
    operator_routes,
    problems,
    usage_cost_and_job_routes,
)
from accountant.api.access_control import CallersFile
from accountant.api.dependencies import Deps
from accountant.api.ledger_metrics import LedgerCollector
from accountant.api.middleware import AccessMiddleware
from accountant.assistant import route as assistant_route
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.month_closing import CannotClose
from accountant.channels.protocol import SEAM, ChannelPlugin
from accountant.compat import kai_usage_api, opencost_api
from accountant.compat.opencost_api import AllocationSource
from accountant.core.errors import LedgerFailed, LedgerUnavailable
from accountant.core.settings import Settings
from accountant.inventory.inventory_file import MergedInventory, YamlInventory
from accountant.inventory.kubernetes_inventory import ClusterInventory
from accountant.inventory.node_facts_and_downtime import Calendar
from accountant.ledger.protocols import Inventory, policy_at
from accountant.notifications.dispatcher import Dispatcher
from accountant.notifications.subscriptions import DeliveriesFile
from accountant.prices import price_book as prices
from accountant.prices.price_book import PriceBook
from accountant.runtime import background_tasks
from accountant.runtime.background_tasks import Maintenance, PeriodicTasks, Routine, Routines
from accountant.runtime.clock_step_guard import GuardedClock
from accountant.runtime.ingest import Ingest
from accountant.runtime.job_and_task_metrics import (
    AccountantMetrics,
    FunctionCollector,
    JobCollector,
    delivery_metrics,
    inventory_metrics,
    label_metrics,
    lake_metrics,
    proposal_metrics,
    upkeep_metrics,
)
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.ended_session_files import SessionFiles
from accountant.storage.folder_or_object_store import FileStore, in_folder, open_store
from accountant.web import (
    books_pages,
    explore_page,
    group_page,
    job_and_node_pages,
    job_list_page,
    month_and_decision_pages,
    node_list_page,
    provider_invoice_page,
    saved_views,
    savings_page,
    statement_detail_pages,
    waits_page,
)
from accountant.wire.policy_models import Policy
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.errors import AccountantError, CannotStart
from gputally.base.plugins import plugins
from gputally.base.units import MS_PER_SECOND
from gputally.base.version import __version__
from gputally.base.yaml_file import FileFault, read
from gputally.kubernetes.objects import Api
from gputally.server import config_loading
from gputally.server.config_loading import WatchedFile
from gputally.server.host_names import HostCheck
from gputally.server.https_server import BadCertificate, Tls, TlsFiles
from gputally.server.logs_and_metrics import TaskMetrics
from gputally.server.request_handling import tagged
from gputally.server.tokens_and_grants import Authenticator

ROUTES = (
    [
        route
        for router in (
            ingest_and_policy_routes.usage_router,
            operator_routes.gpu_router,
            usage_cost_and_job_routes.figure_router,
            bookkeeping_routes.statement_router,
            bookkeeping_routes.period_router,
            bookkeeping_routes.price_router,
            ingest_and_policy_routes.policy_router,
            ingest_and_policy_routes.decision_router,
            bookkeeping_routes.audit_router,
            usage_cost_and_job_routes.wait_router,
            usage_cost_and_job_routes.job_router,
            node_routes.router,
            operator_routes.operation_router,
            month_and_decision_pages.router,
            statement_detail_pages.router,
            provider_invoice_page.router,
            job_and_node_pages.router,
            explore_page.router,
            job_list_page.router,
            savings_page.router,
            waits_page.router,
            node_list_page.router,
            saved_views.router,
            group_page.router,
            books_pages.router,
        )
        for route in router.routes
    ]
    + month_and_decision_pages.SIGN_IN_ROUTES
    + month_and_decision_pages.STATIC
    + [assistant_route.ROUTE]
)
"""The routes of every app of the process. `include_router` would copy every route for each app, which takes half a
second, and would search 15 routers per request."""
for _route in ROUTES:
    if isinstance(_route, APIRoute):
        # FastAPI makes a parameter model's fields at its first use, and finds their schemas by identity. If two threads
        # made them at one time, the OpenAPI document of one would look for fields of the other.
        get_flat_params(_route.dependant)


class _App(FastAPI):
    """Passes agents' batches to the application `usage`, without FastAPI's routing. See `ingest_app`."""

    usage: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        batch = scope["type"] == "http" and scope["path"] == "/v1/usage" and scope["method"] == "POST"
        await (self.usage if batch else super().__call__)(scope, receive, send)


def create_app(deps: Deps) -> FastAPI:
    """Makes the HTTP application. The maker of `deps` closes its objects after the last request."""
    app = _App(
        title="gputally accountant",
        version=__version__,
        summary="The ledger of GPU-hours and cost.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.deps = deps
    problems.install(app, deps.failed, month_and_decision_pages.present, month_and_decision_pages.recognise)
    app.router.routes.extend(ROUTES)

    local_only = deps.settings.auth == "off"
    app.add_middleware(AccessMiddleware, clock=deps.clock, local_only=local_only)
    app.usage = AccessMiddleware(
        ingest_and_policy_routes.ingest_app(deps),
        clock=deps.clock,
        local_only=local_only,
        answered=deps.metrics.answered,
    )

    written = threading.Lock()

    def document() -> dict[str, Any]:
        with written:
            if app.openapi_schema is None:
                app.openapi_schema = problems.document(app)
            return app.openapi_schema

    @cache
    def encoded() -> bytes:
        return json.dumps(document(), ensure_ascii=False, separators=(",", ":")).encode()

    async def described(request: Request) -> Response:
        return tagged(request, await asyncio.to_thread(encoded), "application/json")

    app.openapi = document  # type: ignore[method-assign]  # the way FastAPI documents to extend it
    app.add_route("/openapi.json", described, include_in_schema=False)
    return app


if TYPE_CHECKING:
    from accountant.lake.publisher import Publisher

T = TypeVar("T")
_PULSE_SECONDS = 1.0
"""How often the thread checks whether something is due."""
_DELIVERY_SECONDS = 60.0
"""How often reports and notices are checked, which needs a ledger query."""

_DELIVERY_PATIENCE_S = 900.0
"""One run makes and sends all reports that are due."""
_AHEAD_SECONDS = 60.0
"""How often slow answers for the pages are computed ahead."""
_PAGES_PATIENCE_S = 300.0


class Listener(NamedTuple):
    """A compatibility API: its name, its application and the host:port on which it is served."""

    what: str
    app: ASGIApp
    listen: str


class UnknownTeams(FileFault):
    """A file names teams that no policy, namespace, record or adjustment names."""


class Service:
    """One running accountant. It has its ledger open from construction to `close`.

    inventory, authenticator: replace those that the settings name; None: those of the settings.
    trial: the price file is tried out and not recorded.
    fence: returns why nothing may be committed, "" while this replica leads.

    app: the HTTP application; listeners: the compatibility APIs (accountant.compat).
    over: set when the process should end, because of `failure` or on request.
    failure: the failure of the ledger, after which only a restart helps; None: none.

    Raises AccountantError (CannotStart, InventoryError, LedgerLocked, LedgerDamaged, LedgerUnavailable) and
    gputally.base.yaml_file.FileFault; then nothing is left open."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        inventory: Inventory | None = None,
        authenticator: Authenticator | None = None,
        *,
        trial: bool = False,
        fence: Callable[[], str] = lambda: "",
    ) -> None:
        self._trial = trial
        self.settings = settings
        self._clock = self._guard = clock if isinstance(clock, GuardedClock) else GuardedClock(clock)
        self._log = structlog.get_logger("accountant.composition")
        self.tasks = BackgroundTasks(self._clock, (AccountantError, FileFault))
        self._pulses = PeriodicTasks(self.fail, self.tasks)
        self._connected: Api | None = None
        self.failure: LedgerFailed | None = None
        self.over = threading.Event()
        self._book = self._watch(settings.prices, prices.load, self._take_prices)
        self._policy = self._watch(
            settings.policy, lambda path: config_loading.load_yaml(path, Policy), self._take_policy
        )
        self._warn_of_channels_left_out()
        self._deliveries_file = self._watch(
            settings.deliveries, lambda path: config_loading.load_yaml(path, DeliveriesFile), self._take_deliveries
        )
        written = self._inventory_file() if inventory is None else None
        _writable(settings.data)
        archive = self._archive()
        self._teams_of_callers: frozenset[str] = frozenset()
        """The teams that tokens and callers named at the last look."""
        sessions = SessionFiles(archive if self._own_volume and archive is not None else in_folder(settings.data))
        self._callers = CallersFile(settings, self._clock, self._stays, self._api, self._teams, sessions)
        self.tls = tls(settings)
        self.ledger = self._open_ledger(archive, fence)
        self._cluster: ClusterInventory | None = None
        try:
            self.books = Bookkeeper(
                self.ledger, self._clock, settings.timezone, settings.grace_days, settings.correct_months
            )
            self._inventory = inventory or self._inventories(written)
            self._take_files()
        except BaseException:
            self.ledger.close()
            raise
        self.ingest = Ingest(
            self.ledger, self._clock, settings.linger_ms, self.fail, tasks=self.tasks, heard=self._guard.heard
        )
        self.deliveries = self._deliveries()
        self._publisher = self._lake_publisher()
        self.metrics = self._metrics()
        self._deps = self._dependencies(authenticator or self._callers.authenticator)
        self.app = create_app(self._deps)
        self.listeners = self._compatible(self.metrics)
        maintenance = Maintenance(self.ledger, self.books, settings, self._clock, self._deps.backups, self._publisher)
        self._routines = Routines(self._clock, [*self._refreshing(), *maintenance.routines()], self.tasks)
        self._lake_routines = Routines(self._clock, maintenance.lake_routines(), self.tasks)
        self._warmed = ""
        """Version of the policy whose window was last queried."""

    def _warn_of_channels_left_out(self) -> None:
        for plugin in plugins(SEAM, ChannelPlugin) if self.settings.deliveries is not None else ():
            if plugin.fault:
                self._log.warning("plugin_left_out", name=plugin.name, package=plugin.package, reason=plugin.fault)

    def _inventory_file(self) -> YamlInventory | None:
        """The inventory file that the settings name, read once. Raises InventoryError."""
        if self.settings.inventory is None:
            return None
        written = YamlInventory(self.settings.inventory)
        written.read(self._clock.wall_ms())
        return written

    def _archive(self) -> FileStore | None:
        settings = self.settings
        if settings.archive is None:
            return None
        return open_store(settings.archive.to, settings.object_storage, settings.data)

    @property
    def _own_volume(self) -> bool:
        """Whether each replica has a volume of its own."""
        return self.settings.leader_election is not None and self.settings.leader_election.own_volume

    def _open_ledger(self, archive: FileStore | None, fence: Callable[[], str]) -> DuckLedger:
        settings = self.settings
        return open_ledger(
            settings.ledger_file,
            self._clock,
            month_zone=settings.timezone,
            archive=archive,
            doubt=lambda: self._guard.doubt,
            fence=fence,
            acts_at_once=self._own_volume,
            gpu_move_after_ms=settings.gpu_move_after * MS_PER_SECOND,
            quotas=settings.quotas,
            exported_labels=settings.exported_labels,
        )

    def _dependencies(self, authenticator: Authenticator) -> Deps:
        """What the routes need."""
        return Deps(
            self.settings,
            self._clock,
            self.ledger,
            self.ingest,
            authenticator,
            self.metrics,
            self.books,
            self.fail,
            self._callers.certified,
            self.deliveries,
            self._callers.people,
            self.tasks,
            guard=self._guard,
            lake=self._publisher,
            pods_heard_ms=self._pods_heard(),
        )

    def _pods_heard(self) -> Callable[[], int | None] | None:
        """What returns the time of the API server's last answer about pods; None if the inventory was given."""
        cluster = self._cluster
        return None if cluster is None else lambda: cluster.pods_heard_ms

    def book(self) -> PriceBook | None:
        """The price book in force; None if there is none."""
        return self.books.prices.current

    def _compatible(self, metrics: AccountantMetrics) -> tuple[Listener, ...]:
        listeners: list[Listener] = []
        settings = self.settings
        if (kai := settings.kai_usage) is not None:
            metrics_of_kai = kai_usage_api.KaiMetrics(metrics.registry)
            usage = kai_usage_api.KaiUsageSource(
                self.ledger, self._clock, kai, metrics_of_kai, self.book, settings.limits
            )
            app = HostCheck(kai_usage_api.create_app(usage), kai.hosts, "kai_usage.hosts")
            listeners.append(Listener("kai_usage", app, kai.listen))
        if settings.opencost is not None:
            allocations = AllocationSource(
                self.ledger, self._clock, self.book, settings.kubernetes.cluster, settings.limits
            )
            app = HostCheck(opencost_api.create_app(allocations), settings.opencost.hosts, "opencost.hosts")
            listeners.append(Listener("opencost", app, settings.opencost.listen))
        return tuple(listeners)

    def start(self) -> None:
        """Starts the threads of the background tasks, which run until `close`."""
        if self._cluster is not None:
            self._cluster.start()
        begin = self._pulses.begin
        begin("windows", _PULSE_SECONDS, self.warm_windows, may_stop=True)
        begin("maintenance", _PULSE_SECONDS, self._start_routines)
        if self.deliveries is not None:
            begin("delivery", _DELIVERY_SECONDS, self.deliveries.run, _DELIVERY_PATIENCE_S)
        begin("pages", _AHEAD_SECONDS, self.ask_ahead, _PAGES_PATIENCE_S, may_stop=True)

    def warm_windows(self) -> None:
        """Queries the windows of a policy once after it came into force, so that the ledger caches them. Raises
        AccountantError."""
        now = self._clock.wall_ms()
        version = policy_at(self.ledger.status(), now)
        if version is not None and version.version != self._warmed:
            self._warmed = version.version
            background_tasks.warm(self.ledger, version.policy, self.book(), now)

    def ask_ahead(self) -> None:
        """Computes slow answers for the pages before they are requested. Raises AccountantError."""
        answers = self._deps.answers
        if answers.ahead_is_due:
            with answers.ahead():
                month_and_decision_pages.prepare_pages(self._deps)

    def maintain(self) -> None:
        """Runs the routines that are due. Faults are logged, and the versions in force stay. Raises LedgerFailed."""
        self._routines.do_due()

    def _start_routines(self) -> None:
        """Starts all routines that are due, each in a thread of its own. Raises LedgerFailed."""
        self._routines.start_due(self.fail)
        self._lake_routines.start_due(self.fail)

    def publish(self) -> None:
        """Runs the routines of the lake that are due. Faults are logged. Raises LedgerFailed."""
        self._lake_routines.do_due()

    def fail(self, failure: LedgerFailed) -> None:
        """Asks the process to end, because only another process can open the ledger again."""
        self.failure = failure
        self.over.set()

    def close(self) -> None:
        """Ends the threads, books the waiting batches, writes the log into the ledger file and closes the file. The app
        must not be used afterwards."""
        self._pulses.stop()
        if self._cluster is not None:
            self._cluster.close()
        self._pulses.join()
        self._routines.join()
        self._lake_routines.join()
        self._deps.answers.close()
        self.ingest.close()
        if self.failure is None:
            self.ledger.checkpoint()
        self.ledger.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_files(self) -> None:
        """Puts the policy file, the inventory, the price file and the deliveries file in force at the start. If the
        ledger cannot be written, the versions in the ledger stay in force, and the routines try again. So it is if a
        file names a team that nothing names yet, because the policy that names it may come later; deliveries about
        other teams go on."""
        if self._policy is not None:
            try:
                self._take_policy(self._policy.current)
            except LedgerUnavailable as error:
                self._later(self._policy, error)
        try:
            self._read_inventory()
        except LedgerUnavailable as error:
            self._log.error("inventory_not_taken", reason=str(error))
        if self._book is not None:
            try:
                self._take_prices(self._book.current)
            except (LedgerUnavailable, UnknownTeams) as error:
                if self._trial:
                    raise
                self._later(self._book, error)
        if (file := self._deliveries_file) is not None:
            try:
                self._take_deliveries(file.current)
            except UnknownTeams as error:
                if self._trial:
                    raise
                file.current = file.current.without(self.books.teams.unknown(file.current.teams().values()))
                self._later(file, error)

        self._look_at_teams_of_callers()

    def _check_callers(self) -> bool:
        """Puts a changed callers file in force; see `CallersFile.check`."""
        changed = self._callers.check()
        self._look_at_teams_of_callers()
        return changed

    def _look_at_teams_of_callers(self) -> None:
        """Warns of unknown teams in tokens and callers when the named teams changed."""
        if (teams := self._callers.teams()) != self._teams_of_callers:
            self._teams_of_callers = teams
            self.books.teams.warn_of_unknown("tokens and callers", teams)

    def _later(self, file: WatchedFile[T], error: LedgerUnavailable | UnknownTeams) -> None:
        file.enforce_again()
        self._stays(str(error))

    def _refreshing(self) -> list[Routine]:
        """The routines that read files and the inventory again: one for each, so that a fault of one does not stop the
        others."""
        interval_s = self.settings.refresh_seconds
        reloads = {name: file.check for name, file in self._files().items()} | {"callers file": self._check_callers}
        if self.tls is not None:
            reloads["certificate"] = self.tls.renew
        routines = [Routine(name, interval_s, partial(self._look, name, reload)) for name, reload in reloads.items()]
        return [
            *routines,
            Routine("inventory", interval_s, self._read_inventory),
            Routine("clock", interval_s, self._guard.keep),
        ]

    def _look(self, name: str, reload: Callable[[], bool]) -> None:
        try:
            if reload():
                self._log.info("file_reloaded", what=name)
        except BadCertificate as error:
            self._stays(str(error))

    def _read_inventory(self) -> None:
        now = self._clock.wall_ms()
        self.ledger.observe(self._inventory.read(now), now, self.books.closed_ms())
        self._inventory.taken()

    def _deliveries(self) -> Dispatcher | None:
        deliveries_file = self._deliveries_file
        if deliveries_file is None:
            return None
        return Dispatcher(self.ledger, self.books, self.settings, self._clock, lambda: deliveries_file.current)

    def _take_policy(self, policy: Policy) -> None:
        version = self.ledger.put_policy(policy, self._clock.wall_ms(), _of_file(self.settings.policy))
        self._log.info("policy_in_force", version=version.version)
        self.books.teams.warn_of_unknown("budgets of the policy", (budget.team for budget in policy.budgets))

    def _take_prices(self, book: PriceBook) -> None:
        """Puts the price file in force if it changed. Raises FileFault if the bookkeeping refuses it."""
        path = str(self.settings.prices)
        self._refuse_unknown(
            self.settings.prices,
            {("commitments", index, "owner"): one.owner for index, one in enumerate(book.commitments)},
        )
        try:
            if self._trial:
                self.books.prices.try_out(self.books.composed(book).book, self._clock.wall_ms())
                return
            version = self.books.take_file(book, _of_file(self.settings.prices))
        except CannotClose as refused:
            raise FileFault([f"{read(Path(path)).place([refused.key])}: {refused.key}: {refused}"]) from refused
        if version is not None:
            self._log.info("price_book_in_force", version=version.version)

    def _take_deliveries(self, deliveries_file: DeliveriesFile) -> None:
        """Raises UnknownTeams if the file orders something about a team that nothing names."""
        self._refuse_unknown(self.settings.deliveries, deliveries_file.teams())

    def _refuse_unknown(self, path: Path | None, teams: Mapping[tuple[str | int, ...], str]) -> None:
        """Raises UnknownTeams for teams that nothing names, unless no team is known at all, as in a new ledger.

        teams: by their place in the file."""
        unknown = self.books.teams.unknown(teams.values())
        if unknown and path is not None and self.books.teams.known():
            document = read(path)
            raise UnknownTeams(
                [
                    f"{document.place(place)}: {'.'.join(map(str, place))}: {unknown[team]}"
                    for place, team in teams.items()
                    if team in unknown
                ]
            )

    def _watch(
        self, path: Path | None, load: Callable[[Path], T], enforce: Callable[[T], None] | None = None
    ) -> WatchedFile[T] | None:
        return None if path is None else WatchedFile(path, load, self._stays, enforce)

    def _stays(self, faults: str) -> None:
        self._log.error("file_refused_running_version_stays", faults=faults.splitlines())

    def _metrics(self) -> AccountantMetrics:
        metrics = AccountantMetrics()
        if self.deliveries is not None:
            metrics.watch(FunctionCollector(partial(delivery_metrics, self.deliveries)))
        metrics.watch(LedgerCollector(self.ledger, self.book, self.settings, self._clock))
        settings = self.settings
        metrics.watch(JobCollector(self.ledger, self.book, settings.job_metrics, self._clock, settings.timezone))
        metrics.watch(TaskMetrics(self.tasks))
        if self._publisher is not None:
            metrics.watch(FunctionCollector(partial(lake_metrics, self._publisher)))
        metrics.watch(FunctionCollector(partial(proposal_metrics, lambda: self.books.waiting)))
        metrics.watch(FunctionCollector(self._upkeep_metrics))
        if self.settings.exported_labels:
            metrics.watch(FunctionCollector(lambda: label_metrics(self.ledger.cut_labels())))
        if self._cluster is not None:
            metrics.watch(FunctionCollector(partial(inventory_metrics, self._cluster, self._clock)))
        return metrics

    def _upkeep_metrics(self) -> Iterable[Metric]:
        return upkeep_metrics(self.tasks, self._refused(), self._deps.backups.remembered)

    def _lake_publisher(self) -> Publisher | None:
        lake = self.settings.lake
        if lake is None:
            return None
        # Imported only with a lake: it takes a third of a second and 40 MiB.
        from accountant.lake.iceberg_catalog import Catalogue
        from accountant.lake.publisher import Publisher, name_of

        named = lake.model_copy(update={"ledger": name_of(self.settings)})
        return Publisher(self.ledger, self.books, self.settings, self._clock, partial(Catalogue.connect, named))

    def _refused(self) -> dict[str, bool]:
        """For each file, whether its newest version is not in force."""
        return {
            **({"certificate": self.tls.refused} if self.tls is not None else {}),
            **self._callers.refused(),
            **{name: file.refused for name, file in self._files().items()},
        }

    def _files(self) -> dict[str, WatchedFile[Any]]:
        """The files that the settings name, without the callers file."""
        files = {"prices file": self._book, "policy file": self._policy, "deliveries file": self._deliveries_file}
        return {name: file for name, file in files.items() if file is not None}

    def _inventories(self, written: YamlInventory | None) -> Inventory:
        """The inventory: the inventory file, which takes precedence, and the cluster's objects."""
        kubernetes = self.settings.kubernetes
        if kubernetes.inventory:
            self._cluster = ClusterInventory(
                self._api(),
                self._clock,
                kubernetes.cluster,
                self.ledger.status().nodes,
                kubernetes.team_labels,
                kubernetes.user_labels,
                self.settings.exported_labels,
                tasks=self.tasks,
            )
        sources: tuple[Inventory | None, ...] = (written, self._cluster)
        calendar = (lambda: written.calendar) if written is not None else Calendar
        return MergedInventory([source for source in sources if source is not None], calendar)

    def _api(self) -> Api:
        if self._connected is None:
            # Imported only with a cluster: it takes half a second and 65 MiB.
            from gputally.kubernetes.api_client import KubernetesApi

            self._connected = KubernetesApi.connect(self.settings.kubernetes.kubeconfig)
        return self._connected

    def _teams(self) -> Collection[str]:
        return self.ledger.status().teams


def tls(settings: Settings) -> Tls | None:
    """The HTTPS identity in the settings; None: plain HTTP."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Tls(TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca))


def _of_file(path: Path | None) -> str:
    """Who did an act that came from a file. Its folder is a matter of the machine."""
    return f"file {path.name}" if path is not None else ""


def _writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotStart(f"data folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CannotStart(f"data folder {folder}: the user with the id {os.getuid()} cannot write there")
