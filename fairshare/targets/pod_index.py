"""Keeps what pods take by node, gang and queue, so that an answer about one pod needs no pass over all pods.

A watch reports every change of a pod (`PodIndex.change`). A change replaces the entries of the pod's node, gang and
queue. Entries never change themselves, so readers need no lock: each entry is that of one moment. Sums are exact, so
the index is the same in whatever order the pods came."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import repeat
from math import fsum
from operator import attrgetter
from typing import NamedTuple

from fairshare.core.gpu_demand import LABELLED, gpus_taken, sized
from fairshare.core.queues_and_weights import Pod
from gputally.kubernetes.mig_parts import NO_NODES, MigParts

_NOTHING = Fraction(0)


@dataclass(frozen=True)
class Sides:
    """References to queues above their share, and to queues within it. References to other queues are in neither."""

    over: frozenset[str] = frozenset()
    within: frozenset[str] = frozenset()


NO_SIDES = Sides()


class Occupancy(NamedTuple):
    """What the pods of one node take.

    sides: the sides by which the parts are computed.
    taken: GPUs.
    over, within: which part (0..1) of the requested GPUs belongs to queues above their share, and to queues within it;
        None if no GPU is requested. A GPU that several pods share counts more than once."""

    sides: Sides
    taken: float
    over: float | None
    within: float | None


class NodePods:
    """The pods of one node, those that are being deleted included. They do not change."""

    __slots__ = ("_occupancy", "pods")

    def __init__(self, pods: tuple[Pod, ...] = ()) -> None:
        self.pods = pods
        self._occupancy: Occupancy | None = None

    def occupancy(self, sides: Sides) -> Occupancy:
        """Return what the pods take. It is kept until it is asked for with other sides."""
        known = self._occupancy
        if known is None or known.sides is not sides:
            requested = fsum(pod.gpus for pod in self.pods)
            over, within = (
                fsum(pod.gpus for pod in self.pods if pod.ref in refs) / requested if requested else None
                for refs in (sides.over, sides.within)
            )
            known = self._occupancy = Occupancy(sides, gpus_taken(self.pods), over, within)
        return known

    def without(self, uid: str) -> NodePods:
        return NodePods(tuple(pod for pod in self.pods if pod.uid != uid))

    def and_also(self, pods: Sequence[Pod]) -> NodePods:
        return NodePods((*self.pods, *pods))


EMPTY_NODE = NodePods()


class PodIndex:
    """The pods of the cluster. One thread at a time may call `change`; any thread may call the other methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pods: dict[str, Pod] = {}
        self._nodes: dict[str, NodePods] = {}
        self._held_by_gang: dict[str, Fraction] = {}
        self._held_by_ref: dict[str, Fraction] = {}
        self._held: dict[str, float] = {}
        self._members: dict[str, int] = {}
        self._demanding: set[str] = set()
        self._order: tuple[str, ...] | None = ()
        self._sorted: tuple[Pod, ...] | None = ()
        self._parts = NO_NODES

    def count_by(self, parts: MigParts) -> None:
        """Count the MIG instances of pods as these parts of GPUs from now on. Any thread may call it."""
        with self._lock:
            if parts == self._parts:
                return
            self._parts = parts
            for uid, pod in [(uid, pod) for uid, pod in self._pods.items() if pod.resources]:
                self._remove(uid, pod)
                self._add(uid, sized(pod, parts))
            self._sorted = self._order = None

    def placed(self, pod: Pod, node: str) -> Pod:
        """Return the pod as it would count on this node; "": without a node."""
        return sized(replace(pod, node=node, held=bool(node)), self._parts)

    def change(self, uid: str, pod: Pod | None) -> None:
        """Put the pod in the place of what was known of this uid. None: the pod is gone."""
        with self._lock:
            before = self._pods.get(uid)
            if before is not None:
                self._remove(uid, before)
            if pod is not None:
                self._add(uid, sized(pod, self._parts))
            self._sorted = None
            if before is None or pod is None or (before.namespace, before.name) != (pod.namespace, pod.name):
                self._order = None

    def pods(self) -> tuple[Pod, ...]:
        """Return all pods by namespace and name. Between two changes it is the same tuple."""
        with self._lock:
            if self._order is None:
                name = attrgetter("namespace", "name")
                self._order = tuple(sorted(self._pods, key=lambda uid: name(self._pods[uid])))
            if self._sorted is None:
                self._sorted = tuple(map(self._pods.__getitem__, self._order))
            return self._sorted

    def get(self, uid: str) -> Pod | None:
        return self._pods.get(uid)

    def on_node(self, node: str) -> NodePods:
        return self._nodes.get(node, EMPTY_NODE)

    def on_nodes(self, nodes: Sequence[str]) -> list[NodePods]:
        return list(map(self._nodes.get, nodes, repeat(EMPTY_NODE)))

    def held_by_gang(self, gang: str) -> float | None:
        """Return the GPUs that the gang holds; None if it has no pod."""
        return float(self._held_by_gang.get(gang, _NOTHING)) if gang in self._members else None

    def held_by_ref(self, refs: Iterable[str]) -> list[float]:
        """Return for each of these references to queues the GPUs that pods with it hold."""
        return [self._held.get(ref, 0.0) for ref in refs]

    def demanding_besides(self, known: frozenset[str]) -> Mapping[str, Pod]:
        """Return the pods that name a queue by label and hold or request GPUs, by uid, without those in `known`."""
        with self._lock:
            return {uid: self._pods[uid] for uid in self._demanding - known}

    def _add(self, uid: str, pod: Pod) -> None:
        self._pods[uid] = pod
        if demands_by_label(pod):
            self._demanding.add(uid)
        if pod.node:
            self._nodes[pod.node] = self.on_node(pod.node).and_also((pod,))
        if pod.gang:
            self._members[pod.gang] = self._members.get(pod.gang, 0) + 1
        if pod.held:
            self._hold(pod, 1)

    def _remove(self, uid: str, pod: Pod) -> None:
        del self._pods[uid]
        self._demanding.discard(uid)
        if pod.held:
            self._hold(pod, -1)
        if pod.gang:
            self._members[pod.gang] -= 1
            if not self._members[pod.gang]:
                del self._members[pod.gang]
                self._held_by_gang.pop(pod.gang, None)
        if pod.node:
            left = self.on_node(pod.node).without(uid)
            if left.pods:
                self._nodes[pod.node] = left
            else:
                del self._nodes[pod.node]

    def _hold(self, pod: Pod, sign: int) -> None:
        gpus = sign * Fraction(pod.gpus)
        of_ref = self._held_by_ref[pod.ref] = self._held_by_ref.get(pod.ref, _NOTHING) + gpus
        self._held[pod.ref] = float(of_ref)
        if not of_ref:
            del self._held_by_ref[pod.ref], self._held[pod.ref]
        if pod.gang:
            self._held_by_gang[pod.gang] = self._held_by_gang.get(pod.gang, _NOTHING) + gpus


def demands_by_label(pod: Pod) -> bool:
    """Return whether the pod requests GPUs in a queue that it names by label, and is neither gated nor being deleted.

    The objects of a scheduler with queues of its own already contain the requests of its pods."""
    return pod.requests_gpus and pod.ref.startswith(f"{LABELLED}:") and not pod.gated and not pod.leaving
