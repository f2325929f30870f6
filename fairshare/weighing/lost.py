"""GPUs that the ledger knows to be lost on nodes that serve: capacity of nobody, as in the books.

A node lists a lost GPU as allocatable until its device plugin notices. The ledger has the agent's own word: a
GPU counts as lost when it was so, on a node in service, for the whole of the last quarter of an hour that is
metered. Invariants: capacity only shrinks, by no more than a node lists, and never for a GPU that the node (or a
node out of service) has left out itself. What the accountant does not say changes nothing.

A node is shown to the rest of the cycle as if it had stopped listing the GPU, so that shares, room for
preemption and the extender's answers agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

from accountant.wire import UsageWindow
from agent.units import BUCKET_MS
from fairshare.errors import AccountantUnavailable
from fairshare.kube.fields import look
from fairshare.kube.kinds import Object
from fairshare.kube.quantities import gpus, quantity
from fairshare.kube.replicas import devices
from fairshare.weighing.gates import gpus_of_nodes, gpus_of_window

Ask = Callable[[int, int], Mapping[str, int]]
"""Lost GPUs by node over a span of UTC milliseconds: `fairshare.kube.ports.AccountantPort.lost_gpus`."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Nodes that may be given work, listing only what works. lost: GPUs that were left out, by node; only nodes
    that listed them."""

    nodes: tuple[Object, ...] = ()
    lost: Mapping[str, float] = field(default_factory=dict)

    def capacity(self, window: UsageWindow) -> float:
        """GPUs to divide: the nodes' own, or where none ever listed any the window's average; 0 where unknown."""
        listed = gpus_of_nodes(self.nodes)
        return listed if listed > 0 or self.lost else gpus_of_window(window) or 0.0

    @property
    def devices(self) -> float | None:
        """Physical GPUs behind the capacity; None where the nodes list none."""
        return fsum(map(devices, self.nodes)) or None


def quarter(window: UsageWindow, now_ms: int) -> tuple[int, int] | None:
    """The last whole quarter of an hour that the ledger has settled; None where it has none."""
    if window.watermark_ms is None:
        return None
    end_ms = min(window.watermark_ms, now_ms) // BUCKET_MS * BUCKET_MS
    return end_ms - BUCKET_MS, end_ms


def none_lost(window: UsageWindow, start_ms: int, end_ms: int) -> bool:
    """Whether the window itself tells that no GPU was lost in [start_ms, end_ms), as nearly always."""
    covered = window.start_ms <= start_ms and end_ms <= window.end_ms
    return covered and window.lost_ms is not None and window.lost_ms <= start_ms


def leave_out(nodes: Sequence[Object], lost: Mapping[str, int]) -> Serving:
    """The nodes without their lost GPUs. lost: by name of the node.

    A node with `capacity` c that lists a as allocatable and has lost n keeps min(a, c - n): what its device
    plugin took out already is not taken out twice. A lost GPU takes all its replicas along."""
    shown: list[Object] = []
    out: dict[str, float] = {}
    for node in nodes:
        name = str(look(node, ("metadata", "name")))
        resources = look(node, ("status", "allocatable"))
        listed = gpus(resources)
        each = listed / devices(node) if listed > 0 else 1.0
        most = max(listed, gpus(look(node, ("status", "capacity"))))
        left = min(listed, max(0.0, most - lost.get(name, 0) * each))
        if left >= listed:
            shown.append(node)
            continue
        out[name] = listed - left
        fewer = {
            key: (quantity(text) or 0.0) * left / listed if gpus({key: text}) > 0 else text
            for key, text in resources.items()
        }
        shown.append({**node, "status": {**node["status"], "allocatable": fewer}})
    return Serving(tuple(shown), out)


class LostGpus:
    """Asks the accountant, once for each state of its records in which any GPU is lost. Belongs to one controller; not
    made for threads."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._asked: tuple[int, int] | None = None
        self._found: Mapping[str, int] = {}

    def serving(self, nodes: Sequence[Object], window: UsageWindow | None, now_ms: int) -> Serving:
        """window: one that is good enough to act on; None: nothing is known."""
        span = quarter(window, now_ms) if window is not None else None
        if window is None or window.watermark_ms is None or span is None:
            return Serving(tuple(nodes))
        state = (window.watermark_ms, span[1])
        if self._asked != state:
            try:
                self._found = {} if none_lost(window, *span) else self._ask(*span)
            except AccountantUnavailable:
                return Serving(tuple(nodes))
            self._asked = state
        return leave_out(nodes, self._found)
