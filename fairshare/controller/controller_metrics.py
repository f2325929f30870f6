"""Exports the latest cycle to Prometheus.

Gauges are drawn from the report when scraped, so that a queue that is gone has no series. Counters move once
per cycle. What concerns queues is in fairshare.controller.controller_metrics.

Entitlement and usage are left out while a hold is on: an old figure shown as new would lie. A queue stands in
one series per target, for a target has GPUs of its own to divide.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from math import fsum

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from fairshare.controller.cycle_report import CycleReport, TargetReport
from fairshare.core.model import UNLIMITED, Entitlement, Gang
from fairshare.preemption.eviction import STOPPED
from fairshare.preemption.latency_objectives import Alarms
from fairshare.preemption.preemption_claims import unplaceable_gpus
from fairshare.preemption.target_preemption import troubles
from fairshare.usage.stale_usage_hold import USAGE_FRESH
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_HOUR, MS_PER_SECOND
from gputally.server.logs_and_metrics import TaskMetrics


def families(report: CycleReport, now_ms: int) -> Iterator[Metric]:
    """Sorted by target and queue, so that equal reports give equal text."""
    yield from _due(report)
    yield from _weights(report)
    yield from _waiting(report, now_ms)


def _gauge(
    name: str, text: str, labels: Sequence[str] = (), rows: Iterable[tuple[Sequence[str], float]] = ()
) -> Metric:
    """rows: values of the labels, and the value."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


_QUEUE = ("queue",)
_AT_TARGET = ("queue", "target")
_DUE: tuple[tuple[str, str, Callable[[Entitlement], float]], ...] = (
    ("gputally_queue_entitled_gpus", "GPUs a queue is due now.", lambda due: due.gpus),
    (
        "gputally_queue_guaranteed_gpus",
        "Deserved quota of a queue; absent where it is unlimited.",
        lambda due: due.guaranteed,
    ),
    (
        "gputally_queue_allocated_gpus",
        "GPUs a queue holds now, its descendants' included.",
        lambda due: due.allocated,
    ),
    (
        "gputally_queue_requested_gpus",
        "GPUs a queue asks for now, those it holds included.",
        lambda due: due.requested,
    ),
    (
        "gputally_queue_usage_ratio",
        "Share of its siblings' capacity that a queue used over the policy's window.",
        lambda due: due.usage_ratio,
    ),
)


def _due(report: CycleReport) -> Iterator[Metric]:
    for name, text, figure in _DUE:
        yield _gauge(
            name,
            text,
            _AT_TARGET,
            [
                ((due.queue, target.target), figure(due))
                for target in report.targets
                for due in target.entitlements
                if name != "gputally_queue_guaranteed_gpus" or due.guaranteed != UNLIMITED
            ],
        )


def _weights(report: CycleReport) -> Iterator[Metric]:
    weights: list[tuple[Sequence[str], float]] = []
    shares: list[tuple[Sequence[str], float]] = []
    bases: dict[str, float] = {}
    for target in report.targets:
        applied = {outcome.apply.queue for outcome in target.outcomes if outcome.result == "applied"}
        written = {each.queue: each.value for each in target.weights if each.queue in applied}
        for queue, standing in sorted(target.standings.items()):
            weights.append(((queue, target.target), written.get(queue, standing.weight) or 0.0))
        for each in target.weights:
            shares.append(((each.queue, target.target), each.explanation.n))
            bases[each.queue] = each.configured
    yield _gauge("gputally_queue_weight", "Over-quota weight in force.", _AT_TARGET, weights)
    text = "Share of its siblings' capacity that a queue's configured weight stands for, among those who compete."
    yield _gauge("gputally_queue_configured_share_ratio", text, _AT_TARGET, shares)
    rows = [((queue,), configured) for queue, configured in sorted(bases.items())]
    yield _gauge("gputally_queue_weight_base", "Over-quota weight of the policy.", _QUEUE, rows)


def _waiting(report: CycleReport, now_ms: int) -> Iterator[Metric]:
    gangs = [gang for target in report.targets for gang in target.gangs]
    queues = {queue for target in report.targets for queue in target.standings} | {gang.queue for gang in gangs}
    of: dict[str, list[Gang]] = {queue: [] for queue in sorted(queues)}
    for gang in gangs:
        of[gang.queue].append(gang)
    lacking = [((queue,), fsum(gang.waits for gang in some)) for queue, some in of.items()]
    yield _gauge("gputally_queue_waiting_gpus", "GPUs that waiting workloads need to start.", _QUEUE, lacking)
    counts = [((queue,), sum(gang.waits > 0 for gang in some)) for queue, some in of.items()]
    yield _gauge("gputally_queue_waiting_workloads", "Workloads that wait to start.", _QUEUE, counts)
    oldest = []
    for queue, some in of.items():
        created = [gang.created_ms for gang in some if gang.waits > 0 and gang.created_ms is not None]
        oldest.append(((queue,), max(0, now_ms - min(created, default=now_ms)) / MS_PER_SECOND))
    text = "How long the first of a queue's waiting workloads has waited."
    yield _gauge("gputally_queue_oldest_wait_seconds", text, _QUEUE, oldest)
    text = "GPUs that are free while nothing that waits fits on them."
    yield _gauge("gputally_fairshare_stranded_gpus", text, rows=[((), unplaceable_gpus(report.free_by_node, gangs))])


_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics(Collector):
    """Hand `observe` to the Controller and `render` to the server. interval_s: from one pass to the next."""

    def __init__(self, clock: Clock, interval_s: float = 60.0, tasks: BackgroundTasks | None = None) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._report: CycleReport | None = None
        self._registry = CollectorRegistry()
        self._cycles = Histogram(
            "gputally_fairshare_cycle_seconds",
            "Duration of one pass of the controller",
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self._extender = Histogram(
            "gputally_fairshare_extender_seconds",
            "Time to answer a question of the kube-scheduler; late: past our own deadline",
            ["verb", "result"],
            registry=self._registry,
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 1.0),
        )
        self._preempted = Counter(
            "gputally_fairshare_preempted",
            "Workloads that gave way, or parts of them, by whose they were and why",
            ["target", "queue", "ground", "result"],
            registry=self._registry,
        )
        self._lost = Counter(
            "gputally_fairshare_lost_gpu_seconds",
            "Work lost with them since their last checkpoint, GPU-seconds",
            ["target", "queue"],
            registry=self._registry,
        )
        self._moves = Counter(
            "gputally_fairshare_weight_moves",
            "Changes of a queue's weight by direction; turned: it went the other way than the time before.",
            ["queue", "target", "direction"],
            registry=self._registry,
        )
        self._alarms: Alarms | None = None
        self._leading: Callable[[], bool] = lambda: True
        self._registry.register(self)
        if tasks is not None:
            self._registry.register(TaskMetrics(tasks))

    def watch(self, alarms: Alarms | None, leading: Callable[[], bool] = lambda: True) -> None:
        """Show these latencies too. leading: whether this replica may act at the moment it is asked, however long its
        last cycle takes."""
        self._alarms = alarms
        self._leading = leading

    def observe(self, report: CycleReport) -> None:
        """Take the latest report."""
        self._report = report
        self._cycles.observe(report.duration_ms / MS_PER_SECOND)
        for target in report.targets:
            self._moved(target)
            for stop in target.preemption.stops if target.preemption is not None else ():
                queue = stop.victim.gang.queue
                if stop.effect.result != "would-stop":
                    self._preempted.labels(target.target, queue, stop.victim.ground, stop.effect.result).inc()
                if stop.effect.result in STOPPED:
                    self._lost.labels(target.target, queue).inc(
                        stop.victim.lost_gpu_hours * MS_PER_HOUR / MS_PER_SECOND
                    )

    def _moved(self, target: TargetReport) -> None:
        applied = {outcome.apply.queue for outcome in target.outcomes if outcome.result == "applied"}
        for weight in target.weights:
            if weight.queue not in applied or weight.previous is None or weight.value == weight.previous:
                continue
            up = weight.value > weight.previous
            self._moves.labels(weight.queue, target.target, "up" if up else "down").inc()
            before = target.standings[weight.queue].direction
            self._moves.labels(weight.queue, target.target, "turned").inc(before == (-1 if up else 1))

    def answered(self, verb: str, seconds: float, result: str) -> None:
        """One question of the kube-scheduler."""
        self._extender.labels(verb, result).observe(seconds)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            "gputally_fairshare_build", "Version of the controller", {"version": version("gputally")}
        )
        text = "Time from one pass of the controller to the next."
        yield _gauge("gputally_fairshare_cycle_interval_seconds", text, rows=[((), self._interval_s)])
        report = self._report
        if report is None:
            return
        yield from families(report, self._clock.wall_ms())
        yield from _degraded(report)
        text = "When the controller last began a pass (Unix time)."
        began = report.at_ms / MS_PER_SECOND
        yield _gauge("gputally_fairshare_last_cycle_timestamp_seconds", text, rows=[((), began)])
        leads = 1.0 if report.leading and self._leading() else 0.0
        yield _gauge("gputally_fairshare_leader", "1 on the replica that acts", rows=[((), leads)])
        writes = [
            ((target.target, result), count)
            for target in report.targets
            for result, count in sorted(collections.Counter(outcome.result for outcome in target.outcomes).items())
        ]
        yield _gauge("gputally_fairshare_writes", "Writes of the last cycle", ("target", "result"), writes)
        yield from _preemption(report)
        if self._alarms is not None:
            yield from _objectives(self._alarms)
        held = [((report.hold.reason,), 1)] if report.hold is not None else []
        yield _gauge("gputally_weights_held", "1 while the last good weights are held", ("reason",), held)
        if report.window is not None and report.window.watermark_ms is not None:
            age = max(0, self._clock.wall_ms() - report.window.watermark_ms) / MS_PER_SECOND
            yield _gauge("gputally_fairshare_usage_age_seconds", "Age of the usage decided on", rows=[((), age)])


def _degraded(report: CycleReport) -> Iterator[Metric]:
    rows = [((target.target, reason), 1) for target in report.targets for reason in target.degraded]
    text = "1 while a target fails us."
    yield _gauge("gputally_fairshare_target_degraded", text, ("target", "reason"), rows)
    own = [
        ((condition.reason,), 1)
        for condition in report.conditions
        if condition.status == "False" and condition.type != USAGE_FRESH
    ]
    text = "1 while the controller's policy file is refused, or what it decides cannot be kept."
    yield _gauge("gputally_fairshare_controller_degraded", text, ("reason",), own)


def _preemption(report: CycleReport) -> Iterator[Metric]:
    claims: list[tuple[Sequence[str], float]] = []
    blocked: list[tuple[Sequence[str], float]] = []
    idle: list[tuple[Sequence[str], float]] = []
    for target in report.targets:
        if target.preemption is None:
            continue
        outcomes = collections.Counter(each.outcome for each in target.preemption.verdicts)
        claims += [((target.target, outcome), count) for outcome, count in sorted(outcomes.items())]
        found = troubles(target.preemption)
        blocked += [((target.target, reason), len(texts)) for reason, texts in found.items()]
        idle.append(((target.target,), target.preemption.warned))
    text = "Claims of the last cycle by outcome"
    yield _gauge("gputally_fairshare_preemption_claims", text, ("target", "outcome"), claims)
    text = "Workloads that could not give way in the last cycle, by what kept them"
    yield _gauge("gputally_fairshare_preemption_blocked", text, ("target", "reason"), blocked)
    text = "Pods whose owners were warned that they are idle"
    yield _gauge("gputally_fairshare_idle_warned_pods", text, ("target",), idle)


def _objectives(alarms: Alarms) -> Iterator[Metric]:
    readings = [((name,), value) for name, value in sorted(alarms.readings.items())]
    yield _gauge("gputally_slo_latency_seconds", "Latency of an SLO as last read", ("slo",), readings)
    unread = [((name,), 1) for name in sorted(alarms.faults)]
    yield _gauge("gputally_slo_unreadable", "1 while an SLO cannot be read", ("slo",), unread)
