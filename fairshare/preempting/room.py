"""Room on the nodes: what is free, and whether a gang's pods fit there. Pure.

Pods are placed largest first, each where it leaves the least over. A gang whose pods are not known yet only
needs as many GPUs as are free in all. What it must not do: guess where a scheduler will really put a pod.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import fsum

SLACK = 1e-9


class Room:
    """Free GPUs by node. Not made for threads."""

    def __init__(self, free: Mapping[str, float]) -> None:
        self._free = dict(free)

    def give(self, amounts: Mapping[str, float]) -> None:
        """Free GPUs on nodes; those of unknown nodes are of no use to anybody."""
        for node, amount in amounts.items():
            if node in self._free:
                self._free[node] += amount

    def free(self, nodes: Collection[str] | None = None) -> float:
        """GPUs free in all, on `nodes` (None: on every node). A node that holds more than it lists takes nothing from
        the others."""
        return _free(self._free[node] for node in self._usable(nodes))

    def place(self, sizes: Sequence[float], total: float, nodes: Collection[str] | None = None) -> bool:
        """Take room for pods of these sizes (none known: for `total` GPUs anywhere); False: they do not fit,
        and nothing is taken."""
        taken = self._found(sizes, total, nodes)
        if taken is None:
            return False
        self._free.update(taken)
        return True

    def _found(self, sizes: Sequence[float], total: float, nodes: Collection[str] | None) -> dict[str, float] | None:
        """What would be left on the nodes that were used. The order of the nodes decides nothing."""
        usable = self._usable(nodes)
        return self._fill(total, usable) if not sizes else fit(sizes, {node: self._free[node] for node in usable})

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

    def trial(self, sizes: Sequence[float], total: float, nodes: Collection[str] | None = None) -> Trial:
        """For asking again and again whether `place` would succeed, were this or that given."""
        return Trial({node: self._free[node] for node in self._usable(nodes)}, sizes, total)


class Trial:
    """Whether pods fit, while parts are given to the room by number and taken out again. The room stays as it is.

    It answers as `Room.place` does. Pods of one size, as in nearly every gang, are only counted: how many have a place
    on each node, of which a part changes few."""

    def __init__(self, free: dict[str, float], sizes: Sequence[float], total: float) -> None:
        """free: of the nodes that come into question. Changed in place."""
        self._free = free
        self._base = dict(free)
        self._sizes = sizes
        self._total = total
        self._size = sizes[0] if sizes and min(sizes) == max(sizes) else None
        self._places = sum(map(self._holds, free.values()))
        self._parts: dict[int, Mapping[str, float]] = {}
        self._unplaced: dict[int, float] = {}
        self._given: dict[str, dict[int, float]] = {}

    def give(self, number: int, amounts: Mapping[str, float], unplaced: float = 0.0) -> None:
        """amounts: by node; those of unknown nodes are of no use. unplaced: GPUs of which the node is not known."""
        self._parts[number] = amounts
        if unplaced:
            self._unplaced[number] = unplaced
        for node, amount in amounts.items():
            if node in self._free:
                self._given.setdefault(node, {})[number] = amount
                self._set(node, self._sum(node))

    def take_out(self, number: int) -> None:
        """As if it had never been given."""
        for node, amount in self._without(number).items():
            del self._given[node][number]
            self._set(node, amount)
        self._unplaced.pop(number, None)
        del self._parts[number]

    def fits(self, without: int | None = None) -> bool:
        """without: the number of a part that is left out."""
        fewer = self._without(without) if without is not None else {}
        unplaced = fsum(amount for number, amount in self._unplaced.items() if number != without)
        if unplaced and _free((self._free | fewer).values()) + unplaced >= self._total - SLACK:
            return True  # where it runs is not known: its scheduler counts in quota, not in nodes
        if not self._sizes:
            return _free((self._free | fewer).values()) >= self._total - SLACK
        if self._size is None:
            return fit(self._sizes, self._free | fewer) is not None
        lost = sum(self._holds(self._free[node]) - self._holds(amount) for node, amount in fewer.items())
        return self._places - lost >= len(self._sizes)

    def _without(self, number: int) -> dict[str, float]:
        """Free GPUs of the nodes on which this part lies, without it: added up anew, for fractions of a GPU."""
        return {node: self._sum(node, number) for node in self._parts[number] if node in self._free}

    def _sum(self, node: str, without: int | None = None) -> float:
        given = self._given[node].items()
        return fsum([self._base[node], *(amount for number, amount in given if number != without)])

    def _set(self, node: str, amount: float) -> None:
        self._places += self._holds(amount) - self._holds(self._free[node])
        self._free[node] = amount

    def _holds(self, amount: float) -> int:
        """Pods that have a place on a node with so much free."""
        return int((amount + SLACK) / self._size) if self._size is not None and amount > SLACK else 0


def _free(amounts: Iterable[float]) -> float:
    return fsum(amount for amount in amounts if amount > 0)


def fit(sizes: Sequence[float], amounts: Mapping[str, float]) -> dict[str, float] | None:
    """What is left on each node once pods of these sizes have their places; None: not all of them find one."""
    free = {node: amount for node, amount in amounts.items() if amount > SLACK}
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
