"""Checks whether every GPU node of the cluster has a running agent, and why one has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gputally.doctor.findings import CannotCheck, CheckResult, Finding, first_findings, joined_names
from gputally.kubernetes.objects import Kind, Object, gpus, look

DAEMON_SET = Kind("apps/v1", "DaemonSet", "daemonsets", namespaced=True)
_LABEL = "kubectl label node NODE nvidia.com/gpu.present=true, or select the nodes in agent.nodeSelector"
_REMEDIES = (
    ("RuntimeClass", "set agent.runtimeClassName to one of `kubectl get runtimeclass`, or to an empty text"),
    (
        "violates PodSecurity",
        "give the agents a namespace of their own: agent.namespace.name and agent.namespace.create",
    ),
    ("PriorityClass", "set agent.resourceQuota: true, which allows the priority class in the namespace"),
    ("ImagePull", "set image.registry to the registry that holds the images, and imagePullSecrets"),
    ("ErrImage", "set image.registry to the registry that holds the images, and imagePullSecrets"),
    ("path", "set the host path of the message to the folder that the node has (agent.podResourcesHostPath)"),
)
"""What to do, by a word of the cluster's own message."""


def ours(obj: Object) -> bool:
    """Whether an object is a DaemonSet or a pod of agents."""
    labels = obj["metadata"].get("labels") or {}
    return bool(
        labels.get("app.kubernetes.io/component") == "agent" and labels.get("app.kubernetes.io/part-of") == "gputally"
    )


def agents(
    sets: Sequence[Object], pods: Sequence[Object], nodes: Sequence[Object], events: Sequence[Object]
) -> CheckResult:
    """sets, pods: of agents alone. events: of DaemonSets that could not make a pod. Raises CannotCheck where none is
    installed."""
    if not sets:
        raise CannotCheck("no DaemonSet of agents: none is installed, or its part-of label is another")
    with_gpus = {node["metadata"]["name"] for node in nodes if gpus(look(node, ("status", "allocatable")))}
    placed = {look(pod, ("spec", "nodeName")) for pod in pods}
    missing = sorted(with_gpus - placed)
    found = [*_not_made(sets, events), *_not_ready(pods)]
    if missing and not any(finding.severity == "error" for finding in found):
        evidence = f"{len(missing)} of {len(with_gpus)} nodes with GPUs: {joined_names(missing)}"
        found.append(Finding("error", "nodes that offer GPUs have no agent: their time is unmetered", evidence, _LABEL))
    wanted = sum(int(look(one, ("status", "desiredNumberScheduled")) or 0) for one in sets)
    if not wanted and not missing:
        what, evidence = "no node gets an agent", "0 nodes are selected, and none offers nvidia.com/gpu"
        found.append(Finding("warning", what, evidence, f"install the device plugin, then {_LABEL}"))
    ready = sum(int(look(one, ("status", "numberReady")) or 0) for one in sets)
    seen = f"{ready} of {wanted} agents ready, {len(with_gpus)} nodes offer GPUs"
    return CheckResult(seen, first_findings(found, "agents"))


def _not_made(sets: Sequence[Object], events: Iterable[Object]) -> Iterator[Finding]:
    """DaemonSets whose pods the API server refuses, each by its newest event."""
    newest = {
        (look(e, ("regarding", "namespace")), look(e, ("regarding", "name"))): str(e.get("note") or "")
        for e in sorted(events, key=lambda e: str(e.get("eventTime") or e.get("deprecatedLastTimestamp") or ""))
        if look(e, ("regarding", "kind")) == "DaemonSet"
    }
    for one in sets:
        meta, status = one["metadata"], one.get("status") or {}
        wanted, made = (int(status.get(key) or 0) for key in ("desiredNumberScheduled", "currentNumberScheduled"))
        note = newest.get((meta.get("namespace"), meta["name"]), "")
        if wanted > made and note:
            what = f"DaemonSet {meta.get('namespace')}/{meta['name']} cannot make {wanted - made} of {wanted} agents"
            yield Finding("error", what, note, _remedy(note))


def _not_ready(pods: Iterable[Object]) -> Iterator[Finding]:
    """Agents whose container does not start, with the kubelet's reason."""
    for pod in pods:
        for status in look(pod, ("status", "containerStatuses")) or ():
            waiting = (status.get("state") or {}).get("waiting") or {}
            reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
            if reason and reason not in ("ContainerCreating", "PodInitializing"):
                meta = pod["metadata"]
                what = f"agent {meta.get('namespace')}/{meta['name']} does not start: {reason}"
                logs = f"kubectl -n {meta.get('namespace')} logs {meta['name']} --previous"
                known = _remedy(f"{reason} {message}", logs)
                yield Finding("error", what, message or "the kubelet gives no message", known)


def _remedy(message: str, otherwise: str = "mend what the message names") -> str:
    return next((what for word, what in _REMEDIES if word in message), otherwise)
