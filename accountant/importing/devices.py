"""The GPUs of the nodes, as dcgm-exporter listed them, with what they did. Pure.

A device that several pods share is listed several times, as copies of the whole: the largest value is the device's.
Where utilisation is known as time with a kernel running and as engine activity, the first counts for a whole GPU; an
instance has the second alone, as a part of the instance. Its node is the one whose pods it was labelled with, or the
name that the series carries and Kubernetes knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accountant.importing.asked import Container
from accountant.importing.cells import Grid, Track
from accountant.importing.layout import GpuLayout, Part, mig_slice
from accountant.importing.series import Labels, Observed, PodName, Series, device_of, labelled_pod, pod_of
from accountant.overlap import Span
from agent.wire import Slice

_NODE_LABELS = ("Hostname", "hostname", "node", "exported_node", "kubernetes_node", "instance")
_MILLION, _MILLI = 1_000_000, 1_000
_MOST_RATIO, _MOST_MIB, _MOST_WATTS = 1.0, 2**24, 100_000
MAKESHIFT = "imported:"
"""Begins the name of a GPU that nobody has ever listed."""
_MIG_RESOURCE = "nvidia.com/mig-"
Place = tuple[str, int | None]


@dataclass(frozen=True, eq=False)
class Device:
    """order: its place among the GPUs of its node. slices: its MIG instances, by id. sampled: cells in which the
    exporter listed it. labelled: cells by part and pod. Tracks are by part, power is of the GPU."""

    uuid: str
    model: str
    node: str
    order: tuple[int, str]
    slices: tuple[Slice, ...] = ()
    sampled: frozenset[int] = frozenset()
    labelled: Mapping[tuple[int, PodName], frozenset[int]] = field(default_factory=dict)
    busy: Mapping[int, Track] = field(default_factory=dict)
    memory: Mapping[int, Track] = field(default_factory=dict)
    power: Track | None = None

    def layout(self, slots: Sequence[int], known: tuple[Span, ...], lost: tuple[Span, ...]) -> GpuLayout:
        """slots: by part."""
        parts = tuple(
            Part(one, slots[number], self.busy.get(number), self.memory.get(number))
            for number, one in enumerate(self.slices or (None,))
        )
        return GpuLayout(self.uuid, self.model, parts, known, lost, self.power)


def devices_of(seen: Observed, nodes_of: Mapping[PodName, str], listed: Mapping[str, object]) -> list[Device]:
    """By node and order. nodes_of: where each pod was; listed: the nodes that Kubernetes knows."""
    about: dict[str, list[Labels]] = {}
    every = [*seen.devices, *(one.labels for table in (seen.busy, seen.memory, seen.power) for one in table)]
    for labels in every:
        place = device_of(labels)
        if place is not None:
            about.setdefault(place[0], []).append(labels)
    tables = {
        name: _by_place(table, seen.grid)
        for name, table in (("busy", seen.busy), ("memory", seen.memory), ("power", seen.power))
    }
    labelled = _labelled(seen)
    found = [
        _device(uuid, of_gpu, tables, labelled.get(uuid, {}), seen.grid, _node(of_gpu, nodes_of, listed))
        for uuid, of_gpu in about.items()
    ]
    return sorted((one for one in found if one.node), key=lambda one: (one.node, one.order))


def _device(
    uuid: str,
    about: Sequence[Labels],
    tables: Mapping[str, Mapping[Place, Mapping[int, float]]],
    labelled: Mapping[tuple[int | None, PodName], set[int]],
    grid: Grid,
    node: str,
) -> Device:
    model = next((labels["modelName"] for labels in about if labels.get("modelName")), "")
    profiles = {place[1]: labels.get("GPU_I_PROFILE", "") for labels in about if (place := device_of(labels))}
    slices = [
        made
        for gi, profile in sorted((gi, profile) for gi, profile in profiles.items() if gi is not None)
        if (made := mig_slice(profile, gi, model)) is not None
    ]
    places: list[Place] = [(uuid, one.gi) for one in slices] or [(uuid, None)]
    index = next((labels["gpu"] for labels in about if labels.get("gpu")), "")
    sampled = {cell for table in tables.values() for place in {(uuid, None), *places} for cell in table.get(place, ())}
    return Device(
        uuid=uuid,
        model=model,
        node=node,
        order=(int(index) if index.isascii() and index.isdigit() else 0, uuid),
        slices=tuple(slices),
        sampled=frozenset(sampled),
        labelled={
            (number, pod): frozenset(cells)
            for number, (_, gi) in enumerate(places)
            for (instance, pod), cells in labelled.items()
            if instance == gi
        },
        busy=_tracks(tables["busy"], places, grid, _MILLION, _MOST_RATIO),
        memory=_tracks(tables["memory"], places, grid, 1, _MOST_MIB),
        power=_tracks(tables["power"], [(uuid, None)], grid, _MILLI, _MOST_WATTS).get(0),
    )


def _by_place(table: Sequence[Series], grid: Grid) -> dict[Place, dict[int, float]]:
    """The largest value of each cell, by place."""
    found: dict[Place, dict[int, float]] = {}
    for one in table:
        place = device_of(one.labels)
        if place is not None:
            values = found.setdefault(place, {})
            for cell, value in one.cells(grid).items():
                values[cell] = max(value, values.get(cell, value))
    return found


def _tracks(
    table: Mapping[Place, Mapping[int, float]], places: Sequence[Place], grid: Grid, times: int, most: float
) -> dict[int, Track]:
    """In whole numbers. A value below 0 is none; one above what can be is the most that can be."""
    return {
        number: Track(
            grid, {cell: round(min(value, most) * times) for cell, value in table[place].items() if value >= 0}
        )
        for number, place in enumerate(places)
        if place in table
    }


def _labelled(seen: Observed) -> dict[str, dict[tuple[int | None, PodName], set[int]]]:
    found: dict[str, dict[tuple[int | None, PodName], set[int]]] = {}
    for table in (seen.busy, seen.memory, seen.power):
        for one in table:
            place, pod = device_of(one.labels), labelled_pod(one.labels)
            if place is not None and pod is not None:
                found.setdefault(place[0], {}).setdefault((place[1], pod), set()).update(one.cells(seen.grid))
    return found


def _node(about: Sequence[Labels], nodes_of: Mapping[PodName, str], listed: Mapping[str, object]) -> str:
    """A name it carries, if Kubernetes knows that; else the node of most pods it was labelled with, the exporter's own
    among them; else the first name it carries."""
    votes: Counter[str] = Counter()
    for labels in about:
        for pod in (pod_of(labels), (labels.get("namespace", ""), labels.get("pod", ""))):
            if pod in nodes_of:
                votes[nodes_of[pod]] += 1
    carried = [
        labels[key].rpartition(":")[0] or labels[key] for labels in about for key in _NODE_LABELS if key in labels
    ]
    known = next((name for name in carried if name in listed), "")
    if known:
        return known
    if votes:
        return min(votes, key=lambda name: (-votes[name], name))
    return carried[0] if carried else ""


def makeshift(
    node: str, offered: Mapping[str, int], containers: Sequence[Container], labels: Mapping[str, str]
) -> list[Device]:
    """As many GPUs as a node offers, or was seen to need, where no exporter ever listed them. labels: the node's."""
    model = labels.get("label_nvidia_com_gpu_product", "")
    replicas = labels.get("label_nvidia_com_gpu_replicas", "")
    each = int(replicas) if replicas.isascii() and replicas.isdigit() and int(replicas) > 0 else 1
    needed = {one.resource: 0 for one in containers}
    for one in containers:
        needed[one.resource] = max(needed[one.resource], one.count)
    counts = {**needed, **offered}
    whole = sum(-(-count // each) for name, count in counts.items() if not name.startswith(_MIG_RESOURCE))
    made = [Device(f"{MAKESHIFT}{node}/{number}", model, node, (number, "")) for number in range(whole)]
    instances = [
        name.removeprefix(_MIG_RESOURCE)
        for name, count in sorted(counts.items())
        if name.startswith(_MIG_RESOURCE)
        for _ in range(count)
    ]
    return [*made, *_partitioned(node, model, instances, whole)]


def _partitioned(node: str, model: str, profiles: Sequence[str], first: int) -> list[Device]:
    """Instances put into as few GPUs as hold them, the largest first."""
    bins: list[list[Slice]] = []
    read = [one for gi, profile in enumerate(profiles) if (one := mig_slice(profile, gi, model)) is not None]
    for one in sorted(read, key=lambda part: (-part.compute, part.gi)):
        room = next((b for b in bins if sum(x.compute for x in b) + one.compute <= one.compute_of), None)
        if room is None:
            bins.append([one])
        else:
            room.append(one)
    return [
        Device(f"{MAKESHIFT}{node}/{first + number}", model, node, (first + number, ""), slices=tuple(parts))
        for number, parts in enumerate(bins)
    ]
