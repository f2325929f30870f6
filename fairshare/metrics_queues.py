"""What the latest report says of every queue and of the room for those who wait, as Prometheus families. Pure.

Entitlement and usage are left out while a hold is on: an old figure shown as new would lie. A queue stands in
one series per target, for a target has GPUs of its own to divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from agent.units import MS_PER_SECOND
from fairshare.model import UNLIMITED, Entitlement
from fairshare.preempting.stranded import stranded
from fairshare.report import CycleReport


def families(report: CycleReport, now_ms: int) -> Iterator[Metric]:
    """Sorted by target and queue, so that equal reports give equal text."""
    yield from _due(report)
    yield from _weights(report)
    yield from _waiting(report, now_ms)


def _due(report: CycleReport) -> Iterator[Metric]:
    entitled = GaugeMetricFamily("gputally_queue_entitled_gpus", "GPUs a queue is due now.", labels=["queue", "target"])
    guaranteed = GaugeMetricFamily(
        "gputally_queue_guaranteed_gpus",
        "Deserved quota of a queue; absent where it is unlimited.",
        labels=["queue", "target"],
    )
    allocated = GaugeMetricFamily(
        "gputally_queue_allocated_gpus",
        "GPUs a queue holds now, its descendants' included.",
        labels=["queue", "target"],
    )
    requested = GaugeMetricFamily(
        "gputally_queue_requested_gpus",
        "GPUs a queue asks for now, those it holds included.",
        labels=["queue", "target"],
    )
    ratio = GaugeMetricFamily(
        "gputally_queue_usage_ratio",
        "Share of its siblings' capacity that a queue used over the policy's window.",
        labels=["queue", "target"],
    )
    figures: tuple[tuple[GaugeMetricFamily, Callable[[Entitlement], float]], ...] = (
        (entitled, lambda due: due.gpus),
        (guaranteed, lambda due: due.guaranteed),
        (allocated, lambda due: due.allocated),
        (requested, lambda due: due.requested),
        (ratio, lambda due: due.usage_ratio),
    )
    for family, figure in figures:
        for target in report.targets:
            for due in target.entitlements:
                if family is not guaranteed or due.guaranteed != UNLIMITED:
                    family.add_metric([due.queue, target.target], figure(due))
        yield family


def _weights(report: CycleReport) -> Iterator[Metric]:
    weight = GaugeMetricFamily("gputally_queue_weight", "Over-quota weight in force.", labels=["queue", "target"])
    share = GaugeMetricFamily(
        "gputally_queue_configured_share_ratio",
        "Share of its siblings' capacity that a queue's configured weight stands for, among those who compete.",
        labels=["queue", "target"],
    )
    base = GaugeMetricFamily("gputally_queue_weight_base", "Over-quota weight of the policy.", labels=["queue"])
    bases: dict[str, float] = {}
    for target in report.targets:
        applied = {outcome.apply.queue for outcome in target.outcomes if outcome.result == "applied"}
        written = {each.queue: each.value for each in target.weights if each.queue in applied}
        for queue, standing in sorted(target.standings.items()):
            weight.add_metric([queue, target.target], written.get(queue, standing.weight) or 0.0)
        for each in target.weights:
            share.add_metric([each.queue, target.target], each.explanation.n)
            bases[each.queue] = each.configured
    for queue, configured in sorted(bases.items()):
        base.add_metric([queue], configured)
    yield from (weight, share, base)


def _waiting(report: CycleReport, now_ms: int) -> Iterator[Metric]:
    lacking: dict[str, float] = {}
    workloads: dict[str, int] = {}
    since: dict[str, int] = {}
    gangs = [gang for target in report.targets for gang in target.gangs]
    for queue in (queue for target in report.targets for queue in target.standings):
        lacking[queue], workloads[queue] = 0.0, 0  # nobody waits: that is known too
    for gang in gangs:
        lacking[gang.queue] = lacking.get(gang.queue, 0.0) + gang.waits
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
    for queue in sorted(lacking):
        gpus.add_metric([queue], lacking[queue])
        count.add_metric([queue], workloads[queue])
        oldest.add_metric([queue], max(0, now_ms - since.get(queue, now_ms)) / MS_PER_SECOND)
    yield from (gpus, count, oldest)
    family = GaugeMetricFamily(
        "gputally_fairshare_stranded_gpus", "GPUs that are free while nothing that waits fits on them."
    )
    family.add_metric([], stranded(report.free_by_node, gangs))
    yield family
