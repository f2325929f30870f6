"""What a kubelet lists of pods and their devices, joined with the pods of the API server on a node with three GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from agent.holders.kubelet.device_allocations import NodeAllocations, NodeDevices, find_holders
from agent.holders.kubelet.kubelet_pod_resources import ContainerDevices, ContainerResources, PodResources
from agent.holders.kubelet.kubernetes_api_objects import PodView
from tests.agent.sample_values import gpu, uuid

A, B = uuid(0), uuid(1)
GPUS = (gpu(0), gpu(1), gpu(2, "1g.18gb", "3g.71gb"))
MEMORY_MIB = 143_771
FORGED = {"hami.io/vgpu-devices-allocated": f"{B},NVIDIA,1438,1:;", "fake.gputally.dev/fraction": "0.01",
          "fake.gputally.dev/memory": "1", "nvidia.com/gpucores": "1", "nvidia.com/gpumem": "1"}  # fmt: skip
"""Annotations and labels that the owner of a pod can change at any time."""


def given_pod(name: str, *containers: ContainerResources, namespace: str = "vision") -> PodResources:
    return PodResources(namespace, name, containers)


def box(name: str, *ids: str, resource: str = "nvidia.com/gpu") -> ContainerResources:
    return ContainerResources(name, (ContainerDevices(resource, ids),))


def offered(*ids: str) -> tuple[ContainerDevices, ...]:
    return (ContainerDevices("nvidia.com/gpu", ids),)


FAKE = frozenset({"fake"})


def join(pods: Iterable[PodResources], views: Iterable[PodView] = (), **node: object) -> NodeAllocations:
    return find_holders(pods, {v.key: v for v in views}, NodeDevices(GPUS, **{"systems": FAKE, **node}))  # type: ignore[arg-type]
