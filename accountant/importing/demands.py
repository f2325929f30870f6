"""Who asked for GPUs of which node, from when to when. Pure.

A pod holds its GPUs while its requests are listed with a node and its phase is not over. Listing is known to the
scrape: an instant that kube-state-metrics tells itself (start, completion) counts where it fits the listing, else the
middle of what is possible. While nobody scraped, a pod that was there before and after was there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accountant.importing.cells import bridged, runs
from accountant.importing.placing import Demand
from accountant.importing.series import Labels, Observed, PodName, Series, of, pod_of, resource
from agent.units import MS_PER_SECOND
from agent.wire import Holder

if TYPE_CHECKING:
    from accountant.importing.devices import Device


@dataclass(frozen=True, slots=True)
class Container:
    """A container that asked for `count` of a resource. runs: (first, last) cells in which it did; over: cells in which
    its pod was said to be over."""

    pod: PodName
    uid: str
    name: str
    node: str
    resource: str
    count: int
    runs: tuple[tuple[int, int], ...]
    over: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Known:
    """A pod as kube_pod_info has it."""

    uid: str
    node: str


@dataclass(frozen=True)
class Asked:
    """heard: cells in which kube-state-metrics was scraped; listed, unready: cells by node. offered: what each node can
    allocate. deaf: kube-state-metrics was never heard."""

    containers: tuple[Container, ...]
    pods: Mapping[PodName, Known]
    heard: frozenset[int]
    listed: Mapping[str, frozenset[int]]
    unready: Mapping[str, frozenset[int]]
    offered: Mapping[str, Mapping[str, int]]
    node_labels: Mapping[str, Labels]

    @property
    def deaf(self) -> bool:
        return not self.heard

    def labels_of(self, node: str) -> Labels:
        return self.node_labels.get(node, {})


def asked(seen: Observed) -> Asked:
    """Everything that kube-state-metrics says of GPUs."""
    nodes = _by_node(seen.nodes, seen)
    requests = [one for one in seen.requests if resource(of(one.labels, "resource"))]
    heard = {cell for cells in nodes.values() for cell in cells} | {
        cell for one in requests for cell in one.cells(seen.grid)
    }
    pods = {pod_of(labels): Known(of(labels, "uid"), of(labels, "node")) for labels in seen.pods}
    offered: dict[str, dict[str, int]] = {}
    for labels, value in seen.allocatable:
        name, node = resource(of(labels, "resource")), of(labels, "node")
        if name and node and value > 0:
            held = offered.setdefault(node, {})
            held[name] = max(held.get(name, 0), int(value))
    unready = {node: frozenset(cells) for node, cells in _by_node(seen.unready, seen).items()}
    silent = set(range(seen.grid.count)) - heard
    return Asked(
        containers=_containers(requests, seen, pods, silent),
        pods=pods,
        heard=frozenset(heard),
        listed={node: frozenset(cells) for node, cells in nodes.items()},
        unready=unready,
        offered=offered,
        node_labels={of(labels, "node"): labels for labels in seen.node_labels},
    )


def _by_node(table: Iterable[Series], seen: Observed) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for one in table:
        if node := of(one.labels, "node"):
            found.setdefault(node, set()).update(one.cells(seen.grid))
    return found


def _containers(
    requests: Iterable[Series], seen: Observed, pods: Mapping[PodName, Known], silent: set[int]
) -> tuple[Container, ...]:
    over: dict[tuple[PodName, str], set[int]] = {}
    for one in seen.over:
        over.setdefault((pod_of(one.labels), of(one.labels, "uid")), set()).update(one.cells(seen.grid))
    present: dict[tuple[PodName, str, str, str, str, str, int], set[int]] = {}
    for one in requests:
        pod, labels = pod_of(one.labels), one.labels
        known = pods.get(pod, Known("", ""))
        told = of(labels, "uid")
        node = of(labels, "node") or known.node
        if not node:
            continue  # it waits
        ended = over.get((pod, told), set())
        key = (pod, told or known.uid, told, of(labels, "container"), node, resource(of(labels, "resource")))
        for cell, value in one.cells(seen.grid).items():
            if value >= 1 and cell not in ended:
                present.setdefault((*key, int(value)), set()).add(cell)
    made = []
    for (pod, uid, told, name, node, kind, count), cells in sorted(present.items()):
        runs_of = tuple(runs(bridged(cells, silent)))
        at = frozenset(over.get((pod, told), ()))
        made.append(Container(pod, uid or makeshift_uid(pod), name, node, kind, count, runs_of, at))
    return tuple(made)


def makeshift_uid(pod: PodName) -> str:
    """Of a pod of which nobody told the uid."""
    return f"imported:{pod[0]}/{pod[1]}"


def of_requests(containers: Sequence[Container], devices: Sequence[Device], seen: Observed) -> list[Demand]:
    """Of one node, on the devices that were labelled with the pod."""
    starts = {(pod_of(labels), of(labels, "uid")): round(value * MS_PER_SECOND) for labels, value in seen.starts}
    ends = {(pod_of(labels), of(labels, "uid")): round(value * MS_PER_SECOND) for labels, value in seen.ends}
    on: dict[PodName, set[tuple[str, int]]] = {}
    for device in devices:
        for part, pod in device.labelled:
            on.setdefault(pod, set()).add((device.uuid, part))
    found = []
    for one in containers:
        holder = Holder("pod", one.uid, one.pod[0], one.pod[1], one.name)
        for first, last in one.runs:
            told = (_told(starts, one), _told(ends, one))
            start, end = _edges(first, last, seen, *told, over=last + 1 in one.over)
            if start < end:
                found.append(Demand(holder, one.resource, one.count, start, end, frozenset(on.get(one.pod, ()))))
    return found


def _told(instants: Mapping[tuple[PodName, str], int], one: Container) -> int | None:
    return instants.get((one.pod, one.uid), instants.get((one.pod, "")))


def _edges(
    first: int, last: int, seen: Observed, started: int | None, ended: int | None, *, over: bool = False
) -> tuple[int, int]:
    """When it began and ended, for the first and last cell in which it was listed. over: what ended it was a sample
    that said so, in the next cell.

    A sample at s counts for the instants from s to s + window. So the first sample lies in the first cell, the last
    one `window - step` before the last cell, and the pod lived half a scrape longer on both sides on average."""
    grid = seen.grid
    low, high = grid.span(first, last)
    margin = grid.step_ms + seen.scrape_ms
    start, end = low, high
    if first:
        start = low + (grid.step_ms - seen.scrape_ms) // 2
        if started is not None and low - margin <= started <= low + grid.step_ms:
            start = started
    if last < grid.count - 1:
        end = high + (grid.step_ms - seen.scrape_ms) // 2
        if not over:
            end += seen.scrape_ms - seen.window_ms
        if ended is not None and end - margin <= ended <= end + margin:
            end = ended
    return max(grid.start_ms, start), min(grid.end_ms, end)


def of_labels(devices: Sequence[Device], asked: Asked, seen: Observed) -> list[Demand]:
    """Where kube-state-metrics was never heard: a labelled device is held by the pod it is labelled with."""
    found = []
    for device in devices:
        for (part, pod), cells in sorted(device.labelled.items(), key=lambda one: one[0]):
            uid = asked.pods[pod].uid if pod in asked.pods else makeshift_uid(pod)
            holder = Holder("pod", uid, pod[0], pod[1])
            for first, last in runs(cells):
                start, end = _edges(first, last, seen, None, None)
                if start < end:
                    at = frozenset({(device.uuid, part)})
                    found.append(Demand(holder, labelled_pool(device.uuid, part), 1, start, end, at))
    return found


def labelled_pool(uuid: str, part: int) -> str:
    """The pool that one part of a device is, where labels alone tell."""
    return f"{uuid}/{part}"


def sharers(device: Device, part: int) -> int:
    """How many pods a part was labelled with at once, and not only while one followed another; at least 1."""
    of_pods = [cells for (number, _), cells in device.labelled.items() if number == part]
    together: dict[int, int] = {}
    for cells in of_pods:
        for cell in cells:
            if cell + 1 in cells:
                together[cell] = together.get(cell, 0) + 1
    return max(together.values(), default=1)
