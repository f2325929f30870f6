"""Stops a victim in the way that its scheduler supports.

Before that, `EvictionCheck` makes only reads and dry runs. It checks that the object is still the one for which the
decision was made, and that its owner has not opted out. It also checks that every disruption budget allows the eviction
of all its pods, not only of the first.

A victim whose scheduler stops workloads through their own objects (`fairshare.targets.whole_stop`) is stopped by a
patch of its object, and by a command if the scheduler needs one. The patch writes an annotation with the id and time of
the decision, from which `unfinished_preemptions` recognises the workload, sends a lost command again and lets the
workload run again. Everything else is stopped by the Eviction API for each pod, with its uid as precondition.

A victim gets the reason as an annotation and an Event. This module never deletes a pod.

A request that fails leaves the victim as it was, or the result counts as stopped. After a refusal the annotations are
removed again. After a request without an answer the object shows whether the request was carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from fairshare.core.queues_and_weights import Pod
from fairshare.preemption.preemption_types import Victim
from fairshare.targets.installed import whole_stop
from fairshare.targets.weight_plan import FIELD_MANAGER, list_if_served
from fairshare.targets.whole_stop import PREEMPTION, REASON, PreemptionIntent, WholeStop, read_intent
from gputally.base.errors import Blocked, ClusterError, ClusterRefused, ClusterUnavailable, Conflict, NotFound
from gputally.kubernetes.objects import BUDGET, POD, Cluster, Event, Kind, Object, selects, value_at

OPT_OUT = "gputally.dev/preempt"
"""Annotation on a pod or Workload: `never` prevents gputally from preempting it."""
StopResult = Literal[
    "stopped", "would-stop", "gone", "another", "blocked", "refused", "partly", "unconfirmed", "unavailable"
]
"""The outcome for one victim.

gone: it had already ended.
another: its name now belongs to another object.
blocked: a disruption budget protects it.
refused: the API server or a webhook refuses.
partly: some of its pods were stopped and some could not be.
unconfirmed: the API server did not answer whether it is stopped. It counts as stopped.
unavailable: the API server does not answer, and nothing was stopped, or the replica lost the Lease."""
STOPPED: frozenset[StopResult] = frozenset({"stopped", "partly", "unconfirmed"})
_ORDINARY = {"Pending", "Running"}


@dataclass(frozen=True, slots=True)
class EvictionResult:
    """The result of stopping one victim.

    detail: the cluster's message if it failed.
    cause: for `partly`, the outcome of the first pod that stayed."""

    result: StopResult
    detail: str = ""
    cause: StopResult | None = None


@dataclass(frozen=True, slots=True)
class EvictionVeto:
    """Why a victim stays.

    kind: `budget` if a disruption budget protects it, `refused` if the API server or a webhook refuses, `changed` if it
        has changed since the decision or its owner has opted out."""

    kind: Literal["budget", "refused", "changed"]
    reason: str


class EvictionCheck:
    """Checks whether the cluster allows victims to be stopped, for one round of decisions.

    It reads disruption budgets once, and counts the disruptions of earlier victims in the round."""

    def __init__(self, cluster: Cluster, *, try_evictions: bool = True) -> None:
        """try_evictions: also make dry runs of the Eviction API, which need the right to evict."""
        self._cluster = cluster
        self._try_evictions = try_evictions
        self._budgets = list_if_served(cluster, BUDGET)
        self._spent: dict[tuple[str, str], int] = {}

    def refusal(self, victim: Victim) -> EvictionVeto | None:
        """Return why the cluster does not allow this victim to be stopped; None if it does.

        Raises ClusterError if the cluster does not answer."""
        stop = whole_stop(victim.gang.kind)
        if stop is not None:
            reason = self._object_change(victim, stop)
            return EvictionVeto("changed", reason) if reason is not None else None
        spent: dict[tuple[str, str], int] = {}
        for pod in victim.pods:
            try:
                obj = self._cluster.get(POD, pod.name, pod.namespace)
            except NotFound:
                return EvictionVeto("changed", f"its pod {pod.name} is gone already")
            change = _pod_change(obj, pod.uid)
            if change is not None:
                return EvictionVeto("changed", f"its pod {pod.name} {change}")
            protection = self._budget_protection(obj, spent)
            if protection is not None:
                return EvictionVeto("budget", f"its pod {pod.name} {protection}")
            if not self._try_evictions:
                continue
            try:
                self._cluster.evict(pod.name, pod.namespace, pod.uid, dry_run=True)
            except (Blocked, ClusterRefused, Conflict, NotFound) as error:
                kind: Literal["budget", "refused", "changed"] = "changed"
                if isinstance(error, Blocked | ClusterRefused):
                    kind = "budget" if isinstance(error, Blocked) else "refused"
                return EvictionVeto(kind, f"its pod {pod.name} may not be evicted now: {error}")
        for budget, count in spent.items():
            self._spent[budget] = self._spent.get(budget, 0) + count
        return None

    def _object_change(self, victim: Victim, stop: WholeStop) -> str | None:
        """Return what has changed about the victim's object since the decision; None if nothing that matters."""
        gang = victim.gang
        try:
            obj = self._cluster.get(gang.kind, gang.name, gang.namespace)
        except NotFound:
            return "it is gone already"
        if obj["metadata"].get("uid", "") != gang.uid:
            return "its name now belongs to another object"
        annotations = obj["metadata"].get("annotations") or {}
        if annotations.get(OPT_OUT) == "never":
            return "its owner has opted out of preemption"
        return stop.ended(obj)

    def _budget_protection(self, pod: Object, spent: dict[tuple[str, str], int]) -> str | None:
        """Return which disruption budget protects the pod; None if none does.

        spent: the disruptions of this victim by budget, to which that of the pod is added."""
        if value_at(pod, ("status", "phase")) != "Running":
            return None  # the API server ignores the budget of such a pod too
        metadata = pod["metadata"]
        for budget in self._budgets:
            if budget["metadata"].get("namespace") != metadata.get("namespace"):
                continue
            if not selects(value_at(budget, ("spec", "selector")) or {}, metadata.get("labels") or {}):
                continue
            key = (budget["metadata"].get("namespace", ""), budget["metadata"]["name"])
            allowed = value_at(budget, ("status", "disruptionsAllowed")) or 0
            spent[key] = spent.get(key, 0) + 1
            if spent[key] + self._spent.get(key, 0) > allowed:
                return f"is protected by the disruption budget {key[1]}, which allows {allowed} disruptions now"
        return None


def stop_victim(cluster: Cluster, victim: Victim, decision: str, now_ms: int) -> EvictionResult:
    """Stop one victim. decision: the id under which it is recorded."""
    stop = whole_stop(victim.gang.kind)
    if stop is not None:
        return _stop_object(cluster, victim, stop, PreemptionIntent(decision, now_ms))
    return _evict_pods(cluster, victim, decision)


def events(victim: Victim, now_ms: int, *, dry_run: bool) -> Iterator[Event]:
    """Yield events for the owner: one on the workload's object if it has one, and one on each stopped pod."""
    reason = "WouldBePreempted" if dry_run else "Preempted"
    kind: Literal["Normal", "Warning"] = "Normal" if dry_run else "Warning"
    gang = victim.gang
    if gang.kind.api_version and gang.kind != POD:
        yield Event(gang.kind, gang.name, gang.namespace, gang.uid, kind, reason, victim.reason, now_ms)
    for pod in victim.pods:
        yield Event(POD, pod.name, pod.namespace, pod.uid, kind, reason, victim.reason, now_ms)


def _stop_object(cluster: Cluster, victim: Victim, stop: WholeStop, intent: PreemptionIntent) -> EvictionResult:
    gang = victim.gang
    annotations = {PREEMPTION: intent.text(), REASON: victim.reason}
    change = {"metadata": {"uid": gang.uid, "annotations": annotations}, **stop.change()}
    try:
        cluster.patch(gang.kind, gang.name, gang.namespace, change, field_manager=FIELD_MANAGER)
    except ClusterError as error:
        result = _after_failure(error, lambda: read_intent(cluster.get(gang.kind, gang.name, gang.namespace)) == intent)
        if result.result != "stopped":
            return result
    command = stop.command(gang.name, gang.namespace, gang.uid, victim.reason)
    if command is None:
        return EvictionResult("stopped")
    try:
        cluster.create(command, field_manager=FIELD_MANAGER)
    except ClusterUnavailable as error:
        # The command may exist; if not, `unfinished_preemptions` sends another one.
        return EvictionResult("unconfirmed", str(error))
    except ClusterError as error:
        try:
            _remove_annotations(cluster, gang.kind, gang.name, gang.namespace, gang.uid)
        except ClusterError:
            return EvictionResult("unconfirmed", str(error))
        return _failed(error)
    return EvictionResult("stopped")


def _evict_pods(cluster: Cluster, victim: Victim, decision: str) -> EvictionResult:
    """Evict every pod. If an eviction fails before any pod has gone, no further pod is evicted, so no work is lost."""
    gone, faults = 0, []
    for pod in victim.pods:
        result = _evict_pod(cluster, pod, {PREEMPTION: decision, REASON: victim.reason})
        if result.result == "stopped":
            gone += 1
        elif result.result != "gone":
            faults.append(result)
            if not gone:
                return result
    if faults:
        return EvictionResult(
            "partly", f"{gone} of {len(victim.pods)} pods have gone: {faults[0].detail}", faults[0].result
        )
    return EvictionResult("stopped") if gone else EvictionResult("gone", "every pod had ended before")


def _evict_pod(cluster: Cluster, pod: Pod, annotations: dict[str, str]) -> EvictionResult:
    change = {"metadata": {"uid": pod.uid, "annotations": annotations}}
    try:
        cluster.patch(POD, pod.name, pod.namespace, change, field_manager=FIELD_MANAGER)
        cluster.evict(pod.name, pod.namespace, pod.uid)
    except ClusterError as error:
        result = _after_failure(error, lambda: _is_leaving(cluster, pod))
        if result.result not in ("stopped", "gone"):
            with suppress(ClusterError):  # then they stay, and mean nothing
                _remove_annotations(cluster, POD, pod.name, pod.namespace, pod.uid)
        return result
    return EvictionResult("stopped")


def _is_leaving(cluster: Cluster, pod: Pod) -> bool:
    metadata = cluster.get(POD, pod.name, pod.namespace)["metadata"]
    return metadata.get("uid", "") != pod.uid or metadata.get("deletionTimestamp") is not None


def _after_failure(error: ClusterError, carried_out: Callable[[], bool]) -> EvictionResult:
    """Return the result of a request that failed.

    carried_out: returns whether the object shows that the request was carried out. Raises ClusterError."""
    if not isinstance(error, ClusterUnavailable):
        return _failed(error)
    try:
        return EvictionResult("stopped") if carried_out() else _failed(error)
    except NotFound:
        return EvictionResult("stopped")
    except ClusterError:
        return EvictionResult("unconfirmed", str(error))


def _remove_annotations(cluster: Cluster, kind: Kind, name: str, namespace: str, uid: str) -> None:
    change = {"metadata": {"uid": uid, "annotations": {PREEMPTION: None, REASON: None}}}
    cluster.patch(kind, name, namespace, change, field_manager=FIELD_MANAGER)


def _pod_change(pod: Object, uid: str) -> str | None:
    """Return what has changed about a pod since the decision; None if nothing that matters."""
    metadata = pod["metadata"]
    if metadata.get("uid", "") != uid:
        return "is now another pod of this name"
    if metadata.get("deletionTimestamp"):
        return "is stopping already"
    if (value_at(pod, ("status", "phase")) or "Pending") not in _ORDINARY:
        return "has ended already"
    if (metadata.get("annotations") or {}).get(OPT_OUT) == "never":
        return "was opted out of preemption by its owner"
    return None


def _failed(error: ClusterError) -> EvictionResult:
    results: Sequence[tuple[type[ClusterError], StopResult]] = (
        (NotFound, "gone"),
        (Conflict, "another"),
        (Blocked, "blocked"),
        (ClusterRefused, "refused"),
    )
    return EvictionResult(next((done for kind, done in results if isinstance(error, kind)), "unavailable"), str(error))
