"""Pods as they were when they were bound: what their owners write later buys no protection from preemption.

Queue, gang, share of a GPU and "not to be preempted" are labels and annotations, which the owner of a pod can change
while it runs. They count as they were when the pod was first seen on its node. A checkpoint is never taken back, since
work that was safe once stays safe, and "interruptible at any time" is not taken back either.
Kept in memory: after a restart of the controller pods count as it finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fairshare.core.model import Pod
from fairshare.core.pods import read_pod
from gputally.base.clock import Clock
from gputally.kubernetes.objects import Object

MOST_PODS = 200_000


class BoundPods:
    """`gputally.kubernetes.list_watch.Mirror`'s reduction of pods. Not thread-safe: one mirror owns it."""

    def __init__(self, clock: Clock, read: Callable[[Object], Pod | None] = read_pod) -> None:
        self._clock = clock
        self._read = read
        self._known: dict[str, Pod] = {}

    def __call__(self, obj: Object) -> Pod | None:
        pod = self._read(obj)
        uid = obj["metadata"].get("uid", "")
        known = self._known.get(uid)
        if pod is None or not pod.node or not uid:
            return pod
        if known is not None:
            pod = self._as_bound(pod, known)
        elif len(self._known) >= MOST_PODS:
            del self._known[next(iter(self._known))]
        self._known[uid] = pod
        return pod

    def _as_bound(self, pod: Pod, known: Pod) -> Pod:
        now_ms = self._clock.wall_ms()
        safe = [at for at in (pod.checkpoint_ms, known.checkpoint_ms) if at is not None and at <= now_ms]
        return replace(
            pod,
            gpus=known.gpus,
            shares=known.shares,
            ref=known.ref,
            gang=known.gang,
            priority=known.priority,
            spot=pod.spot or known.spot,
            disruptable=pod.disruptable or known.disruptable,
            checkpoint_ms=max(safe, default=None),
        )
