"""Reads the series of dcgm-exporter and kube-state-metrics: labels, devices, activity and GPU requests.

Prometheus renames a scraped label that conflicts with one of the target to `exported_…`, unless the scrape honours
labels. The `exported_` name therefore takes precedence. If no pod holds a device, the `pod` label of its dcgm-exporter
series names the exporter itself. A label with the exporter's name is therefore ignored. An exporter with another name
is recognised because kube-state-metrics shows no GPU request of its pod.

A device that several pods share is listed several times with the values of the whole device, so the largest value is
used. Utilisation may be available both as time with a running kernel and as engine activity. For a whole GPU the first
is used. A MIG instance has only the second, as a part of the instance. The node of a device is the name of a known node
in the labels of its series. If no label has such a name, it is the node of most pods that the labels name.

A pod that is listed before and after a missing scrape is taken to have existed in between.

Not every resource of NVIDIA is a GPU: HAMi's limits of a container (`nvidia.com/gpumem`) have a GPU's domain, and so do
network devices. A name counts as GPUs if it says so (`gpu`, `gpu.shared`, `mig-…`, a GPU's model). Texts that become
names in the ledger are escaped and cut where they are read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from accountant.core.claim_overlap import Span
from accountant.history_import.gpu_assignment import (
    FigureSeries,
    GpuLayout,
    GpuPart,
    TimeGrid,
    bridge_gaps,
    mig_slice,
    pack_instances,
    runs,
)
from accountant.inventory.pod_facts import job_label_keys
from agent.wire import Slice
from gputally.base.gpu_model_names import gpu_model_of_node, profile_of_product
from gputally.base.mig_profiles import parse_mig_profile
from gputally.base.untrusted_text import as_name
from gputally.kubernetes.pod_queue_labels import queue_keys

Labels = Mapping[str, str]
PodName = tuple[str, str]
"""(namespace, name)."""
_EXPORTER = re.compile(r"dcgm-exporter")
_OLD_NAMES: Final = {"pod": ("pod_name",), "namespace": ("pod_namespace",), "container": ("container_name",)}
_RESOURCE = re.compile(r"nvidia[._]com[/_](.+)")
_MIG = re.compile(r"mig[-_](.+)")
_WORDS = re.compile(r"[-._/]+")
_GPU_WORD = re.compile(
    r"gpu.*|[pv]gpu|grid|tesla|quadro|geforce|rtx.*|g[abdhkmpv]\d{3}.*|tu\d{3}.*|ad\d{3}.*|"
    r"k80|m60|p4|p40|p100|v100s?|t4g?|a2|a10g?|a16|a30|a40|a[18]00|l4|l20|l40s?|h20|h[128]00|b[123]00"
)
"""A word of a GPU's name in a resource: itself, its chip (as KubeVirt names it) or its model."""
_OTHER_WORD = re.compile(
    r"gpumem.*|gpucores?|mem|memory|cores?|percentage|priority|hostdev|imex|channels?|rdma|sriov|roce|hcas?|ib|ipoib|"
    r"[vp]fs?|nics?|net|netdev|macvlan|switchdev|ovs|mlnx.*|mlx.*|connectx.*|cx\d.*|bf\d.*|resib.*"
)
"""A word that says that a resource is no GPU, even if another word says so: a limit, a network device, a channel."""
_LIMITS: Final = {"gpumem": "memory", "gpumem.percentage": "memory percent", "gpucores": "cores"}


@dataclass(frozen=True, slots=True)
class PrometheusSeries:
    """One time series from Prometheus.

    times: epoch ms, ascending.
    values: one per time."""

    labels: Labels
    times: Sequence[int]
    values: Sequence[float]

    def cells(self, grid: TimeGrid) -> dict[int, float]:
        """Finite values by cell of the grid."""
        start, step, count = grid.start_ms, grid.step_ms, grid.count  # a chunk has a million of these
        return {
            (at - start) // step - 1: value
            for at, value in zip(self.times, self.values, strict=True)
            if value - value == 0 and not (at - start) % step and start < at <= start + count * step
        }


@dataclass(frozen=True)
class Observed:
    """The query results of one chunk. Series over the grid: `requests` and `init_requests` (value: count), `over` (pods
    that have ended), `nodes` (listed), `unready`, `busy` (0 to 1), `memory` (MiB), `power` (W). Others have one value
    per series: `devices` seen recently, `allocatable`, `starts`, `ends` (epoch s), and names.

    window_ms: how long before an instant a sample counts for it.
    scrape_ms: interval between samples of kube-state-metrics."""

    grid: TimeGrid
    window_ms: int
    scrape_ms: int
    requests: tuple[PrometheusSeries, ...] = ()
    init_requests: tuple[PrometheusSeries, ...] = ()
    over: tuple[PrometheusSeries, ...] = ()
    nodes: tuple[PrometheusSeries, ...] = ()
    unready: tuple[PrometheusSeries, ...] = ()
    busy: tuple[PrometheusSeries, ...] = ()
    memory: tuple[PrometheusSeries, ...] = ()
    power: tuple[PrometheusSeries, ...] = ()
    devices: tuple[Labels, ...] = ()
    allocatable: tuple[tuple[Labels, float], ...] = ()
    starts: tuple[tuple[Labels, float], ...] = ()
    ends: tuple[tuple[Labels, float], ...] = ()
    pods: tuple[Labels, ...] = ()
    owners: tuple[Labels, ...] = ()
    upper_owners: tuple[Labels, ...] = ()
    schedulers: tuple[Labels, ...] = ()
    pod_labels: tuple[Labels, ...] = ()
    node_labels: tuple[Labels, ...] = field(default=())


def of(labels: Labels, name: str) -> str:
    """A label by its own name, an older name, or with the prefix `exported_`."""
    for known in (name, *_OLD_NAMES.get(name, ())):
        if value := labels.get(f"exported_{known}") or labels.get(known):
            return as_name(value)
    return ""


def pod_of(labels: Labels) -> PodName:
    return of(labels, "namespace"), of(labels, "pod")


def device_of(labels: Labels) -> tuple[str, int | None] | None:
    """(GPU uuid, GPU instance or None) of a series of dcgm-exporter; None if it names no GPU."""
    uuid = labels.get("UUID") or labels.get("uuid") or ""
    instance = labels.get("GPU_I_ID", "")
    if not uuid:
        return None
    return as_name(uuid), whole_number(instance)


MOST_GPUS: Final = 10_000
"""Maximum number of GPUs, or of parts of them, that a node or a container is believed to have."""


def whole_number(text: str) -> int | None:
    """The number in a label; None if there is none, or one of more digits than anything here has."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


def labelled_pod(labels: Labels, exporters: str | None = None) -> PodName | None:
    """The pod that a series of dcgm-exporter names; None if there is none, or if it is the exporter itself.

    exporters: the namespace of the exporters. A pod of another namespace that has their name is a user's; None if the
    namespace is not known."""
    name = pod_of(labels)
    if not name[1] or (_has_exporters_name(labels) and exporters in (None, name[0])):
        return None
    return name


def _has_exporters_name(labels: Labels) -> bool:
    if "exported_pod" in labels or "exported_pod_name" in labels:
        return False
    return any(_EXPORTER.search(text) for text in (of(labels, "pod"), labels.get("container", "")))


def _namespace_of_exporters(every: Iterable[Labels]) -> str | None:
    """The namespace with the most pods that have an exporter's name: an exporter runs on every node with GPUs."""
    pods: dict[str, set[str]] = {}
    for labels in every:
        if _has_exporters_name(labels):
            namespace, pod = pod_of(labels)
            pods.setdefault(namespace, set()).add(pod)
    return max(pods, key=lambda namespace: (len(pods[namespace]), namespace), default=None)


def resource(text: str) -> str:
    """`nvidia_com_mig_1g_10gb` as Kubernetes writes it, `nvidia.com/mig-1g.10gb`; "" if it is not a GPU."""
    match = _RESOURCE.fullmatch(text)
    if match is None:
        return ""
    instance = _MIG.fullmatch(match[1])
    mig = parse_mig_profile(instance[1]) if instance is not None else None
    if mig is not None:
        return f"{MIG_RESOURCE}{mig.resource}"
    words = _WORDS.split(match[1].lower())
    if any(_OTHER_WORD.fullmatch(word) for word in words) or not any(_GPU_WORD.fullmatch(word) for word in words):
        return ""
    return f"nvidia.com/{match[1].replace('_', '.')}"


def unknown_resource(text: str) -> bool:
    """Whether this is a resource of NVIDIA of which nothing says whether it is a GPU, or a GPU of another vendor's
    plugin."""
    match = _RESOURCE.fullmatch(text)
    if match is None:
        return any(map(_GPU_WORD.fullmatch, _WORDS.split(text.lower())))
    return not resource(text) and not any(map(_OTHER_WORD.fullmatch, _WORDS.split(match[1])))


def limit_of(text: str) -> str:
    """What HAMi limits with this resource: `memory`, `memory percent` or `cores`; "" if it is no limit of HAMi."""
    match = _RESOURCE.fullmatch(text)
    return "" if match is None else _LIMITS.get(match[1].replace("_", ".").replace("-", "."), "")


def pod_label_names(extra: Iterable[str] = ()) -> dict[str, str]:
    """The labels that may name a pod's owner, by their names in kube-state-metrics."""
    return {
        f"label_{re.sub(r'[^a-zA-Z0-9_]', '_', key)}": key for key in sorted({*queue_keys(), *job_label_keys(), *extra})
    }


@dataclass(frozen=True, slots=True)
class RequestingContainer:
    """A container that requested `count` of a resource.

    runs: (first, last) cells in which it did.
    over: cells in which its pod was reported as ended.
    limits: HAMi's limits of one of its GPUs."""

    pod: PodName
    uid: str
    name: str
    node: str
    resource: str
    count: int
    runs: tuple[tuple[int, int], ...]
    over: frozenset[int] = frozenset()
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PodInfo:
    """A pod as in kube_pod_info."""

    uid: str
    node: str


@dataclass(frozen=True)
class PodSeries:
    """The pods and nodes, as reported by kube-state-metrics.

    heard: cells in which kube-state-metrics was scraped.
    listed, unready: cells by node.
    offered: the GPUs that each node can allocate.
    deaf: whether kube-state-metrics was never scraped."""

    containers: tuple[RequestingContainer, ...]
    pods: Mapping[PodName, PodInfo]
    heard: frozenset[int]
    listed: Mapping[str, frozenset[int]]
    unready: Mapping[str, frozenset[int]]
    offered: Mapping[str, Mapping[str, int]]
    node_labels: Mapping[str, Labels]

    @property
    def deaf(self) -> bool:
        return not self.heard


def asked_for(seen: Observed) -> PodSeries:
    """Reads from the series of kube-state-metrics which pods requested GPUs, and what each node can allocate."""
    nodes = _by_node(seen.nodes, seen)
    requests = [one for one in (*seen.requests, *_of_init(seen)) if resource(of(one.labels, "resource"))]
    heard = {cell for cells in nodes.values() for cell in cells} | {
        cell for one in requests for cell in one.cells(seen.grid)
    }
    pods = {pod_of(labels): PodInfo(of(labels, "uid"), of(labels, "node")) for labels in seen.pods}
    offered: dict[str, dict[str, int]] = {}
    for labels, value in seen.allocatable:
        name, node = resource(of(labels, "resource")), of(labels, "node")
        if name and node and 0 < value <= MOST_GPUS:
            held = offered.setdefault(node, {})
            held[name] = max(held.get(name, 0), int(value))
    unready = {node: frozenset(cells) for node, cells in _by_node(seen.unready, seen).items()}
    silent = set(range(seen.grid.count)) - heard
    return PodSeries(
        containers=_containers(requests, seen, pods, silent, _limits(seen)),
        pods=pods,
        heard=frozenset(heard),
        listed={node: frozenset(cells) for node, cells in nodes.items()},
        unready=unready,
        offered=offered,
        node_labels={of(labels, "node"): labels for labels in seen.node_labels},
    )


def _of_init(seen: Observed) -> list[PrometheusSeries]:
    """The requests of init containers, and so of sidecars, in pods none of whose other containers requests GPUs; of
    each pod and resource the largest. The kubelet keeps the devices of such a container for its pod, and gives them to
    the other containers, if those request any."""
    requests = [one.labels for one in seen.requests if resource(of(one.labels, "resource"))]
    others = {(pod_of(labels), of(labels, "uid")) for labels in requests}
    largest: dict[tuple[PodName, str, str], tuple[float, PrometheusSeries]] = {}
    for one in seen.init_requests:
        key = (pod_of(one.labels), of(one.labels, "uid"), of(one.labels, "resource"))
        most = max(one.cells(seen.grid).values(), default=0.0)
        if key[:2] not in others and most > largest.get(key, (0.0, one))[0]:
            largest[key] = (most, one)
    return [one for _, one in largest.values()]


def _by_node(table: Iterable[PrometheusSeries], seen: Observed) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for one in table:
        if node := of(one.labels, "node"):
            found.setdefault(node, set()).update(one.cells(seen.grid))
    return found


def _limits(seen: Observed) -> dict[tuple[PodName, str], dict[str, float]]:
    """HAMi's limits by pod and container: the largest value of each."""
    found: dict[tuple[PodName, str], dict[str, float]] = {}
    for one in seen.requests:
        limit = limit_of(of(one.labels, "resource"))
        values = one.cells(seen.grid) if limit else {}
        if values:
            limits = found.setdefault((pod_of(one.labels), of(one.labels, "container")), {})
            limits[limit] = max(*values.values(), limits.get(limit, 0.0))
    return found


def _containers(
    requests: Iterable[PrometheusSeries],
    seen: Observed,
    pods: Mapping[PodName, PodInfo],
    silent: set[int],
    limits: Mapping[tuple[PodName, str], Mapping[str, float]],
) -> tuple[RequestingContainer, ...]:
    over: dict[tuple[PodName, str], set[int]] = {}
    for one in seen.over:
        over.setdefault((pod_of(one.labels), of(one.labels, "uid")), set()).update(one.cells(seen.grid))
    present: dict[tuple[PodName, str, str, str, str, str, int], set[int]] = {}
    for one in requests:
        pod, labels = pod_of(one.labels), one.labels
        known = pods.get(pod, PodInfo("", ""))
        own_uid = of(labels, "uid")
        node = of(labels, "node") or known.node
        if not node:
            continue  # the pod is still waiting
        ended = over.get((pod, own_uid), set())
        key = (pod, own_uid or known.uid, own_uid, of(labels, "container"), node, resource(of(labels, "resource")))
        for cell, value in one.cells(seen.grid).items():
            if 1 <= value <= MOST_GPUS and cell not in ended:
                present.setdefault((*key, int(value)), set()).add(cell)
    made = []
    for (pod, uid, own_uid, name, node, kind, count), cells in sorted(present.items()):
        runs_of = tuple(runs(bridge_gaps(cells, silent)))
        at = frozenset(over.get((pod, own_uid), ()))
        of_one = limits.get((pod, name), {})
        made.append(RequestingContainer(pod, uid or makeshift_uid(pod), name, node, kind, count, runs_of, at, of_one))
    return tuple(made)


def makeshift_uid(pod: PodName) -> str:
    """A uid for a pod whose uid is not recorded."""
    return as_name(f"imported:{pod[0]}/{pod[1]}")


_NODE_LABELS = ("Hostname", "hostname", "node", "exported_node", "kubernetes_node", "instance")
_MILLION, _MILLI = 1_000_000, 1_000
_MOST_RATIO, _MOST_MIB, _MOST_WATTS = 1.0, 2**24, 100_000
MAKESHIFT = "imported:"
"""Prefix of the name of a GPU that was never listed."""
WHOLE = "nvidia.com/gpu"
MIG_RESOURCE = "nvidia.com/mig-"
Place = tuple[str, int | None]


@dataclass(frozen=True, eq=False)
class ExporterDevice:
    """What the exporter reported about one GPU.

    order: its index among the GPUs of its node.
    slices: its MIG instances, by id.
    sampled: cells in which the exporter listed it.
    labelled: cells by part and pod.
    busy, memory: one series per part (the GPU or a MIG instance).
    power: the power of the whole GPU."""

    uuid: str
    model: str
    node: str
    order: tuple[int, str]
    slices: tuple[Slice, ...] = ()
    sampled: frozenset[int] = frozenset()
    labelled: Mapping[tuple[int, PodName], frozenset[int]] = field(default_factory=dict)
    busy: Mapping[int, FigureSeries] = field(default_factory=dict)
    memory: Mapping[int, FigureSeries] = field(default_factory=dict)
    power: FigureSeries | None = None

    def layout(self, slots: Sequence[int], known: tuple[Span, ...], lost: tuple[Span, ...]) -> GpuLayout:
        """The device's parts (the GPU or its MIG instances). slots: how many equal slots each part has."""
        parts = tuple(
            GpuPart(one, slots[number], self.busy.get(number), self.memory.get(number))
            for number, one in enumerate(self.slices or (None,))
        )
        return GpuLayout(self.uuid, self.model, parts, known, lost, self.power)


def devices_of(seen: Observed, nodes_of: Mapping[PodName, str], listed: Mapping[str, object]) -> list[ExporterDevice]:
    """The devices by node and order.

    nodes_of: the node of each pod.
    listed: the nodes that Kubernetes knows."""
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
    grid: TimeGrid,
    node: str,
) -> ExporterDevice:
    model = as_name(next((labels["modelName"] for labels in about if labels.get("modelName")), ""))
    profiles = {place[1]: labels.get("GPU_I_PROFILE", "") for labels in about if (place := device_of(labels))}
    slices = [
        made
        for gi, profile in sorted((gi, profile) for gi, profile in profiles.items() if gi is not None)
        if (made := mig_slice(profile, gi, model)) is not None
    ]
    places: list[Place] = [(uuid, one.gi) for one in slices] or [(uuid, None)]
    index = next((labels["gpu"] for labels in about if labels.get("gpu")), "")
    sampled = {cell for table in tables.values() for place in {(uuid, None), *places} for cell in table.get(place, ())}
    return ExporterDevice(
        uuid=uuid,
        model=model,
        node=node,
        order=(whole_number(index) or 0, uuid),
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


def _by_place(table: Sequence[PrometheusSeries], grid: TimeGrid) -> dict[Place, dict[int, float]]:
    """The largest value of each cell, by device and part."""
    found: dict[Place, dict[int, float]] = {}
    for one in table:
        place = device_of(one.labels)
        if place is not None:
            values = found.setdefault(place, {})
            for cell, value in one.cells(grid).items():
                values[cell] = max(value, values.get(cell, value))
    return found


def _tracks(
    table: Mapping[Place, Mapping[int, float]], places: Sequence[Place], grid: TimeGrid, times: int, most: float
) -> dict[int, FigureSeries]:
    """Figures as integers. A negative value is dropped; one above the possible maximum is limited to it."""
    return {
        number: FigureSeries(
            grid, {cell: round(min(value, most) * times) for cell, value in table[place].items() if value >= 0}
        )
        for number, place in enumerate(places)
        if place in table
    }


def _labelled(seen: Observed) -> dict[str, dict[tuple[int | None, PodName], set[int]]]:
    found: dict[str, dict[tuple[int | None, PodName], set[int]]] = {}
    tables = (seen.busy, seen.memory, seen.power)
    exporters = _namespace_of_exporters(one.labels for table in tables for one in table)
    for table in tables:
        for one in table:
            place, pod = device_of(one.labels), labelled_pod(one.labels, exporters)
            if place is not None and pod is not None:
                found.setdefault(place[0], {}).setdefault((place[1], pod), set()).update(one.cells(seen.grid))
    return found


def _node(about: Sequence[Labels], nodes_of: Mapping[PodName, str], listed: Mapping[str, object]) -> str:
    """The node of a device. This is a node name in the series that Kubernetes knows. Otherwise it is the node
    of most pods that the device was labelled with, including the exporter's own. Otherwise it is the first node name in
    the series."""
    votes: Counter[str] = Counter()
    for labels in about:
        for pod in (pod_of(labels), (labels.get("namespace", ""), labels.get("pod", ""))):
            if pod in nodes_of:
                votes[nodes_of[pod]] += 1
    carried = [
        as_name(labels[key].rpartition(":")[0] or labels[key])
        for labels in about
        for key in _NODE_LABELS
        if key in labels
    ]
    known = next((name for name in carried if name in listed), "")
    if known:
        return known
    if votes:
        return min(votes, key=lambda name: (-votes[name], name))
    return carried[0] if carried else ""


def assumed_devices(
    node: str, offered: Mapping[str, int], containers: Sequence[RequestingContainer], labels: Mapping[str, str]
) -> list[ExporterDevice]:
    """Devices for as many GPUs as a node offers, or was seen to need, if no exporter listed them. labels: the
    node's."""
    product = labels.get("label_nvidia_com_gpu_product", "")
    model, profile = as_name(gpu_model_of_node({"nvidia.com/gpu.product": product})), profile_of_product(product)
    each = _replicas(labels, WHOLE)
    needed = {one.resource: 0 for one in containers}
    for one in containers:
        needed[one.resource] = max(needed[one.resource], one.count)
    counts = {**needed, **offered}
    listed = sum(-(-count // each) for name, count in counts.items() if not name.startswith(MIG_RESOURCE))
    single, whole = (listed, 0) if profile else (0, listed)  # MIG strategy single: instances, each listed as a GPU
    made = [ExporterDevice(f"{MAKESHIFT}{node}/{number}", model, node, (number, "")) for number in range(whole)]
    instances = [
        name.removeprefix(MIG_RESOURCE)
        for name, count in sorted(counts.items())
        if name.startswith(MIG_RESOURCE)
        for _ in range(-(-count // _replicas(labels, name)))
    ]
    return [*made, *_partitioned(node, model, [*instances, *[profile] * single], whole)]


def _replicas(labels: Labels, name: str) -> int:
    """In how many replicas a node offers each device of a resource, by its label `RESOURCE.replicas`; 1 if unknown."""
    label = re.sub(r"[^a-zA-Z0-9_]", "_", f"label_{name.removesuffix('.shared')}.replicas")
    return whole_number(labels.get(label, "")) or 1


def _partitioned(node: str, model: str, profiles: Sequence[str], first: int) -> list[ExporterDevice]:
    read = [one for gi, profile in enumerate(profiles) if (one := mig_slice(profile, gi, model)) is not None]
    return [
        ExporterDevice(f"{MAKESHIFT}{node}/{first + number}", model, node, (first + number, ""), slices=tuple(parts))
        for number, parts in enumerate(pack_instances(read))
    ]
