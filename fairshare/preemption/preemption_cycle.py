"""Runs preemption for all targets in a cycle, or for one workload by hand, and keeps the state of the limits.

The state contains:

- the workloads preempted in the last day (for the limits)
- the owners that were warned of idle GPUs
- the reported outcomes, so that each is reported once
- the victims that the cluster keeps
- since when a latency is too high

The first two are also in the status ConfigMap and survive a restart. Without them the limits would allow too much, and
grace periods would begin again.

Evictions are counted as workloads, not pods, and only if they took from another queue. They are evictions by the
target's scheduler that are new since the last cycle (`Observation.evictions`), and the controller's own. The first
cycle counts none, because their age is unknown. These counts are only in memory, so a restart loses at most those of
one cycle. Volcano's scheduler does not state the beneficiary of an eviction, so there only the controller's own are
counted.

A preemption by hand follows the controller's rules and limits, for a single workload. The class and wait of the
workload do not matter. It is refused while usage is old or its coverage is low."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, Literal

from accountant.wire.policy_models import Decision, Policy
from fairshare.core.queue_annotations import has_ref
from fairshare.core.queue_tree import PolicyTree
from fairshare.core.queues_and_weights import Entitlement, Eviction, Gang, Pod, Quota, Standing
from fairshare.laws.weight_calculation import WeightInputs, weigh_pools
from fairshare.preemption import target_preemption
from fairshare.preemption.eviction import STOPPED, EvictionVeto
from fairshare.preemption.idle_reclaim import IdleReport, IdleWatch, PodUsage
from fairshare.preemption.preemption_claims import NO_QUOTAS, named_by, preemption_inputs
from fairshare.preemption.preemption_rules import PastPreemption, still_limiting
from fairshare.preemption.preemption_types import PreemptionCall
from fairshare.preemption.service_latency_objectives import Latency, shown
from fairshare.preemption.target_preemption import ClaimsUnsettled, PreemptionReport, RecordedOutcomes
from fairshare.preemption.victim_candidates import key_of
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import Adapter, list_if_served, look_at
from fairshare.usage.accountant_client import AccountantPort
from fairshare.usage.cluster_capacity import LostGpus, NothingToDivide, UnmeteredNodes, target_capacity
from fairshare.usage.multi_cluster_windows import NO_OTHER_CLUSTERS, OtherClusters
from fairshare.usage.stale_usage_hold import usage_gate
from gputally.base.clock import Clock
from gputally.base.errors import ClusterError, Conflict, FairshareError, NotFound
from gputally.base.units import MS_PER_MINUTE
from gputally.kubernetes.objects import CONFIG_MAP, NODE, Cluster, Object, node_up

KEY = "preempted"
IDLE_KEY = "warned-idle"
"""Entries of the ConfigMap."""
HAND_KEY, BY_HAND = "preempted-by-hand", "gputally-by-hand"
"""The entry of a preemption by hand, and its field manager. The controller changes neither."""
MOST_KEPT = 1_000
FORGOTTEN_MS = 10 * MS_PER_MINUTE
"""Time after which a victim that the cluster keeps is tried again if there are too many to try in one cycle."""
Calls = Callable[[Policy, int], Sequence[PreemptionCall]]


def no_calls(_policy: Policy, _now_ms: int) -> Sequence[PreemptionCall]:
    """Return an empty list of calls, for a policy that watches no latency."""
    return ()


class Preemptions:
    """The preemptions of one controller. Not thread-safe."""

    def __init__(self, usage: PodUsage, calls: Calls = no_calls, where: StatusObject | None = None) -> None:
        """usage: recent usage of pods, for the idle rule.
        where: the ConfigMap with preemptions by hand."""
        self._calls = calls
        self._where = where
        self._idle = IdleWatch(usage)
        self._past: tuple[PastPreemption, ...] = ()
        self._said: dict[str, RecordedOutcomes] = {}
        self._vetoed: dict[str, dict[str, tuple[EvictionVeto, int]]] = {}

    def restore(self, standing: Object) -> None:
        """Continue from the state in the ConfigMap."""
        data = standing.get("data") or {}
        self._past = _read(data.get(KEY, ""))
        self._idle.restore(data.get(IDLE_KEY, ""))

    def state(self) -> dict[str, str]:
        """Return the state for the ConfigMap."""
        texts = {KEY: _text(self._past) if self._past else "", IDLE_KEY: self._idle.state()}
        return {key: text for key, text in texts.items() if text}

    def cycle(
        self,
        policy: Policy,
        cluster: Cluster,
        target: str,
        gangs: Sequence[Gang],
        entitlements: Sequence[Entitlement],
        nodes: Sequence[Object],
        pods: Sequence[Pod],
        now_ms: int,
        metered_ms: int | None,
        leading: Callable[[], bool],
        quotas: Mapping[str, Quota] = NO_QUOTAS,
    ) -> tuple[PreemptionReport | None, tuple[Decision, ...]]:
        """Run one cycle at one target. Returns None instead of a report if the target's preemption is off.

        metered_ms: the instant up to which usage is metered; None if unknown.
        quotas: the target's own quotas, if it admits work by quota.

        Raises ClusterError if nothing could be decided."""
        mode = target_preemption.mode_of(policy, target)
        if mode == "off" or not leading():
            return None, ()
        look = IdleReport()
        if metered_ms is not None:
            at_target = target_preemption.idle_mode(policy, mode)
            look = self._idle.look(
                policy.preemption.idle, at_target, cluster, target, gangs, min(metered_ms, now_ms), now_ms
            )
        by_hand = _past_preemptions(cluster, self._where, HAND_KEY) if self._where is not None else ()
        here = preemption_inputs(
            policy, target, gangs, entitlements, nodes, pods, now_ms,
            past=(*self._past, *by_hand), calls=self._calls(policy, now_ms), quotas=quotas,
        )  # fmt: skip
        known = self._known(target, now_ms)
        try:
            report = target_preemption.preempt(policy, cluster, replace(here, idle=look.idleness), mode, leading, known)
        except ClaimsUnsettled as unsettled:
            new = {key: (veto, now_ms) for key, veto in unsettled.vetoes.items() if key not in known}
            self._vetoed[target] = self._vetoed[target] | new
            raise
        report = replace(report, warned=self._idle.warned(target), faults=look.faults)
        news = target_preemption.decisions(policy, report, self._said.get(target, {}))
        self._said[target] = target_preemption.outcome_of(report)
        self._past = still_limiting((*self._past, *report.past), now_ms, policy.preemption.cool_down)
        return replace(report, events=(*look.events, *(report.events if news else ()))), news

    def _known(self, target: str, now_ms: int) -> dict[str, EvictionVeto]:
        """Return vetoes of earlier cycles that are still valid."""
        held = {key: veto for key, veto in self._vetoed.get(target, {}).items() if now_ms - veto[1] < FORGOTTEN_MS}
        self._vetoed[target] = held
        return {key: veto for key, (veto, _) in held.items()}


def recent(cluster: Cluster, where: StatusObject) -> tuple[PastPreemption, ...]:
    """Return the recent preemptions, by the controller and by hand; empty if they cannot be read."""
    return _past_preemptions(cluster, where, KEY, HAND_KEY)


def note_by_hand(
    cluster: Cluster, where: StatusObject, past: Sequence[PastPreemption], now_ms: int, cool_down_s: int
) -> None:
    """Record preemptions by hand for the limits of the controller and of later commands. Raises ClusterError."""
    for left in range(2, -1, -1):
        metadata = {"name": where.name, "namespace": where.namespace}
        before: tuple[PastPreemption, ...] = ()
        try:
            standing = cluster.get(CONFIG_MAP, where.name, where.namespace)
        except NotFound:
            pass
        else:
            before = _read((standing.get("data") or {}).get(HAND_KEY, ""))
            metadata["resourceVersion"] = standing["metadata"].get("resourceVersion", "")
        text = _text(still_limiting((*before, *past), now_ms, cool_down_s))
        noted = {
            "apiVersion": CONFIG_MAP.api_version,
            "kind": CONFIG_MAP.kind,
            "metadata": metadata,
            "data": {HAND_KEY: text},
        }
        try:
            cluster.apply(noted, field_manager=BY_HAND)
        except Conflict:  # the controller or another client has written meanwhile
            if not left:
                raise
        else:
            return


def _past_preemptions(cluster: Cluster, where: StatusObject, *keys: str) -> tuple[PastPreemption, ...]:
    try:
        data = cluster.get(CONFIG_MAP, where.name, where.namespace).get("data") or {}
    except ClusterError:
        return ()
    return tuple(past for key in keys for past in _read(data.get(key, "")))


def _text(past: Sequence[PastPreemption]) -> str:
    return json.dumps([astuple(each) for each in past[-MOST_KEPT:]], separators=(",", ":"))


def _read(text: str) -> tuple[PastPreemption, ...]:
    """Parse what `state` wrote; an invalid text is ignored."""
    try:
        rows: Any = json.loads(text or "[]")
        return tuple(
            PastPreemption(int(r[0]), str(r[1]), str(r[2]), str(r[3]), float(r[4]), float(r[5]), str(r[6]))
            for r in rows
        )
    except (ValueError, TypeError, IndexError, KeyError):
        return ()


Taken = frozenset[tuple[str, str]]
"""(beneficiary queue, workload)."""


class PreemptionCounts:
    """Counts of preemptions by target. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[str, frozenset[str]] = {}
        self._own: dict[str, Taken] = {}

    def note(self, report: PreemptionReport) -> None:
        """Record what the controller stopped in this cycle, for the next one."""
        queues = {verdict.claimant: verdict.queue for verdict in report.verdicts if verdict.trigger != "idle"}
        self._own[report.target] = frozenset(
            (queues[stop.claimant], key_of(stop.victim.gang))
            for stop in report.stops
            if stop.effect.result in STOPPED
            and queues.get(stop.claimant, stop.victim.gang.queue) != stop.victim.gang.queue
        )

    def count(
        self, policy: Policy, target: str, evictions: Sequence[Eviction], standings: Mapping[str, Standing]
    ) -> dict[str, Standing]:
        """Return the standings with the new counts, descendants' included."""
        before = self._seen.get(target)
        self._seen[target] = frozenset(each.id for each in evictions)
        taken = self._own.pop(target, frozenset())
        if before is not None:
            taken |= {(each.queue, each.victim) for each in evictions if each.id not in before}
        own: dict[str, float] = {}
        for queue, _ in taken:
            own[queue] = own.get(queue, 0.0) + 1.0
        counts = PolicyTree(policy).sum_up(own)
        return {queue: replace(each, reclaims=counts.get(queue, 0.0)) for queue, each in standings.items()}


_HERE = StatusObject()


class NotPossible(FairshareError):
    """Nothing could be read or decided."""


def measured(
    policy: Policy, job: str, threshold: float | None, query: str, latency: Latency | None, now_ms: int
) -> str | None:
    """Return the sentence that requests room; None if the latency is not above the threshold.

    query: by default that of the policy's SLO for the workload. Raises NotPossible or LatencyUnknown."""
    if threshold is None:
        return "asked for by hand"
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
    call: PreemptionCall,
    mode: Literal["dry-run", "enforce"],
    where: StatusObject = _HERE,
    others: OtherClusters = NO_OTHER_CLUSTERS,
) -> PreemptionReport:
    """Decide, and with `enforce` also act and record.

    where: the ConfigMap with recent preemptions, which is updated.
    others: clusters whose usage the policy may count.

    Raises NotPossible, AccountantUnavailable or ClusterError."""
    now_ms = clock.wall_ms()
    window = own = accountant.window(policy.window, policy.measure, now_ms, policy.min_coverage)
    hold = usage_gate(policy, own, now_ms)
    if hold is None:
        window, hold = others.add(policy, own, now_ms, now_ms)
    if hold is not None:
        raise NotPossible(f"{hold.reason}: {hold.message}: no workload is preempted on such usage")
    nodes = tuple(node for node in list_if_served(cluster, NODE) if node_up(node))
    unheard = UnmeteredNodes(accountant.metered_nodes).fault(nodes, own, now_ms, policy.min_coverage)
    if unheard is not None:
        raise NotPossible(f"{unheard}: no workload is preempted on such usage")
    serving = LostGpus(accountant.lost_gpus).serving(nodes, own, now_ms)
    for adapter in adapters:
        unread = adapter.name in target_preemption.UNREAD
        if unread or not has_ref(policy, *adapter.prefixes) or adapter.mode(policy) == "off":
            continue
        observation = look_at(adapter, policy, cluster, pods)
        if not any(named_by(gang, call.workload) for gang in observation.gangs):
            continue
        try:
            capacity = target_capacity(serving, window, observation.capacity, observation.shards)
        except NothingToDivide as error:
            raise NotPossible(f"{adapter.name}: {error}") from error
        weighing = weigh_pools(
            WeightInputs(
                policy, window, observation.standings, capacity.gpus, now_ms, devices=capacity.devices,
                pools=capacity.pools,
            )
        )  # fmt: skip
        here = preemption_inputs(
            policy, adapter.name, observation.gangs, weighing.entitlements, serving.nodes, pods, now_ms,
            past=recent(cluster, where), calls=(call,), quotas=observation.quotas,
        )  # fmt: skip
        report = target_preemption.preempt(policy, cluster, replace(here, calls_only=True), mode)
        if mode == "enforce":
            report = _remembered(policy, cluster, where, report)
            for event in report.events:
                cluster.event(event)
            accountant.post_decisions(target_preemption.decisions(policy, report, {}))
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
