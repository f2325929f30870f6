"""What can be taken, piece by piece, and in which order it hurts least. Pure.

An elastic workload gives its surplus pod by pod; its core, without which it does not run, goes as a whole
or not at all, and takes the rest of the surplus with it. Kueue's Workloads and Volcano's Jobs are only ever
stopped whole, by those who run them. Work since the last checkpoint is lost, without one since the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from fairshare.model import Gang, Pod
from fairshare.preempting.reclaim import EPSILON

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
    """Its last checkpoint, where there is one of this start: one from the future is somebody's slip."""
    at = gang.checkpoint_ms
    return at if at is not None and since_ms < at <= now_ms else None


def counted_from(bundle: Bundle, now_ms: int) -> str:
    """Since when `lost` counts, in words."""
    starts = [pod.started_ms or bundle.gang.started_ms for pod in bundle.pods] or [bundle.gang.started_ms]
    known = [start if start is not None else bundle.gang.created_ms for start in starts]
    saved = any(start is not None and _saved(bundle.gang, start, now_ms) for start in known)
    return "the last checkpoint" if saved else "the start"


def _lost_by(gang: Gang, pods: Sequence[Pod], now_ms: int) -> float:
    return fsum(lost(gang, pod.gpus, pod.started_ms or gang.started_ms, now_ms) for pod in pods)


def for_good(bundle: Bundle) -> str:
    """What its owner has to know beside the reason: bare pods are not made anew by anybody. Empty for all others."""
    bare = sum(not pod.owner for pod in bundle.pods)
    return (
        f"; no controller will start {'it' if len(bundle.pods) == 1 else f'{bare} of its pods'} again" if bare else ""
    )


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
