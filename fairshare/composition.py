"""Builds one running controller from its settings: cycles, leader election, probes, metrics, extender and pages.

Cycles run in the calling thread. Other threads watch the pods, take part in the leader election, and serve /metrics,
the probes, the extender and the pages. After SIGTERM sets `stop`, the current cycle ends, the controller releases its
Lease, and the servers close."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from accountant.wire.policy_models import Decision, Policy
from fairshare.controller import event_and_decision_recorder
from fairshare.controller import policy_file as policies
from fairshare.controller.claimed_pods import ClaimedPods
from fairshare.controller.control_loop import ALONE, Controller
from fairshare.controller.controller_metrics import ControllerMetrics
from fairshare.controller.cycle_report import CycleReport
from fairshare.controller.extender_views import ExtenderViews
from fairshare.controller.policy_difference import changed_texts, policy_decision
from fairshare.controller.policy_file import PolicyLocation, policy_writer
from fairshare.core.gpu_demand import PodReducer, read_claiming, read_member
from fairshare.core.queues_and_weights import Pod
from fairshare.core.settings import ControllerSettings, address
from fairshare.http_server import LIMITS, Probes, serve, serve_extender
from fairshare.preemption.preemption_controller import Calls, no_calls
from fairshare.preemption.service_latency_objectives import Alarms, prometheus_latency
from fairshare.targets.extender import Extender
from fairshare.targets.installed import adapters, kinds, opened
from fairshare.targets.pod_index import PodIndex
from fairshare.targets.status_config_map import StatusObject
from fairshare.usage.accountant_client import AccountantApi, other_clusters
from fairshare.web.ended_session_stores import AccountantSessions, SessionConfigMap
from fairshare.web.page_authentication import PageAuthentication, SignInFault, SignIns
from fairshare.web.queue_history import QueueHistory, ReportCache
from fairshare.web.what_if_worker import Previews, PreviewWorker
from gputally.base import called_off
from gputally.base.background_tasks import BackgroundTasks, Work, error_summary
from gputally.base.clock import Clock, SystemClock
from gputally.base.errors import CannotStart, ClusterError, FairshareError
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.leader_election import Election
from gputally.kubernetes.list_watch import Reflector
from gputally.kubernetes.memory_cluster import MemoryCluster, load_objects
from gputally.kubernetes.objects import CONFIG_MAP, POD, Cluster, Event
from gputally.server import https_server
from gputally.server.config_loading import ReloadedFile
from gputally.server.ended_sessions import EndedSessions, SessionStore
from gputally.server.https_server import Tls, TlsFiles
from gputally.server.tokens_and_grants import TokenFile

CALLS_S = 5.0
"""How long the last cycle may wait for accountants after the process was asked to end."""
END_S = 5.0
"""How long a thread may take to end before the process exits without it."""
HISTORY_TIMEOUT_S = 300.0
"""How long a preview waits for one answer of the accountant."""
THREAD_SWITCH_S = 0.0005
"""How long a thread may compute while others wait, in a controller with the extender: an answer waits for its turn at
every read and write, behind a cycle that computes."""
COLLECTIONS_BETWEEN = 1_000
"""Cycles between two collections that look through everything."""
MOST_SAVED = 1_000
"""Largest number of policies saved by the form whose decisions wait for the next cycle."""
CYCLE_PATIENCE_S = 50.0
"""The time limit of one cycle, after which the task `cycle` counts as faulty."""


def run(settings: ControllerSettings, stop: threading.Event) -> None:
    """Run the controller until `stop` is set."""
    with ExitStack() as stack:
        program = _Program(settings, stop, stack.enter_context)
        url = program.serve_metrics_and_probes()
        program.watch_pods()
        program.take_part_in_election()
        extenders = program.serve_extenders()
        program.serve_pages()
        controller = program.controller(extenders)
        structlog.get_logger("fairshare").info("serving", url=url, accountant=settings.url, policy=str(settings.policy))
        stack.callback(program.over.set)
        stack.enter_context(_ending_calls(stop))
        program.run_cycles(controller)
    structlog.get_logger("fairshare").info("stopping")


class _Program:
    """One running controller. `run` calls the methods in order; what they begin ends after the last cycle.

    begin: enters a context, which ends after the last cycle.
    over: set after the last cycle, so that the ports stop at one time."""

    def __init__(
        self, settings: ControllerSettings, stop: threading.Event, begin: Callable[[AbstractContextManager[Any]], Any]
    ) -> None:
        self._settings, self._stop, self._begin = settings, stop, begin
        self._events = structlog.get_logger("fairshare")
        self._log = event_and_decision_recorder.CycleLog(self._events)
        self._collections = ShortCollections()
        self._clock = clock = SystemClock()
        self._tasks = BackgroundTasks(clock, (FairshareError, FileFault))
        self._cycles = self._tasks.add("cycle", CYCLE_PATIENCE_S, serves=True)
        self._metrics = ControllerMetrics(clock, settings.interval, self._tasks)
        self._others = other_clusters(settings.accountants, settings.cluster)
        self._file = policies.reloaded(settings.policy, self._others)
        self._cluster = open_cluster(settings.objects, settings.kubeconfig)
        self._pods = _WatchedPods(settings, self._cluster, clock)
        self._views = ExtenderViews(self._pods.index, clock)
        self._reports = ReportCache()
        self._saved: deque[Decision] = deque(maxlen=MOST_SAVED)
        self._election = election = _election(settings, clock)
        self._term = election.term if election is not None else lambda: ALONE
        leaderless = election.leaderless if election is not None else lambda: None
        self._health = Probes(clock, settings.interval, self._tasks, leaderless)
        self.over = threading.Event()
        self._client: AccountantApi = begin(
            AccountantApi(
                settings.url,
                token_file=settings.token_file,
                ca_file=settings.ca_file,
                cluster=settings.cluster,
                clock=clock,
            )
        )

    def serve_metrics_and_probes(self) -> str:
        """Serve /metrics and the probes, and return their base URL."""
        settings, health = self._settings, self._health
        served = serve(
            settings.host,
            settings.port,
            live=health.live,
            ready=health.ready,
            metrics=self._metrics.render,
            tasks=self._tasks,
            hosts=settings.hosts,
            over=self.over,
        )
        return str(self._begin(served))

    def watch_pods(self) -> None:
        for each in self._pods.watches(self._stop, self._tasks):
            self._begin(each)

    def take_part_in_election(self) -> None:
        if self._election is not None:
            self._begin(run_beside("fairshare-lease", self._election.run, self._stop, self._tasks, serves=True))

    def serve_extenders(self) -> dict[str, Extender]:
        """Serve what schedulers ask, and return the extenders by adapter; empty without a port for them."""
        if not self._settings.extender_listen:
            return {}
        extenders = {
            each.name: each.extender(self._views.view, self._clock, with_claims=self._pods.with_claims)
            for each in adapters()
            if each.extender is not None
        }
        sys.setswitchinterval(THREAD_SWITCH_S)
        self._begin(_extenders(self._settings, extenders.values(), self._metrics, self._tasks, self.over))
        return extenders

    def serve_pages(self) -> None:
        if self._settings.pages_listen:
            self._begin(
                serve_pages(
                    self._settings, self._reports, self._client, self._clock, self._cluster, self._tasks,
                    self._saved.append, self.over,
                )
            )  # fmt: skip

    def controller(self, extenders: Mapping[str, Extender]) -> Controller:
        settings, pods, election = self._settings, self._pods, self._election
        status = StatusObject(settings.status_namespace or StatusObject().namespace, settings.status_name)
        clusters = self._begin(opened(self._file.current, self._cluster, settings.file, status, self._clock))
        controller = Controller(
            in_mode(self._file.current, settings),
            self._client,
            self._cluster,
            self._clock,
            clusters=clusters,
            status_object=status if settings.status_namespace else None,
            observe=lambda report: self._observe(report, controller.policy),
            pods=pods.index.pods,
            unseen=pods.behind,
            unreadable=pods.unreadable,
            term=self._term,
            acts={name: extender.acts for name, extender in extenders.items()},
            calls=self._calls(),
            others=self._others,
            name=f"{settings.status_namespace}/{settings.lease}" if election is not None else "",
            posts=lambda: [self._saved.popleft() for _ in range(len(self._saved))],
            claims_counted=pods.claims_counted,
        )
        return controller

    def _calls(self) -> Calls:
        """Return what returns the requests for room of violated latency objectives."""
        alarms: Alarms | None = None
        if self._settings.prometheus:
            alarms = Alarms(prometheus_latency(self._settings.prometheus, self._settings.prometheus_token_file))
        self._metrics.watch(alarms, lambda: self._term() is not None)
        return alarms or no_calls

    def _observe(self, report: CycleReport, policy: Policy) -> None:
        """Pass a report on to metrics, extender, pages, probes and log. policy: the one by which it was made."""
        self._metrics.observe(report)
        self._views.observe(report, policy)
        self._reports.observe(report, policy)
        self._health.beat()
        self._collections.after_cycle()
        self._log.log(report)
        if self._election is not None and self._election.fault:
            self._events.warning("election", fault=self._election.fault)

    def run_cycles(self, controller: Controller) -> None:
        controller.run(
            self._stop,
            lambda: self._cycles.guarded(_failure_logger("cycle")),
            interval_s=self._settings.interval,
            reload=partial(reload, self._file, self._settings),
        )


class _WatchedPods:
    """The pods that request GPUs, as list-watches keep them; none if the settings switch the watch off.

    With an extender they have the GPUs of their ResourceClaims; other schedulers count the devices of claims
    themselves.

    index: the pods.
    with_claims: returns a pod with the GPUs of its claims.
    claims_counted: whether the pods of the index have them."""

    def __init__(self, settings: ControllerSettings, cluster: Cluster, clock: Clock) -> None:
        self.index = PodIndex()
        claimed = ClaimedPods(self.index.change)
        self.with_claims = claimed.with_claims
        self._watched = settings.watch_pods
        self.claims_counted = bool(self._watched and settings.extender_listen)
        self._claims: tuple[Reflector[Any, Any], ...] = ()
        read, changed = read_member, self.index.change
        if self.claims_counted:
            self._claims = claimed.reflectors(cluster.api(), clock.monotonic_ms)
            read, changed = read_claiming, claimed.pod_changed
        self._pods: Reflector[dict[str, Any], Pod] = Reflector(
            cluster.api(), POD.path(), dict, PodReducer(clock, read), changed, now_ms=clock.monotonic_ms
        )

    def watches(self, stop: threading.Event, tasks: BackgroundTasks) -> Iterator[AbstractContextManager[None]]:
        """List everything once, and yield the contexts in which it is watched."""
        if not self._watched:
            return
        for each in (*self._claims, self._pods):
            each.prime()
        yield run_beside("fairshare-pods", self._pods.run, stop, tasks, serves=True)
        for each in self._claims:
            yield run_beside(f"fairshare-{each.path.rpartition('/')[2]}", each.run, stop, tasks)

    def behind(self) -> str | None:
        """Return why the index may lack some pods; None if it lacks none."""
        return self._pods.behind() if self._watched else None

    def unreadable(self) -> tuple[str, ...]:
        """Return the pods and claims that cannot be read, and why claims cannot be listed."""
        faults = [each.fault for each in self._claims if each.fault is not None]
        return (*(text for each in (self._pods, *self._claims) for text in each.unreadable().values()), *faults)


class ShortCollections:
    """Collects garbage after each cycle, and leaves what stays out of later collections: a collection stops every
    thread, and one through 20,000 pods for .07 s. What became garbage later, in a circle of references, is collected
    after `COLLECTIONS_BETWEEN` cycles."""

    def __init__(self) -> None:
        self._cycles = 0

    def after_cycle(self) -> None:
        self._cycles += 1
        if self._cycles % COLLECTIONS_BETWEEN == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()


@contextmanager
def _ending_calls(stop: threading.Event) -> Iterator[None]:
    """Inside the context, end this thread's calls to accountants when `stop` has been set for CALLS_S, so that a cycle
    ends although an accountant hangs."""
    calls, cycles = called_off.Work(), threading.current_thread()

    def end() -> None:
        stop.wait()
        cycles.join(CALLS_S)
        calls.end(cycles)

    called_off.make_current(calls)
    threading.Thread(target=end, name="fairshare-calls", daemon=True).start()
    try:
        yield
    finally:
        called_off.make_current(None)


def in_mode(policy: Policy, settings: ControllerSettings) -> Policy:
    """Return the policy as the settings let it act."""
    return policies.in_dry_run(policy) if settings.dry_run else policy


def reload(file: ReloadedFile[Policy], settings: ControllerSettings) -> Policy | None:
    """Return the policy of a changed file, and log the difference; None if the file is as before. Raises FileFault."""
    events, before = structlog.get_logger("fairshare"), file.current
    try:
        changed = file.renew()
    except FileFault as fault:
        for line in fault.faults:
            events.error("policy_refused", fault=line)
        raise
    if not changed:
        return None
    now = file.current
    if now.version() != before.version():
        changes = list(changed_texts(before, now))
        events.warning("policy_in_force", before=before.version(), now=now.version(), changes=changes)
    return in_mode(now, settings)


def open_cluster(name: str, kubeconfig: Path | None) -> Cluster:
    """Connect to the API server (`kubernetes`), or load the objects of a file. Raises Unavailable or FileFault."""
    if name != "kubernetes":
        return MemoryCluster(kinds(), load_objects(Path(name), kinds()))
    # The import takes half a second and 60 MiB, which commands without a cluster do not need.
    from gputally.kubernetes.api_client import KubernetesCluster

    return KubernetesCluster.connect(kinds(), kubeconfig)


def _election(settings: ControllerSettings, clock: Clock) -> Election | None:
    """Return the leader election; None without a cluster, or if the settings switch it off."""
    if settings.objects != "kubernetes" or not settings.lease or not settings.status_namespace:
        return None
    from gputally.kubernetes.api_client import connect_for_election

    identity = settings.identity or f"{socket.gethostname()}-{os.getpid()}"
    connect = partial(connect_for_election, settings.kubeconfig)
    return Election(settings.lease, settings.status_namespace, identity, clock, connect)


def _extenders(
    settings: ControllerSettings,
    extenders: Collection[Extender],
    metrics: ControllerMetrics,
    tasks: BackgroundTasks,
    over: threading.Event,
) -> AbstractContextManager[str]:
    """Serve what schedulers ask. Raises CannotStart."""
    if not extenders:
        raise CannotStart("extender_listen: no installed scheduler asks the controller: leave it empty")
    host, port = address(settings.extender_listen)
    routes = {path: answer for extender in extenders for path, answer in extender.routes.items()}
    tls = _tls(settings.extender_certificate, settings.extender_key, settings.extender_client_authority, clients=True)
    return serve_extender(
        host, port, routes, answered=metrics.answered, tls=tls, tasks=tasks, hosts=settings.hosts, over=over
    )


def _tls(
    certificate: Path | None, key: Path | None, authority: Path | None = None, *, clients: bool = False
) -> Tls | None:
    """Return the TLS files of a listener; None if the settings name no certificate. clients: whether clients must
    present a certificate."""
    if certificate is None or key is None:
        return None
    return Tls(TlsFiles(certificate, key, authority, clients_required=clients))


@contextmanager
def serve_pages(
    settings: ControllerSettings,
    reports: ReportCache,
    client: AccountantApi,
    clock: Clock,
    cluster: Cluster,
    tasks: BackgroundTasks | None = None,
    record: Callable[[Decision], None] = lambda _: None,
    over: threading.Event | None = None,
) -> Iterator[str]:
    """Serve the pages until the context ends, and yield their base URL.

    tasks: background tasks to which the listener's task is added; None: it is added to none.
    record: records the decision of a person who saved a policy.
    over: as in `https_server.serve`.

    Raises CannotStart, SignInFault, and FileFault for an invalid file of tokens or callers."""
    # A controller without pages does not load the libraries for templates and for editing YAML.
    from fairshare.web.page_routing import PageContext, PagesApp
    from fairshare.web.policy_pages import ROUTES

    log = _PagesLog(settings, cluster, clock, record)
    tokens = TokenFile(settings.pages_tokens, clock, log.fault("tokens_refused")) if settings.pages_tokens else None
    sessions = _ended_sessions_store(settings, client, cluster)
    ended = EndedSessions(clock, sessions)
    sign_ins = _sign_ins(settings, clock, ended, log, needed=tokens is None)
    previews = _previews(settings)
    context = PageContext(
        reports,
        QueueHistory(client, clock),
        previews,
        PolicyLocation(settings.policy, policy_writer(settings.pages_apply, settings.policy, cluster)),
        clock,
        settings.interval,
        log.policy_applied,
        settings.pages_accountant,
    )
    app = PagesApp(context, PageAuthentication(tokens, sign_ins), ROUTES)
    templates = threading.Thread(target=app.compile_templates, name="templates", daemon=True)
    host, port = address(settings.pages_listen)
    tls = _tls(settings.pages_certificate, settings.pages_key)
    read_by_others = sign_ins is not None and sessions is not None
    with (
        closing(previews),
        run_beside("fairshare-sessions", ended.keep_reading, threading.Event(), tasks or BackgroundTasks(clock))
        if read_by_others
        else nullcontext(),
        https_server.serve(
            app.observed(log.answered), host, port, tls, LIMITS, "fairshare-pages", tasks=tasks, renew=True, over=over
        ) as url,
    ):
        templates.start()
        log.serving(url, tokens=tokens is not None, sign_in=sign_ins is not None)
        try:
            yield url
        finally:
            templates.join()


class _PagesLog:
    """Writes what happens at the pages to the log, and what concerns the cluster also as an Event or a decision.

    record: records the decision of a person who saved a policy."""

    def __init__(
        self, settings: ControllerSettings, cluster: Cluster, clock: Clock, record: Callable[[Decision], None]
    ) -> None:
        self._settings, self._cluster, self._clock, self._record = settings, cluster, clock, record
        self._events = structlog.get_logger("fairshare.pages")

    def serving(self, url: str, *, tokens: bool, sign_in: bool) -> None:
        self._events.info("pages", url=url, apply=self._settings.pages_apply, tokens=tokens, sign_in=sign_in)

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        level = "warning" if status >= 500 else "debug" if path.endswith("/state") else "info"
        milliseconds = round(seconds * 1000)
        getattr(self._events, level)("page", method=method, path=path[:200], status=status, milliseconds=milliseconds)

    def fault(self, event: str) -> Callable[[str], None]:
        """Return what logs the lines of a fault as this event."""

        def log_fault(fault: str) -> None:
            for line in fault.splitlines():
                self._events.error(event, fault=line)

        return log_fault

    def policy_applied(self, who: str, before: Policy | None, now: Policy, why: str) -> None:
        """A person saved a policy. why: the reason that they gave; "" for none."""
        settings, now_ms = self._settings, self._clock.wall_ms()
        changes = list(changed_texts(before, now))
        was, version = before.version() if before is not None else "faulty", now.version()
        said = {"by": who, "why": why, "before": was, "now": version, "changes": changes}
        self._events.warning("policy_applied", file=str(settings.policy), **said)
        self._record(policy_decision(before, now, now_ms, who, why))
        if settings.status_namespace:
            message = f"{who} applied policy {version} from the pages, in place of {was}: {'; '.join(changes)}"
            name, space = settings.status_name, settings.status_namespace
            try:
                self._cluster.event(Event(CONFIG_MAP, name, space, "", "Normal", "PolicyApplied", message, now_ms))
            except ClusterError as error:
                self._events.warning("event_lost", fault=str(error))


def _ended_sessions_store(settings: ControllerSettings, client: AccountantApi, cluster: Cluster) -> SessionStore | None:
    """Return where sessions that people ended are kept for other replicas; None: nowhere."""
    if settings.pages_accountant == "/":
        return AccountantSessions(client)
    if settings.objects == "kubernetes" and settings.status_namespace:
        return SessionConfigMap(cluster, settings.status_namespace, f"{settings.status_name}-sessions")
    return None


def _sign_ins(
    settings: ControllerSettings, clock: Clock, ended: EndedSessions, log: _PagesLog, *, needed: bool
) -> SignIns | None:
    """Return how people sign in; None if the settings name no callers. needed: whether there is no other way in.

    Raises SignInFault if there is a need and no issuer has a login."""
    if settings.pages_callers is None or settings.pages_session_key is None:
        return None
    sign_ins = SignIns(
        settings.pages_callers,
        settings.pages_session_key,
        settings.pages_public_url,
        settings.pages_session,
        clock,
        log.fault("callers_refused"),
        ended,
    )
    if needed and sign_ins() is None:
        raise SignInFault(
            f"pages_callers: {settings.pages_callers}: no issuer has a login: give one a login, or set pages_tokens"
        )
    return sign_ins


def _previews(settings: ControllerSettings) -> Previews:
    """Return the previews of policies, which a process of its own computes."""
    history_client = partial(
        AccountantApi,
        settings.url,
        token_file=settings.token_file,
        ca_file=settings.ca_file,
        cluster=settings.cluster,
        timeout_s=HISTORY_TIMEOUT_S,
    )
    return Previews(PreviewWorker(history_client, settings.pages_memory_mib))


@contextmanager
def run_beside(
    name: str, work: Work, stop: threading.Event, tasks: BackgroundTasks, *, serves: bool = False
) -> Iterator[None]:
    """Run `work` in a thread until the context ends, which sets `stop`. Work that ignores `stop` is abandoned.

    serves: whether the controller cannot act without it."""
    thread = tasks.start(name, work, stop, _failure_logger(name), serves=serves)
    try:
        yield
    finally:
        stop.set()
        thread.join(END_S)


def _failure_logger(what: str) -> Callable[[Exception], None]:
    events = structlog.get_logger("fairshare")
    return lambda error: events.error("task_failed", what=what, reason=error_summary(error), exc_info=error)
