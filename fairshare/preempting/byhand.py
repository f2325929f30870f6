"""Room for one workload, once, because a person asks.

The decision is the controller's own, with the same rules and limits, for this one workload alone; its class
and wait do not matter. Old or thin usage is refused here as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import fsum
from typing import Literal

from accountant.wire import Policy
from agent.clock import Clock
from fairshare.errors import ClusterError, FairshareError
from fairshare.kube.kinds import NODE
from fairshare.kube.looking import list_if_served, look_at
from fairshare.kube.mapping import referred
from fairshare.kube.ports import AccountantPort, Cluster
from fairshare.model import Pod
from fairshare.plan import Adapter
from fairshare.preempting import preempter
from fairshare.preempting.claims import named_by
from fairshare.preempting.latency import Latency, shown
from fairshare.preempting.preempter import PreemptionReport
from fairshare.preempting.preemptions import note_by_hand, recent
from fairshare.preempting.rulings import Call
from fairshare.preempting.situations import situation
from fairshare.status import StatusObject
from fairshare.weighing.gates import gate, node_up, within
from fairshare.weighing.lost import LostGpus
from fairshare.weighing.shards import pools, weigh_pools
from fairshare.weighing.unheard import Unheard

_HERE = StatusObject()


class NotPossible(FairshareError):
    """Nothing could be asked or decided."""


def measured(
    policy: Policy, job: str, threshold: float | None, query: str, latency: Latency | None, now_ms: int
) -> str | None:
    """The sentence that asks for room; None where the latency is not above the threshold.

    query: else that of the policy's SLO for the workload. Raises NotPossible or LatencyUnknown."""
    if threshold is None:
        return "somebody asked for it by hand"
    asked = query or next((slo.query for slo in policy.preemption.slos if slo.workload == job), "")
    if not asked or latency is None:
        raise NotPossible(f"what is the latency of {job}? Give --query and --prometheus, or an SLO of it in the policy")
    value = latency(asked, now_ms)
    if value <= threshold:
        return None
    return f"the latency of {job} is {shown(value)}, above {shown(threshold)}"


def by_hand(
    policy: Policy,
    accountant: AccountantPort,
    cluster: Cluster,
    clock: Clock,
    adapters: Sequence[Adapter],
    pods: Sequence[Pod],
    call: Call,
    mode: Literal["dry-run", "enforce"],
    where: StatusObject = _HERE,
) -> PreemptionReport:
    """Decide, and with `enforce` act and record. where: the limits know from it who gave way of late, and are told
    there who does now.

    Raises NotPossible, AccountantUnavailable or ClusterError."""
    now_ms = clock.wall_ms()
    window = accountant.window(policy.window, policy.measure, now_ms, policy.min_coverage)
    hold = gate(policy, window, now_ms)
    if hold is not None:
        raise NotPossible(f"{hold.reason}: {hold.message}: nobody is preempted on such usage")
    nodes = tuple(node for node in list_if_served(cluster, NODE) if node_up(node))
    unheard = Unheard(accountant.metered_nodes).fault(nodes, window, now_ms, policy.min_coverage)
    if unheard is not None:
        raise NotPossible(f"{unheard}: nobody is preempted on such usage")
    serving = LostGpus(accountant.lost_gpus).serving(nodes, window, now_ms)
    nodes_gpus = serving.capacity(window)
    if nodes_gpus <= 0:
        raise NotPossible("no node shows GPUs, and the measure does not tell their number")
    for adapter in adapters:
        unread = adapter.name in preempter.UNREAD
        if unread or not referred(policy, *adapter.prefixes) or adapter.mode(policy) == "off":
            continue
        observation = look_at(adapter, policy, cluster, pods)
        if not any(named_by(gang, call.workload) for gang in observation.gangs):
            continue
        gpus = within(nodes_gpus, observation.capacity)
        parts = pools(observation.shards, serving.nodes, gpus)
        devices = serving.devices
        if parts:
            divided = fsum(pool.gpus for pool in parts)
            if divided <= 0:
                continue
            devices = None if devices is None else devices * divided / gpus
            gpus = divided
        weighing = weigh_pools(policy, window, observation.standings, parts, gpus, now_ms, {}, devices=devices)
        past = recent(cluster, where)
        here = situation(
            policy,
            adapter.name,
            observation.gangs,
            weighing.entitlements,
            serving.nodes,
            pods,
            now_ms,
            past=past,
            calls=(call,),
            quotas=observation.quotas,
        )
        report = preempter.preempt(policy, cluster, replace(here, calls_only=True), mode)
        if mode == "enforce":
            report = _remembered(policy, cluster, where, report)
            for event in report.events:
                cluster.event(event)
            accountant.post_decisions(preempter.decisions(policy, report, {}))
        return report
    raise NotPossible(f"no workload {call.workload} (NAMESPACE/NAME) in any queue of the policy")


def _remembered(policy: Policy, cluster: Cluster, where: StatusObject, report: PreemptionReport) -> PreemptionReport:
    if not report.past:
        return report
    try:
        note_by_hand(cluster, where, report.past, report.situation.now_ms, policy.preemption.cool_down)
    except ClusterError as error:
        return replace(report, faults=(*report.faults, f"the controller's limits will not know of it: {error}"))
    return report
