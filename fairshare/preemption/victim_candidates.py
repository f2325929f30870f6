"""Lists which workloads could be preempted, which are protected, and the order of least loss.

An elastic workload gives its surplus pod by pod; its core, without which it does not run, goes as a whole
or not at all, and takes the rest of the surplus with it. Kueue's Workloads and Volcano's Jobs are only ever
stopped whole, by those who run them. Work since the last checkpoint is lost, without one since the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from accountant.wire.policy_models import Policy
from fairshare.core.model import Gang, Pod
from fairshare.core.queue_tree import PolicyTree
from fairshare.preemption.preemption_rules import EPSILON, PastPreemption
from fairshare.preemption.preemption_types import Ground, PreemptionInputs, Victim
from gputally.base.units import MS_PER_SECOND

_INDIVISIBLE = ("kueue.x-k8s.io/", "batch.volcano.sh/")
_HOUR_MS = 3_600_000


@dataclass(frozen=True)
class Bundle:
    """A part of one gang that can go by itself. pods: empty where only the gang's own object is known.
    whole: the gang stops; else it goes on with less."""

    gang: Gang
    pods: tuple[Pod, ...]
    gpus: float
    lost_gpu_hours: float
    whole: bool

    @cached_property
    def key(self) -> str:
        return key_of(self.gang)

    @cached_property
    def spot(self) -> bool:
        """It was declared to be interruptible at any time."""
        return bool(self.pods) and all(pod.spot for pod in self.pods)

    @cached_property
    def by_node(self) -> dict[str, float]:
        amounts: dict[str, list[float]] = {}
        for pod in self.pods:
            amounts.setdefault(pod.node, []).append(pod.gpus)
        return {node: fsum(parts) for node, parts in sorted(amounts.items())}

    def with_rest(self, others: Sequence[Bundle]) -> Bundle:
        """The core together with what surplus of the same gang still runs."""
        if not others:
            return self  # with what it knows of itself already
        return Bundle(
            self.gang,
            (*self.pods, *(pod for other in others for pod in other.pods)),
            fsum([self.gpus, *(other.gpus for other in others)]),
            fsum([self.lost_gpu_hours, *(other.lost_gpu_hours for other in others)]),
            whole=True,
        )


def key_of(gang: Gang) -> str:
    """What names a gang in decisions: kind/namespace/name."""
    return f"{gang.kind.kind}/{gang.namespace}/{gang.name}"


def bundles(gang: Gang, now_ms: int) -> tuple[Bundle, ...]:
    """The surplus, newest pod first, then the core. Nothing for a gang that holds nothing."""
    if gang.allocated <= 0:
        return ()
    held = tuple(
        sorted((pod for pod in gang.pods if pod.held), key=lambda p: (not p.spot, -(p.started_ms or 0), p.uid))
    )
    if not held:
        return (Bundle(gang, (), gang.allocated, lost(gang, gang.allocated, gang.started_ms, now_ms), whole=True),)
    shed: list[Pod] = []
    core: list[Pod] = []
    left = fsum(pod.gpus for pod in held)
    whole = gang.kind.api_version.startswith(_INDIVISIBLE)
    for pod in held:
        if not whole and pod.uid not in gang.core and left - pod.gpus >= gang.minimum - EPSILON:
            shed.append(pod)
            left -= pod.gpus
        else:
            core.append(pod)
    return (
        *(Bundle(gang, (pod,), pod.gpus, _lost_by(gang, (pod,), now_ms), whole=False) for pod in shed),
        Bundle(gang, tuple(core), fsum(pod.gpus for pod in core), _lost_by(gang, core, now_ms), whole=True),
    )


def lost(gang: Gang, gpus: float, started_ms: int | None, now_ms: int) -> float:
    """GPU-hours of work that are in vain if `gpus` of the gang stop now."""
    since = started_ms if started_ms is not None else gang.created_ms
    if since is None:
        return 0.0
    return gpus * max(0, now_ms - (_saved(gang, since, now_ms) or since)) / _HOUR_MS


def _saved(gang: Gang, since_ms: int, now_ms: int) -> int | None:
    """Its last checkpoint, where there is one of this start: one from the future is a mistake."""
    at = gang.checkpoint_ms
    return at if at is not None and since_ms < at <= now_ms else None


def _lost_by(gang: Gang, pods: Sequence[Pod], now_ms: int) -> float:
    return fsum(lost(gang, pod.gpus, pod.started_ms or gang.started_ms, now_ms) for pod in pods)


def loss_text(bundle: Bundle, now_ms: int) -> str:
    """What its owner loses, in words, and that bare pods are not recreated."""
    starts = [pod.started_ms or bundle.gang.started_ms for pod in bundle.pods] or [bundle.gang.started_ms]
    known = [start if start is not None else bundle.gang.created_ms for start in starts]
    saved = any(start is not None and _saved(bundle.gang, start, now_ms) for start in known)
    since = "the last checkpoint" if saved else "the start"
    bare = sum(not pod.owner for pod in bundle.pods)
    which = "it" if len(bundle.pods) == 1 else f"{bare} of its pods"
    for_good = f"; no controller will start {which} again" if bare else ""
    return f"{bundle.lost_gpu_hours:.1f} GPU-hours of work since {since} are lost{for_good}"


def victim_of(bundle: Bundle, ground: Ground, team: str, reason: str) -> Victim:
    """reason: one sentence for its owner."""
    return Victim(bundle.gang, bundle.pods, bundle.gpus, bundle.lost_gpu_hours, bundle.whole, ground, team, reason)


def by_preference(saturation: Mapping[str, float]) -> Callable[[Bundle], tuple[object, ...]]:
    """Who goes first: spot, then surplus, then the lower priority, then who loses least work, then who is most
    over its share, then the newest. saturation: by queue, what it holds over what it is due."""

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


def by_node(candidates: Sequence[Bundle], prefer: Callable[[Bundle], tuple[object, ...]]) -> tuple[Bundle, ...]:
    """One node after the other, those first that lose least: for gangs that need whole nodes."""
    loss: dict[str, list[float]] = {}
    for bundle in candidates:
        for node in bundle.by_node:
            loss.setdefault(node, []).append(bundle.lost_gpu_hours)
    rank = {node: (fsum(parts), node) for node, parts in loss.items()}
    last = (float("inf"), "")
    return tuple(sorted(candidates, key=lambda b: (min((rank[node] for node in b.by_node), default=last), *prefer(b))))


_STAYS = {"DaemonSet": "a DaemonSet, which starts it again at once on the same node", "Node": "the kubelet itself"}
"""Whose pods make no room by going."""


def protected(policy: Policy, situation: PreemptionInputs, bundle: Bundle) -> str | None:
    """Why this part is protected from every claim; None: it is not."""
    gang = bundle.gang
    if bundle.key in situation.vetoed:
        return situation.vetoed[bundle.key]
    if not gang.preemptible:
        return "it may not be preempted"
    for pod in bundle.pods:
        whose = _STAYS.get(pod.owner.partition("/")[0])
        if whose is not None:
            return f"its pod {pod.name} belongs to {whose}"
    runtime = policy.preemption.min_runtime
    started_ms = gang.started_ms
    if started_ms is None and bundle.pods:
        started_ms = situation.now_ms  # bound, and its kubelet has not spoken yet
    if bundle.whole and started_ms is not None:
        ran_s = (situation.now_ms - started_ms) / MS_PER_SECOND
        if ran_s < runtime:
            return f"it has run for {max(0.0, ran_s) // 60:.0f} of the {runtime / 60:g} min that every start is left"
    return None


def teams(policy: Policy) -> Mapping[str, str]:
    """Whose limit a queue's victims count to: its team, the nearest ancestor's, else the queue itself."""
    tree = PolicyTree(policy)
    return {name: tree.team(name) or name for name in tree.queues}


def past_of(team: str, bundle: Bundle, now_ms: int) -> PastPreemption:
    """What stopping it now will have been. team: whose limit it counts to."""
    return PastPreemption(now_ms, bundle.key, bundle.gang.queue, team, bundle.gpus, bundle.lost_gpu_hours)


def class_name(policy: Policy, priority: int) -> str:
    """A priority as people know it."""
    found = next((each.name for each in policy.preemption.classes if each.value == priority), None)
    return f"{found} ({priority})" if found else str(priority)
