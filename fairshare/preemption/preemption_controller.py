"""Runs preemption for a target in a cycle or for a workload by hand, and keeps its state.

The state contains:

- the workloads preempted in the last day (for the limits)
- the owners that were warned of idle GPUs
- the recorded outcomes, so that each is recorded once
- the victims that the cluster does not allow to be stopped

The first three are also in the status ConfigMap and survive a restart. Without them the limits would allow too much,
grace periods would begin again, and the accountant would get the same outcomes again.

A preemption by hand follows the controller's rules and limits, for a single workload. The workload's priority class and
waiting time do not matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Literal

import msgspec

from accountant.wire.policy_models import Decision, Policy
from fairshare.core.queues_and_weights import Entitlement, Gang, Pod, Quota
from fairshare.preemption import preemption_cycle
from fairshare.preemption.claims_and_placement import (
    NO_MODELS,
    NO_POOL_MODELS,
    NO_QUOTAS,
    preemption_inputs,
)
from fairshare.preemption.eviction import EvictionVeto
from fairshare.preemption.idle_reclaim import IdleReport, IdleWatch, PodUsage
from fairshare.preemption.preemption_cycle import ClaimsUnsettled, PreemptionReport, RecordedOutcomes
from fairshare.preemption.preemption_types import PreemptionCall, PreemptionInputs, Victim
from fairshare.preemption.reclaim_rules_and_limits import PastPreemption, still_limiting
from fairshare.preemption.service_latency_objectives import Latency, seconds_text
from fairshare.preemption.unfinished_preemptions import unfinished_keys
from fairshare.targets.installed import whole_stop
from fairshare.targets.status_config_map import StatusObject, decoded
from fairshare.usage.accountant_client import AccountantPort
from gputally.base.errors import ClusterError, Conflict, FairshareError, NotFound
from gputally.base.units import MS_PER_MINUTE
from gputally.kubernetes.objects import CONFIG_MAP, Cluster, Object

KEY = "preempted"
IDLE_KEY = "warned-idle"
"""The controller's entries in the ConfigMap."""
OUTCOMES_KEY = "recorded-outcomes"
HAND_KEY, BY_HAND = "preempted-by-hand", "gputally-by-hand"
BEGUN_HAND_KEY = "preempting-by-hand"
"""The ConfigMap's entries of preemptions by hand, and of victims that a command stops next, and their field manager.
The controller changes none of them."""
BEGUN_KEY, BEGINS = "preempting", "gputally-preempting"
"""The ConfigMap's entry of victims that are stopped next, and its field manager. It is written before they are, so that
a controller that ends in between is followed by one that knows of them."""
SETTLED_KEY = "preempting-settled"
"""The ConfigMap's entry of the cycles in `BEGUN_KEY` and `BEGUN_HAND_KEY` whose outcome the state contains."""
MOST_KEPT = 1_000
"""Largest number of preemptions in one entry; the oldest are dropped."""
MOST_UIDS = 4
"""Largest number of pods of one victim in the note. They are the first that are evicted."""
_PAST = msgspec.json.Decoder(list[tuple[int, str, str, str, float, float, str]])
"""Decodes an entry: the fields of each `PastPreemption`."""


class _Begun(msgspec.Struct, array_like=True):
    """A victim that was to be stopped. past: what the limits count if it was. pods: uids of the first pods to be
    evicted; empty if its scheduler stops it through its object."""

    target: str
    past: tuple[int, str, str, str, float, float, str]
    pods: list[str]

    @property
    def cycle(self) -> str:
        return self.past[-1]

    def was_stopped(self, running: Collection[str], unfinished: Collection[str]) -> bool:
        """Return whether the victim was stopped: its object says so, or one of the pods no longer runs.

        running: uids of pods. unfinished: as for `Preemptions.cycle`."""
        return any(uid not in running for uid in self.pods) if self.pods else self.past[1] in unfinished

    @classmethod
    def of(cls, target: str, victims: Sequence[tuple[PastPreemption, Victim]]) -> tuple[_Begun, ...]:
        """Return the note of victims that are stopped next."""
        return tuple(
            cls(
                target,
                astuple(past),
                [] if whole_stop(victim.gang.kind) else [pod.uid for pod in victim.pods[:MOST_UIDS]],
            )
            for past, victim in victims[:MOST_KEPT]
        )


_BEGUN = msgspec.json.Decoder(list[_Begun])
_SETTLED = msgspec.json.Decoder(list[str])
_OUTCOMES = msgspec.json.Decoder(dict[str, dict[str, str]])
VETO_VALID_MS = 10 * MS_PER_MINUTE
"""How long a veto of the cluster stays valid after a cycle with more vetoes than it has rounds."""
STOPPING_MS = 5 * MS_PER_MINUTE
"""How long a victim that its scheduler does not stop holds up other preemptions of the target."""
COMMAND_MS = 2 * MS_PER_MINUTE
"""How long a command may still be stopping the victims that it noted. They count as stopped meanwhile."""
Calls = Callable[[Policy, int], Sequence[PreemptionCall]]


def no_calls(_policy: Policy, _now_ms: int) -> Sequence[PreemptionCall]:
    """Return no calls, for a controller that watches no latency."""
    return ()


class Preemptions:
    """Runs the preemption of one controller, with the state of its limits. Not thread-safe."""

    def __init__(self, usage: PodUsage, calls: Calls = no_calls, where: StatusObject | None = None) -> None:
        """usage: returns recent usage of pods, for the idle rule.
        calls: returns the requests for room of violated latency objectives.
        where: the ConfigMap with preemptions by hand."""
        self._calls = calls
        self._where = where
        self._idle = IdleWatch(usage)
        self._past: tuple[PastPreemption, ...] = ()
        self._note: tuple[_Begun, ...] = ()
        self._begun: tuple[_Begun, ...] = ()
        """Of the note, the victims whose outcome is not known yet."""
        self._settled: frozenset[str] = frozenset()
        self._settled_by_hand: frozenset[str] = frozenset()
        self._recorded: dict[str, RecordedOutcomes] = {}
        self._delivered: dict[str, RecordedOutcomes] = {}
        self._vetoes: dict[str, dict[str, tuple[EvictionVeto, int]]] = {}

    def restore(self, config_map: Object) -> None:
        """Continue from the state in the ConfigMap."""
        data = config_map.get("data") or {}
        self._past = _read(data.get(KEY, ""))
        note = decoded(data.get(BEGUN_KEY, ""), _BEGUN) or []
        settled = decoded(data.get(SETTLED_KEY, ""), _SETTLED) or []
        self._note, self._settled = tuple(note), frozenset(settled)
        self._settled_by_hand = self._settled
        self._begun = tuple(each for each in self._note if each.cycle not in self._settled)
        self._idle.restore(data.get(IDLE_KEY, ""))
        recorded = decoded(data.get(OUTCOMES_KEY, ""), _OUTCOMES)
        self._recorded = dict(recorded or {})
        self._delivered = dict(self._recorded)

    def state(self) -> dict[str, str]:
        """Return the state for the ConfigMap."""
        settled = self._known_cycles() | self._settled_by_hand
        texts = {
            SETTLED_KEY: msgspec.json.encode(sorted(settled)).decode() if settled else "",
            KEY: _text(self._past) if self._past else "",
            IDLE_KEY: self._idle.state(),
            OUTCOMES_KEY: msgspec.json.encode(self._delivered).decode() if any(self._delivered.values()) else "",
        }
        return {key: text for key, text in texts.items() if text}

    def published(self) -> None:
        """Note that the ConfigMap has the state: only then the next note need not contain the victims before."""
        self._settled = self._known_cycles()

    def _known_cycles(self) -> frozenset[str]:
        """Return the cycles of the note whose outcome is known."""
        return frozenset(each.cycle for each in self._note) - {each.cycle for each in self._begun}

    def delivered(self) -> None:
        """Note that the accountant has all outcomes: only then a restart need not record them again."""
        self._delivered = dict(self._recorded)

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
        by_model: Mapping[str, Sequence[Entitlement]] = NO_MODELS,
        pool_models: Mapping[str, str] = NO_POOL_MODELS,
        unfinished: Collection[str] = (),
    ) -> tuple[PreemptionReport | None, tuple[Decision, ...]]:
        """Run one cycle at one target. Returns None instead of a report if preemption is off or another replica leads.

        Nothing is decided while victims of the last five minutes are still being stopped, or have only now gone:
        their GPUs still seem held, so the same claim would stop others.

        metered_ms: the time up to which usage is metered; None if unknown.
        leading: returns whether this replica holds the Lease.
        quotas: the target's own quotas, if it admits work by quota.
        by_model, pool_models: as for `preemption_inputs`.
        unfinished: the workloads whose preemption was not finished before this cycle, also those that only say so.

        Raises ClusterError if nothing could be decided."""
        mode = preemption_cycle.mode_of(policy, target)
        if mode == "off" or not leading():
            return None, ()
        self._count_begun(target, pods, unfinished)
        idle = IdleReport()
        if metered_ms is not None:
            idle_mode = preemption_cycle.idle_mode(policy, mode)
            idle = self._idle.check(
                policy.preemption.idle, idle_mode, cluster, target, gangs, min(metered_ms, now_ms), now_ms
            )
        by_hand = self._count_by_hand(cluster, target, pods, unfinished, now_ms)
        inputs = preemption_inputs(
            policy, target, gangs, entitlements, nodes, pods, now_ms,
            past=_united(self._past, by_hand), calls=self._calls(policy, now_ms), quotas=quotas,
            by_model=by_model, pool_models=pool_models,
        )  # fmt: skip
        inputs = replace(inputs, idle=idle.idleness)
        recent = {each.key for each in inputs.past if each.at_ms > now_ms - STOPPING_MS}
        if stopping := tuple(sorted(recent.intersection(unfinished))):
            report = PreemptionReport(
                target, mode, inputs, warned=self._idle.warned(target), faults=idle.faults, stopping=stopping,
                events=idle.events,
            )  # fmt: skip
            return report, ()
        vetoes = self._valid_vetoes(target, now_ms)
        try:
            report = preemption_cycle.preempt(
                policy, cluster, inputs, mode, leading, vetoes, partial(self._begin, cluster, target)
            )
        except ClaimsUnsettled as unsettled:
            new = {key: (veto, now_ms) for key, veto in unsettled.vetoes.items() if key not in vetoes}
            self._vetoes[target] = self._vetoes[target] | new
            raise
        self._begun = tuple(each for each in self._begun if each.target != target)
        report = replace(report, warned=self._idle.warned(target), faults=idle.faults)
        decisions = preemption_cycle.decisions(policy, report, self._recorded.get(target, {}))
        self._recorded[target] = preemption_cycle.outcomes_of(report)
        self._past = still_limiting((*self._past, *report.past), now_ms, policy.preemption.cool_down)
        return replace(report, events=(*idle.events, *(report.events if decisions else ()))), decisions

    def _begin(self, cluster: Cluster, target: str, victims: Sequence[tuple[PastPreemption, Victim]]) -> None:
        """Note the victims in the ConfigMap before they are stopped, beside those of other targets and earlier cycles
        whose outcome is not in the ConfigMap yet. Raises ClusterError."""
        if self._where is None:
            return
        new = _Begun.of(target, victims)
        before = tuple(each for each in self._note if each.cycle not in self._settled)
        self._note = (*before, *new)[-MOST_KEPT:]
        where = {"name": self._where.name, "namespace": self._where.namespace}
        text = msgspec.json.encode(self._note).decode()
        change = {"apiVersion": CONFIG_MAP.api_version, "kind": CONFIG_MAP.kind, "metadata": where}
        cluster.apply({**change, "data": {BEGUN_KEY: text}}, field_manager=BEGINS)
        self._begun += new

    def _count_begun(self, target: str, pods: Sequence[Pod], unfinished: Collection[str]) -> None:
        """Count the victims that an earlier controller or cycle began to stop and did not record, if they were
        stopped."""
        if not self._begun:
            return
        running = _running(pods)
        stopped = (
            PastPreemption(*each.past)
            for each in self._begun
            if each.target == target and each.was_stopped(running, unfinished)
        )
        self._past = (*self._past, *stopped)
        self._begun = tuple(each for each in self._begun if each.target != target)

    def _count_by_hand(
        self, cluster: Cluster, target: str, pods: Sequence[Pod], unfinished: Collection[str], now_ms: int
    ) -> tuple[PastPreemption, ...]:
        """Return the preemptions by hand. Of those that a command began and did not record, count the victims that
        were stopped; the others count only while the command may still run."""
        if self._where is None:
            return ()
        data = _data(cluster, self._where)
        begun = decoded(data.get(BEGUN_HAND_KEY, ""), _BEGUN) or []
        self._settled_by_hand &= {each.cycle for each in begun}
        asked = [each for each in begun if each.target == target and each.cycle not in self._settled_by_hand]
        running = _running(pods) if asked else frozenset()
        stopped = [PastPreemption(*each.past) for each in asked if each.was_stopped(running, unfinished)]
        going = [past for each in asked if (past := PastPreemption(*each.past)).at_ms > now_ms - COMMAND_MS]
        self._past = _united(self._past, stopped)
        self._settled_by_hand |= {each.cycle for each in asked} - {past.decision for past in going}
        return _united(_read(data.get(HAND_KEY, "")), going)

    def _valid_vetoes(self, target: str, now_ms: int) -> dict[str, EvictionVeto]:
        """Return the vetoes of earlier cycles that are still valid, and forget the others."""
        vetoes = self._vetoes.get(target, {})
        self._vetoes[target] = {key: (veto, at) for key, (veto, at) in vetoes.items() if now_ms - at < VETO_VALID_MS}
        return {key: veto for key, (veto, _) in self._vetoes[target].items()}


def note_by_hand(
    cluster: Cluster,
    where: StatusObject,
    cycle: str,
    now_ms: int,
    cool_down_s: int,
    *,
    begun: Sequence[_Begun] = (),
    past: Sequence[PastPreemption] = (),
) -> None:
    """Note what a command does, for the limits of the controller and of later commands. Raises ClusterError.

    cycle: of the command. begun: the victims that it stops next. past: those that it has stopped."""
    for tries_left in range(2, -1, -1):
        metadata = {"name": where.name, "namespace": where.namespace}
        data: Mapping[str, str] = {}
        try:
            config_map = cluster.get(CONFIG_MAP, where.name, where.namespace)
        except NotFound:
            pass
        else:
            data = config_map.get("data") or {}
            metadata["resourceVersion"] = config_map["metadata"].get("resourceVersion", "")
        noted = [
            each
            for each in decoded(data.get(BEGUN_HAND_KEY, ""), _BEGUN) or ()
            if each.cycle != cycle and still_limiting([PastPreemption(*each.past)], now_ms, cool_down_s)
        ]
        texts = {
            HAND_KEY: _text(still_limiting((*_read(data.get(HAND_KEY, "")), *past), now_ms, cool_down_s)),
            BEGUN_HAND_KEY: msgspec.json.encode([*noted, *begun][-MOST_KEPT:]).decode(),
        }
        change = {
            "apiVersion": CONFIG_MAP.api_version,
            "kind": CONFIG_MAP.kind,
            "metadata": metadata,
            "data": texts,
        }
        try:
            cluster.apply(change, field_manager=BY_HAND)
        except Conflict:  # the controller or another client has written meanwhile
            if not tries_left:
                raise
        else:
            return


def _data(cluster: Cluster, where: StatusObject) -> Mapping[str, str]:
    """Return the entries of the ConfigMap; empty if it does not exist. Raises ClusterError if it cannot be read,
    because without them the limits would allow too much."""
    try:
        return cluster.get(CONFIG_MAP, where.name, where.namespace).get("data") or {}
    except NotFound:
        return {}


def _known_past(
    cluster: Cluster, where: StatusObject, target: str, pods: Sequence[Pod], now_ms: int
) -> tuple[PastPreemption, ...]:
    """Return for a command all preemptions in the ConfigMap: what the controller and other commands recorded, and what
    they began without having recorded it, if it was stopped or may be going on. Raises ClusterError."""
    data = _data(cluster, where)
    settled = frozenset(decoded(data.get(SETTLED_KEY, ""), _SETTLED) or ())
    asked = [
        each
        for key in (BEGUN_KEY, BEGUN_HAND_KEY)
        for each in decoded(data.get(key, ""), _BEGUN) or ()
        if each.target == target and each.cycle not in settled
    ]
    unfinished = unfinished_keys(cluster, target) if asked else frozenset()
    running = _running(pods) if asked else frozenset()
    begun = [
        past
        for each in asked
        if (past := PastPreemption(*each.past)).at_ms > now_ms - COMMAND_MS or each.was_stopped(running, unfinished)
    ]
    return _united(_united(_read(data.get(KEY, "")), _read(data.get(HAND_KEY, ""))), begun)


def _running(pods: Sequence[Pod]) -> frozenset[str]:
    return frozenset(pod.uid for pod in pods if pod.held)


def _united(some: Sequence[PastPreemption], others: Sequence[PastPreemption]) -> tuple[PastPreemption, ...]:
    """Return the preemptions of both, those in both once."""
    return tuple((Counter(some) | Counter(others)).elements())


def _text(past: Sequence[PastPreemption]) -> str:
    return msgspec.json.encode([astuple(each) for each in past[-MOST_KEPT:]]).decode()


def _read(text: str) -> tuple[PastPreemption, ...]:
    """Parse an entry of the ConfigMap; an invalid text is ignored."""
    return tuple(PastPreemption(*row) for row in decoded(text, _PAST) or ())


class NotPossible(FairshareError):
    """A preemption by hand cannot be decided. The message gives the reason."""


def latency_reason(
    policy: Policy, job: str, threshold: float | None, query: str, latency: Latency | None, now_ms: int
) -> str | None:
    """Return in a sentence why a person requests room; None if the latency is not above the threshold.

    threshold: seconds; None requests room without regard to the latency.
    query: by default that of the policy's SLO for the workload.

    Raises NotPossible or LatencyUnknown."""
    if threshold is None:
        return "asked for by hand"
    query = query or next((slo.query for slo in policy.preemption.slos if slo.workload == job), "")
    if not query or latency is None:
        raise NotPossible(
            f"the latency of {job} is not known: give --query and --prometheus, or an SLO of {job} in the policy"
        )
    value = latency(query, now_ms)
    if value <= threshold:
        return None
    return f"the latency of {job} is {seconds_text(value)}, above {seconds_text(threshold)}"


def carry_out_by_hand(
    policy: Policy,
    accountant: AccountantPort,
    cluster: Cluster,
    pods: Sequence[Pod],
    inputs: PreemptionInputs,
    mode: Literal["dry-run", "enforce"],
    where: StatusObject,
) -> PreemptionReport:
    """Decide a preemption by hand. With `enforce`, also stop the victims and record them.

    inputs: without earlier preemptions, which are read from the ConfigMap `where`; it is updated.

    Raises AccountantUnavailable or ClusterError."""
    past = _known_past(cluster, where, inputs.target, pods, inputs.now_ms)
    past = still_limiting(past, inputs.now_ms, policy.preemption.cool_down)
    begin = partial(_begin_by_hand, policy, cluster, where, inputs.target)
    inputs = replace(inputs, past=past, calls_only=True)
    report = preemption_cycle.preempt(policy, cluster, inputs, mode, begin=begin)
    if mode == "enforce":
        report = _with_record(policy, cluster, where, report)
        for event in report.events:
            cluster.event(event)
        accountant.post_decisions(preemption_cycle.decisions(policy, report, {}))
    return report


def _begin_by_hand(
    policy: Policy,
    cluster: Cluster,
    where: StatusObject,
    target: str,
    victims: Sequence[tuple[PastPreemption, Victim]],
) -> None:
    begun = _Begun.of(target, victims)
    note_by_hand(cluster, where, begun[0].cycle, victims[0][0].at_ms, policy.preemption.cool_down, begun=begun)


def _with_record(policy: Policy, cluster: Cluster, where: StatusObject, report: PreemptionReport) -> PreemptionReport:
    """Record the preemptions for the limits, and return the report with a fault if this failed."""
    if not report.stops:
        return report
    cycle, now_ms = preemption_cycle.cycle_id(policy, report.situation), report.situation.now_ms
    try:
        note_by_hand(cluster, where, cycle, now_ms, policy.preemption.cool_down, past=report.past)
    except ClusterError as error:
        fault = (
            "the outcome is not recorded for the controller's limits, which therefore count every victim that no"
            f" longer runs: {error}"
        )
        return replace(report, faults=(*report.faults, fault))
    return report
