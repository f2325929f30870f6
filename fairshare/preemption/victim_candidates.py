"""Lists the parts of workloads that could be preempted, which parts are protected, and which are preferred as victims.

The core of a workload consists of the pods without which it does not run. Its other pods are the surplus, and can be
stopped one by one. The core is stopped as a whole, together with the rest of the surplus. Workloads that
their scheduler stops through their own objects are always stopped whole.

Work since the last checkpoint is lost. Without a checkpoint it is lost since the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from accountant.wire.policy_models import Policy
from fairshare.core.queues_and_weights import Gang, Pod, PolicyTree
from fairshare.preemption.preemption_types import Ground, PreemptionInputs, Victim
from fairshare.preemption.reclaim_rules_and_limits import EPSILON, PastPreemption
from fairshare.targets.installed import whole_stop
from gputally.base.units import MS_PER_HOUR, MS_PER_SECOND

Kind = tuple[str, float, int]
"""Queue, GPUs and priority of a part."""


@dataclass(frozen=True)
class Bundle:
    """A part of one gang that can be stopped separately.

    pods: empty if only the gang's own object is known.
    whole: whether the gang stops with it. Otherwise the gang continues with fewer pods."""

    gang: Gang
    pods: tuple[Pod, ...]
    gpus: float
    lost_gpu_hours: float
    whole: bool

    @cached_property
    def key(self) -> str:
        return self.gang.key

    @cached_property
    def kind(self) -> Kind:
        """Queue, GPUs and priority. By these alone a queue's right to the part is decided."""
        return self.gang.queue, self.gpus, self.gang.priority

    def is_in(self, taken: Set[str]) -> bool:
        """Return whether the part is among what is taken already: keys of whole gangs and uids of pods."""
        return self.key in taken or any(pod.uid in taken for pod in self.pods)

    @cached_property
    def spot(self) -> bool:
        """Whether all of its pods are declared spot, so that they may be interrupted at any time."""
        return bool(self.pods) and all(pod.spot for pod in self.pods)

    @cached_property
    def by_node(self) -> dict[str, float]:
        amounts: dict[str, list[float]] = {}
        for pod in self.pods:
            amounts.setdefault(pod.node, []).append(pod.gpus)
        return {node: fsum(parts) for node, parts in sorted(amounts.items())}

    def with_rest(self, others: Sequence[Bundle]) -> Bundle:
        """Return this core together with the surplus of the same gang that still runs."""
        if not others:
            return self  # keeps the cached values
        return Bundle(
            self.gang,
            (*self.pods, *(pod for other in others for pod in other.pods)),
            fsum([self.gpus, *(other.gpus for other in others)]),
            fsum([self.lost_gpu_hours, *(other.lost_gpu_hours for other in others)]),
            whole=True,
        )


def bundles(gang: Gang, now_ms: int) -> tuple[Bundle, ...]:
    """Return the surplus of a gang pod by pod (spot pods first, then the newest), then its core. Empty for a gang that
    holds nothing."""
    if gang.allocated <= 0:
        return ()
    held = tuple(
        sorted((pod for pod in gang.pods if pod.held), key=lambda p: (not p.spot, -(p.started_ms or 0), p.uid))
    )
    if not held:
        return (
            Bundle(
                gang, (), gang.allocated, lost_gpu_hours_now(gang, gang.allocated, gang.started_ms, now_ms), whole=True
            ),
        )
    surplus: list[Pod] = []
    core: list[Pod] = []
    left = fsum(pod.gpus for pod in held)
    indivisible = whole_stop(gang.kind) is not None
    for pod in held:
        if not indivisible and pod.uid not in gang.core and left - pod.gpus >= gang.minimum - EPSILON:
            surplus.append(pod)
            left -= pod.gpus
        else:
            core.append(pod)
    return (
        *(Bundle(gang, (pod,), pod.gpus, _lost_by(gang, (pod,), now_ms), whole=False) for pod in surplus),
        Bundle(gang, tuple(core), fsum(pod.gpus for pod in core), _lost_by(gang, core, now_ms), whole=True),
    )


def lost_gpu_hours_now(gang: Gang, gpus: float, started_ms: int | None, now_ms: int) -> float:
    """Return the GPU-hours of work that are lost if `gpus` of the gang stop now."""
    since = started_ms if started_ms is not None else gang.created_ms
    if since is None:
        return 0.0
    return gpus * max(0, now_ms - (_saved(gang, since, now_ms) or since)) / MS_PER_HOUR


def _saved(gang: Gang, since_ms: int, now_ms: int) -> int | None:
    """Return the gang's last checkpoint since this start, if it has one. A checkpoint in the future is ignored."""
    at = gang.checkpoint_ms
    return at if at is not None and since_ms < at <= now_ms else None


def _lost_by(gang: Gang, pods: Sequence[Pod], now_ms: int) -> float:
    return fsum(lost_gpu_hours_now(gang, pod.gpus, pod.started_ms or gang.started_ms, now_ms) for pod in pods)


def loss_text(bundle: Bundle, now_ms: int) -> str:
    """Describe the work that a preemption of the bundle loses, and whether no controller recreates its pods."""
    starts = [pod.started_ms or bundle.gang.started_ms for pod in bundle.pods] or [bundle.gang.started_ms]
    known = [start if start is not None else bundle.gang.created_ms for start in starts]
    saved = any(start is not None and _saved(bundle.gang, start, now_ms) for start in known)
    since = "the last checkpoint" if saved else "the start"
    bare = sum(not pod.owner for pod in bundle.pods)
    which = "it" if len(bundle.pods) == 1 else f"{bare} of its pods"
    not_recreated = f"; no controller will start {which} again" if bare else ""
    return f"{bundle.lost_gpu_hours:.1f} GPU-hours of work since {since} are lost{not_recreated}"


def make_victim(bundle: Bundle, ground: Ground, team: str, reason: str) -> Victim:
    """Return the victim for this part. A core takes the members without GPUs with it.

    reason: one sentence for its owner."""
    pods = bundle.pods
    if bundle.whole and pods:
        pods = (*pods, *(pod for pod in bundle.gang.companions if pod.held))
    return Victim(bundle.gang, pods, bundle.gpus, bundle.lost_gpu_hours, bundle.whole, ground, team, reason)


def by_preference(saturation: Mapping[str, float]) -> Callable[[Bundle], tuple[object, ...]]:
    """Return a sort key by which the parts with the least loss come first.

    The keys are: spot, then surplus, then the lower priority, then the least lost work, then the queue most above its
    share, then the newest.

    saturation: by queue, the GPUs that the queue holds over those that it is due."""

    def key(bundle: Bundle) -> tuple[object, ...]:
        return (
            not bundle.spot,
            bundle.whole,
            bundle.gang.priority,
            round(bundle.lost_gpu_hours, 6),
            -saturation.get(bundle.gang.queue, 0.0),
            -(bundle.gang.started_ms or 0),
            bundle.key,
            tuple(sorted(pod.uid for pod in bundle.pods)),
        )

    return key


def by_node(preferred: Sequence[Bundle]) -> tuple[Bundle, ...]:
    """Return the parts node by node, the node with the least loss first, for gangs that need whole nodes. Those of one
    node stay in their order."""
    loss: dict[str, list[float]] = {}
    for bundle in preferred:
        for node in bundle.by_node:
            loss.setdefault(node, []).append(bundle.lost_gpu_hours)
    rank = {node: (fsum(parts), node) for node, parts in loss.items()}
    last = (float("inf"), "")
    return tuple(sorted(preferred, key=lambda b: min((rank[node] for node in b.by_node), default=last)))


_RESTARTING_OWNERS = {
    "DaemonSet": "a DaemonSet, which starts it again at once on the same node",
    "Node": "the kubelet itself",
}
"""Owners, by kind, whose pods free no room because they start again on the same node."""


def protected(policy: Policy, situation: PreemptionInputs, bundle: Bundle) -> str | None:
    """Return why this part is protected from every claim; None if it is not."""
    gang = bundle.gang
    if bundle.key in situation.vetoed:
        return situation.vetoed[bundle.key]
    if not gang.preemptible:
        return "it may not be preempted"
    for pod in bundle.pods:
        owner = _RESTARTING_OWNERS.get(pod.owner.partition("/")[0])
        if owner is not None:
            return f"its pod {pod.name} belongs to {owner}"
    runtime = policy.preemption.min_runtime
    started_ms = gang.started_ms
    if started_ms is None and bundle.pods:
        started_ms = situation.now_ms  # bound, but its kubelet has not reported the start yet
    if bundle.whole and started_ms is not None:
        ran_s = (situation.now_ms - started_ms) / MS_PER_SECOND
        if ran_s < runtime:
            minutes = f"{max(0.0, ran_s) // 60:.0f} of the {runtime / 60:g} min"
            return f"it has run for {minutes} for which every start is protected"
    return None


def teams(policy: Policy) -> Mapping[str, str]:
    """Return for each queue the name under which its victims count against the limits per team.

    This is the queue's team, that of its nearest ancestor with a team, or the queue's own name."""
    tree = PolicyTree(policy)
    return {name: tree.team(name) or name for name in tree.queues}


def preemption_record(team: str, bundle: Bundle, now_ms: int) -> PastPreemption:
    """Return the record of stopping the bundle now. team: the team against whose limits it counts."""
    return PastPreemption(now_ms, bundle.key, bundle.gang.queue, team, bundle.gpus, bundle.lost_gpu_hours)


def class_name(policy: Policy, priority: int) -> str:
    """Return the name of a priority class with its value, or only the value if the policy names no such class."""
    name = next((each.name for each in policy.preemption.classes if each.value == priority), None)
    return f"{name} ({priority})" if name else str(priority)
