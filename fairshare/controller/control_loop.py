"""Runs one cycle after the other: read usage, observe the targets, compute weights, write them, preempt, record.

A cycle needs only the policy, the accountant and the cluster. The annotations of the scheduler's objects hold the base
and the published weight, and the status ConfigMap holds the memory of the law, the reported conditions and the recent
preemptions. Only decisions that the accountant has not accepted yet are lost by a restart. If the ConfigMap is lost,
weights are set anew from the usage in the ledger.

A cycle first gathers what all targets are decided on (`_Basis`). A preemption by hand is decided on the same
(`inputs_by_hand`).

The report shows a target that cannot be written as degraded, and the other targets continue. Unusable usage changes no
weight (see `stale_usage_hold`). The loop never overwrites a field that another field manager owns. In dry-run it sends
each write of a weight as a dry run of the API server, which changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import structlog

from accountant.wire.policy_models import Decision, Policy, UsageWindow, WindowSpec
from fairshare.controller.cycle_report import CycleReport, TargetReport, WriteOutcome, hold_decision, weight_decisions
from fairshare.controller.event_and_decision_recorder import CycleRecorder
from fairshare.controller.policy_difference import policy_decision
from fairshare.controller.weight_writer import (
    available,
    degraded_reasons,
    rival_controllers,
    with_ownership_verdict,
    write_weights,
)
from fairshare.core.gpu_demand import sized
from fairshare.core.gpu_models import ModelMap, waiting_models
from fairshare.core.published_devices import SLICES, with_published
from fairshare.core.queues_and_weights import Condition, Pod, SchedulerHistory, Value, own_window
from fairshare.core.scheduler_queue_objects import has_ref, join_texts
from fairshare.laws.feedback_law import Memory
from fairshare.laws.weight_calculation import WeightInputs, WeightResult, calculate_weights
from fairshare.preemption import preemption_cycle
from fairshare.preemption.claims_and_placement import free_by_node, gpus_by_node, named_by, preemption_inputs
from fairshare.preemption.preemption_controller import (
    Calls,
    NotPossible,
    Preemptions,
    carry_out_by_hand,
    no_calls,
)
from fairshare.preemption.preemption_cycle import PreemptionReport, mode_of
from fairshare.preemption.preemption_types import PreemptionCall, PreemptionInputs
from fairshare.preemption.unfinished_preemptions import NOT_RESUMED, FinishedPreemptions, PreemptionFinisher
from fairshare.targets import status_config_map
from fairshare.targets.guard import PluginFault
from fairshare.targets.installed import adapters, with_workloads
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import Adapter, Apply, list_first_served, list_if_served, look_at, plan, release
from fairshare.usage.accountant_client import AccountantPort, UsageReader, UsageReading, window_by_model
from fairshare.usage.cluster_capacity import (
    LostGpus,
    NothingToDivide,
    ServingNodes,
    UnmeteredNodes,
    model_parts,
    one_unit,
    target_capacity,
    with_capacity_reason,
)
from fairshare.usage.multi_cluster_windows import NO_OTHER_CLUSTERS, OtherClusters
from fairshare.usage.stale_usage_hold import UsageHold, freshness_condition
from gputally.base.background_tasks import error_summary
from gputally.base.clock import Clock
from gputally.base.errors import AccountantUnavailable, ClusterError, NotFound
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.leader_election import Term
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import CONFIG_MAP, NODE, Cluster, Event, Object, Objects, node_up

ALONE: Final = Term("", 1)
"""The term of a controller without other replicas."""
_DEFAULT_STATUS_OBJECT = StatusObject()


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of the cluster, as one cycle sees them.

    hold: the reason why weights stay as they are, if nodes or pods are unknown.
    without_free: names of nodes whose free GPUs are unknown.
    conditions: about what the API server refuses to list.
    parts: which parts of their GPUs MIG instances are."""

    nodes: tuple[Object, ...] = ()
    hold: UsageHold | None = None
    without_free: frozenset[str] = frozenset()
    conditions: tuple[Condition, ...] = ()
    parts: MigParts = NO_NODES


@dataclass(frozen=True, slots=True)
class _Basis:
    """What all targets of one cycle are decided on.

    hold: why no weight may follow usage now; None if weights may change.
    serving: the nodes that accept work, and the GPUs that are lost on them.
    placing: those of them whose free GPUs are known."""

    now_ms: int
    usage: UsageReading
    hold: UsageHold | None
    nodes: _Nodes
    serving: ServingNodes
    placing: tuple[Object, ...]

    @property
    def window(self) -> UsageWindow | None:
        """The usage by which weights change; None if it must not change them."""
        return self.usage.window if self.hold is None else None


@dataclass(slots=True)
class _Decided:
    """What one cycle has decided so far."""

    decisions: list[Decision]
    targets: list[TargetReport] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Controller:
    """Writes the weight that follows from a queue's history to every target, and runs preemption."""

    def __init__(
        self,
        policy: Policy,
        accountant: AccountantPort,
        cluster: Cluster,
        clock: Clock,
        *,
        clusters: Mapping[str, Objects] | None = None,
        pods: Callable[[], Sequence[Pod]] = tuple,
        unseen: Callable[[], str | None] = lambda: None,
        unreadable: Callable[[], Sequence[str]] = tuple,
        status_object: StatusObject | None = None,
        observe: Callable[[CycleReport], None] | None = None,
        silent: bool = False,
        term: Callable[[], Term | None] = lambda: ALONE,
        memory: Mapping[str, Memory] | None = None,
        calls: Calls = no_calls,
        acts: Mapping[str, Callable[[], Condition]] | None = None,
        others: OtherClusters = NO_OTHER_CLUSTERS,
        name: str = "",
        posts: Callable[[], Sequence[Decision]] = tuple,
        claims_counted: bool = False,
    ) -> None:
        """policy: the policy in force at first.
        accountant: returns usage, and stores decisions.
        cluster: the cluster to read, and to write unless `clusters` names another client for a target.
        clusters: by adapter, the client for a target that is not written through `cluster`.
        pods: returns the pods that request GPUs, from the last list-watch update.
        unseen: returns the reason why `pods` may lack some pods; None if it lacks none.
        unreadable: returns the pods that cannot be read, each with the reason.
        status_object: the ConfigMap for conditions and state; None: conditions are only in reports and events.
        observe: called with every report, in the controller's thread.
        silent: send nothing to the accountant or the cluster about policy, conditions and decisions.
        term: returns the term in which this instance leads; None for a standby, which only reads and decides.
        memory: the initial memory by target, used without a status object.
        calls: returns the requests for room of violated latency objectives.
        acts: by target, a function that returns the condition `Effective` from what this process knows (for example
            from the extender's requests). It replaces the condition that follows from the target's objects.
        others: clusters whose usage the policy may count.
        name: NAMESPACE/LEASE, by which controllers recognise each other's weights; "" without a Lease.
        posts: returns decisions of this process's pages that are to be recorded, each once. A standby records them
            too.
        claims_counted: whether `pods` have the GPUs of their ResourceClaims. Otherwise it is unknown which GPUs are
            free on a node that offers them by claims alone, and none counts as free there."""
        self._policy = policy
        self._name = name
        self._state_fault = ""
        self._accountant = accountant
        self._cluster = cluster
        self._clock = clock
        self._clusters = dict(clusters or {})
        self._pods = pods
        self._unseen = unseen
        self._unreadable = unreadable
        self._status_object = status_object
        self._observe = observe
        self._silent = silent
        self._term = term
        self._taken_over: Term | None = None
        self._policy_refused: Condition | None = None
        self._last: CycleReport | None = None
        self._memory: dict[str, Memory] = dict(memory or {})
        self._usage = UsageReader(accountant, clock, others)
        self._recorder = CycleRecorder(cluster, accountant, status_object)
        self._preemptions = Preemptions(accountant.pod_usage, calls, status_object)
        self._finisher = PreemptionFinisher()
        self._acts = dict(acts or {})
        self._posts = posts
        self._claims_counted = claims_counted
        self._lost = LostGpus(accountant.lost_gpus)
        self._unmetered = UnmeteredNodes(accountant.metered_nodes)

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    @property
    def last(self) -> CycleReport | None:
        """The latest report."""
        return self._last

    def run(
        self,
        stop: threading.Event,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        interval_s: float = 60.0,
        reload: Callable[[], Policy | None] = lambda: None,
    ) -> None:
        """Run a cycle every `interval_s` until `stop` is set. A running cycle is finished.

        guard: a context manager around each cycle. It can keep the cycle's exceptions from ending the controller.
        reload: called before every cycle; returns a new policy or None. Raises FileFault for a faulty one."""
        while not stop.is_set():
            with guard():
                self._reload_policy(reload)
                self.cycle()
            if self._clock.wait(interval_s, stop):
                break

    def _reload_policy(self, reload: Callable[[], Policy | None]) -> None:
        """Load a new policy if there is one. A faulty one leaves the old one in force, and a condition reports it until
        it is corrected."""
        try:
            new = reload()
        except FileFault as fault:
            text = f"the policy in force stays, version {self._policy.version()}: {join_texts(fault.faults, most=3)}"
            self._policy_refused = Condition("PolicyRead", "False", "PolicyRefused", text)
        else:
            if new is not None:
                self._policy, self._policy_refused = new, None

    def cycle(self) -> CycleReport:
        """Run one cycle. Failures of the accountant or the cluster are in the report, not raised."""
        now_ms, started = self._clock.wall_ms(), self._clock.monotonic_ms()
        version = self._policy.version()
        term = self._term()

        def leading() -> bool:
            """Whether the term still lasts in which this cycle began. Another replica may lead between two terms."""
            return term is not None and self._term() == term

        if term is not None and term != self._taken_over and self._take_over():
            self._taken_over, self._last = term, None  # what was said before may have changed under another leader
        took_over = term is not None and term == self._taken_over
        silent = self._silent or not took_over
        basis = self._gather(now_ms, version, announce=not silent, state_known=term is None or took_over)
        decided = _Decided(self._news(basis, version))
        for adapter in adapters():
            if has_ref(self._policy, *adapter.prefixes):
                self._decide(adapter, basis, version, leading, decided, silent=silent)
        report = self._report(basis, version, decided, leading=term is not None)
        self._tell(report, version, leading, silent=silent)
        report = replace(report, duration_ms=self._clock.monotonic_ms() - started)
        self._last = report
        if self._observe is not None:
            self._observe(report)
        return report

    def _news(self, basis: _Basis, version: str) -> list[Decision]:
        """Return the records of a new policy and of a hold that the cycle before did not have."""
        decisions = []
        if basis.usage.change is not None:
            decisions.append(policy_decision(basis.usage.change.before, basis.usage.change.after, basis.now_ms))
        before = self._last.hold if self._last is not None else None
        if basis.hold is not None and (before is None or before.reason != basis.hold.reason):
            decisions.append(hold_decision(basis.hold, version, basis.now_ms))
        return decisions

    def _decide(
        self,
        adapter: Adapter,
        basis: _Basis,
        version: str,
        leading: Callable[[], bool],
        decided: _Decided,
        *,
        silent: bool,
    ) -> None:
        """Add what is decided at one target: its weights, then preemption. A defect there stops no other target."""
        target = TargetReport(adapter.name, adapter.mode(self._policy))
        try:
            finished = FinishedPreemptions()
            if not silent:
                finished = self._finish_preemptions(adapter.name, basis.now_ms, leading)
            decided.events += finished.events
            target, events = self._target(adapter, basis, version, leading)
            target = _with_unfinished(target, finished)
            decided.events += events
            if basis.window is not None:
                news = self._recorder.news(target)
                decided.decisions += weight_decisions(target, news, version, basis.now_ms)
                target, preempted = self._preempt(target, basis, leading, finished.keys)
                decided.decisions += preempted
                decided.events += target.preemption.events if target.preemption is not None else ()
        except PluginFault as error:
            target = _degraded(target, error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - a defect at one target stops no other
            structlog.get_logger("fairshare").exception("target_failed", target=adapter.name)
            target = _failed(target, error)
        decided.targets.append(target)

    def _report(self, basis: _Basis, version: str, decided: _Decided, *, leading: bool) -> CycleReport:
        """Return the report of a cycle, with events for the conditions that changed."""
        nodes, placing = basis.nodes, basis.placing
        gpus = gpus_by_node(placing)
        report = CycleReport(
            at_ms=basis.now_ms,
            duration_ms=0,
            policy_version=version,
            window=basis.usage.window,
            hold=basis.hold,
            conditions=(
                freshness_condition(basis.hold),
                *(() if self._policy_refused is None else (self._policy_refused,)),
                *self._pods_left_out(),
                *nodes.conditions,
                *self._recorder.conditions(),
            ),
            targets=tuple(decided.targets),
            decisions=tuple(decided.decisions),
            gpus_by_node=gpus,
            leading=leading,
            free_by_node=free_by_node(gpus, self._counted_pods(nodes.parts)),
            model_by_node=ModelMap.of(self._policy, placing, {}).of_node if self._policy.gpu_models else {},
            parts=nodes.parts,
        )
        return replace(report, events=(*decided.events, *self._recorder.condition_events(self._last, report)))

    def _tell(self, report: CycleReport, version: str, leading: Callable[[], bool], *, silent: bool) -> None:
        """Publish the report and the state for the next cycle, and deliver the decisions to the accountant."""
        if not silent:
            memory = {target.target: self._memory.get(target.target, {}) for target in report.targets}
            state = status_config_map.remember(memory, version)
            state |= self._preemptions.state()
            # A replica that lost the Lease meanwhile would overwrite the new leader's state.
            if self._recorder.publish(report, state if leading() else None):
                self._preemptions.published()
        if not self._silent:
            own = () if silent else report.decisions
            taken = self._recorder.deliver([*self._posts(), *own], accountant_away=report.window is None)
            if taken and not silent:
                self._preemptions.delivered()

    def _gather(self, now_ms: int, version: str, *, announce: bool, state_known: bool) -> _Basis:
        """Read usage and nodes. announce: send the policy to the accountant. state_known: as `_take_over` returns."""
        usage = self._usage.read(self._policy, version, announce=announce)
        window, hold = usage.window, usage.hold
        cluster_window = own_window(window) if window is not None else None
        if not state_known:
            text = "the state of earlier cycles in the status ConfigMap cannot be read"
            hold = UsageHold("StateUnread", f"{text}: {self._state_fault}")
        nodes = self._nodes()
        up = tuple(node for node in nodes.nodes if node_up(node))
        hold = with_capacity_reason(hold, nodes.nodes) or nodes.hold or self._unmetered_hold(up, cluster_window, now_ms)
        serving = self._lost.serving(up, cluster_window if hold is None else None, now_ms)
        placing = tuple(node for node in serving.nodes if node["metadata"]["name"] not in nodes.without_free)
        return _Basis(now_ms, usage, hold, nodes, serving, placing)

    def inputs_by_hand(self, call: PreemptionCall) -> PreemptionInputs:
        """Return what a preemption for this call is decided on: what a cycle of this controller would decide on now,
        but for earlier preemptions. Nothing is written.

        Raises NotPossible if no cycle would preempt now, or if no target has the workload."""
        now_ms, version = self._clock.wall_ms(), self._policy.version()
        basis = self._gather(now_ms, version, announce=False, state_known=self._take_over())
        if basis.hold is not None:
            raise NotPossible(f"{basis.hold.reason}: {basis.hold.message}: no workload is preempted on such usage")
        unread: list[str] = []
        for adapter in adapters():
            if (
                adapter.name not in with_workloads()
                or not has_ref(self._policy, *adapter.prefixes)
                or adapter.mode(self._policy) == "off"
            ):
                continue
            target, _ = self._target(adapter, basis, version, leading=lambda: False)
            unread += [f"{adapter.name}: {reason}: {text}" for reason, text in target.degraded.items()]
            if not any(named_by(gang, call.workload) for gang in target.gangs):
                continue
            if not target.entitlements:
                raise NotPossible(join_texts(unread))
            return preemption_inputs(
                self._policy, adapter.name, target.gangs, target.entitlements, basis.placing,
                self._counted_pods(basis.nodes.parts), now_ms, calls=(call,), quotas=target.quotas,
                by_model=target.by_model, pool_models=target.pool_models,
            )  # fmt: skip
        faults = f"; {join_texts(unread)}" if unread else ""
        raise NotPossible(f"no workload {call.workload} (NAMESPACE/NAME) in any queue of the policy{faults}")

    def _take_over(self) -> bool:
        """Load the state of the last leader (or the last run): that of its weights, its reported conditions, and the
        recent preemptions.

        Returns False if the state may exist and cannot be read now. The cycle then decides nothing."""
        if self._status_object is None:
            return True
        try:
            status = self._cluster.get(CONFIG_MAP, self._status_object.name, self._status_object.namespace)
        except NotFound:
            return True
        except ClusterError as error:
            self._state_fault = str(error)
            return False
        self._memory |= status_config_map.memories(status)
        self._recorder.resume(status)
        self._preemptions.restore(status)
        return True

    def _nodes(self) -> _Nodes:
        """Return every node, and a hold if nodes or pods are unknown. Without nodes the capacity is unknown, and
        without pods every GPU would seem free."""
        unseen = self._unseen()
        hold = UsageHold("PodsUnseen", unseen) if unseen is not None else None
        try:
            slices, refused = list_first_served(self._cluster, SLICES)
            nodes, by_claims = with_published(list_if_served(self._cluster, NODE), slices)
        except ClusterError as error:
            return _Nodes(hold=UsageHold("NodesUnread", str(error)))
        return _Nodes(nodes, hold, frozenset() if self._claims_counted else by_claims, refused, MigParts.of(nodes))

    def _counted_pods(self, parts: MigParts) -> tuple[Pod, ...]:
        """Return the pods as they are now, with their MIG instances as these parts of GPUs."""
        return tuple(sized(pod, parts) for pod in self._pods())

    def _pods_left_out(self) -> tuple[Condition, ...]:
        """Return a condition if pods cannot be read. They count as they were before, or not at all."""
        texts = sorted(self._unreadable())
        return (Condition("PodsRead", "False", "PodsUnreadable", join_texts(texts)),) if texts else ()

    def _unmetered_hold(self, nodes: Sequence[Object], window: UsageWindow | None, now_ms: int) -> UsageHold | None:
        """Return a hold if too many GPUs are on nodes that no agent meters; None otherwise."""
        if window is None:
            return None
        try:
            fault = self._unmetered.fault(nodes, window, now_ms, self._policy.min_coverage)
        except AccountantUnavailable as error:
            return UsageHold(error.reason, str(error))
        return UsageHold("NodesUnmetered", fault) if fault is not None else None

    def _target(
        self, adapter: Adapter, basis: _Basis, version: str, leading: Callable[[], bool]
    ) -> tuple[TargetReport, list[Event]]:
        """Read one target, and compute and write its weights if the usage may change them. Return its report and
        events."""
        window, serving, usage, now_ms, parts = (
            basis.window, basis.serving, basis.usage, basis.now_ms, basis.nodes.parts,
        )  # fmt: skip
        mode = adapter.mode(self._policy)
        report = TargetReport(adapter.name, mode)
        if mode == "off":
            off = Condition("Available", "Unknown", "Off", "switched off in the policy")
            return replace(report, conditions=(off,)), []
        cluster: Objects = self._clusters.get(adapter.name, self._cluster)
        try:
            observation = look_at(adapter, self._policy, cluster, self._counted_pods(parts), parts)
        except ClusterError as error:
            return _degraded(report, "CRDAbsent" if isinstance(error, NotFound) else error.reason, str(error)), []
        if adapter.name in self._acts:
            others = [condition for condition in observation.conditions if condition.type != "Effective"]
            observation = replace(observation, conditions=(self._acts[adapter.name](), *others))
        standings = observation.standings
        report = replace(report, standings=standings, gangs=observation.gangs, quotas=observation.quotas)
        result = WeightResult((), ())
        values: Mapping[str, Value] = {}
        gpus = 0.0
        if window is not None:
            memory = self._memory.get(adapter.name, {})
            report = replace(report, memory=memory, exhausted=usage.exhausted, lost=serving.lost)
            try:
                capacity = target_capacity(serving, window, observation.capacity, observation.shards)
            except NothingToDivide as error:
                return _degraded(report, "NoCapacity", str(error)), []
            gpus = capacity.gpus
            scheduler_k = observation.history.k if observation.history is not None else 0.0
            report = replace(report, pools=capacity.pools)
            try:
                policy, window, by_model = self._counted_by(observation.history, window, usage.by_model)
            except AccountantUnavailable as error:
                return _degraded(report, error.reason, str(error)), []
            models = model_parts(policy, serving, observation, by_model, usage.exhausted_by_model)
            waiting = waiting_models(policy, serving.nodes, observation)
            report = replace(report, window=window, history=observation.history, models=models, waiting_models=waiting)
            inputs = WeightInputs(
                policy, window, standings, gpus, now_ms, memory, usage.exhausted, capacity.pools, models, scheduler_k,
            )  # fmt: skip
            result = calculate_weights(inputs)
            self._memory[adapter.name] = result.memory
            values = adapter.express(self._policy, result.weights, observation, gpus)
        if adapter.publishes(self._policy):
            actions = plan(adapter, result.weights, values, observation, version, now_ms, self._name)
        else:
            # The scheduler counts history itself: only a turn changes its weights, which are restored afterwards.
            result = replace(result, weights=tuple(each for each in result.weights if each.explanation.turn))
            in_turn = {weight.queue for weight in result.weights}
            not_in_turn = {name: queue for name, queue in observation.queues.items() if name not in in_turn}
            restored = release(adapter, replace(observation, queues=not_in_turn))
            actions = (*restored, *plan(adapter, result.weights, values, observation, version, now_ms, self._name))
        rivals = rival_controllers(observation, self._name)
        applies = [action for action in actions if isinstance(action, Apply) and action.queue not in rivals]
        outcomes: tuple[WriteOutcome, ...] = ()
        if leading():
            outcomes = write_weights(
                cluster, applies, dry_run=mode == "dry-run", leading=leading, most=adapter.most_writes
            )
        conditions = with_ownership_verdict([action for action in actions if isinstance(action, Condition)], outcomes)
        report = replace(
            report,
            weights=result.weights,
            entitlements=result.entitlements,
            by_model=result.by_model,
            pool_models=observation.pool_models,
            gpus=gpus,
            outcomes=outcomes,
            conditions=(*conditions, *one_unit(serving.nodes), available(outcomes, rivals)),
            degraded=degraded_reasons(observation, outcomes, rivals),
            rivals=rivals,
        )
        applied = {outcome.apply.name for outcome in outcomes if outcome.result == "applied"}
        events = [action for action in actions if isinstance(action, Event) and action.name in applied]
        events += self._recorder.changes(report, observation, now_ms)
        return report, [*events, *self._recorder.failures(adapter.name, observation, outcomes, now_ms)]

    def _counted_by(
        self, history: SchedulerHistory | None, window: UsageWindow, by_model: Mapping[str, UsageWindow]
    ) -> tuple[Policy, UsageWindow, Mapping[str, UsageWindow]]:
        """Return the policy and the usage, also by GPU model, by which a target divides: its scheduler's own k and
        window if it counts past use itself. Raises AccountantUnavailable."""
        if history is None:
            return self._policy, window, by_model
        policy = history.applied_to(self._policy)
        if (policy.window, "allocated") != (self._policy.window, self._policy.measure):
            end_ms = window.end_ms

            def read(spec: WindowSpec) -> UsageWindow:
                return self._accountant.window(spec, "allocated", end_ms, policy.min_coverage)

            window, by_model = read(policy.window), window_by_model(policy, read)
        return policy, window, by_model

    def _finish_preemptions(self, target: str, now_ms: int, leading: Callable[[], bool]) -> FinishedPreemptions:
        enforces = mode_of(self._policy, target) == "enforce"
        return self._finisher.finish(self._cluster, target, now_ms, enforces=enforces, leading=leading)

    def _preempt(
        self, report: TargetReport, basis: _Basis, leading: Callable[[], bool], unfinished: Collection[str]
    ) -> tuple[TargetReport, tuple[Decision, ...]]:
        """Run preemption at one target, after its weights were written, by which its scheduler may preempt itself.

        unfinished: as for `Preemptions.cycle`."""
        metered_ms = own_window(basis.window).watermark_ms if basis.window is not None else None
        if not report.entitlements or report.rivals:
            return report, ()
        try:
            preemption, decisions = self._preemptions.cycle(
                self._policy, self._cluster, report.target, report.gangs, report.entitlements, basis.placing,
                self._counted_pods(basis.nodes.parts), basis.now_ms, metered_ms, leading, report.quotas,
                report.by_model, report.pool_models, unfinished,
            )  # fmt: skip
        except ClusterError as error:
            conditions = (*report.conditions, preemption_cycle.failed(error))
            return replace(
                report, conditions=conditions, degraded={**report.degraded, "PreemptionFailed": str(error)}
            ), ()
        if preemption is not None:
            report = replace(report, conditions=(*report.conditions, preemption_cycle.condition(preemption)))
        return replace(report, preemption=preemption), decisions


def by_hand(
    policy: Policy,
    accountant: AccountantPort,
    cluster: Cluster,
    clock: Clock,
    pods: Sequence[Pod],
    call: PreemptionCall,
    mode: Literal["dry-run", "enforce"],
    where: StatusObject = _DEFAULT_STATUS_OBJECT,
    others: OtherClusters = NO_OTHER_CLUSTERS,
) -> PreemptionReport:
    """Decide a preemption by hand, on what a cycle would see now. With `enforce`, also stop the victims and record
    them.

    where: the ConfigMap with the controller's state and recent preemptions, which is updated.
    others: clusters whose usage the policy may count.

    Raises NotPossible, AccountantUnavailable or ClusterError."""
    controller = Controller(
        policy, accountant, cluster, clock, pods=lambda: pods, status_object=where, silent=True, others=others
    )
    inputs = controller.inputs_by_hand(call)
    return carry_out_by_hand(policy, accountant, cluster, pods, inputs, mode, where)


def _with_unfinished(report: TargetReport, finished: FinishedPreemptions) -> TargetReport:
    """Return the report with a condition if a preemption could not be finished."""
    condition = finished.condition()
    if condition is None:
        return report
    degraded = {**report.degraded, NOT_RESUMED: condition.message}
    return replace(report, conditions=(*report.conditions, condition), degraded=degraded)


def _failed(report: TargetReport, error: Exception) -> TargetReport:
    """Return what is known of a target whose cycle a defect ended, with that defect."""
    reason, message = "Defect", f"{error_summary(error)}: the log has the traceback; please report it"
    others = [condition for condition in report.conditions if condition.type != "Available"]
    condition = Condition("Available", "False", reason, message)
    return replace(report, conditions=(*others, condition), degraded={**report.degraded, reason: message})


def _degraded(report: TargetReport, reason: str, message: str) -> TargetReport:
    """Return the report of a target for which no weight could be computed."""
    return replace(report, conditions=(Condition("Available", "False", reason, message),), degraded={reason: message})
