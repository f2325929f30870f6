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
from collections.abc import Callable, Collection, Iterator, Sequence
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
from fairshare.preemption.preemption_controller import no_calls
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
    events = structlog.get_logger("fairshare")
    clock = SystemClock()
    tasks = BackgroundTasks(clock, (FairshareError, FileFault))
    cycles = tasks.add("cycle", CYCLE_PATIENCE_S, serves=True)
    metrics = ControllerMetrics(clock, settings.interval, tasks)
    others = other_clusters(settings.accountants, settings.cluster)
    file = policies.reloaded(settings.policy, others)
    report_log = event_and_decision_recorder.CycleLog(events)
    cluster = open_cluster(settings.objects, settings.kubeconfig)
    pods = PodIndex()
    claimed = ClaimedPods(pods.change)
    claims: tuple[Reflector[Any, Any], ...] = ()
    read, changed = read_member, pods.change
    if settings.watch_pods and settings.extender_listen:  # other schedulers count the devices of claims themselves
        claims = claimed.reflectors(cluster.api(), clock.monotonic_ms)
        read, changed = read_claiming, claimed.pod_changed
    reflector: Reflector[dict[str, Any], Pod] = Reflector(
        cluster.api(), POD.path(), dict, PodReducer(clock, read), changed, now_ms=clock.monotonic_ms
    )
    views = ExtenderViews(pods, clock)
    reports = ReportCache()
    collections = ShortCollections()
    saved: deque[Decision] = deque(maxlen=MOST_SAVED)
    election = _election(settings, clock)
    leaderless = election.leaderless if election is not None else lambda: None
    health = Probes(clock, settings.interval, tasks, leaderless)
    over = threading.Event()
    """Set after the last cycle, so that the ports stop at one time."""

    def posts() -> Sequence[Decision]:
        return [saved.popleft() for _ in range(len(saved))]

    def observe(report: CycleReport) -> None:
        metrics.observe(report)
        views.observe(report, controller.policy)
        reports.observe(report, controller.policy)
        health.beat()
        collections.after_cycle()
        report_log.log(report)
        if election is not None and election.fault:
            events.warning("election", fault=election.fault)

    with ExitStack() as stack:
        client = stack.enter_context(
            AccountantApi(
                settings.url,
                token_file=settings.token_file,
                ca_file=settings.ca_file,
                cluster=settings.cluster,
                clock=clock,
            )
        )
        url = stack.enter_context(
            serve(
                settings.host,
                settings.port,
                live=health.live,
                ready=health.ready,
                metrics=metrics.render,
                tasks=tasks,
                hosts=settings.hosts,
                over=over,
            )
        )
        if settings.watch_pods:
            for each in (*claims, reflector):
                each.prime()
            stack.enter_context(run_beside("fairshare-pods", reflector.run, stop, tasks, serves=True))
            for each in claims:
                stack.enter_context(run_beside(f"fairshare-{each.path.rpartition('/')[2]}", each.run, stop, tasks))
        if election is not None:
            stack.enter_context(run_beside("fairshare-lease", election.run, stop, tasks, serves=True))
        extenders: dict[str, Extender] = {}
        if settings.extender_listen:
            extenders = {
                each.name: each.extender(views.view, clock, with_claims=claimed.with_claims)
                for each in adapters()
                if each.extender is not None
            }
            sys.setswitchinterval(THREAD_SWITCH_S)
            stack.enter_context(_extenders(settings, extenders.values(), metrics, tasks, over))
        if settings.pages_listen:
            stack.enter_context(serve_pages(settings, reports, client, clock, cluster, tasks, saved.append, over))
        alarms: Alarms | None = None
        if settings.prometheus:
            alarms = Alarms(prometheus_latency(settings.prometheus, settings.prometheus_token_file))
        term = election.term if election is not None else lambda: ALONE
        metrics.watch(alarms, lambda: term() is not None)
        status = StatusObject(settings.status_namespace or StatusObject().namespace, settings.status_name)
        clusters = stack.enter_context(opened(file.current, cluster, settings.file, status, clock))
        controller = Controller(
            in_mode(file.current, settings),
            client,
            cluster,
            clock,
            clusters=clusters,
            status_object=status if settings.status_namespace else None,
            observe=observe,
            pods=pods.pods,
            unseen=reflector.behind if settings.watch_pods else lambda: None,
            unreadable=lambda: _unreadable(reflector, *claims),
            term=term,
            acts={name: extender.acts for name, extender in extenders.items()},
            calls=alarms or no_calls,
            others=others,
            name=f"{settings.status_namespace}/{settings.lease}" if election is not None else "",
            posts=posts,
            claims_counted=bool(claims),
        )
        events.info("serving", url=url, accountant=settings.url, policy=str(settings.policy))
        stack.callback(over.set)
        stack.enter_context(_ending_calls(stop))
        controller.run(
            stop,
            lambda: cycles.guarded(_failure_logger("cycle")),
            interval_s=settings.interval,
            reload=partial(reload, file, settings),
        )
    events.info("stopping")


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


def _unreadable(pods: Reflector[Any, Any], *claims: Reflector[Any, Any]) -> tuple[str, ...]:
    """Return the pods and claims that cannot be read, and why claims cannot be listed."""
    faults = [each.fault for each in claims if each.fault is not None]
    return (*(text for each in (pods, *claims) for text in each.unreadable().values()), *faults)


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

    events = structlog.get_logger("fairshare.pages")

    def fault_logger(event: str) -> Callable[[str], None]:
        def log_fault(fault: str) -> None:
            for line in fault.splitlines():
                events.error(event, fault=line)

        return log_fault

    def applied(who: str, before: Policy | None, now: Policy) -> None:
        changes = list(changed_texts(before, now))
        was, version = before.version() if before is not None else "faulty", now.version()
        events.warning("policy_applied", by=who, before=was, now=version, file=str(settings.policy), changes=changes)
        record(policy_decision(before, now, clock.wall_ms(), who))
        if settings.status_namespace:
            message = f"{who} applied policy {version} from the pages, in place of {was}: {'; '.join(changes)}"
            name, space = settings.status_name, settings.status_namespace
            try:
                cluster.event(Event(CONFIG_MAP, name, space, "", "Normal", "PolicyApplied", message, clock.wall_ms()))
            except ClusterError as error:
                events.warning("event_lost", fault=str(error))

    def answered(method: str, path: str, status: int, seconds: float) -> None:
        level = "warning" if status >= 500 else "debug" if path.endswith("/state") else "info"
        milliseconds = round(seconds * 1000)
        getattr(events, level)("page", method=method, path=path[:200], status=status, milliseconds=milliseconds)

    tokens: TokenFile | None = None
    if settings.pages_tokens is not None:
        tokens = TokenFile(settings.pages_tokens, clock, fault_logger("tokens_refused"))
    sign_ins: SignIns | None = None
    sessions: SessionStore | None = None
    if settings.pages_accountant == "/":
        sessions = AccountantSessions(client)
    elif settings.objects == "kubernetes" and settings.status_namespace:
        sessions = SessionConfigMap(cluster, settings.status_namespace, f"{settings.status_name}-sessions")
    ended = EndedSessions(clock, sessions)
    if settings.pages_callers is not None and settings.pages_session_key is not None:
        sign_ins = SignIns(
            settings.pages_callers,
            settings.pages_session_key,
            settings.pages_public_url,
            settings.pages_session,
            clock,
            fault_logger("callers_refused"),
            ended,
        )
        if tokens is None and sign_ins() is None:
            raise SignInFault(
                f"pages_callers: {settings.pages_callers}: no issuer has a login: give one a login, or set pages_tokens"
            )
    history_client = partial(
        AccountantApi,
        settings.url,
        token_file=settings.token_file,
        ca_file=settings.ca_file,
        cluster=settings.cluster,
        timeout_s=HISTORY_TIMEOUT_S,
    )
    previews = Previews(PreviewWorker(history_client, settings.pages_memory_mib))
    context = PageContext(
        reports,
        QueueHistory(client, clock),
        previews,
        PolicyLocation(settings.policy, policy_writer(settings.pages_apply, settings.policy, cluster)),
        clock,
        settings.interval,
        applied,
        settings.pages_accountant,
    )
    host, port = address(settings.pages_listen)
    tls = _tls(settings.pages_certificate, settings.pages_key)
    app = PagesApp(context, PageAuthentication(tokens, sign_ins), ROUTES)
    templates = threading.Thread(target=app.compile_templates, name="templates", daemon=True)
    read_by_others = sign_ins is not None and sessions is not None
    with (
        closing(previews),
        run_beside("fairshare-sessions", ended.keep_reading, threading.Event(), tasks or BackgroundTasks(clock))
        if read_by_others
        else nullcontext(),
        https_server.serve(
            app.observed(answered), host, port, tls, LIMITS, "fairshare-pages", tasks=tasks, renew=True, over=over
        ) as url,
    ):
        templates.start()
        events.info(
            "pages", url=url, apply=settings.pages_apply, tokens=tokens is not None, sign_in=sign_ins is not None
        )
        try:
            yield url
        finally:
            templates.join()


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
