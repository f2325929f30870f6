"""What kube-state-metrics said of GPUs: which containers asked for how many of which node, and what nodes offer. Pure.

While nobody scraped, a pod that was there before and after was there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from accountant.importing.cells import bridged, runs
from accountant.importing.series import Labels, Observed, PodName, Series, of, pod_of, resource


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


def asked_for(seen: Observed) -> Asked:
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
