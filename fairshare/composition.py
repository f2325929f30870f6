"""Builds one running controller from its settings: cycles, election, probes, metrics, extender, pages.

Cycles run in the calling thread. Other threads follow the pods, take part in the election if there are replicas, and
serve /metrics, the probes and the extender. SIGTERM sets `stop`: the current cycle ends, the Lease is released, the
servers close."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import structlog

from accountant.wire.policy_models import Policy
from fairshare.controller import cycle_recorder
from fairshare.controller import policy_file as policies
from fairshare.controller.control_loop import Controller
from fairshare.controller.controller_metrics import Metrics
from fairshare.controller.cycle_report import CycleReport
from fairshare.controller.kube_scheduler_extender import Extender, ExtenderViews
from fairshare.core.pods import BoundPods
from fairshare.core.queues_and_weights import Pod
from fairshare.core.settings import Settings, address
from fairshare.http_server import Health, serve, serve_extender
from fairshare.preemption.preemption_cycle import no_calls
from fairshare.preemption.service_latency_objectives import Alarms, prometheus_latency
from fairshare.targets import KINDS
from fairshare.targets.kube_scheduler import NAME as KUBE_SCHEDULER
from fairshare.targets.runai import opened
from fairshare.targets.status_config_map import StatusObject
from fairshare.usage.accountant_client import AccountantApi, other_clusters
from fairshare.web.app import pages
from fairshare.web.queue_history import ReportCache
from gputally.base.background_tasks import BackgroundTask, BackgroundTasks, Work, error_summary
from gputally.base.clock import Clock, SystemClock
from gputally.base.errors import FairshareError
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.list_watch import Reflector
from gputally.kubernetes.memory_cluster import MemoryCluster, load_objects
from gputally.kubernetes.objects import POD, Cluster
from gputally.server.https_server import Identity, Tls

END_S = 5.0
"""How long threads may take to end before the process exits without them."""
CYCLE_PATIENCE_S = 50.0
"""Pause before a thread that ended or failed starts again."""


class LeaderStatus(Protocol):
    """Knows whether this replica leads."""

    @property
    def fault(self) -> str: ...

    def leading(self) -> bool: ...

    def run(self, stop: threading.Event, task: BackgroundTask) -> None: ...


def run(settings: Settings, stop: threading.Event) -> None:
    """Publish weights until `stop` is set."""
    events = structlog.get_logger("fairshare")
    clock = SystemClock()
    tasks = BackgroundTasks(clock, (FairshareError, FileFault))
    cycles = tasks.add("cycle", CYCLE_PATIENCE_S)
    metrics = Metrics(clock, settings.interval, tasks)
    others = other_clusters(settings.accountants, settings.cluster_name)
    file = policies.PolicyFile(settings.policy, others)
    health = Health(clock, settings.interval, tasks)
    told = cycle_recorder.CycleLog(events)
    cluster = open_cluster(settings.cluster, settings.kubeconfig)
    watched: Reflector[dict[str, Any], Pod] = Reflector(
        cluster.api(), POD.path(), dict, BoundPods(clock), now_ms=clock.monotonic_ms
    )

    def pods() -> tuple[Pod, ...]:
        return tuple(sorted(watched.values().values(), key=attrgetter("namespace", "name")))

    view = ExtenderViews(pods, clock)
    scene = ReportCache()
    election = _election(settings, clock)

    def wanted(policy: Policy) -> Policy:
        return policies.only_try(policy) if settings.dry_run else policy

    def reload() -> Policy | None:
        try:
            policy = file.changed()
        except FileFault as fault:
            for line in fault.faults:
                events.error("policy_refused", fault=line)
            raise
        return wanted(policy) if policy is not None else None

    def observe(report: CycleReport) -> None:
        metrics.observe(report)
        view.observe(report, controller.policy)
        scene.observe(report, controller.policy)
        health.beat()
        told.tell(report)
        if election is not None and election.fault:
            events.warning("election", fault=election.fault)

    with ExitStack() as open_:
        client = open_.enter_context(
            AccountantApi(
                settings.accountant,
                token_file=settings.token_file,
                ca_file=settings.ca_file,
                cluster=settings.cluster_name,
            )
        )
        url = open_.enter_context(
            serve(
                settings.host, settings.port, live=health.live, ready=health.ready, metrics=metrics.render, tasks=tasks
            )
        )
        if settings.watch_pods:
            watched.prime()
            open_.enter_context(run_beside("fairshare-pods", watched.run, stop, tasks))
        if election is not None:
            open_.enter_context(run_beside("fairshare-lease", election.run, stop, tasks))
        extender = Extender(view.room, clock) if settings.extender_listen else None
        if extender is not None:
            open_.enter_context(_extender(settings, extender, metrics, tasks))
        if settings.pages_listen:
            open_.enter_context(pages(settings, scene, client, clock, cluster, tasks))
        alarms: Alarms | None = None
        if settings.prometheus:
            alarms = Alarms(prometheus_latency(settings.prometheus, settings.prometheus_token_file))
        leading = election.leading if election is not None else lambda: True
        metrics.watch(alarms, leading)
        where = StatusObject(settings.status_namespace or StatusObject().namespace, settings.status_name)
        elsewhere = open_.enter_context(
            opened(file.policy, cluster, settings.runai_credentials, settings.runai_ca_file, where, clock)
        )
        controller = Controller(
            wanted(file.policy),
            client,
            cluster,
            clock,
            clusters=elsewhere,
            status_object=where if settings.status_namespace else None,
            interval_s=settings.interval,
            reload=reload,
            observe=observe,
            pods=pods,
            unseen=watched.behind if settings.watch_pods else lambda: None,
            leading=leading,
            acts={KUBE_SCHEDULER: extender.acts} if extender is not None else {},
            calls=alarms or no_calls,
            others=others,
        )
        events.info("serving", url=url, accountant=settings.accountant, policy=str(settings.policy))
        controller.run(stop, lambda: cycles.guarded(_teller("cycle")))
    events.info("stopping")


def open_cluster(name: str, kubeconfig: Path | None) -> Cluster:
    """Open the API server, or the objects of a file. Raises Unavailable or FileFault."""
    if name != "kubernetes":
        return MemoryCluster(KINDS, load_objects(Path(name), KINDS))
    from gputally.kubernetes.api_client import (
        KubernetesCluster,
    )  # takes half a second and 60 MiB, which `divide` does not need

    return KubernetesCluster.connect(KINDS, kubeconfig)


def _election(settings: Settings, clock: Clock) -> LeaderStatus | None:
    """Return the leader election; None without a cluster or if it is switched off."""
    if settings.cluster != "kubernetes" or not settings.lease or not settings.status_namespace:
        return None
    from gputally.kubernetes.leader_election import Election  # the asynchronous client takes another half a second

    identity = settings.identity or f"{socket.gethostname()}-{os.getpid()}"
    return Election(settings.lease, settings.status_namespace, identity, clock, kubeconfig=settings.kubeconfig)


def _extender(
    settings: Settings, extender: Extender, metrics: Metrics, tasks: BackgroundTasks
) -> AbstractContextManager[str]:
    host, port = address(settings.extender_listen)
    tls = None
    if settings.extender_certificate is not None and settings.extender_key is not None:
        authority = settings.extender_client_authority
        tls = Tls(Identity(settings.extender_certificate, settings.extender_key, authority, clients_required=True))
    return serve_extender(host, port, extender, told=metrics.answered, tls=tls, tasks=tasks)


@contextmanager
def run_beside(
    name: str,
    work: Work,
    stop: threading.Event,
    tasks: BackgroundTasks,
) -> Iterator[None]:
    """Run `work` in a thread until the context ends. It must check `stop`; a request that hangs is abandoned."""
    thread = tasks.start(name, work, stop, _teller(name))
    try:
        yield
    finally:
        stop.set()
        thread.join(END_S)


def _teller(what: str) -> Callable[[Exception], None]:
    events = structlog.get_logger("fairshare")
    return lambda error: events.error("task_failed", what=what, reason=error_summary(error), exc_info=error)
