"""GPUs that a node lists several times: time-slicing and MPS. Pure.

A scheduler counts what a node lists, and so do quotas, demand and shares here: a GPU in four replicas is four of them.
The books count the GPU once. Where both meet (a lost GPU, the length of a window) the nodes' labels say how many
replicas a GPU has; where nodes differ in that no number of GPUs means the same on all of them, and that is said.

Sources: NVIDIA/gpu-feature-discovery (`nvidia.com/gpu.replicas`, `nvidia.com/mig-….replicas`), NVIDIA/k8s-device-plugin
(`renameByDefault`: `nvidia.com/gpu.shared`), GKE (`cloud.google.com/gke-max-shared-clients-per-gpu`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from fairshare.kube.fields import look
from fairshare.kube.kinds import Object
from fairshare.kube.mapping import say
from fairshare.kube.quantities import GPU, gpus, quantity
from fairshare.model import Condition

UNIT = "OneUnit"
"""The type of the condition that tells of nodes on which a GPU does not count alike."""
SHARED = f"{GPU}.shared"
_GKE = "cloud.google.com/gke-max-shared-clients-per-gpu"


def devices(node: Object) -> float:
    """Physical GPUs behind what a node lists as allocatable (`quantities.gpus`)."""
    labels = look(node, ("metadata", "labels")) or {}
    listed = look(node, ("status", "allocatable")) or {}
    return fsum(gpus({name: text}) / _replicas(labels, str(name)) for name, text in listed.items())


def one_unit(nodes: Sequence[Object]) -> tuple[Condition, ...]:
    """What is to be said where GPUs do not count alike, or not at all; nothing where they do. nodes: those that may be
    given work."""
    said: list[str] = []
    renamed = {_name(node): count for node in nodes if (count := _renamed(node)) > 0}
    if renamed:
        said.append(
            f"{fsum(renamed.values()):g} {SHARED} ({say(sorted(renamed), most=4)}) are in no share, quota or demand"
            " here, while their use is in the history"
        )
    often: dict[float, list[str]] = {}
    for node in nodes:
        listed = gpus(look(node, ("status", "allocatable")))
        if listed > 0:
            often.setdefault(round(listed / devices(node), 3), []).append(_name(node))
    if len(often) > 1:
        each = "; ".join(f"{times:g} on {say(sorted(names), most=4)}" for times, names in sorted(often.items()))
        said.append(
            f"a GPU counts as {each}: schedulers, quotas and shares count replicas (time-slicing, MPS), the history"
            " counts GPUs"
        )
    reason = "ReplicasDiffer" if len(often) > 1 else "NotCounted"
    return (Condition(UNIT, "False", reason, "; ".join(said)),) if said else ()


def _replicas(labels: dict[str, str], resource: str) -> float:
    for key in (f"{resource.removesuffix('.shared')}.replicas", *((_GKE,) if resource == GPU else ())):
        count = quantity(labels.get(key))
        if count is not None and count > 1:
            return count
    return 1.0


def _renamed(node: Object) -> float:
    return quantity((look(node, ("status", "allocatable")) or {}).get(SHARED)) or 0.0


def _name(node: Object) -> str:
    return str(look(node, ("metadata", "name")))
