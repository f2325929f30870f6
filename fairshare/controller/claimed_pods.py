"""Keeps the pods of the cluster with the GPUs that they have by ResourceClaims, which change apart from the pods.

Pods, claims, templates and device classes are watched by a reflector each. A change of any of them changes the pods
that it concerns in the index (`PodIndex`). A pod whose claim is allocated counts on the node of the allocation, even
before it is bound: its GPUs are taken."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from fractions import Fraction
from typing import Any

from fairshare.core.device_claims import (
    CLAIMS,
    CLASSES,
    TEMPLATES,
    Device,
    DeviceClaim,
    PodClaim,
    read_claim,
    read_class,
    read_template,
    requested,
)
from fairshare.core.queues_and_weights import ClaimingPod, Pod
from gputally.kubernetes.list_watch import Reflector
from gputally.kubernetes.objects import Api

Changed = Callable[[str, Pod | None], None]
Key = tuple[str, str]
"""Namespace and name."""


class ClaimedPods:
    """Adds the GPUs of claims to pods, and passes each changed pod on. Thread-safe."""

    def __init__(self, changed: Changed) -> None:
        """changed: is called with the uid and the pod, one call at a time; None: the pod is gone."""
        self._changed = changed
        self._lock = threading.RLock()
        self._pods: dict[str, ClaimingPod] = {}
        self._claims: dict[str, DeviceClaim] = {}
        self._templates: dict[str, DeviceClaim] = {}
        self._classes: dict[str, tuple[str, bool]] = {}
        self._by_name: dict[Key, DeviceClaim] = {}
        self._template_by_name: dict[Key, DeviceClaim] = {}
        self._pods_of: dict[Key, set[str]] = {}
        """By claim, the uids of the pods that name it."""
        self._claims_of: Counter[Device] = Counter()

    def reflectors(self, api: Api, now_ms: Callable[[], int]) -> tuple[Reflector[Any, Any], ...]:
        """Return the reflectors of claims, templates and classes, each to be run in a thread of its own."""
        return (
            _reflector(api, CLAIMS, read_claim, self.claim_changed, now_ms),
            _reflector(api, TEMPLATES, read_template, self.template_changed, now_ms),
            _reflector(api, CLASSES, read_class, self.class_changed, now_ms),
        )

    def pod_changed(self, uid: str, pod: Pod | None) -> None:
        """Put the pod in the place of what was known of this uid."""
        with self._lock:
            before = self._pods.pop(uid, None)
            others: set[str] = set()
            for key in _keys(before):
                self._pods_of[key].discard(uid)
                others |= self._pods_of[key]
                if not self._pods_of[key]:
                    del self._pods_of[key]
            if isinstance(pod, ClaimingPod):
                self._pods[uid] = pod
                for key in _keys(pod):
                    self._pods_of.setdefault(key, set()).add(uid)
                    others |= self._pods_of[key]
            self._changed(uid, None if pod is None else self.with_claims(pod))
            if _keys(before) != _keys(pod):
                self._renew(others - {uid})

    def claim_changed(self, uid: str, claim: DeviceClaim | None) -> None:
        with self._lock:
            before = self._claims.pop(uid, None)
            devices: set[Device] = set()
            for each, sign in ((before, -1), (claim, 1)):
                for device in (each.devices or ()) if each is not None else ():
                    self._claims_of[device] += sign
                    devices.add(device)
            if before is not None and self._by_name.get((before.namespace, before.name)) is before:
                del self._by_name[before.namespace, before.name]
            if claim is not None:
                self._claims[uid] = self._by_name[claim.namespace, claim.name] = claim
            sharing = [each for each in self._claims.values() if devices and not devices.isdisjoint(each.devices or ())]
            keys = {(each.namespace, each.name) for each in (before, claim, *sharing) if each is not None}
            self._renew({pod for key in keys for pod in self._pods_of.get(key, ())})

    def template_changed(self, uid: str, template: DeviceClaim | None) -> None:
        with self._lock:
            before = self._templates.pop(uid, None)
            if before is not None:
                self._template_by_name.pop((before.namespace, before.name), None)
            if template is not None:
                self._templates[uid] = self._template_by_name[template.namespace, template.name] = template
            names = {(each.namespace, each.name) for each in (before, template) if each is not None}
            self._renew(
                {u for u, pod in self._pods.items() for c in pod.claims if (pod.namespace, c.template) in names}
            )

    def class_changed(self, uid: str, read: tuple[str, bool] | None) -> None:
        with self._lock:
            before = self._classes.pop(uid, None)
            if read is not None:
                self._classes[uid] = read
            if before != read:
                self._renew(self._pods)

    def with_claims(self, pod: Pod) -> Pod:
        """Return the pod with the GPUs of its claims, and on the node of their allocation."""
        if not isinstance(pod, ClaimingPod):
            return pod
        with self._lock:
            parts = [part for claim in pod.claims for part in self._of_claim(pod, claim)]
            claimed = float(sum((part for part, _ in parts), Fraction()))
            nodes = {node for _, node in parts if node}
            allocated = not pod.node and len(nodes) == 1 and claimed > 0
            return pod.with_claimed(claimed, nodes.pop() if allocated else pod.node)

    def _of_claim(self, pod: Pod, each: PodClaim) -> Iterator[tuple[Fraction, str]]:
        """Yield the part of the pod in the GPUs of a claim, and the node of its allocation."""
        claim = self._by_name.get((pod.namespace, each.name)) if each.name else None
        if claim is None:
            claim = self._template_by_name.get((pod.namespace, each.template))
        if claim is None:
            return
        if claim.devices is None:
            amount = Fraction(requested(claim, dict(self._classes.values())))
        else:
            amount = sum((Fraction(1, max(1, self._claims_of[device])) for device in claim.devices), Fraction())
        pods = len(self._pods_of.get((pod.namespace, each.name), ())) if each.name else 1
        yield amount / max(1, pods), claim.node

    def _renew(self, uids: Collection[str]) -> None:
        for uid in sorted(uids):
            self._changed(uid, self.with_claims(self._pods[uid]))


def _keys(pod: Pod | None) -> list[Key]:
    return [(pod.namespace, each.name) for each in pod.claims if each.name] if isinstance(pod, ClaimingPod) else []


def _reflector(
    api: Api, kinds: Any, read: Callable[[Any], Any], changed: Callable[[str, Any], None], now_ms: Callable[[], int]
) -> Reflector[Any, Any]:
    first, *others = (kind.path() for kind in kinds)
    return Reflector(api, first, dict, read, changed, others=others, optional=True, now_ms=now_ms)
