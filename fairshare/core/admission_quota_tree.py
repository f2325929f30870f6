"""Computes how many GPUs each node of a target's quota tree can still use, and how many it can use at most.

The rules are Kueue's. A node lends its subtree's quota up to its lending limit, and keeps the rest for itself; without
a limit it lends everything. It borrows quota that its siblings do not use, up to its borrowing limit. Work of a node
first uses the quota that the node keeps. Use beyond that quota counts as use of the parent. Each resource of each
flavor has nodes and trees of its own, because no quota of one flavor serves another.

Source: kubernetes-sigs/kueue ff69552e79ad, pkg/cache/scheduler/resource_node.go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from math import inf

from fairshare.core.queues_and_weights import UNLIMITED, Quota


class QuotaTree:
    """Quotas and their use, which `add_use` changes. Not thread-safe."""

    def __init__(self, nodes: Mapping[str, Quota]) -> None:
        """nodes: by name. A parent that is not among them is a root without quota. Nodes without a
        root, because their parents form a cycle, are unknown."""
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

    def copy(self) -> QuotaTree:
        """Return a copy that can be changed independently."""
        other = copy(self)
        other._used = dict(self._used)
        return other

    def root(self, name: str) -> str:
        """Return the root of the node's tree, or the node's own name if the node is unknown."""
        while (node := self._nodes.get(name)) is not None and node.parent:
            name = node.parent
        return name

    def subtree_quota(self, name: str) -> float:
        """Return the quota of the node and of all nodes below it, lent or not."""
        return self._nodes[name].nominal + sum(self.subtree_quota(child) for child in self._children.get(name, ()))

    def maximum(self, name: str) -> float:
        """Return the GPUs that the node could use if no other node used any; infinite for an unknown node."""
        node = self._nodes.get(name)
        if node is None:
            return inf
        if not node.parent:
            return self._subtree[name]
        reach = self._not_lent(name) + self.maximum(node.parent)
        return reach if node.borrows == UNLIMITED else min(reach, self._subtree[name] + node.borrows)

    def free(self, name: str) -> float:
        """Return the GPUs that the node can use in addition to its present use.

        The result is infinite for an unknown node, and negative for a node that uses more than it may."""
        node = self._nodes.get(name)
        if node is None:
            return inf
        if not node.parent:
            return self._subtree[name] - self._used[name]
        not_lent, used = self._not_lent(name), self._used[name]
        from_parent = self.free(node.parent)
        if node.borrows != UNLIMITED:
            from_parent = min(from_parent, self._subtree[name] - not_lent - max(0.0, used - not_lent) + node.borrows)
        return max(0.0, not_lent - used) + from_parent

    def add_use(self, name: str, gpus: float) -> None:
        """Record that work of the node takes this many GPUs; a negative number releases them."""
        while (node := self._nodes.get(name)) is not None and gpus:
            not_lent, before = self._not_lent(name), self._used[name]
            self._used[name] = before + gpus
            gpus = max(0.0, before + gpus - not_lent) - max(0.0, before - not_lent)
            name = node.parent

    def _add_up(self, name: str) -> None:
        """Compute quota and use of the node's subtree."""
        node = self._nodes[name]
        subtree, used = node.nominal, node.used
        for child in self._children.get(name, ()):
            self._add_up(child)
            not_lent = self._not_lent(child)
            subtree += self._subtree[child] - not_lent
            used += max(0.0, self._used[child] - not_lent)
        self._subtree[name], self._used[name] = subtree, used

    def _not_lent(self, name: str) -> float:
        """Return the quota that the node keeps for itself, because its lending limit excludes it."""
        lends = self._nodes[name].lends
        return 0.0 if lends == UNLIMITED else max(0.0, self._subtree[name] - lends)


def total_quota(quotas: QuotaTree, names: Iterable[str]) -> float | None:
    """Return the GPUs in the trees of all these nodes together; None without nodes, or if one of them is unknown."""
    nodes = list(names)
    if not nodes or not all(name in quotas for name in nodes):
        return None
    return sum(quotas.subtree_quota(root) for root in sorted({quotas.root(name) for name in nodes}))


def _has_root(name: str, nodes: Mapping[str, Quota]) -> bool:
    """Return whether the node's parents lead to a root, not into a cycle."""
    visited: set[str] = set()
    while name not in visited:
        visited.add(name)
        parent = nodes[name].parent
        if not parent:
            return True
        name = parent
    return False
