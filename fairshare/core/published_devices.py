"""Counts the GPUs that nodes offer by dynamic resource allocation (DRA), for nodes that list no GPU themselves.

A driver publishes the devices of a node in ResourceSlices. On a node with such a driver and no device plugin,
`status.allocatable` has no GPU, so these devices are its capacity. A GPU that is published together with its possible
MIG devices counts once. MIG devices without their GPU count as they do in `status.allocatable`. Of a pool only the
newest generation counts, because older ones are being replaced.

Source: kubernetes.io API reference, ResourceSlice of resource.k8s.io v1, v1beta2 and v1beta1 (where a device has
`basic`); kubernetes-sigs/dra-driver-nvidia-gpu (attributes `type`, `uuid`, `parentUUID`, `profile`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import fsum
from typing import Any, Final

from fairshare.core.device_claims import DRIVERS, kinds
from gputally.base.mig_profiles import compute_slices
from gputally.kubernetes.objects import GPU, MIG, MigSlices, Object, gpus, gpus_of_node, slices_of_node, value_at

SLICES: Final = kinds("ResourceSlice", "resourceslices", namespaced=False)
_TYPED: Final = "gpu.nvidia.com"
"""The driver whose devices are GPUs, MIG devices, or other forms of the same GPU."""


def with_published(nodes: Sequence[Object], slices: Sequence[Object]) -> tuple[tuple[Object, ...], frozenset[str]]:
    """Return the nodes, with published GPUs as allocatable where a node lists none, and the names of these nodes.

    slices: the ResourceSlices of the cluster."""
    if not slices:
        return tuple(nodes), frozenset()
    published = _by_node(slices, {str(node["metadata"]["name"]): slices_of_node(node) for node in nodes})
    result: list[Object] = []
    counted: list[str] = []
    for node in nodes:
        name, status = str(node["metadata"]["name"]), node.get("status") or {}
        count = published.get(name, 0.0)
        if count <= 0 or any(gpus_of_node(node, key) > 0 for key in ("allocatable", "capacity")):
            result.append(node)
            continue
        counted.append(name)
        listed = {key: {**(status.get(key) or {}), GPU: count} for key in ("allocatable", "capacity")}
        result.append({**node, "status": {**status, **listed}})
    return tuple(result), frozenset(counted)


def _by_node(slices: Sequence[Object], by_node: Mapping[str, MigSlices]) -> Mapping[str, float]:
    """Return the published GPUs by node. by_node: the compute slices of the GPUs of each node."""
    newest: dict[tuple[str, str], int] = {}
    for each in slices:
        key, generation = _pool(each)
        newest[key] = max(generation, newest.get(key, 0))
    devices: dict[str, dict[tuple[str, str, str], Mapping[str, Any]]] = {}
    for each in slices:
        key, generation = _pool(each)
        if key[0] in DRIVERS and generation == newest[key]:
            for node, device in _devices(each):
                devices.setdefault(node, {})[(*key, str(device.get("name")))] = device
    return {node: _gpus(own, by_node[node]) for node, own in devices.items() if node in by_node}


def _pool(each: Object) -> tuple[tuple[str, str], int]:
    """Return the driver and the pool of a slice, and its generation."""
    pool = value_at(each, ("spec", "pool")) or {}
    return (str(value_at(each, ("spec", "driver"))), str(pool.get("name"))), int(pool.get("generation") or 0)


def _devices(each: Object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the devices of a slice that are on one node, each with the node."""
    for device in value_at(each, ("spec", "devices")) or ():
        basic = device.get("basic") or {}
        node = value_at(each, ("spec", "nodeName")) or device.get("nodeName") or basic.get("nodeName")
        if node:
            yield str(node), {**basic, **device}


def _gpus(devices: Mapping[tuple[str, str, str], Mapping[str, Any]], of_node: MigSlices) -> float:
    """Return the GPUs of one node. devices: by driver, pool and name. of_node: the compute slices of its GPUs."""
    whole = {_text(each, "uuid") for each in devices.values() if _text(each, "type") in ("", "gpu")} - {""}
    amounts = []
    for (driver, _, _), device in devices.items():
        kind = _text(device, "type") if driver == _TYPED else ""
        if kind == "mig" and _text(device, "parentUUID") not in whole:
            product = _text(device, "productName")
            sliced = partial(compute_slices, product) if product else of_node
            amounts.append(gpus({f"{MIG}{_text(device, 'profile')}": 1}, sliced))
        elif kind in ("", "gpu"):
            amounts.append(1.0)
    return fsum(amounts)


def _text(device: Mapping[str, Any], attribute: str) -> str:
    attributes = device.get("attributes") or {}
    value = attributes.get(attribute) or attributes.get(f"{_TYPED}/{attribute}") or {}
    return str(value.get("string") or "")
