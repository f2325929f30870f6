"""Checks the schedulers: served API versions, published weights, conflicts, quotas that the cluster can never satisfy,
and pods that wait although GPUs are free.

The controller's adapters (`fairshare.schedulers`) read the schedulers' objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from types import MappingProxyType
from typing import Any

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.controller.policy_file import advice
from fairshare.core.gpu_demand import millis, read_member, read_pod, sized
from fairshare.core.gpu_models import model_of_labels, policy_of_part, units
from fairshare.core.queues_and_weights import UNLIMITED, Condition, Gang, Issue, Pod, PolicyTree
from fairshare.core.scheduler_queue_objects import has_ref
from fairshare.laws.gang_turns import gang_reach
from fairshare.targets.guard import MOST_CALLS_S, PluginFault
from fairshare.targets.installed import adapters, with_workloads
from fairshare.targets.status_config_map import StatusObject, conditions
from fairshare.targets.weight_plan import Adapter, look_at
from gputally.base.background_tasks import error_summary
from gputally.base.errors import ClusterError, NotFound
from gputally.base.gpu_model_names import gpu_model_of_node
from gputally.base.near_names import joined_names
from gputally.base.plugins import within
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE
from gputally.doctor.check_inputs import ClusterView
from gputally.doctor.findings import CheckResult, Finding, Severity, first_findings
from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import (
    CLOSING_TAINTS,
    CONFIG_MAP,
    Object,
    gpus_of_node,
    gpus_of_nodes,
    node_up,
    value_at,
)
from gputally.kubernetes.scheduler_plugins import OwnQueue, SchedulerPlugin, schedulers

_ABOUT: Mapping[tuple[str, str], tuple[Severity, str]] = {
    ("Effective", "False"): ("error", "weights published to {target} have no effect"),
    ("Effective", "Unknown"): ("warning", "it is unknown whether weights published to {target} have an effect"),
    ("Readable", "False"): ("warning", "some objects of {target} cannot be read"),
    ("InSync", "False"): ("warning", "{target} is not set up as the policy says"),
    ("InSync", "Unknown"): ("warning", "it is unknown whether {target} is set up as the policy says"),
}
"""Severity and text of the findings for conditions, by type and status."""


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The state of one scheduler.

    versions: the versions of its kinds that the API server serves, by (group, plural).
    mode: off, dry-run or enforce.
    conditions, issues: the findings of the scheduler's adapter; empty if the policy does not refer to the scheduler.
    fault: why the scheduler's objects cannot be read; "" if they can."""

    name: str
    versions: Mapping[tuple[str, str], Sequence[str]]
    mode: str = "off"
    conditions: Sequence[Condition] = ()
    issues: Sequence[Issue] = ()
    fault: str = ""


def queues_of(policy: Policy | None, scheduler: str) -> list[QueuePolicy]:
    """Return the queues of the policy that refer to the scheduler."""
    queues = policy.queues if policy is not None else ()
    return [queue for queue in queues if scheduler in schedulers_of(queue)]


def schedulers_of(queue: QueuePolicy) -> list[str]:
    """Return the names of the schedulers to which a queue refers, each once."""
    names = {prefix: adapter.name for adapter in adapters() for prefix in adapter.prefixes}
    prefixes = (ref.partition(":")[0] for ref in queue.refs)
    return list(dict.fromkeys(names.get(prefix, prefix) for prefix in prefixes))


def weights(
    policy: Policy | None, targets: Sequence[SchedulerState], recorded: Sequence[tuple[str, Condition]] = ()
) -> CheckResult:
    """Check whether every scheduler in the policy is installed in a supported version and reads the weights.

    recorded: (target, condition) of each condition in the controller's status ConfigMap."""
    findings = [each for target in targets for each in _of_target(policy, target)]
    findings += extender(policy, recorded)
    installed_targets = [f"{target.name} ({target.mode})" for target in targets if _queue_versions(target)]
    examined = len(installed_targets)
    if policy is None:
        installed_targets.append("no policy in force")
    return CheckResult(
        ", ".join(installed_targets) or "no scheduler with queues is installed", tuple(findings), examined
    )


def _queue_versions(target: SchedulerState) -> Sequence[str]:
    """Return the served versions of the scheduler's queues; empty if the scheduler is not installed."""
    kind = schedulers()[target.name].kinds[0][0]
    return target.versions.get((kind.api_version.partition("/")[0], kind.plural), ())


def _of_target(policy: Policy | None, target: SchedulerState) -> Iterator[Finding]:
    queues = queues_of(policy, target.name)
    if not queues:
        return
    names = joined_names(queue.name for queue in queues)
    if not _queue_versions(target):
        kind = schedulers()[target.name].kinds[0][0]
        text = f"the policy publishes to {target.name}, which is not installed: no {kind.kind} is served"
        yield Finding(
            "error", text, f"{len(queues)} queues refer to it: {names}", f"kubectl get crd | grep {kind.plural}"
        )
        return
    for versions in schedulers()[target.name].kinds:
        group, plural = versions[0].api_version.partition("/")[0], versions[0].plural
        served = target.versions.get((group, plural), ())
        known = [kind.api_version.partition("/")[2] for kind in versions]
        if served and not set(served) & set(known):
            text = f"{target.name} serves {plural}.{group} in no version that gputally knows"
            yield Finding(
                "error",
                text,
                f"served: {', '.join(served)}; known: {', '.join(known)}",
                "upgrade gputally, or its CRDs",
            )
    if target.fault:
        yield Finding("error", f"{target.name} cannot be read", target.fault, "gputally doctor --only permissions")
    yield from _of_conditions(target.name, target.conditions)
    issues = (
        Finding(
            "warning",
            f"queue {issue.subject} has no object at {target.name}",
            issue.reason,
            "correct its refs in the policy",
        )
        for issue in target.issues
    )
    yield from first_findings(issues, "queues without an object")


def _of_conditions(target: str, conditions: Iterable[Condition]) -> Iterator[Finding]:
    """Yield a finding for each condition that is in `_ABOUT`, with its own remedy or the cure of its reason."""
    of_target = (each for adapter in adapters() if adapter.name == target for each in adapter.reasons)
    cures = {(each.type, each.status, each.reason): each.cure for each in of_target}
    for condition in conditions:
        about = _ABOUT.get((condition.type, condition.status))
        if about is not None:
            severity, text = about
            remedy = condition.remedy or cures.get(
                (condition.type, condition.status, condition.reason),
                "gputally fairshare plan --policy FILE shows what the controller would do",
            )
            what = f"{text.format(target=target)} ({condition.reason})"
            yield Finding(severity, what, condition.message, remedy)


def extender(policy: Policy | None, conditions: Sequence[tuple[str, Condition]]) -> Iterator[Finding]:
    """Check whether a scheduler calls the extender, if the policy refers to it.

    conditions: (target, condition) of each condition in the controller's status ConfigMap."""
    for adapter in adapters():
        if adapter.extender is None or not queues_of(policy, adapter.name):
            continue
        effective = [each for target, each in conditions if target == adapter.name and each.type == "Effective"]
        for finding in _of_conditions(adapter.name, effective):
            yield replace(finding, remedy=adapter.extender.remedy)


def conflicts(policy: Policy | None, objects: Sequence[OwnQueue], pods: Sequence[tuple[Pod, str]]) -> CheckResult:
    """Find nodes and queues that several schedulers manage.

    objects: the schedulers' own queues.
    pods: the pods that request GPUs, each with its scheduler."""
    findings = [*_twice(policy), *_same_names(policy, objects), *_shared_nodes(pods)]
    count = len({each.scheduler for each in objects})
    queues = len(policy.queues) if policy is not None else 0
    return CheckResult(
        f"{len(objects)} queues of {count} schedulers, {queues} in the policy",
        tuple(findings),
        len(objects) + queues + len(pods),
    )


def _twice(policy: Policy | None) -> Iterator[Finding]:
    """Yield a finding for each queue and team at several schedulers, each of which ignores the GPUs that the others
    allocate."""
    by_team: dict[str, dict[str, list[QueuePolicy]]] = {}
    for queue in policy.queues if policy is not None else ():
        several = schedulers_of(queue)
        if len(several) > 1:
            deserved = "unlimited" if queue.deserved == UNLIMITED else f"{queue.deserved:g}"
            yield Finding(
                "warning",
                f"queue {queue.name} is a queue of {' and '.join(several)}: each allocates the whole quota",
                f"{deserved} GPUs deserved, promised {len(several)} times; refs {', '.join(queue.refs)}",
                "define one queue per scheduler in the policy, each with a part of the quota",
            )
        for scheduler in several:
            by_team.setdefault(queue.team or queue.name, {}).setdefault(scheduler, []).append(queue)
    for team, places in sorted(by_team.items()):
        queues = {queue.name for several in places.values() for queue in several}
        if len(places) > 1 and len(queues) > 1:
            parts = (
                f"{scheduler}: {', '.join(queue.name for queue in several)} "
                f"({sum(max(0.0, queue.deserved) for queue in several):g} GPUs deserved)"
                for scheduler, several in sorted(places.items())
            )
            yield Finding(
                "warning",
                f"team {team} has queues at {len(places)} schedulers, and gets its share from each",
                "; ".join(parts),
                "keep a team's queues at one scheduler, or give them node pools of their own",
            )


def _same_names(policy: Policy | None, objects: Sequence[OwnQueue]) -> Iterator[Finding]:
    known = {ref for queue in (policy.queues if policy is not None else ()) for ref in queue.refs}
    places: dict[str, list[OwnQueue]] = {}
    for each in objects:
        places.setdefault(each.name, []).append(each)
    for name, several in sorted(places.items()):
        schedulers = sorted({each.scheduler for each in several})
        if len(schedulers) > 1 and not any(ref in known for each in several for ref in each.refs):
            quotas = ", ".join(
                f"{each.scheduler} {'none' if each.quota is None else f'{each.quota:g}'}" for each in several
            )
            yield Finding(
                "warning",
                f"{' and '.join(schedulers)} each have a queue {name}, which the policy does not name",
                f"GPU quotas: {quotas}",
                "name them in the refs of the policy's queues, or remove all but one",
            )


def _shared_nodes(pods: Sequence[tuple[Pod, str]]) -> Iterator[Finding]:
    nodes: dict[str, dict[str, float]] = {}
    for pod, scheduler in pods:
        if pod.held:
            here = nodes.setdefault(pod.node, {})
            here[scheduler] = here.get(scheduler, 0.0) + pod.gpus
    shared = {name: here for name, here in nodes.items() if len(here) > 1}
    if not shared:
        return
    totals: dict[str, float] = {}
    for here in shared.values():
        for scheduler, held in here.items():
            totals[scheduler] = totals.get(scheduler, 0.0) + held
    held_by = ", ".join(f"{name} {held:g} GPUs" for name, held in sorted(totals.items()))
    yield Finding(
        "warning",
        f"several schedulers place pods on {len(shared)} nodes: none reclaims GPUs that another allocated",
        f"{held_by} on {joined_names(sorted(shared))}",
        "taint the nodes of one of them, or give all GPU pods the same schedulerName",
    )


def targets(cluster: ClusterView, policy: Policy | None) -> tuple[SchedulerState, ...]:
    """Return the states of the schedulers that have objects in the cluster."""
    installed = schedulers()
    known = [(each, kinds) for each in adapters() if each.name in installed and (kinds := installed[each.name].kinds)]
    served = cluster.served({versions[0].api_version.partition("/")[0] for _, kinds in known for versions in kinds})
    return tuple(_target(adapter, cluster, policy, served) for adapter, _ in known)


def _target(
    adapter: Adapter,
    cluster: ClusterView,
    policy: Policy | None,
    served: Mapping[tuple[str, str], Sequence[str]],
) -> SchedulerState:
    name = adapter.name
    if policy is None or not queues_of(policy, name):
        return SchedulerState(name, served)
    mode = adapter.mode(policy)
    try:
        observed = look_at(adapter, policy, cluster)
    except NotFound:
        return SchedulerState(name, served, mode)
    except ClusterError as fault:
        return SchedulerState(name, served, mode, fault=str(fault))
    return SchedulerState(name, served, mode, observed.conditions, observed.issues)


def recorded_conditions(cluster: ClusterView, namespace: str) -> tuple[tuple[str, Condition], ...]:
    """Return (target, condition) of each condition in the controller's status ConfigMap; empty if the ConfigMap cannot
    be read."""
    status = StatusObject(namespace)
    try:
        return conditions(cluster.get(CONFIG_MAP, status.name, status.namespace))
    except ClusterError:
        return ()


def _defined(plugin: SchedulerPlugin, objects: Sequence[Object], parts: MigParts) -> list[OwnQueue]:
    def read() -> list[OwnQueue]:
        queues: list[Any] = [queue for obj in objects if (queue := plugin.own_queue(obj, parts)) is not None]
        for queue in queues:
            if not isinstance(queue, OwnQueue):
                raise TypeError(f"the type {type(queue).__name__} is no OwnQueue")
        return queues

    try:
        return within(MOST_CALLS_S, read)
    except Exception as error:
        raise PluginFault(f"{plugin.name}: own_queue of its plug-in: {error_summary(error)}") from error


def own_queues(cluster: ClusterView, parts: MigParts) -> list[OwnQueue]:
    """Return the queues of all installed schedulers. Raises PluginFault: without some, no sum is right."""
    found: list[OwnQueue] = []
    for plugin in schedulers().values():
        for kind in plugin.kinds[0] if plugin.kinds else ():
            try:
                objects = cluster.list(kind)
            except NotFound:
                continue
            found += _defined(plugin, objects, parts)
            break
    return found


def gangs(cluster: ClusterView, policy: Policy, pods: Sequence[Object], nodes: Sequence[Object]) -> tuple[Gang, ...]:
    """Return the gangs that request GPUs in the policy's queues. Schedulers that cannot be read are left out."""
    parts = MigParts.of(nodes)
    members: list[Pod] = [sized(pod, parts) for obj in pods if (pod := read_member(obj)) is not None]
    found: list[Gang] = []
    for adapter in adapters():
        if adapter.name not in with_workloads() or not has_ref(policy, *adapter.prefixes):
            continue
        try:
            found += look_at(adapter, policy, cluster, members, parts).gangs
        except ClusterError:
            continue  # the check `weights` reports it
    return tuple(found)


def installed(nodes: Sequence[Object]) -> float:
    """Return the number of GPUs of all nodes, in any state."""
    return fsum(map(gpus_of_node, nodes))


_CHECK = "gputally fairshare check POLICY.yaml --capacity {capacity:g}"


def of_models(policy: Policy | None, nodes: Sequence[Object]) -> Mapping[str, tuple[float, float]]:
    """Return the GPUs that are up and those that are installed of each part of a policy with quotas by GPU model; empty
    if a node with GPUs states no model."""
    models = policy.gpu_models if policy is not None else ()
    by_part: dict[str, list[Object]] = {model: [] for model in models}
    for node in nodes if models else ():
        labels = value_at(node, ("metadata", "labels")) or {}
        if gpus_of_node(node) and not gpu_model_of_node(labels):
            return {}
        by_part.setdefault(model_of_labels(labels, models), []).append(node)
    return {model: (gpus_of_nodes(own), installed(own)) for model, own in by_part.items()}


def guarantees(
    policy: Policy | None,
    capacity: float,
    installed: float,
    objects: Sequence[OwnQueue],
    gangs: Sequence[Gang],
    by_model: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> CheckResult:
    """Check whether the cluster can satisfy the quotas and the waiting gangs.

    capacity: number of GPUs on nodes that are up.
    installed: number of GPUs on all nodes.
    objects: the schedulers' own queues.
    gangs: the gangs in the policy's queues.
    by_model: as `of_models` returns it."""
    findings = [*_quotas(policy, capacity, installed, by_model), *_native(objects, installed)]
    if policy is not None:
        findings += first_findings(_gangs(policy, capacity, gangs), "workloads that can never start")
    deserved = sum(max(0.0, queue.deserved) for queue in _roots(policy))
    seen = f"{deserved:g} GPUs deserved of {capacity:g} up and {installed:g} installed"
    queues = len(policy.queues) if policy is not None else 0
    return CheckResult(seen, tuple(findings), queues + len(objects))


def _roots(policy: Policy | None) -> list[QueuePolicy]:
    return [queue for queue in policy.queues if queue.parent is None] if policy is not None else []


def _quotas(
    policy: Policy | None, capacity: float, installed: float, by_model: Mapping[str, tuple[float, float]]
) -> Iterator[Finding]:
    if policy is None:
        return
    parts = [(policy_of_part(policy, model), units(model), *gpus) for model, gpus in by_model.items()]
    for part, gpus, up, there in parts or [(policy, "GPUs", capacity, installed)]:
        roots = [queue for queue in _roots(part) if queue.deserved > 0]
        promised = fsum(queue.deserved for queue in roots)
        if promised <= up:
            continue
        text = f"deserved quotas add up to more {gpus} than are up now"
        if promised > there:
            text = f"deserved quotas add up to more {gpus} than the cluster has: it can never satisfy all of them"
        names = joined_names((f"{queue.name} {queue.deserved:g}" for queue in roots), 6)
        yield Finding(
            "error" if promised > there else "warning",
            text,
            f"{promised:g} deserved, {there:g} installed, {up:g} up: {names}",
            _CHECK.format(capacity=installed),
        )
    for each in advice(policy):
        if each.path[:1] == ("queues",) and each.path[-1] == "deserved":
            queue = policy.queues[int(each.path[1])]
            evidence = f"deserved {queue.deserved:g}, limit {_limit(queue.limit)}"
            yield Finding("warning", each.message, evidence, _CHECK.format(capacity=installed))


def _native(objects: Sequence[OwnQueue], installed: float) -> Iterator[Finding]:
    """Yield a finding for each scheduler whose own queues are guaranteed more GPUs than are installed."""
    by_scheduler: dict[str, list[OwnQueue]] = {}
    for each in objects:
        if each.quota and not each.nested:
            by_scheduler.setdefault(each.scheduler, []).append(each)
    for scheduler, queues in sorted(by_scheduler.items()):
        promised = fsum(queue.quota or 0.0 for queue in queues)
        if promised > installed:
            parts = (f"{queue.name} {queue.quota:g}" for queue in sorted(queues, key=lambda q: -(q.quota or 0)))
            yield Finding(
                "error",
                f"{scheduler}'s own queues are guaranteed more GPUs than the cluster has",
                f"{promised:g} guaranteed, {installed:g} installed: {joined_names(parts, 6)}",
                "lower the quotas of those queues to the installed GPUs",
            )


def _gangs(policy: Policy, capacity: float, gangs: Sequence[Gang]) -> Iterator[Finding]:
    tree = PolicyTree(policy)
    shares: dict[tuple[str, float], str] = {}
    for gang in sorted((each for each in gangs if each.waits > 0), key=lambda each: -each.minimum):
        name = f"{gang.namespace}/{gang.name}"
        limited = next((queue for queue in tree.upwards(gang.queue) if UNLIMITED < queue.limit < gang.minimum), None)
        if limited is not None:
            yield Finding(
                "error",
                f"{name} needs {gang.minimum:g} GPUs at once, above the limit of queue {limited.name}: it never starts",
                f"limit {limited.limit:g}; it requests {gang.requested:g}, has {gang.allocated:g}",
                f"raise the limit of {limited.name} in the policy, or make the gang smaller",
            )
        elif gang.minimum > capacity:
            yield Finding(
                "error",
                f"{name} needs {gang.minimum:g} GPUs at once, more than the cluster has up",
                f"{capacity:g} GPUs up",
                "make the gang smaller, or add nodes",
            )
        elif capacity > 0:
            key = gang.queue, gang.minimum
            if key not in shares:
                reached = gang_reach(policy, capacity, *key)
                shares[key] = "" if reached.admitted else reached.sentence()
            if shares[key]:
                yield Finding(
                    "warning",
                    f"{name} needs more GPUs than its queue {gang.queue} ever gets while other queues have demand",
                    shares[key],
                    f"{_CHECK.format(capacity=capacity)} --gang {gang.queue}={gang.minimum:.0f}",
                )


def _limit(limit: float) -> str:
    return "none" if limit == UNLIMITED else f"{limit:g}"


# From Kubernetes 1.34.2 the scheduler's message no longer names the taint that blocks a pod
# (kubernetes/kubernetes#134740), so the check `placement` derives it. Source: kubernetes.io, "Taints and Tolerations".
# For a pod with required node affinity, only its event is used.

WAITS_MS = 5 * MS_PER_MINUTE
"""Time for which a pod must have waited to be reported."""
_CLOSING = ("NoSchedule", "NoExecute")
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class WaitingPod:
    """A pod that requests GPUs and has no node.

    requested: number of GPUs.
    since_ms: time of its creation in UTC milliseconds."""

    namespace: str
    name: str
    requested: float
    since_ms: int
    spec: Mapping[str, Any]
    uid: str

    @property
    def label(self) -> str:
        return f"{self.namespace}/{self.name}"


def placement(nodes: Sequence[Object], pods: Sequence[Object], events: Sequence[Object], now_ms: int) -> CheckResult:
    """Report each taint that keeps pods from free GPUs, and each pod that waits for another reason."""
    free = free_gpus(nodes, pods)
    waiting = [pod for pod in _waiting_pods(pods, MigParts.of(nodes)) if now_ms - pod.since_ms >= WAITS_MS]
    notes = messages(events)
    by_taint: dict[tuple[str, str, str], list[tuple[WaitingPod, list[str]]]] = {}
    others: list[Finding] = []
    for pod in waiting:
        blocking = _blocking_taints(pod, nodes, free)
        for taint, names in blocking.items():
            by_taint.setdefault(taint, []).append((pod, names))
        if not blocking:
            others.append(_otherwise_waiting(pod, notes.get(pod.uid, ""), free, now_ms))
    found = [_blocked_by_taint(taint, cases, free, notes) for taint, cases in sorted(by_taint.items())]
    total = gpus_of_nodes(nodes)
    seen = f"{len(waiting)} pods wait; {fsum(free.values()):g} of {total:g} GPUs are free"
    findings = (*first_findings(found, "taints that block"), *first_findings(others, "pods that wait"))
    return CheckResult(seen, findings, len(pods) + sum(bool(gpus_of_node(node)) for node in nodes))


def free_gpus(nodes: Sequence[Object], pods: Sequence[Object]) -> dict[str, float]:
    """Return the number of free GPUs of each node that is up and has any: its allocatable GPUs less the requests of its
    pods."""
    parts = MigParts.of(nodes)
    free = {node["metadata"]["name"]: gpus_of_node(node) for node in nodes if node_up(node)}
    for obj in pods:
        pod = read_pod(obj)
        if pod is not None and pod.node in free:
            free[pod.node] -= sized(pod, parts).gpus
    return {name: count for name, count in free.items() if count > _EPSILON}


def messages(events: Iterable[Object]) -> dict[str, str]:
    """Return the newest FailedScheduling message of each pod, by uid. events: of events.k8s.io/v1 or v1."""
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
    """Return True if a toleration matches the taint. A toleration without an effect matches every effect, and one with
    the operator `Exists` and without a key matches every key."""
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


def _waiting_pods(pods: Iterable[Object], parts: MigParts) -> Iterator[WaitingPod]:
    for obj in pods:
        pod = read_pod(obj)
        if pod is None or pod.node or pod.gated or obj["metadata"].get("deletionTimestamp"):
            continue
        yield WaitingPod(
            pod.namespace, pod.name, sized(pod, parts).gpus, pod.created_ms or 0, obj.get("spec") or {}, pod.uid
        )


def _blocking_taints(
    pod: WaitingPod, nodes: Sequence[Object], free: Mapping[str, float]
) -> dict[tuple[str, str, str], list[str]]:
    """Return the taints that keep the pod from nodes with enough free GPUs, as (key, value, effect), each with these
    nodes; empty if a node accepts the pod."""
    if value_at(pod.spec, ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")):
        return {}
    selector = pod.spec.get("nodeSelector") or {}
    blocking: dict[tuple[str, str, str], list[str]] = {}
    for node in nodes:
        name = node["metadata"]["name"]
        labels = node["metadata"].get("labels") or {}
        if free.get(name, 0.0) + _EPSILON < pod.requested or any(labels.get(k) != v for k, v in selector.items()):
            continue
        not_tolerated = [
            taint
            for taint in value_at(node, ("spec", "taints")) or ()
            if taint.get("effect") in _CLOSING
            and taint.get("key") not in CLOSING_TAINTS
            and not tolerates(pod.spec.get("tolerations") or (), taint)
        ]
        if not not_tolerated:
            return {}
        for taint in not_tolerated:
            key = (taint["key"], taint.get("value") or "", taint["effect"])
            blocking.setdefault(key, []).append(name)
    return blocking


def _blocked_by_taint(
    taint: tuple[str, str, str],
    cases: Sequence[tuple[WaitingPod, Sequence[str]]],
    free: Mapping[str, float],
    notes: Mapping[str, str],
) -> Finding:
    """Return the finding for a taint that keeps pods from free GPUs.

    cases: these pods, each with the nodes that have the taint and enough free GPUs for the pod.
    free: the number of free GPUs by node.
    notes: the scheduler's messages by pod uid."""
    key, value, effect = taint
    nodes = sorted({name for _, names in cases for name in names})
    shown = f"{key}={value}:{effect}" if value else f"{key}:{effect}"
    operator = f"operator: Equal, value: {value}" if value else "operator: Exists"
    note = next((notes[pod.uid] for pod, _ in cases if pod.uid in notes), "")
    return Finding(
        "error",
        f"taint {shown} keeps {len(cases)} pods from free GPUs: {joined_names(pod.label for pod, _ in cases)}",
        f"{fsum(free[name] for name in nodes):g} GPUs free on {joined_names(nodes)}; "
        f"requested: {fsum(pod.requested for pod, _ in cases):g}"
        + (f'; the scheduler: "{_short(note)}"' if note else ""),
        f"kubectl taint nodes {' '.join(nodes[:4])} {key}:{effect}-   # or tolerate it: "
        f"{{key: {key}, {operator}, effect: {effect}}}",
    )


def _otherwise_waiting(pod: WaitingPod, note: str, free: Mapping[str, float], now_ms: int) -> Finding:
    """Return the finding for a pod that waits although no taint blocks it. note: the scheduler's message; "" if there
    is none."""
    hours = (now_ms - pod.since_ms) / MS_PER_HOUR
    most_free = max(free.values(), default=0.0)
    fits = most_free + _EPSILON >= pod.requested
    if fits:
        what = f"{pod.label} waits although a node has room for its {pod.requested:g} GPUs"
    elif fsum(free.values()) + _EPSILON >= pod.requested:
        what = f"{pod.label} waits: {pod.requested:g} GPUs are free, but not on one node"
    else:
        what = f"{pod.label} waits: {pod.requested:g} GPUs are not free"
    message = (
        f'the scheduler: "{_short(note)}"' if note else "no FailedScheduling event: its scheduler has not tried the pod"
    )
    evidence = f"for {hours:.1f} h; most free on one node {most_free:g}; {message}"
    remedy = (
        f"kubectl -n {pod.namespace} describe pod {pod.name}"
        if fits or not note
        else f"gputally fairshare explain {pod.label}"
    )
    return Finding("error" if fits else "warning", what, evidence, remedy)


def _short(note: str, most_chars: int = 240) -> str:
    text = " ".join(note.split())
    return text if len(text) <= most_chars else f"{text[: most_chars - 1]}…"
