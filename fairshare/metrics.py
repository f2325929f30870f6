"""The controller's Prometheus view: always of the latest report, in a registry of its own.

Gauges are drawn from the report when scraped, so that a queue that is gone has no series. Entitlement
and usage are left out while a hold is on: an old figure shown as new would lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from agent.clock import Clock
from agent.units import MS_PER_SECOND
from fairshare.effectors import STOPPED
from fairshare.latency import Alarms
from fairshare.report import CycleReport

_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics(Collector):
    """Hand `observe` to the Controller and `render` to the server."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
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
            "gputally_fairshare_lost_gpu_hours",
            "Work lost with them since their last checkpoint, GPU-hours",
            ["target", "queue"],
            registry=self._registry,
        )
        self._alarms: Alarms | None = None
        self._registry.register(self)

    def watch(self, alarms: Alarms | None) -> None:
        """Show these latencies too."""
        self._alarms = alarms

    def observe(self, report: CycleReport) -> None:
        """Take the latest report."""
        self._report = report
        self._cycles.observe(report.duration_ms / MS_PER_SECOND)
        for target in report.targets:
            for stop in target.preemption.stops if target.preemption is not None else ():
                queue = stop.victim.gang.queue
                if stop.effect.result != "would-stop":
                    self._preempted.labels(target.target, queue, stop.victim.ground, stop.effect.result).inc()
                if stop.effect.result in STOPPED:
                    self._lost.labels(target.target, queue).inc(stop.victim.lost_gpu_hours)

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
        report = self._report
        if report is None:
            return
        entitled = GaugeMetricFamily("gputally_queue_entitled_gpus", "GPUs a queue is due now", labels=["queue"])
        ratio = GaugeMetricFamily("gputally_queue_usage_ratio", "Usage over what it is measured by", labels=["queue"])
        weight = GaugeMetricFamily("gputally_queue_weight", "Over-quota weight in force", labels=["queue", "target"])
        base = GaugeMetricFamily("gputally_queue_weight_base", "Over-quota weight of the policy", labels=["queue"])
        degraded = GaugeMetricFamily(
            "gputally_fairshare_target_degraded",
            "1 while a target fails us",
            labels=["target", "reason"],
        )
        bases: dict[str, float] = {}
        for target in report.targets:
            for due in target.entitlements:
                entitled.add_metric([due.queue], due.gpus)
                ratio.add_metric([due.queue], due.usage_ratio)
            applied = {outcome.apply.queue for outcome in target.outcomes if outcome.result == "applied"}
            written = {each.queue: each.value for each in target.weights if each.queue in applied}
            for queue, standing in sorted(target.standings.items()):
                weight.add_metric([queue, target.target], written.get(queue, standing.weight) or 0.0)
            bases |= {each.queue: each.configured for each in target.weights}
            for reason in target.degraded:
                degraded.add_metric([target.target, reason], 1)
        for queue, configured in sorted(bases.items()):
            base.add_metric([queue], configured)
        yield GaugeMetricFamily(
            "gputally_fairshare_leader", "1 on the replica that acts", value=1.0 if report.leading else 0.0
        )
        writes = GaugeMetricFamily("gputally_fairshare_writes", "Writes of the last cycle", labels=["target", "result"])
        for target in report.targets:
            results = [outcome.result for outcome in target.outcomes]
            for result in sorted(set(results)):
                writes.add_metric([target.target, result], results.count(result))
        yield writes
        waiting = GaugeMetricFamily(
            "gputally_queue_waiting_gpus", "GPUs that waiting workloads need to start", labels=["queue"]
        )
        lacking: dict[str, float] = {}
        for target in report.targets:
            for gang in target.gangs:
                lacking[gang.queue] = lacking.get(gang.queue, 0.0) + gang.waits
        for queue, amount in sorted(lacking.items()):
            waiting.add_metric([queue], amount)
        yield waiting
        claims = GaugeMetricFamily(
            "gputally_fairshare_preemption_claims", "Claims of the last cycle by outcome", labels=["target", "outcome"]
        )
        for target in report.targets:
            outcomes = [each.outcome for each in target.preemption.verdicts] if target.preemption is not None else []
            for outcome in sorted(set(outcomes)):
                claims.add_metric([target.target, outcome], outcomes.count(outcome))
        yield claims
        if self._alarms is not None:
            read = GaugeMetricFamily("gputally_slo_latency_seconds", "Latency of an SLO as last read", labels=["slo"])
            for name, value in sorted(self._alarms.readings.items()):
                read.add_metric([name], value)
            unread = GaugeMetricFamily("gputally_slo_unreadable", "1 while an SLO cannot be read", labels=["slo"])
            for name in sorted(self._alarms.faults):
                unread.add_metric([name], 1)
            yield from (read, unread)
        held = GaugeMetricFamily("gputally_weights_held", "1 while the last good weights are held", labels=["reason"])
        if report.hold is not None:
            held.add_metric([report.hold.reason], 1)
        yield from (entitled, ratio, weight, base, degraded, held)
        if report.window is not None and report.window.watermark_ms is not None:
            age = max(0, self._clock.wall_ms() - report.window.watermark_ms) / MS_PER_SECOND
            yield GaugeMetricFamily("gputally_fairshare_usage_age_seconds", "Age of the usage decided on", value=age)
