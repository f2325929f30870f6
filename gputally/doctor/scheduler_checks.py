"""Reads schedulers through the controller's adapters, and checks served kinds, weights, conflicts and quotas that can
never be met."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.controller.kube_scheduler_extender import REMEDY
from fairshare.controller.policy_file import advice
from fairshare.core.pods import read_pod
from fairshare.core.queue_annotations import has_ref
from fairshare.core.queues_and_weights import UNLIMITED, Condition, Gang, Issue, Pod, PolicyTree
from fairshare.laws.gang_turns import gang_reach
from fairshare.targets import ADAPTERS, kai, kueue, volcano
from fairshare.targets.kube_scheduler import NAME as KUBE_SCHEDULER
from fairshare.targets.status_config_map import StatusObject, conditions
from fairshare.targets.weight_plan import look_at
from gputally.base.errors import ClusterError, NotFound
from gputally.doctor.check_inputs import ClusterView
from gputally.doctor.findings import CheckResult, Finding, Severity, first_findings, joined_names
from gputally.kubernetes.objects import CONFIG_MAP, GPU, Kind, Object, gpus, value_at

KNOWN: Mapping[str, Sequence[Sequence[Kind]]] = {
    "kai": ((kai.QUEUE,), (kai.POD_GROUP,), (kai.SHARD,)),
    "kueue": (kueue.CLUSTER_QUEUES, kueue.COHORTS, kueue.LOCAL_QUEUES, kueue.WORKLOADS),
    "volcano": tuple((kind,) for kind in volcano.KINDS),
}
"""Kinds of each scheduler with the supported versions; the first kind is required."""
_PREFIXES = {"kai": ("kai",), "kueue": ("kueue", "kueue-cohort"), "volcano": ("volcano",)}
_SCHEDULER_OF = {prefix: name for name, prefixes in _PREFIXES.items() for prefix in prefixes} | {
    "policy": "kube-scheduler", "slurm": "slurm", "runai": "runai", "runai-department": "runai",
}  # fmt: skip
_REMEDIES = {
    "HistoryCountedTwice": "keep history in one place: kValue: 0 in the SchedulingShard, or targets.kai.mode: usage",
}
_ABOUT: Mapping[tuple[str, str], tuple[Severity, str]] = {
    ("Effective", "False"): ("error", "weights published to {target} cannot act"),
    ("Effective", "Unknown"): ("warning", "it is unknown whether weights published to {target} act"),
    ("Readable", "False"): ("warning", "some answers of {target} cannot be read"),
    ("InSync", "False"): ("warning", "{target} is not set up as the policy says"),
    ("InSync", "Unknown"): ("warning", "it is unknown whether {target} is set up as the policy says"),
}
"""Conditions that are findings, by type and status."""


@dataclass(frozen=True, slots=True)
class Target:
    """One scheduler's state.

    versions: served, by (group, plural).
    conditions, issues: what its adapter reports, if the policy refers to the scheduler.
    mode: off, dry-run or enforce.
    fault: why it could not be read."""

    name: str
    versions: Mapping[tuple[str, str], Sequence[str]]
    mode: str = "off"
    conditions: Sequence[Condition] = ()
    issues: Sequence[Issue] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True)
class QueueObject:
    """A scheduler's own queue.

    quota: its guaranteed GPUs, None if it states none.
    nested: below another queue."""

    scheduler: str
    name: str
    quota: float | None = None
    nested: bool = False
    refs: Sequence[str] = field(default=())


def queues_of(policy: Policy | None, scheduler: str) -> list[QueuePolicy]:
    """Queues of the policy with a ref of the scheduler."""
    queues = policy.queues if policy is not None else ()
    return [queue for queue in queues if scheduler in schedulers_of(queue)]


def schedulers_of(queue: QueuePolicy) -> list[str]:
    """Return the names of the schedulers in a queue's refs, without duplicates."""
    return list(dict.fromkeys(_SCHEDULER_OF.get(ref.partition(":")[0], "") for ref in queue.refs))


def weights(
    policy: Policy | None, targets: Sequence[Target], told: Sequence[tuple[str, Condition]] = ()
) -> CheckResult:
    """Check whether every scheduler in the policy is installed in a supported version and reads the weights. told: the
    controller's conditions in its status ConfigMap, by target."""
    findings = [each for target in targets for each in _of_target(policy, target)]
    findings += extender(policy, told)
    there = [f"{target.name} ({target.mode})" for target in targets if _first(target)]
    if policy is None:
        there.append("no policy in force")
    return CheckResult(", ".join(there) or "no scheduler with queues is installed", tuple(findings))


def _first(target: Target) -> Sequence[str]:
    kind = KNOWN[target.name][0][0]
    return target.versions.get((kind.api_version.partition("/")[0], kind.plural), ())


def _of_target(policy: Policy | None, target: Target) -> Iterator[Finding]:
    queues = queues_of(policy, target.name)
    if not queues:
        return
    names = joined_names(queue.name for queue in queues)
    if not _first(target):
        kind = KNOWN[target.name][0][0]
        text = f"the policy publishes to {target.name}, which is not installed: no {kind.kind} is served"
        yield Finding(
            "error", text, f"{len(queues)} queues refer to it: {names}", f"kubectl get crd | grep {kind.plural}"
        )
        return
    for versions in KNOWN[target.name]:
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
        yield Finding("error", f"{target.name} cannot be looked at", target.fault, "gputally doctor --only permissions")
    yield from _of_conditions(target.name, target.conditions)
    issues = (
        Finding(
            "warning",
            f"queue {issue.subject} has no place at {target.name}",
            issue.reason,
            "mend its refs in the policy",
        )
        for issue in target.issues
    )
    yield from first_findings(issues, "queues without a place")


def _of_conditions(target: str, conditions: Iterable[Condition]) -> Iterator[Finding]:
    """Find settings of a target that make weights ineffective, and conditions that are unknown."""
    for condition in conditions:
        about = _ABOUT.get((condition.type, condition.status))
        if about is not None:
            severity, text = about
            remedy = condition.remedy or _REMEDIES.get(
                condition.reason, "gputally fairshare plan --policy FILE shows what it would do"
            )
            what = f"{text.format(target=target)} ({condition.reason})"
            yield Finding(severity, what, condition.message, remedy)


def extender(policy: Policy | None, conditions: Sequence[tuple[str, Condition]]) -> Iterator[Finding]:
    """Find out whether the kube-scheduler calls the extender. conditions: by target, from the status ConfigMap."""
    if queues_of(policy, KUBE_SCHEDULER):
        told = [each for target, each in conditions if target == KUBE_SCHEDULER and each.type == "Effective"]
        for finding in _of_conditions(KUBE_SCHEDULER, told):
            yield replace(finding, remedy=REMEDY)


def conflicts(policy: Policy | None, objects: Sequence[QueueObject], pods: Sequence[tuple[Pod, str]]) -> CheckResult:
    """Find GPUs or queues that two schedulers manage. pods: those that hold GPUs, with the scheduler that placed
    them."""
    findings = [*_twice(policy), *_same_names(policy, objects), *_shared_nodes(pods)]
    count = len({each.scheduler for each in objects})
    queues = len(policy.queues) if policy is not None else 0
    return CheckResult(f"{len(objects)} queues of {count} schedulers, {queues} in the policy", tuple(findings))


def _twice(policy: Policy | None) -> Iterator[Finding]:
    """Find teams with queues at two schedulers, each of which ignores the GPUs that the other gave."""
    by_team: dict[str, dict[str, list[QueuePolicy]]] = {}
    for queue in policy.queues if policy is not None else ():
        several = schedulers_of(queue)
        if len(several) > 1:
            deserved = "unlimited" if queue.deserved == UNLIMITED else f"{queue.deserved:g}"
            yield Finding(
                "warning",
                f"queue {queue.name} is a queue of {' and '.join(several)}: each gives out its quota by itself",
                f"{deserved} GPUs deserved, promised {len(several)} times; refs {', '.join(queue.refs)}",
                "one queue of the policy per scheduler, with its part of the quota",
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
                f"team {team} has queues of {len(places)} schedulers, and takes its share from each",
                "; ".join(parts),
                "keep a team's queues at one scheduler, or give them node pools of their own",
            )


def _same_names(policy: Policy | None, objects: Sequence[QueueObject]) -> Iterator[Finding]:
    known = {ref for queue in (policy.queues if policy is not None else ()) for ref in queue.refs}
    places: dict[str, list[QueueObject]] = {}
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
                f"{' and '.join(schedulers)} both have a queue {name}, and the policy knows neither",
                f"GPU quotas: {quotas}",
                "name them in the refs of the policy's queues, or remove one",
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
        f"{len(shared)} nodes are given out by several schedulers: neither reclaims what the other placed",
        f"{held_by} on {joined_names(sorted(shared))}",
        "taint the nodes of one of them, or give all GPU pods the same schedulerName",
    )


def queue_objects(found: Mapping[str, Sequence[Object]]) -> list[QueueObject]:
    """Return the queues of `kai`, `kueue` and `volcano`, with their guaranteed GPUs."""
    made = [
        QueueObject(
            "kai",
            obj["metadata"]["name"],
            _number(value_at(obj, ("spec", "resources", "gpu", "quota"))),
            bool(value_at(obj, ("spec", "parentQueue"))),
            (f"kai:{obj['metadata']['name']}",),
        )
        for obj in found.get("kai", ())
    ]
    made += [
        QueueObject("kueue", obj["metadata"]["name"], _nominal(obj), refs=(f"kueue:{obj['metadata']['name']}",))
        for obj in found.get("kueue", ())
    ]
    for obj in found.get("volcano", ()):
        name = obj["metadata"]["name"]
        if name != "root":
            quota = gpus_or_none(
                value_at(obj, ("spec", "guarantee", "resource")) or value_at(obj, ("spec", "deserved"))
            )
            made.append(QueueObject("volcano", name, quota, refs=(f"volcano:{name}",)))
    return made


def _nominal(obj: Object) -> float | None:
    amounts = [
        gpus_or_none({resource.get("name"): resource.get("nominalQuota")})
        for group in value_at(obj, ("spec", "resourceGroups")) or ()
        for flavor in group.get("flavors") or ()
        for resource in flavor.get("resources") or ()
    ]
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known else None


def gpus_or_none(resources: object) -> float | None:
    """Return the GPUs in a list of resources; None if it names none."""
    if not isinstance(resources, Mapping) or not any(
        str(name).startswith(("nvidia.com/mig-", GPU)) for name in resources
    ):
        return None
    return gpus(resources)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value >= 0 else None


_QUEUES = {"kai": (kai.QUEUE,), "kueue": kueue.CLUSTER_QUEUES, "volcano": (volcano.QUEUE,)}


def targets(ground: ClusterView, policy: Policy | None) -> tuple[Target, ...]:
    """Return KAI, Kueue and Volcano with their served versions and, for those in the policy, the adapter's
    conditions."""
    groups = {kinds[0].api_version.partition("/")[0] for several in KNOWN.values() for kinds in several}
    served = ground.served(groups)
    return tuple(_target(name, ground, policy, served) for name in KNOWN)


def _target(
    name: str, ground: ClusterView, policy: Policy | None, served: Mapping[tuple[str, str], Sequence[str]]
) -> Target:
    adapter = next(each for each in ADAPTERS if each.name == name)
    if policy is None or not queues_of(policy, name):
        return Target(name, served)
    mode = adapter.mode(policy)
    try:
        seen = look_at(adapter, policy, ground)
    except NotFound:
        return Target(name, served, mode)
    except ClusterError as fault:
        return Target(name, served, mode, fault=str(fault))
    return Target(name, served, mode, seen.conditions, seen.issues)


def noted_conditions(ground: ClusterView, namespace: str) -> tuple[tuple[str, Condition], ...]:
    """Return the controller's last recorded conditions of its targets; empty if they cannot be read."""
    where = StatusObject(namespace)
    try:
        return conditions(ground.get(CONFIG_MAP, where.name, where.namespace))
    except ClusterError:
        return ()


def own_queues(ground: ClusterView) -> list[QueueObject]:
    """Return the queues of all installed schedulers."""
    found: dict[str, Sequence[Object]] = {}
    for name, kinds in _QUEUES.items():
        for kind in kinds:
            try:
                found[name] = ground.list(kind)
                break
            except NotFound:
                continue
    return queue_objects(found)


def gangs(ground: ClusterView, policy: Policy, pods: Sequence[Object]) -> tuple[Gang, ...]:
    """Return the gangs that request GPUs in the policy's queues, at every scheduler that can be read."""
    read: list[Pod] = [pod for obj in pods if (pod := read_pod(obj)) is not None]
    found: list[Gang] = []
    for adapter in ADAPTERS:
        if adapter.name == "runai" or not has_ref(policy, *adapter.prefixes):
            continue
        try:
            found += look_at(adapter, policy, ground, read).gangs
        except ClusterError:
            continue  # reported by the check `weights`
    return tuple(found)


def installed(nodes: Sequence[Object]) -> float:
    """Return the GPUs of all nodes, in any state."""
    return fsum(gpus(value_at(node, ("status", "allocatable"))) for node in nodes)


_CHECK = "gputally fairshare check POLICY.yaml --capacity {capacity:g}"


def guarantees(
    policy: Policy | None, capacity: float, installed: float, objects: Sequence[QueueObject], gangs: Sequence[Gang]
) -> CheckResult:
    """Check guarantees.

    capacity: GPUs on nodes that are up.
    installed: GPUs on all nodes.
    gangs: present requests in the policy's queues."""
    findings = [*_quotas(policy, capacity, installed), *_native(objects, installed)]
    if policy is not None:
        findings += first_findings(_gangs(policy, capacity, gangs), "workloads that can never start")
    deserved = sum(max(0.0, queue.deserved) for queue in _roots(policy))
    return CheckResult(f"{deserved:g} GPUs deserved of {capacity:g} up and {installed:g} installed", tuple(findings))


def _roots(policy: Policy | None) -> list[QueuePolicy]:
    return [queue for queue in policy.queues if queue.parent is None] if policy is not None else []


def _quotas(policy: Policy | None, capacity: float, installed: float) -> Iterator[Finding]:
    if policy is None:
        return
    promised = fsum(max(0.0, queue.deserved) for queue in _roots(policy))
    if promised > installed:
        text = "deserved quotas add up to more GPUs than the cluster has: they can never all be kept"
    elif promised > capacity:
        text = "deserved quotas add up to more GPUs than are up now"
    else:
        text = ""
    if text:
        parts = (f"{queue.name} {queue.deserved:g}" for queue in _roots(policy) if queue.deserved > 0)
        yield Finding(
            "error" if promised > installed else "warning",
            text,
            f"{promised:g} deserved, {installed:g} installed, {capacity:g} up: {joined_names(parts, 6)}",
            _CHECK.format(capacity=installed),
        )
    for each in advice(policy):
        if each.path[:1] == ("queues",) and each.path[-1] == "deserved":
            queue = policy.queues[int(each.path[1])]
            evidence = f"deserved {queue.deserved:g}, limit {_limit(queue.limit)}"
            yield Finding("warning", each.message, evidence, _CHECK.format(capacity=installed))


def _native(objects: Sequence[QueueObject], installed: float) -> Iterator[Finding]:
    """Check the quotas in the schedulers' own objects."""
    by_scheduler: dict[str, list[QueueObject]] = {}
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
                "lower the quotas of those queues until they fit",
            )


def _gangs(policy: Policy, capacity: float, gangs: Sequence[Gang]) -> Iterator[Finding]:
    tree = PolicyTree(policy)
    shares: dict[tuple[str, float], str] = {}
    for gang in sorted((each for each in gangs if each.waits > 0), key=lambda each: -each.minimum):
        name = f"{gang.namespace}/{gang.name}"
        barred = next(((at, at.limit) for at in tree.upwards(gang.queue) if UNLIMITED < at.limit < gang.minimum), None)
        if barred is not None:
            at, limit = barred
            yield Finding(
                "error",
                f"{name} needs {gang.minimum:g} GPUs at once, above the limit of queue {at.name}: it never starts",
                f"limit {limit:g}; it asks {gang.requested:g}, has {gang.allocated:g}",
                f"raise the limit of {at.name} in the policy, or make the gang smaller",
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
                    f"{name} waits for more than the largest share of its queue {gang.queue} while others have demand",
                    shares[key],
                    f"{_CHECK.format(capacity=capacity)} --gang {gang.queue}={gang.minimum:.0f}",
                )


def _limit(limit: float) -> str:
    return "none" if limit == UNLIMITED else f"{limit:g}"
