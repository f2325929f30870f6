"""What jobs can run on: nodes, their GPUs, and the slots a GPU is handed out in.

A slot is what one member of a gang holds: a whole GPU, one MIG instance, or one replica of a
time-sliced GPU. Slots of one shape, model and pool are interchangeable but for their place.
Frozen data only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WHOLE = "gpu"
"""Shape of a slot that is a whole GPU. Only these are divided into fair shares and reclaimed."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One physical GPU and the shapes of its slots: `(WHOLE,)`, a MIG geometry, or N equal replicas."""

    uuid: str
    model: str
    shapes: tuple[str, ...] = (WHOLE,)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node. `pool` is what jobs may be restricted to, e.g. `spot`."""

    name: str
    gpus: tuple[GpuSpec, ...]
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Flavour:
    """What makes slots interchangeable. A gang runs on slots of one flavour."""

    shape: str
    model: str
    pool: str


@dataclass(frozen=True, slots=True)
class Slot:
    """One schedulable part of a GPU: `index` counts from 0 in the order of `GpuSpec.shapes`."""

    node: str
    gpu: str
    index: int
    flavour: Flavour


@dataclass(frozen=True, slots=True)
class Outage:
    """A span in which a node, or one GPU, cannot be used; `end_ms` None: for good.

    Its jobs stop at `start_ms` as after a crash: they keep what they checkpointed."""

    target: Literal["node", "gpu"]
    name: str
    start_ms: int
    end_ms: int | None
    reason: str


def slots_of(node: NodeSpec) -> tuple[Slot, ...]:
    """All slots of a node, by GPU and index."""
    return tuple(
        Slot(node.name, gpu.uuid, index, Flavour(shape, gpu.model, node.pool))
        for gpu in node.gpus
        for index, shape in enumerate(gpu.shapes)
    )
