"""Checks the driver and the processes of this machine, and whether every GPU node has a running agent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from agent.core.readings import Allocation, DeviceReading, Snapshot, Unavailable
from agent.devices.nvml_library import NO_GPUS_REMEDY, remedy
from gputally.doctor.findings import CannotCheck, CheckResult, Finding, first_findings, joined_names
from gputally.kubernetes.objects import Kind, Object, gpus, value_at

_FOREIGN = ("process", "container", "slurm")
_READINGS = ("busy_us", "energy_uj", "memory_used_mib")
_REFUSED = "no permission"
_RESET = "nvidia-smi -r, or drain and reboot the node"


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine.

    counted: the number of GPUs that the driver reports; a GPU that was lost earlier is counted and not opened.
    agents_pod: this is the container of an agent, so the node has GPUs."""

    snapshot: Snapshot
    counted: int
    agents_pod: bool = False


def driver(machine: Machine) -> CheckResult:
    """Check for GPUs that do not answer, and for missing readings that usage depends on. Raises CannotCheck if there is
    no driver."""
    snapshot = machine.snapshot
    failure = dict(snapshot.sources).get("nvml", "")
    if failure and not snapshot.devices and not machine.counted:
        if machine.agents_pod:
            what = "the agent sees no GPU: no NVIDIA driver answers in its container"
            return CheckResult("", (Finding("error", what, failure, remedy(failure) or "see nvidia-smi on the node"),))
        raise CannotCheck(f"no NVIDIA driver answers on this machine ({failure}); run the check on a GPU node")
    if machine.agents_pod and not snapshot.devices and not machine.counted:
        return CheckResult(
            "0 GPUs", (Finding("error", "the driver answers and shows no GPU", "0 GPUs", NO_GPUS_REMEDY),)
        )
    devices = snapshot.devices
    findings = [
        Finding(
            "error",
            f"GPU {one.gpu.index} ({one.gpu.model}) is lost",
            one.gpu.uuid,
            _RESET,
        )
        for one in devices
        if one.health == "lost"
    ]
    if missing := machine.counted - len(devices):
        evidence = f"{machine.counted} counted, {len(devices)} opened"
        findings.append(Finding("error", f"the driver does not open {missing} of its GPUs", evidence, _RESET))
    healthy = [one for one in devices if one.health != "lost"]
    for name in _READINGS:
        findings += _unread(name, healthy)
    models = sorted({one.gpu.model for one in devices})
    version = next((one.gpu.driver_version for one in devices if one.gpu.driver_version), "unknown")
    return CheckResult(f"driver {version}, {len(devices)} GPUs: {joined_names(models)}", tuple(findings))


def _unread(name: str, devices: Sequence[DeviceReading]) -> Iterable[Finding]:
    reasons: dict[str, list[str]] = {}
    for one in devices:
        value = getattr(one, name)
        # With MIG the whole device has no busy time, and a first reading has no earlier samples to compare with.
        if isinstance(value, Unavailable) and not one.instances:
            reasons.setdefault(value.reason, []).append(str(one.gpu.index))
    for reason, indices in reasons.items():
        remedy = (
            "run the agent at privilege process (docs/agent.md)"
            if reason.startswith(_REFUSED)
            else "nothing to mend where the GPU has no such counter: that time is booked as unknown, never as idle"
        )
        text = f"{name} cannot be read: {reason}"
        yield Finding("warning", text, f"GPU {joined_names(indices, 8)}", remedy)


def foreign_processes(snapshot: Snapshot) -> CheckResult:
    """Processes that hold a GPU of a Kubernetes node and belong to no pod."""
    if isinstance(snapshot.allocations, Unavailable):
        raise CannotCheck(f"processes on the GPUs cannot be seen: {snapshot.allocations.reason}")
    devices = {one.gpu.uuid: one for one in snapshot.devices}
    foreign = [each for each in snapshot.allocations if each.holder.kind in _FOREIGN]
    inside = len(snapshot.allocations) - len(foreign)
    found = first_findings(
        (_outsider(each, devices) for each in foreign if each.gpu_uuid in devices), "holders outside Kubernetes"
    )
    return CheckResult(f"{len(snapshot.allocations)} holders, {inside} of them pods", found)


def _outsider(each: Allocation, devices: dict[str, DeviceReading]) -> Finding:
    holder, device = each.holder, devices[each.gpu_uuid]
    reading = next((r.memory_mib for r in device.holders if r.holder.uid == holder.uid), None)
    memory = f", {reading:,} MiB" if isinstance(reading, int) else ""
    pid = holder.uid.partition(":")[0]
    remedy = {
        "process": f"kill {pid}, or run it as a pod",
        "container": f"{holder.namespace or 'docker'} stop {holder.name}, or run it as a pod",
        "slurm": f"scancel {holder.uid}, or keep the node out of one of the two schedulers",
    }[holder.kind]
    whose = f" of {holder.namespace}" if holder.kind == "process" and holder.namespace else ""
    return Finding(
        "warning",
        f"{holder.kind} {holder.name or holder.uid}{whose} holds GPU {device.gpu.index} outside Kubernetes",
        f"{device.gpu.uuid}{memory}; Kubernetes believes the GPU to be free",
        remedy,
    )


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
"""Remedies by a word of the cluster's own message."""


def ours(obj: Object) -> bool:
    """Return whether an object is a DaemonSet or a pod of agents."""
    labels = obj["metadata"].get("labels") or {}
    return bool(
        labels.get("app.kubernetes.io/component") == "agent" and labels.get("app.kubernetes.io/part-of") == "gputally"
    )


def agents(
    sets: Sequence[Object], pods: Sequence[Object], nodes: Sequence[Object], events: Sequence[Object]
) -> CheckResult:
    """Check the agents.

    sets, pods: only those of agents.
    events: of DaemonSets that could not create a pod.

    Raises CannotCheck if none is installed."""
    if not sets:
        raise CannotCheck("no DaemonSet of agents: none is installed, or its part-of label is another")
    with_gpus = {node["metadata"]["name"] for node in nodes if gpus(value_at(node, ("status", "allocatable")))}
    placed = {value_at(pod, ("spec", "nodeName")) for pod in pods}
    missing = sorted(with_gpus - placed)
    found = [*_not_made(sets, events), *_not_ready(pods)]
    if missing and not any(finding.severity == "error" for finding in found):
        evidence = f"{len(missing)} of {len(with_gpus)} nodes with GPUs: {joined_names(missing)}"
        found.append(Finding("error", "nodes that offer GPUs have no agent: their time is unmetered", evidence, _LABEL))
    wanted = sum(int(value_at(one, ("status", "desiredNumberScheduled")) or 0) for one in sets)
    if not wanted and not missing:
        what, evidence = "no node gets an agent", "0 nodes are selected, and none offers nvidia.com/gpu"
        found.append(Finding("warning", what, evidence, f"install the device plugin, then {_LABEL}"))
    ready = sum(int(value_at(one, ("status", "numberReady")) or 0) for one in sets)
    seen = f"{ready} of {wanted} agents ready, {len(with_gpus)} nodes offer GPUs"
    return CheckResult(seen, first_findings(found, "agents"))


def _not_made(sets: Sequence[Object], events: Iterable[Object]) -> Iterator[Finding]:
    """Find DaemonSets whose pods the API server refuses, each with its newest event."""
    newest = {
        (value_at(e, ("regarding", "namespace")), value_at(e, ("regarding", "name"))): str(e.get("note") or "")
        for e in sorted(events, key=lambda e: str(e.get("eventTime") or e.get("deprecatedLastTimestamp") or ""))
        if value_at(e, ("regarding", "kind")) == "DaemonSet"
    }
    for one in sets:
        meta, status = one["metadata"], one.get("status") or {}
        wanted, made = (int(status.get(key) or 0) for key in ("desiredNumberScheduled", "currentNumberScheduled"))
        note = newest.get((meta.get("namespace"), meta["name"]), "")
        if wanted > made and note:
            what = f"DaemonSet {meta.get('namespace')}/{meta['name']} cannot make {wanted - made} of {wanted} agents"
            yield Finding("error", what, note, _remedy(note))


def _not_ready(pods: Iterable[Object]) -> Iterator[Finding]:
    """Find agents whose container does not start, with the kubelet's reason."""
    for pod in pods:
        for status in value_at(pod, ("status", "containerStatuses")) or ():
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
