"""A history of scrapes as timestamped OpenMetrics text, to back-fill a real Prometheus with.

`scraped` runs the demo on its virtual clock and reads each program's /metrics at intervals. `staged` adds what a short
demo does not have: device faults, workloads that wait and are preempted, and requests to an API server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import httpx2
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from accountant.runtime.job_and_task_metrics import FunctionCollector, inventory_metrics
from accountant.wire.policy_models import Budget
from agent.core.readings import Allocation, DeviceCondition, XidCount
from agent.metering.meter import ClosedSet, Meter
from agent.metrics.exporter import AgentMetrics
from agent.metrics.metric_families import Operations
from agent.simulation.simulated_node import A100, H100, SimulatedNode, make_gpu
from agent.wire import Holder, UsageInterval
from fairshare.controller.controller_metrics import ControllerMetrics
from fairshare.controller.cycle_report import CycleReport, TargetReport
from fairshare.preemption.eviction import EvictionResult
from fairshare.preemption.preemption_cycle import PreemptionReport, VictimStop
from fairshare.preemption.preemption_types import Verdict, Victim
from fairshare.usage.stale_usage_hold import UsageHold
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE
from gputally.demo.options import DemoOptions
from gputally.demo.pipeline import Pipeline
from gputally.demo.scenario import Scenario, build
from tests.fairshare.preemption_cases import gang, policy, situation
from tests.usage_records import pod_facts, pod_holder

EVERY_HOURS = 1
"""Hours between two scrapes; the demo's programs advance once an hour."""

LATER = """\
# TYPE gputally_budget_forecast_ratio gauge
gputally_budget_forecast_ratio{budget="research-hours",team="research",queue=""} 1.25
# TYPE gputally_unmetered_gpus gauge
gputally_unmetered_gpus{node="ill-2"} 4
"""
"""Metrics of an accountant after some days, and while a node is silent for long."""
LAKE = """\
# TYPE gputally_lake_published_timestamp_seconds gauge
gputally_lake_published_timestamp_seconds {at_s}
# TYPE gputally_lake_differences gauge
gputally_lake_differences 2
# TYPE gputally_lake_refused gauge
gputally_lake_refused 0
# TYPE gputally_fleet_published_timestamp_seconds gauge
gputally_fleet_published_timestamp_seconds{{ledger="prod-eu"}} {at_s}
"""
"""Metrics of an accountant and the fleet's pages for a lake that was last published at `at_s`."""

ACCOUNTANT = {"job": "gputally-accountant", "instance": "accountant:8080"}
FAIRSHARE = {"job": "gputally-fairshare", "instance": "fairshare:9402"}
Labels = tuple[tuple[str, str], ...]


@dataclass
class Recorder:
    """Samples of many scrapes. A sample's labels take precedence over its target's, as with `honor_labels`."""

    types: dict[str, str] = field(default_factory=dict)
    samples: dict[str, dict[tuple[str, Labels], dict[int, float]]] = field(default_factory=dict)

    def take(self, page: str, at_ms: int, **target: str) -> None:
        """Record one scrape."""
        for family in text_string_to_metric_families(page):
            self.types[family.name] = family.type
            known = self.samples.setdefault(family.name, {})
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    labels = tuple(sorted({**target, **sample.labels}.items()))
                    known.setdefault((sample.name, labels), {})[at_ms] = sample.value

    def openmetrics(self) -> str:
        """Return the samples: families together, samples of a series in order of time."""
        lines: list[str] = []
        for name, series in sorted(self.samples.items()):
            lines += [f"# TYPE {name} {self.types[name]}"]
            for (sample, labels), values in sorted(series.items()):
                inside = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels)
                lines += [f"{sample}{{{inside}}} {value!r} {at / 1000:.3f}" for at, value in sorted(values.items())]
        return "\n".join([*lines, "# EOF", ""])


def scenario(days: int) -> Scenario:
    """Return the demo's scenario with two budgets."""
    plain = build(DemoOptions(days=days))
    budgets = (
        Budget(name="research-hours", team="research", limit=2_000),
        Budget(name="vision-money", queue=plain.policy.queues[0].name, limit=50_000, currency="USD"),
    )
    return replace(plain, policy=plain.policy.model_copy(update={"budgets": budgets}))


def scraped(recorder: Recorder, pipeline: Pipeline) -> None:
    """Run the pipeline to its end, scraping every EVERY_HOURS hours."""
    clock = VirtualClock(pipeline.scenario.start_ms)
    fairshare = ControllerMetrics(clock)
    inventory = CollectorRegistry()
    kind = SimpleNamespace(kind="Node", heard_ms=pipeline.scenario.start_ms, failures=0, unreadable=0)
    inventory.register(FunctionCollector(partial(inventory_metrics, SimpleNamespace(kinds=[kind]), clock)))  # type: ignore[arg-type]

    def scrape(now_ms: int) -> None:
        clock.advance_to(now_ms)
        assert pipeline.controller.last is not None
        fairshare.observe(pipeline.controller.last)
        if now_ms // MS_PER_HOUR % EVERY_HOURS:
            return
        for node, page in pipeline.agent_pages.items():
            recorder.take(page, now_ms, cluster="demo", job="gputally-agent", instance=f"{node}:9401")
        with contextlib.suppress(httpx2.HTTPStatusError):  # an hour in which the demo's accountant is away
            recorder.take(pipeline.get("/metrics"), now_ms, cluster="demo", **ACCOUNTANT)
        recorder.take(fairshare.render().decode(), now_ms, cluster="demo", **FAIRSHARE)
        recorder.take(generate_latest(inventory).decode(), now_ms, cluster="demo", **FAIRSHARE)

    pipeline.run(scrape)


def staged(recorder: Recorder, start_ms: int, hours: int) -> None:
    """Record a second cluster with a different fault in each hour."""
    agent, controller = _ill_node(start_ms), _pressed_controller()
    for hour in range(0, hours + 1, EVERY_HOURS):
        at_ms = start_ms + hour * MS_PER_HOUR
        recorder.take(agent(hour), at_ms, cluster="staged", job="gputally-agent", instance="ill-1:9401")
        recorder.take(LATER, at_ms, cluster="staged", **ACCOUNTANT)
        recorder.take(controller(at_ms), at_ms, cluster="staged", **FAIRSHARE)
        recorder.take(LAKE.format(at_s=at_ms // 1000 - 1_800), at_ms, cluster="staged", **ACCOUNTANT)


def _ill_node(start_ms: int) -> Callable[[int], str]:
    """Return a node whose shared GPU has faults and profiling counters, and one whose MIG GPU is lost."""
    mig = make_gpu("GPU-ill-1", 1, A100, ["3g.40gb", "1g.10gb"])
    node = SimulatedNode("ill-1", [make_gpu("GPU-ill-0", 0, H100), mig], start_ms=start_ms)
    meter, metrics = Meter(MS_PER_HOUR // 4, ZoneInfo("UTC")), AgentMetrics("ill-1", "0")

    def hold(name: str, allocation: Callable[[Holder], Allocation]) -> None:
        uid = f"uid-{name}"
        facts = pod_facts(name, start_ms, uid=uid, namespace="staged", node="ill-1", workload=f"Job/{name}")
        node.place(start_ms, allocation(pod_holder(name, "staged", uid, "main")), 400_000, 2_048, facts)

    hold("sliced", lambda who: Allocation("GPU-ill-0", who, sharing="time-slicing", sharing_replicas=4))
    hold("instance", lambda who: Allocation("GPU-ill-1", who, mig.mig[1].uuid))
    node.set_stray(start_ms, "GPU-ill-0", 100_000)

    def with_profile(row: UsageInterval) -> UsageInterval:
        busy_us = row.busy_us or 0
        return structs.replace(row, sm_active_us=busy_us // 2, tensor_active_us=busy_us // 4)

    def page(hour: int) -> str:
        for quarter in range(4):
            at_ms = start_ms + hour * MS_PER_HOUR + quarter * 15 * MS_PER_MINUTE
            snapshot = node.snapshot(at_ms)
            xids = (XidCount(94, hour, at_ms), XidCount(119, 1, start_ms))
            condition = DeviceCondition(61, 1_980, 2_619, 0x44, hour, 0, xids)
            first, *others = snapshot.devices
            snapshot = replace(snapshot, devices=(structs.replace(first, condition=condition), *others))
            profiled = [ClosedSet(tuple(map(with_profile, closed.rows))) for closed in meter.observe(snapshot)]
            metrics.observe(snapshot, profiled)
        metrics.operate(
            Operations(
                nvml_up=True, outbox_rows=7, outbox_bytes=4_096, outbox_oldest_age_s=12.5, uploads={"stored": hour},
                parked={"undecodable": hour}, collectors={"nvml": (True, 0.002), "pods": (False, 1.0)},
            )
        )  # fmt: skip
        return metrics.exposition().decode()

    return page


def _pressed_controller() -> Callable[[int], str]:
    """Return a controller that holds its weights, with a waiting workload, a preempted one and a degraded target."""
    clock = VirtualClock(0)
    metrics = ControllerMetrics(clock)
    waits, went = gang("waits", "nlp", waiting=(8,)), gang("went", "vision", on=(("n1", 4),))
    nodes = {"n1": 8.0, "n2": 8.0}
    hold = UsageHold("StaleUsage", "usage is an hour old")
    here = situation(policy({"nlp": 8, "vision": 4}), nodes, [waits, went])
    victim = Victim(went, went.pods, 4.0, 2.5, True, "above share", "vision", "it held more than its share")
    verdict = Verdict("Gang/ns/waits", "nlp", 8.0, "waits", "preempts", "room was made", (victim,))
    preemption = PreemptionReport(
        "kai", "enforce", here, (verdict,), (VictimStop("nlp", victim, EvictionResult("stopped")),)
    )

    def page(at_ms: int) -> str:
        clock.advance_to(at_ms)
        moved = replace(waits, created_ms=at_ms - 2 * MS_PER_HOUR)
        target = TargetReport("kai", "weight", gangs=(moved,), degraded={"CRDAbsent": "gone"}, preemption=preemption)
        metrics.observe(
            CycleReport(at_ms, 40, "v", None, hold, (), (target,), gpus_by_node=nodes, free_by_node={"n1": 4, "n2": 3})
        )
        return metrics.render().decode()

    return page


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def pipeline(folder: Path, days: int) -> Pipeline:
    """Build the demo with agents that keep metrics."""
    return Pipeline(scenario(days), folder, scraped=True)
