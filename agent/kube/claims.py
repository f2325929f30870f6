"""Which devices a ResourceClaim only looks at: admin access gives a monitor devices that others hold.

The kubelet lists them like any other, so a monitor would be taken for a second holder of every GPU it watches.
Only the claim itself says so. Each one that is named is asked for by name, once and then now and then, on a thread
of its own: readers never wait. One that cannot be read counts as an ordinary claim, and it is said.
Source: kubernetes.io, "Dynamic Resource Allocation", admin access; API reference, ResourceClaim v1.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection

from agent.clock import Clock
from agent.kube import apijson
from agent.kube.apiserver import ApiUnavailable
from agent.kube.podresources import ClaimedDevice, PodResources
from agent.kube.reflector import FORBIDDEN, NOT_FOUND, Api
from agent.units import MS_PER_MINUTE, MS_PER_SECOND

log = logging.getLogger("agent.kube.claims")

PATH = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims/{}"
HOLDS_MS = 10 * MS_PER_MINUTE
"""How long an answer holds: an allocation never changes, but a claim may be made anew under its name."""
RETRY_MS = 10 * MS_PER_SECOND
Claim = tuple[str, str]
"""(namespace, name)."""
Watched = frozenset[tuple[str, str, str, str]]
"""Devices by namespace and name of the claim, pool and device."""


class Claims:
    """The claims that pods of this node name. failure: why the latest question had no answer ("" = it had)."""

    def __init__(self, api: Api, clock: Clock) -> None:
        self.failure = ""
        self._api = api
        self._clock = clock
        self._named: frozenset[Claim] = frozenset()
        self._known: dict[Claim, tuple[Watched, int]] = {}
        self._watched: Watched = frozenset()
        self._wake = threading.Event()

    def watched(self, pods: Collection[PodResources]) -> Watched:
        """Of what these pods name, the devices that are only looked at, as far as it is known. Never waits."""
        named = frozenset(
            (one.claim_namespace, one.claim) for pod in pods for box in pod.containers for one in box.claimed
        )
        if named != self._named:
            self._named = named
            self._wake.set()
        return self._watched

    def run(self, stop: threading.Event) -> None:
        """Ask until `stop` is set; `close` wakes it."""
        while not stop.is_set():
            self._wake.clear()
            self.step()
            self._clock.wait(RETRY_MS / MS_PER_SECOND, self._wake)

    def close(self) -> None:
        """Let `run` look at its `stop`."""
        self._wake.set()

    def step(self) -> None:
        """Ask for what is not known, or not since long."""
        now_ms, named = self._clock.monotonic_ms(), self._named
        known = {claim: found for claim, found in self._known.items() if claim in named}
        failure = ""
        for claim in sorted(named):
            if claim in known and now_ms < known[claim][1]:
                continue
            try:
                known[claim] = self._ask(*claim), now_ms + HOLDS_MS
            except (ApiUnavailable, apijson.Unreadable) as error:
                failure = str(error)
                if isinstance(error, ApiUnavailable) and error.status in (FORBIDDEN, NOT_FOUND):
                    known[claim] = frozenset(), now_ms + HOLDS_MS
        if failure and not self.failure:
            log.warning("a ResourceClaim cannot be read: its devices count as held", extra={"reason": failure})
        self.failure = failure
        self._known = known
        watched: Watched = frozenset(device for devices, _ in known.values() for device in devices)
        if watched != self._watched:
            self._watched = watched

    def _ask(self, namespace: str, name: str) -> Watched:
        found = apijson.decode(self._api.page(PATH.format(namespace, name), {}), apijson.ResourceClaim)
        allocation = found.status.allocation if found.status else None
        results = allocation.devices.results if allocation and allocation.devices else None
        return frozenset((namespace, name, r.pool, r.device) for r in results or () if r.admin_access)


def is_watched(one: ClaimedDevice, watched: Watched) -> bool:
    """Whether the claim only looks at this device."""
    return (one.claim_namespace, one.claim, one.pool, one.device) in watched
