"""Reads ResourceClaims and ResourceSlices (DRA) of the devices that pods name.

The kubelet lists them like any other, so a monitor would be taken for a second holder of every GPU it watches.
Only the claim itself says so. Each one that is named is asked for by name, once and then now and then, on a thread
of its own: readers never wait. One that cannot be read counts as an ordinary claim, and it is said.
Source: kubernetes.io, "Dynamic Resource Allocation", admin access; API reference, ResourceClaim v1.

A claim names a device of a pool; its uuid is an attribute in the ResourceSlice its driver publishes. With it
a statically partitioned MIG device is found, which no name alone could tell. Clusters without DRA have no
such objects. Source: kubernetes.io API reference, ResourceSlice v1; attribute `uuid` of gpu.nvidia.com.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence

from agent.holders import api_objects
from agent.holders.device_ids import NVIDIA_DRA
from agent.holders.kubelet_pod_resources import ClaimedDevice, PodResources
from agent.holders.lean_list_watch import FORBIDDEN, NOT_FOUND, Api, ApiUnavailable
from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

log = logging.getLogger("agent.holders.resource_claims")

CLAIMS_PATH = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims/{}"
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

    def run(self, stop: threading.Event, task: BackgroundTask) -> None:
        """Ask until `stop` is set; `close` wakes it."""
        while not stop.is_set():
            self._wake.clear()
            task.begin()
            self.step()
            task.succeed()
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
            except (ApiUnavailable, api_objects.Unreadable) as error:
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
        found = api_objects.decode(self._api.page(CLAIMS_PATH.format(namespace, name), {}), api_objects.ResourceClaim)
        allocation = found.status.allocation if found.status else None
        results = allocation.devices.results if allocation and allocation.devices else None
        return frozenset((namespace, name, r.pool, r.device) for r in results or () if r.admin_access)


def is_watched(one: ClaimedDevice, watched: Watched) -> bool:
    """Whether the claim only looks at this device."""
    return (one.claim_namespace, one.claim, one.pool, one.device) in watched


SLICES_PATH = "/apis/resource.k8s.io/v1/resourceslices"
MAX_SLICES = 256
Device = tuple[str, str]
"""(pool, device)."""


class SliceStore:
    """`agent.holders.lean_list_watch.Store` of one node's slices."""

    def __init__(self) -> None:
        self._slices: dict[str, dict[Device, str]] = {}
        self._uuids: Mapping[Device, str] = {}

    def uuids(self) -> Mapping[Device, str]:
        """The uuid of every device that has one. Not to be changed; a change makes a new one."""
        return self._uuids

    def replace(self, items: Sequence[bytes]) -> None:
        """See agent.holders.lean_list_watch.Store."""
        self._slices = {}
        for item in items[:MAX_SLICES]:
            self._take("ADDED", item)
        self._join()

    def apply(self, change: str, item: bytes) -> None:
        """See agent.holders.lean_list_watch.Store."""
        self._take(change, item)
        self._join()

    def _take(self, change: str, item: bytes) -> None:
        try:
            found = api_objects.decode(item, api_objects.ResourceSlice)
        except api_objects.Unreadable as error:
            log.warning("a resource slice that cannot be read", extra={"reason": str(error)[:200]})
            return
        name, spec = found.metadata.name, found.spec
        if change == "DELETED" or spec.driver != NVIDIA_DRA:
            self._slices.pop(name, None)
        elif name in self._slices or len(self._slices) < MAX_SLICES:
            self._slices[name] = {
                (spec.pool.name, device.name): uuid.string
                for device in spec.devices or ()
                if (uuid := (device.attributes or {}).get("uuid")) is not None and uuid.string
            }

    def _join(self) -> None:
        self._uuids = {device: uuid for devices in self._slices.values() for device, uuid in devices.items()}
