"""Groups devices that a question cannot tell apart, so that sums are as small as the answer.

Usage is summed by the engine per kind of device that the question can see: of all together, of those that are
alike in what it asks (model, pool, node …), or of each. A month by job and model is then as long as its jobs, not
as its jobs times their GPUs. A GPU that was of several kinds, because it moved or changed its name, is told apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from accountant.storage.gpu_lifetimes import Fleet
from accountant.storage.span_plan import EVERY_GPU
from accountant.storage.write import record_columns
from accountant.storage.write.name_ids import NO_DEVICE, DeviceName
from accountant.wire.usage_models import Dimension

OF_NODES: frozenset[Dimension] = frozenset({"pool", "region", "zone", "instance_type", "capacity_type"})
_OF_EACH: frozenset[Dimension] = frozenset({"gpu", "mig_profile"})
Shown = tuple[int, DeviceName]
"""A GPU and a device that have what the question asks of all of a kind."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """of: device id -> kind. table: the same for the engine, made once: it is as long as there are devices."""

    of: Mapping[int, int]
    table: pa.Table

    @classmethod
    def told(cls, of: Mapping[int, int]) -> Kinds:
        """With its table."""
        return cls(of, record_columns.column_table(record_columns.KIND, of.items()))


@dataclass(frozen=True, slots=True)
class DeviceKinds:
    """kinds: of devices, for the engine; None where it sums all or each. shown, member: by what the engine
    answers as the device; a member is one GPU, or all that are alike. of_gpu: the member each GPU belongs to.
    shared: what is shown of members that are several."""

    by_device: bool
    kinds: Kinds | None
    shown: Mapping[int, Shown]
    member: Mapping[int, int]
    of_gpu: Mapping[int, int]
    shared: Mapping[int, Shown]


class DeviceKindsCache:
    """What questions tell apart, remembered from one commit to the next as long as no device, node or GPU is new or
    another. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[frozenset[Dimension], tuple[tuple[object, ...], int, DeviceKinds]] = {}

    def read(self, fleet: Fleet, devices: Mapping[int, DeviceName], asked: frozenset[Dimension]) -> DeviceKinds:
        """`apart` of these."""
        made_of = (fleet.gpus, fleet.nodes, fleet.placed, devices)
        known = self._known.get(asked)
        if known is not None:
            before, gpus, found = known
            # The very same, not equal ones: every change makes new ones, and comparing them would take as long.
            if gpus == len(fleet.tenures) and all(a is b for a, b in zip(before, made_of, strict=True)):
                return found
        found = device_kinds(fleet, devices, asked)
        self._known[asked] = (made_of, len(fleet.tenures), found)
        return found


def device_kinds(fleet: Fleet, devices: Mapping[int, DeviceName], asked: Collection[Dimension]) -> DeviceKinds:
    """asked: the dimensions of devices in the question."""
    if not asked:
        every = {0: (EVERY_GPU, NO_DEVICE)}
        return DeviceKinds(False, None, every, {0: EVERY_GPU}, dict.fromkeys(fleet.tenures, EVERY_GPU), every)
    if _OF_EACH & set(asked):
        shown = {number: (name.gpu, name) for number, name in devices.items()}
        return DeviceKinds(
            True, None, shown, {number: name.gpu for number, name in devices.items()},
            {gpu: gpu for gpu in fleet.tenures}, {},
        )  # fmt: skip
    return _alike(fleet, devices, asked)


def _alike(fleet: Fleet, devices: Mapping[int, DeviceName], asked: Collection[Dimension]) -> DeviceKinds:
    of_node: dict[tuple[str, str], Hashable] = {}
    looks: dict[int, Hashable] = {}
    of_gpu: dict[int, set[Hashable]] = defaultdict(set)
    for number, name in devices.items():
        key = (fleet.gpus[name.gpu].cluster, name.node)
        if key not in of_node:
            of_node[key] = _look_of_node(fleet, key, asked)
        looks[number] = (of_node[key], name.gpu_model if "gpu_model" in asked else "")
        of_gpu[name.gpu].add(looks[number])
    kinds: dict[int, int] = {}
    numbers: dict[Hashable, int] = {}
    shown: dict[int, Shown] = {}
    member: dict[int, int] = {}
    shared: dict[int, Shown] = {}
    for number, name in devices.items():
        alone = len(of_gpu[name.gpu]) > 1
        kind = kinds[number] = numbers.setdefault(("alone", number) if alone else looks[number], len(numbers) + 1)
        shown.setdefault(kind, (name.gpu, name))
        # Numbers of kinds and of GPUs must not meet.
        member[kind] = name.gpu if alone else -kind
        if not alone:
            shared[-kind] = shown[kind]
    members = {name.gpu: member[kinds[number]] for number, name in devices.items()}
    return DeviceKinds(False, Kinds.told(kinds), shown, member, members, shared)


def _look_of_node(fleet: Fleet, key: tuple[str, str], asked: Collection[Dimension]) -> Hashable:
    """What a question sees of a node; a node that was something else before is like no other."""
    if "node" in asked or (OF_NODES & set(asked) and key in fleet.placed):
        return key
    facts = fleet.nodes.get(key)
    labels = tuple(getattr(facts, name, "") for name in sorted(OF_NODES & set(asked)))
    return (key[0] if "cluster" in asked else "", labels)
