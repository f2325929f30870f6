"""Explains pods that wait although GPUs are free: taints and scheduler events.

From Kubernetes 1.34.2 the scheduler's message no longer names the taint (kubernetes/kubernetes#134740), so this module
derives it. Taints and tolerations: kubernetes.io, "Taints and Tolerations". For a pod with required node affinity, only
its event is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from fairshare.core.pods import millis, read_pod
from gputally.doctor.findings import CheckResult, Finding, first_findings, joined_names
from gputally.kubernetes.objects import CLOSING_TAINTS, Object, gpus, node_up, value_at

WAITS_MS = 5 * 60_000
"""A pod that has waited for less time is not reported."""
_CLOSING = ("NoSchedule", "NoExecute")
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Waiting:
    """A pod that requests GPUs and has no node.

    asks: GPUs.
    since_ms: its creation."""

    namespace: str
    name: str
    asks: float
    since_ms: int
    spec: Mapping[str, Any]
    uid: str

    @property
    def label(self) -> str:
        return f"{self.namespace}/{self.name}"


def placement(nodes: Sequence[Object], pods: Sequence[Object], events: Sequence[Object], now_ms: int) -> CheckResult:
    """Report each taint that blocks pods, and each pod that waits for another reason that its event names."""
    free = free_gpus(nodes, pods)
    waiting = [one for one in _waiting(pods) if now_ms - one.since_ms >= WAITS_MS]
    told = messages(events)
    by_taint: dict[tuple[str, str, str], list[tuple[Waiting, list[str]]]] = {}
    others: list[Finding] = []
    for one in waiting:
        blocking = _blocking(one, nodes, free)
        for taint, names in blocking.items():
            by_taint.setdefault(taint, []).append((one, names))
        if not blocking:
            others.append(_other(one, told.get(one.uid, ""), free, now_ms))
    found = [_tainted(taint, cases, free, told) for taint, cases in sorted(by_taint.items())]
    total = fsum(gpus(value_at(node, ("status", "allocatable"))) for node in nodes if node_up(node))
    seen = f"{len(waiting)} pods wait; {fsum(free.values()):g} of {total:g} GPUs are free"
    return CheckResult(seen, (*first_findings(found, "taints that block"), *first_findings(others, "pods that wait")))


def free_gpus(nodes: Sequence[Object], pods: Sequence[Object]) -> dict[str, float]:
    """Return the free GPUs of each node that is up: its allocatable GPUs less the requests of its pods."""
    free = {
        node["metadata"]["name"]: gpus(value_at(node, ("status", "allocatable"))) for node in nodes if node_up(node)
    }
    for obj in pods:
        pod = read_pod(obj)
        if pod is not None and pod.node in free:
            free[pod.node] -= pod.gpus
    return {name: count for name, count in free.items() if count > _EPSILON}


def messages(events: Iterable[Object]) -> dict[str, str]:
    """Return the newest FailedScheduling message by pod uid, from events.k8s.io or core events."""
    newest: dict[str, tuple[int, str]] = {}
    for event in events:
        regarding = event.get("regarding") or event.get("involvedObject") or {}
        if event.get("reason") != "FailedScheduling":
            continue
        at = max(
            millis(text) or 0
            for text in (
                value_at(event, ("series", "lastObservedTime")), event.get("eventTime"),
                event.get("deprecatedLastTimestamp"), event.get("lastTimestamp"),
            )
        )  # fmt: skip
        note = str(event.get("note") or event.get("message") or "")
        uid = regarding.get("uid", "")
        if note and (uid not in newest or at >= newest[uid][0]):
            newest[uid] = (at, note)
    return {uid: note for uid, (_, note) in newest.items()}


def tolerates(tolerations: Iterable[Mapping[str, Any]], taint: Mapping[str, Any]) -> bool:
    """Return whether a toleration matches the taint. A missing effect matches every effect, and `Exists` without a key
    every key."""
    for each in tolerations:
        if each.get("effect") and each["effect"] != taint.get("effect"):
            continue
        exists = each.get("operator", "Equal") == "Exists"
        if not each.get("key"):
            if exists:
                return True
        elif each["key"] == taint.get("key") and (exists or (each.get("value") or "") == (taint.get("value") or "")):
            return True
    return False


def _waiting(pods: Iterable[Object]) -> Iterator[Waiting]:
    for obj in pods:
        pod = read_pod(obj)
        if pod is None or pod.node or pod.gated or obj["metadata"].get("deletionTimestamp"):
            continue
        yield Waiting(pod.namespace, pod.name, pod.gpus, pod.created_ms or 0, obj.get("spec") or {}, pod.uid)


def _blocking(
    one: Waiting, nodes: Sequence[Object], free: Mapping[str, float]
) -> dict[tuple[str, str, str], list[str]]:
    """Return the taints that alone keep the pod from nodes with free GPUs, with these nodes; empty if a node would
    accept the pod."""
    if value_at(one.spec, ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")):
        return {}
    selector = one.spec.get("nodeSelector") or {}
    blocking: dict[tuple[str, str, str], list[str]] = {}
    for node in nodes:
        name = node["metadata"]["name"]
        labels = node["metadata"].get("labels") or {}
        if free.get(name, 0.0) + _EPSILON < one.asks or any(labels.get(k) != v for k, v in selector.items()):
            continue
        against = [
            taint
            for taint in value_at(node, ("spec", "taints")) or ()
            if taint.get("effect") in _CLOSING
            and taint.get("key") not in CLOSING_TAINTS
            and not tolerates(one.spec.get("tolerations") or (), taint)
        ]
        if not against:
            return {}
        for taint in against:
            key = (taint["key"], taint.get("value") or "", taint["effect"])
            blocking.setdefault(key, []).append(name)
    return blocking


def _tainted(
    taint: tuple[str, str, str],
    cases: Sequence[tuple[Waiting, Sequence[str]]],
    free: Mapping[str, float],
    told: Mapping[str, str],
) -> Finding:
    key, value, effect = taint
    nodes = sorted({name for _, names in cases for name in names})
    shown = f"{key}={value}:{effect}" if value else f"{key}:{effect}"
    operator = f"operator: Equal, value: {value}" if value else "operator: Exists"
    note = next((told[one.uid] for one, _ in cases if one.uid in told), "")
    return Finding(
        "error",
        f"taint {shown} keeps {len(cases)} pods from free GPUs: {joined_names(one.label for one, _ in cases)}",
        f"{fsum(free[name] for name in nodes):g} GPUs free on {joined_names(nodes)}; "
        f"asked for: {fsum(one.asks for one, _ in cases):g}" + (f'; the scheduler: "{_short(note)}"' if note else ""),
        f"kubectl taint nodes {' '.join(nodes[:4])} {key}:{effect}-   # or tolerate it: "
        f"{{key: {key}, {operator}, effect: {effect}}}",
    )


def _other(one: Waiting, note: str, free: Mapping[str, float], now_ms: int) -> Finding:
    hours = (now_ms - one.since_ms) / 3_600_000
    room = max(free.values(), default=0.0)
    fits = room + _EPSILON >= one.asks
    if fits:
        what = f"{one.label} waits although a node has room for its {one.asks:g} GPUs"
    elif fsum(free.values()) + _EPSILON >= one.asks:
        what = f"{one.label} waits: {one.asks:g} GPUs are free, but not on one node"
    else:
        what = f"{one.label} waits: {one.asks:g} GPUs are not free"
    said = (
        f'the scheduler: "{_short(note)}"' if note else "no FailedScheduling event: its scheduler has not looked at it"
    )
    evidence = f"for {hours:.1f} h; most free on one node {room:g}; {said}"
    remedy = (
        f"kubectl -n {one.namespace} describe pod {one.name}"
        if fits or not note
        else f"gputally fairshare explain {one.label}"
    )
    return Finding("error" if fits else "warning", what, evidence, remedy)


def _short(note: str, most_chars: int = 240) -> str:
    text = " ".join(note.split())
    return text if len(text) <= most_chars else f"{text[: most_chars - 1]}…"
