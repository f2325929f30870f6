"""Defines the tree of quotas by which a target admits work: the quota that each node of it has left, and its maximum.

The rules are Kueue's. A node lends its subtree's quota up to its lending limit, and keeps the rest for itself; without
a limit it lends everything. It borrows quota that its siblings do not use, up to its borrowing limit. Work of a node
first uses the quota that the node keeps. What goes beyond it counts as use of its parent. The quotas of all resource
flavors are added up; whether a single flavor has room is not checked.

Source: kubernetes-sigs/kueue ff69552e79ad, pkg/cache/scheduler/resource_node.go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from fairshare.core.queues_and_weights import UNLIMITED, Quota


class Quotas:
    """Quotas and their use, which `book` changes. Not thread-safe."""

    def __init__(self, nodes: Mapping[str, Quota]) -> None:
        """A parent that is not among the nodes is a root without quota; the nodes of a cycle are unknown."""
        known = dict(nodes)
        for node in nodes.values():
            if node.parent:
                known.setdefault(node.parent, Quota("", 0.0))
        self._nodes = {name: node for name, node in known.items() if _has_root(name, known)}
        self._children: dict[str, list[str]] = {}
        for name, node in sorted(self._nodes.items()):
            if node.parent:
                self._children.setdefault(node.parent, []).append(name)
        self._subtree: dict[str, float] = {}
        self._used: dict[str, float] = {}
        for name, node in self._nodes.items():
            if not node.parent:
                self._add_up(name)

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def copy(self) -> Quotas:
        """Return a copy that can be changed independently."""
        other = object.__new__(Quotas)
        other._nodes, other._children, other._subtree = self._nodes, self._children, self._subtree
        other._used = dict(self._used)
        return other

    def root(self, name: str) -> str:
        """Return the root of the node's tree; its own name if it is unknown."""
        while (node := self._nodes.get(name)) is not None and node.parent:
            name = node.parent
        return name

    def total(self, name: str) -> float:
        """Return the quota of the node and of all nodes below it, lent or not."""
        return self._nodes[name].nominal + sum(self.total(child) for child in self._children.get(name, ()))

    def most(self, name: str) -> float:
        """Return what the node could use if no other node used anything; infinite if it is unknown."""
        node = self._nodes.get(name)
        if node is None:
            return inf
        if not node.parent:
            return self._subtree[name]
        reach = self._kept(name) + self.most(node.parent)
        return reach if node.borrows == UNLIMITED else min(reach, self._subtree[name] + node.borrows)

    def free(self, name: str) -> float:
        """Return what the node can use in addition to present use; infinite if it is unknown, < 0 if too much
        is used."""
        node = self._nodes.get(name)
        if node is None:
            return inf
        if not node.parent:
            return self._subtree[name] - self._used[name]
        kept, used = self._kept(name), self._used[name]
        above = self.free(node.parent)
        if node.borrows != UNLIMITED:
            above = min(above, self._subtree[name] - kept - max(0.0, used - kept) + node.borrows)
        return max(0.0, kept - used) + above

    def book(self, name: str, gpus: float) -> None:
        """Record that work of the node takes GPUs, or releases them (< 0)."""
        while (node := self._nodes.get(name)) is not None and gpus:
            kept, before = self._kept(name), self._used[name]
            self._used[name] = before + gpus
            gpus = max(0.0, before + gpus - kept) - max(0.0, before - kept)
            name = node.parent

    def _add_up(self, name: str) -> None:
        node = self._nodes[name]
        subtree, used = node.nominal, node.used
        for child in self._children.get(name, ()):
            self._add_up(child)
            kept = self._kept(child)
            subtree += self._subtree[child] - kept
            used += max(0.0, self._used[child] - kept)
        self._subtree[name], self._used[name] = subtree, used

    def _kept(self, name: str) -> float:
        """Return the quota that the node keeps for itself, because its lending limit excludes it."""
        lends = self._nodes[name].lends
        return 0.0 if lends == UNLIMITED else max(0.0, self._subtree[name] - lends)


def capacity(quotas: Quotas, names: Iterable[str]) -> float | None:
    """Return the total quota, in GPUs, of the trees to which these nodes belong; None if one of the nodes is
    unknown."""
    nodes = list(names)
    if not nodes or not all(name in quotas for name in nodes):
        return None
    return sum(quotas.total(root) for root in sorted({quotas.root(name) for name in nodes}))


def _has_root(name: str, nodes: Mapping[str, Quota]) -> bool:
    seen: set[str] = set()
    while name not in seen:
        seen.add(name)
        parent = nodes[name].parent
        if not parent:
            return True
        name = parent
    return False
