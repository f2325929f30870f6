"""Room on the nodes: what is free, and whether a gang's pods fit there. Pure.

Pods are placed largest first, each where it leaves the least over. A gang whose pods are not known yet only
needs as many GPUs as are free in all. What it must not do: guess where a scheduler will really put a pod.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import fsum

SLACK = 1e-9


class Room:
    """Free GPUs by node, with a copy's own changes. Not made for threads."""

    def __init__(self, free: Mapping[str, float]) -> None:
        self._free = dict(free)

    def copy(self) -> Room:
        return Room(self._free)

    def give(self, amounts: Mapping[str, float]) -> None:
        """Free GPUs on nodes; those of unknown nodes are of no use to anybody."""
        for node, amount in amounts.items():
            if node in self._free:
                self._free[node] += amount

    def free(self, nodes: Collection[str] | None = None) -> float:
        """GPUs free in all, on `nodes` (None: on every node)."""
        return fsum(self._free[node] for node in self._usable(nodes))

    def place(self, sizes: Sequence[float], total: float, nodes: Collection[str] | None = None) -> bool:
        """Take room for pods of these sizes (none known: for `total` GPUs anywhere); False: they do not fit,
        and nothing is taken."""
        taken = self._found(sizes, total, nodes)
        if taken is None:
            return False
        self._free.update(taken)
        return True

    def fits(self, sizes: Sequence[float], total: float, nodes: Collection[str] | None = None) -> bool:
        """Whether `place` would succeed."""
        return self._found(sizes, total, nodes) is not None

    def _found(self, sizes: Sequence[float], total: float, nodes: Collection[str] | None) -> dict[str, float] | None:
        """What would be left on the nodes that were used. The order of the nodes decides nothing."""
        usable = self._usable(nodes)
        return self._fill(total, usable) if not sizes else self._fit(sizes, usable)

    def _usable(self, nodes: Collection[str] | None) -> Collection[str]:
        return self._free.keys() if nodes is None else [node for node in nodes if node in self._free]

    def _fill(self, total: float, nodes: Collection[str]) -> dict[str, float] | None:
        """The emptiest nodes last, so that whole nodes stay whole."""
        left, taken = total, {}
        for node in sorted(nodes, key=lambda node: (self._free[node], node)):
            if left <= SLACK:
                break
            part = min(left, max(0.0, self._free[node]))
            taken[node] = self._free[node] - part
            left -= part
        return taken if left <= SLACK else None

    def _fit(self, sizes: Sequence[float], nodes: Collection[str]) -> dict[str, float] | None:
        free = {node: self._free[node] for node in nodes if self._free[node] > SLACK}
        if fsum(sizes) > fsum(free.values()) + SLACK:
            return None
        for size in sorted(sizes, reverse=True):
            best = min(
                (node for node, amount in free.items() if amount >= size - SLACK),
                key=lambda node: (free[node], node),
                default=None,
            )
            if best is None:
                return None
            free[best] -= size
        return free
