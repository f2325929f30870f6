"""Reads how many GPUs a pod has by ResourceClaims (dynamic resource allocation, DRA) instead of by `nvidia.com/gpu`.

A pod names claims, or templates of which the cluster makes a claim for each pod. A claim requests devices of device
classes. Before its allocation the requests count, as far as their device class is one of GPUs; afterwards the allocated
devices of drivers of GPUs count, because only they show which devices `allocationMode: All` and a list of alternatives
became. Before the allocation `All` counts as one GPU, and of alternatives the first counts. Devices with admin access
are only monitored, and do not count. A device that several claims share, and a claim that several pods share, count in
equal parts.

A device class is one of GPUs if its selectors name a driver of GPUs or its extended resource is a GPU, or if it has no
selectors and the name of such a driver.

Source: kubernetes.io API reference, ResourceClaim, ResourceClaimTemplate and DeviceClass of resource.k8s.io v1 (with
`exactly` and `firstAvailable`), v1beta2 (the same) and v1beta1 (without `exactly`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gputally.kubernetes.objects import Kind, Object, counts_gpus, value_at

VERSIONS: Final = ("v1", "v1beta2", "v1beta1")


def kinds(kind: str, plural: str, *, namespaced: bool = True) -> tuple[Kind, ...]:
    """Return a kind in each of `VERSIONS`."""
    return tuple(Kind(f"resource.k8s.io/{version}", kind, plural, namespaced=namespaced) for version in VERSIONS)


CLAIMS = kinds("ResourceClaim", "resourceclaims")
TEMPLATES = kinds("ResourceClaimTemplate", "resourceclaimtemplates")
CLASSES = kinds("DeviceClass", "deviceclasses", namespaced=False)
DRIVERS: Final = frozenset({"gpu.nvidia.com", "gpu.amd.com", "gpu.intel.com"})
"""Drivers whose devices are GPUs or parts of GPUs."""
_OWN_CLASSES = DRIVERS | {"mig.nvidia.com"}
"""Device classes that these drivers install."""
_DRIVER = re.compile(r"""device\.driver\s*==\s*["']([^"']{1,63})["']""")
MOST_DEVICES: Final = 32
"""The largest number of devices that the API allows in one claim."""
Device = tuple[str, str, str]
"""Driver, pool and name of a device."""


@dataclass(frozen=True, slots=True)
class PodClaim:
    """A claim of a pod: the claim's name, or "" and the name of its template while the cluster has not made it."""

    name: str
    template: str = ""


@dataclass(frozen=True, slots=True)
class DeviceClaim:
    """A ResourceClaim, or a template of one.

    requests: device classes with the number of devices.
    devices: the allocated devices of GPU drivers; None before the allocation.
    node: the node of the allocation; "" if it is unknown."""

    namespace: str
    name: str
    requests: tuple[tuple[str, int], ...]
    devices: tuple[Device, ...] | None = None
    node: str = ""


def pod_claims(obj: Object) -> tuple[PodClaim, ...]:
    """Return the claims of a pod."""
    status = value_at(obj, ("status", "resourceClaimStatuses")) or ()
    made = {str(each.get("name")): str(each.get("resourceClaimName") or "") for each in status}
    return tuple(
        PodClaim(
            str(each.get("resourceClaimName") or made.get(str(each.get("name"))) or ""),
            str(each.get("resourceClaimTemplateName") or ""),
        )
        for each in value_at(obj, ("spec", "resourceClaims")) or ()
    )


def read_claim(obj: Object) -> DeviceClaim:
    """Read a ResourceClaim, of any version."""
    metadata = obj["metadata"]
    devices, node = _allocated(value_at(obj, ("status", "allocation")))
    return DeviceClaim(
        metadata.get("namespace", ""), metadata["name"], tuple(_requests(obj.get("spec") or {})), devices, node
    )


def read_template(obj: Object) -> DeviceClaim:
    """Read a ResourceClaimTemplate, of any version."""
    metadata = obj["metadata"]
    spec = value_at(obj, ("spec", "spec")) or {}
    return DeviceClaim(metadata.get("namespace", ""), metadata["name"], tuple(_requests(spec)))


def read_class(obj: Object) -> tuple[str, bool]:
    """Return the name of a DeviceClass, and whether its devices are GPUs."""
    name, spec = str(obj["metadata"]["name"]), obj.get("spec") or {}
    expressions = [str(value_at(each, ("cel", "expression")) or "") for each in spec.get("selectors") or ()]
    drivers = {driver for expression in expressions for driver in _DRIVER.findall(expression)}
    if drivers:
        return name, not drivers.isdisjoint(DRIVERS)
    return name, counts_gpus(spec.get("extendedResourceName")) or (not expressions and name in _OWN_CLASSES)


def requested(claim: DeviceClaim, classes: Mapping[str, bool]) -> float:
    """Return the GPUs that a claim requests. classes: whether the devices of each device class are GPUs."""
    return float(sum(count for name, count in claim.requests if classes.get(name, name in _OWN_CLASSES)))


def _requests(spec: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for request in value_at(dict(spec), ("devices", "requests")) or ():
        wanted = request.get("exactly") or next(iter(request.get("firstAvailable") or ()), request)
        name, count = wanted.get("deviceClassName"), wanted.get("count")
        if name and wanted.get("adminAccess") is not True:
            number = count if isinstance(count, int) and not isinstance(count, bool) else 1
            yield str(name), min(max(1, number), MOST_DEVICES)


def _allocated(allocation: object) -> tuple[tuple[Device, ...] | None, str]:
    if not isinstance(allocation, dict):
        return None, ""
    devices = tuple(
        (str(each.get("driver")), str(each.get("pool")), str(each.get("device")))
        for each in value_at(allocation, ("devices", "results")) or ()
        if each.get("driver") in DRIVERS and each.get("adminAccess") is not True
    )
    names = {
        str(value)
        for term in value_at(allocation, ("nodeSelector", "nodeSelectorTerms")) or ()
        for each in term.get("matchFields") or ()
        if each.get("key") == "metadata.name" and each.get("operator") == "In"
        for value in each.get("values") or ()
    }
    return devices, names.pop() if len(names) == 1 else ""
