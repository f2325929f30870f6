"""Runs one cycle after the other: usage, hold check, observation, weights, plan, write, record.

A cycle needs only the policy, the accountant and the cluster, because its state is in annotations. What the process
holds in memory (the last report, undelivered decisions) only avoids repeated messages. If the stored state of a law
(smoothed errors, credit for turns) is lost, the law starts again from the usage in the ledger.

A target that cannot be written is reported as degraded, and the other targets continue. Unusable usage changes no
weight (see `stale_usage_hold`). The loop never forces a field, and writes nothing in dry-run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from accountant.wire.policy_models import Decision, Policy, UsageWindow
from fairshare.controller.cycle_recorder import CycleRecorder
from fairshare.controller.cycle_report import CycleReport, Outcome, TargetReport, hold_decision, weight_decisions
from fairshare.controller.weight_writer import (
    MOST_WRITES,
    MOST_WRITES_AT,
    available,
    carry_out,
    reasons,
    with_ownership_verdict,
)
from fairshare.core.queue_annotations import has_ref, say
from fairshare.core.queues_and_weights import Condition, Observation, Pod, Value, Weight, own_window
from fairshare.laws.feedback_laws import Memory
from fairshare.laws.weight_calculation import WeightInputs, WeightResult, weigh_pools
from fairshare.laws.weight_change_causes import DecidedWeight, WeightChange, changes
from fairshare.preemption import target_preemption
from fairshare.preemption.preemption_claims import free_by_node
from fairshare.preemption.preemption_cycle import Calls, PreemptionCounts, Preemptions, no_calls
from fairshare.preemption.target_preemption import mode_of
from fairshare.preemption.unfinished_preemptions import NOT_RESUMED, FinishedPreemptions, PreemptionFinisher
from fairshare.targets import ADAPTERS, status_config_map
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import Adapter, Apply, list_if_served, look_at, plan, release
from fairshare.usage.accountant_client import AccountantPort, Usage
from fairshare.usage.cluster_capacity import (
    LostGpus,
    NothingToDivide,
    ServingNodes,
    UnmeteredNodes,
    one_unit,
    target_capacity,
)
from fairshare.usage.multi_cluster_windows import NO_OTHER_CLUSTERS, OtherClusters
from fairshare.usage.stale_usage_hold import UsageHold, fresh, with_capacity_reason
from gputally.base.clock import Clock
from gputally.base.errors import AccountantUnavailable, ClusterError, NotFound, Unavailable
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.objects import CONFIG_MAP, NODE, Cluster, Event, Object, Objects, gpus_of_nodes, node_up


class Controller:
    """Gives every queue the weight that follows from its history."""

    def __init__(
        self,
        policy: Policy,
        accountant: AccountantPort,
        cluster: Cluster,
        clock: Clock,
        *,
        adapters: Sequence[Adapter] = ADAPTERS,
        clusters: Mapping[str, Objects] | None = None,
        pods: Callable[[], Sequence[Pod]] = tuple,
        unseen: Callable[[], str | None] = lambda: None,
        status_object: StatusObject | None = None,
        interval_s: float = 60.0,
        reload: Callable[[], Policy | None] | None = None,
        observe: Callable[[CycleReport], None] | None = None,
        silent: bool = False,
        leading: Callable[[], bool] = lambda: True,
        memory: Mapping[str, Memory] | None = None,
        calls: Calls = no_calls,
        acts: Mapping[str, Callable[[], Condition]] | None = None,
        others: OtherClusters = NO_OTHER_CLUSTERS,
    ) -> None:
        """policy: the policy in force at first.
        accountant: gives usage, and takes decisions.
        cluster: is read, and written unless `clusters` names another one.
        adapters: the kinds of targets.
        clusters: by adapter, for a target that is not written through `cluster`.
        pods: returns the pods that request GPUs, as last seen.
        unseen: returns the reason why `pods` may miss some pods, or None.
        status_object: the ConfigMap in which conditions are stored; None: conditions are only in reports and events.
        interval_s: how long `run` waits between two cycles.
        reload: called before every cycle of `run`; returns a new policy or None. May raise FileFault.
        observe: called with every report, in the controller's thread.
        silent: send nothing to the accountant or the cluster about policy, conditions and decisions.
        leading: returns whether this instance acts; a standby only reads and decides.
        memory: the laws' initial memory by target, used without a status object.
        calls: returns queues for which a latency objective is violated.
        acts: by target, a function that returns the condition `Effective` as this process knows it (for example from
            the extender's requests). It replaces the condition that follows from the target's objects.
        others: clusters whose usage the policy may count."""
        self._policy = policy
        self._accountant = accountant
        self._cluster = cluster
        self._clock = clock
        self._adapters = tuple(adapters)
        self._clusters = dict(clusters or {})
        self._pods = pods
        self._unseen = unseen
        self._status_object = status_object
        self._interval_s = interval_s
        self._reload = reload
        self._observe = observe
        self._silent = silent
        self._leading = leading
        self._led = False
        self._refused: Condition | None = None
        self._last: CycleReport | None = None
        self._memory: dict[str, Memory] = dict(memory or {})
        self._usage = Usage(accountant, clock, others)
        self._recorder = CycleRecorder(cluster, accountant, status_object)
        self._tally = PreemptionCounts()
        self._preemptions = Preemptions(accountant.pod_usage, calls, status_object)
        self._resuming = PreemptionFinisher()
        self._acts = dict(acts or {})
        self._lost = LostGpus(accountant.lost_gpus)
        self._unheard = UnmeteredNodes(accountant.metered_nodes)
        self._decided: dict[str, dict[str, DecidedWeight]] = {}

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    @property
    def last(self) -> CycleReport | None:
        """The latest report."""
        return self._last

    def run(self, stop: threading.Event, guard: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Run a cycle every `interval_s` until `stop` is set; the current cycle is finished.

        guard: encloses each cycle, and can keep its exceptions from ending the controller."""
        while not stop.is_set():
            with guard():
                self._take_policy()
                self.cycle()
            if self._clock.wait(self._interval_s, stop):
                break

    def _take_policy(self) -> None:
        """Load a new policy if there is one. A faulty one leaves the old one in force and is reported until it is
        corrected."""
        if self._reload is None:
            return
        try:
            new = self._reload()
        except FileFault as fault:
            text = f"the policy in force stays, version {self._policy.version()}: {say(fault.faults, most=3)}"
            self._refused = Condition("PolicyRead", "False", "PolicyRefused", text)
        else:
            if new is not None:
                self._policy, self._refused = new, None

    def cycle(self) -> CycleReport:
        """Run one cycle. Answers of the accountant or the cluster never raise."""
        now_ms, started = self._clock.wall_ms(), self._clock.monotonic_ms()
        version = self._policy.version()
        leads = self._leading()
        self._led = leads and (self._led or self._take_over())
        quiet = self._silent or not self._led
        measured = self._usage.ask(self._policy, version, quiet=quiet)
        window, hold = measured.window, measured.hold
        here = own_window(window) if window is not None else None
        if leads and not self._led:
            hold = UsageHold("StateUnread", "what earlier cycles have noted in the status ConfigMap cannot be read")
        nodes, unread = self._nodes()
        up = tuple(node for node in nodes if node_up(node))
        hold = with_capacity_reason(hold, nodes) or unread or self._unheard_of(up, here, now_ms)
        usable = window if hold is None else None
        serving = self._lost.serving(up, here if hold is None else None, now_ms)
        targets: list[TargetReport] = []
        decisions: list[Decision] = []
        events: list[Event] = []
        if hold is not None and (
            self._last is None or self._last.hold is None or self._last.hold.reason != hold.reason
        ):
            decisions.append(hold_decision(hold, version, now_ms))
        for adapter in self._adapters:
            if not has_ref(self._policy, *adapter.prefixes):
                continue
            ended = self._end_what_was_begun(adapter.name, now_ms) if not quiet else FinishedPreemptions()
            target, told = self._target(adapter, usable, serving, now_ms, measured.spent, version)
            target = _with_faults(target, ended)
            events += (*told, *ended.events)
            if usable is not None:
                decisions += weight_decisions(target, self._recorder.news(target), usable, version, now_ms)
                target, preempted = self._preempt(target, serving.nodes, now_ms, own_window(usable).watermark_ms)
                decisions += preempted
                events += target.preemption.events if target.preemption is not None else ()
            targets.append(target)
        refused = () if self._refused is None else (self._refused,)
        report = CycleReport(
            at_ms=now_ms,
            duration_ms=0,
            policy_version=version,
            window=window,
            hold=hold,
            conditions=(fresh(hold), *refused, *self._recorder.conditions()),
            targets=tuple(targets),
            decisions=tuple(decisions),
            gpus_by_node={node["metadata"]["name"]: gpus_of_nodes([node]) for node in serving.nodes},
            leading=leads,
            free_by_node=free_by_node(serving.nodes, self._pods()),
        )
        report = replace(report, events=(*events, *self._recorder.turned(self._last, report)))
        if not quiet:
            memory = {target.target: self._memory.get(target.target, {}) for target in targets}
            # A replica that lost the Lease meanwhile would overwrite the new leader's state.
            state = status_config_map.remember(memory, version) | self._preemptions.state() if self._leading() else None
            self._recorder.say(report, state)
            self._recorder.deliver(decisions, away=window is None)
        report = replace(report, duration_ms=self._clock.monotonic_ms() - started)
        self._last = report
        if self._observe is not None:
            self._observe(report)
        return report

    def _take_over(self) -> bool:
        """Load the state of the last leader (or the last run): the state of its laws, its reported conditions, and the
        recent preemptions. Returns False if that state may exist and cannot be read now; then nothing may be decided.
        """
        if self._status_object is None:
            return True
        try:
            standing = self._cluster.get(CONFIG_MAP, self._status_object.name, self._status_object.namespace)
        except Unavailable:
            return False
        except ClusterError:
            return True  # it does not exist yet, or may not be read
        self._memory |= status_config_map.memories(standing)
        self._recorder.resume(standing)
        self._preemptions.restore(standing)
        return True

    def _nodes(self) -> tuple[Sequence[Object], UsageHold | None]:
        """Return every node, and why shares and room cannot be computed from the cluster's state: without nodes the
        capacity is unknown, and without pods every GPU would seem free."""
        unseen = self._unseen()
        hold = UsageHold("PodsUnseen", unseen) if unseen is not None else None
        try:
            return list_if_served(self._cluster, NODE), hold
        except ClusterError as error:
            return (), UsageHold("NodesUnread", str(error))

    def _unheard_of(self, nodes: Sequence[Object], window: UsageWindow | None, now_ms: int) -> UsageHold | None:
        """Return why the window does not cover the whole cluster; None if it does."""
        if window is None:
            return None
        try:
            fault = self._unheard.fault(nodes, window, now_ms, self._policy.min_coverage)
        except AccountantUnavailable as error:
            return UsageHold("AccountantUnavailable", str(error))
        return UsageHold("NodesUnmetered", fault) if fault is not None else None

    def _target(
        self,
        adapter: Adapter,
        window: UsageWindow | None,
        serving: ServingNodes,
        now_ms: int,
        spent: frozenset[str],
        version: str,
    ) -> tuple[TargetReport, list[Event]]:
        """Reads one target and, with a usable window, decides and writes."""
        mode = adapter.mode(self._policy)
        report = TargetReport(adapter.name, mode)
        if mode == "off":
            off = Condition("Available", "Unknown", "Off", "switched off in the policy")
            return replace(report, conditions=(off,)), []
        cluster: Objects = self._clusters.get(adapter.name, self._cluster)
        try:
            observation = self._known(adapter.name, look_at(adapter, self._policy, cluster, self._pods()))
        except ClusterError as error:
            return _degraded(report, "CRDAbsent" if isinstance(error, NotFound) else error.reason, str(error)), []
        standings = self._tally.count(self._policy, adapter.name, observation.evictions, observation.standings)
        observation = replace(observation, standings=standings)
        report = replace(report, standings=observation.standings, gangs=observation.gangs, quotas=observation.quotas)
        weighing = WeightResult((), ())
        values: Mapping[str, Value] = {}
        gpus = 0.0
        if window is not None:
            memory = self._memory.get(adapter.name, {})
            report = replace(report, memory=memory, exhausted=spent, lost=serving.lost)
            try:
                capacity = target_capacity(serving, window, observation.capacity, observation.shards)
            except NothingToDivide as error:
                return _degraded(report, "NoCapacity", str(error)), []
            gpus = capacity.gpus
            report = replace(report, pools=capacity.pools, devices=capacity.devices)
            situation = WeightInputs(
                self._policy, window, observation.standings, gpus, now_ms, memory, spent, capacity.devices,
                capacity.pools,
            )  # fmt: skip
            weighing = weigh_pools(situation)
            self._memory[adapter.name] = weighing.memory
            values = adapter.express(self._policy, weighing.weights, observation, gpus)
        if adapter.publishes(self._policy):
            actions = plan(adapter, weighing.weights, values, observation, version, now_ms)
        else:
            # Weights of an earlier mode would count history twice.
            weighing = replace(weighing, weights=())
            actions = (*release(adapter, observation), *plan(adapter, (), {}, observation, "", now_ms))
        applies = [action for action in actions if isinstance(action, Apply)]
        outcomes: tuple[Outcome, ...] = ()
        if window is not None and applies:
            report = replace(report, changes=self._changes(adapter.name, situation, weighing.weights, applies))
        if self._leading():
            most = MOST_WRITES_AT.get(adapter.name, MOST_WRITES)
            outcomes = carry_out(cluster, applies, dry_run=mode == "dry-run", leading=self._leading, most=most)
        conditions = with_ownership_verdict([action for action in actions if isinstance(action, Condition)], outcomes)
        report = replace(
            report,
            weights=weighing.weights,
            entitlements=weighing.entitlements,
            gpus=gpus,
            outcomes=outcomes,
            conditions=(*conditions, *one_unit(serving.nodes), available(outcomes)),
            degraded=reasons(observation, outcomes),
        )
        applied = {outcome.apply.name for outcome in outcomes if outcome.result == "applied"}
        events = [action for action in actions if isinstance(action, Event) and action.name in applied]
        events += self._recorder.changes(report, observation, now_ms)
        return report, [*events, *self._recorder.failures(adapter.name, observation, outcomes, now_ms)]

    def _known(self, target: str, observation: Observation) -> Observation:
        """Return the observation with this process's own knowledge of whether the target's shares are effective."""
        acts = self._acts.get(target)
        if acts is None:
            return observation
        others = [condition for condition in observation.conditions if condition.type != "Effective"]
        return replace(observation, conditions=(acts(), *others))

    def _changes(
        self, target: str, now: WeightInputs, weights: Sequence[Weight], applies: Sequence[Apply]
    ) -> Mapping[str, WeightChange]:
        """Return the causes of the changes of the weights to be written, each since this controller's previous
        decision."""
        queues = {apply.queue for apply in applies}
        decided = self._decided.setdefault(target, {})
        written = [weight for weight in weights if weight.queue in queues]
        found = changes(decided, now, written)
        for weight in written:
            if weight.queue not in decided or decided[weight.queue].value != weight.value:
                decided[weight.queue] = DecidedWeight(now, weight.value)
        return found

    def _end_what_was_begun(self, target: str, now_ms: int) -> FinishedPreemptions:
        enforces = mode_of(self._policy, target) == "enforce"
        return self._resuming.go_on(self._cluster, target, now_ms, enforces=enforces, leading=self._leading)

    def _preempt(
        self, report: TargetReport, nodes: Sequence[Object], now_ms: int, metered_ms: int | None
    ) -> tuple[TargetReport, tuple[Decision, ...]]:
        """Run preemption after the weights, which make the schedulers preempt by themselves, and only with usable
        usage."""
        if not report.entitlements:
            return report, ()
        try:
            done, decisions = self._preemptions.cycle(
                self._policy, self._cluster, report.target, report.gangs, report.entitlements, nodes, self._pods(),
                now_ms, metered_ms, self._leading, report.quotas,
            )  # fmt: skip
        except ClusterError as error:
            conditions = (*report.conditions, target_preemption.failed(error))
            return replace(
                report, conditions=conditions, degraded={**report.degraded, "PreemptionFailed": str(error)}
            ), ()
        if done is not None:
            self._tally.note(done)
            report = replace(report, conditions=(*report.conditions, target_preemption.condition(done)))
        return replace(report, preemption=done), decisions


def _with_faults(report: TargetReport, ended: FinishedPreemptions) -> TargetReport:
    condition = ended.condition()
    if condition is None:
        return report
    degraded = {**report.degraded, NOT_RESUMED: condition.message}
    return replace(report, conditions=(*report.conditions, condition), degraded=degraded)


def _degraded(report: TargetReport, reason: str, message: str) -> TargetReport:
    """Return the report of a target for which nothing could be decided."""
    return replace(report, conditions=(Condition("Available", "False", reason, message),), degraded={reason: message})
