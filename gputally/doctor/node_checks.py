"""Checks the driver and the processes of this machine, and whether every GPU node has a running agent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from agent.core.readings import Allocation, DeviceReading, NodeSnapshot, Unavailable
from agent.holders.installed import job_ending
from agent.wire import JOB
from gputally.base.near_names import joined_names
from gputally.doctor.findings import CannotCheck, CheckResult, Finding, first_findings
from gputally.kubernetes.objects import Kind, Object, gpus_of_node, value_at

_FOREIGN = ("process", "container", JOB)
_READINGS = ("busy_us", "energy_uj", "memory_used_mib")
_REFUSED = "no permission"
_RESET = "nvidia-smi -r, or drain and reboot the node"


@dataclass(frozen=True, slots=True)
class MachineGpus:
    """The GPUs of this machine and their holders.

    counted: the number of GPUs that the driver counts, including lost ones that cannot be opened.
    failure: why the driver does not answer; "" if it does.
    remedy: what to do about that, or, if the driver answers, about a driver that shows no GPU; "" if that is not known.
    agents_pod: True if the doctor runs in the container of an agent. Then the node must have GPUs."""

    snapshot: NodeSnapshot
    counted: int
    failure: str = ""
    remedy: str = ""
    agents_pod: bool = False


def driver(machine: MachineGpus) -> CheckResult:
    """Find GPUs that are lost or cannot be opened, and readings that are missing. Raises CannotCheck if no driver
    answers."""
    snapshot, failure = machine.snapshot, machine.failure
    if failure and not snapshot.devices and not machine.counted:
        if machine.agents_pod:
            what = "the agent sees no GPU: no NVIDIA driver answers in its container"
            return CheckResult("", (Finding("error", what, failure, machine.remedy or "see nvidia-smi on the node"),))
        raise CannotCheck(f"no NVIDIA driver answers on this machine ({failure}); run the check on a GPU node")
    if machine.agents_pod and not snapshot.devices and not machine.counted:
        what, remedy = "the driver answers and shows no GPU", machine.remedy or "see nvidia-smi on the node"
        return CheckResult("0 GPUs", (Finding("error", what, "0 GPUs", remedy),))
    devices = snapshot.devices
    findings = [
        Finding("error", f"GPU {device.gpu.index} ({device.gpu.model}) is lost", device.gpu.uuid, _RESET)
        for device in devices
        if device.health == "lost"
    ]
    if missing := machine.counted - len(devices):
        evidence = f"{machine.counted} counted, {len(devices)} opened"
        findings.append(Finding("error", f"the driver does not open {missing} of its GPUs", evidence, _RESET))
    healthy = [device for device in devices if device.health != "lost"]
    for name in _READINGS:
        findings += _missing_reading(name, healthy)
    models = sorted({device.gpu.model for device in devices})
    version = next((device.gpu.driver_version for device in devices if device.gpu.driver_version), "unknown")
    return CheckResult(f"driver {version}, {len(devices)} GPUs: {joined_names(models)}", tuple(findings), len(devices))


def _missing_reading(name: str, devices: Sequence[DeviceReading]) -> Iterable[Finding]:
    reasons: dict[str, list[str]] = {}
    for device in devices:
        value = getattr(device, name)
        # The driver has no busy time for a whole GPU that MIG divides.
        if isinstance(value, Unavailable) and not device.instances:
            reasons.setdefault(value.reason, []).append(str(device.gpu.index))
    for reason, indices in reasons.items():
        remedy = (
            "run the agent at privilege process (docs/agent.md)"
            if reason.startswith(_REFUSED)
            else "none is needed if the GPU has no such counter: the ledger books the time as unknown, never as idle"
        )
        text = f"{name} cannot be read: {reason}"
        yield Finding("warning", text, f"GPU {joined_names(indices, 8)}", remedy)


def foreign_processes(snapshot: NodeSnapshot) -> CheckResult:
    """Find processes that hold a GPU of a Kubernetes node and belong to no pod. Raises CannotCheck if the processes
    cannot be read."""
    if isinstance(snapshot.allocations, Unavailable):
        raise CannotCheck(f"the processes on the GPUs cannot be read: {snapshot.allocations.reason}")
    devices = {device.gpu.uuid: device for device in snapshot.devices}
    foreign = [each for each in snapshot.allocations if each.holder.kind in _FOREIGN]
    inside = len(snapshot.allocations) - len(foreign)
    found = first_findings(
        (_foreign_holder(each, devices) for each in foreign if each.gpu_uuid in devices), "holders outside Kubernetes"
    )
    return CheckResult(f"{len(snapshot.allocations)} holders, {inside} of them pods", found, len(devices))


def _foreign_holder(allocation: Allocation, devices: dict[str, DeviceReading]) -> Finding:
    holder, device = allocation.holder, devices[allocation.gpu_uuid]
    reading = next((r.memory_mib for r in device.holders if r.holder.uid == holder.uid), None)
    memory = f", {reading / 1024:,.1f} GiB" if isinstance(reading, int) else ""
    pid = holder.uid.partition(":")[0]
    remedy = {
        "process": f"kill {pid}, or run it as a pod",
        "container": f"{holder.namespace or 'docker'} stop {holder.name}, or run it as a pod",
        JOB: f"{job_ending(holder.uid)}, or keep the node out of one of the two schedulers",
    }[holder.kind]
    user = f" of {holder.namespace}" if holder.kind == "process" and holder.namespace else ""
    return Finding(
        "warning",
        f"{holder.kind} {holder.name or holder.uid}{user} holds GPU {device.gpu.index} outside Kubernetes",
        f"{device.gpu.uuid}{memory}; Kubernetes counts the GPU as free",
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
"""(word, remedy) for messages of the API server and the kubelet that contain the word."""


def is_of_agents(obj: Object) -> bool:
    """Return True for a DaemonSet or a pod of gputally's agents."""
    labels = obj["metadata"].get("labels") or {}
    return bool(
        labels.get("app.kubernetes.io/component") == "agent" and labels.get("app.kubernetes.io/part-of") == "gputally"
    )


def agents(
    sets: Sequence[Object], pods: Sequence[Object], nodes: Sequence[Object], events: Sequence[Object]
) -> CheckResult:
    """Check whether every node with GPUs has an agent, and whether the agents run.

    sets, pods: the agents' DaemonSets and pods.
    nodes: all nodes.
    events: the events of failed creations of pods.

    Raises CannotCheck if there is no DaemonSet of agents."""
    if not sets:
        raise CannotCheck("there is no DaemonSet of agents: install them with the chart (agent.enabled: true)")
    with_gpus = {node["metadata"]["name"] for node in nodes if gpus_of_node(node)}
    placed = {value_at(pod, ("spec", "nodeName")) for pod in pods}
    missing = sorted(with_gpus - placed)
    found = [*_not_created(sets, events), *_not_started(pods)]
    if missing and not any(finding.severity == "error" for finding in found):
        evidence = f"{len(missing)} of {len(with_gpus)} nodes with GPUs: {joined_names(missing)}"
        found.append(Finding("error", "nodes that offer GPUs have no agent: their time is unmetered", evidence, _LABEL))
    wanted = sum(int(value_at(obj, ("status", "desiredNumberScheduled")) or 0) for obj in sets)
    if not wanted and not missing:
        what, evidence = "no node has an agent", "0 nodes are selected, and none offers nvidia.com/gpu"
        found.append(Finding("warning", what, evidence, f"install the device plugin, then {_LABEL}"))
    ready = sum(int(value_at(obj, ("status", "numberReady")) or 0) for obj in sets)
    seen = f"{ready} of {wanted} agents ready, {len(with_gpus)} nodes offer GPUs"
    return CheckResult(seen, first_findings(found, "agents"), wanted + len(with_gpus))


def _not_created(sets: Sequence[Object], events: Iterable[Object]) -> Iterator[Finding]:
    """Yield a finding for each DaemonSet whose pods the API server refuses to create, with its newest event."""
    newest = {
        (value_at(e, ("regarding", "namespace")), value_at(e, ("regarding", "name"))): str(e.get("note") or "")
        for e in sorted(events, key=lambda e: str(e.get("eventTime") or e.get("deprecatedLastTimestamp") or ""))
        if value_at(e, ("regarding", "kind")) == "DaemonSet"
    }
    for obj in sets:
        meta, status = obj["metadata"], obj.get("status") or {}
        wanted, created = (int(status.get(key) or 0) for key in ("desiredNumberScheduled", "currentNumberScheduled"))
        note = newest.get((meta.get("namespace"), meta["name"]), "")
        if wanted > created and note:
            missing = f"{wanted - created} of {wanted} agents"
            what = f"DaemonSet {meta.get('namespace')}/{meta['name']} cannot create {missing}"
            yield Finding("error", what, note, _remedy(note))


def _not_started(pods: Iterable[Object]) -> Iterator[Finding]:
    """Yield a finding for each agent whose container does not start, with the kubelet's reason."""
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


def _remedy(message: str, default: str = "fix the cause that the message names") -> str:
    return next((remedy for word, remedy in _REMEDIES if word in message), default)
