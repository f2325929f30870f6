"""What the devices of DRA drivers are, by the names claims know them by.

A claim names a device of a pool; its uuid is an attribute in the ResourceSlice its driver publishes. With it
a statically partitioned MIG device is found, which no name alone could tell. Clusters without DRA have no
such objects. Source: kubernetes.io API reference, ResourceSlice v1; attribute `uuid` of gpu.nvidia.com.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from agent.kube import apijson
from agent.kube.deviceids import NVIDIA_DRA

log = logging.getLogger("agent.kube.resourceslices")

PATH = "/apis/resource.k8s.io/v1/resourceslices"
MAX_SLICES = 256
Device = tuple[str, str]
"""(pool, device)."""


class SliceStore:
    """`agent.kube.reflector.Store` of one node's slices."""

    def __init__(self) -> None:
        self._slices: dict[str, dict[Device, str]] = {}
        self._uuids: Mapping[Device, str] = {}

    def uuids(self) -> Mapping[Device, str]:
        """The uuid of every device that has one. Not to be changed; a change makes a new one."""
        return self._uuids

    def replace(self, items: Sequence[bytes]) -> None:
        """See agent.kube.reflector.Store."""
        self._slices = {}
        for item in items[:MAX_SLICES]:
            self._take("ADDED", item)
        self._join()

    def apply(self, change: str, item: bytes) -> None:
        """See agent.kube.reflector.Store."""
        self._take(change, item)
        self._join()

    def _take(self, change: str, item: bytes) -> None:
        try:
            found = apijson.decode(item, apijson.ResourceSlice)
        except apijson.Unreadable as error:
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
