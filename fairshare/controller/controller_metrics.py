"""Exports the latest cycle, and counts of preemptions, weight changes and extender answers, to Prometheus.

Each scrape creates the gauges from the latest report, so a removed queue has no series. Counters change once per cycle;
the durations of extender answers change with each answer.

While the controller holds the last good weights, entitlement and usage have no series, because an old figure would look
current. Shares and weights in force have one series per queue and target, because each target divides its own GPUs."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from fairshare.controller.cycle_report import CycleReport, TargetReport
from fairshare.core.queues_and_weights import UNLIMITED, Entitlement
from fairshare.preemption.claims_and_placement import unplaceable_gpus
from fairshare.preemption.eviction import STOPPED
from fairshare.preemption.preemption_cycle import obstacles
from fairshare.preemption.service_latency_objectives import Alarms
from fairshare.usage.stale_usage_hold import USAGE_FRESH
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_HOUR, MS_PER_SECOND
from gputally.base.version import __version__
from gputally.server.logs_and_metrics import TaskMetrics


def families(report: CycleReport, now_ms: int) -> Iterator[Metric]:
    """Yield the families about queues. Their order and that of their samples is fixed, so equal reports give equal
    text."""
    yield from _entitlements(report)
    yield from _weights(report)
    yield from _waiting(report, now_ms)


def _entitlements(report: CycleReport) -> Iterator[Metric]:
    figures: tuple[tuple[GaugeMetricFamily, Callable[[Entitlement], float | None]], ...] = (
        (
            GaugeMetricFamily("gputally_queue_due_gpus", "GPUs that a queue is due now.", labels=["queue", "target"]),
            lambda due: due.gpus,
        ),
        (
            GaugeMetricFamily(
                "gputally_queue_guaranteed_gpus",
                "Deserved quota of a queue; absent if it is unlimited.",
                labels=["queue", "target"],
            ),
            lambda due: None if due.guaranteed == UNLIMITED else due.guaranteed,
        ),
        (
            GaugeMetricFamily(
                "gputally_queue_allocated_gpus",
                "GPUs that a queue and its descendants hold now.",
                labels=["queue", "target"],
            ),
            lambda due: due.allocated,
        ),
        (
            GaugeMetricFamily(
                "gputally_queue_requested_gpus",
                "GPUs that a queue requests now, including those it holds.",
                labels=["queue", "target"],
            ),
            lambda due: due.requested,
        ),
        (
            GaugeMetricFamily(
                "gputally_queue_usage_ratio",
                "Share of its siblings' capacity that a queue used over the policy's window.",
                labels=["queue", "target"],
            ),
            lambda due: due.usage_ratio,
        ),
    )
    for family, value_of in figures:
        for target in report.targets:
            for entitlement in target.entitlements:
                value = value_of(entitlement)
                if value is not None:
                    family.add_metric([entitlement.queue, target.target], value)
        yield family


def _weights(report: CycleReport) -> Iterator[Metric]:
    weight = GaugeMetricFamily("gputally_queue_weight", "Over-quota weight in force.", labels=["queue", "target"])
    share = GaugeMetricFamily(
        "gputally_queue_configured_share_ratio",
        "Share of the capacity that a queue's configured weight gives it among the siblings that compete.",
        labels=["queue", "target"],
    )
    base = GaugeMetricFamily("gputally_queue_weight_base", "Over-quota weight in the policy.", labels=["queue"])
    configured: dict[str, float] = {}
    for target in report.targets:
        applied = {outcome.apply.queue for outcome in target.outcomes if outcome.result == "applied"}
        written = {each.queue: each.value for each in target.weights if each.queue in applied}
        for queue, standing in sorted(target.standings.items()):
            weight.add_metric([queue, target.target], written.get(queue, standing.weight) or 0.0)
        for each in target.weights:
            share.add_metric([each.queue, target.target], each.explanation.n)
            configured[each.queue] = each.configured
    for queue, value in sorted(configured.items()):
        base.add_metric([queue], value)
    yield from (weight, share, base)


def _waiting(report: CycleReport, now_ms: int) -> Iterator[Metric]:
    missing: dict[str, float] = {}
    workloads: dict[str, int] = {}
    since: dict[str, int] = {}
    gangs = [gang for target in report.targets for gang in target.gangs]
    for queue in (queue for target in report.targets for queue in target.standings):
        missing[queue], workloads[queue] = 0.0, 0  # a known queue without waiting workloads has a series with 0
    for gang in gangs:
        missing[gang.queue] = missing.get(gang.queue, 0.0) + gang.waits
        workloads[gang.queue] = workloads.get(gang.queue, 0) + (gang.waits > 0)
        if gang.waits > 0 and gang.created_ms is not None:
            since[gang.queue] = min(gang.created_ms, since.get(gang.queue, gang.created_ms))
    gpus = GaugeMetricFamily(
        "gputally_queue_waiting_gpus", "GPUs that waiting workloads need to start.", labels=["queue"]
    )
    count = GaugeMetricFamily("gputally_queue_waiting_workloads", "Workloads that wait to start.", labels=["queue"])
    oldest = GaugeMetricFamily(
        "gputally_queue_oldest_wait_seconds",
        "How long the first of a queue's waiting workloads has waited.",
        labels=["queue"],
    )
    for queue in sorted(missing):
        gpus.add_metric([queue], missing[queue])
        count.add_metric([queue], workloads[queue])
        oldest.add_metric([queue], max(0, now_ms - since.get(queue, now_ms)) / MS_PER_SECOND)
    unplaceable = GaugeMetricFamily("gputally_fairshare_stranded_gpus", "Free GPUs on which no waiting workload fits.")
    unplaceable.add_metric([], unplaceable_gpus(report.free_by_node, gangs))
    yield from (gpus, count, oldest, unplaceable)


_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ControllerMetrics(Collector):
    """The controller's metrics. The Controller calls `observe`, and the HTTP server calls `render`."""

    def __init__(self, clock: Clock, interval_s: float = 60.0, tasks: BackgroundTasks | None = None) -> None:
        """interval_s: the time between two cycles. tasks: background tasks whose health is exported too."""
        self._clock = clock
        self._interval_s = interval_s
        self._report: CycleReport | None = None
        self._registry = CollectorRegistry()
        self._cycles = Histogram(
            "gputally_fairshare_cycle_seconds",
            "Duration of one cycle of the controller.",
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self._extender = Histogram(
            "gputally_fairshare_extender_seconds",
            "Time to answer a request of the kube-scheduler; late: after the extender's deadline.",
            ["verb", "result"],
            registry=self._registry,
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 1.0),
        )
        self._preempted = Counter(
            "gputally_fairshare_preempted",
            "Preempted workloads, or parts of them, by queue, ground and result.",
            ["target", "queue", "ground", "result"],
            registry=self._registry,
        )
        self._lost = Counter(
            "gputally_fairshare_lost_gpu_seconds",
            "GPU-seconds of work that preempted workloads lost since their last checkpoint.",
            ["target", "queue"],
            registry=self._registry,
        )
        self._moves = Counter(
            "gputally_fairshare_weight_moves",
            "Changes of a queue's weight by direction; turned: the change reversed the previous one.",
            ["queue", "target", "direction"],
            registry=self._registry,
        )
        self._alarms: Alarms | None = None
        self._leading: Callable[[], bool] = lambda: True
        self._registry.register(self)
        if tasks is not None:
            self._registry.register(TaskMetrics(tasks))

    def watch(self, alarms: Alarms | None, leading: Callable[[], bool] = lambda: True) -> None:
        """Export the latencies that `alarms` watches from now on.

        leading: returns whether this replica holds the Lease, at the time of the scrape."""
        self._alarms = alarms
        self._leading = leading

    def observe(self, report: CycleReport) -> None:
        """Store the latest report, and count its preemptions and weight changes."""
        self._report = report
        self._cycles.observe(report.duration_ms / MS_PER_SECOND)
        for target in report.targets:
            self._count_weight_moves(target)
            for stop in target.preemption.stops if target.preemption is not None else ():
                queue = stop.victim.gang.queue
                if stop.effect.result != "would-stop":
                    self._preempted.labels(target.target, queue, stop.victim.ground, stop.effect.result).inc()
                if stop.effect.result in STOPPED:
                    self._lost.labels(target.target, queue).inc(
                        stop.victim.lost_gpu_hours * MS_PER_HOUR / MS_PER_SECOND
                    )

    def _count_weight_moves(self, target: TargetReport) -> None:
        applied = {outcome.apply.queue for outcome in target.outcomes if outcome.result == "applied"}
        for weight in target.weights:
            if weight.queue not in applied or weight.previous is None or weight.value == weight.previous:
                continue
            up = weight.value > weight.previous
            self._moves.labels(weight.queue, target.target, "up" if up else "down").inc()
            before = target.standings[weight.queue].direction
            self._moves.labels(weight.queue, target.target, "turned").inc(before == (-1 if up else 1))

    def answered(self, verb: str, seconds: float, result: str) -> None:
        """Record the duration of one answer to the kube-scheduler."""
        self._extender.labels(verb, result).observe(seconds)

    def render(self) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("gputally_fairshare_build", "Version of the controller.", {"version": __version__})
        yield GaugeMetricFamily(
            "gputally_fairshare_cycle_interval_seconds",
            "Time from one cycle of the controller to the next.",
            value=self._interval_s,
        )
        report = self._report
        if report is None:
            return
        yield from families(report, self._clock.wall_ms())
        yield from _degraded(report)
        yield GaugeMetricFamily(
            "gputally_fairshare_last_cycle_timestamp_seconds",
            "When the controller last began a cycle (Unix time).",
            value=report.at_ms / MS_PER_SECOND,
        )
        yield GaugeMetricFamily(
            "gputally_fairshare_leader",
            "1 on the replica that acts, 0 on the others.",
            value=1.0 if report.leading and self._leading() else 0.0,
        )
        yield _writes(report)
        yield from _preemption(report)
        if self._alarms is not None:
            yield from _objectives(self._alarms)
        held = GaugeMetricFamily("gputally_weights_held", "1 while the last good weights are held.", labels=["reason"])
        if report.hold is not None:
            held.add_metric([report.hold.reason], 1)
        yield held
        if report.window is not None and report.window.watermark_ms is not None:
            age = max(0, self._clock.wall_ms() - report.window.watermark_ms) / MS_PER_SECOND
            yield GaugeMetricFamily(
                "gputally_fairshare_usage_age_seconds", "Age of the usage of the last cycle.", value=age
            )


def _degraded(report: CycleReport) -> Iterator[Metric]:
    degraded = GaugeMetricFamily(
        "gputally_fairshare_target_degraded", "1 while the controller cannot use a target.", labels=["target", "reason"]
    )
    for target in report.targets:
        for reason in target.degraded:
            degraded.add_metric([target.target, reason], 1)
    yield degraded
    own = GaugeMetricFamily(
        "gputally_fairshare_controller_degraded",
        "1 while the policy file is refused, or decisions or state cannot be stored.",
        labels=["reason"],
    )
    for condition in report.conditions:
        if condition.status == "False" and condition.type != USAGE_FRESH:
            own.add_metric([condition.reason], 1)
    yield own


def _writes(report: CycleReport) -> Metric:
    writes = GaugeMetricFamily(
        "gputally_fairshare_writes", "Writes of the last cycle, by result.", labels=["target", "result"]
    )
    for target in report.targets:
        for result, count in sorted(collections.Counter(outcome.result for outcome in target.outcomes).items()):
            writes.add_metric([target.target, result], count)
    return writes


def _preemption(report: CycleReport) -> Iterator[Metric]:
    claims = GaugeMetricFamily(
        "gputally_fairshare_preemption_claims",
        "Workloads for which the last cycle looked for GPUs, by outcome.",
        labels=["target", "outcome"],
    )
    blocked = GaugeMetricFamily(
        "gputally_fairshare_preemption_blocked",
        "Workloads that could not be preempted in the last cycle, by reason.",
        labels=["target", "reason"],
    )
    idle = GaugeMetricFamily(
        "gputally_fairshare_idle_warned_pods", "Pods whose owners were warned that they are idle.", labels=["target"]
    )
    for target in report.targets:
        if target.preemption is None:
            continue
        for outcome, count in sorted(collections.Counter(each.outcome for each in target.preemption.verdicts).items()):
            claims.add_metric([target.target, outcome], count)
        for reason, texts in obstacles(target.preemption).items():
            blocked.add_metric([target.target, reason], len(texts))
        idle.add_metric([target.target], target.preemption.warned)
    yield from (claims, blocked, idle)


def _objectives(alarms: Alarms) -> Iterator[Metric]:
    read = GaugeMetricFamily("gputally_slo_latency_seconds", "Latest latency that was read for an SLO.", labels=["slo"])
    for name, value in sorted(alarms.readings.items()):
        read.add_metric([name], value)
    unread = GaugeMetricFamily(
        "gputally_slo_unreadable", "1 while the latency of an SLO cannot be read.", labels=["slo"]
    )
    for name in sorted(alarms.faults):
        unread.add_metric([name], 1)
    yield from (read, unread)
